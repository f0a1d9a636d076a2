"""The mask of a staircase in one launch: each query attends the first so many keys, the next as
many or one more.

That is what a set of keys in order, shared by all queries, looks like under the causal mask
(`attention.dynamic`). The mask is made anew in every call, and the tensor operations of
`BlockMask.prefix` would take longer than the attention. All lists follow from two numbers a row of
tiles, so that the host never waits for the GPU:

  rows      tiles up to the shortest length are full; from there to the longest partial, at most `steps_of` of them
  columns   since lengths grow, the rows that see a tile are the last so many, and of these the last so many see it all
  tokens    a row of a partial tile has ones up to its length: a prefix of each word of 32 keys

A program makes the lists of one row of tiles, and the token bits at its steps, or those of one
column.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from jaxtyping import Int
from torch import Tensor

from cs336_systems.attention.masks import BlockMask
from cs336_systems.attention.masks.tiles import TileLists, num_blocks, words_per_row
from cs336_systems.attention.triton.launch import launch, on_device_of
from cs336_systems.measure.stages import stage


@triton.jit
def _store_list(base, slot, values, is_listed, num_listed, WIDTH):
    """`values` that are listed at their slots, and zeros behind the last."""
    tl.store(base + slot, values, mask=is_listed)
    position = tl.arange(0, slot.shape[0])
    tl.store(
        base + position, tl.zeros_like(position), mask=(position >= num_listed) & (position < WIDTH)
    )


@triton.jit
def _store_row(
    lengths, row, list_number, kv_num_ptr, kv_indices_ptr, full_kv_num_ptr, full_kv_indices_ptr, kv_tokens_ptr,
    token_bits_ptr, SEQLEN_Q, COLUMNS, WIDTH, WHOLE_PATTERN,
    BLOCK: tl.constexpr, WORDS: tl.constexpr, KEYS: tl.constexpr, STEPS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The lists of a row of tiles and the token bits of its tiles from the first step on."""
    block_rows = tl.arange(0, BLOCK)
    queries = row * BLOCK + block_rows
    length = tl.load(lengths + queries, mask=queries < SEQLEN_Q, other=0)
    first_step = tl.load(lengths + row * BLOCK) // BLOCK
    end = tl.cdiv(tl.max(length, axis=0), BLOCK)
    is_cut = (row + 1) * BLOCK > SEQLEN_Q  # then none of its tiles is full
    num_full = tl.where(is_cut, 0, first_step)
    num_partial = end - num_full
    tl.store(kv_num_ptr + list_number, num_partial)
    tl.store(full_kv_num_ptr + list_number, num_full)

    slot = tl.arange(0, SLOTS)
    column = num_full + slot
    step = column - first_step
    token = tl.where(step < 0, WHOLE_PATTERN, list_number * STEPS + step)
    _store_list(
        kv_indices_ptr + list_number * WIDTH, slot, column, slot < num_partial, num_partial, WIDTH
    )
    _store_list(
        kv_tokens_ptr + list_number * WIDTH, slot, token, slot < num_partial, num_partial, WIDTH
    )
    _store_list(
        full_kv_indices_ptr + list_number * COLUMNS, slot, slot, slot < num_full, num_full, COLUMNS
    )

    patterns = (
        token_bits_ptr + list_number.to(tl.int64) * (STEPS * BLOCK * WORDS) + block_rows * WORDS
    )
    for taken in tl.static_range(STEPS):
        for word in tl.static_range(WORDS):
            first_key = (first_step + taken) * BLOCK + word * KEYS
            ones = tl.minimum(tl.maximum(length - first_key, 0), KEYS)
            # Shifted in two halves: 32 bits cannot be shifted by 32.
            tl.store(
                patterns + taken * (BLOCK * WORDS) + word, (1 << ones // 2 << (ones + 1) // 2) - 1
            )
    if is_cut:
        ones = tl.where(queries < SEQLEN_Q, KEYS, 0)
        bits = (1 << ones // 2 << (ones + 1) // 2) - 1
        whole = token_bits_ptr + WHOLE_PATTERN.to(tl.int64) * (BLOCK * WORDS) + block_rows * WORDS
        for word in tl.static_range(WORDS):  # each sequence stores the same
            tl.store(whole + word, bits)


@triton.jit
def _store_column(
    lengths, column, sequence, q_num_ptr, q_indices_ptr, full_q_num_ptr, full_q_indices_ptr, q_tokens_ptr,
    SEQLEN_Q, ROWS, COLUMNS, WHOLE_PATTERN, BLOCK: tl.constexpr, STEPS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The lists of a column of tiles."""
    row = tl.arange(0, SLOTS)
    exists = row < ROWS
    last_query = tl.minimum((row + 1) * BLOCK, SEQLEN_Q) - 1
    first_step = tl.load(lengths + row * BLOCK, mask=exists, other=0) // BLOCK
    longest = tl.load(lengths + last_query, mask=exists, other=0)
    full = exists & (first_step > column) & ((row + 1) * BLOCK <= SEQLEN_Q)
    partial = exists & (longest > column * BLOCK) & (full == 0)
    num_full = tl.sum(full.to(tl.int32), axis=0)
    num_partial = tl.sum(partial.to(tl.int32), axis=0)
    list_number = sequence * COLUMNS + column
    tl.store(q_num_ptr + list_number, num_partial)
    tl.store(full_q_num_ptr + list_number, num_full)

    full_slot = tl.cumsum(full.to(tl.int32), axis=0) - 1
    partial_slot = tl.cumsum(partial.to(tl.int32), axis=0) - 1
    step = column - first_step
    token = tl.where(step < 0, WHOLE_PATTERN, (sequence * ROWS + row) * STEPS + step)
    _store_list(full_q_indices_ptr + list_number * ROWS, full_slot, row, full, num_full, ROWS)
    _store_list(q_indices_ptr + list_number * ROWS, partial_slot, row, partial, num_partial, ROWS)
    _store_list(q_tokens_ptr + list_number * ROWS, partial_slot, token, partial, num_partial, ROWS)


@triton.jit
def staircase_kernel(
    lengths_ptr, kv_num_ptr, kv_indices_ptr, kv_tokens_ptr, full_kv_num_ptr, full_kv_indices_ptr, q_num_ptr,
    q_indices_ptr, q_tokens_ptr, full_q_num_ptr, full_q_indices_ptr, token_bits_ptr,
    SEQLEN_Q, ROWS, COLUMNS, WIDTH, WHOLE_PATTERN,
    BLOCK: tl.constexpr, WORDS: tl.constexpr, KEYS: tl.constexpr, STEPS: tl.constexpr, ROW_SLOTS: tl.constexpr,
    COLUMN_SLOTS: tl.constexpr,
):  # fmt: skip
    """A program a row of tiles and a program a column, of each batch entry and head."""
    sequence = tl.program_id(0) // (ROWS + COLUMNS)
    line = tl.program_id(0) % (ROWS + COLUMNS)
    lengths = lengths_ptr + sequence.to(tl.int64) * SEQLEN_Q
    if line < ROWS:
        _store_row(
            lengths, line, sequence * ROWS + line, kv_num_ptr, kv_indices_ptr, full_kv_num_ptr, full_kv_indices_ptr,
            kv_tokens_ptr, token_bits_ptr, SEQLEN_Q, COLUMNS, WIDTH, WHOLE_PATTERN, BLOCK, WORDS, KEYS, STEPS,
            COLUMN_SLOTS,
        )  # fmt: skip
    else:
        _store_column(
            lengths, line - ROWS, sequence, q_num_ptr, q_indices_ptr, full_q_num_ptr, full_q_indices_ptr, q_tokens_ptr,
            SEQLEN_Q, ROWS, COLUMNS, WHOLE_PATTERN, BLOCK, STEPS, ROW_SLOTS,
        )  # fmt: skip


def steps_of(block: int, key_blocks: int) -> int:
    """The most tiles of a row that a staircase can end in: from its lowest to its highest step."""
    return min(key_blocks, 1 + num_blocks(max(0, block - 2), block))


def launch_staircase(
    lengths: Int[Tensor, "batch heads queries"], seqlen_k: int, block: int
) -> BlockMask:
    """What `BlockMask.prefix(lengths, seqlen_k, block_size=block)` attends, without waiting for the
    device.

    `lengths` are int32 and contiguous; neither queries nor keys are none. The caller answers for
    lengths[i] <= lengths[i + 1] <= lengths[i] + 1 <= seqlen_k: they are not looked at.
    """
    make = opaque_staircase if torch.compiler.is_compiling() else staircase_lists
    with nullcontext() if torch.compiler.is_compiling() else stage("mask_build"):
        lists = TileLists(*make(lengths, seqlen_k, block))
    return BlockMask(
        lists=lists, block_size=(block, block), seq_lengths=(lengths.shape[2], seqlen_k)
    )


def staircase_lists(lengths: Tensor, seqlen_k: int, block: int) -> list[Tensor]:
    """`TileLists`, as an operator returns them."""
    batch, heads, seqlen_q = lengths.shape
    rows, columns = num_blocks(seqlen_q, block), num_blocks(seqlen_k, block)
    lists = _empty_lists(lengths, seqlen_k, block)
    steps, words = steps_of(block, columns), words_per_row(block)
    with on_device_of(lengths):
        launch(
            staircase_kernel, (batch * heads * (rows + columns),), (lengths, *lists),
            (seqlen_q, rows, columns, lists[1].shape[3], batch * heads * rows * steps),
            {"BLOCK": block, "WORDS": words, "KEYS": block // words, "STEPS": steps,
             "ROW_SLOTS": triton.next_power_of_2(rows), "COLUMN_SLOTS": triton.next_power_of_2(columns)},
        )  # fmt: skip
    return lists


def _empty_lists(lengths: Tensor, seqlen_k: int, block: int) -> list[Tensor]:
    batch, heads, seqlen_q = lengths.shape
    rows, columns = num_blocks(seqlen_q, block), num_blocks(seqlen_k, block)
    is_cut = seqlen_q % block != 0  # the last row of tiles, which then has no full tile
    steps = steps_of(block, columns)
    width = columns if is_cut else steps
    by_row = [(rows,), (rows, width), (rows, width), (rows,), (rows, columns)]
    by_column = [(columns,), (columns, rows), (columns, rows), (columns,), (columns, rows)]
    patterns = batch * heads * rows * steps + is_cut
    shapes = [
        *((batch, heads, *shape) for shape in (*by_row, *by_column)),
        (patterns, block, words_per_row(block)),
    ]
    return [torch.empty(shape, dtype=torch.int32, device=lengths.device) for shape in shapes]


opaque_staircase = torch.library.custom_op(
    "cs336_systems::staircase_lists", staircase_lists, mutates_args=(),
    schema="(Tensor lengths, SymInt seqlen_k, int block) -> Tensor[]",
)  # fmt: skip
opaque_staircase.register_fake(_empty_lists)
