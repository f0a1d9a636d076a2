"""Which tiles a kernel uses: tables, one per architecture, `select_config`, which reads a row, and
`part_size`.

    select_config("forward", capability=(9, 0), head_dim=64, batch=1, heads=8, seqlen_q=4096, ...)   # a KernelConfig
    part_size(config, ...)              # keys of each part where a forward splits them, else 0

People edit the tables; nothing writes them and nothing tunes at run time.

A row is keyed by (kernel, bytes per element, head tile) and reads
`<query tile>x<key tile>_w<warps>_s<stages>`, with `_tma` behind it where Hopper's copy engine reads
the tiles, which not every input allows (`triton/launch.py`), and `_tf32x3` where float32 dots run
as three on the tensor cores. A row may begin with exceptions, the first that
holds being taken, and ends with what holds elsewhere:

    ("forward", 2, 64): (Only("64x64_w4_s3", max_programs=131), "128x64_w8_s3"),

What bounds a row:
  - 16-bit tiles on sm_90 stay at 64 rows or more: triton 3.6 can miscompile kernels with two dots
    at 16 or 32.
  - The kernels of a call round their scores alike: float32 rows of one head tile have one
    precision.
  - IEEE float32 dots run on the FMA units, with operands unrolled into registers: larger tiles
    spill by the kilobyte.
  - a streaming multiprocessor has 227 KiB of shared memory on sm_90 and sm_100, 163 KiB on sm_80,
    99 on sm_86 and 89.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache, lru_cache

from cs336_systems.attention.tiles.kernel_config import (
    KERNELS,
    MAX_HEAD_DIM,
    KernelConfig,
    head_tile,
)
from cs336_systems.config import BYTES_PER_ELEMENT

Key = tuple[str, int, int]  # kernel, bytes per element, head tile


@dataclass(frozen=True)
class Only:
    """An entry of a row: `tiles` where all that is given holds."""

    tiles: str
    is_causal: bool | None = None
    tma: bool | None = None  # whether Hopper's copy engine can read the inputs
    max_queries: int | None = None  # seqlen_q is at most this
    # the row's last entry would launch at most so many: less than the GPU has room for
    max_programs: int | None = None


@dataclass(frozen=True)
class Row:
    """The configurations of one kernel for one width of element and head; the last one holds
    everywhere.
    """

    configs: tuple[KernelConfig, ...]
    conditions: tuple[Only, ...]

    def choose(
        self, *, batch: int, heads: int, seqlen_q: int, seqlen_k: int, is_causal: bool, tma: bool
    ) -> KernelConfig:
        """The configuration for a shape: the first whose condition holds."""
        num_programs = self.configs[-1].num_programs(
            batch=batch, heads=heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k
        )
        return next(
            config
            for config, only in zip(self.configs, self.conditions)
            if only.is_causal in (None, is_causal)
            and only.tma in (None, tma)
            and (only.max_queries is None or seqlen_q <= only.max_queries)
            and (only.max_programs is None or num_programs <= only.max_programs)
        )


SHARED_MEMORY_LIMIT_BYTES = {
    "sm80": 163 * 1024,
    "sm86": 99 * 1024,
    "sm89": 99 * 1024,
    "sm90": 227 * 1024,
    "sm100": 227 * 1024,
    "portable": 99 * 1024,
}


# a row as it is written below: exceptions, and last what holds elsewhere
Spelled = str | tuple[Only | str, ...]


def make_table(target: str, rows: dict[Key, Spelled]) -> dict[Key, Row]:
    """The rows of `target`, parsed."""
    table = {}
    for key, spelled in rows.items():
        *exceptions, last = (spelled,) if isinstance(spelled, str) else spelled
        conditions = (*(entry for entry in exceptions if isinstance(entry, Only)), Only(str(last)))
        assert isinstance(last, str) and len(conditions) == len(exceptions) + 1, (
            f"{key}: exceptions, then all else"
        )
        configs = tuple(
            KernelConfig.from_name(f"{target}_{key[0]}_{only.tiles}") for only in conditions
        )
        table[key] = Row(configs, conditions)
    return table


# sm_90 (H100, H200), measured on an NVIDIA H200, triton 3.6.0, 2026-11-22.
# In 16 bit programs of one warp group, 4 warps, win everywhere but in dq: several of them share a
# streaming multiprocessor, and one's softmax overlaps another's matmuls. Inputs that TMA cannot
# read take the best rows without it. At head dim 128 a grid that leaves multiprocessors idle takes
# smaller tiles, of which there are twice as many, and a causal forward also where all run at once,
# two on each of 132: the longest ends the launch. dK/dV by pointers takes them only where all fit
# at once, one on each of 132: on larger grids they are the slowest of four. In float32 three TF32
# products on the tensor cores meet the contract, faster than the FMA units.
_SM90: dict[Key, Spelled] = {
    ("forward", 2, 64): (Only("64x128_w4_s2_tma", tma=True), "64x64_w4_s3"),
    ("forward", 2, 128): (
        Only("64x64_w4_s3_tma", tma=True, is_causal=True, max_programs=264),
        Only("64x64_w4_s3_tma", tma=True, max_queries=64),
        Only("64x64_w4_s3", max_queries=64),
        Only("64x64_w4_s3_tma", tma=True, max_programs=131),
        Only("64x64_w4_s3", max_programs=131),
        Only("128x64_w4_s2_tma", tma=True),
        "128x64_w8_s3",
    ),
    ("forward", 2, 256): "128x64_w8_s2",
    ("dkdv", 2, 64): (Only("64x64_w4_s3_tma", tma=True), "64x128_w8_s3"),
    ("dkdv", 2, 128): (
        Only("64x64_w4_s2_tma", tma=True),
        Only("64x64_w4_s3", max_programs=66),
        "64x128_w8_s3",
    ),
    ("dkdv", 2, 256): "64x64_w8_s2",
    ("dq", 2, 64): (Only("128x64_w8_s3_tma", tma=True), "64x64_w4_s2"),
    ("dq", 2, 128): (
        Only("64x64_w4_s3_tma", tma=True, max_programs=131),
        Only("64x64_w4_s3", max_programs=131),
        Only("128x64_w8_s3_tma", tma=True),
        "128x64_w8_s3",
    ),
    ("dq", 2, 256): "64x64_w8_s2",
    ("forward", 4, 64): "64x64_w4_s1_tf32x3",
    ("forward", 4, 128): "128x64_w8_s1_tf32x3",
    ("forward", 4, 256): "32x32_w8_s1",
    ("dkdv", 4, 64): "64x32_w4_s1_tf32x3",
    ("dkdv", 4, 128): "32x32_w4_s1_tf32x3",
    ("dkdv", 4, 256): "32x32_w8_s1",
    ("dq", 4, 64): "32x64_w4_s2_tf32x3",
    ("dq", 4, 128): "32x32_w4_s2_tf32x3",
    ("dq", 4, 256): "32x32_w8_s1",
}

# The tables below are not measured. Their rows were compiled offline, with triton 3.6.0: causal and
# not, they fit their GPU's shared memory, and those of 16 bits spill nothing
# (`cs336-systems doctor --kernels --arch sm80` shows it).

# float32 on the FMA units.
_IEEE: dict[Key, Spelled] = {
    ("forward", 4, 64): "64x32_w8_s1",
    ("forward", 4, 128): "32x64_w8_s1",
    ("forward", 4, 256): "32x32_w8_s1",
    ("dkdv", 4, 64): "32x32_w8_s1",
    ("dkdv", 4, 128): "16x32_w8_s1",
    ("dkdv", 4, 256): "16x32_w8_s1",
    ("dq", 4, 64): "64x32_w8_s1",
    ("dq", 4, 128): "32x64_w8_s1",
    ("dq", 4, 256): "32x32_w8_s1",
}

_SM80: dict[Key, Spelled] = {
    ("forward", 2, 64): "128x64_w8_s3",
    ("forward", 2, 128): "128x64_w8_s3",
    ("forward", 2, 256): "64x64_w8_s2",
    ("dkdv", 2, 64): "64x128_w8_s3",
    ("dkdv", 2, 128): "64x64_w8_s2",
    ("dkdv", 2, 256): "32x64_w8_s2",
    ("dq", 2, 64): "128x64_w8_s2",
    ("dq", 2, 128): "64x64_w4_s2",
    ("dq", 2, 256): "64x32_w8_s2",
    **_IEEE,
    ("dkdv", 4, 128): "32x32_w8_s1",
    ("dkdv", 4, 256): "32x32_w8_s1",
}

# sm_86 and sm_89: everything within 99 KiB.
_SMALL: dict[Key, Spelled] = {
    ("forward", 2, 64): "128x64_w4_s2",
    ("forward", 2, 128): "128x64_w8_s2",
    ("forward", 2, 256): "64x32_w4_s1",
    ("dkdv", 2, 64): "64x64_w4_s3",
    ("dkdv", 2, 128): "64x64_w8_s1",
    ("dkdv", 2, 256): "32x32_w4_s1",
    ("dq", 2, 64): "64x64_w4_s2",
    ("dq", 2, 128): "64x64_w8_s1",
    ("dq", 2, 256): "32x32_w4_s1",
    **_IEEE,
    ("dkdv", 4, 256): "16x16_w8_s1",
    ("dq", 4, 128): "32x32_w8_s1",
    ("dq", 4, 256): "32x16_w8_s1",
}

_SM100: dict[Key, Spelled] = {
    ("forward", 2, 64): "128x64_w8_s3",
    ("forward", 2, 128): "128x64_w8_s3",
    ("forward", 2, 256): "128x64_w8_s2",
    ("dkdv", 2, 64): "64x128_w8_s2",
    ("dkdv", 2, 128): "64x128_w8_s2",
    ("dkdv", 2, 256): "64x64_w8_s1",
    ("dq", 2, 64): "128x64_w8_s3",
    ("dq", 2, 128): "128x64_w8_s3",
    ("dq", 2, 256): "64x64_w8_s1",
    **_IEEE,
}

# The interpreter's table, and that of GPUs without one. Its float32 matmuls are NumPy's, whose
# rounding depends on the shape: with equal tiles forward and backward have the same scores, as on a
# GPU, where NumPy's BLAS uses AVX-512; elsewhere its K Q^T may be other than the transpose of Q
# K^T, by a rounding.
_PORTABLE: dict[Key, Spelled] = _SMALL | {
    ("forward", 4, 64): "64x64_w8_s1",
    ("dkdv", 4, 64): "64x64_w8_s1",
    ("dkdv", 4, 128): "32x32_w8_s1",
    ("dq", 4, 64): "64x64_w8_s1",
}

TABLES: dict[str, dict[Key, Row]] = {
    "sm80": make_table("sm80", _SM80),
    "sm86": make_table("sm86", _SMALL),
    "sm89": make_table("sm89", _SMALL),
    "sm90": make_table("sm90", _SM90),
    "sm100": make_table("sm100", _SM100),
    "portable": make_table("portable", _PORTABLE),
}

# Choosing a row

TARGET_OF_CAPABILITY = {
    (8, 0): "sm80",
    (8, 6): "sm86",
    (8, 7): "sm86",
    (8, 9): "sm89",
    (9, 0): "sm90",
}


def select_config(
    kernel: str,
    *,
    capability: tuple[int, int] | None,
    head_dim: int,
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    dtype: str,
    is_causal: bool = False,
    tma: bool = False,
) -> KernelConfig:
    """The configuration of `kernel` (forward, dkdv or dq); a pure function of its arguments.

    `capability` is the GPU's compute capability, None for the interpreter. A GPU without a table
    gets the portable one, with one warning. `tma` says that Hopper's copy engine can read the
    inputs. It, batch, heads, lengths and mask decide where a row has exceptions for them (`Only`).
    ValueError for an unknown kernel, a head_dim over 256, a negative size or a dtype that Triton's
    dots do not take.
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {', '.join(KERNELS)}, got {kernel!r}")
    pair = (
        isinstance(capability, tuple)
        and len(capability) == 2
        and all(isinstance(x, int) for x in capability)
    )
    if capability is not None and not pair:
        raise TypeError(
            f"capability must be a tuple of two ints like (9, 0), or None, got {capability!r}"
        )
    for name, size in (
        ("batch", batch),
        ("heads", heads),
        ("seqlen_q", seqlen_q),
        ("seqlen_k", seqlen_k),
    ):
        if size < 0:
            raise ValueError(f"{name} must not be negative, got {size}")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be between 1 and {MAX_HEAD_DIM}, got {head_dim}")
    if dtype not in ("float32", "float16", "bfloat16"):
        raise ValueError(f"dtype must be float32, float16 or bfloat16, got {dtype!r}")
    row = TABLES[target_of(capability)][kernel, BYTES_PER_ELEMENT[dtype], head_tile(head_dim)]
    return row.choose(
        batch=batch, heads=heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k, is_causal=is_causal, tma=tma
    )


