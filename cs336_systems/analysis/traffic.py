"""Collectives of a step for each scheme of parallel training: kinds, sizes and order.

    plan = Plan(scheme="fsdp", data_parallel=64)
    calls = collectives(MODEL_SIZES["xl"], plan)
    sum(collective.bytes_sent(64) for collective in calls)    # by each rank, in a step

Every rank holds one replica's batch. Parameters, gradients and optimizer state are float32; FSDP
gathers a block's weights at once, and reduces gradients, in bfloat16. Tensor parallelism
(Megatron's: attention by heads, feed-forward by its hidden dimension) all-reduces the (tokens,
d_model) activations twice a block and direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cs336_systems.analysis.bandwidth import bus_factor
from cs336_systems.config import ModelConfig, require_choice, require_positive

SCHEMES: tuple[str, ...] = (
    "none",
    "naive",
    "flat",
    "overlap",
    "bucketed",
    "sharded-optimizer",
    "zero1",
    "fsdp",
)
Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast"]
MASTER_BYTES = 4
COMPUTE_BYTES = 2  # an element of activations, and of weights and gradients that FSDP communicates
BUCKET_BYTES = 25 * 2**20  # of the schemes that collect gradients in buckets
PREFETCH = 2  # FSDP: blocks gathered ahead of the one in use
# FSDP: last units of the forward, which stay whole for the backward, since it begins with them
KEPT_UNITS = 2


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Scheme of training, and how many GPUs it has: `data_parallel` · `tensor_parallel`."""

    # one of SCHEMES: how the data-parallel ranks share weights, gradients and optimizer state
    scheme: str
    data_parallel: int = 1  # replicas, or ranks that shard one
    tensor_parallel: int = 1  # GPUs that split each replica's matrices; on one node

    def __post_init__(self) -> None:
        require_choice(self, "scheme", SCHEMES)
        require_positive(self, ["data_parallel", "tensor_parallel"])
        if self.scheme == "none" and self.data_parallel > 1:
            raise ValueError(
                f"Plan.data_parallel must be 1 for scheme none, got {self.data_parallel}"
            )

    @property
    def devices(self) -> int:
        """Return the number of GPUs."""
        return self.data_parallel * self.tensor_parallel


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter tensor of the model."""

    name: str
    elements: int
    is_matrix: bool  # two dimensions: FSDP shards it, tensor parallelism splits it


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One call of every data-parallel rank."""

    kind: Kind
    # of the whole buffer: what all-reduce reduces, all-gather ends with, reduce-scatter begins with
    size_bytes: float

    def bytes_sent(self, num_ranks: int) -> float:
        """Return the bytes that each of `num_ranks` ranks sends in a ring.

        For a broadcast it is the mean over the ranks, the last of which sends nothing.
        """
        mean = (num_ranks - 1) / num_ranks if self.kind == "broadcast" else 1.0
        return mean * bus_factor(self.kind, num_ranks) * self.size_bytes


def parameters(model: ModelConfig, tensor_parallel: int = 1) -> list[Parameter]:
    """Return the parameters of one tensor-parallel rank, in the order of the forward."""

    def matrix(name: str, rows: int, columns: int) -> Parameter:
        return Parameter(name=name, elements=-(-rows * columns // tensor_parallel), is_matrix=True)

    def norm(name: str) -> Parameter:
        return Parameter(name=name, elements=model.d_model, is_matrix=False)

    found = [matrix("token_embeddings", model.vocab_size, model.d_model)]
    for layer in range(model.num_layers):
        block = f"layers.{layer}."
        found.append(norm(f"{block}ln1"))
        found += [
            matrix(f"{block}attn.{name}", model.d_model, model.d_model)
            for name in ("q", "k", "v", "output")
        ]
        found.append(norm(f"{block}ln2"))
        found += [
            matrix(f"{block}ffn.{name}", model.d_model, model.d_ff) for name in ("w1", "w3", "w2")
        ]
    return [*found, norm("ln_final"), matrix("lm_head", model.vocab_size, model.d_model)]


def num_elements(group: list[Parameter]) -> int:
    """Return the number of elements of all parameters in `group`."""
    return sum(one.elements for one in group)


def gradient_groups(held: list[Parameter], plan: Plan) -> list[list[Parameter]]:
    """Return the parameters in groups whose gradients share a collective, in the backward's order.

    Buckets hold at most BUCKET_BYTES; a larger tensor stands alone.
    """
    if plan.scheme == "flat":
        return [held[::-1]]
    if plan.scheme not in ("bucketed", "zero1"):
        return [[one] for one in reversed(held)]
    buckets: list[list[Parameter]] = []
    for one in reversed(held):
        if buckets and MASTER_BYTES * num_elements([*buckets[-1], one]) <= BUCKET_BYTES:
            buckets[-1].append(one)
        else:
            buckets.append([one])
    return buckets


def fsdp_units(held: list[Parameter]) -> list[list[Parameter]]:
    """Return the matrices in the units that FSDP gathers at once, in the forward's order.

    A block is a unit; so are the embedding and the head.
    """
    units: dict[str, list[Parameter]] = {}
    for one in held:
        if one.is_matrix:
            block = ".".join(one.name.split(".")[:2])  # layers.7 of layers.7.ffn.w1
            units.setdefault(block, []).append(one)
    return list(units.values())


def collectives(model: ModelConfig, plan: Plan) -> list[Collective]:
    """Return all data-parallel collectives of a step in their order; none for one rank."""
    if plan.data_parallel == 1:
        return []
    held = parameters(model, plan.tensor_parallel)

    def over(kind: Kind, group: list[Parameter], element_bytes: int = MASTER_BYTES) -> Collective:
        return Collective(kind=kind, size_bytes=element_bytes * num_elements(group))

    if plan.scheme == "fsdp":
        units = fsdp_units(held)
        calls = [over("all_gather", unit, COMPUTE_BYTES) for unit in units]
        for number, unit in reversed(list(enumerate(units))):
            if number < len(units) - KEPT_UNITS:
                calls.append(over("all_gather", unit, COMPUTE_BYTES))
            calls.append(over("reduce_scatter", unit, COMPUTE_BYTES))
        return [*calls, over("all_reduce", [one for one in held if not one.is_matrix])]

    groups = gradient_groups(held, plan)
    if plan.scheme == "zero1":
        return [over(kind, group) for kind in ("reduce_scatter", "all_gather") for group in groups]
    calls = [over("all_reduce", group) for group in groups]
    # The owner of each parameter sends it to the others after the optimizer's step.
    if plan.scheme == "sharded-optimizer":
        calls += [over("broadcast", [one]) for one in held]
    return calls


def bytes_sent(model: ModelConfig, plan: Plan) -> float:
    """Return the bytes that each rank sends in a step along the data-parallel axis."""
    return sum(collective.bytes_sent(plan.data_parallel) for collective in collectives(model, plan))
