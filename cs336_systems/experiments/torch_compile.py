"""torch.compile on plain attention, and on the whole model: eager beside compiled."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cs336_systems.config import ModelCase, RunConfig, proxy_model
from cs336_systems.experiments import Bars, Cell, Experiment, Pivot, Row, Sample, problem
from cs336_systems.experiments.attention import BACKWARD, FORWARD
from cs336_systems.experiments.models import MODEL_MODES, measure_model, model_cases
from cs336_systems.experiments.pytorch_attention import PyTorchAttention

IS_SHAPE, IS_MODEL = {"case_type": "AttentionShape"}, {"case_type": "ModelCase"}
SPEED = (("compiled", "eager"),)
PLAIN = PyTorchAttention()


@problem()
class TorchCompile(Experiment):
    implementations = ("eager", "compiled")
    speeds = {"speed_over_eager": {"implementation": "eager"}}

    def cells(self, run: RunConfig) -> list[Cell]:
        """(a) the same attention, eager and compiled; (b) whole models, eager and compiled."""
        cells = [
            Cell(case=shape, implementation=name, rows=(FORWARD, BACKWARD))
            for shape in PLAIN.cases(run)
            for name in self.implementations
            if name == "eager" or run.scale != "tiny"
        ]
        if run.scale == "tiny":
            return cells
        compile_rows = tuple(Row(mode=mode, quantity="compile_time", unit="s") for mode in MODEL_MODES[:2])
        times = tuple(Row(mode, "time", "ms") for mode in MODEL_MODES)
        cases = [replace(case, warmup=2) for case in model_cases(run)]
        if run.scale == "smoke":  # compiling takes a laptop longer the more blocks there are, and shows no more
            narrow = proxy_model("medium", 128)  # by a name of its own: other problems' proxy is wider and deeper
            narrow = replace(narrow, name="medium-2-layer-proxy", num_layers=2, context_length=128)
            cases = [replace(cases[0], model=narrow, warmup=1)]
        for case in cases:
            cells.append(Cell(case=case, implementation="eager", rows=times))
            cells.append(Cell(case=case, implementation="compiled", rows=compile_rows + times))
        return cells

    def measure(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        if isinstance(cell.case, ModelCase):
            return measure_model(cell, run)
        return PLAIN.measure(cell, run)

    def columns(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"S": row.get("seqlen_q"), "d": f"d = {row.get('head_dim')}"}

    tables = {
        "models": Pivot(
            title="A model's pass", down=("model", "mode"), where={"quantity": "time"} | IS_MODEL, ratios=SPEED
        ),
        "attention": Pivot(
            title="Attention, batch 8, float32, compiled with dynamic=True",
            down=("d", "S", "mode"),
            where={"quantity": "time"} | IS_SHAPE,
            ratios=SPEED,
        ),
        "compiling": Pivot(title="First call", down=("model", "mode"), where={"quantity": "compile_time"} | IS_MODEL),
    }
    figures = {
        "models": Bars(
            title="Whole models: speed of compiled over eager",
            x="model",
            y="speed_over_eager",
            y_title="speed over eager",
            facet="mode",
            columns=3,
            where={"quantity": "time", "implementation": "compiled"} | IS_MODEL,
        ),
    }
