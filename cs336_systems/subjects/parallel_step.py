"""Build and check a rank's training step under data parallelism, a sharded optimizer or FSDP.

`ParallelStep(implementation, case, run, rank)` wraps a model by name: ours, PyTorch's, or a user's
own. Data parallelism is checked by its gradients, against the plain mean of the gradients that
ranks compute alone (`check_gradients`). Sharding is checked by the weights after some steps,
against training that shards nothing (`check_training`).
"""

import inspect
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.accounting import RankBytes, model_peak_bytes
from cs336_systems.analysis.memory_plan import fsdp_bytes
from cs336_systems.bench.spec import Disagreement, Unsupported
from cs336_systems.config import ModelCase, ModelConfig, Precision, RunConfig
from cs336_systems.distributed.fsdp import FSDP, wrap_blocks
from cs336_systems.distributed.fsdp.plan import Checkpointing, find_blocks
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from cs336_systems.distributed.zero1 import Zero1Optimizer
from cs336_systems.measure.allocations import MIB
from cs336_systems.model import AdamW, TransformerLM
from cs336_systems.subjects.attention_builders import load_name
from cs336_systems.subjects.model_steps import TrainingStep, require_finite
from cs336_systems.training.wrappers import DDPS

OURS = tuple(DDPS)
PEERS = ("torch_ddp", "torch_ddp_view")  # the latter with gradient_as_bucket_view
OPTIMIZER_IMPLEMENTATIONS = ("unsharded", "sharded", "zero1", "torch_zero")
FSDP_IMPLEMENTATIONS = ("unsharded", "fsdp", "fsdp_layer", "torch_fsdp")
FSDPS = FSDP_IMPLEMENTATIONS[1:]
# implementation -> the data parallelism that averages its gradients
OVER_DDP = {"unsharded": "bucketed", "sharded": "bucketed", "torch_zero": "torch_ddp_view"}
ALONE = "alone"  # a rank's model without a wrapper
BUCKET_MB = 25.0  # MiB, PyTorch's default, for cases without a bucket size
MEMORY = ("parameters", "gradients", "optimizer_state")  # kinds of a rank's tensors after a step
# Bound on the largest difference of a gradient over the largest element of its expectation, by
# autocast dtype. Both are computed from the same weights and data; they differ in the order of
# sums, also in backwards that add with atomics.
GRADIENT_TOLERANCE = {None: 1e-4, "bfloat16": 2e-2, "float16": 2e-3}
SMALLEST_BOUND = 1e-30  # for gradients that are all zeros
CHECK_LAYERS, CHECK_STEPS = 4, 3
# Bound on the 2-norm of the difference between both models' weights over that of their change in
# training, by autocast dtype. bfloat16 keeps 8 bits; in float32 only the order of sums differs, and
# Adam divides small gradients by their own size.
CHECK_BOUND = {None: 1e-3, "bfloat16": 5e-2}


@dataclass(frozen=True, kw_only=True)
class RanksCase:
    """One training step on several ranks, each with `batch` sequences of its own."""

    model: ModelConfig
    batch: int  # sequences of each rank
    num_ranks: int
    backend: str  # nccl on GPUs, gloo on CPUs
    attention: str  # as in ModelCase
    precision: Precision = Precision()  # autocast is the compute dtype of FSDP's weights

    @property
    def predicted_bytes(self) -> int:
        """Predicted peak bytes of all ranks in the host's memory, without sharding; 0 on GPUs."""
        alone = ModelCase(
            model=self.model, batch=self.batch, attention=self.attention, precision=self.precision
        )
        return (
            self.num_ranks * model_peak_bytes(alone, "train_step") if self.backend == "gloo" else 0
        )


@dataclass(frozen=True, kw_only=True)
class DataParallelCase(RanksCase):
    """A training step of ranks that average their gradients."""

    # MiB of gradients in a bucket; None: the implementation has none
    bucket_size_mb: float | None = None


@dataclass(frozen=True, kw_only=True)
class ShardingCase(RanksCase):
    """A training step of ranks that divide a model's memory among them."""

    reduce_dtype: str | None = None  # of averaged gradients; None: the compute dtype
    checkpointing: Checkpointing = "none"  # of every block


def fsdp_case_bytes(case: Any, *, checkpointing: bool = False) -> RankBytes:
    """Return the predicted bytes of a rank, `fsdp_bytes`, for a ShardingCase."""
    return fsdp_bytes(
        case.model,
        case.batch,
        num_ranks=case.num_ranks,
        attention=case.attention,
        compute_dtype=case.precision.autocast,
        reduce_dtype=case.reduce_dtype,
        checkpointing=checkpointing,
        parameters=case.precision.parameters,
    )


