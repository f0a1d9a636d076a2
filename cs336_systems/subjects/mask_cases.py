"""What the experiments with masks share: cases and cells, how they are measured, and dense
attention beside them.

Beside the times a cell records the density of the mask that ran and the share of its tiles that are
live: the inverse of that share is what skipping tiles can gain at most. "Dense" is attention of the
same shape without the mask (causal, if the mask is causal): the fastest of our Triton kernels, our
Hopper kernels where they run, and SDPA's flash, so that a slow dense path of ours flatters nothing.
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
from cs336_systems.subjects.mask_implementations import is_plain, mask_parts

DENSITY = Row(mode="forward", quantity="density", unit="1")
BLOCK_DENSITY = Row(mode="forward", quantity="block_density", unit="1")
SMALL_HEADS, SMALL_HEAD_DIM = 1, 32  # below handout scale, where kernels are interpreted
DENSE_PEERS = ("hopper", "sdpa_flash", "sdpa_cudnn")  # beside full and causal attention
# whose fastest is dense attention; `auto` takes one of the first two
DENSE = ("triton", "hopper", "sdpa_flash")
# of a mask's pattern, without its numbers; whether dense attention beside it is causal
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
# What a row and the dense attention beside it have in common.
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
# whose build is timed, by mask
BUILT_ANEW = {"document": "triton_lists", "shared": "triton", "topk": "triton"}


def mask_cell(case: MaskCase, implementation: str, run: RunConfig) -> Cell:
    """A cell that reports both densities, the times of both passes and together, and on a GPU the
    peak memory.

    Of masks that change from call to call one implementation reports what building the next one
    takes.
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
    """The implementations of a cell; below handout scale also the oracle itself and the tiled
    stage.
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
    """A case of the handout's size, or of one that the interpreter can do; there in float32 and
    tiles of 64.
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
    """Base of the experiments with masks by name: cells, columns, dense attention beside."""

    @abstractmethod
    def planned(self, run: RunConfig) -> Iterable[tuple[MaskCase, Sequence[str]]]:
        """Each case, and the implementations that are measured on it."""

    def cells(self, run: RunConfig) -> list[Cell]:
        return [mask_cell(case, name, run) for case, names in self.planned(run) for name in names]

    def columns(self, row: dict[str, Any]) -> dict[str, Any]:
        """`family` and `pattern` of the mask, its `number` (a density, a rate), `blocks`, `pass`
        and `dense_causal`.
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
        """Beside dense attention of one run: `dense` (whose), `over_dense` (times as fast), `ideal`
        (tiles of dense over live ones) and `ideal_by_pairs`.
        """
        frame = with_pairs(frame)
        plain = {"quantity": "time", "mask": is_plain}
        for name in DENSE:
            frame = with_speeds(frame, f"over_{name}", plain | {"implementation": name}, AS_DENSE)
        over = frame[[f"over_{name}" for name in DENSE]].set_axis(DENSE, axis="columns")
        # Beside the fastest of them a row gains least.
        least, whose = over.min(axis="columns"), over.fillna(math.inf).idxmin(axis="columns")
        frame = frame.assign(over_dense=least, dense=whose.where(least.notna(), ""))
        shares = pick(frame, plain).drop_duplicates(AS_DENSE).set_index(AS_DENSE)[["live", "pairs"]]
        of_dense = frame[AS_DENSE].join(shares, on=AS_DENSE)
        for column, share in (("ideal", "live"), ("ideal_by_pairs", "pairs")):
            frame[column] = (of_dense[share] / frame[share]).where(
                least.notna() & (frame[share] > 0)
            )
        return frame

    def numbers(self, frame: pd.DataFrame) -> dict[str, Any]:
        """`over(mode=..., pattern=...)`: how many times as fast as dense attention the fastest of
        ours is.
        """
        return {"over": lambda **where: f"{digits(best_over_dense(frame, **where))}×"}


def with_pairs(frame: pd.DataFrame) -> pd.DataFrame:
    """`frame` with `pairs` and `live`, shares of the mask that ran, and of times `tflops` by
    attended pairs.
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
    # FLOPs a ms as TFLOP/s
    rates = frame["mode"].map(ATTENTION_FLOPS_PER_PAIR) * area / frame["median"] / 1e9
    return frame.assign(tflops=rates.where((frame["quantity"] == "time") & (frame["median"] > 0)))


def best_over_dense(frame: pd.DataFrame, mode: str = "forward_backward", **where: Any) -> float:
    """How many times as fast as dense attention the fastest of ours is on the one case of `where`."""
    rows = pick(
        frame, {"quantity": "time", "mode": mode, "implementation": ("triton", "hopper"), **where}
    )
    if rows["case"].nunique() != 1:
        raise ValueError(f"{rows['case'].nunique()} cases have {where}, one is needed")
    return float(rows["over_dense"].max())


def dense_tables(**where: Any) -> dict[str, TableSpec]:
    """A table for each pass: every mask and implementation beside dense attention and the two
    ideals.
    """
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
