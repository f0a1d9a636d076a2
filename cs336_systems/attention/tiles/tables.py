"""The tile tables, one per architecture. People edit them; nothing writes them and nothing tunes at run time.

A row is keyed by (kernel, bytes per element, head tile) and reads `<query tile>x<key tile>_w<warps>_s<stages>`.
What bounds a row:
  - 16-bit tiles on sm_90 stay at 64 rows or more: triton 3.6 can miscompile kernels with two dots at 16 or 32.
  - float32 dots are IEEE, on the FMA units, with operands unrolled into registers: larger tiles spill by the kilobyte.
  - a streaming multiprocessor has 227 KiB of shared memory on sm_90 and sm_100, 163 KiB on sm_80, 99 on sm_86 and 89.
"""

from __future__ import annotations

from cs336_systems.attention.tiles.config import KernelConfig

Row = tuple[str, int, int]
# Where and when the rows of a table were run; no other table has been near its GPU yet.
MEASURED = {"sm90": "NVIDIA H200, triton 3.6.0, 2026-11-21"}
SHARED_MEMORY_LIMIT_BYTES = {
    "sm80": 163 * 1024,
    "sm86": 99 * 1024,
    "sm89": 99 * 1024,
    "sm90": 227 * 1024,
    "sm100": 227 * 1024,
    "portable": 99 * 1024,
}


def _table(target: str, rows: dict[Row, str]) -> dict[Row, KernelConfig]:
    return {row: KernelConfig.from_name(f"{target}_{row[0]}_{tiles}") for row, tiles in rows.items()}


# sm_90: registers and spills read from triton 3.6.0's compiler, offline. 0 bytes spilled but for dkdv: in 16 bit at
# head tile 128 (100 when causal) and 256 (524), in float32 at 128 (about 350).
_SM90: dict[Row, str] = {
    ("forward", 2, 64): "128x64_w8_s3",
    ("forward", 2, 128): "128x64_w8_s3",
    ("forward", 2, 256): "128x64_w8_s2",
    ("dkdv", 2, 64): "64x128_w8_s2",
    ("dkdv", 2, 128): "64x128_w8_s2",
    ("dkdv", 2, 256): "64x64_w8_s2",
    ("dq", 2, 64): "128x64_w8_s3",
    ("dq", 2, 128): "128x64_w8_s3",
    ("dq", 2, 256): "64x64_w8_s2",
    ("forward", 4, 64): "64x32_w8_s1",
    ("forward", 4, 128): "32x64_w8_s1",
    ("forward", 4, 256): "32x32_w8_s1",
    ("dkdv", 4, 64): "32x32_w8_s1",
    ("dkdv", 4, 128): "32x32_w8_s1",
    ("dkdv", 4, 256): "32x32_w8_s1",
    ("dq", 4, 64): "64x32_w8_s1",
    ("dq", 4, 128): "32x64_w8_s1",
    ("dq", 4, 256): "32x32_w8_s1",
}

# sm_80, not measured: the sm_90 rows where they fit 163 KiB, shallower pipelines elsewhere.
_SM80: dict[Row, str] = _SM90 | {
    ("forward", 2, 256): "64x64_w4_s2",
    ("dkdv", 2, 128): "64x64_w8_s2",
    ("dkdv", 2, 256): "64x64_w8_s1",
    ("dq", 2, 64): "128x64_w8_s2",
    ("dq", 2, 128): "64x64_w4_s2",
    ("dq", 2, 256): "64x64_w8_s1",
}

# sm_86 and sm_89, not measured: everything within 99 KiB.
_SMALL: dict[Row, str] = _SM90 | {
    ("forward", 2, 64): "128x64_w4_s2",
    ("forward", 2, 128): "64x64_w4_s2",
    ("forward", 2, 256): "64x32_w4_s1",
    ("dkdv", 2, 64): "64x64_w4_s2",
    ("dkdv", 2, 128): "64x64_w8_s1",
    ("dkdv", 2, 256): "32x32_w4_s1",
    ("dq", 2, 64): "64x64_w4_s2",
    ("dq", 2, 128): "64x64_w8_s1",
    ("dq", 2, 256): "32x32_w4_s1",
    ("dkdv", 4, 256): "16x32_w8_s1",
    ("dq", 4, 128): "32x32_w8_s1",
    ("dq", 4, 256): "32x16_w8_s1",
}

# The interpreter's table, and that of GPUs without one. Its float32 matmuls are NumPy's, whose rounding depends on the
# shape: equal tiles give forward and backward the same scores, as one order of additions does on a GPU.
_PORTABLE: dict[Row, str] = _SMALL | {
    ("forward", 4, 64): "64x64_w8_s1",
    ("dkdv", 4, 64): "64x64_w8_s1",
    ("dq", 4, 64): "64x64_w8_s1",
}

TABLES: dict[str, dict[Row, KernelConfig]] = {
    "sm80": _table("sm80", _SM80),
    "sm86": _table("sm86", _SMALL),
    "sm89": _table("sm89", _SMALL),
    "sm90": _table("sm90", _SM90),
    "sm100": _table("sm100", _SM90),
    "portable": _table("portable", _PORTABLE),
}