@cache
def target_of(capability: tuple[int, int] | None) -> str:
    """The table for a GPU of this compute capability: portable for None and, with a warning, for
    what has none.
    """
    if capability is None:
        return "portable"
    if capability in TARGET_OF_CAPABILITY:
        return TARGET_OF_CAPABILITY[capability]
    if capability[0] == 10:
        return "sm100"
    warnings.warn(
        f"no tile table for compute capability {capability[0]}.{capability[1]}: using the portable one",
        stacklevel=3,
    )
    return "portable"


# Splitting keys
#
# A forward of few queries splits the keys, each part a program's, where query tiles leave
# multiprocessors idle. More parts end sooner, until multiprocessors are full; merging them costs a
# second kernel and what it reads. So the time of each number of parts is estimated, and the least
# is taken. What that needs was fitted to 122 shapes on an NVIDIA H200 (triton 3.6.0), of which it
# misses the best by 2 % in the mean and by at most 20 %; elsewhere it is a guess.

# TFLOP/s of a multiprocessor that has one program, and of one that has all it can hold, by bytes
# per element and head tile. A head of 256 takes the numbers of 128.
RATES = {(2, 64): (1.6, 2.7), (2, 128): (2.5, 4.6), (4, 64): (0.28, 0.34), (4, 128): (0.40, 0.45)}
START_US = 3.0  # of a kernel
MERGE_US = 2.0  # of the second kernel
MERGE_BYTES_PER_US = 3e6  # of float32 partial outputs, written and read again
PROGRAM_US = 1.8  # of starting and ending one more program on a multiprocessor
MAX_PARTS = 128  # about as many as multiprocessors; 256 are no faster where 128 are
WORTHWHILE = 0.95  # of the time with whole keys: parts take memory, and the estimate errs
MIN_KEY_TILES = 2  # of a part: less is mostly prologue
# of queries: beyond, the GPU is full, and partial outputs would be large
MAX_TILES_PER_MULTIPROCESSOR = 2


