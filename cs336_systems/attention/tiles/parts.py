"""Into how many parts a forward splits the keys, each part a program's, where query tiles leave multiprocessors idle.

More parts end sooner, until multiprocessors are full; merging them costs a second kernel and what it reads. So the time
of each number of parts is estimated, and the least is taken. What that needs was fitted to 122 shapes on an NVIDIA H200
(triton 3.6.0), of which it misses the best by 2 % in the mean and by at most 20 %; elsewhere it is a guess.
"""

from __future__ import annotations

from functools import lru_cache

from cs336_systems.attention.tiles.config import KernelConfig, head_tile

# TFLOP/s of a multiprocessor that has one program, and of one that has all it can hold, by bytes per element and head
# tile. A head of 256 takes the numbers of 128.
RATES = {(2, 64): (1.6, 2.7), (2, 128): (2.5, 4.6), (4, 64): (0.28, 0.34), (4, 128): (0.40, 0.45)}
START_US = 3.0  # of a kernel
MERGE_US = 2.0  # of the second kernel
MERGE_BYTES_PER_US = 3e6  # of float32 partial outputs, written and read again
PROGRAM_US = 1.8  # of starting and ending one more program on a multiprocessor
MAX_PARTS = 64
MIN_KEY_TILES = 2  # of a part: less is mostly prologue
MAX_TILES_PER_MULTIPROCESSOR = 2  # of queries: beyond, the GPU is full, and partial outputs would be large


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
    """Keys of each part, a multiple of the key tile; at least seqlen_k where the keys are better left whole.

    A pure function of its arguments: `batch_heads` is the number of heads in the batch that queries have.
    """
    tiles = -(-seqlen_k // config.key_tile)
    most = min(MAX_PARTS, tiles // MIN_KEY_TILES)
    query_tiles = -(-seqlen_q // config.query_tile) * batch_heads
    if most < 2 or query_tiles > MAX_TILES_PER_MULTIPROCESSOR * num_multiprocessors:
        return tiles * config.key_tile
    sizes = [-(-tiles // 2**power) for power in range(most.bit_length())]
    rates = RATES[bytes_per_element, min(128, head_tile(head_dim))]
    flops = 4 * config.query_tile * config.key_tile * head_tile(head_dim)
    alone_us, together_us = (flops / (rate * 1e6) for rate in rates)  # of a tile of keys

    def estimate_us(size: int) -> float:
        steps, programs, longest = _work(config, seqlen_q, seqlen_k, is_causal, size)
        share = batch_heads / num_multiprocessors
        time_us = START_US + max(longest * alone_us, steps * share * together_us)
        if size < tiles:
            rows = programs * batch_heads * min(config.query_tile, seqlen_q)
            merged_bytes = rows * head_dim * 4 * 2
            time_us += MERGE_US + merged_bytes / MERGE_BYTES_PER_US + programs * share * PROGRAM_US
        return time_us

    return min(sizes, key=estimate_us) * config.key_tile


def _work(config: KernelConfig, seqlen_q: int, seqlen_k: int, is_causal: bool, size: int) -> tuple[int, int, int]:
    """(key tiles of all programs, programs that have any, key tiles of the longest), for one head and parts of `size`
    key tiles."""
    steps = programs = longest = 0
    for first_query in range(0, seqlen_q, config.query_tile):
        end = min(seqlen_k, first_query + config.query_tile) if is_causal else seqlen_k
        tiles = -(-end // config.key_tile)
        steps, programs, longest = steps + tiles, programs + -(-tiles // size), max(longest, min(tiles, size))
    return steps, programs, longest
