"""Measurement: timing, memory, profiles and named ranges of closures and models."""
