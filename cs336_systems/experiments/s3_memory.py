"""Sections 2.1.6 and 3: `memory_profiling` and `gradient_checkpointing`.

`eager` and `compiled` are measured by the allocator of the run's device; `simulated` is the same code on fake tensors,
counted as CUDA would. On a CPU only small models are measured, and the handout's xl is simulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from cs336_systems.accounting import block_saved_bytes, model_peak_bytes, num_parameters
from cs336_systems.config import BYTES_PER_ELEMENT, MODEL_SIZES, ModelConfig, Precision, RunConfig, proxy_model
from cs336_systems.device import has_cxx_compiler
from cs336_systems.experiments.cells import Cell, Disagreement, Measurement, Row, Unsupported
from cs336_systems.experiments.memory_cells import (
    FORWARD,
    PHASES,
    START,
    MemoryCase,
    SimulatedStep,
    cpu_peaks,
    measured_phases,
    prepare,
    run_phases,
    simulated_trace,
)
from cs336_systems.experiments.model_cells import TrainingStep
from cs336_systems.measure.allocations import BACKWARD
from cs336_systems.measure.memory import MIB, CudaPhasePeaks, release
from cs336_systems.measure.saved import Saved, by_operation, compiled_saved_tensors, saved_tensors
from cs336_systems.measure.timeline import CATEGORIES, MemoryTrace
from cs336_systems.measure.timing import plan_samples, time_calls, time_once
from cs336_systems.model import TransformerLM
from cs336_systems.model.checkpointing import apply_checkpointing, compile_blocks

BATCH = 4
EXAMPLE_CONTEXTS = (128, 2048)  # whose timelines are drawn
TIMELINE_POINTS = 200
NUM_LARGEST = 5
TIMED_BUDGET_MS = {"cuda": 3000.0, "cpu": 300.0}
MIN_TIMED_STEPS = {"cuda": 2, "cpu": 5}  # an xl step in float32 takes 5.5 s, and varies by less than 1 ms
FLOAT32, AUTOCAST = Precision(), Precision(autocast="bfloat16")
GROUPS = ("none", "1", "2", "4", "8", "recursive")
COMPILED_GRADIENT = "CompiledFunctionBackward"  # how autograd calls the backward of what torch.compile made
GRADIENT_TOLERANCE = 1e-5  # of the largest gradient; checkpointing on CUDA may pick other matmul algorithms


@dataclass(frozen=True, kw_only=True)
class BlocksCase:
    """Some consecutive blocks of a model and what they save for backward."""

    model: ModelConfig
    batch: int
    blocks: int
    attention: str
    precision: Precision = FLOAT32
    checkpointing: str = "none"


# Rows


def phase_rows(mode: str) -> tuple[Row, ...]:
    return tuple(Row(mode=mode, quantity=f"peak_memory.{phase}", unit="MiB") for phase in PHASES[mode])


def trace_rows(mode: str) -> tuple[Row, ...]:
    """The timeline: its length in events, where phases begin, and sampled bytes by category."""
    starts = [Row(mode=mode, quantity=f"timeline.start.{phase}", unit="1") for phase in PHASES[mode]]
    lines = [Row(mode=mode, quantity=f"timeline.{category}", unit="MiB") for category in CATEGORIES]
    return (Row(mode=mode, quantity="timeline.event", unit="1"), *starts, *lines)


def ranked_rows(mode: str, quantity: str) -> tuple[Row, ...]:
    return tuple(Row(mode=mode, quantity=f"{quantity}.{rank}", unit="MiB") for rank in range(1, NUM_LARGEST + 1))


PEAK = Row(mode="train_step", quantity="peak_memory", unit="MiB")
ADDED = Row(mode="train_step", quantity="added_memory", unit="MiB")  # by forward and backward to what was there before
TIME = Row(mode="train_step", quantity="time", unit="ms")
PREDICTED = "closed_form_peak"
SAVED = Row(mode="forward", quantity="saved_for_backward", unit="MiB")
SAVED_EXPECTED = Row(mode="forward", quantity="closed_form_saved", unit="MiB")
RESIDUAL = Row(mode="forward", quantity="residual_stream", unit="MiB")
GRADIENTS = Row(mode="backward", quantity="gradients_of_block", unit="MiB")
GRADIENTS_EXPECTED = Row(mode="backward", quantity="closed_form_gradients", unit="MiB")


# memory_profiling


def memory_profiling_cells(run: RunConfig) -> list[Cell]:
    """Forward and full step of xl at short and long contexts in two precisions; then what one block saves."""
    problem = "memory_profiling"
    cells = []
    for case, implementation in _profiled(run):
        for mode in PHASES:
            rows = (*phase_rows(mode), Row(mode=mode, quantity=PREDICTED, unit="MiB"))
            if case.model.context_length in EXAMPLE_CONTEXTS:
                rows += (*trace_rows(mode), *ranked_rows(mode, "allocation"))
            predicted = model_peak_bytes(case, mode) if implementation != "simulated" else 0
            cells.append(
                Cell(problem=problem, case=case, implementation=implementation, rows=rows, predicted_bytes=predicted)
            )
    for blocks in _blocks(run):
        for implementation in ("simulated", "simulated compiled", *(("eager", "compiled") * (run.device == "cuda"))):
            rows = (SAVED, RESIDUAL, *ranked_rows("forward", "saved"))
            if "compiled" not in implementation:
                rows += (SAVED_EXPECTED, GRADIENTS, GRADIENTS_EXPECTED)
            cells.append(Cell(problem=problem, case=blocks, implementation=implementation, rows=rows))
    return cells


def _profiled(run: RunConfig) -> list[tuple[MemoryCase, str]]:
    """(case, implementation) at the run's scale: xl itself, on a CPU simulated, beside a measured proxy of it."""
    xl = MODEL_SIZES["xl"]

    def case(model: ModelConfig, context: int, precision: Precision, batch: int = BATCH) -> MemoryCase:
        model = replace(model, context_length=context)
        return MemoryCase(model=model, batch=batch, attention="reference", precision=precision)

    if run.scale == "handout":
        cases = [case(xl, context, one) for context in (128, 256, 512, 2048) for one in (FLOAT32, AUTOCAST)]
        return [(one, implementation) for one in cases for implementation in ("eager", "simulated")]
    proxy = proxy_model("xl", 64) if run.scale == "tiny" else proxy_model("xl")
    small = [case(proxy, 128, precision, batch=1) for precision in (FLOAT32, AUTOCAST)]
    found = [(one, implementation) for one in small for implementation in ("eager", "simulated")]
    if run.scale == "smoke":
        found += [(case(xl, context, FLOAT32), "simulated") for context in EXAMPLE_CONTEXTS]
        found += [(case(xl, 2048, AUTOCAST), "simulated")]
    return found