class ParallelStep(TrainingStep):
    """A `TrainingStep` of one rank: a wrapped model, its optimizer and this rank's batch."""

    def __init__(
        self,
        implementation: str,
        case: Any,
        run: RunConfig,
        rank: int,
        optimizer: type = AdamW,
        learning_rate: float = 1e-3,
    ) -> None:
        self.implementation, self.case, self.learning_rate = implementation, case, learning_rate
        # FSDP gathers weights and computes in their dtype. A user's own implementation is FSDP
        # unless the case is one of data parallelism.
        own = ":" in implementation and not isinstance(case, DataParallelCase)
        self.is_fsdp = implementation in FSDPS or own
        super().__init__(case, run, rank)
        self.parameters = [parameter for parameter in self.parameters if parameter.requires_grad]
        self.model = self._wrapped(self.model)
        self.optimizer = self._optimizer(optimizer)

    def _build(self, case: Any, run: RunConfig) -> nn.Module:
        """Return the unwrapped model: for FSDP of this package's model on the meta device.

        Blocks are wrapped for checkpointing if the case has it.
        """
        if self.implementation in FSDPS and run.model is None:
            with torch.device("meta"):  # no rank ever holds the whole model
                module: nn.Module = TransformerLM.from_config(case.model, attention=case.attention)
            torch.manual_seed(run.seed)
        elif self.implementation == "torch_fsdp":
            raise Unsupported("the user's model has no known way to be built on the meta device")
        else:
            module = super()._build(case, run)
        checkpointing: Checkpointing = getattr(case, "checkpointing", "none")
        return (
            module if checkpointing == "none" else wrap_blocks(module, checkpointing=checkpointing)
        )

    def _wrapped(self, module: nn.Module) -> nn.Module:
        """Return `module` under the wrapper of the implementation."""
        name, case = self.implementation, self.case
        if name in (ALONE, "zero1"):
            return module

        # Data parallelism.
        if not self.is_fsdp:
            return wrap_ddp(
                module, OVER_DDP.get(name, name), getattr(case, "bucket_size_mb", BUCKET_MB)
            )

        # FSDP: PyTorch's, the user's own, ours.
        dtypes = (self.autocast, case.reduce_dtype)
        compute_dtype, reduce_dtype = (
            None if dtype is None else getattr(torch, dtype) for dtype in dtypes
        )
        if name == "torch_fsdp":
            return _fully_shard(module, compute_dtype, reduce_dtype, self.device)
        if ":" in name:
            model = load_name(name)(module, compute_dtype)
            if not hasattr(model, "gather_full_params"):
                raise Unsupported(
                    f"{name} has no gather_full_params(), by which its weights are checked"
                )
            return model
        granularity: Any = "layer" if name == "fsdp_layer" else "block"
        return FSDP(
            module,
            compute_dtype,
            reduce_dtype=reduce_dtype,
            granularity=granularity,
            device=self.device,
        )

    def _optimizer(self, optimizer: type) -> Any:
        """Return an `optimizer` for the wrapped model, sharded as the implementation says."""
        parameters, learning_rate = self.model.parameters(), self.learning_rate
        if self.implementation == "sharded":
            return ShardedOptimizer(parameters, optimizer, lr=learning_rate)
        if self.implementation == "zero1":
            return Zero1Optimizer(parameters, optimizer, bucket_size_mb=BUCKET_MB, lr=learning_rate)
        if self.implementation == "torch_zero":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            return ZeroRedundancyOptimizer(parameters, optimizer_class=optimizer, lr=learning_rate)
        return optimizer(parameters, lr=learning_rate)

    def forward(self) -> Tensor:
        """Return the loss with its graph, unlike the base class, which returns logits."""
        return self.loss()

    def forward_backward(self) -> Tensor:
        """Run forward and backward, average the gradients, and return this rank's loss."""
        loss = super().forward_backward()
        # PyTorch's wrappers lack this method: they have averaged by the end of their backward.
        for one in (self.model, self.optimizer):
            if hasattr(one, "finish_gradient_synchronization"):
                one.finish_gradient_synchronization()
        return loss

    def train_step(self) -> Tensor:
        """Run a whole training step, and return this rank's loss before the optimizer's step."""
        self.optimizer.zero_grad(set_to_none=True)
        return super().train_step()

    def full_parameters(self) -> list[Tensor]:
        """Return the whole parameters in the order of the unwrapped model; a collective call."""
        if hasattr(self.model, "gather_full_params"):
            return list(self.model.gather_full_params().values())
        if self.implementation == "torch_fsdp":
            return [parameter.full_tensor() for parameter in self.model.parameters()]
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def full_gradients(self) -> list[Tensor]:
        """Return the whole gradients in the order of `full_parameters`; a collective call.

        The gradients replace the weights, so that they can be gathered as these.
        """
        for parameter in self.model.parameters():
            parameter.detach().copy_(parameter.grad)
        return self.full_parameters()

    def mib(self) -> dict[str, float]:
        """Return the MiB that this rank keeps of each kind in MEMORY; views count once."""
        states = (
            self.optimizer.optim.state
            if self.implementation == "torch_zero"
            else self.optimizer.state
        )
        parameters = list(self.model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        tensors = [
            value
            for state in states.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
        if isinstance(self.optimizer, Zero1Optimizer):
            gradients += [bucket.gradient for bucket in self.optimizer.buckets]
        return {
            name: _storage_mib(kind) for name, kind in zip(MEMORY, (parameters, gradients, tensors))
        }

    def _precision(self) -> AbstractContextManager[object]:
        """Return no context for FSDP, which computes in its weights' dtype, else autocast's."""
        return nullcontext() if self.is_fsdp else super()._precision()


def wrap_ddp(module: nn.Module, implementation: str, bucket_size_mb: float | None) -> nn.Module:
    """Return `module` under the data parallelism `implementation`, on the default process group.

    Ours, or a user's own, `package.module:Name`, is called with the module, and with
    `bucket_size_mb` if it has such a parameter. It must have `finish_gradient_synchronization`
    unless its backward leaves averaged gradients. Other names are PyTorch's.
    """
    if implementation in DDPS or ":" in implementation:
        own: Any = DDPS.get(implementation) or load_name(implementation)
        bucketed = "bucket_size_mb" in inspect.signature(own).parameters
        return own(module, bucket_size_mb=bucket_size_mb) if bucketed else own(module)
    torch_ddp = nn.parallel.DistributedDataParallel
    # As in ours, a forward does not broadcast buffers. torch 2.13 renamed the option.
    renamed = "forward_sync_buffers" in inspect.signature(torch_ddp).parameters
    buffers: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    view = implementation == "torch_ddp_view"
    return torch_ddp(
        module, bucket_cap_mb=bucket_size_mb or BUCKET_MB, gradient_as_bucket_view=view, **buffers
    )


def _fully_shard(
    module: nn.Module,
    compute_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    device: str,
) -> nn.Module:
    """Return `module` under PyTorch's FSDP2 by blocks and root, on `device`.

    `module` is on the meta device; `reset_parameters` of each inner module draws its weights.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import init_device_mesh

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    for block in (*find_blocks(module).values(), module):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    module.to_empty(device=device)
    for inner in module.modules():
        if hasattr(inner, "reset_parameters"):
            inner.reset_parameters()  # type: ignore[operator]
    return module


def _storage_mib(tensors: list[Any]) -> float:
    """Return the MiB of the distinct storages of `tensors`, of DTensors their local part."""
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in local
    }
    return sum(storages.values()) / MIB


# Checks


def check_wrapper(implementation: str, case: RanksCase, run: RunConfig, rank: int) -> float:
    """Return the error of `implementation` over its bound; raise Disagreement if it is above 1.

    For a ShardingCase it is `check_training`, except for data parallelism by name (OURS, PEERS);
    otherwise it is `check_gradients`. The model of a ShardingCase is made shallow first, since its
    step and an unsharded one have to fit beside each other.
    """
    if isinstance(case, ShardingCase):
        case = replace(
            case, model=replace(case.model, num_layers=min(CHECK_LAYERS, case.model.num_layers))
        )
        if implementation not in (*OURS, *PEERS):
            return check_training(implementation, case, run, rank)
    expected = plain_mean(case, run, rank)
    return check_gradients(ParallelStep(implementation, case, run, rank), expected)


def plain_mean(case: RanksCase, run: RunConfig, rank: int) -> list[Tensor | None]:
    """Return the mean over ranks of the gradients that each computes alone, by plain all-reduces.

    A parameter without a gradient has None. Raises Disagreement if the loss is not finite.
    """
    alone = ParallelStep(ALONE, case, run, rank)
    require_finite("loss", alone.forward_backward())
    expected = [parameter.grad for parameter in alone.parameters]
    for gradient in expected:
        if gradient is not None:
            dist.all_reduce(gradient)
            gradient.div_(dist.get_world_size())
    return expected


def check_gradients(step: ParallelStep, expected: list[Tensor | None]) -> float:
    """Return the largest error of a gradient over its bound; raise Disagreement if it is above 1.

    The gradients of `step` are compared with `expected` after each of two backwards, since the
    first one of some wrappers differs from the others.
    """
    errors = [0.0]
    for _ in range(2):
        step.optimizer.zero_grad(set_to_none=True)
        step.forward_backward()
        for parameter, gradient in zip(step.parameters, expected):
            if gradient is not None:
                bound = (
                    GRADIENT_TOLERANCE[step.autocast] * gradient.abs().max().item() + SMALLEST_BOUND
                )
                found = parameter.grad
                errors.append(
                    math.inf if found is None else (found - gradient).abs().max().item() / bound
                )
    step.optimizer.zero_grad(set_to_none=True)
    worst = torch.tensor(errors, dtype=torch.float64).max().item()  # NaN if any error is NaN
    if not worst <= 1:
        raise Disagreement(
            f"averaged gradients are off by {worst:.3g} times the bound of the plain mean's"
        )
    return worst


def check_training(implementation: str, case: ShardingCase, run: RunConfig, rank: int) -> float:
    """Return the error of the weights after training over its bound; Disagreement above 1.

    The reference is DDP in float32 from the same weights on the same data, for CHECK_STEPS steps.
    The optimizer is AdamW if it is the optimizer that is sharded. For FSDP it is SGD, since in low
    precision Adam's first steps follow the sign of gradients that are all rounding.
    """
    optimizer = AdamW if implementation in OPTIMIZER_IMPLEMENTATIONS else torch.optim.SGD
    step = ParallelStep(implementation, case, run, rank, optimizer)
    plain = replace(case, precision=Precision(), checkpointing="none")
    reference = ParallelStep("unsharded", plain, run, rank, optimizer)
    return compare_training(step, reference, CHECK_BOUND[case.precision.autocast])


def compare_training(step: ParallelStep, reference: ParallelStep, bound: float) -> float:
    """Return how much training of `step` differs from `reference`, over `bound`.

    `reference` takes the weights of `step`, and both train CHECK_STEPS steps. The difference is the
    2-norm of that between both models' changes, over that of the reference's change. Raises
    Disagreement if the result is above 1.
    """
    start = _take_weights(step, reference)
    for _ in range(CHECK_STEPS):
        step.train_step()
        reference.train_step()
    ours, theirs = (
        [now - before for now, before in zip(one.full_parameters(), start)]
        for one in (step, reference)
    )
    return _error(ours, theirs, bound, f"changes of weights in {CHECK_STEPS} steps")


def compare_gradients(step: ParallelStep, reference: ParallelStep, bound: float) -> float:
    """Return how much the averaged gradients of `step` differ from `reference`'s, over `bound`.

    `reference` takes the weights of `step`. The difference is a 2-norm relative to the reference's
    gradients. Raises Disagreement if the result is above 1.
    """
    _take_weights(step, reference)
    for one in (step, reference):
        one.forward_backward()
    return _error(step.full_gradients(), reference.full_gradients(), bound, "averaged gradients")


def _take_weights(step: ParallelStep, reference: ParallelStep) -> list[Tensor]:
    """Copy the weights of `step` into `reference`, and return further copies of them."""
    # Clone: on one rank the whole weights may be the very tensors that it trains.
    start = [value.clone() for value in step.full_parameters()]
    for parameter, value in zip(reference.model.parameters(), start):
        parameter.data.copy_(value)
    return start


def _error(ours: list[Tensor], theirs: list[Tensor], bound: float, what: str) -> float:
    """Return the 2-norm of `ours` - `theirs` over that of `theirs`, over `bound`.

    Raises Disagreement, naming `what` differs, if the result is above 1.
    """
    difference = sum(
        (one - other).double().square().sum().item() for one, other in zip(ours, theirs)
    )
    size = sum(other.double().square().sum().item() for other in theirs)
    error = math.sqrt(difference / size) / bound if size else math.inf
    if not error <= 1:
        raise Disagreement(f"{what} are off by {error:.3g} times the bound of unsharded ones")
    return error
