"""Record the memory of a training step by phases, on fake tensors or on a device.

    trace = simulated_trace(case, "train_step")             # fake tensors, a laptop, seconds
    measured_phases(case, "train_step", run).peak_bytes     # the allocator's counts, CPU or CUDA

The same code runs in both. "start" is the model and, for a training step, AdamW's state, since the
step is not the first. "forward" ends with the loss, "backward" begins with its gradient, and
"optimizer step" comes last.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from cs336_systems.accounting import block_saved_bytes, model_peak_bytes
from cs336_systems.bench.spec import Cell, Disagreement, Row, Sample, Unsupported
from cs336_systems.config import FieldError, ModelCase, ModelConfig, Precision, RunConfig
from cs336_systems.measure.allocations import MIB, cpu_phase_peaks, release
from cs336_systems.measure.predict import CudaAutocastRules, fake_module
from cs336_systems.measure.saved import by_operation, compiled_saved_tensors, saved_tensors
from cs336_systems.measure.snapshot import CudaHistory
from cs336_systems.measure.timeline import BACKWARD, AllocationRecorder, MemoryTrace
from cs336_systems.model import AdamW, TransformerLM, build_model
from cs336_systems.model.checkpointing import apply_checkpointing, compile_blocks
from cs336_systems.subjects.model_steps import TrainingStep

START, FORWARD, STEP = "start", "forward", "optimizer step"
# far below the overflow of a tensor's size, far above any machine's memory
MAX_SIMULATED_BYTES = 2**60
PHASES = {"forward": (START, FORWARD), "train_step": (START, FORWARD, BACKWARD, STEP)}


@dataclass(frozen=True, kw_only=True)
class MemoryCase(ModelCase):
    """A model whose memory is recorded."""

    checkpointing: str = "none"  # none, recursive, selective, or blocks per group
    warmup: int = 0


class SimulatedStep(TrainingStep):
    """A `TrainingStep` on fake tensors, without computation or memory, used in a FakeTensorMode."""

    def __init__(self, case: ModelCase, model_spec: str | None = None) -> None:
        super().__init__(case, RunConfig(scale="tiny", device="cpu", model=model_spec))

    def _build(self, case: Any, run: RunConfig) -> nn.Module:
        """Return the case's model with fake parameters."""
        # Fake tensors do not tell a GPU's attention operator its device. The tiled one saves the
        # same tensors.
        stand_ins = {"triton": "tiled", "hopper": "tiled", "compiled": "reference"}
        attention = stand_ins.get(case.attention, case.attention)
        return fake_module(
            lambda: build_model(
                case.model, attention=attention, model_spec=run.model, device="meta"
            ),
            getattr(torch, case.precision.parameters),
        )


def prepare(step: TrainingStep, case: ModelCase, mode: str) -> None:
    """Apply the checkpointing of `case`, and for a training step create the optimizer's state.

    The weights stay as they are. Raises Unsupported if a user's model cannot be checkpointed.
    """
    checkpointing = getattr(case, "checkpointing", "none")
    if checkpointing != "none":
        try:
            apply_checkpointing(step.model, checkpointing)
        except TypeError as error:  # a user's own model
            raise Unsupported(str(error)) from error
    if mode == "train_step":
        step.optimizer = AdamW(step.parameters, lr=0.0, weight_decay=0.0)
        for parameter in step.parameters:
            # Any gradient creates the state; with lr 0 the weights stay.
            parameter.grad = parameter.detach()
        step.optimizer.step()
        for value in optimizer_state(step):
            value.zero_()
        step.reset()


def optimizer_state(step: TrainingStep) -> Iterator[Tensor]:
    """Yield the tensors of the optimizer's state; none before there is an optimizer."""
    if step.optimizer is not None:
        for state in step.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def run_phases(step: TrainingStep, mode: str, mark: Callable[[str], None]) -> None:
    """Run one pass of `mode`, calling `mark` with each phase's name as it begins, except START."""
    step.reset()
    mark(FORWARD)
    if mode == "forward":
        step.forward()
        return
    loss = step.loss()
    mark(BACKWARD)
    loss.backward()
    mark(STEP)
    step.optimizer.step()


