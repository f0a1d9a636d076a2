"""Section 7: `get_fsdp(module, compute_dtype)`, which shards the weights of Linear and Embedding layers.

Two ranks on gloo and CPU. The optimizer is built from `fsdp_model.parameters()` after wrapping. Where `cs336_basics`
can be imported, its layers are used.
"""

import gc
import math
import time
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from cs336_systems.grading.checks import Adapters, check
from cs336_systems.grading.counting import LiveBytes, reachable_bytes
from cs336_systems.grading.models import (
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

PROBLEM = "fsdp"
SETTLING_S = 5.0  # for gloo's threads to let go of what they have sent
FP32_BOUND, FP16_BOUND = 1e-6, 1e-4  # of a parameter after three steps of SGD at 0.01


def step_of(adapters: Adapters, fsdp: Any, optimizer: torch.optim.Optimizer, batch: Any, loss: Any) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss(fsdp, batch).backward()
    adapters.call("fsdp_on_after_backward", fsdp, optimizer)
    optimizer.step()


def full_parameters(adapters: Adapters, fsdp: Any) -> dict[str, Tensor]:
    full = adapters.call("fsdp_gather_full_params", fsdp)
    return {name: tensor.detach().clone() for name, tensor in full.items()}


def in_float16(model: nn.Module) -> nn.Module:
    """`model` computing with float16 copies of the weights that FSDP shards, in one process."""
    linear = layer_classes()[0]

    def computing(module: Any) -> Any:
        operation = nn.functional.linear if isinstance(module, linear) else nn.functional.embedding
        return lambda x: operation(x, module.weight.half())

    for _, module in sharded_weights(model):
        module.forward = computing(module)
    return model


def trains_like_one_process(
    adapters: Adapters, rank: int, num_ranks: int, compute_dtype: torch.dtype | None = None, evaluates: bool = False
) -> None:
    """Three steps; with `evaluates` there is a forward without a backward before each, with and without gradients."""
    bound = FP32_BOUND if compute_dtype is None else FP16_BOUND
    torch.use_deterministic_algorithms(True)
    single = seeded(Language)
    start = deepcopy(dict(single.named_parameters()))
    fsdp = adapters.call("get_fsdp", seeded(Language), compute_dtype=compute_dtype)
    if compute_dtype is not None:
        in_float16(single)
    dtypes: set[torch.dtype] = set()
    fsdp.module.linear1.register_forward_hook(lambda _module, _args, output: dtypes.add(output.dtype))
    reference, optimizer = (torch.optim.SGD(model.parameters(), lr=0.01) for model in (single, fsdp))
    for step in range(3):
        batch = token_batch(step)
        if evaluates:
            with torch.no_grad():
                fsdp(batch[0])
            fsdp(batch[0])
        reference.zero_grad(set_to_none=True)
        next_token_loss(single, batch).backward()
        reference.step()
        step_of(adapters, fsdp, optimizer, part(batch, rank, num_ranks), next_token_loss)
        found, expected = full_parameters(adapters, fsdp), dict(single.named_parameters())
        assert_like_one_process(found, expected, start, step, num_ranks, bound)
    wanted = compute_dtype or torch.float32
    assert dtypes == {wanted}, f"a Linear layer computes in {dtypes.pop()}, not {wanted}"


@check(PROBLEM, num_ranks=2)
def equals_one_process(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """Training in float32 on halves of a batch ends where one process ends with the whole batch."""
    trains_like_one_process(adapters, rank, num_ranks)


@check(PROBLEM, num_ranks=2)
def shards_the_weights(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """Between steps a rank holds its half of each Linear and Embedding weight; norms are whole."""
    whole = {name: parameter.numel() for name, parameter in seeded(Language).named_parameters()}
    fsdp = adapters.call("get_fsdp", seeded(Language), compute_dtype=None)
    optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.01)
    for when in ("after wrapping", "after a step"):
        for name, parameter in fsdp.module.named_parameters():
            share = parameter.numel() / whole[name]
            if "norm" in name:
                assert share == 1, f"{name} holds {share:.0%} of its elements {when}, not all"
            else:
                assert share <= 0.55, f"{name} holds {share:.0%} of its elements {when}, not its half"
        step_of(adapters, fsdp, optimizer, token_batch(rank), next_token_loss)


@check(PROBLEM, num_ranks=2)
def equals_one_process_in_float16(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """With `compute_dtype=torch.float16`: as one process that computes with float16 copies of float32 weights."""
    trains_like_one_process(adapters, rank, num_ranks, torch.float16)


@check(PROBLEM, num_ranks=2)
def gathers_whole_parameters(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """`fsdp_gather_full_params` returns every parameter whole, in float32, by its original name."""
    expected = dict(seeded(Language).named_parameters())
    fsdp = adapters.call("get_fsdp", seeded(Language), compute_dtype=None)
    full = full_parameters(adapters, fsdp)
    assert set(full) == set(expected), f"the names are {sorted(full)}, not {sorted(expected)}"
    for name, tensor in full.items():
        assert tensor.dtype == torch.float32, f"{name} is gathered in {tensor.dtype}"
        assert torch.equal(tensor, expected[name]), f"{name} is not the wrapped model's"


@check(PROBLEM, num_ranks=2)
def keeps_the_modules(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """`.module` is the model, and its layers are instances of their own classes."""
    linear, embedding, norm = layer_classes()
    fsdp = adapters.call("get_fsdp", seeded(Language), compute_dtype=None)
    assert isinstance(getattr(fsdp, "module", None), nn.Module), "the wrapper has no attribute `module`"
    for name, kind in (("embedding", embedding), ("norm1", norm), ("linear1", linear), ("lm_head", linear)):
        assert isinstance(getattr(fsdp.module, name), kind), f"{name} is no {kind.__name__} any more"


@check(PROBLEM, num_ranks=2)
def gives_gradients_of_the_shards(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """Each gradient has its parameter's shape and is float32 under float16 compute too; norms' are equal."""
    for compute_dtype in (None, torch.float16):
        fsdp = adapters.call("get_fsdp", seeded(Language), compute_dtype=compute_dtype)
        optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.01)
        next_token_loss(fsdp, token_batch(rank)).backward()
        adapters.call("fsdp_on_after_backward", fsdp, optimizer)
        for name, parameter in fsdp.module.named_parameters():
            gradient = parameter.grad
            assert gradient is not None, f"{name} has no gradient"
            assert gradient.shape == parameter.shape, (
                f"the gradient of {name} has shape {tuple(gradient.shape)}, the parameter {tuple(parameter.shape)}"
            )
            kinds = gradient.dtype, parameter.dtype
            assert kinds == (torch.float32, torch.float32), f"{name} and its gradient are {kinds}, not float32"
            if "norm" in name:
                assert equal_on_all_ranks(gradient), f"the gradient of {name} differs between the ranks"


LAYER_BYTES = 4 * Deep.WIDTH**2


def second_step_of_deep(adapters: Adapters) -> tuple[Any, torch.optim.Optimizer, Tensor]:
    """A model of 16 layers after its first step, in which an order may be learned, without gradients."""
    fsdp = adapters.call("get_fsdp", seeded(Deep), compute_dtype=None)
    optimizer = torch.optim.SGD(fsdp.parameters(), lr=0.01)
    x = torch.randn(1, Deep.WIDTH)  # activations of half a KiB beside layers of 64
    step_of(adapters, fsdp, optimizer, x, lambda model, x: model(x).sum())
    optimizer.zero_grad(set_to_none=True)
    return fsdp, optimizer, x


@check(PROBLEM, num_ranks=2)
def frees_gathered_weights(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """Of 16 layers at most half are held whole in a forward, few behind it, and hardly one behind the step."""
    others = reachable_bytes()
    fsdp, optimizer, x = second_step_of_deep(adapters)
    gc.collect()

    def layers_beyond_the_shards() -> float:
        return (reachable_bytes() - others) / LAYER_BYTES - Deep.LAYERS / num_ranks

    found = []
    for layer in fsdp.module.layers[3::4]:
        layer.register_forward_hook(lambda *_: found.append(layers_beyond_the_shards()))
    output = fsdp(x)
    whole = f"whole layers' memory of {Deep.LAYERS} is held beyond the shards"
    saved = "; autograd may have saved gathered weights for the backward"
    assert found and max(found) <= Deep.LAYERS / 2, f"in the forward {max(found, default=0):.1f} {whole}{saved}"
    between = layers_beyond_the_shards()
    assert between <= 4, f"between forward and backward {between:.1f} {whole}"
    output.sum().backward()
    adapters.call("fsdp_on_after_backward", fsdp, optimizer)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    # On a busy machine gloo's threads hold what they sent last until they run again.
    deadline, after = time.monotonic() + SETTLING_S, math.inf
    while after > 2 and time.monotonic() < deadline:
        gc.collect()
        after = layers_beyond_the_shards()
    assert after <= 2, f"after the step {after:.1f} {whole}"


@check(PROBLEM, num_ranks=2, beyond=True)
def leaves_no_weights_to_autograd(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """What autograd saves for the backward keeps no gathered weight alive: the forward holds three layers at most."""
    fsdp, _, x = second_step_of_deep(adapters)
    with LiveBytes(*fsdp.parameters()) as live:
        shards = live.now()
        output = fsdp(x)
        peak, behind = ((bytes_held - shards) / LAYER_BYTES for bytes_held in (live.peak, live.now()))
    del output
    assert peak <= 4.5, f"the forward holds {peak:.1f} whole layers of {Deep.LAYERS}"  # one may be a gather's buffer
    assert behind <= 4, f"behind the forward {behind:.1f} whole layers of {Deep.LAYERS} are alive"


@check(PROBLEM, num_ranks=2, beyond=True)
def evaluates_in_between(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """Forwards without a backward, with and without gradients, change nothing about the training."""
    trains_like_one_process(adapters, rank, num_ranks, evaluates=True)
