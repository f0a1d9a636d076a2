"""Memory of xl's forward and training step by phase, category and origin, and what a block saves.

`eager` and `compiled` are measured by the allocator of the run's device. `simulated` runs the same
code on fake tensors and counts memory as CUDA would. On a CPU only small models are measured, and
the handout's xl is simulated.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch

from cs336_systems.accounting import model_peak_bytes
from cs336_systems.book.figures import alt
from cs336_systems.book.frames import dicts, digits, in_unit, pick
from cs336_systems.config import MODEL_SIZES, ModelConfig, Precision, RunConfig, proxy_model
from cs336_systems.experiments import Cell, Experiment, Figure, Pick, Row, Sample, Wide, problem
from cs336_systems.measure.allocations import MIB, release
from cs336_systems.measure.timeline import CATEGORIES
from cs336_systems.subjects import model_memory as memory
from cs336_systems.subjects.model_memory import PHASES, BlocksCase, MemoryCase

BATCH = 4
EXAMPLE_CONTEXTS = (128, 2048)  # the contexts whose timelines are drawn
TIMELINE_POINTS = 200
PREDICTED = "closed_form_peak"
PRECISIONS = (Precision(), Precision(autocast="bfloat16"))
EVENT, STARTS = "timeline.event", "timeline.start."


def _profiled(run: RunConfig) -> list[tuple[MemoryCase, str]]:
    """Return (case, implementation) pairs at the run's scale.

    At handout scale xl is measured and simulated. Below it a proxy of xl is measured, and at smoke
    scale xl itself simulated.
    """
    xl = MODEL_SIZES["xl"]

    def case(
        model: ModelConfig, context: int, precision: Precision, batch: int = BATCH
    ) -> MemoryCase:
        model = replace(model, context_length=context)
        return MemoryCase(model=model, batch=batch, attention="reference", precision=precision)

    if run.scale == "handout":
        cases = [case(xl, context, one) for context in (128, 256, 512, 2048) for one in PRECISIONS]
        return [(one, implementation) for one in cases for implementation in ("eager", "simulated")]
    proxy = proxy_model("xl", 64) if run.scale == "tiny" else proxy_model("xl")
    small = [case(proxy, 128, precision, batch=1) for precision in PRECISIONS]
    found = [(one, implementation) for one in small for implementation in ("eager", "simulated")]
    if run.scale == "smoke":
        found += [(case(xl, context, Precision()), "simulated") for context in EXAMPLE_CONTEXTS]
        found += [(case(xl, 2048, Precision(autocast="bfloat16")), "simulated")]
    return found


class Timeline(Figure):
    """Active memory of a pass by category over its events, with lines where phases begin."""

    def _marks(self, rows: pd.DataFrame) -> Any:
        """Return the layered chart: stacked areas of the categories, rules and names of phases."""
        by_name = {row["quantity"]: row for row in dicts(rows)}
        events = by_name[EVENT]["samples"]
        parts = rows[rows["category"] != ""]

        # Each sample is the maximum of a bucket of events. It is drawn over the whole bucket; all
        # buckets have the same width.
        edges = np.linspace(0, max(events), len(events) + 1)
        values = [
            {
                "at": at,
                "value": in_unit(value, "MiB", "GiB"),
                "rank": rank,
                "category": row["category"],
            }
            for rank, row in enumerate(dicts(parts))
            for at, value in zip(edges, (*row["samples"], row["samples"][-1]))
        ]
        areas = (
            alt.Chart(alt.Data(values=values))
            .mark_area(interpolate="step-after")
            .encode(
                x=alt.X("at:Q", title=self.x_title),
                y=alt.Y("value:Q", stack=True, title=self.y_title),
                color=self._color(parts),
                order="rank:Q",  # the first at the bottom
            )
        )

        # A dashed line and a name where a phase begins, except the first.
        starts = {
            name.removeprefix(STARTS): row["median"]
            for name, row in by_name.items()
            if name.startswith(STARTS)
        }
        began = [{"event": event, "phase": phase} for phase, event in starts.items() if event > 0]
        phases = alt.Chart(alt.Data(values=began)).encode(x="event:Q")
        rules = phases.mark_rule(strokeDash=[4, 4])
        words = phases.mark_text(align="left", dx=3).encode(text="phase:N", y=alt.value(8))
        return alt.layer(areas, rules, words)


def peak_claim(rows: pd.DataFrame) -> str:
    """Return in which phase memory peaks, how large it is, and how much of it is parameters."""
    parts = {row["category"]: np.array(row["samples"]) for row in dicts(rows) if row["category"]}
    by_name = {row["quantity"]: row for row in dicts(rows)}
    if EVENT not in by_name or not parts:
        return ""
    total = np.sum(list(parts.values()), axis=0)
    at = int(total.argmax())
    event = by_name[EVENT]["samples"][at]
    starts = {
        name.removeprefix(STARTS): row["median"]
        for name, row in by_name.items()
        if name.startswith(STARTS)
    }
    phase = max((name for name in starts if starts[name] <= event), key=lambda name: starts[name])
    peak, kept = (
        digits(in_unit(float(one[at]), "MiB", "GiB")) for one in (total, parts["parameters"])
    )
    return f"Memory peaks in the {phase}: {peak} GiB, of which {kept} are parameters"


def made_in_backward(frame: pd.DataFrame, context: int, implementation: str) -> float:
    """Return the MiB of gradients that the backward of one block makes, from the timeline.

    Over the backward, memory changes by what is made less what is released: a line through
    (activations, total) at the timeline's points gives the change for each MiB released, and the
    activations before it what a block releases.
    """
    where = {
        "context": context,
        "implementation": implementation,
        "precision": "float32",
        "mode": "train_step",
    }
    rows = {row["quantity"]: row for row in dicts(pick(frame, where | {"case_type": "MemoryCase"}))}
    events = np.array(rows[EVENT]["samples"])
    inside = (events >= rows[f"{STARTS}backward"]["median"]) & (
        events < rows[f"{STARTS}optimizer step"]["median"]
    )
    of = {name: np.array(rows[f"timeline.{name}"]["samples"])[inside] for name in CATEGORIES}
    change = np.polyfit(of["activations"], sum(of.values()), 1)[0]
    saved = of["activations"].max() / rows[EVENT]["model.num_layers"]
    return float(saved * (1 - change))


def _ranked(quantity: str, values: dict[str, str]) -> dict[str, Pick]:
    """Return columns of the largest contributors by rank; `values` maps a heading to a column."""
    return {
        f"{rank}, {what}": Pick({"quantity": f"{quantity}.{rank}"}, value=value)
        for rank in range(1, memory.NUM_LARGEST + 1)
        for what, value in values.items()
    }


@problem()
class MemoryProfiling(Experiment):
    implementations = ("eager", "compiled", "simulated", "simulated compiled")

    def cells(self, run: RunConfig) -> list[Cell]:
        """Return forwards and full steps of xl by context and precision, then single blocks."""
        cells = []
        for case, implementation in _profiled(run):
            for mode, phases in PHASES.items():
                units = {f"peak_memory.{phase}": "MiB" for phase in phases} | {PREDICTED: "MiB"}
                drawn = case.model.context_length in EXAMPLE_CONTEXTS
                if drawn:
                    units |= {name: "1" for name in (EVENT, *(STARTS + phase for phase in phases))}
                    units |= {f"timeline.{category}": "MiB" for category in CATEGORIES}
                rows = tuple(Row(mode, quantity, unit) for quantity, unit in units.items())
                rows += memory.ranked_rows(mode, "allocation") if drawn else ()
                cells.append(Cell(case=case, implementation=implementation, rows=rows))

        # What one block saves for its backward.
        model, contexts = (
            (MODEL_SIZES["xl"], (512, 2048))
            if run.scale != "tiny"
            else (proxy_model("xl", 64), (128,))
        )
        measured = ("eager", "compiled") if run.device == "cuda" else ()
        for context in contexts:
            one = replace(model, context_length=context)
            blocks = BlocksCase(model=one, batch=BATCH, blocks=1, attention="reference")
            for implementation in ("simulated", "simulated compiled", *measured):
                more = () if "compiled" in implementation else (memory.SAVED_EXPECTED,)
                of_blocks = (
                    memory.SAVED,
                    memory.RESIDUAL,
                    *memory.ranked_rows("forward", "saved"),
                    *more,
                )
                cells.append(Cell(case=blocks, implementation=implementation, rows=of_blocks))
        return cells

    def measure(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        if isinstance(cell.case, BlocksCase):
            yield from memory.measure_blocks(cell, run)
            return
        case, mode = cell.case, cell.rows[0].mode
        rows = {row.quantity: row for row in cell.rows}
        release(run.device)
        yield Sample(row=rows[PREDICTED], samples=[model_peak_bytes(case, mode) / MIB])
        out_of_memory = ""
        if cell.implementation == "simulated":
            trace = memory.simulated_trace(case, mode, model_spec=run.model)
            peaks = trace.phase_peaks()
        else:
            measured = memory.measured_phases(case, mode, run)
            trace, peaks, out_of_memory = (
                measured.trace,
                measured.peak_bytes,
                measured.out_of_memory,
            )

        # The peak of each phase, then for drawn contexts the timeline and the largest allocations.
        for phase, num_bytes in peaks.items():
            yield Sample(row=rows[f"peak_memory.{phase}"], samples=[num_bytes / MIB])
        if EVENT in rows:
            events, lines = trace.sampled(TIMELINE_POINTS)
            yield Sample(row=rows[EVENT], samples=events.tolist())
            for began in trace.phases:
                yield Sample(row=rows[STARTS + began.name], samples=[began.start])
            for category, values in lines.items():
                yield Sample(row=rows[f"timeline.{category}"], samples=(values / MIB).tolist())
            made = [phase.name for phase in trace.phases[1:]]
            for rank, large in enumerate(trace.largest(memory.NUM_LARGEST, made), start=1):
                kernel = f"{large.count} × {large.category}: {large.where}"
                yield Sample(
                    row=rows[f"allocation.{rank}"], samples=[large.num_bytes / MIB], kernel=kernel
                )

        # Samples until the error are kept; the rows of missing phases get the error as reason.
        if out_of_memory:
            raise torch.OutOfMemoryError(out_of_memory)

    def columns(self, row: dict[str, Any]) -> dict[str, Any]:
        category = row["quantity"].removeprefix("timeline.")
        return {
            "context": row["model.context_length"],
            "category": category if category in CATEGORIES else "",
        }

    def numbers(self, frame: pd.DataFrame) -> dict[str, Any]:
        """Return `saved` and `made`, texts about a block's saved tensors and its gradients."""

        def saved(context: int) -> list[str]:
            """Return the largest contributors to what a block saves, with their percentages."""
            where = {"context": context, "implementation": "eager", "case_type": "BlocksCase"}
            by_name = {row["quantity"]: row for row in dicts(pick(frame, where))}
            total = by_name[memory.SAVED.quantity]["median"]
            largest = [by_name[f"saved.{rank}"] for rank in range(1, memory.NUM_LARGEST + 1)]
            return [
                f"`{row['kernel'].split(' in ')[0]}` {digits(100 * row['median'] / total)} %"
                for row in largest
            ]

        def made(context: int, implementation: str) -> str:
            return f"{digits(made_in_backward(frame, context, implementation))} MiB"

        return {"saved": saved, "made": made}

    tables = {
        "peaks": Wide(
            title="Peak memory in each phase (GiB)",
            down=("model", "context", "precision"),
            where={"case_type": "MemoryCase"},
            columns={
                name: Pick(
                    {"mode": mode, "implementation": implementation, "quantity": quantity}, "GiB"
                )
                for name, mode, implementation, quantity in (
                    ("forward alone", "forward", "eager", "peak_memory.forward"),
                    *(
                        (f"step: {phase}", "train_step", "eager", f"peak_memory.{phase}")
                        for phase in PHASES["train_step"][1:]
                    ),
                    ("step, simulated", "train_step", "simulated", "peak_memory.backward"),
                    ("step, closed form", "train_step", "simulated", PREDICTED),
                )
            },
        ),
        "blocks": Wide(
            title="One block: saved for backward, and gradients (MiB)",
            down=("model", "context", "implementation"),
            where={"case_type": "BlocksCase"},
            columns={
                "residual stream": Pick({"quantity": memory.RESIDUAL.quantity}),
                "saved for backward": Pick({"quantity": memory.SAVED.quantity}, significant=4),
                "closed form": Pick({"quantity": memory.SAVED_EXPECTED.quantity}, significant=4),
                **_ranked("saved", {"operation": "kernel", "MiB": "median"}),
            },
        ),
        "allocations": Wide(
            title="Largest allocations of a pass (MiB)",
            down=("model", "context", "precision", "mode", "implementation"),
            where={"case_type": "MemoryCase", "context": EXAMPLE_CONTEXTS},
            columns=_ranked("allocation", {"MiB": "median", "what": "kernel"}),
        ),
    }
    figures = {
        name: Timeline(
            claim=peak_claim,
            title=f"Active memory, {words}",
            subtitle=f"{words}, {implementation}",
            x=EVENT,
            x_title="allocations and releases, in order",
            y_title="GiB",
            color="category",
            where={
                "mode": mode,
                "context": context,
                "precision": "float32",
                "implementation": implementation,
                "quantity": lambda quantity: quantity.startswith("timeline."),
            },
        )
        for name, mode, words, context, implementation in (
            ("forward", "forward", "forward alone", 2048, "eager"),
            ("step", "train_step", "training step", 128, "eager"),
            ("long_step", "train_step", "training step", 2048, "simulated"),
        )
    }