def record(step: TrainingStep, mode: str, recorder: AllocationRecorder | CudaHistory) -> None:
    """Run one pass of `mode` and tell `recorder` the phases and the categories of tensors.

    The categories are "parameters", "optimizer" and "gradients".
    """

    def begin(name: str) -> None:
        """Begin a phase; gradients exist when the optimizer's step begins."""
        if name == STEP:
            recorder.assign((parameter.grad for parameter in step.parameters), "gradients")
        recorder.phase(name)

    recorder.phase(START)
    recorder.assign(step.parameters, "parameters")
    recorder.assign(optimizer_state(step), "optimizer")
    run_phases(step, mode, begin)


def recorded_trace(step: TrainingStep, mode: str, device: str) -> MemoryTrace:
    """Return the trace of one pass by an `AllocationRecorder` that counts as `device` does."""
    with AllocationRecorder(device) as recorder:
        record(step, mode, recorder)
    return recorder.trace()


def simulated_trace(
    case: ModelCase, mode: str, *, device: str = "cuda", model_spec: str | None = None
) -> MemoryTrace:
    """Return the memory trace that one pass of `case` would have on `device`, from fake tensors.

    Nothing is allocated here. `model_spec` names the user's own model, None this package's. Raises
    ValueError for an unknown mode, or if the case needs more than MAX_SIMULATED_BYTES.
    """
    if mode not in PHASES:
        raise FieldError("mode", f"must be one of {', '.join(PHASES)}, got {mode!r}")
    if (predicted := model_peak_bytes(case, mode)) > MAX_SIMULATED_BYTES:
        raise ValueError(
            f"batch and context_length must need at most {MAX_SIMULATED_BYTES:,} bytes, "
            f"got {predicted:,}"
        )
    rules = CudaAutocastRules() if device == "cuda" else nullcontext()
    with FakeTensorMode(), rules:
        step = SimulatedStep(case, model_spec)
        prepare(step, case, mode)
        return recorded_trace(step, mode, device)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The allocator's counts of one pass."""

    peak_bytes: dict[str, int]  # phase -> peak, for phases that were completed
    trace: MemoryTrace
    out_of_memory: str = ""  # the error's message if the pass ran out of memory


def measured_pass(step: TrainingStep, mode: str) -> Measured:
    """Run one pass of a prepared `step` on its device and return the allocator's counts.

    On CUDA the trace is the allocator's history of the same pass; if that runs out of memory, the
    trace ends there. On a CPU the counts are the profiler's, and the trace is recorded in a second
    pass.
    """
    if step.device == "cpu":
        base = sum(
            tensor.untyped_storage().nbytes()
            for tensor in (*step.parameters, *optimizer_state(step))
        )
        peaks = {START: base} | cpu_phase_peaks(lambda mark: run_phases(step, mode, mark), base)
        return Measured(peak_bytes=peaks, trace=recorded_trace(step, mode, "cpu"))

    # A first matmul, so that cuBLAS's workspace is not counted.
    torch.ones(16, 16, device="cuda") @ torch.ones(16, 16, device="cuda")
    message = ""
    with CudaHistory() as history:
        try:
            record(step, mode, history)
            history.end_phase()
        except torch.OutOfMemoryError as error:
            message = str(error).splitlines()[0]
            if len(history.phases) > 2:  # START and FORWARD: backward had begun
                history.assign((parameter.grad for parameter in step.parameters), "gradients")
        trace = history.trace()
    return Measured(peak_bytes=history.peaks, trace=trace, out_of_memory=message)


def measured_phases(case: ModelCase, mode: str, run: RunConfig) -> Measured:
    """Build and prepare `case` on the run's device and return `measured_pass` of it."""
    step = TrainingStep(case, run)
    prepare(step, case, mode)
    return measured_pass(step, mode)


