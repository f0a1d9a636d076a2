"""Puzzles 6 to 8: the product of two tiles, a product by tiles, and the online softmax.

Each function yields the cases of a puzzle. `fold` is the online softmax in PyTorch, with the
mistakes that one can make in it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cs336_systems.learning.judging import Case, Mistake, Puzzle
from cs336_systems.learning.vector_puzzles import draw

LAST_TILE = "your last tile is dropped: the loop must also reach a tile that is not whole"


# 6. matmul


def matmul_cases() -> Iterator[Case]:
    """One program multiplies (16, 64) and (64, 32)."""
    sizes: dict[str, int | bool] = {"M": 16, "N": 32, "K": 64}
    a, b = draw(16, 64), draw(64, 32, seed=1)
    yield Case(
        about="(16, 64) times (64, 32)",
        grid=(1,),
        inputs={"a": a, "b": b},
        expected={"c": a @ b},
        options=sizes,
        mistakes=(
            Mistake(
                "a row of A has K elements: A's rows are K apart",
                {"c": a.as_strided((16, 64), (16, 1)) @ b},
            ),
            Mistake(
                "B is read as if it were stored transposed: its rows are N apart",
                {"c": a @ b.reshape(32, 64).T},
            ),
        ),
    )
    large = a.clone()
    large[0] = 200.0
    tall = b.clone()
    tall[:, 0] = 200.0
    product = large.half().float() @ tall.half().float()
    yield Case(
        about="a product of 2,560,000, which float16 does not hold",
        grid=(1,),
        inputs={"a": large.half(), "b": tall.half()},
        expected={"c": product},
        options=sizes,
        mistakes=(
            Mistake(
                "the product is rounded to float16 and overflows: keep what tl.dot returns",
                {"c": product.half().float()},
            ),
        ),
    )


# 7. tiled matmul


def tiled_matmul_cases() -> Iterator[Case]:
    """Programs of 16 × 16 elements of C; the inner dimension is 40, then 32."""
    for inner in (40, 32):
        a, b = draw(32, inner), draw(inner, 48, seed=1)
        whole = (inner - 1) // 16 * 16  # columns of A before the last tile
        yield Case(
            about=f"(32, {inner}) times ({inner}, 48) in tiles of 16",
            grid=(2, 3),
            inputs={"a": a, "b": b},
            expected={"c": a @ b},
            scalars=(32, 48, inner),
            options={"TILE": 16},
            mistakes=(
                Mistake(LAST_TILE, {"c": a[:, :whole] @ b[:whole]}),
                Mistake(
                    "c holds the last tile's product alone: add each to those before",
                    {"c": a[:, whole:] @ b[whole:]},
                ),
                Mistake(
                    "lanes that the mask switches off hold no number: give other=0.0",
                    {"c": torch.full((32, 48), torch.nan)},
                ),
                Mistake(
                    "only the first tile is multiplied: walk over K in steps of TILE",
                    {"c": a[:, :16] @ b[:16]},
                ),
                Mistake(
                    "every step multiplies the first tile: `inner` must move with the loop",
                    {"c": -(-inner // 16) * (a[:, :16] @ b[:16])},
                ),
            ),
        )


# 8. online softmax


def fold(
    scores: Tensor,
    values: Tensor,
    tile: int,
    *,
    rescales_sum: bool = True,
    rescales_output: bool = True,
    keeps_maximum: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return softmax(scores) @ values and the log-sum-exp of rows, tile by tile, in float32.

    `rescales_sum`, `rescales_output`: whether what was added up is rescaled to a new maximum.
    `keeps_maximum`: whether the maximum is the running one, not that of the tile alone.
    """
    m = torch.full(scores.shape[:1], -torch.inf)
    l = torch.zeros(scores.shape[:1])
    output = torch.zeros(scores.shape[0], values.shape[1])
    for first in range(0, scores.shape[1], tile):
        part = scores[:, first : first + tile]
        m_new = part.amax(1)
        if keeps_maximum:
            m_new = torch.maximum(m, m_new)
        p = torch.exp(part - m_new[:, None])
        rescale = torch.exp(m - m_new)
        l = (rescale * l if rescales_sum else l) + p.sum(1)
        before = rescale[:, None] * output if rescales_output else output
        output = before + p @ values[first : first + tile]
        m = m_new
    return output / l[:, None], m + l.log()


def online_softmax_cases() -> Iterator[Case]:
    """Log-sum-exps of rows of 40 columns in tiles of 16; then with the largest scores first."""
    x = 3 * draw(16, 40)
    x[:, 17] = 9.0  # a maximum that is not in the first tile
    large = draw(16, 40)
    large[:, 3] = 150.0
    for about, scores in (("rows of 40 columns", x), ("a score of 150 in the first tile", large)):
        nothing = torch.zeros(40, 1)
        last = scores[:, 32:]
        maximum = scores.amax(1)
        of_last = maximum + torch.exp(last - maximum[:, None]).sum(1).log()
        yield Case(
            about=f"{about}, in tiles of 16",
            grid=(2,),
            inputs={"x": scores},
            expected={"lse": scores.logsumexp(1)},
            scalars=(40,),
            options={"ROWS": 8, "TILE": 16},
            mistakes=(
                Mistake(
                    "m_new is the maximum of the tile alone: take the larger of it and m",
                    {"lse": fold(scores, nothing, 16, keeps_maximum=False)[1]},
                ),
                Mistake(
                    "the rescale is missing: l was added up with the old maximum, so multiply it "
                    "by exp(m - m_new)",
                    {"lse": fold(scores, nothing, 16, rescales_sum=False)[1]},
                ),
                Mistake(
                    "the rescale is upside down: at the first tile exp(m_new - m) is infinite, "
                    "exp(m - m_new) is 0",
                    {"lse": torch.full((16,), torch.nan)},
                ),
                Mistake(
                    "the exponentials are taken with the old maximum m, -inf at first: use m_new",
                    {"lse": torch.full((16,), torch.inf)},
                ),
                Mistake(
                    "l holds the last tile's sum alone: add the rescaled l before it",
                    {"lse": of_last},
                ),
            ),
        )


MATRIX_PUZZLES = {
    "matmul": Puzzle(
        cases=matmul_cases,
        hints={"outside load": "is the distance of two rows the number of columns of that matrix?"},
    ),
    "tiled_matmul": Puzzle(
        cases=tiled_matmul_cases,
        hints={"outside load": "the last tile is not whole: mask the inner elements from K on"},
    ),
    "online_softmax": Puzzle(cases=online_softmax_cases),
}
