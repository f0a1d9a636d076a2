"""Checks of section 7: `get_fsdp(module, compute_dtype)`, which shards weights over the ranks.

The sharded weights are those of Linear and Embedding layers. The checks run two ranks on gloo and
the CPU. The optimizer is built from `fsdp_model.parameters()` after wrapping. The layers of
`cs336_basics` are used if it can be imported. A wrapper may replace layers and rename its
parameters. So totals are compared, and the models themselves report what passes through them.
"""

import math
import time
from copy import deepcopy
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.grading.counting import AWAITED, REDUCED, SENT, LiveBytes, Message, storages_of
from cs336_systems.grading.reference_training import (
    OBSERVERS,
    Deep,
    Language,
    assert_like_one_process,
    equal_on_all_ranks,
    layer_classes,
    next_token_loss,
    part,
    seeded,
    sharded_weights,
    token_batch,
)
from cs336_systems.grading.registry import Adapters, check

PROBLEM = "fsdp"
SHARDED = "shards_the_weights"  # the check that must pass before the others earn points
SETTLING_S = 5.0  # for gloo's threads to release what they have sent
FP32_BOUND, FP16_BOUND = 1e-6, 1e-4  # largest error of a parameter after three SGD steps at 0.01


def step_of(
    adapters: Adapters, fsdp: Any, optimizer: torch.optim.Optimizer, batch: Any, loss: Any
) -> None:
    """Run one training step of the wrapped model `fsdp`, with the adapter after the backward."""
    optimizer.zero_grad(set_to_none=True)
    loss(fsdp, batch).backward()
    adapters.call("fsdp_on_after_backward", fsdp, optimizer)
    optimizer.step()


def full_parameters(adapters: Adapters, fsdp: Any) -> dict[str, Tensor]:
    """Return copies of all whole parameters by name, as `fsdp_gather_full_params` gives them."""
    full = adapters.call("fsdp_gather_full_params", fsdp)
    return {name: tensor.detach().clone() for name, tensor in full.items()}


def in_float16(model: nn.Module) -> nn.Module:
    """Make `model` compute with float16 copies of the weights that FSDP shards, and return it.

    It is the one-process reference for float16 compute.
    """
    linear = layer_classes()[0]

    def computing(module: Any) -> Any:
        operation = nn.functional.linear if isinstance(module, linear) else nn.functional.embedding
        return lambda x: operation(x, module.weight.half())

    for _, module in sharded_weights(model):
        module.forward = computing(module)
    return model


def trains_like_one_process(
    adapters: Adapters,
    rank: int,
    num_ranks: int,
    compute_dtype: torch.dtype | None = None,
    evaluates: bool = False,
) -> None:
    """Assert that three wrapped steps give the parameters of one process, step by step.

    With `evaluates` forwards without a backward come before each step. With `compute_dtype` the
    Linear layers must compute in that dtype.
    """
    bound = FP32_BOUND if compute_dtype is None else FP16_BOUND
    torch.use_deterministic_algorithms(True)
    single = seeded(Language)
    start = deepcopy(dict(single.named_parameters()))
    fsdp = adapters.call("get_fsdp", seeded(Language), compute_dtype=compute_dtype)
    if compute_dtype is not None:
        in_float16(single)

    dtypes: set[torch.dtype] = set()  # of what a Linear layer returns
    reference, optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.01) for model in (single, fsdp)
    )
    for step in range(3):
        batch = token_batch(step)
        if evaluates:
            with torch.no_grad():
                fsdp(batch[0])
            fsdp(batch[0])
        reference.zero_grad(set_to_none=True)
        next_token_loss(single, batch).backward()
        reference.step()
        OBSERVERS.append(lambda _name, output: dtypes.add(output.dtype))
        step_of(adapters, fsdp, optimizer, part(batch, rank, num_ranks), next_token_loss)
        OBSERVERS.clear()
        found, expected = full_parameters(adapters, fsdp), dict(single.named_parameters())
        assert_like_one_process(found, expected, start, step, num_ranks, bound)
    wanted = compute_dtype or torch.float32
    assert dtypes == {wanted}, f"a Linear layer computes in {dtypes.pop()}, not {wanted}"


