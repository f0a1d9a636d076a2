"""`python -m cs336_systems.attention.native` builds the plug-in, once a machine."""

import sys

from cs336_systems.attention.native import build

try:
    print(f"attention calls on a GPU are replayed without Python from now on: {build()}")
except RuntimeError as error:
    sys.exit(f"error: {error}")
