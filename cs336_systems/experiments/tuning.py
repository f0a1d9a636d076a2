"""Tuning the attention kernels: one cell a configuration and shape, and table rows proposed from the records.

`cs336-systems tune flash` compiles the grid first (`attention/compilation.py`), so that what cannot run well is a
`skipped` row with its reason, then measures the rest through the same machinery as every experiment: checked against
the oracle, then timed, appended at once, not measured twice. The implementation of a record is the configuration's
name. The kernels of the backward are timed within a whole backward, the other kernels being the table's.

Nothing here writes a table: a person reads the proposals and edits `attention/tiles/tables.py`.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from cs336_systems.attention.compilation import CompileRequest
from cs336_systems.attention.tiles import KernelConfig, head_tile
from cs336_systems.config import BYTES_PER_ELEMENT, AttentionShape, RunConfig
from cs336_systems.experiments.attention import BACKWARD, BUDGET_MS, FORWARD, checked_error, inputs_of, oracle_of
from cs336_systems.experiments.records import Record, case_key, case_to_dict, latest
from cs336_systems.experiments.spec import Cell, Sample, Unsupported
from cs336_systems.inputs import AttentionInputs
from cs336_systems.measure.timing import time_calls

PROBLEM = "tune_flash"
MODES = {"forward": FORWARD, "dkdv": BACKWARD, "dq": BACKWARD}  # what is timed to judge a kernel's configuration
Times = dict[KernelConfig, float]


def tune_cell(shape: AttentionShape, config: KernelConfig) -> Cell:
    return Cell(problem=PROBLEM, case=shape, implementation=config.name, rows=(MODES[config.kernel],))


def compile_request(shape: AttentionShape, config: KernelConfig, arch: str) -> CompileRequest:
    """The compilation that `config` needs on `shape`; lengths, batch and heads do not matter for it."""
    return CompileRequest(
        config=config, arch=arch, head_dim=shape.head_dim, dtype=shape.dtype, is_causal=shape.is_causal
    )


def measure_tune_flash(cell: Cell, run: RunConfig) -> Iterator[Sample]:
    """Check the configuration that the cell's implementation names against the oracle, then time it."""
    config = KernelConfig.from_name(cell.implementation)

    def times(call: Callable[[], object]) -> list[float]:
        return time_calls(call, device=run.device, warmup=1, budget_ms=BUDGET_MS[run.device])

    yield measure_tiles(cell, run, [config], times)


def measure_tiles(
    cell: Cell, run: RunConfig, configs: Sequence[KernelConfig], times: Callable[[Callable[[], object]], list[float]]
) -> Sample:
    """The sample of a cell with one row: `configs` checked against the oracle, then `times` of their launches."""
    from triton.errors import TritonError

    try:
        call, used = launches_of(inputs_of(cell.case, run.device, run.seed), cell.case.is_causal, configs)
        results = call()
    except TritonError as error:  # does not compile, or not into this GPU's shared memory
        raise Unsupported(f"{cell.implementation}: {str(error).strip().splitlines()[0]}") from None
    error_ratio = checked_error(oracle_of(cell.case, run.device, run.seed), results)
    del results
    kernel = " ".join(["interpreter"] * (run.device == "cpu") + [config.name for config in used])
    return Sample(row=cell.rows[0], samples=times(call), kernel=kernel, error=error_ratio)


