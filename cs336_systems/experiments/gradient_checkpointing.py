"""Activation checkpointing: peak memory and step time by strategy, and what blocks store.

Stored is what is kept between forward and backward. `simulated` runs the same code on fake tensors
and counts memory as CUDA would. On a CPU the handout's xl is only simulated.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import torch

from cs336_systems.book.frames import digits
from cs336_systems.config import MODEL_SIZES, ModelConfig, RunConfig, proxy_model
from cs336_systems.experiments import (
    Bars,
    Cell,
    Disagreement,
    Experiment,
    Pick,
    Pivot,
    Row,
    Sample,
    Wide,
    problem,
)
from cs336_systems.measure.allocations import MIB, release
from cs336_systems.measure.timeline import BACKWARD
from cs336_systems.measure.timing import time_calls
from cs336_systems.model.checkpointing import compile_blocks
from cs336_systems.subjects import model_memory as memory
from cs336_systems.subjects.model_memory import BlocksCase, MemoryCase
from cs336_systems.subjects.model_steps import TrainingStep

BATCH = 4
GROUPS = ("none", "1", "2", "4", "8", "recursive")
PEAK = Row(mode="train_step", quantity="peak_memory", unit="MiB")
# What forward and backward add to the memory before them.
ADDED = Row(mode="train_step", quantity="added_memory", unit="MiB")
TIME = Row(mode="train_step", quantity="time", unit="ms")
TIMED_BUDGET_MS = {"cuda": 3000.0, "cpu": 300.0}
# On a GPU an xl step in float32 takes 5.5 s and varies by less than 1 ms.
MIN_TIMED_STEPS = {"cuda": 2, "cpu": 5}
# Relative to the largest gradient; with checkpoints CUDA may pick other matmul algorithms.
GRADIENT_TOLERANCE = 1e-5


def _strategies(run: RunConfig) -> list[tuple[MemoryCase, str]]:
    """Return (case, implementation) pairs: xl at handout scale, a narrow proxy of it below.

    Both are measured and simulated. At smoke scale xl itself is simulated without checkpointing, in
    its smallest and largest groups, and with the strategy that takes least.
    """

    def cases(model: ModelConfig, groups: Sequence[str], fused: Sequence[str]) -> list[MemoryCase]:
        pairs = [("reference", name) for name in groups] + [("sdpa", name) for name in fused]
        return [
            MemoryCase(model=model, batch=BATCH, attention=attention, checkpointing=name)
            for attention, name in pairs
        ]

    # Handout scale: the real model, and three group sizes compiled.
    xl = replace(MODEL_SIZES["xl"], context_length=2048)
    if run.scale == "handout":
        plain, compiled = (
            cases(xl, GROUPS, ("none", "1", "selective")),
            cases(xl, ("1", "2", "4"), ()),
        )
        measured = [(one, "eager") for one in plain] + [(one, "compiled") for one in compiled]
        return measured + [(one, "simulated") for one in plain]

    # Below: a proxy with many blocks and few words.
    proxy = replace(
        proxy_model("xl", 64 if run.scale == "tiny" else 128), num_layers=8, context_length=128
    )
    proxy = replace(proxy, vocab_size=256)  # logits would hide what the blocks store
    groups = ("none", "2", "recursive") if run.scale == "tiny" else ("none", "1", "4", "recursive")
    found = [
        (one, name)
        for one in cases(proxy, groups, ("selective",))
        for name in ("eager", "simulated")
    ]
    simulated = cases(xl, ("none", "1", "4"), ("selective",)) if run.scale == "smoke" else []
    return found + [(one, "simulated") for one in simulated]


def _peaks(phases: dict[str, int]) -> Iterator[Sample]:
    """Yield the peak of a step, and what forward and backward add to the memory before them.

    `phases` holds the peak of each phase in bytes.
    """
    yield Sample(row=PEAK, samples=[max(phases.values()) / MIB])
    yield Sample(
        row=ADDED,
        samples=[(max(phases[memory.FORWARD], phases[BACKWARD]) - phases[memory.START]) / MIB],
    )


def _check_gradients(case: MemoryCase, run: RunConfig, *, compiled: bool) -> None:
    """Raise Disagreement unless the gradients are those without checkpointing.

    The model is cut to four blocks, a short context and batch 1.
    """
    model = replace(case.model, num_layers=4, context_length=min(64, case.model.context_length))
    small = replace(case, model=model, batch=1)
    expected = TrainingStep(replace(small, checkpointing="none"), run)
    actual = TrainingStep(small, run)
    memory.prepare(actual, small, "forward")
    if compiled:
        compile_blocks(actual.model)
    expected.forward_backward()
    actual.forward_backward()
    tolerance = 1e-3 if compiled else GRADIENT_TOLERANCE
    for one, other in zip(expected.parameters, actual.parameters, strict=True):
        assert one.grad is not None and other.grad is not None
        error, bound = (
            float((one.grad - other.grad).abs().max()),
            tolerance * float(one.grad.abs().max()),
        )
        if not error <= bound:
            raise Disagreement(
                f"gradients under checkpointing differ by {error:.3g}, more than {bound:.3g}"
            )


def peak_claim(rows: pd.DataFrame) -> str:
    """Return how much a checkpoint per block saves with plain attention, if it saves anything."""
    none, one = (
        rows.loc[rows["strategy"] == f"{what}, reference", "median"].max()
        for what in ("none", "1 block a checkpoint")
    )
    if not one < none:
        return ""
    return (
        f"A checkpoint a block cuts a training step's peak from {digits(none)} to {digits(one)} GiB"
    )


@problem()
class GradientCheckpointing(Experiment):
    implementations = ("eager", "compiled", "simulated", "simulated compiled")

    def cells(self, run: RunConfig) -> list[Cell]:
        """Return steps by strategy (peak and time), then what is stored between the passes."""
        cells = []
        for case, implementation in _strategies(run):
            rows = (PEAK, ADDED) if implementation == "simulated" else (PEAK, ADDED, TIME)
            cells.append(Cell(case=case, implementation=implementation, rows=rows))
        model = (
            replace(MODEL_SIZES["xl"], context_length=2048)
            if run.scale != "tiny"
            else proxy_model("xl", 64)
        )
        measured = ("eager", "compiled") if run.device == "cuda" else ()
        for blocks, name in ((1, "none"), (4, "none"), (4, "2"), (4, "1")):
            stored = BlocksCase(
                model=model, batch=BATCH, blocks=blocks, attention="reference", checkpointing=name
            )
            names = (
                ("simulated", "simulated compiled", *measured)
                if name == "none"
                else ("simulated", *measured)
            )
            cells += [Cell(case=stored, implementation=one, rows=(memory.SAVED,)) for one in names]
        return cells

    def measure(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        """Measure the peak memory of one full training step, then its time.

        The optimizer's state exists before the step. Raises Disagreement unless the gradients of
        the same model, cut to four blocks and a short context, are those without checkpointing.
        """
        if isinstance(cell.case, BlocksCase):
            yield from memory.measure_blocks(cell, run)
            return
        case: MemoryCase = cell.case
        release(run.device)
        if cell.implementation == "simulated":
            yield from _peaks(
                memory.simulated_trace(case, "train_step", model_spec=run.model).phase_peaks()
            )
            return

        # Check, prepare (a compiled step runs once to be compiled), measure memory, then time.
        if run.model is None:
            _check_gradients(case, run, compiled=cell.implementation == "compiled")
        step = TrainingStep(case, run)
        memory.prepare(step, case, "train_step")
        if cell.implementation == "compiled":
            compile_blocks(step.model)
            step.forward_backward()
            step.reset()
        measured = memory.measured_pass(step, "train_step")
        if measured.out_of_memory:
            raise torch.OutOfMemoryError(measured.out_of_memory)
        yield from _peaks(measured.peak_bytes)
        del measured
        samples = time_calls(
            step.train_step,
            device=run.device,
            warmup=0,
            before=step.reset,
            budget_ms=TIMED_BUDGET_MS[run.device],
            min_samples=MIN_TIMED_STEPS[run.device],
        )
        yield Sample(row=TIME, samples=samples)

    def columns(self, row: dict[str, Any]) -> dict[str, Any]:
        name = row["checkpointing"]
        blocks = (
            f"{name} block{'s' if name != '1' else ''} a checkpoint" if name.isdigit() else name
        )
        return {"strategy": f"{blocks}, {row['attention']}", "of": row.get("blocks")}

    tables = {
        "strategies": Wide(
            title="A training step by strategy",
            down=("model", "strategy"),
            where={"case_type": "MemoryCase"},
            columns={
                f"{name}, {what}": Pick({"implementation": name, "quantity": row.quantity}, unit)
                for name in ("eager", "compiled", "simulated")
                for what, row, unit in (
                    ("peak (GiB)", PEAK, "GiB"),
                    ("added (GiB)", ADDED, "GiB"),
                    ("s", TIME, "s"),
                )
                if (name, row) != ("simulated", TIME)
            },
        ),
        "stored": Pivot(
            title="Stored between forward and backward",
            down={"blocks": "of", "blocks a checkpoint": "checkpointing"},
            where={"case_type": "BlocksCase"},
            significant=4,
        ),
    }
    figures = {
        "peaks": Bars(
            claim=peak_claim,
            title="Peak memory of a training step",
            x="strategy",
            unit="GiB",
            where={"case_type": "MemoryCase", "quantity": PEAK.quantity, "model": "xl"},
        )
    }
