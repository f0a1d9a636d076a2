"""Wrong solutions of the puzzles of notebooks/s1_triton.py, with the hint that each must get.

A mutant replaces the answer, or a part of it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """What a wrong solution has in place of a part of the answer, and a part of its hint."""

    puzzle: str
    hint: str
    old: str  # a part of the answer; "" replaces all of it
    new: str

    def answer(self, right: str) -> str:
        if not self.old:
            return self.new
        assert right.count(self.old) >= 1, f"{self.old!r} is not in the answer of {self.puzzle}"
        return right.replace(self.old, self.new)


MUTANTS = {
    # load
    "load_no_program_id": Mutant(
        "load", "every program takes the first block", "tl.program_id(0) * BLOCK + ", ""
    ),
    "load_not_times_block": Mutant(
        "load", "multiply tl.program_id(0) by BLOCK", "tl.program_id(0) * BLOCK", "tl.program_id(0)"
    ),
    "load_one_address": Mutant(
        "load", "x_ptr alone is the address of one element", "x_ptr + offsets", "x_ptr"
    ),
    "load_first_block": Mutant(
        "load", "every program loads the first block", "x_ptr + offsets", "x_ptr + tl.arange(0, BLOCK)"
    ),
    "load_one_block_too_far": Mutant(
        "load", "outside x_ptr (elements 64 to 79 of 64)", "tl.program_id(0)", "(1 + tl.program_id(0))"
    ),
    # mask
    "mask_none_at_the_load": Mutant(
        "mask", "load of 14 elements outside x_ptr", "offsets, mask=inside)\ntl", "offsets)\ntl"
    ),
    "mask_none_at_the_store": Mutant(
        "mask", "store of 14 elements outside out_ptr", "x * x, mask=inside", "x * x"
    ),
    "mask_one_too_many": Mutant(
        "mask", "load of 1 element outside x_ptr (element 50 of 50)", "<", "<="
    ),
    "mask_one_too_few": Mutant("mask", "the last element is masked off", "length", "length - 1"),
    "mask_drops_the_last_tile": Mutant(
        "mask", "your last tile is dropped", "offsets < length", "offsets < length // BLOCK * BLOCK"
    ),
    "mask_first_block": Mutant(
        "mask", "compare the offsets with length, not BLOCK", "offsets < length", "offsets < BLOCK"
    ),
    # add
    "add_transposed": Mutant(
        "add", "the tile is transposed", "x[:, None] + y[None, :]", "x[None, :] + y[:, None]"
    ),
    "add_no_mask_of_columns": Mutant(
        "add", "mask the columns too", " & (columns[None, :] < num_columns)", " & (columns[None, :] >= 0)"
    ),
    "add_no_mask_of_rows": Mutant(
        "add", "mask the rows and the columns", "rows[:, None] < num_rows", "rows[:, None] >= 0"
    ),
    "add_steps_by_the_tile": Mutant("add", "step by num_columns", "* num_columns", "* TILE"),
    "add_products": Mutant("add", "not products", "x[:, None] +", "x[:, None] *"),
    # row sum
    "row_sum_in_float16": Mutant("row_sum", "taken in float16", "x.to(tl.float32)", "x"),
    "row_sum_no_other": Mutant("row_sum", "give other=0.0", ", other=0.0", ""),
    "row_sum_packed_rows": Mutant(
        "row_sum", "`stride` elements on", "row * stride", "row * num_columns"
    ),
    "row_sum_no_mask": Mutant(
        "row_sum", "behind the row's end", ", mask=columns < num_columns, other=0.0", ""
    ),
    "row_sum_first_row": Mutant("row_sum", "every program sums row 0", "row * stride + ", ""),
    "row_sum_mean": Mutant("row_sum", "not the mean", "axis=0)", "axis=0) / num_columns"),
    # softmax
    "softmax_no_maximum": Mutant("softmax", "exp overflows", "x - tl.max(x, axis=0)", "x"),
    "softmax_other_is_zero": Mutant("softmax", "count as zeros", 'float("-inf")', "0.0"),
    "softmax_no_other": Mutant("softmax", "hold no number", ', other=float("-inf")', ""),
    "softmax_no_division": Mutant("softmax", "the division", " / tl.sum(e, axis=0)", ""),
    "softmax_divides_by_x": Mutant("softmax", "the divisor is the sum of x", "tl.sum(e", "tl.sum(x"),
    # matmul
    "matmul_rows_of_a": Mutant("matmul", "a row of A has K", "rows[:, None] * K", "rows[:, None] * M"),
    "matmul_transposed_b": Mutant(
        "matmul", "stored transposed", "inner[:, None] * N + columns[None, :]",
        "columns[None, :] * K + inner[:, None]",
    ),
    "matmul_rows_of_b": Mutant(
        "matmul", "the number of columns of that matrix", "inner[:, None] * N", "inner[:, None] * K"
    ),
    "matmul_in_float16": Mutant(
        "matmul", "rounded to float16", '"ieee")', '"ieee").to(tl.float16)'
    ),
    # tiled matmul
    "tiled_drops_the_last_tile": Mutant(
        "tiled_matmul", "your last tile is dropped", "range(0, K, TILE)", "range(0, K - TILE + 1, TILE)"
    ),
    "tiled_off_by_one_tile": Mutant(
        "tiled_matmul", "your last tile is dropped", "range(0, K, TILE)", "range(0, K - TILE, TILE)"
    ),
    "tiled_does_not_add": Mutant("tiled_matmul", "the last tile's product alone", "acc=c, ", ""),
    "tiled_no_mask_of_a": Mutant(
        "tiled_matmul", "mask the inner elements", ", mask=inner[None, :] < K, other=0.0", ""
    ),
    "tiled_no_other": Mutant("tiled_matmul", "give other=0.0", ", other=0.0", ""),
    "tiled_stands_still": Mutant(
        "tiled_matmul", "`inner` must move", "first + tl.arange", "tl.arange"
    ),
    "tiled_first_tile": Mutant(
        "tiled_matmul", "only the first tile", "range(0, K, TILE)", "range(0, TILE, TILE)"
    ),
    "tiled_never_ends": Mutant(
        "tiled_matmul", "the kernel does not end", "for first in range(0, K, TILE):",
        "first = 0\nwhile first < K:",
    ),
    # online softmax
    "online_maximum_of_the_tile": Mutant(
        "online_softmax", "the maximum of the tile alone", "tl.maximum(m, tl.max(x, axis=1))",
        "tl.max(x, axis=1)",
    ),
    "online_no_rescale": Mutant(
        "online_softmax", "the rescale is missing", "tl.exp(m - m_new) * l", "l"
    ),
    "online_upside_down": Mutant("online_softmax", "upside down", "m - m_new", "m_new - m"),
    "online_old_maximum": Mutant(
        "online_softmax", "with the old maximum m", "x - m_new[:, None]", "x - m[:, None]"
    ),
    "online_last_tile": Mutant(
        "online_softmax", "the last tile's sum alone", "tl.exp(m - m_new) * l + ", ""
    ),
    # attention row
    "row_no_scale": Mutant("attention_row", "not scaled", "scale * tl.sum", "tl.sum"),
    "row_keys_behind_the_end": Mutant(
        "attention_row", "keys behind the end", 'float("-inf")', "0.0"
    ),
    "row_no_rescale_of_l": Mutant(
        "attention_row", "the rescale of l is missing", "rescale * l", "l"
    ),
    "row_no_rescale_of_o": Mutant(
        "attention_row", "the rescale of o is missing", "rescale * o", "o"
    ),
    "row_maximum_of_the_tile": Mutant(
        "attention_row", "the maximum of the tile alone", "tl.maximum(m, tl.max(s, axis=0))",
        "tl.max(s, axis=0)",
    ),
    # flash forward
    "flash_no_scale": Mutant("flash_forward", "not scaled", " * scale", ""),
    "flash_no_rescale_of_l": Mutant(
        "flash_forward", "the rescale of l is missing", "rescale * l", "l"
    ),
    "flash_no_rescale_of_O": Mutant(
        "flash_forward", "the rescale of O is missing", "rescale[:, None] * O", "O"
    ),
    "flash_no_rescale": Mutant(
        "flash_forward", "the rescale of l and O is missing", "tl.exp(m - m_new)", "1.0 + 0 * m_new"
    ),
    "flash_maximum_of_the_tile": Mutant(
        "flash_forward", "the maximum of the tile alone", "tl.maximum(m, tl.max(S, axis=1))",
        "tl.max(S, axis=1)",
    ),
    # causal skip
    "skip_nothing": Mutant(
        "causal_skip", "program 0 loads 4 tiles of keys and its queries see 2: dead tiles", "",
        "end_keys = N_KEYS",
    ),
    "skip_the_diagonal": Mutant(
        "causal_skip", "the tiles on the diagonal are dropped", "", "end_keys = first_query"
    ),
    "skip_half_the_diagonal": Mutant(
        "causal_skip", "ends at the first query's last key", "", "end_keys = first_query + 1"
    ),
    "skip_past_the_end": Mutant(
        "causal_skip", "the loop must end at N_KEYS as well", "", "end_keys = first_query + Q_TILE_SIZE"
    ),
    "skip_one_tile_too_few": Mutant(
        "causal_skip", "dead tiles are read", "first_query + Q", "first_query + K_TILE_SIZE + Q"
    ),
    # backward
    "backward_no_scale": Mutant(
        "backward", "dQ and dK lack the factor", "dS = P *", "dS = 1 / scale * P *"
    ),
    "backward_no_scale_of_dQ": Mutant(
        "backward", "dQ lacks the factor", 'dS, K, input_precision="ieee") * scale', "dS, K)"
    ),
    "backward_no_delta": Mutant("backward", "dS lacks delta", "(dP - delta[:, None])", "dP"),
    "backward_delta_of_keys": Mutant("backward", "the rows of dS", "delta[:, None]", "delta[None, :]"),
    "backward_P_not_transposed": Mutant("backward", "P is not transposed", "tl.trans(P)", "P"),
    "backward_no_L": Mutant("backward", "P lacks L", "S - L[:, None]", "S"),
    "backward_scores_without_scale": Mutant(
        "backward", "without their scale", 'tl.trans(K), input_precision="ieee") * scale',
        'tl.trans(K), input_precision="ieee")',
    ),
}  # fmt: skip
