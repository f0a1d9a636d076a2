"""Puzzles 1 to 5, one program's tile of a vector or of a row: load, mask, add, row sum, softmax.

Each function yields the cases of a puzzle. Inputs are drawn from a fixed seed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cs336_systems.learning.judging import Case, Mistake, Puzzle


def draw(rows: int, columns: int | None = None, seed: int = 0) -> Tensor:
    """Return a matrix of standard normal numbers, or a vector, the same for the same seed."""
    shape = (rows,) if columns is None else (rows, columns)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def only_first(tensor: Tensor, count: int) -> Tensor:
    """Return `tensor` with NaN, which no program has stored over, behind its first elements."""
    kept = torch.full_like(tensor, torch.nan)
    kept[:count] = tensor[:count]
    return kept


# 1. load


def load_cases() -> Iterator[Case]:
    """64 elements in four blocks: ten times each."""
    x = draw(64)
    overlapping = 16 + 4 - 1  # elements of four blocks that begin one apart
    yield Case(
        about="64 elements in 4 blocks of 16",
        grid=(4,),
        inputs={"x": x},
        expected={"out": 10 * x},
        options={"BLOCK": 16},
        mistakes=(
            Mistake(
                "every program takes the first block: its own begins at tl.program_id(0) * BLOCK",
                {"out": only_first(10 * x, 16)},
            ),
            Mistake(
                "neighbouring blocks begin one element apart: multiply tl.program_id(0) by BLOCK",
                {"out": only_first(10 * x, overlapping)},
            ),
            Mistake(
                "x_ptr alone is the address of one element: add the offsets before you load",
                {"out": 10 * x[0].expand(64)},
            ),
            Mistake(
                "every program loads the first block and stores it to its own",
                {"out": 10 * x[:16].repeat(4)},
            ),
        ),
    )


# 2. mask


def mask_cases() -> Iterator[Case]:
    """Lengths of no whole number of blocks: the square of each element."""
    for length in (50, 7):
        x = draw(length)
        blocks = -(-length // 16)
        yield Case(
            about=f"{length} elements in {blocks} blocks of 16",
            grid=(blocks,),
            inputs={"x": x},
            expected={"out": x * x},
            scalars=(length,),
            options={"BLOCK": 16},
            mistakes=(
                Mistake(
                    "your last tile is dropped: it is not whole, but its first lanes exist",
                    {"out": only_first(x * x, length // 16 * 16)},
                ),
                Mistake(
                    "the last element is masked off: `<` length, elements are numbered from 0",
                    {"out": only_first(x * x, length - 1)},
                ),
                Mistake(
                    "only the first block is stored: compare the offsets with length, not BLOCK",
                    {"out": only_first(x * x, min(16, length))},
                ),
            ),
        )


# 3. add


def add_cases() -> Iterator[Case]:
    """Outer sums by tiles of 16 × 16: out[i, j] = x[i] + y[j]."""
    for rows, columns in ((20, 40), (33, 9)):
        x, y = draw(rows), draw(columns, seed=1)
        tiles = (-(-rows // 16), -(-columns // 16))
        yield Case(
            about=f"{rows} × {columns} in tiles of 16 × 16",
            grid=tiles,
            inputs={"x": x, "y": y},
            expected={"out": x[:, None] + y},
            scalars=(rows, columns),
            options={"TILE": 16},
            mistakes=(
                Mistake(
                    "the tile is transposed: x[:, None] is a column, its rows follow x",
                    {"out": transposed_tiles(x, y)},
                ),
                Mistake("sums are wanted, not products", {"out": x[:, None] * y}),
            ),
        )


def transposed_tiles(x: Tensor, y: Tensor, tile: int = 16) -> Tensor:
    """Return x[j] + y[i] at [i, j] within each tile; NaN where x or y has no such element."""
    out = torch.full((len(x), len(y)), torch.nan)
    for row in range(len(x)):
        for column in range(len(y)):
            of_x = row // tile * tile + column % tile
            of_y = column // tile * tile + row % tile
            if of_x < len(x) and of_y < len(y):
                out[row, column] = x[of_x] + y[of_y]
    return out


# 4. row sum


def row_sum_cases() -> Iterator[Case]:
    """Sums of float16 rows that lie further apart than they are long."""
    storage = draw(6, 48).half()
    x = storage[:, :40]
    packed = storage.flatten()[: 6 * 40].view(6, 40)  # as if rows lay end to end
    sums = x.float().sum(1)
    yield Case(
        about="6 rows of 40 float16 numbers, 48 apart",
        grid=(6,),
        inputs={"x": x},
        expected={"out": sums},
        scalars=(48, 40),
        options={"BLOCK": 64},
        mistakes=(
            Mistake(
                "lanes that the mask switches off hold no number: give other=0.0",
                {"out": torch.full((6,), torch.nan)},
            ),
            Mistake(
                "the next row begins `stride` elements on, not num_columns",
                {"out": packed.float().sum(1)},
            ),
            Mistake("the sum is wanted, not the mean", {"out": sums / 40}),
            Mistake(
                "every program sums row 0: row 1 begins at x_ptr + stride",
                {"out": sums[0].expand(6)},
            ),
        ),
    )
    large = torch.full((2, 32), 4000.0, dtype=torch.float16)
    yield Case(
        about="rows whose sum, 128,000, float16 does not hold",
        grid=(2,),
        inputs={"x": large},
        expected={"out": torch.full((2,), 128_000.0)},
        scalars=(32, 32),
        options={"BLOCK": 32},
        mistakes=(
            Mistake(
                "the sum is taken in float16 and overflows: x.to(tl.float32) first",
                {"out": torch.full((2,), torch.inf)},
            ),
        ),
    )


# 5. softmax


def softmax_cases() -> Iterator[Case]:
    """Softmax of rows that are shorter than a block, then of large numbers."""
    x = draw(5, 20) - 3.0
    exponentials = torch.exp(x - x.amax(1, keepdim=True))
    yield Case(
        about="5 rows of 20 columns in blocks of 32",
        grid=(5,),
        inputs={"x": x},
        expected={"out": x.softmax(1)},
        scalars=(20,),
        options={"BLOCK": 32},
        mistakes=(
            Mistake(
                "lanes behind the end count as zeros: give other=float('-inf'), whose exp is 0",
                {"out": torch.cat([x, torch.zeros(5, 12)], 1).softmax(1)[:, :20]},
            ),
            Mistake(
                "lanes that the mask switches off hold no number: give other=float('-inf')",
                {"out": torch.full_like(x, torch.nan)},
            ),
            Mistake("the division by the sum is missing", {"out": exponentials}),
            Mistake("the division by the sum is missing", {"out": x.exp()}),
            Mistake(
                "the divisor is the sum of x: sum the exponentials",
                {"out": torch.zeros_like(x)},  # the sum is -inf, behind the end
            ),
        ),
    )
    large = 200 * draw(5, 20)
    overflowing = large.exp() / large.exp().sum(1, keepdim=True)
    yield Case(
        about="numbers of several hundred",
        grid=(5,),
        inputs={"x": large},
        expected={"out": large.softmax(1)},
        scalars=(20,),
        options={"BLOCK": 32},
        mistakes=(
            Mistake(
                "exp overflows: subtract the row's maximum first, which changes no ratio",
                {"out": overflowing},
            ),
        ),
    )


ONE_ROW = "a row of out has num_columns elements, and a tile that is wider goes on in the next row"
VECTOR_PUZZLES = {
    "load": Puzzle(cases=load_cases),
    "mask": Puzzle(cases=mask_cases),
    "add": Puzzle(
        cases=add_cases,
        hints={
            "twice store": f"{ONE_ROW}: step by num_columns and mask the columns too",
            "outside store": "mask the rows and the columns, both with `<`",
        },
    ),
    "row_sum": Puzzle(
        cases=row_sum_cases,
        hints={"beside load": "the mask must switch off the columns behind the row's end"},
    ),
    "softmax": Puzzle(
        cases=softmax_cases,
        hints={"twice store": "the mask must switch off the columns behind the row's end"},
    ),
}
