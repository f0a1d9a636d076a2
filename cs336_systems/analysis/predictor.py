"""Step time on paper, for any number of GPUs: computation, and communication that it does not hide.

    plan = Plan(scheme="fsdp", data_parallel=2048, tensor_parallel=8)
    predict(MODEL_SIZES["8b"], plan, HARDWARE["H200"], batch=1).utilization

A step is forward, backward, optimizer. Two clocks run, one of computation and one of communication;
a collective starts when its data is there and the one before it is done, and computation waits for
the weights that it needs. Matmuls run at `matmul_efficiency` of the peak, an assumption that stands
in every table made from this; collectives at the ring's bandwidth plus a latency each. Not
modelled: contention for SMs and memory between the two, launch overhead, stragglers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cs336_systems.accounting import model_flops
from cs336_systems.analysis import traffic
from cs336_systems.analysis.bandwidth import bus_factor
from cs336_systems.analysis.hardware import Hardware
from cs336_systems.analysis.rings import all_reduce_seconds
from cs336_systems.analysis.traffic import MASTER_BYTES, Collective, Parameter, Plan, collectives
from cs336_systems.config import ModelConfig

ADAMW_ACCESSES = 7  # reads of parameter, gradient and two moments; writes of parameter and moments
FLATTEN_ACCESSES = 4  # gradients read and written into one buffer, and back
ALL_REDUCES_A_BLOCK = 2  # of tensor parallelism, in each direction
DEFAULT_EFFICIENCY = 0.5


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted times of one step in seconds, the same on every GPU."""

    forward_s: float  # computation alone
    backward_s: float
    optimizer_s: float
    communication_s: float  # all collectives, one after the other
    # the part during which no computation ran, and copies made only to communicate
    exposed_s: float
    flops: float  # of the model, all GPUs
    peak_flops_per_s: float  # of all GPUs

    @property
    def step_s(self) -> float:
        """Return the seconds of the whole step: computation, and exposed communication."""
        return self.forward_s + self.backward_s + self.optimizer_s + self.exposed_s

    @property
    def utilization(self) -> float:
        """Return the model FLOPs utilization: useful FLOP/s over the peak of all GPUs."""
        return self.flops / self.step_s / self.peak_flops_per_s


def predict(
    model: ModelConfig,
    plan: Plan,
    hardware: Hardware,
    *,
    batch: int,
    matmul_efficiency: float = DEFAULT_EFFICIENCY,
) -> Prediction:
    """Return the predicted times of one training step with `batch` sequences a replica.

    A replica is a group of `plan.tensor_parallel` GPUs. Tensor-parallel groups lie inside a node,
    so each data-parallel group has gpus_per_node / tensor_parallel ranks there. Raises ValueError
    for a group that does not fit a node or an efficiency outside (0, 1].
    """
    if not 0 < matmul_efficiency <= 1:
        raise ValueError(f"matmul_efficiency must be in (0, 1], got {matmul_efficiency}")
    if hardware.gpus_per_node % plan.tensor_parallel:
        raise ValueError(
            f"tensor_parallel must divide {hardware.gpus_per_node} GPUs a node, "
            f"got {plan.tensor_parallel}"
        )

    # Computation, at an assumed efficiency
    rate = hardware.flops_per_s * matmul_efficiency * plan.tensor_parallel
    forward_s, backward_s = (
        model_flops(model, batch, mode) / rate for mode in ("forward", "backward")
    )
    # Communication that computation does not hide
    held = traffic.parameters(model, plan.tensor_parallel)
    links = _Links(hardware, plan)
    if plan.data_parallel == 1:
        exposed_s = 0.0
    elif plan.scheme == "fsdp":
        exposed_s = _fsdp_exposed_s(held, links, forward_s, backward_s)
    else:
        exposed_s = _replicated_exposed_s(model, held, plan, links, backward_s)
    # The next matmul needs TP's sum: no computation hides it.
    exposed_s += links.tensor_parallel_s(model, batch)

    # The optimizer, bound by memory
    sharded = plan.scheme in ("sharded-optimizer", "zero1", "fsdp")
    updated = traffic.num_elements(held) / (plan.data_parallel if sharded else 1)
    return Prediction(
        forward_s=forward_s,
        backward_s=backward_s,
        optimizer_s=ADAMW_ACCESSES * MASTER_BYTES * updated / hardware.memory_bytes_per_s,
        communication_s=sum(map(links.seconds, collectives(model, plan)))
        + links.tensor_parallel_s(model, batch),
        exposed_s=exposed_s,
        flops=plan.data_parallel * model_flops(model, batch, "train_step"),
        peak_flops_per_s=plan.devices * hardware.flops_per_s,
    )


