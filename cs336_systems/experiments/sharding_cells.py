"""Cells of sections 6 and 7: what sharding the optimizer, or everything, does to memory and step time.

Phases on every rank: train a shallow model of the full width, wrapped and, beside it, unsharded, and compare their
weights; build the model itself; measure one step in parts (memory after construction, before and after the optimizer);
time whole steps together; trace a forward and a step. Every implementation, PyTorch's too, goes the same way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.accounting import model_peak_bytes
from cs336_systems.config import ModelCase, ModelConfig, Precision, RunConfig, require_positive
from cs336_systems.distributed.ddp_bucketed import BucketedDDP
from cs336_systems.distributed.fsdp import FSDP, wrap_blocks
from cs336_systems.distributed.fsdp.plan import Checkpointing, find_blocks
from cs336_systems.distributed.memory_plan import fsdp_bytes
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from cs336_systems.distributed.zero1 import Zero1Optimizer
from cs336_systems.experiments.cells import Cell, Disagreement, Measurement, Row, Unsupported
from cs336_systems.experiments.rank_cells import agreed_samples, run_cell, slowest
from cs336_systems.inputs import token_batch
from cs336_systems.measure.intervals import simplify
from cs336_systems.measure.memory import MIB, release
from cs336_systems.measure.overlap import Lanes, trace_lanes
from cs336_systems.measure.timing import synchronize
from cs336_systems.model import AdamW, TransformerLM, build_model, cross_entropy

OPTIMIZER_IMPLEMENTATIONS = ("unsharded", "sharded", "zero1", "torch_zero")
FSDP_IMPLEMENTATIONS = ("unsharded", "fsdp", "fsdp_layer", "torch_fsdp")
BUDGET_MS = {"tiny": 100.0, "smoke": 500.0, "handout": 2000.0}  # of timed steps a cell
MIN_SAMPLES = 5
WARMUP = 1  # after the step whose memory is read, and before the one that plans how many are timed
BUCKET_MB = 25.0
CHECK_LAYERS, CHECK_STEPS = 4, 3
# Largest 2-norm of the difference between both models' weights over that of the training's change. bfloat16 keeps 8
# bits; in float32 only the order of sums differs, and Adam divides small gradients by their own size.
CHECK_BOUND = {None: 1e-3, "bfloat16": 5e-2}


@dataclass(frozen=True, kw_only=True)
class RanksCase:
    """One training step of ranks, each with `batch` sequences of its own: what a `ShardedStep` reads of its case."""

    model: ModelConfig
    batch: int  # sequences of each rank
    num_ranks: int
    backend: str  # nccl on GPUs, gloo on CPUs
    attention: str  # as in ModelCase
    precision: Precision = Precision()  # autocast is the compute dtype of FSDP's weights
    reduce_dtype: str | None = None  # of averaged gradients; None: that of the computation

    def __post_init__(self) -> None:
        require_positive(self, "batch", "num_ranks")


@dataclass(frozen=True, kw_only=True)
class ShardingCase(RanksCase):
    """The step of ranks that share a model's memory."""

    checkpointing: Checkpointing = "none"  # of every block


MEMORY = ("parameters", "gradients", "optimizer_state")  # bytes of a rank's tensors, after a step
MOMENTS = ("memory_after_init", "memory_before_step", "memory_after_step")  # peaks so far, from CUDA's allocator
TRACED = ("compute_time", "communication_time", "overlap_time", "traced_time")
INTERVALS = ("compute_intervals", "communication_intervals")  # start, end, start, end, ...: what a figure can show
MOST_INTERVALS = 300  # of a lane in a record: more cannot be told apart in a figure