def _blocks(run: RunConfig) -> list[BlocksCase]:
    model = MODEL_SIZES["xl"] if run.scale != "tiny" else proxy_model("xl", 64)
    contexts = (512, 2048) if run.scale != "tiny" else (128,)
    return [
        BlocksCase(model=replace(model, context_length=context), batch=BATCH, blocks=1, attention="reference")
        for context in contexts
    ]


def measure_memory_profiling(cell: Cell, run: RunConfig) -> Iterator[Measurement]:
    if isinstance(cell.case, BlocksCase):
        yield from _measure_blocks(cell, run)
        return
    case: MemoryCase = cell.case
    mode = cell.rows[0].mode
    release(run.device)
    yield Measurement(row=_row(cell, PREDICTED), samples=[model_peak_bytes(case, mode) / MIB])
    out_of_memory = ""
    if cell.implementation == "simulated":
        trace = simulated_trace(case, mode, model_spec=run.model)
        peaks = trace.phase_peaks()
    else:
        measured = measured_phases(case, mode, run)
        trace, peaks, out_of_memory = measured.trace, measured.peak_bytes, measured.out_of_memory
    for phase, num_bytes in peaks.items():
        yield Measurement(row=_row(cell, f"peak_memory.{phase}"), samples=[num_bytes / MIB])
    if case.model.context_length in EXAMPLE_CONTEXTS:
        yield from _trace_measurements(cell, trace)
    if out_of_memory:  # what was seen until then is kept; the rows of the phases that are missing say why
        raise torch.OutOfMemoryError(out_of_memory)


def _trace_measurements(cell: Cell, trace: MemoryTrace) -> Iterator[Measurement]:
    events, lines = trace.sampled(TIMELINE_POINTS)
    yield Measurement(row=_row(cell, "timeline.event"), samples=events.tolist())
    for phase in trace.phases:
        yield Measurement(row=_row(cell, f"timeline.start.{phase.name}"), samples=[phase.start])
    for category, values in lines.items():
        yield Measurement(row=_row(cell, f"timeline.{category}"), samples=(values / MIB).tolist())
    made = [phase.name for phase in trace.phases[1:]]
    for rank, large in enumerate(trace.largest(NUM_LARGEST, made), start=1):
        kernel = f"{large.count} × {large.category}: {large.where}"
        yield Measurement(row=_row(cell, f"allocation.{rank}"), samples=[large.num_bytes / MIB], kernel=kernel)


def _row(cell: Cell, quantity: str) -> Row:
    return next(row for row in cell.rows if row.quantity == quantity)


# What blocks save


