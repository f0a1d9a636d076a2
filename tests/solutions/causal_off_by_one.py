"""Wrong: under the causal mask a query sees one key too many, in PyTorch's forward and in both
backwards.
"""

import minimal
from minimal import *  # noqa: F403

right = minimal.hidden
minimal.hidden = lambda first, last, *keys: right(first + 1, last + 1, *keys)
