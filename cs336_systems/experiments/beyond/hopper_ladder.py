"""What each technique of the attention kernels adds on a Hopper GPU, rung by rung in one run.

All rungs get the same inputs. First comes the handout's forward, with the backward of the PyTorch
stage; then both passes in Triton, with tiles read through pointers, then by the copy engine (TMA).
Then come the Gluon kernels, with warps that copy and warp groups that multiply, first with
additions to dQ in a fixed order, then in any order. cuDNN and FlashAttention-4 are the marks to
reach.
"""

from functools import partial
from typing import Any

import torch

from cs336_systems.attention import AttentionConfig, flash_attention
from cs336_systems.attention.choose import HOPPER_CAPABILITY
from cs336_systems.attention.tiles.kernel_config import KERNELS
from cs336_systems.config import AttentionShape, RunConfig
from cs336_systems.experiments import Unsupported, problem
from cs336_systems.subjects.attention_builders import Built, ran
from cs336_systems.subjects.attention_by_turns import AttentionByTurns
from cs336_systems.subjects.attention_passes import SMALL, rate_bars, rate_tables
from cs336_systems.subjects.implementations import build
from cs336_systems.subjects.tuning import chosen_tiles

RUNGS = {  # what each rung adds
    "triton_first": "the handout's forward in Triton",
    "triton_pointers": "Triton, tiles through pointers",
    "triton_tma": "tiles by TMA",
    "hopper_deterministic": "Gluon, dQ in a fixed order",
    "hopper": "Gluon",
    "sdpa_cudnn": "cuDNN",
    "fa4": "FlashAttention-4",
}


@problem(title="From Triton with pointers to Gluon on Hopper: what each rung adds", order=5)
class HopperLadder(AttentionByTurns):
    implementations = tuple(RUNGS)
    sizes = {
        **SMALL,
        "handout": (
            (1, 16, 16384, 64, True),
            (1, 16, 16384, 64, False),
            (8, 16, 2048, 128, True),
            (1, 16, 16384, 128, True),
            (1, 16, 16384, 128, False),
        ),
    }

    def built(self, name: str, case: AttentionShape, run: RunConfig) -> Built:
        """Return the rung `name` and its kernels; `Unsupported` if it cannot run here."""
        if name == "hopper_deterministic":
            attend = partial(
                flash_attention, is_causal=case.is_causal, backend="hopper", deterministic=True
            )
            return Built(
                attend=attend, kernel=f"{build('hopper', case, run.device).kernel} in order"
            )
        if name in ("triton_pointers", "triton_tma"):
            # The table's tiles for inputs that TMA can read, or for others.
            tma = name == "triton_tma"
            capability = torch.cuda.get_device_capability() if run.device == "cuda" else None
            if tma and capability != HOPPER_CAPABILITY:
                raise Unsupported("the table reads tiles by TMA on GPUs of compute capability 9.0")
            tiles = {kernel: chosen_tiles(kernel, case, capability, tma) for kernel in KERNELS}
            config = AttentionConfig(**tiles)
            attend = partial(
                flash_attention, is_causal=case.is_causal, backend="triton", config=config
            )
            return Built(attend=attend, kernel=ran(config.names.replace(",", " "), run.device))
        return super().built(name, case, run)

    def columns(self, row: dict[str, Any]) -> dict[str, Any]:
        return super().columns(row) | {"rung": RUNGS.get(row["implementation"], "")}

    tables = rate_tables(
        (*zip(tuple(RUNGS)[1:5], RUNGS), ("hopper", "sdpa_cudnn"), ("hopper", "fa4"))
    )
    figures = {
        "forward_backward": rate_bars("What each rung adds, forward + backward", color="rung")
    }
