"""Our attention inside other libraries. Each module needs its library only when its functions are
called.
"""
