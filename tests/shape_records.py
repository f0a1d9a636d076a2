"""Synthetic records of attention on several shapes for tests of the report: full GPUs, short calls, few queries."""

from __future__ import annotations

from typing import Any

from cs336_systems.config import AttentionShape
from cs336_systems.records import Record, case_to_dict

GPU = {"name": "Test GPU", "kind": "cuda", "driver": "1.2"}
MODES = {"forward": 1.0, "backward": 2.0, "forward_backward": 3.0}
MS = {"triton": 2.0, "sdpa_cudnn": 1.5, "sdpa_flash": 3.0, "flex": 2.4}  # forward at d = 64
# Three rounds of turns, in µs: in two of them ours takes twice as long as cuDNN's, and the medians are the same.
TURNS_US = {"triton": [40.0, 80.0, 20.0], "sdpa_cudnn": [80.0, 40.0, 10.0], "sdpa_flash": [40.0, 40.0, 40.0]}
OOM = "CUDA out of memory. Tried to allocate 64.00 GiB"


def shape_case(batch: int, heads: int, seqlen: int, head_dim: int, is_causal: bool) -> AttentionShape:
    return AttentionShape(
        batch=batch, heads=heads, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=head_dim, is_causal=is_causal,
        dtype="bfloat16",
    )  # fmt: skip


def shape_records() -> list[Record]:
    """On the second shape ours is twice as fast and FlexAttention has no memory."""
    found = []
    wide, full = shape_case(1, 16, 16384, 64, True), shape_case(1, 64, 8192, 128, False)
    short = shape_case(1, 8, 1024, 64, True)
    for case, share in ((wide, 1.0), (full, 1.0), (short, 0.1)):
        for name, forward_ms in MS.items():
            if case is full and name == "flex":
                found.append(_record(case, name, "forward", status="oom", message=OOM))
                continue
            faster = 0.5 if case is full and name == "triton" else 1.0
            for mode, part in MODES.items():
                middle = forward_ms * share * part * faster
                found.append(_record(case, name, mode, samples=[middle * jitter for jitter in (0.9, 1.0, 1.1)]))
    return found


def short_call_records() -> list[Record]:
    """Three rounds of turns on one shape."""
    case = shape_case(1, 16, 512, 64, True)
    return [
        _record(case, name, mode, problem="short_calls", quantity=quantity, samples=[us * share / 1e3 for us in rounds])
        for name, rounds in TURNS_US.items()
        for mode, part in (("forward", 1.0), ("forward_backward", 3.0))
        for quantity, share in (("time", part), ("host_time", part * 0.9), ("graph_time", part * 0.1))
    ]


# Rounds of turns, in ms: the machine is half as fast in every other one, and hopper 1.25 times as fast as cuDNN in all.
LONG_MS = {"triton": 4.4, "hopper": 3.2, "sdpa_cudnn": 4.0}
ROUNDS = 8


def long_call_records() -> list[Record]:
    """Eight rounds of turns on two shapes; on the second triton's ratio to the others falls from round to round."""
    found = []
    for case in (shape_case(1, 16, 16384, 64, True), shape_case(1, 16, 16384, 128, False)):
        for name, forward_ms in LONG_MS.items():
            for mode, part in MODES.items():
                rounds = [forward_ms * part * (1 + number % 2) for number in range(ROUNDS)]
                if name == "triton" and not case.is_causal:
                    rounds = [ms / (1 + number / 100) for number, ms in enumerate(rounds)]
                found.append(_record(case, name, mode, problem="long_calls", samples=rounds))
    return found


LADDER_MS = {"triton_pointers": 4.0, "triton_tma": 3.0, "hopper_deterministic": 2.0, "hopper": 2.0, "sdpa_cudnn": 1.5}


def ladder_records() -> list[Record]:
    """Every rung of `hopper_ladder` on one shape."""
    case = shape_case(1, 16, 16384, 64, True)
    return [
        _record(case, rung, mode, problem="hopper_ladder", samples=[forward_ms * part] * 3)
        for rung, forward_ms in LADDER_MS.items()
        for mode, part in MODES.items()
    ]


FEW_US = {"triton_whole": 40.0, "triton": 10.0, "sdpa_flash": 18.0, "sdpa_cudnn": 8.0}


def few_queries_records() -> list[Record]:
    """One head, where ours splits the keys in four, and a token of grouped heads, where it does not."""
    head = shape_case(1, 1, 4096, 64, True)
    token = AttentionShape(
        batch=64, heads=32, kv_heads=8, seqlen_q=1, seqlen_k=4096, head_dim=128, is_causal=False, dtype="bfloat16"
    )
    found = []
    for case, kernel in ((head, "sm90_forward_64x128_w4_s2_tma/4"), (token, "sm90_forward_128x64_w4_s2_tma")):
        for name, microseconds in FEW_US.items():
            if case is token and name == "sdpa_flash":
                continue
            taken = FEW_US["triton"] if case is token and name == "triton_whole" else microseconds
            values = {"quantity": "graph_time", "samples": [taken / 1e3] * 3, "problem": "few_queries"}
            names = {"triton": kernel, "triton_whole": kernel.split("/")[0]}
            found.append(_record(case, name, "forward", kernel=names.get(name, ""), **values))
    return found


def _record(case: AttentionShape, implementation: str, mode: str, **changes: Any) -> Record:
    values: dict[str, Any] = {"quantity": "time", "unit": "ms", "device": GPU, "commit": "c0ffee", "dirty": False}
    values |= {"software": {"torch": "2.11.0", "triton": "3.6.0"}, "date": "2026-01-02T03:04:05+00:00"}
    values |= {"problem": "attention_shapes", "implementation": implementation, "mode": mode, "scale": "handout"}
    return Record(case=case_to_dict(case), **values | changes)