def launches_of(
    inputs: AttentionInputs, is_causal: bool, configs: Sequence[KernelConfig]
) -> tuple[Callable[[], dict[str, Tensor]], list[KernelConfig]]:
    """The launches that show `configs`, giving named results, and all configurations in them.

    One of the forward, or one or both of the backward's; the other kernels' are the table's.
    """
    from cs336_systems.attention.triton.backward import launch_backward
    from cs336_systems.attention.triton.forward import launch_forward
    from cs336_systems.attention.triton.function import kernel_config

    q, k, v, grad_output = inputs
    scale = 1 / math.sqrt(q.shape[-1])
    shown = {config.kernel: config for config in configs}
    used = {kernel: kernel_config(kernel, q, k, is_causal=is_causal) for kernel in MODES} | shown

    def forward() -> dict[str, Tensor]:
        output, lse = launch_forward(q, k, v, is_causal=is_causal, scale=scale, config=used["forward"])
        return {"output": output, "lse": lse}

    if "forward" in shown:
        return forward, [used["forward"]]
    saved = forward()

    def backward() -> dict[str, Tensor]:
        gradients = launch_backward(
            q, k, v, saved["output"], saved["lse"], grad_output, None, is_causal=is_causal, scale=scale,
            dkdv_config=used["dkdv"], dq_config=used["dq"],
        )  # fmt: skip
        return dict(zip(("grad_q", "grad_k", "grad_v"), gradients))

    return backward, [used["dkdv"], used["dq"]]


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A row for the table: of the configurations that ran on every shape, the one with the best geometric mean."""

    key: tuple[str, int, int]  # as in the tables: kernel, bytes per element, head tile
    config: KernelConfig
    worst_ratio: float  # of its times over the best ones'
    num_shapes: int
    without_tma: KernelConfig | None = None  # the best one for inputs that TMA cannot read, where `config` needs it

    @property
    def line(self) -> str:
        """The row as it would stand in the table; `...` in it is for a person to fill."""
        kernel, width, tile = self.key
        row = f'"{self.config.spelling}"'
        if self.config.tma:
            other = f'"{self.without_tma.spelling}"' if self.without_tma else "..."
            row = f"(Only({row}, tma=True), {other})"
        worst = f"at most {self.worst_ratio:.2f} x the best of {self.num_shapes} shapes"
        return f'("{kernel}", {width}, {tile}): {row},  # {worst}'


def medians(records: Iterable[Record], shapes: Sequence[AttentionShape], seed: int) -> dict[AttentionShape, Times]:
    """Median milliseconds by shape and configuration, from the newest good records of `tune_flash`."""
    by_key = {case_key(case_to_dict(shape)): shape for shape in shapes}
    found: dict[AttentionShape, Times] = {shape: {} for shape in shapes}
    for record in latest(record for record in records if record.problem == PROBLEM and record.seed == seed):
        shape = by_key.get(case_key(record.case))
        if shape is not None and record.status == "ok":
            found[shape][KernelConfig.from_name(record.implementation)] = statistics.median(record.samples)
    return found


def by_kernel(times: dict[AttentionShape, Times]) -> Iterator[tuple[AttentionShape, str, Times]]:
    """Each shape's times of each kernel that has any."""
    for shape, configs in times.items():
        for kernel in MODES:
            if measured := {config: ms for config, ms in configs.items() if config.kernel == kernel}:
                yield shape, kernel, measured


def proposals(times: dict[AttentionShape, Times]) -> list[Proposal]:
    """One row for each kernel, width of element and head tile measured; shapes without any good time do not count."""
    groups: dict[tuple[str, int, int], list[Times]] = {}  # times over the best one's, a dictionary a shape
    for shape, kernel, measured in by_kernel(times):
        best_ms = min(measured.values())
        key = (kernel, BYTES_PER_ELEMENT[shape.dtype], head_tile(shape.head_dim))
        groups.setdefault(key, []).append({config: ms / best_ms for config, ms in measured.items()})
    found = []
    for key, ratios in groups.items():
        everywhere = [config for config in ratios[0] if all(config in shape for shape in ratios)]
        means = {config: statistics.geometric_mean(shape[config] for shape in ratios) for config in everywhere}
        if not means:
            continue
        config = min(means, key=means.__getitem__)
        by_pointers = {other: mean for other, mean in means.items() if not other.tma}
        without_tma = min(by_pointers, key=by_pointers.__getitem__, default=None) if config.tma else None
        worst = max(shape[config] for shape in ratios)
        found.append(
            Proposal(key=key, config=config, worst_ratio=worst, num_shapes=len(ratios), without_tma=without_tma)
        )
    return found