def sharding_cell(problem: str, case: ShardingCase, implementation: str) -> Cell:
    """The cell with every row that its device can give."""
    rows = [Row(mode="train_step", quantity="time", unit="ms")]
    rows += [Row(mode="train_step", quantity=name, unit="MiB") for name in MEMORY]
    if case.backend == "nccl":
        rows += [Row(mode="train_step", quantity=name, unit="MiB") for name in (*MOMENTS, "peak_memory")]
    if implementation in ("fsdp", "fsdp_layer"):
        rows.append(Row(mode="train_step", quantity="predicted_peak_memory", unit="MiB"))
    for mode in ("forward", "train_step"):
        rows += [Row(mode=mode, quantity=name, unit="ms") for name in (*TRACED, *INTERVALS)]
    alone = ModelCase(model=case.model, batch=case.batch, attention=case.attention, precision=case.precision)
    predicted = case.num_ranks * model_peak_bytes(alone, "train_step") if case.backend == "gloo" else 0
    return Cell(problem=problem, case=case, implementation=implementation, rows=tuple(rows), predicted_bytes=predicted)


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one rank measured; lanes on rank 0 only."""

    step_ms: list[float]
    error: float  # over its bound
    mib: dict[str, float] = field(default_factory=dict)
    lanes: dict[str, Lanes] = field(default_factory=dict)  # by mode


def measure_sharding(cell: Cell, run: RunConfig) -> Iterator[Measurement]:
    case: ShardingCase = cell.case
    if cell.implementation not in (*OPTIMIZER_IMPLEMENTATIONS, *FSDP_IMPLEMENTATIONS):
        raise Unsupported(f"there is no sharding called {cell.implementation!r}")
    if cell.implementation == "torch_fsdp" and case.backend != "nccl" and case.precision.autocast is not None:
        raise Unsupported("fully_shard in low precision is measured on GPUs only")
    rows = {(row.mode, row.quantity): row for row in cell.rows}
    predicted = rows.get(("train_step", "predicted_peak_memory"))
    if predicted is not None:  # before anything runs
        yield Measurement(row=predicted, samples=[predicted_mib(case)])
    reports: list[RankReport] = run_cell(
        _measure_rank, case.num_ranks, cell.implementation, case, run, backend=case.backend, run=run
    )
    error = max(report.error for report in reports)
    times = slowest([report.step_ms for report in reports])
    yield Measurement(row=rows["train_step", "time"], samples=times, error=error)
    for name in reports[0].mib:
        yield Measurement(row=rows["train_step", name], samples=[max(report.mib[name] for report in reports)])
    for mode, lanes in reports[0].lanes.items():
        values = (lanes.compute_ms, lanes.communication_ms, lanes.overlap_ms, lanes.span_ms)
        for name, value in zip(TRACED, values):
            yield Measurement(row=rows[mode, name], samples=[value])
        for name, intervals in zip(INTERVALS, (lanes.compute, lanes.communication)):
            samples = [time for pair in simplify(intervals, MOST_INTERVALS) for time in pair]
            yield Measurement(row=rows[mode, name], samples=samples, skipped="" if samples else "there were none")


def predicted_mib(case: ShardingCase) -> float:
    """Peak of a rank under FSDP, in closed form."""
    plan = fsdp_bytes(
        case.model,
        case.batch,
        num_ranks=case.num_ranks,
        attention=case.attention,
        compute_dtype=case.precision.autocast,
        reduce_dtype=case.reduce_dtype,
        checkpointing=case.checkpointing != "none",
    )
    return plan.peak / MIB


class ShardedStep:
    """A wrapped model, its optimizer and this rank's batch."""

    loss: Tensor  # of the last step, before it

    def __init__(
        self,
        implementation: str,
        case: RanksCase,
        run: RunConfig,
        rank: int,
        optimizer: type = AdamW,
        learning_rate: float = 1e-3,
    ) -> None:
        self.device = "cuda" if case.backend == "nccl" else "cpu"
        self.implementation = implementation
        self.autocast = case.precision.autocast
        self.tokens, self.targets = token_batch(case.model, case.batch, device=self.device, seed=run.seed + rank)
        compute_dtype = None if self.autocast is None else getattr(torch, self.autocast)
        reduce_dtype = None if case.reduce_dtype is None else getattr(torch, case.reduce_dtype)
        self.learning_rate = learning_rate
        module = self._build(case, run)
        if implementation in ("fsdp", "fsdp_layer"):
            granularity: Any = "layer" if implementation == "fsdp_layer" else "block"
            self.model: Any = FSDP(
                module, compute_dtype, reduce_dtype=reduce_dtype, granularity=granularity, device=self.device
            )
        elif implementation == "torch_fsdp":
            self.model = _fully_shard(module, compute_dtype, reduce_dtype, self.device)
        elif implementation == "zero1":
            self.model = module
        elif implementation == "torch_zero":
            self.model = nn.parallel.DistributedDataParallel(
                module, gradient_as_bucket_view=True, broadcast_buffers=False
            )
        else:
            self.model = BucketedDDP(module, BUCKET_MB)
        self.optimizer = self._optimizer(optimizer)

    def _build(self, case: Any, run: RunConfig) -> nn.Module:
        module = self._model(case, run)
        return module if case.checkpointing == "none" else wrap_blocks(module, checkpointing=case.checkpointing)

    def _model(self, case: ShardingCase, run: RunConfig) -> nn.Module:
        if self.implementation in ("fsdp", "fsdp_layer", "torch_fsdp") and run.model is None:
            with torch.device("meta"):  # no rank ever holds the whole model
                module = TransformerLM.from_config(case.model, attention=case.attention)
            torch.manual_seed(run.seed)
            return module
        if self.implementation == "torch_fsdp":
            raise Unsupported("the user's model has no known way to be built on the meta device")
        return build_model(
            case.model, attention=case.attention, model_spec=run.model, device=self.device, seed=run.seed
        )

    def _optimizer(self, optimizer: type) -> Any:
        parameters = self.model.parameters()
        if self.implementation == "sharded":
            return ShardedOptimizer(parameters, optimizer, lr=self.learning_rate)
        if self.implementation == "zero1":
            return Zero1Optimizer(parameters, optimizer, bucket_size_mb=BUCKET_MB, lr=self.learning_rate)
        if self.implementation == "torch_zero":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            return ZeroRedundancyOptimizer(parameters, optimizer_class=optimizer, lr=self.learning_rate)
        return optimizer(parameters, lr=self.learning_rate)

    def forward(self) -> Tensor:
        """The loss, with the graph that a backward would need."""
        with self._precision():
            return cross_entropy(self.model(self.tokens), self.targets)

    def forward_backward(self) -> None:
        loss = self.forward()
        loss.backward()
        self.loss = loss.detach()
        if hasattr(self.model, "finish_gradient_synchronization"):
            self.model.finish_gradient_synchronization()
        if self.implementation == "zero1":
            self.optimizer.finish_gradient_synchronization()

    def train_step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.forward_backward()
        self.optimizer.step()

    def full_parameters(self) -> list[Tensor]:
        """Whole parameters in the order of the unwrapped model; collective."""
        if isinstance(self.model, FSDP):
            return list(self.model.gather_full_params().values())
        if self.implementation == "torch_fsdp":
            return [parameter.full_tensor() for parameter in self.model.parameters()]
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def mib(self) -> dict[str, float]:
        """What this rank keeps of each kind, in MiB: distinct storages, since views are not memory."""
        states = self.optimizer.optim.state if self.implementation == "torch_zero" else self.optimizer.state
        parameters = [_local(parameter) for parameter in self.model.parameters()]
        gradients = [_local(parameter.grad) for parameter in self.model.parameters() if parameter.grad is not None]
        tensors = [_local(value) for state in states.values() for value in state.values() if isinstance(value, Tensor)]
        if isinstance(self.optimizer, Zero1Optimizer):
            gradients += [bucket.gradient for bucket in self.optimizer.buckets]
        return {name: _storage_mib(kind) for name, kind in zip(MEMORY, (parameters, gradients, tensors))}

    def _precision(self) -> AbstractContextManager[object]:
        """FSDP computes in its weights' dtype; the others need autocast."""
        if self.autocast is None or self.implementation in ("fsdp", "fsdp_layer", "torch_fsdp"):
            return nullcontext()
        return torch.autocast(self.device, dtype=getattr(torch, self.autocast))


