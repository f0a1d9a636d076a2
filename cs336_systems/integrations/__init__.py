"""This package's attention inside other libraries.

A module imports its library when its functions are called, not before.
"""
