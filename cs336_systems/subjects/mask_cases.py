"""Define cases, cells and tables of the experiments with masks, and compare with dense attention.

Beside the times a cell records the density of the mask that ran and the share of its tiles that are
live: skipping tiles can gain at most the inverse of that share. "Dense" is attention of the same
shape without the mask (causal, if the mask is causal): the fastest of our Triton kernels, our
Hopper kernels if they run, and SDPA's flash. So a slow dense path of ours flatters no mask.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import pandas as pd

from cs336_systems.accounting import ATTENTION_FLOPS_PER_PAIR
from cs336_systems.bench.spec import Cell, Row
from cs336_systems.book.frames import digits, pick, with_speeds
from cs336_systems.book.tables import Listing, Pivot, TableSpec
from cs336_systems.config import DTypeName, MaskCase, RunConfig
from cs336_systems.subjects import attention_passes as attention
from cs336_systems.subjects.attention_passes import MODE_WORDS, AttentionExperiment
from cs336_systems.subjects.mask_builders import is_plain, mask_parts

DENSITY = Row(mode="forward", quantity="density", unit="1")
BLOCK_DENSITY = Row(mode="forward", quantity="block_density", unit="1")
SMALL_HEADS, SMALL_HEAD_DIM = 1, 32  # below handout scale, where kernels are interpreted
DENSE_PEERS = ("hopper", "sdpa_flash", "sdpa_cudnn")  # measured on full and causal attention
# The fastest of these is "dense attention"; `auto` takes one of the first two.
DENSE = ("triton", "hopper", "sdpa_flash")
# mask's name without numbers -> (name of its family, whether dense attention beside it is causal)
FAMILIES = {
    "full": ("full", False),
    "causal": ("causal", True),
    "document": ("documents", False),
    "document+causal": ("causal documents", True),
    "grid": ("neighbours in rows", False),
    "hilbert": ("neighbours along Hilbert's curve", False),
    "random": ("random tiles", False),
    "tokens": ("random tokens", False),
    "shared+causal": ("shared keys", True),
    "topk": ("keys of each query", True),
    "dilated": ("dilated", False),
    "dilated+causal": ("causal dilated", True),
}
# columns that a row and its dense attention have in common
AS_DENSE = [
    "mode",
    "quantity",
    "dense_causal",
    "batch",
    "heads",
    "seqlen_q",
    "head_dim",
    "dtype",
    "run",
]
# kind of a mask that changes from call to call -> the implementation whose mask build is timed
BUILT_ANEW = {"document": "triton_lists", "shared": "triton", "topk": "triton"}


def mask_cell(case: MaskCase, implementation: str, run: RunConfig) -> Cell:
    """Return the cell of one implementation under one mask.

    Its rows are both densities, the times of forward, backward and both together, and on a GPU the
    peak memory. For masks that change from call to call, one implementation (BUILT_ANEW) also
    reports the time of building a new mask.
    """
    rows = [DENSITY, BLOCK_DENSITY, *AttentionExperiment.rows]
    rows += (
        [attention.MASK_TIME] if BUILT_ANEW.get(mask_parts(case.mask)[0]) == implementation else []
    )
    rows += [attention.PEAK] if run.device == "cuda" else []
    return Cell(case=case, implementation=implementation, rows=tuple(rows))


def names_of(
    run: RunConfig, peers: tuple[str, ...], ours: tuple[str, ...] = ("triton",)
) -> tuple[str, ...]:
    """Return the implementations for a mask: `ours` and `peers` at handout scale.

    At smoke scale there are also "eager" and "tiled", at tiny scale "eager" and no `peers`.
    """
    if run.scale == "handout":
        return (*ours, *peers)
    if run.scale == "tiny":
        return ("eager", *ours)
    return ("eager", "tiled", *ours, *peers)


def mask_case(
    run: RunConfig,
    mask: str,
    seqlen: int,
    *,
    heads: int,
    head_dim: int,
    blocks: tuple[int, int] = (128, 128),
) -> MaskCase:
    """Return a case of `mask` at the run's scale.

    Below handout scale heads, head dim and mask tiles are small enough for Triton's interpreter,
    and tiles are 64 × 64. The dtype is bfloat16 on a GPU, else float32.
    """
    handout = run.scale == "handout"
    dtype: DTypeName = "bfloat16" if run.device == "cuda" else "float32"
    query_block, key_block = blocks if handout else (64, 64)
    heads, head_dim = (heads, head_dim) if handout else (SMALL_HEADS, SMALL_HEAD_DIM)
    return MaskCase(
        mask=mask,
        batch=1,
        heads=heads,
        seqlen_q=seqlen,
        head_dim=head_dim,
        dtype=dtype,
        query_block=query_block,
        key_block=key_block,
    )


class MaskExperiment(AttentionExperiment, ABC):
    """Base class of experiments with masks by name; a subclass defines `planned`."""

    @abstractmethod
    def planned(self, run: RunConfig) -> Iterable[tuple[MaskCase, Sequence[str]]]:
        """Return each case with the implementations that are measured on it."""

    def cells(self, run: RunConfig) -> list[Cell]:
        """Return a cell for each planned case and implementation."""
        return [mask_cell(case, name, run) for case, names in self.planned(run) for name in names]

    def columns(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return `family`, `pattern` and `number` of the mask, `blocks`, `pass` and `dense_causal`.

        `number` is the last number in the mask's name (a density, a rate), or 1 without one and for
        documents. `blocks` are the mask's tiles in words.
        """
        name, numbers, _ = mask_parts(row["mask"])
        family, causal = FAMILIES["+".join([name, *row["mask"].split("+")[1:]])]
        last = numbers.rpartition("/")[2]
        return {
            "family": family,
            "pattern": family if name == "document" else row["mask"],
            "number": float(last) if last and name != "document" else 1.0,
            "blocks": f"{row['query_block']} × {row['key_block']}",
            "dense_causal": causal,
            "pass": MODE_WORDS[row["mode"]],
        }

    def compared(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return the frame with columns that compare each row with dense attention of its run.

        `dense` is the fastest dense implementation and `over_dense` how many times as fast the row
        is. `ideal` is the ratio of dense attention's live tiles to the row's, `ideal_by_pairs` that
        of attended pairs.
        """
        frame = with_pairs(frame)

        # The smallest speed is the one over the fastest dense implementation.
        plain = {"quantity": "time", "mask": is_plain}
        for name in DENSE:
            frame = with_speeds(frame, f"over_{name}", plain | {"implementation": name}, AS_DENSE)
        over = frame[[f"over_{name}" for name in DENSE]].set_axis(DENSE, axis="columns")
        least, whose = over.min(axis="columns"), over.fillna(math.inf).idxmin(axis="columns")
        frame = frame.assign(over_dense=least, dense=whose.where(least.notna(), ""))

        # The most that skipping can gain: shares of dense attention over those of the row.
        shares = pick(frame, plain).drop_duplicates(AS_DENSE).set_index(AS_DENSE)[["live", "pairs"]]
        of_dense = frame[AS_DENSE].join(shares, on=AS_DENSE)
        for column, share in (("ideal", "live"), ("ideal_by_pairs", "pairs")):
            frame[column] = (of_dense[share] / frame[share]).where(
                least.notna() & (frame[share] > 0)
            )
        return frame

    def numbers(self, frame: pd.DataFrame) -> dict[str, Any]:
        """Return the template's function `over(mode=..., pattern=...)`.

        It gives `best_over_dense` as text: how many times as fast as dense attention ours is.
        """
        return {"over": lambda **where: f"{digits(best_over_dense(frame, **where))}×"}


def with_pairs(frame: pd.DataFrame) -> pd.DataFrame:
    """Return `frame` with the columns `pairs`, `live` and `tflops`.

    `pairs` and `live` are the shares of attended pairs and of live tiles of the row's mask.
    `tflops` is the rate of a time in TFLOP/s, which counts attended pairs only.
    """
    shares = {}
    for name, quantity in (("pairs", "density"), ("live", "block_density")):
        measured = pick(frame, {"quantity": quantity, "status": "ok"})
        shares[name] = frame["case"].map(dict(zip(measured["case"], measured["median"])))
    frame = frame.assign(**shares)
    area = (
        frame["pairs"]
        * frame["batch"]
        * frame["heads"]
        * frame["seqlen_q"] ** 2
        * frame["head_dim"]
    )
    # FLOP per ms / 1e9 = TFLOP/s
    rates = frame["mode"].map(ATTENTION_FLOPS_PER_PAIR) * area / frame["median"] / 1e9
    return frame.assign(tflops=rates.where((frame["quantity"] == "time") & (frame["median"] > 0)))


def best_over_dense(frame: pd.DataFrame, mode: str = "forward_backward", **where: Any) -> float:
    """Return how many times as fast as dense attention the fastest of ours is on one case.

    Raises ValueError unless `where` chooses exactly one case.
    """
    rows = pick(
        frame, {"quantity": "time", "mode": mode, "implementation": ("triton", "hopper"), **where}
    )
    if rows["case"].nunique() != 1:
        raise ValueError(f"{rows['case'].nunique()} cases have {where}, one is needed")
    return float(rows["over_dense"].max())


def dense_tables(**where: Any) -> dict[str, TableSpec]:
    """Return a table for each mode: every mask and implementation compared with dense attention."""
    return {
        mode: Listing(
            title=f"{words} beside dense attention",
            columns={
                "mask": "pattern",
                "implementation": "implementation",
                "pairs (%)": lambda row: 100 * row["pairs"],
                "live tiles (%)": lambda row: 100 * row["live"],
                "ms": "median",
                "TFLOP/s": "tflops",
                "dense": "dense",
                "speed over dense": "over_dense",
                "by tiles at most": "ideal",
                "by pairs at most": "ideal_by_pairs",
            },
            where={"quantity": "time", "mode": mode, **where},
        )
        for mode, words in MODE_WORDS.items()
    }


MASK_TIMES = partial(Pivot, where={"quantity": "mask_time"})
PEAKS = Pivot(
    title="peak memory, forward + backward",
    down={"mask": "pattern"},
    unit="GiB",
    where={"quantity": "peak_memory"},
)