class _Links:
    """Seconds that collectives take on the two axes of a plan."""

    def __init__(self, hardware: Hardware, plan: Plan) -> None:
        self.hardware, self.plan = hardware, plan
        self.local_ranks = hardware.gpus_per_node // plan.tensor_parallel

    def seconds(self, collective: Collective) -> float:
        """Return the seconds of one collective of the data-parallel group."""
        ranks = self.plan.data_parallel
        rate = self.hardware.ring_bytes_per_s(ranks, ranks_per_node=self.local_ranks)
        latency = self.hardware.latency_s(ranks, ranks_per_node=self.local_ranks)
        passes = 2 if collective.kind == "all_reduce" else 1  # a reduce-scatter, then an all-gather
        return bus_factor(collective.kind, ranks) * collective.size_bytes / rate + passes * latency

    def tensor_parallel_s(self, model: ModelConfig, batch: int) -> float:
        """Return the seconds of a step's all-reduces of activations among tensor-parallel ranks."""
        ranks = self.plan.tensor_parallel
        if ranks == 1:
            return 0.0
        size = batch * model.context_length * model.d_model * traffic.COMPUTE_BYTES
        latency = self.hardware.latency_s(ranks, ranks_per_node=ranks)
        once = all_reduce_seconds(size, ranks, self.hardware.node_bytes_per_s) + 2 * latency
        return 2 * ALL_REDUCES_A_BLOCK * model.num_layers * once


def _replicated_exposed_s(
    model: ModelConfig, held: list[Parameter], plan: Plan, links: _Links, backward_s: float
) -> float:
    """Return the exposed seconds of the schemes that replicate weights: DDP and sharded optimizers.

    Gradients are communicated during or after backward, weights after it.
    """
    groups = traffic.gradient_groups(held, plan)
    calls = collectives(model, plan)
    gradients, weights = (
        list(map(links.seconds, some)) for some in (calls[: len(groups)], calls[len(groups) :])
    )
    exposed_s = sum(gradients)
    if plan.scheme == "flat":
        exposed_s += FLATTEN_ACCESSES * calls[0].size_bytes / links.hardware.memory_bytes_per_s
    elif plan.scheme != "naive":
        # The embedding is a look-up; the other matrices take time by their size.
        work = [
            sum(one.elements for one in group if one.is_matrix and one is not held[0])
            for group in groups
        ]
        computes = [backward_s * part / sum(work) for part in work]
        exposed_s = pipeline_s([0.0] * len(groups), computes, gradients, prefetch=1) - backward_s
    return exposed_s + sum(weights)


def _fsdp_exposed_s(
    held: list[Parameter], links: _Links, forward_s: float, backward_s: float
) -> float:
    """Return the seconds that FSDP's computation waits for weights, and at the end for gradients.

    The gather of a unit starts when the one PREFETCH before it has been used. Norms' gradients,
    small and needed only by the optimizer, are left out.
    """
    units = traffic.fsdp_units(held)
    elements = list(map(traffic.num_elements, units))
    share = [0, *elements[1:]]  # the embedding is a look-up

    def transfer(size: int) -> float:
        return links.seconds(Collective(kind="all_gather", size_bytes=traffic.COMPUTE_BYTES * size))

    transfers = [transfer(size) for size in elements]
    forward = [forward_s * part / sum(share) for part in share]
    backward = [backward_s * part / sum(share) for part in share]
    end = pipeline_s(transfers, forward, [0.0] * len(units), traffic.PREFETCH)
    gathers = [0.0] * traffic.KEPT_UNITS + transfers[::-1][traffic.KEPT_UNITS :]
    end += pipeline_s(gathers, backward[::-1], transfers[::-1], traffic.PREFETCH)
    return end - forward_s - backward_s


def pipeline_s(
    gathers: Sequence[float], computes: Sequence[float], scatters: Sequence[float], prefetch: int
) -> float:
    """Return the end of a pass over layers, on a clock of computation and one of communication.

    Each layer's weights are gathered, used, and its gradients scattered: `gathers`, `computes` and
    `scatters` are their seconds by layer. Gather i waits for layer i - prefetch to be computed,
    layer i for gather i, scatter i for layer i; the communication clock serves the gather that is
    next before the scatter that is ready at the same moment.
    """
    link = compute = 0.0
    gathered = []

    def gather(layer: int, earliest: float) -> None:
        nonlocal link
        if layer < len(gathers):
            link = max(link, earliest) + gathers[layer] if gathers[layer] else link
            gathered.append(link if gathers[layer] else 0.0)

    for layer in range(min(prefetch, len(gathers))):
        gather(layer, 0.0)
    for layer, seconds in enumerate(computes):
        compute = max(compute, gathered[layer]) + seconds
        gather(layer + prefetch, compute)
        if scatters[layer]:
            link = max(link, compute) + scatters[layer]
    return max(compute, link)
