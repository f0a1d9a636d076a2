"""Dilated attention by reshape at growing rates against dense attention, full and causal."""

from cs336_systems.config import RunConfig
from cs336_systems.experiments import masks
from cs336_systems.experiments.attention import BOTH_TIMES
from cs336_systems.experiments.figures import Lines
from cs336_systems.experiments.spec import Cell, problem

SIZES = {"tiny": (128, (2,)), "smoke": (128, (2, 4)), "handout": (32768, (2, 4, 8))}  # tokens, rates


@problem(title="Dilated attention by reshape against dense attention", order=11)
class DilatedAttention(masks.MaskExperiment):
    implementations = ("triton", *masks.DENSE_PEERS, "sdpa_mask")

    def cells(self, run: RunConfig) -> list[Cell]:
        seqlen, rates = SIZES[run.scale]
        cells = []
        for suffix, dense in (("", "full"), ("+causal", "causal")):
            if run.scale == "tiny" and suffix:
                continue
            for mask in (dense, *(f"dilated:{seqlen}/{rate}{suffix}" for rate in rates)):
                case = masks.mask_case(run, mask, seqlen, heads=16, head_dim=64)
                peers = masks.DENSE_PEERS if mask == dense else ("hopper", "sdpa_mask")
                cells += [masks.mask_cell(case, name, run) for name in masks.names_of(run, ("triton",), peers)]
        return cells

    tables = {**masks.dense_tables(), "memory": masks.PEAKS}
    figures = {
        "forward_backward": Lines(
            title="Dilated attention, forward + backward: speed over dense attention",
            x="number",
            x_title="rate",
            y="over_dense",
            y_title="times as fast as dense",
            color="family",
            where=BOTH_TIMES | {"implementation": "triton", "number": lambda rate: rate > 1},
        )
    }
