"""The mask of a staircase: each query attends the first so many keys, and the next query as many or one more.

That is what a set of keys in order, shared by all queries, looks like under the causal mask
(`cs336_systems.attention.dynamic`). Such a mask is built anew in every call, so that its price is the host's: here all
lists of a `BlockMask` follow from two numbers a row of tiles, by arithmetic on whole tensors. Nothing is searched for,
counted or cut to size, hence the host never waits for the GPU:

  rows      tiles up to the shortest length are full; from there to the longest partial, at most `steps_of` of them
  columns   since lengths grow, the rows that see a tile are the last so many, and of these the last so many see it all
  tokens    a row of a partial tile has ones up to its length: a prefix of each word of 32 keys
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from cs336_systems.attention.masks.block_mask import DEFAULT_BLOCK, BlockMask
from cs336_systems.attention.masks.tiles import BITS, num_blocks, words_per_row
from cs336_systems.measure.stages import stage


def staircase_mask(lengths: Int[Tensor, "batch heads queries"], seqlen_k: int, block: int = DEFAULT_BLOCK) -> BlockMask:
    """What `BlockMask.prefix(lengths, seqlen_k, block_size=block)` attends, without waiting for the device.

    The caller answers for lengths[i] <= lengths[i + 1] <= lengths[i] + 1 <= seqlen_k; they are not looked at.
    """
    if not lengths.numel() or not seqlen_k:
        return BlockMask.prefix(lengths, seqlen_k, block_size=block)
    with stage("mask_build"):
        return _build(lengths.int(), seqlen_k, block)


def steps_of(block: int, key_blocks: int) -> int:
    """The most tiles of a row that a staircase can end in: from its lowest to its highest step."""
    return min(key_blocks, 1 + num_blocks(max(0, block - 2), block))


def _build(lengths: Int[Tensor, "batch heads queries"], seqlen_k: int, block: int) -> BlockMask:
    batch, heads, seqlen_q = lengths.shape
    rows, columns = num_blocks(seqlen_q, block), num_blocks(seqlen_k, block)
    is_cut = seqlen_q % block != 0  # the last row of tiles, which then has no full tile
    whole_rows = rows - is_cut
    steps = steps_of(block, columns)
    if is_cut:
        lengths = torch.nn.functional.pad(lengths, (0, rows * block - seqlen_q))  # no keys past the end
    by_row = lengths.reshape(batch, heads, rows, block)
    row, column = (torch.arange(count, dtype=torch.int32, device=lengths.device) for count in (rows, columns))

    first_step = by_row[..., 0] // block  # (batch, heads, rows): the first tile that not all queries of a row see
    end = (by_row.amax(-1) + (block - 1)) // block  # the first that none sees
    num_full = first_step * (row < whole_rows) if is_cut else first_step
    num_partial = end - num_full

    # Rows: consecutive tiles. A cut row walks all of its tiles as partial ones.
    slot = column if is_cut else column[:steps]
    listed = slot < num_partial[..., None]
    indices = (num_full[..., None] + slot) * listed
    first_pattern = torch.arange(batch * heads * rows, dtype=torch.int32, device=lengths.device) * steps
    first_pattern = first_pattern.view(batch, heads, rows)
    pattern_of_first_key = first_pattern - first_step  # plus a tile's column: its pattern
    whole_pattern = batch * heads * rows * steps  # of the tiles before a cut row's first step

    # Columns: the last rows. `seen` of them attend a tile, `full` of these all of it.
    seen = (end[..., None] > column).sum(2, dtype=torch.int32)  # (batch, heads, columns)
    full = (num_full[..., None] > column).sum(2, dtype=torch.int32)
    partial_q = seen - full
    listed_q = row < partial_q[..., None]
    indices_q = ((rows - seen)[..., None] + row) * listed_q
    if is_cut:  # it comes behind the full ones
        indices_q = torch.where(row == partial_q[..., None] - 1, rows - 1, indices_q)
    tokens = pattern_of_first_key[..., None] + indices
    tokens_q = pattern_of_first_key.gather(2, indices_q.flatten(2).long()).view_as(indices_q) + column[:, None]
    bits = _prefix_bits(by_row, first_step, steps, block)
    if is_cut:
        tokens = torch.where(indices < first_step[..., None], whole_pattern, tokens)
        before = column < first_step[..., -1:]
        tokens_q = torch.where((indices_q == rows - 1) & before[..., None], whole_pattern, tokens_q)
        bits = torch.cat([bits, _whole_rows(seqlen_q % block, block, lengths.device)])
    return BlockMask(
        kv_num_blocks=num_partial, kv_indices=indices,
        full_kv_num_blocks=num_full, full_kv_indices=column * (column < num_full[..., None]),
        q_num_blocks=partial_q, q_indices=indices_q,
        full_q_num_blocks=full,
        full_q_indices=((whole_rows - full)[..., None] + row) * (row < full[..., None]),
        kv_tokens=tokens * listed, q_tokens=tokens_q * listed_q, token_bits=bits,
        block_size=(block, block), seq_lengths=(seqlen_q, seqlen_k),
    )  # fmt: skip


def _prefix_bits(
    by_row: Int[Tensor, "batch heads rows block"], first_step: Int[Tensor, "batch heads rows"], steps: int, block: int
) -> Int[Tensor, "patterns block words"]:
    """Token bits of the `steps` tiles of each row from its first step on: ones up to each query's length."""
    words = words_per_row(block)
    word = torch.arange(steps * words, dtype=torch.int32, device=by_row.device).view(steps, 1, words)
    word = word * BITS if block % BITS == 0 else word // words * block + word % words * BITS  # its first key
    remaining = (by_row - first_step[..., None] * block)[:, :, :, None, :, None] - word
    # Shifted in 64 bits: 32 ones are a word, which 32 bits cannot be shifted by.
    return ((1 << remaining.clamp_(0, min(block, BITS)).long()) - 1).int().view(-1, block, words)


def _whole_rows(rows: int, block: int, device: torch.device) -> Int[Tensor, "1 block words"]:
    """Token bits of a tile whose first `rows` queries attend all keys."""
    whole = -1 if block >= BITS else (1 << block) - 1
    bits = torch.where(torch.arange(block, device=device) < rows, whole, 0).int()
    return bits[None, :, None].repeat(1, 1, words_per_row(block))
