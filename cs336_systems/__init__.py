"""Reference implementation and lab for the systems half of building language models.

The course is Stanford CS336, assignment 2. Importing the package has no effects: no device is
probed and Triton is not loaded. Start with `from cs336_systems.attention import flash_attention`,
or with `cs336-systems list` on the command line.
"""

__version__ = "0.2.0"