def _measure_blocks(cell: Cell, run: RunConfig) -> Iterator[Measurement]:
    case: BlocksCase = cell.case
    if cell.implementation.startswith("simulated"):
        with FakeTensorMode():
            model = SimulatedStep(_as_memory_case(case)).model
            assert isinstance(model, TransformerLM)
            yield from _saved_measurements(cell, model, torch.empty(_stream_shape(case), requires_grad=True))
        return
    release(run.device)
    with torch.device(run.device):
        model = TransformerLM.from_config(replace(case.model, num_layers=case.blocks), attention=case.attention)
        stream = torch.randn(_stream_shape(case), requires_grad=True)
    if cell.implementation == "compiled":
        if run.device == "cpu" and not has_cxx_compiler():
            raise Unsupported("no C++ compiler")
        compile_blocks(model)
    yield from _saved_measurements(cell, model, stream)


def _saved_measurements(cell: Cell, model: TransformerLM, stream: Tensor) -> Iterator[Measurement]:
    case: BlocksCase = cell.case
    blocks = nn.Sequential(*list(model.layers)[: case.blocks])
    parameters = [*blocks.parameters(), *blocks.buffers()]
    results: list[Tensor] = []
    saved: list[Saved]
    if cell.implementation == "simulated compiled":
        if case.checkpointing != "none":
            raise Unsupported("the partition of a graph is simulated without checkpoints in it")
        saved = compiled_saved_tensors(blocks, stream)
    else:
        apply_checkpointing(model, case.checkpointing)
        if cell.implementation == "compiled":
            model.run_blocks(list(blocks), stream)  # compiles
        saved = saved_tensors(
            lambda: results.append(model.run_blocks(list(blocks), stream)),
            parameters=parameters,
            compiled=cell.implementation == "compiled",
        )
        if cell.implementation == "compiled" and COMPILED_GRADIENT not in str(results[0].grad_fn):
            raise Disagreement(f"torch.compile left the block eager: its gradient is {results[0].grad_fn}")
    yield Measurement(row=SAVED, samples=[sum(one.num_bytes for one in saved) / MIB])
    ranked = {row.quantity: row for row in cell.rows}
    for rank, (operation, num_bytes) in enumerate(by_operation(saved)[:NUM_LARGEST], start=1):
        if f"saved.{rank}" in ranked:
            yield Measurement(row=ranked[f"saved.{rank}"], samples=[num_bytes / MIB], kernel=operation)
    if RESIDUAL in cell.rows:
        yield Measurement(row=RESIDUAL, samples=[stream.untyped_storage().nbytes() / MIB])
    if GRADIENTS in cell.rows:
        expected = block_saved_bytes(case.model, case.batch, attention=case.attention, precision=case.precision)
        yield Measurement(row=SAVED_EXPECTED, samples=[case.blocks * sum(expected.values()) / MIB])
        results[0].backward(torch.empty_like(results[0]))
        made = [tensor.grad for tensor in (*blocks.parameters(), stream)]
        num_bytes = sum(gradient.untyped_storage().nbytes() for gradient in made if gradient is not None)
        yield Measurement(row=GRADIENTS, samples=[num_bytes / MIB])
        deeper = replace(case.model, num_layers=case.model.num_layers + case.blocks)
        gradients = BYTES_PER_ELEMENT[case.precision.parameters] * (num_parameters(deeper) - num_parameters(case.model))
        yield Measurement(row=GRADIENTS_EXPECTED, samples=[(gradients + stream.untyped_storage().nbytes()) / MIB])


def _stream_shape(case: BlocksCase) -> tuple[int, int, int]:
    return (case.batch, case.model.context_length, case.model.d_model)


def _as_memory_case(case: BlocksCase) -> MemoryCase:
    model = replace(case.model, num_layers=case.blocks)
    return MemoryCase(model=model, batch=case.batch, attention=case.attention, precision=case.precision)


# gradient_checkpointing


def gradient_checkpointing_cells(run: RunConfig) -> list[Cell]:
    """Peak and time of a step by strategy; and what is stored between forward and backward."""
    problem = "gradient_checkpointing"
    cells = []
    for case, implementation in _strategies(run):
        rows = (PEAK, ADDED) if implementation == "simulated" else (PEAK, ADDED, TIME)
        predicted = model_peak_bytes(case, "train_step") if implementation != "simulated" else 0
        cells.append(
            Cell(problem=problem, case=case, implementation=implementation, rows=rows, predicted_bytes=predicted)
        )
    model = replace(MODEL_SIZES["xl"], context_length=2048) if run.scale != "tiny" else proxy_model("xl", 64)
    for blocks, checkpointing in ((1, "none"), (4, "none"), (4, "2"), (4, "1")):
        implementations = ["simulated"]
        if checkpointing == "none":
            implementations.append("simulated compiled")
        if run.device == "cuda":
            implementations += ["eager", "compiled"]
        for implementation in implementations:
            stored = BlocksCase(
                model=model, batch=BATCH, blocks=blocks, attention="reference", checkpointing=checkpointing
            )
            cells.append(Cell(problem=problem, case=stored, implementation=implementation, rows=(SAVED,)))
    return cells