def _fully_shard(
    module: nn.Module, compute_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None, device: str
) -> nn.Module:
    """PyTorch's FSDP2 over blocks and root, weights drawn by each module's reset_parameters."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import init_device_mesh

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    for block in find_blocks(module).values():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    module.to_empty(device=device)
    for inner in module.modules():
        if hasattr(inner, "reset_parameters"):
            inner.reset_parameters()  # type: ignore[operator]
    return module


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _storage_mib(tensors: list[Tensor]) -> float:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values()) / MIB


def _measure_rank(rank: int, num_ranks: int, implementation: str, case: ShardingCase, run: RunConfig) -> RankReport:
    error = check_training(implementation, case, run, rank)
    device = "cuda" if case.backend == "nccl" else "cpu"
    release(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    moments = {}
    step = ShardedStep(implementation, case, run, rank)
    moments["memory_after_init"] = peak_mib(device)
    step.forward_backward()
    moments["memory_before_step"] = peak_mib(device)
    step.optimizer.step()
    moments["memory_after_step"] = peak_mib(device)
    for _ in range(WARMUP):
        step.train_step()
    kept = step.mib()
    count = agreed_samples(step.train_step, device, BUDGET_MS[run.scale], MIN_SAMPLES)
    samples = [time_together(step.train_step, device) for _ in range(count)]
    if device == "cuda":
        kept |= moments | {"peak_memory": peak_mib(device)}
    lanes = {
        "forward": trace_on_first(step.forward, rank, device),
        "train_step": trace_on_first(step.train_step, rank, device),
    }
    found = {mode: lane for mode, lane in lanes.items() if lane is not None}
    return RankReport(step_ms=samples, error=error, mib=kept, lanes=found)


def peak_mib(device: str) -> float:
    """The most that tensors have occupied since the statistics were reset."""
    synchronize(device)
    return torch.cuda.max_memory_allocated() / MIB if device == "cuda" else 0.0


def time_together(call: Callable[[], object], device: str) -> float:
    """Milliseconds of one call that no rank begins before all are ready."""
    synchronize(device)
    dist.barrier()
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3


def trace_on_first(call: Callable[[], object], rank: int, device: str) -> Lanes | None:
    """Rank 0's lanes of one call; the others make the same two calls without a profiler."""

    def together() -> None:
        dist.barrier()
        synchronize(device)
        call()

    if rank == 0:
        return trace_lanes(together, device)
    for _ in range(2):
        together()
        synchronize(device)
    return None


