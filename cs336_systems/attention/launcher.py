"""Launches that cost the host one call of the CUDA driver.

    kernel = LaunchableKernel(compiled)                     # what Triton compiled
    launch = kernel.bind((132, 1, 1), arguments, stream)    # lays the parameters out, once for the same addresses
    launch()

Triton's own launch goes through every argument in Python each time, and has the driver encode each TMA descriptor anew:
tens of microseconds, which a short call of attention waits for. Here the parameter block is built once, for the
addresses and numbers that it holds, and kept by the caller; a launch hands it to `cuLaunchKernelEx`. The block's layout
is what the kernel's PTX declares: a kernel that declares anything unexpected is not launchable this way.
"""

from __future__ import annotations

import ctypes
import re
from functools import cache
from typing import Any

TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGNMENT = 64
# cuda.h: CUtensorMapInterleave NONE, CUtensorMapL2promotion 128B, CUtensorMapFloatOOBfill NONE
NO_INTERLEAVE, PROMOTE_128_BYTES, FILL_ZEROS = 0, 2, 0
# Triton's numbers of element types are the driver's but for three: float64, float32 and bfloat16 stand elsewhere.
ELEMENT_TYPES = {8: 10, 9: 8, 10: 9}
ENTRY = re.compile(r"\.entry\s+\w+\(([^)]*)\)")
PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\b[^,\[]*(\[\d+\])?")
C_TYPES: dict[str, Any] = {"u64": ctypes.c_uint64, "u32": ctypes.c_uint32, "f32": ctypes.c_float}


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = [
        ("grid_x", ctypes.c_uint), ("grid_y", ctypes.c_uint), ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint), ("block_y", ctypes.c_uint), ("block_z", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint), ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p), ("num_attributes", ctypes.c_uint),
    ]  # fmt: skip


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
