"""The tests of `cs336_systems`; a package, so that test modules can import `.adapters` as the
course's do.
"""
