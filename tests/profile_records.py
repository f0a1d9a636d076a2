"""Synthetic records of `nsys_profile`: two models at two contexts, one of them under autocast, one out of memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cs336_systems.config import MODEL_SIZES, ModelCase, Precision
from cs336_systems.records import Record, case_to_dict

GPU = {"name": "Test GPU", "kind": "cuda", "driver": "1.2"}
OOM = "CUDA out of memory. Tried to allocate 64.00 GiB"
GEMM, SOFTMAX, MULTIPLY = (
    "nvjet_hsh_256x128_64x4_2x1_v_bz_NNT",
    "softmax_warp_forward",
    "vectorized_elementwise MulFunctor",
)
# Milliseconds of a forward pass at context 256: 10 of 12.5 are matmuls, so are 80 %.
FORWARD = {
    "kernel_time": 12.5, "busy_time": 12.0, "gemm_time": 10.0, "attention_time": 0.0, "softmax_time": 1.0,
    "elementwise_time": 1.0, "reduction_time": 0.25, "copy_time": 0.25, "communication_time": 0.0,
    "optimizer_time": 0.0, "other_time": 0.0, "attention_scores_time": 0.5, "attention_softmax_time": 2.0,
    "attention_softmax_kernel_time": 0.8, "attention_values_time": 0.5,
}  # fmt: skip
TIMES_OF_FORWARD = {"forward": 1, "forward_backward": 3, "train_step": 3.25}


def profile_record(case: ModelCase, mode: str, quantity: str, samples: list[float], **changes: Any) -> Record:
    values: dict[str, Any] = {
        "problem": "nsys_profile", "scale": "handout", "implementation": "eager", "unit": "ms", "device": GPU,
        "commit": "c0ffee", "dirty": False, "date": "2026-01-02T03:04:05Z",
        "software": {"torch": "2.11.0", "triton": "3.6.0"},
    }  # fmt: skip
    return Record(case=case_to_dict(case), mode=mode, quantity=quantity, samples=samples, **values | changes)


def profile_cases() -> list[ModelCase]:
    cases = [
        ModelCase(model=replace(MODEL_SIZES[size], context_length=context), batch=4, attention="reference", warmup=2)
        for size in ("small", "xl")
        for context in (256, 512)
    ]
    return [*cases, replace(cases[-1], precision=Precision(autocast="bfloat16"))]


def profile_records() -> list[Record]:
    """Every mode of every case; the training step of the last float32 one ran out of memory."""
    return [
        record
        for case in profile_cases()
        for mode in TIMES_OF_FORWARD
        for record in _mode_records(case, mode, out_of_memory=mode == "train_step" and case == profile_cases()[3])
    ]


def _mode_records(case: ModelCase, mode: str, *, out_of_memory: bool) -> list[Record]:
    """What one mode of a case reports: times in proportion to the model, the context and the mode."""
    scale = (4 if case.model.name == "xl" else 1) * case.model.context_length / 256 * TIMES_OF_FORWARD[mode]
    broken: dict[str, Any] = {"status": "oom", "message": OOM} if out_of_memory else {}

    def row(quantity: str, value: float, **more: Any) -> Record:
        samples = [] if out_of_memory else [value * share for share in (0.99, 1.0, 1.01)]
        return profile_record(case, mode, quantity, samples, **broken | more)

    found = [row("time", 13.0 * scale)]
    for quantity, value in FORWARD.items():
        if mode != "train_step" or not quantity.startswith("attention_s"):
            found.append(row(quantity, value * scale))
    counts = {"kernel_calls": 400, "kernel_1_calls": 96, "other_kernel_1_calls": 12, "other_kernel_2_calls": 48}
    for quantity, count in counts.items():
        samples = [] if out_of_memory else [float(count)] * 3
        found.append(profile_record(case, mode, quantity, samples, unit="calls", **broken))
    found.append(row("kernel_1_time", 6.0 * scale, kernel=GEMM if mode == "forward" else GEMM.replace("NNT", "NTT")))
    found.append(row("other_kernel_1_time", 1.0 * scale, kernel=SOFTMAX))
    found.append(row("other_kernel_2_time", 0.5 * scale, kernel=MULTIPLY))
    if not out_of_memory:
        missing = {"status": "skipped", "message": "the profile has 2 such kernels"}
        found.append(profile_record(case, mode, "other_kernel_3_time", [], **missing))
    return found