def check_training(implementation: str, case: ShardingCase, run: RunConfig, rank: int) -> float:
    """Error over its bound of a shallow model's weights after training; Disagreement above 1.

    The same width, fewer layers, CHECK_STEPS steps, against DDP in float32 from the same weights on the same data: with
    AdamW where the optimizer is what is sharded, with SGD for FSDP, since in low precision Adam's first steps follow
    the sign of gradients that are all rounding.
    """
    shallow = replace(case, model=replace(case.model, num_layers=min(CHECK_LAYERS, case.model.num_layers)))
    optimizer = AdamW if implementation in OPTIMIZER_IMPLEMENTATIONS else torch.optim.SGD
    step = ShardedStep(implementation, shallow, run, rank, optimizer)
    plain = replace(shallow, precision=Precision(), checkpointing="none")
    reference = ShardedStep("unsharded", plain, run, rank, optimizer)
    return compare_training(step, reference, CHECK_BOUND[case.precision.autocast])


def compare_training(step: ShardedStep, reference: ShardedStep, bound: float) -> float:
    """2-norm of the difference between both models' weights over that of the change of `reference`'s, over `bound`.

    `reference` takes the weights of `step`, both train CHECK_STEPS steps. Disagreement if the result is above 1.
    """
    start = [value.clone() for value in step.full_parameters()]  # one rank's whole weights may be those it trains
    for parameter, value in zip(reference.model.parameters(), start):
        parameter.data.copy_(value)
    for _ in range(CHECK_STEPS):
        step.train_step()
        reference.train_step()
    difference, change = 0.0, 0.0
    for ours, theirs, before in zip(step.full_parameters(), reference.full_parameters(), start):
        difference += (ours - theirs).double().square().sum().item()
        change += (theirs - before).double().square().sum().item()
    error = math.sqrt(difference / change) / bound if change else math.inf
    if not error <= 1:
        raise Disagreement(
            f"weights after {CHECK_STEPS} steps are off by {error:.3g} times the bound of unsharded ones"
        )
    return error