# What consecutive blocks save for backward

NUM_LARGEST = 5  # operations that are reported on their own
# autograd's name for the backward of a compiled function
COMPILED_GRADIENT = "CompiledFunctionBackward"
SAVED = Row(mode="forward", quantity="saved_for_backward", unit="MiB")
SAVED_EXPECTED = Row(mode="forward", quantity="closed_form_saved", unit="MiB")
RESIDUAL = Row(mode="forward", quantity="residual_stream", unit="MiB")


def ranked_rows(mode: str, quantity: str) -> tuple[Row, ...]:
    """Return rows in MiB for ranks 1 to NUM_LARGEST: "<quantity>.1", "<quantity>.2", ..."""
    return tuple(
        Row(mode=mode, quantity=f"{quantity}.{rank}", unit="MiB")
        for rank in range(1, NUM_LARGEST + 1)
    )


@dataclass(frozen=True, kw_only=True)
class BlocksCase:
    """Some consecutive blocks of a model, whose tensors saved for backward are measured."""

    model: ModelConfig
    batch: int
    blocks: int
    attention: str
    precision: Precision = Precision()
    checkpointing: str = "none"

    @property
    def stream_shape(self) -> tuple[int, int, int]:
        """Shape of the residual stream: (batch, context_length, d_model)."""
        return (self.batch, self.model.context_length, self.model.d_model)


def measure_blocks(cell: Cell, run: RunConfig) -> Iterator[Sample]:
    """Measure the bytes that the case's blocks save for backward.

    Implementations whose names begin with "simulated" use fake tensors.
    """
    case: BlocksCase = cell.case

    def build() -> TransformerLM:
        """Return a model with the case's number of blocks."""
        return TransformerLM.from_config(
            replace(case.model, num_layers=case.blocks), attention=case.attention
        )

    if cell.implementation.startswith("simulated"):
        with FakeTensorMode():
            yield from _saved_measurements(
                cell, fake_module(build), torch.empty(case.stream_shape, requires_grad=True)
            )
        return
    release(run.device)
    with torch.device(run.device):
        model, stream = build(), torch.randn(case.stream_shape, requires_grad=True)
    if cell.implementation == "compiled":
        compile_blocks(model)
    yield from _saved_measurements(cell, model, stream)


def _saved_measurements(cell: Cell, model: Any, stream: Tensor) -> Iterator[Sample]:
    """Yield the cell's rows for the blocks of `model` on the residual `stream`.

    Raises Disagreement if torch.compile left the blocks eager.
    """
    case: BlocksCase = cell.case
    blocks = nn.Sequential(*model.layers)
    if cell.implementation == "simulated compiled":
        saved = compiled_saved_tensors(blocks, stream)
    else:
        apply_checkpointing(model, case.checkpointing)
        compiled = cell.implementation == "compiled"
        if compiled:
            gradient = model.run_blocks(list(blocks), stream).grad_fn  # compiles the blocks
            if COMPILED_GRADIENT not in str(gradient):
                raise Disagreement(
                    f"torch.compile left the block eager: its gradient is {gradient}"
                )
            del gradient
        parameters = [*blocks.parameters(), *blocks.buffers()]
        saved = saved_tensors(
            lambda: model.run_blocks(list(blocks), stream), parameters=parameters, compiled=compiled
        )

    expected = block_saved_bytes(
        case.model, case.batch, attention=case.attention, precision=case.precision
    )
    found = {
        SAVED: sum(one.num_bytes for one in saved),
        SAVED_EXPECTED: case.blocks * sum(expected.values()),
        RESIDUAL: stream.untyped_storage().nbytes(),
    }
    yield from (Sample(row=row, samples=[found[row] / MIB]) for row in cell.rows if row in found)
    for row, (operation, num_bytes) in zip(ranked_rows("forward", "saved"), by_operation(saved)):
        if row in cell.rows:
            yield Sample(row=row, samples=[num_bytes / MIB], kernel=operation)
