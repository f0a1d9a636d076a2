"""For those who learn to write kernels: `examples` to look at, and the checks of `puzzles`.

    cs336-systems trace cs336_systems.learning.examples:flash_forward

The puzzles themselves are in notebooks/s1_triton.py.
"""
