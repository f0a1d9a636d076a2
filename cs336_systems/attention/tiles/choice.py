"""Tile tables, one for each architecture, and the choice of tiles, parts and order of a call.

    config = select_config("forward", capability=(9, 0), head_dim=64, seqlen_q=4096, ...)
    part_size(config, ...)              # keys of each part if a forward splits them, else 0
    heads_at_a_time(walks, ...)         # how many heads' tiles programs take before the next heads'

People edit the tables; nothing writes them, and nothing tunes at run time.

A row is keyed by (kernel, bytes per element, head tile) and reads
`<query tile>x<key tile>_w<warps>_s<stages>`. `_tma` behind it says that Hopper's copy engine reads
the tiles, which not every input allows (`triton/launch.py`); `_tf32x3` says that a float32 dot runs
as three on the tensor cores. A row may begin with exceptions, of which the first that holds is
taken. It ends with the entry for all other inputs:

    ("forward", 2, 64): (Only("64x64_w4_s3", max_programs=131), "128x64_w8_s3"),

Bounds of a row:
  - 16-bit tiles on sm_90 have at least 64 rows: triton 3.6 can miscompile kernels with two dots of
    16 or 32.
  - The kernels of a call must round their scores alike: float32 rows of one head tile have one
    precision.
  - IEEE float32 dots run on the FMA units, with operands unrolled into registers: larger tiles
    spill by the kilobyte.
  - A streaming multiprocessor has 227 KiB of shared memory on sm_90 and sm_100, 163 KiB on sm_80,
    99 KiB on sm_86 and sm_89.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import cache, lru_cache
from heapq import heapreplace
from typing import NamedTuple

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
    """An entry of a row: its `tiles` are for inputs that meet all conditions that are not None."""

    tiles: str  # spelled as in the tables, such as 128x64_w8_s3
    is_causal: bool | None = None
    tma: bool | None = None  # whether Hopper's copy engine can read the inputs
    max_queries: int | None = None  # the largest seqlen_q
    # The most programs that the row's last entry would launch: fewer than the GPU has room for.
    max_programs: int | None = None


@dataclass(frozen=True)
class Row:
    """The configurations of one kernel for one element size and one head tile.

    The last one has no conditions.
    """

    configs: tuple[KernelConfig, ...]
    conditions: tuple[Only, ...]  # of each configuration

    def choose(
        self, *, batch: int, heads: int, seqlen_q: int, seqlen_k: int, is_causal: bool, tma: bool
    ) -> KernelConfig:
        """Return the configuration for a shape: the first whose conditions hold."""
        shape = {"batch": batch, "heads": heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
        return next(
            config
            for config, only in zip(self.configs, self.conditions)
            if only.is_causal in (None, is_causal)
            and only.tma in (None, tma)
            and (only.max_queries is None or seqlen_q <= only.max_queries)
            and (
                only.max_programs is None
                or self.configs[-1].num_programs(**shape) <= only.max_programs
            )
        )


SHARED_MEMORY_LIMIT_BYTES = {
    "sm80": 163 * 1024,
    "sm86": 99 * 1024,
    "sm89": 99 * 1024,
    "sm90": 227 * 1024,
    "sm100": 227 * 1024,
    "portable": 99 * 1024,
}


# A row as it is written below: exceptions, then the tiles for all other inputs.
Spelled = str | tuple[Only | str, ...]


def make_table(target: str, rows: dict[Key, Spelled]) -> dict[Key, Row]:
    """Return the parsed rows of the architecture `target`."""
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
# 16 bit: programs of one warp group, 4 warps, win everywhere but in dq. Several of them share a
# streaming multiprocessor, and one's softmax overlaps another's matmuls. Inputs that TMA cannot
# read take the best rows without it.
# Head dim 128: a grid that leaves multiprocessors idle takes smaller tiles, of which there are
# twice as many. A causal forward takes them also where all programs run at once, two on each of 132
# multiprocessors, since the longest program ends the launch. dK/dV without TMA takes them only
# where all fit at once, one on each of 132: on larger grids they are the slowest of four.
# float32: three TF32 products on the tensor cores meet the contract, faster than the FMA units.
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

# The tables below are not measured. Their rows were compiled offline, causal and not, with triton
# 3.6.0: they fit their GPU's shared memory, and those of 16 bits spill nothing
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

# The table of the interpreter, and of GPUs that have no other. The interpreter's float32 matmuls
# are NumPy's, whose rounding depends on the shape. With equal tiles forward and backward compute
# the same scores, as on a GPU, if NumPy's BLAS uses AVX-512. Otherwise its K Q^T may differ from
# the transpose of Q K^T by a rounding.
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
    """Return the configuration of `kernel` (forward, dkdv or dq) for these inputs.

    A pure function of its arguments. `capability` is the GPU's compute capability, None for the
    interpreter. A GPU without a table gets the portable one, with one warning. `tma` says that
    Hopper's copy engine can read the inputs. Where a row has exceptions (`Only`), `tma`, batch,
    heads, lengths and `is_causal` decide among them.

    ValueError for an unknown kernel, a head_dim over 256, a negative size or a dtype that Triton's
    dots do not take; TypeError for another kind of `capability`.
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
    """Return the name of the table for a GPU of this compute capability, such as sm90.

    It is portable for None (the interpreter) and, with a warning, for GPUs without a table.
    """
    if capability is None:
        return "portable"
    if capability in TARGET_OF_CAPABILITY:
        return TARGET_OF_CAPABILITY[capability]
    if capability[0] == 10:
        return "sm100"
    warnings.warn(
        f"no tile table for compute capability {capability[0]}.{capability[1]}: "
        "using the portable one",
        stacklevel=3,
    )
    return "portable"


