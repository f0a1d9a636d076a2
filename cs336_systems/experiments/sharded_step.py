"""A training step with the optimizer's state, or everything, shared out among ranks, and how it is checked.

`ShardedStep` wraps a model by name: ours, PyTorch's, or a reader's own FSDP. `check_training` trains a shallow model of
the full width, wrapped and, beside it, unsharded, and compares their weights.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.config import ModelConfig, Precision, RunConfig, require_positive
from cs336_systems.distributed.ddp_bucketed import BucketedDDP
from cs336_systems.distributed.fsdp import FSDP, wrap_blocks
from cs336_systems.distributed.fsdp.plan import Checkpointing, find_blocks
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from cs336_systems.distributed.zero1 import Zero1Optimizer
from cs336_systems.experiments.implementations import load_name
from cs336_systems.experiments.spec import Disagreement, Unsupported
from cs336_systems.inputs import token_batch
from cs336_systems.measure.memory import MIB
from cs336_systems.model import AdamW, TransformerLM, build_model, cross_entropy

OPTIMIZER_IMPLEMENTATIONS = ("unsharded", "sharded", "zero1", "torch_zero")
FSDP_IMPLEMENTATIONS = ("unsharded", "fsdp", "fsdp_layer", "torch_fsdp")
FSDPS = ("fsdp", "fsdp_layer", "torch_fsdp")  # which compute in their weights' dtype, where others need autocast
BUCKET_MB = 25.0
CHECK_LAYERS, CHECK_STEPS = 4, 3
# Largest 2-norm of the difference between both models' weights over that of the training's change. bfloat16 keeps 8
# bits; in float32 only the order of sums differs, and Adam divides small gradients by their own size.
CHECK_BOUND = {None: 1e-3, "bfloat16": 5e-2}


MEMORY = ("parameters", "gradients", "optimizer_state")  # bytes of a rank's tensors, after a step


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
        elif ":" in implementation:
            self.model = load_name(implementation)(module, compute_dtype)
            if not hasattr(self.model, "gather_full_params"):
                raise Unsupported(f"{implementation} has no gather_full_params(), by which its weights are checked")
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
        if self.implementation in FSDPS and run.model is None:
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
        if hasattr(self.model, "gather_full_params"):
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
        if self.autocast is None or self.implementation in FSDPS or ":" in self.implementation:
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
