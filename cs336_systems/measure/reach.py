"""Rates that a machine really reaches: memory bandwidth by a copy, matmul speed by one product.

    copy_rate("cuda")["median"]        # GB/s, bytes read and written
    matmul_rate("cuda")["median"]      # TFLOP/s in bfloat16

Upper bounds by measurement, to set beside the vendor's sheet (`device.PEAKS`) and the kernels'
rates.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from cs336_systems.measure.timing import time_calls

COPY_BYTES = {"cuda": 2**30, "cpu": 2**28}  # of one side of the copy: far more than any cache
MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}  # rows, columns and inner dimension


def copy_rate(device: str) -> dict[str, Any]:
    """Return the rate in GB/s (10⁹ bytes) of copying one tensor to another on `device`.

    Each byte is counted twice, as read and as written. The fields are those of `_rate`.
    """
    source = torch.ones(COPY_BYTES[device] // 4, device=device)
    target = torch.empty_like(source)
    return _rate(lambda: target.copy_(source), 2 * source.nbytes / 1e9, device, "GB/s")


def matmul_rate(device: str) -> dict[str, Any]:
    """Return the rate in TFLOP/s of one square matmul in bfloat16, 2·size³ FLOPs.

    The fields are those of `_rate`.
    """
    size = MATMUL_SIZE[device]
    left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    result = torch.empty_like(left)
    return _rate(lambda: torch.mm(left, right, out=result), 2 * size**3 / 1e12, device, "TFLOP/s")


def _rate(call: Callable[[], object], work: float, device: str, unit: str) -> dict[str, Any]:
    """Return median, quartiles and unit of `work` per second over timed calls.

    `work` of one call is in 10⁹ bytes or 10¹² FLOPs.
    """
    rates = [work / ms * 1e3 for ms in time_calls(call, device=device)]
    low, middle, high = map(float, np.quantile(rates, (0.25, 0.5, 0.75)))
    return {"median": middle, "quartile_low": low, "quartile_high": high, "unit": unit}
