"""Predicted utilization and memory of 8B on 8 to 16,384 GPUs, and of large sizes on two.

These are the handout's largest sizes, xl and 10b.
"""

from dataclasses import replace
from typing import Any

import pandas as pd

from cs336_systems.analysis import HARDWARE, Plan, predict, rank_bytes
from cs336_systems.book.frames import digits
from cs336_systems.config import MODEL_SIZES
from cs336_systems.experiments import Calculation, Lines, Listing, problem

GIB = 2**30
GLOBAL_BATCH = 2048  # sequences
CONTEXT = 4096
GPUS = tuple(2**power for power in range(3, 15))
LISTED = (8, 512, 2048, 16_384)
# (scheme, GPUs of tensor parallelism)
PLANS = (("bucketed", 1), ("zero1", 1), ("fsdp", 1), ("fsdp", 8))
SCHEMES = ("bucketed", "flat", "sharded-optimizer", "zero1", "fsdp")
# Parts of a rank's memory.
PARTS = ("parameters", "gradients", "moments", "gathered, buffers", "activations, loss", "peak")


def scale_claim(rows: pd.DataFrame) -> str:
    """Return what FSDP and DDP keep of the peak at the most GPUs that DDP is drawn for."""
    most = rows.loc[rows["scheme"] == "bucketed", "GPUs"].max()
    at = rows[rows["GPUs"] == most].set_index("scheme")["utilization"]
    fsdp, ddp = digits(at["fsdp"], 2), digits(at["bucketed"], 2)
    return f"At {most:,} GPUs FSDP keeps {fsdp} % of the peak, DDP {ddp} %"


@problem(title="Training at scale, on paper", order=20)
class TrainingAtScale(Calculation):
    def calculate(self) -> list[dict[str, Any]]:
        """Return predicted steps of 8B by GPU, scheme and scale, and memory of xl and 10b."""
        model = replace(MODEL_SIZES["8b"], context_length=CONTEXT)
        rows: list[dict[str, Any]] = []
        for name, machine in HARDWARE.items():
            for scheme, tensor in PLANS:
                # Each replica needs at least one sequence.
                for gpus in (gpus for gpus in GPUS if gpus // tensor <= GLOBAL_BATCH):
                    plan = Plan(scheme=scheme, data_parallel=gpus // tensor, tensor_parallel=tensor)
                    batch = GLOBAL_BATCH // plan.data_parallel
                    step = predict(model, plan, machine, batch=batch)
                    used = rank_bytes(model, plan, batch=1, checkpointed=True)
                    rows.append(
                        {
                            "quantity": "step",
                            "GPU": name,
                            "GPUs": gpus,
                            "scheme": f"{scheme} + TP {tensor}" if tensor > 1 else scheme,
                            "sequences": batch,
                            "ms": 1e3 * step.step_s,
                            "exposed": 1e3 * step.exposed_s,
                            "utilization": 100 * step.utilization,
                            "GiB": used.peak / GIB,
                        }
                    )
        for size in ("xl", "10b"):
            for scheme in SCHEMES:
                used = rank_bytes(MODEL_SIZES[size], Plan(scheme=scheme, data_parallel=2), batch=2)
                fits = used.peak < 0.95 * HARDWARE["H200"].memory_bytes
                kept, passing = (
                    (used.parameters, used.gradients, used.optimizer),
                    used.gathered + used.buffers,
                )
                parts = dict(zip(PARTS, (*kept, passing, used.activations + used.loss, used.peak)))
                row = {
                    "quantity": "memory",
                    "model": size,
                    "scheme": scheme,
                    "fits an H200": "yes" if fits else "no",
                }
                rows.append(row | {name: num_bytes / GIB for name, num_bytes in parts.items()})
        return rows

    tables = {
        "steps": Listing(
            title=f"8B on H200s, context {CONTEXT:,}, {GLOBAL_BATCH:,} sequences a step",
            where={"quantity": "step", "GPU": "H200", "GPUs": LISTED},
            columns={
                "GPUs": "GPUs",
                "scheme": "scheme",
                "sequences a replica": "sequences",
                "step (ms)": "ms",
                "exposed communication (ms)": "exposed",
                "MFU (%)": "utilization",
                "GiB a GPU, batch 1, checkpointed": "GiB",
            },
        ),
        "memory": Listing(
            title="GiB of each of two GPUs, batch 2 each, context 512, "
            "bfloat16 compute, float32 masters",
            where={"quantity": "memory"},
            columns=("model", "scheme", *PARTS, "fits an H200"),
        ),
    }
    figures = {
        "utilization": Lines(
            claim=scale_claim,
            title="Predicted model FLOPs utilization",
            subtitle=f"predicted: H200s, 8B, bfloat16, context {CONTEXT:,}, "
            f"{GLOBAL_BATCH:,} sequences a step",
            x="GPUs",
            y="utilization",
            y_title="MFU (%)",
            color="scheme",
            where={"quantity": "step", "GPU": "H200"},
        )
    }
