"""Puzzles 9 to 12: a row of attention, FlashAttention-2's forward, its skipped tiles, a backward.

Each function yields the cases of a puzzle. What must come out is `attention_reference`'s.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cs336_systems.attention.reference import attention_reference, causal_mask
from cs336_systems.learning.judging import Case, Mistake, Puzzle
from cs336_systems.learning.matrix_puzzles import fold
from cs336_systems.learning.vector_puzzles import draw
from cs336_systems.stepper import Recording

D = 16  # head dim
SCALE = D**-0.5
TILE = 16  # keys
NO_SCALE = "the scores are not scaled: multiply them by `scale`"
OLD_SUM = "the rescale of l is missing: it was added up with the old maximum"
OLD_OUTPUT = "the rescale of {} is missing: it was added up with the old maximum"
TILE_MAXIMUM = "m_new is the maximum of the tile alone: take the larger of it and m"


def attention(q: Tensor, k: Tensor, v: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    """Return the oracle's output and log-sum-exp in float32."""
    output, lse = attention_reference(q, k, v, return_lse=True, **options)  # type: ignore[arg-type]
    return output, lse


def draw_attention(queries: int, keys: int, *, first_key: float = 1.0) -> tuple[Tensor, ...]:
    """Return q, k, v; the scores of the first key are multiplied by `first_key`."""
    q, k, v = draw(queries, D), draw(keys, D, seed=1), draw(keys, D, seed=2)
    k[0] *= first_key
    return q, k, v


