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
MAX_PARTS = 128  # about as many as multiprocessors; 256 are no faster where 128 are
WORTHWHILE = 0.95  # of the time with whole keys: parts take memory, and the estimate errs
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
    """Keys of each part, a multiple of the key tile; 0 where the keys are better left whole.

    A pure function of its arguments: `batch_heads` is the number of heads in the batch that queries have.
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
