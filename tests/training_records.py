"""Records of `training_run` as a run leaves them: one process, a wrapper that agrees, one that does not."""

from __future__ import annotations

from typing import Any

from cs336_systems.config import RunConfig
from cs336_systems.experiments.s_training import training_case
from cs336_systems.records import Record, case_to_dict

RUN = RunConfig(scale="handout", device="cuda")


def training_record(implementation: str, quantity: str, samples: list[float], **fields: Any) -> Record:
    given: dict[str, Any] = {
        "problem": "training_run", "scale": RUN.scale, "case": case_to_dict(training_case(RUN)),
        "implementation": implementation, "mode": "train_step", "quantity": quantity,
        "unit": "ms" if quantity == "time" else "nats", "samples": samples,
        "device": {"name": "Test GPU", "kind": "cuda", "driver": "1.2"}, "commit": "c0ffee", "dirty": False,
        "software": {"torch": "2.11.0", "triton": "3.6.0"}, "date": "2026-01-02T03:04:05+00:00",
    }  # fmt: skip
    return Record(**(given | fields))


def training_records() -> list[Record]:
    curve = [5.0, 4.0, 3.0]
    why = "losses are off one process's by 3 times the bound"
    return [
        training_record("none", "loss", curve, error=0.0),
        training_record("none", "validation_loss", [3.25]),
        training_record("none", "time", [10.0, 11.0, 12.0]),
        training_record("fsdp", "loss", curve, error=0.125),
        training_record("fsdp", "validation_loss", [3.25]),
        training_record("fsdp", "time", [20.0, 21.0, 22.0]),
        training_record("zero1", "loss", [], status="failed", message=why),
    ]
