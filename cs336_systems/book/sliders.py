"""Numbers behind the book's sliders: memory of a model by plan, and which plan it needs.

    slider_data()["memory"]["gib"]["xl"]["FSDP"]["keep"][1]    # GiB by part, on the second of `ranks`

All are from `analysis`, calculated when the book is built; `site.js` only looks them up.
"""

from __future__ import annotations

from typing import Any

from cs336_systems.accounting import RankBytes
from cs336_systems.analysis.hardware import HARDWARE
from cs336_systems.analysis.memory_plan import rank_bytes
from cs336_systems.analysis.predictor import Prediction, predict
from cs336_systems.analysis.traffic import Plan
from cs336_systems.config import MODEL_SIZES, ModelConfig

GIB = 2**30
# models of the memory slider, and the sequences on each rank
MODELS = {"medium": 4, "large": 4, "xl": 4, "10b": 4, "8b": 1}
RANKS = tuple(2**power for power in range(8))  # 1 to 128
SCHEMES = {
    "DDP": "overlap",
    "sharded moments": "sharded-optimizer",
    "ZeRO-1": "zero1",
    "FSDP": "fsdp",
}
PARTS = ("weights", "moments", "gathered weights", "gradients", "activations", "buffers")
MEMORY_GPU = "H200"

NEEDY = ("large", "xl", "10b", "8b")  # the models for which a plan is looked for
GPUS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096)
SEQUENCES = (1, 4)  # of a replica
PLANS = {  # name: scheme, tensor-parallel ranks
    "DDP": ("overlap", 1),
    "ZeRO-1": ("zero1", 1),
    "FSDP": ("fsdp", 1),
    "FSDP + TP 2": ("fsdp", 2),
    "FSDP + TP 8": ("fsdp", 8),
}


def slider_data() -> dict[str, Any]:
    """Return the numbers of both sliders, ready for JSON."""
    return {"memory": memory_data(), "plans": plan_data()}


def memory_data() -> dict[str, Any]:
    """Return the GiB of each part at a step's peak: by model, scheme, recomputation and ranks."""
    gib: dict[str, Any] = {}
    for name, batch in MODELS.items():
        gib[name] = {}
        for shown, scheme in SCHEMES.items():
            gib[name][shown] = {}
            for case, is_checkpointed in (("keep", False), ("recompute", True)):
                gib[name][shown][case] = [
                    parts_of(
                        rank_bytes(
                            MODEL_SIZES[name],
                            Plan(scheme=scheme, data_parallel=ranks),
                            batch=batch,
                            checkpointed=is_checkpointed,
                        )
                    )
                    for ranks in RANKS
                ]
    return {
        "ranks": RANKS,
        "parts": PARTS,
        "gib": gib,
        "gpu": MEMORY_GPU,
        "limit": round(HARDWARE[MEMORY_GPU].memory_bytes / GIB, 1),
    }


def parts_of(held: RankBytes) -> list[float]:
    """Return the GiB of each of PARTS at the peak of a step, which add up to `held.peak`.

    The peak is at the start of the backward, with all activations, or at its end, with all
    gradients.
    """
    activations, gradients, buffers = held.activations + held.loss, held.gradients, held.buffers
    if held.gradients_stay:
        activations = max(activations, held.block)
    elif activations >= gradients + max(held.block, buffers):
        gradients = buffers = 0
    elif held.block >= buffers:
        activations, buffers = held.block, 0
    else:
        activations = 0
    parts = (held.parameters, held.optimizer, held.gathered, gradients, activations, buffers)
    return [round(part / GIB, 2) for part in parts]


def plan_data() -> dict[str, Any]:
    """Return memory and utilization of each plan: by model, GPU, sequences and number of GPUs.

    A case is a list of [place in "plans", whether activations are computed again, GiB a GPU,
    whether they fit, model FLOPs utilization].
    """
    cases: dict[str, Any] = {}
    for name in NEEDY:
        cases[name] = {}
        for gpu in HARDWARE:
            cases[name][gpu] = {
                str(sequences): [
                    _plans(MODEL_SIZES[name], gpu, sequences, num_gpus) for num_gpus in GPUS
                ]
                for sequences in SEQUENCES
            }
    return {
        "gpus": GPUS,
        "sequences": [str(one) for one in SEQUENCES],
        "plans": list(PLANS),
        "hardware": list(HARDWARE),
        "cases": cases,
    }


def _plans(model: ModelConfig, gpu: str, sequences: int, num_gpus: int) -> list[list[Any]]:
    """Return the rows of all plans that `num_gpus` GPUs can have."""
    rows: list[list[Any]] = []
    for place, (scheme, tensor_parallel) in enumerate(PLANS.values()):
        if num_gpus % tensor_parallel:
            continue
        plan = Plan(
            scheme=scheme,
            data_parallel=num_gpus // tensor_parallel,
            tensor_parallel=tensor_parallel,
        )
        predicted = predict(model, plan, HARDWARE[gpu], batch=sequences)
        for is_checkpointed in (False, True):
            held = rank_bytes(model, plan, batch=sequences, checkpointed=is_checkpointed)
            rows.append(
                [
                    place,
                    int(is_checkpointed),
                    round(held.peak / GIB, 2),
                    int(held.fits(HARDWARE[gpu].memory_bytes)),
                    round(utilization_of(predicted, is_checkpointed), 4),
                ]
            )
    return rows


def utilization_of(predicted: Prediction, is_checkpointed: bool) -> float:
    """Return the model FLOPs utilization, with a second forward in the step if `is_checkpointed`.

    The second forward is no useful work, and no communication is assumed to hide behind it.
    """
    step_s = predicted.step_s + (predicted.forward_s if is_checkpointed else 0.0)
    return predicted.flops / step_s / predicted.peak_flops_per_s