@lru_cache(maxsize=4096)
def part_size(
    config: KernelConfig,
    *,
    head_dim: int,
    bytes_per_element: int,
    batch_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    is_causal: bool,
    num_multiprocessors: int,
) -> int:
    """Keys of each part, a multiple of the key tile; 0 where the keys are better left whole.

    A pure function of its arguments: `batch_heads` is the number of heads in the batch that queries
    have.
    """
    seqlen_k = seen_keys(seqlen_q, seqlen_k, is_causal)
    tiles = -(-seqlen_k // config.key_tile)
    most = min(MAX_PARTS, tiles // MIN_KEY_TILES)
    query_tiles = -(-seqlen_q // config.query_tile)
    if most < 2 or query_tiles * batch_heads > MAX_TILES_PER_MULTIPROCESSOR * num_multiprocessors:
        return 0
    lengths = [tiles] * query_tiles  # in key tiles, of each query tile
    if is_causal:
        ends = range(config.query_tile, (query_tiles + 1) * config.query_tile, config.query_tile)
        lengths = [-(-min(seqlen_k, end) // config.key_tile) for end in ends]
    rates = RATES[bytes_per_element, min(128, head_tile(head_dim))]
    flops = 4 * config.query_tile * config.key_tile * head_tile(head_dim)
    alone_us, together_us = (flops / (rate * 1e6) for rate in rates)  # of a tile of keys

    def estimate_us(size: int) -> float:
        share = batch_heads / num_multiprocessors
        time_us = START_US + max(min(size, tiles) * alone_us, sum(lengths) * share * together_us)
        if size < tiles:
            programs = sum(-(-length // size) for length in lengths)
            rows = programs * batch_heads * min(config.query_tile, seqlen_q)
            merged_bytes = rows * head_dim * 4 * 2
            time_us += MERGE_US + merged_bytes / MERGE_BYTES_PER_US + programs * share * PROGRAM_US
        return time_us

    sizes = [-(-tiles // 2**power) for power in range(1, most.bit_length())]
    best = min(sizes, key=estimate_us)
    return best * config.key_tile if estimate_us(best) < WORTHWHILE * estimate_us(tiles) else 0


def seen_keys(seqlen_q: int, seqlen_k: int, is_causal: bool) -> int:
    """How many keys any query attends: no causal one those behind the last query."""
    return min(seqlen_q, seqlen_k) if is_causal else seqlen_k
