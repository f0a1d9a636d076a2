"""torch.compile on plain attention and on the whole model: eager and compiled take turns."""

import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import torch

from cs336_systems.accounting import eager_attention_bytes
from cs336_systems.bench.spec import turns_cell
from cs336_systems.bench.worker import Outcome, outcome_of
from cs336_systems.book.frames import digits
from cs336_systems.config import AttentionShape, ModelCase, RunConfig, proxy_model
from cs336_systems.device import has_cxx_compiler
from cs336_systems.experiments import Bars, Cell, Pivot, Row, Sample, Unsupported, problem
from cs336_systems.experiments.pytorch_attention import BATCH, LENGTHS, LONGEST_OF_HANDOUT
from cs336_systems.measure.allocations import one_out_of_memory_error, release
from cs336_systems.subjects.attention_by_turns import AttentionByTurns
from cs336_systems.subjects.attention_passes import BACKWARD, FORWARD, HEAD_DIMS, sized_shape
from cs336_systems.subjects.model_steps import (
    MODEL_MODES,
    STEPS_A_TURN,
    TrainingStep,
    first_calls,
    model_cases,
    model_rounds,
    round_samples,
    timed_modes,
)

IS_SHAPE, IS_MODEL = {"case_type": "AttentionShape"}, {"case_type": "ModelCase"}
SPEED = (("compiled", "eager"),)


def compiled_claim(rows: pd.DataFrame) -> str:
    """Return that larger models gain less, if the speed falls from size to size in every mode."""
    falls = all(of["speed_over_eager"].is_monotonic_decreasing for _, of in rows.groupby("mode"))
    if not (falls and rows["speed_over_eager"].min() > 1):
        return ""
    sizes = list(dict.fromkeys(rows["model"]))
    low, high = (
        digits(end) for end in (rows["speed_over_eager"].min(), rows["speed_over_eager"].max())
    )
    return (
        f"torch.compile gains less the larger the model: {high}× on {sizes[0]}, "
        f"{low}× on {sizes[-1]}"
    )


@problem()
class TorchCompile(AttentionByTurns):
    implementations = ("eager", "compiled")
    rows = (FORWARD, BACKWARD)
    rounds = {"cpu": 3, "cuda": 6}
    speeds = {"speed_over_eager": {"implementation": "eager"}}

    def names(self, run: RunConfig) -> Sequence[str]:
        """Return both implementations, or eager alone at the smallest scale."""
        return self.implementations if run.scale != "tiny" else ("eager",)

    def cases(self, run: RunConfig) -> list[AttentionShape]:
        """Return the handout's grid of attention: batch 8, one head, no mask, float32."""
        return [
            replace(sized_shape(run, BATCH, 1, seqlen, head_dim, False), dtype="float32")
            for head_dim in HEAD_DIMS[run.scale]
            for seqlen in LENGTHS[run.scale]
            if seqlen <= LONGEST_OF_HANDOUT
        ]

    def cells(self, run: RunConfig) -> list[Cell]:
        """Return (a) attention, (b) whole models, compiled once and timed with the same weights."""
        cells = [
            # A CPU swaps where a GPU raises an error. The prediction counts eager's four matrices
            # of scores twice, since each implementation keeps its graph.
            replace(cell, predicted_bytes=2 * eager_attention_bytes(cell.case, "forward_backward"))
            for cell in super().cells(run)
        ]
        if run.scale == "tiny":
            return cells
        compile_rows = [
            Row(mode, "compile_time", "s", implementation="compiled") for mode in MODEL_MODES[:2]
        ]
        times = [Row(mode, "time", "ms") for mode in MODEL_MODES]
        cases = [replace(case, warmup=2) for case in model_cases(run)]

        # On a laptop two blocks show as much as many, which take long to compile. The proxy has a
        # name of its own, since that of other problems is wider and deeper.
        if run.scale == "smoke":
            narrow = proxy_model("medium", 128)
            narrow = replace(narrow, name="medium-2-layer-proxy", num_layers=2, context_length=128)
            cases = [replace(cases[0], model=narrow, warmup=1)]
        for case in cases:
            cell = turns_cell(case, self.implementations, times)
            cells.append(replace(cell, rows=(*cell.rows, *compile_rows)))
        return cells

    def measure(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        if isinstance(cell.case, ModelCase):
            return self._measure_model(cell, run)
        return super().measure(cell, run)

    def _measure_model(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        """Check the compiled model's first calls against eager, then time both by turns.

        If the model cannot be compiled, or is wrong once compiled, its rows say so, and eager is
        timed alone.
        """
        rows = {(row.implementation, row.mode): row for row in cell.rows if row.quantity == "time"}
        compile_rows = {row.mode: row for row in cell.rows if row.quantity == "compile_time"}
        step = TrainingStep(cell.case, run)
        models = {"eager": step.model}
        found: list[Row] = []  # rows of the first calls that were measured

        # First calls: compile, check, and record the seconds.
        broken: Outcome | None = None
        try:
            if run.device == "cpu" and not has_cxx_compiler():
                raise Unsupported("no C++ compiler")
            compiled = torch.compile(step.model)
            with one_out_of_memory_error():
                for mode, seconds in first_calls(step, compiled, run):
                    found.append(compile_rows[mode])
                    yield Sample(row=found[-1], samples=[seconds])
            models["compiled"] = compiled
        except Exception as error:  # noqa: BLE001 - on a user's model the compiler may raise any
            broken = outcome_of(error)
            traceback.print_exc()
        if broken is not None:
            of_compiled = [
                row for row in cell.rows if row.implementation == "compiled" and row not in found
            ]
            yield from (
                Sample(row=row, status=broken.status, message=broken.message) for row in of_compiled
            )
            rows = {key: row for key, row in rows.items() if key[0] == "eager"}
            release(run.device)

        def turn(name: str, modes: Sequence[str]) -> Iterator[tuple[str, list[float]]]:
            step.model = models[name]
            try:
                yield from timed_modes(step, modes, warmup=cell.case.warmup, count=STEPS_A_TURN)
            finally:  # free what a step that did not fit has left behind
                step.optimizer = None
                step.reset()

        yield from round_samples(rows, *model_rounds(list(models), turn, MODEL_MODES, run))

    def columns(self, row: dict[str, Any]) -> dict[str, Any]:
        """Add head dim and length under the handout's names."""
        return {"S": row.get("seqlen_q"), "d": f"d = {row.get('head_dim')}"}

    tables = {
        "models": Pivot(
            title="A model's pass",
            down=("model", "mode"),
            where={"quantity": "time"} | IS_MODEL,
            ratios=SPEED,
        ),
        "attention": Pivot(
            title="Attention, batch 8, float32, compiled with dynamic=True",
            down=("d", "S", "mode"),
            where={"quantity": "time"} | IS_SHAPE,
            ratios=SPEED,
        ),
        "compiling": Pivot(
            title="First call",
            down=("model", "mode"),
            where={"quantity": "compile_time"} | IS_MODEL,
        ),
    }
    figures = {
        "models": Bars(
            claim=compiled_claim,
            title="Whole models: speed of compiled over eager",
            x="model",
            y="speed_over_eager",
            y_title="speed over eager",
            color="mode",
            subtitle="eager and compiled by turns",
            where={"quantity": "time", "implementation": "compiled", "speed_over_eager": pd.notna}
            | IS_MODEL,
        ),
    }
