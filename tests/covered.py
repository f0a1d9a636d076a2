"""What several modules of GPU tests cover, as their COVERS: the PTX of kernels, and files relative
to the repository.

Of kernels the PTX counts (ptx.py) and not their sources. The code that calls them is tested in the
interpreter; what only a GPU can show is how launches are made and replayed, and PyTorch's own
operations.
"""

FOLDER = "cs336_systems/attention"
HOPPER = "ptx:hopper"  # kernels of their own, with tests of their own
LAUNCHES = (f"{FOLDER}/native", f"{FOLDER}/replay.py", f"{FOLDER}/triton/launch.py")
# The whole way of a call that is replayed: which launch is recorded, and what a later call gives
# it.
REPLAY = (*LAUNCHES, f"{FOLDER}/api.py", f"{FOLDER}/call.py", f"{FOLDER}/rule.py")
STAGES = tuple(f"{FOLDER}/{stage}.py" for stage in ("reference", "compiled", "tiled"))

TRITON = ("ptx:triton", *LAUNCHES)  # and the oracle, which is plain PyTorch
# Attention but for the Hopper kernels: no other back end runs them, so its tests need no GPU again
# when they change.
ATTENTION = (*TRITON, *STAGES)
# What the Hopper kernels run: themselves, and Triton's, whose backward is the one of short
# documents.
HOPPER_ATTENTION = (*TRITON, HOPPER)