def assert_sharded(adapters: Adapters, num_ranks: int, largest_share: float) -> None:
    """Assert that a rank holds at most `largest_share` of the sharded weights, and whole norms.

    It is checked after wrapping and after a step.
    """
    model = seeded(Language)
    weights = sum(module.weight.numel() for _, module in sharded_weights(model))
    others = sum(parameter.numel() for parameter in model.parameters()) - weights
    fsdp = adapters.call("get_fsdp", seeded(Language), compute_dtype=None)
    optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.01)
    for when in ("after wrapping", "after a step"):
        held = sum(parameter.numel() for parameter in fsdp.parameters()) - others
        text = (
            f"a rank holds {held / weights:.0%} of the weights of Linear and Embedding "
            f"layers {when}"
        )
        assert held <= largest_share * weights, f"{text}, not {1 / num_ranks:.0%}"
        assert held >= weights / num_ranks, f"{text}, or not all of the norms"
        step_of(adapters, fsdp, optimizer, token_batch(dist.get_rank()), next_token_loss)


@check(PROBLEM, num_ranks=2)
def shards_the_weights(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """Between steps a rank holds three quarters of all weights at most."""
    assert_sharded(adapters, num_ranks, 0.75)


@check(PROBLEM, num_ranks=2, needs=SHARDED)
def shards_every_weight(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """Between steps a rank holds its half of all Linear and Embedding weights; norms are whole."""
    assert_sharded(adapters, num_ranks, 0.55)


@check(PROBLEM, num_ranks=2, needs=SHARDED)
def equals_one_process(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """Training in float32 on halves of a batch ends where one process ends with the whole batch."""
    trains_like_one_process(adapters, rank, num_ranks)


@check(PROBLEM, num_ranks=2, needs=SHARDED)
def equals_one_process_in_float16(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """With `compute_dtype=torch.float16`: as one process that computes with float16 copies of
    float32 weights.
    """
    trains_like_one_process(adapters, rank, num_ranks, torch.float16)


@check(PROBLEM, num_ranks=2, needs=SHARDED)
def gathers_whole_parameters(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """`fsdp_gather_full_params` returns every parameter whole, in float32, by its original name."""
    expected = dict(seeded(Language).named_parameters())
    fsdp = adapters.call("get_fsdp", seeded(Language), compute_dtype=None)
    full = full_parameters(adapters, fsdp)
    missing = [name for name in expected if name not in full]
    assert not missing, f"{', '.join(missing)} is missing: the names are {', '.join(sorted(full))}"
    for name, parameter in expected.items():
        assert full[name].dtype == torch.float32, f"{name} is gathered in {full[name].dtype}"
        assert torch.equal(full[name], parameter), f"{name} is not the wrapped model's"


@check(PROBLEM, num_ranks=2, needs=SHARDED)
def gives_gradients_of_the_shards(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """Each gradient has its parameter's shape and is float32 under float16 compute too; norms' are
    equal.
    """
    for compute_dtype in (None, torch.float16):
        fsdp = adapters.call("get_fsdp", seeded(Language), compute_dtype=compute_dtype)
        optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.01)
        next_token_loss(fsdp, token_batch(rank)).backward()
        adapters.call("fsdp_on_after_backward", fsdp, optimizer)
        for name, parameter in fsdp.named_parameters():
            gradient, shape = parameter.grad, tuple(parameter.shape)
            assert gradient is not None, f"{name} has no gradient"
            assert gradient.shape == shape, (
                f"the gradient of {name} has shape {tuple(gradient.shape)}, the parameter {shape}"
            )
            kinds = gradient.dtype, parameter.dtype
            assert kinds == (torch.float32, torch.float32), (
                f"{name} and its gradient are {kinds}, not float32"
            )
            if "norm" in name:
                assert equal_on_all_ranks(gradient), (
                    f"the gradient of {name} differs between the ranks"
                )


# What a step sends and holds


LAYER_BYTES = 4 * Deep.WIDTH**2
HALF = Deep.LAYERS // 2
LARGE = LAYER_BYTES // 8  # bytes: a message of this size carries a shard of a weight or gradient


@dataclass
class Watched:
    """What a step of 16 equal layers sent and held; memory is in layers, beyond the shards."""

    forward: list[Message] = field(default_factory=list)
    backward: list[Message] = field(default_factory=list)
    sent_before: list[int] = field(default_factory=list)  # bytes, before each layer's forward
    # sent in the backward before the gradient of the last layer's input was computed
    until_the_end: list[Message] = field(default_factory=list)
    in_flight: int = 0  # largest number of messages on their way while a layer computes
    forward_peak: float = 0.0
    between: float = 0.0  # after the forward
    behind_the_backward: float = 0.0  # without gradients and storages that were reduced
    after: float = 0.0  # after the synchronization, without the gradients' shards

    @property
    def layers_before(self) -> list[float]:
        """Return how many layers' weights are gathered, or on their way, before each layer runs."""
        sizes = [message.nbytes for message in self.forward]
        messages_of_a_layer = max(1, round(len(sizes) / Deep.LAYERS))
        # The forward may already gather a weight for the backward, or all weights in one message.
        unit = min(sum(sizes) / Deep.LAYERS, median(sizes) * messages_of_a_layer)
        return [sent / unit for sent in self.sent_before]


def large(messages: list[Message]) -> list[Message]:
    """Return the messages that may carry a shard of a weight or a gradient."""
    return [message for message in messages if message.nbytes >= LARGE]


def watch_a_step(adapters: Adapters, compute_dtype: torch.dtype | None = None) -> Watched:
    """Return what the second step of a wrapped `Deep` sends and holds.

    A wrapper may learn the order of the layers in the first step.
    """
    fsdp = adapters.call("get_fsdp", seeded(Deep), compute_dtype=compute_dtype)
    optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.01)
    # Activations take half a KiB, a layer 64 KiB.
    x = torch.randn(1, Deep.WIDTH, dtype=compute_dtype, requires_grad=True)
    step_of(adapters, fsdp, optimizer, x, lambda model, x: model(x).float().sum())
    optimizer.zero_grad(set_to_none=True)
    seen, num_forward = Watched(), 0

    def observe(name: str, tensor: Tensor) -> None:
        if name.startswith("before"):
            seen.sent_before.append(sum(message.nbytes for message in large(SENT)))
        else:
            seen.in_flight = max(seen.in_flight, len(SENT) - len(AWAITED))
        if tensor.requires_grad:
            tensor.register_hook(observe_backward)

    def observe_backward(_gradient: Tensor) -> None:
        seen.in_flight = max(seen.in_flight, len(SENT) - len(AWAITED))
        seen.until_the_end = large(SENT[num_forward:])

    for notes in (SENT, AWAITED, REDUCED):
        notes.clear()
    with LiveBytes(fsdp.parameters()) as live:
        shards = HALF * LAYER_BYTES  # shards that are views would keep whole weights alive

        def layers_held(*, without: Any = ()) -> float:
            return (live.now(without=without) - shards) / LAYER_BYTES

        OBSERVERS.append(observe)
        output = fsdp(x).float().sum()
        OBSERVERS.clear()

        # After the forward: what it sent, its peak, and what it leaves.
        seen.forward, num_forward = large(SENT), len(SENT)
        seen.forward_peak = (live.peak - shards) / LAYER_BYTES
        seen.between = layers_held()

        # After the backward: the same, without gradients and what is being reduced.
        output.backward()
        seen.backward = large(SENT[num_forward:])
        gradients = storages_of([parameter.grad for parameter in fsdp.parameters()])
        reduced = [*REDUCED.values(), *gradients.values()]
        seen.behind_the_backward = layers_held(without=reduced)
        adapters.call("fsdp_on_after_backward", fsdp, optimizer)
    del gradients, reduced, output

    # On a busy machine gloo's threads hold what they sent last until they are scheduled again.
    deadline, seen.after = time.monotonic() + SETTLING_S, math.inf
    while seen.after > 2 and time.monotonic() < deadline:
        time.sleep(0.05)
        seen.after = layers_held() - HALF
    return seen


@check(PROBLEM, num_ranks=2, needs=SHARDED)
def frees_gathered_weights(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """Of 16 layers at most half are whole in a forward, four behind it and behind the backward."""
    seen = watch_a_step(adapters)
    held = f"whole layers of memory are held beyond the shards of {Deep.LAYERS} layers"
    cause = "; autograd may have saved gathered weights"
    assert seen.forward_peak <= HALF, f"in the forward {seen.forward_peak:.1f} {held}{cause}"
    assert seen.between <= 4, f"between forward and backward {seen.between:.1f} {held}{cause}"
    assert seen.behind_the_backward <= 4, (
        f"behind the backward {seen.behind_the_backward:.1f} {held}"
    )


@check(PROBLEM, num_ranks=2, needs=SHARDED)
def gathers_at_most_two_layers_ahead(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """A layer's gather starts only when the layer two before it has completed its forward."""
    seen = watch_a_step(adapters)
    assert seen.forward, "no weight is gathered in the forward of the second step"
    for layer, gathered in enumerate(seen.layers_before):
        assert gathered <= layer + 2.1, (
            f"{gathered:.0f} of {Deep.LAYERS} layers are gathered before layer {layer + 1} runs, "
            f"at most {layer + 2} may be"
        )


@check(PROBLEM, num_ranks=2, needs=SHARDED)
def gathers_again_for_the_backward(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """The backward gathers the weights itself, those of half of the layers at least."""
    seen = watch_a_step(adapters)
    assert seen.forward, "no weight is gathered in the forward of the second step"
    whole = sum(message.nbytes for message in seen.forward)
    again = sum(message.nbytes for message in seen.backward if message.carries_weights) / whole
    assert again >= 0.5, (
        f"the backward gathers {again * Deep.LAYERS:.0f} of {Deep.LAYERS} layers: gathered weights "
        "are kept from the forward"
    )


@check(PROBLEM, num_ranks=2, needs=SHARDED)
def keeps_no_whole_gradients(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """Behind the synchronization hardly more is held than the shards and their gradients."""
    seen = watch_a_step(adapters)
    assert seen.after <= 2, (
        f"after the synchronization {seen.after:.1f} whole layers of memory are held beyond "
        f"the shards of {Deep.LAYERS} layers and their gradients; "
        "a gradient may be a view of the whole one"
    )


@check(PROBLEM, num_ranks=2, needs=SHARDED)
def communicates_in_the_compute_dtype(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """With `compute_dtype=torch.float16` weights are cast before they are gathered."""
    seen = watch_a_step(adapters, torch.float16)
    weights = [*seen.forward, *(message for message in seen.backward if message.carries_weights)]
    assert weights, "no weight is gathered in the second step"
    wide = [message for message in weights if torch.float32 in message.dtypes]
    assert not wide, f"{len(wide)} of {len(weights)} gathers of weights send float32"


@check(PROBLEM, num_ranks=2, needs=SHARDED)
def reduces_gradients_in_the_backward(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """A gradient is reduced when it is available: the backward of other layers is still to
    come.
    """
    seen = watch_a_step(adapters)
    reductions = [message for message in seen.until_the_end if not message.carries_weights]
    assert len(reductions) >= HALF, (
        f"{len(reductions)} gradients of {Deep.LAYERS} layers are sent while the backward runs"
    )


@check(PROBLEM, num_ranks=2, needs=SHARDED)
def communicates_while_it_computes(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """Some collective is asynchronous: it is on its way while a layer computes."""
    seen = watch_a_step(adapters)
    assert seen.in_flight > 0, (
        "every collective is waited for before the next layer computes: pass async_op=True"
    )


@check(PROBLEM, num_ranks=2, beyond=True)
def keeps_the_modules(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """`.module` is the model, and its layers are instances of their own classes."""
    linear, embedding, norm = layer_classes()
    fsdp = adapters.call("get_fsdp", seeded(Language), compute_dtype=None)
    assert isinstance(getattr(fsdp, "module", None), nn.Module), (
        "the wrapper has no attribute `module`"
    )
    kinds = {"embedding": embedding, "norm1": norm, "linear1": linear, "lm_head": linear}
    for name, kind in kinds.items():
        layer = getattr(fsdp.module, name)
        assert isinstance(layer, kind), f"{name} is no {kind.__name__} any more"


@check(PROBLEM, num_ranks=2, beyond=True)
def gathers_ahead(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """The next layer's gather is on its way when a layer runs: weights are there before they are
    needed.
    """
    seen = watch_a_step(adapters)
    assert seen.forward, "no weight is gathered in the forward of the second step"
    behind = sum(gathered < layer + 0.9 for layer, gathered in enumerate(seen.layers_before))
    assert behind <= HALF, (
        f"{behind} of {Deep.LAYERS} layers are gathered when they run, not before"
    )


@check(PROBLEM, num_ranks=2, beyond=True)
def evaluates_in_between(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """Forwards without a backward, with and without gradients, change nothing about the
    training.
    """
    trains_like_one_process(adapters, rank, num_ranks, evaluates=True)