def _strategies(run: RunConfig) -> list[tuple[MemoryCase, str]]:
    xl = replace(MODEL_SIZES["xl"], context_length=2048)
    fused = ("none", "1", "selective")

    def case(model: ModelConfig, attention: str, checkpointing: str, batch: int = BATCH) -> MemoryCase:
        return MemoryCase(model=model, batch=batch, attention=attention, checkpointing=checkpointing)

    simulated = [case(xl, "reference", name) for name in GROUPS] + [case(xl, "sdpa", name) for name in fused]
    if run.scale == "handout":
        measured = [(one, "eager") for one in simulated]
        measured += [(case(xl, "reference", name), "compiled") for name in ("1", "2", "4")]
        return measured + [(one, "simulated") for one in simulated]
    proxy = replace(proxy_model("xl", 64 if run.scale == "tiny" else 128), num_layers=8, context_length=128)
    proxy = replace(proxy, vocab_size=256)  # logits would hide what the blocks store
    groups = ("none", "1", "4", "recursive") if run.scale == "smoke" else ("none", "2", "recursive")
    small = [case(proxy, "reference", name) for name in groups]
    small.append(case(proxy, "sdpa", "selective"))
    found = [(one, implementation) for one in small for implementation in ("eager", "simulated")]
    if run.scale == "smoke":  # xl without checkpointing, in its smallest and largest groups, and with what takes least
        wanted = [("reference", name) for name in ("none", "1", "4")] + [("sdpa", "selective")]
        found += [(one, "simulated") for one in simulated if (one.attention, one.checkpointing) in wanted]
    return found


def measure_gradient_checkpointing(cell: Cell, run: RunConfig) -> Iterator[Measurement]:
    """Peak of one full training step (the optimizer's state is there before), then its time.

    Raises Disagreement unless the gradients of the same model, cut to four blocks and a short context, are those that
    it has without checkpointing.
    """
    if isinstance(cell.case, BlocksCase):
        yield from _measure_blocks(cell, run)
        return
    case: MemoryCase = cell.case
    release(run.device)
    if cell.implementation == "simulated":
        yield from _peaks(simulated_trace(case, "train_step", model_spec=run.model).phase_peaks())
        return
    if run.model is None:
        _check_gradients(case, run, compiled=cell.implementation == "compiled")
    if run.device == "cpu":
        yield from _peaks(cpu_peaks(case, "train_step", run))
    step = TrainingStep(case, run)
    prepare(step, case, "train_step")
    if cell.implementation == "compiled":
        assert isinstance(step.model, nn.Module)
        compile_blocks(step.model)
        step.forward_backward()
        step.reset()
    if run.device == "cuda":
        counters = CudaPhasePeaks()
        counters.mark(START)
        first_ms = time_once(lambda: run_phases(step, "train_step", counters.mark), run.device)
        counters.finish()
        step.reset()
        yield from _peaks(counters.peaks)
    else:
        first_ms = time_once(step.train_step, run.device)
    num_samples = plan_samples(first_ms, TIMED_BUDGET_MS[run.device], minimum=MIN_TIMED_STEPS[run.device])
    samples = time_calls(step.train_step, device=run.device, warmup=0, num_samples=num_samples, before=step.reset)
    yield Measurement(row=TIME, samples=samples)


def _peaks(phases: dict[str, int]) -> Iterator[Measurement]:
    yield Measurement(row=PEAK, samples=[max(phases.values()) / MIB])
    yield Measurement(row=ADDED, samples=[(max(phases[FORWARD], phases[BACKWARD]) - phases[START]) / MIB])


def _check_gradients(case: MemoryCase, run: RunConfig, *, compiled: bool) -> None:
    model = replace(case.model, num_layers=4, context_length=min(64, case.model.context_length))
    small = replace(case, model=model, batch=1)
    expected = TrainingStep(replace(small, checkpointing="none"), run)
    actual = TrainingStep(small, run)
    prepare(actual, small, "forward")
    if compiled:
        assert isinstance(actual.model, nn.Module)
        compile_blocks(actual.model)
    expected.forward_backward()
    actual.forward_backward()
    tolerance = 1e-3 if compiled else GRADIENT_TOLERANCE
    for one, other in zip(expected.parameters, actual.parameters, strict=True):
        assert one.grad is not None and other.grad is not None
        error, bound = float((one.grad - other.grad).abs().max()), tolerance * float(one.grad.abs().max())
        if not error <= bound:
            raise Disagreement(f"gradients under checkpointing differ by {error:.3g}, more than {bound:.3g}")
