"""Our kernels under windows, packed documents and lists of tiles, beside libraries, by turns.

FlashAttention-4 has windows and packed documents of its own; lists of tiles reach it through the
FLASH back end of FlexAttention. Rates count attended pairs only.
"""

from dataclasses import dataclass, replace
from typing import Any

from cs336_systems.bench.spec import turns_cell
from cs336_systems.config import AttentionShape, MaskCase, RunConfig
from cs336_systems.experiments import Cell, problem
from cs336_systems.subjects.attention_by_turns import AttentionByTurns
from cs336_systems.subjects.attention_passes import (
    BOTH,
    BOTH_TIMES,
    FORWARD,
    MODE_WORDS,
    rate_bars,
    rate_tables,
    sized_shape,
)
from cs336_systems.subjects.mask_builders import mask_parts
from cs336_systems.subjects.mask_cases import DENSITY, with_pairs

LENGTH = {"tiny": 64, "smoke": 128, "handout": 16384}
HEADS, HEAD_DIMS = 16, (64, 128)
HEAD_DIM_DRAWN = 128
WINDOW, DOCUMENT = 1024, 4096  # keys of a window, tokens of a document
DENSITIES = (0.1, 0.3, 0.5)  # shares of live tiles
LISTED = ("hopper", "triton", "flex", "flex_flash")  # for lists of tiles
OWN = ("hopper", "triton", "fa4")  # for windows and packed documents


@dataclass(frozen=True, kw_only=True)
class Masked(AttentionShape):
    """Self-attention under a mask that is given by name, as `parse_mask` reads it."""

    mask: str

    @property
    def mask_case(self) -> MaskCase:
        """Return the call as the case of a mask."""
        return MaskCase(
            mask=self.mask,
            batch=self.batch,
            heads=self.heads,
            seqlen_q=self.seqlen_q,
            head_dim=self.head_dim,
            dtype=self.dtype,
        )


@problem(
    title="Windows, packed documents and lists of tiles beside FlashAttention-4 and FlexAttention",
    order=2.5,
)
class MaskedAttention(AttentionByTurns):
    implementations = tuple(dict.fromkeys((*OWN, *LISTED)))
    rounds = {"cpu": 3, "cuda": 8}

    def cases(self, run: RunConfig) -> list[Masked]:
        """Return head dims with windows, documents and random tiles, on a laptop one window."""
        length = LENGTH[run.scale]
        if run.scale != "handout":
            small = sized_shape(run, 1, 1, length, 32, False)
            return [Masked(**vars(small), mask="window:32")]
        documents = "document:" + ",".join([str(DOCUMENT)] * (length // DOCUMENT))
        masks = (
            f"window:{WINDOW}",
            documents,
            f"{documents}+causal",
            *(f"random:{one:g}" for one in DENSITIES),
        )
        shapes = [sized_shape(run, 1, HEADS, length, dim, False) for dim in HEAD_DIMS]
        return [Masked(**vars(shape), mask=mask) for shape in shapes for mask in masks]

    def cells(self, run: RunConfig) -> list[Cell]:
        """Return a cell per mask with its implementations by turns, and the mask's density."""
        cells = []
        for case in self.cases(run):
            names = LISTED if case.mask.startswith("random") else OWN
            times = turns_cell(case, names, (FORWARD, BOTH))
            density = replace(DENSITY, implementation=names[0])
            cells.append(replace(times, rows=(density, *times.rows)))
        return cells

    def columns(self, row: dict[str, Any]) -> dict[str, Any]:
        """Add `attended`, the mask in words, and `width`, the head dim in words."""
        name, numbers, causal = mask_parts(row["mask"])
        words = {
            "window": f"window of {numbers}",
            "document": f"{'causal ' * causal}documents of {numbers.partition(',')[0]}",
            "random": f"tiles, {numbers} live",
        }
        return {"attended": words[name], "width": f"head dim {row['head_dim']}"}

    def compared(self, frame: Any) -> Any:
        """Add `tflops`, which counts attended pairs only."""
        return with_pairs(frame)

    tables = rate_tables(
        (("hopper", "fa4"), ("hopper", "flex"), ("hopper", "flex_flash"), ("hopper", "triton")),
        down={"width": "width", "mask": "attended"},
        titles={row.mode: f"{MODE_WORDS[row.mode]} under masks" for row in (FORWARD, BOTH)},
    )
    figures = {
        "both": replace(
            rate_bars("Forward and backward under masks", x="attended"),
            where=BOTH_TIMES | {"head_dim": HEAD_DIM_DRAWN},
        )
    }