def fold_mistakes(
    q: Tensor, k: Tensor, v: Tensor, *, output: str, lse: str | None
) -> tuple[Mistake, ...]:
    """Return the mistakes of an online softmax; `output` and `lse` name the case's outputs."""
    scores = q @ k.T * SCALE

    def results(pair: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {output: pair[0]} if lse is None else {output: pair[0], lse: pair[1]}

    only_output = fold(scores, v, TILE, rescales_output=False)[0]
    return (
        Mistake(NO_SCALE, results(attention(q, k, v, scale=1.0))),
        Mistake(OLD_SUM, results(fold(scores, v, TILE, rescales_sum=False))),
        Mistake(OLD_OUTPUT.format(output), {output: only_output}),
        Mistake(TILE_MAXIMUM, results(fold(scores, v, TILE, keeps_maximum=False))),
        Mistake(
            f"the rescale of l and {output} is missing: both were added up with the old maximum",
            results(fold(scores, v, TILE, rescales_sum=False, rescales_output=False)),
        ),
    )


# 9. attention row


def attention_row_cases() -> Iterator[Case]:
    """A program a query; 40 keys in tiles of 16."""
    for about, first_key in (
        ("40 keys in tiles of 16", 1.0),
        ("a first key of large scores", 300.0),
    ):
        q, k, v = draw_attention(3, 40, first_key=first_key)
        padded = [torch.cat([x, torch.zeros(8, D)]) for x in (k, v)]
        yield Case(
            about=about,
            grid=(3,),
            inputs={"q": q, "k": k, "v": v},
            expected={"o": attention(q, k, v)[0]},
            scalars=(40, SCALE),
            options={"D": D, "TILE": TILE},
            mistakes=(
                Mistake(
                    "keys behind the end count with a score of 0: their scores must be -inf",
                    {"o": attention(q, *padded)[0]},
                ),
                *fold_mistakes(q, k, v, output="o", lse=None),
            ),
        )


# 10. flash forward


def flash_cases() -> Iterator[Case]:
    """Tiles of 16 queries and 16 keys, all whole."""
    for about, first_key in (("32 queries, 48 keys", 1.0), ("a first key of large scores", 300.0)):
        q, k, v = draw_attention(32, 48, first_key=first_key)
        output, lse = attention(q, k, v)
        scores = q @ k.T * SCALE
        yield Case(
            about=about,
            grid=(2,),
            inputs={"Q": q, "K": k, "V": v},
            expected={"O": output, "L": lse},
            scalars=(48, SCALE),
            options={"D": D, "Q_TILE_SIZE": 16, "K_TILE_SIZE": TILE},
            mistakes=(
                *fold_mistakes(q, k, v, output="O", lse="L"),
                Mistake(
                    "O is divided by l in the loop: once, behind it, is enough",
                    {"O": output / scores_sum(scores)[:, None]},
                ),
            ),
        )


def scores_sum(scores: Tensor) -> Tensor:
    """Return the sum of exp(scores - maximum) of each row."""
    return torch.exp(scores - scores.amax(1, keepdim=True)).sum(1)


# 11. causal skip


def causal_skip_cases() -> Iterator[Case]:
    """Tiles of 32 queries and 16 keys; then fewer keys than queries."""
    for keys in (64, 48):
        q, k, v = draw_attention(64, keys)
        output, lse = attention(q, k, v, is_causal=True)
        nothing = up_to(q, k, v, beyond=0)
        nothing[0][:32] = torch.nan  # 0 / 0
        yield Case(
            about=f"64 queries in tiles of 32, {keys} keys in tiles of 16",
            grid=(2,),
            inputs={"Q": q, "K": k, "V": v},
            expected={"O": output, "L": lse},
            scalars=(keys, SCALE),
            options={"D": D, "Q_TILE_SIZE": 32, "K_TILE_SIZE": TILE},
            mistakes=(
                Mistake(
                    "the tiles on the diagonal are dropped: the last query of the tile sees the "
                    "keys up to first_query + Q_TILE_SIZE - 1",
                    dict(zip("OL", nothing)),
                ),
                Mistake(
                    "the loop ends at the first query's last key: the tile's last query sees "
                    "Q_TILE_SIZE - 1 more",
                    dict(zip("OL", up_to(q, k, v, beyond=TILE))),
                ),
            ),
        )


def up_to(q: Tensor, k: Tensor, v: Tensor, *, beyond: int) -> tuple[Tensor, Tensor]:
    """Return causal attention to keys less than `beyond` behind the first query of each tile."""
    queries, keys = torch.arange(len(q))[:, None], torch.arange(len(k))
    mask = causal_mask(len(q), len(k), "cpu") & (keys < queries // 32 * 32 + beyond)
    return attention(q, k, v, mask=mask)


def skipped_tiles(case: Case, recording: Recording) -> str:
    """Return a hint if a program loads more tiles of keys than its queries see."""
    loaded: dict[int, int] = {}
    for program, _, _, _, accesses, _ in recording.steps:
        for access in accesses:
            is_load = access["kind"] == "load"
            if is_load and recording.arguments[access["argument"]].name == "K_ptr":
                loaded[program] = loaded.get(program, 0) + 1
    num_keys = len(case.inputs["K"])
    for program, count in loaded.items():
        needed = -(-min(num_keys, 32 * (program + 1)) // TILE)
        if count > needed:
            return (
                f"O and L are right, but program {program} loads {count} tiles of keys and its "
                f"queries see {needed}: dead tiles are read"
            )
    return ""


# 12. backward of one tile


def backward_cases() -> Iterator[Case]:
    """One tile of 16 queries and 16 keys."""
    q, k, v, grad = (draw(16, D, seed=seed) for seed in range(4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    output, lse = attention(*leaves)
    output.backward(grad)
    exact = {f"d{name}": x.grad for name, x in zip("QKV", leaves) if x.grad is not None}
    output, lse = output.detach(), lse.detach()

    # The equations of FlashAttention-2's backward, and what is left if one is wrong.
    scores = q @ k.T * SCALE
    p = torch.exp(scores - lse[:, None])
    dp = grad @ v.T
    delta = (output * grad).sum(1)
    without_delta = p * dp
    yield Case(
        about="16 queries, 16 keys",
        grid=(1,),
        inputs={"Q": q, "K": k, "V": v, "dO": grad, "L": lse, "delta": delta},
        expected=exact,
        scalars=(SCALE,),
        options={"N": 16, "D": D},
        mistakes=(
            Mistake(
                "dQ and dK lack the factor `scale`",
                {"dQ": exact["dQ"] / SCALE, "dK": exact["dK"] / SCALE},
            ),
            Mistake("dQ lacks the factor `scale`", {"dQ": exact["dQ"] / SCALE}),
            Mistake("dK lacks the factor `scale`", {"dK": exact["dK"] / SCALE}),
            Mistake(
                "dS lacks delta: dS = P * (dP - delta[:, None])",
                {"dQ": without_delta @ k * SCALE, "dK": without_delta.T @ q * SCALE},
            ),
            Mistake(
                "delta belongs to queries, the rows of dS: delta[:, None]",
                {"dQ": p * (dp - delta) @ k * SCALE},
            ),
            Mistake("dV = Pᵀ dO: P is not transposed", {"dV": p @ grad}),
            Mistake(
                "P lacks L: P = exp(S - L[:, None]), the scores are not normalised",
                {"dV": torch.exp(scores).T @ grad},
            ),
            Mistake(
                "P is computed again from scores without their scale",
                {"dV": torch.exp(q @ k.T - lse[:, None]).T @ grad},
            ),
        ),
    )


ATTENTION_PUZZLES = {
    "attention_row": Puzzle(cases=attention_row_cases),
    "flash_forward": Puzzle(cases=flash_cases),
    "causal_skip": Puzzle(
        cases=causal_skip_cases,
        inspect=skipped_tiles,
        hints={"outside load": "the loop must end at N_KEYS as well: take the smaller of the two"},
    ),
    "backward": Puzzle(cases=backward_cases),
}