# Splitting keys
#
# If the query tiles of a forward leave multiprocessors idle, it splits the keys, and each part is a
# program of its own. More parts end sooner, until multiprocessors are full; merging them costs a
# second kernel and the outputs that it reads. `part_size` estimates the time of each number of
# parts and takes the least. The estimate's constants were fitted to 122 shapes on an NVIDIA H200
# (triton 3.6.0), where it misses the best number by 2 % of the time in the mean and by at most
# 20 %; on other GPUs it is a guess.

# TFLOP/s of a multiprocessor that has one program, and of one that has all it can hold, by bytes
# per element and head tile. A head of 256 takes the numbers of 128.
RATES = {(2, 64): (1.6, 2.7), (2, 128): (2.5, 4.6), (4, 64): (0.28, 0.34), (4, 128): (0.40, 0.45)}
START_US = 3.0  # to start a kernel
MERGE_US = 2.0  # for the second kernel
MERGE_BYTES_PER_US = 3e6  # float32 partial outputs, written and read again
PROGRAM_US = 1.8  # to start and end one more program on a multiprocessor
MAX_PARTS = 128  # about as many as multiprocessors; 256 are no faster where 128 are
# A split must take at most this share of the time with whole keys: parts take memory, and the
# estimate errs.
WORTHWHILE = 0.95
MIN_KEY_TILES = 2  # in a part; one of fewer is mostly prologue
# Query tiles of all heads: with more, the GPU is full, and partial outputs would be large.
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
    """Return how many keys each part has if the forward should split them, else 0.

    The number is a multiple of the key tile; the last part may be shorter. A pure function of its
    arguments. `batch_heads` is the number of query heads in the whole batch.
    """
    seqlen_k = seen_keys(seqlen_q, seqlen_k, is_causal)
    tiles = -(-seqlen_k // config.key_tile)
    most = min(MAX_PARTS, tiles // MIN_KEY_TILES)
    query_tiles = -(-seqlen_q // config.query_tile)
    if most < 2 or query_tiles * batch_heads > MAX_TILES_PER_MULTIPROCESSOR * num_multiprocessors:
        return 0

    lengths = [tiles] * query_tiles  # key tiles that each query tile attends
    if is_causal:
        ends = range(config.query_tile, (query_tiles + 1) * config.query_tile, config.query_tile)
        lengths = [-(-min(seqlen_k, end) // config.key_tile) for end in ends]

    # time of one key tile: in a program alone on its multiprocessor, and on a full one
    rates = RATES[bytes_per_element, min(128, head_tile(head_dim))]
    flops = 4 * config.query_tile * config.key_tile * head_tile(head_dim)
    alone_us, together_us = (flops / (rate * 1e6) for rate in rates)

    def estimate_us(size: int) -> float:
        """Return the estimated time of a forward with parts of `size` key tiles."""
        share = batch_heads / num_multiprocessors
        time_us = START_US + max(min(size, tiles) * alone_us, sum(lengths) * share * together_us)
        if size < tiles:  # keys are split: add the merge
            programs = sum(-(-length // size) for length in lengths)
            rows = programs * batch_heads * min(config.query_tile, seqlen_q)
            merged_bytes = rows * head_dim * 4 * 2
            time_us += MERGE_US + merged_bytes / MERGE_BYTES_PER_US + programs * share * PROGRAM_US
        return time_us

    sizes = [-(-tiles // 2**power) for power in range(1, most.bit_length())]
    best = min(sizes, key=estimate_us)
    return best * config.key_tile if estimate_us(best) < WORTHWHILE * estimate_us(tiles) else 0


def seen_keys(seqlen_q: int, seqlen_k: int, is_causal: bool) -> int:
    """Return how many leading keys at least one query attends: no causal one those behind it."""
    return min(seqlen_q, seqlen_k) if is_causal else seqlen_k


# Heads at a time
#
# Programs of a causal call take tiles in a fixed order: some heads at a time and, among these, the
# longest walks first. Few heads at a time keep what their programs stream in the L2 cache. But the
# longest walks of the last heads then start late, and most multiprocessors wait while these end.
# With 8 key heads of 64 causal tiles each, one at a time, a call on 132 multiprocessors takes 1.23
# times as long as if its steps were spread evenly; two at a time, 1.01.

# How much longer a call takes for each doubling of the heads at a time beyond those that fit in the
# L2 cache. Fitted to 13 backwards on an H200, triton 3.6.0, 2026-11-29: the order that it leads to
# is within 2 % of the fastest measured one.
COST_OF_DOUBLING = 0.02
# In rounds of programs: calls of more keep nearly all multiprocessors busy in any order; of the
# others the end is judged, since the rounds before it are full.
MOST_ROUNDS, JUDGED_ROUNDS = 24, 8


class Walks(NamedTuple):
    """The causal walks of one head's tiles, in blocks of queries or keys as long as a tile.

    Of packed documents the host knows the longest and how many tiles there are in all. The others
    are assumed to be equally long, and the longest to come last.
    """

    tiles: int  # of the head, or of its longest document
    longest: int  # blocks of the longest walk; each further one has a block less
    documents: int = 1
    all_tiles: int = 0  # of all documents

    @property
    def other_tiles(self) -> int:
        """Tiles of each document but the longest, at least 1."""
        return max(1, (self.all_tiles - self.tiles) // max(1, self.documents - 1))

    @property
    def number(self) -> int:
        """Number of walks."""
        return self.tiles + max(0, self.documents - 1) * self.other_tiles

    def blocks(self) -> list[int]:
        """Return the blocks of each walk, in the order in which programs take them."""
        other = range(self.other_tiles, 0, -1)
        own = [max(0, self.longest - tile) for tile in range(self.tiles)]
        return [*other] * (self.documents - 1) + own


@lru_cache(maxsize=4096)
def heads_at_a_time(
    walks: Walks,
    *,
    heads: int,
    fitting: int,
    block_steps: float,
    group: int = 1,
    start_steps: float,
    places: int,
) -> int:
    """Return the number of key heads at a time with which a call is estimated to end soonest.

    `heads` key heads have the same walks, of `block_steps` steps a block and `start_steps` beside
    them, `group` times each. `fitting` of them fit in the L2 cache. `places` programs run at a
    time.
    """
    fitting = max(1, min(fitting, heads))
    if walks.number * group * heads > MOST_ROUNDS * places:
        return fitting
    steps_of_walks = [
        blocks * block_steps + start_steps for blocks in walks.blocks() for _ in range(group)
    ]

    def estimated_time(together: int) -> float:
        """Return the time over that of steps which are spread evenly, with the cache's misses."""
        widths = [min(together, heads - first) for first in range(0, heads, together)]
        judged = -(-JUDGED_ROUNDS * places // (together * len(steps_of_walks)))
        ends = [0.0] * places  # when each place is free
        for width in widths[-judged:]:
            for steps in steps_of_walks:
                for _ in range(width):
                    heapreplace(ends, ends[0] + steps)
        waiting = max(ends) - sum(ends) / places
        even = heads * sum(steps_of_walks) / places
        doublings = max(0.0, math.log2(together / fitting))
        return (1 + waiting / even) * (1 + COST_OF_DOUBLING * doublings)

    power = 2 ** int(math.log2(fitting))
    candidates = [fitting, *(power * factor for factor in (1, 2, 4, 8)), heads]
    possible = [together for together in candidates if together <= heads]
    # rounded, so that the first of equal ones is taken, whatever the last bit
    return min(possible, key=lambda together: round(estimated_time(together), 4))
