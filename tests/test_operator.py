"""The operators' two ways: called directly in eager mode, through PyTorch's dispatcher where somebody watches.

The `tiled` stage stands for all: they share `AttentionOperator`.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cs336_systems.attention import flash_attention
from cs336_systems.attention.tiled import tiled_attention
from tests.covered import ATTENTION
from tests.test_s4_attention import DEVICES, inputs

COVERS = ATTENTION

REST = (True, 0.25, "")  # is_causal, scale, config
BACKENDS = pytest.mark.parametrize("backend", ["tiled", "triton"])


def tiled(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return tiled_attention(q, k, v, None, *REST)


class Names(TorchDispatchMode):
    """The operators of ours that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name().startswith("cs336_systems::"):
            self.seen.append(func.name().removeprefix("cs336_systems::"))
        return func(*args, **(kwargs or {}))


class Plain(Tensor):
    """A subclass without behaviour of its own."""


@pytest.fixture
def registered_calls(monkeypatch) -> list[str]:
    """What goes through the registered operators, in order."""
    seen: list[str] = []
    for half in ("_registered", "_registered_backward"):
        operator = getattr(tiled_attention, half)

        def call(*arguments, half=half, operator=operator):
            seen.append(half)
            return operator(*arguments)

        monkeypatch.setattr(tiled_attention, half, call)
    return seen


def leaves(device: str = "cpu") -> tuple[list[Tensor], Tensor]:
    *tensors, grad_output = inputs(2, 2, 2, 20, 30, 16, torch.float32, device)
    return [x.requires_grad_() for x in tensors], grad_output


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["tiled_attention", "triton_attention"])
def test_both_ways_give_the_same(name, device):
    from cs336_systems.attention.triton.function import triton_attention

    operator, rest = {
        "tiled_attention": (tiled_attention, (None, *REST)), "triton_attention": (triton_attention, REST)
    }[name]  # fmt: skip
    results = []
    for call in (operator, getattr(torch.ops.cs336_systems, name)):
        tensors, grad_output = leaves(device)
        output, lse = call(*tensors, *rest)
        grads = torch.autograd.grad((output, lse), tensors, (grad_output, torch.ones_like(lse)))
        only_output = torch.autograd.grad(call(*tensors, *rest)[0], tensors, grad_output)
        only_lse = torch.autograd.grad(call(*tensors, *rest)[1].sum(), tensors)
        results.append([output, lse, *grads, *only_output, *only_lse])
    for direct, registered in zip(*results):
        assert torch.equal(direct, registered)


def test_eager_mode_skips_the_dispatcher(registered_calls):
    tensors, grad_output = leaves()
    output, _ = tiled(*tensors)
    torch.autograd.grad(output, tensors, grad_output)
    tiled(*(torch.nn.Parameter(x.detach()) for x in tensors))
    with torch.no_grad():
        assert not tiled(*tensors)[0].requires_grad
    assert registered_calls == []
    assert output.grad_fn.name() == "tiled_attentionBackward"


@BACKENDS
def test_a_tangent_of_the_gradient_is_refused(backend):
    """The tangent of dQ would be lost: kernels see values only."""
    tensors, grad_output = leaves()
    output = flash_attention(*tensors, is_causal=True, backend=backend)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(grad_output, grad_output)
        with pytest.raises(NotImplementedError, match="forward-mode AD is not supported here"):
            torch.autograd.grad(output, tensors, dual)


@BACKENDS
def test_dispatch_modes_see_two_operators(backend):
    tensors, grad_output = leaves()
    with Names() as names:
        output = flash_attention(*tensors, is_causal=True, backend=backend)
        torch.autograd.grad(output, tensors, grad_output, retain_graph=True)
    assert names.seen == [f"{backend}_attention", f"{backend}_attention_backward"]
    output = flash_attention(*tensors, is_causal=True, backend=backend)
    with Names() as names:  # around the backward alone
        torch.autograd.grad(output, tensors, grad_output)
    assert names.seen == [f"{backend}_attention_backward"]


@BACKENDS
def test_a_tensor_that_has_left_a_transform_is_what_it_held(backend):
    (q, k, v), grad_output = leaves()
    left = []

    def keep(x: Tensor) -> Tensor:
        left.append(x * 1)
        return x.sum()

    torch.func.grad(keep)(q.detach())
    results = [flash_attention(x, k, v, is_causal=True, backend=backend) for x in (left[0], q.detach())]
    grads = [torch.autograd.grad(output, (k, v), grad_output) for output in results]
    assert torch.equal(*results)
    assert torch.equal(grads[0][0], grads[1][0]) and torch.equal(grads[0][1], grads[1][1])


def test_fake_tensors_and_meta_tensors_are_never_launched(monkeypatch):
    def fail(*arguments):
        raise AssertionError("launched")

    monkeypatch.setattr(tiled_attention, "_forward", fail)
    with FakeTensorMode() as mode:
        output, lse = tiled(*(torch.empty(2, 3, 20, 16) for _ in range(3)))
    outside, _ = tiled(*[mode.from_tensor(torch.empty(2, 3, 20, 16))] * 3)
    meta, _ = tiled(*(torch.empty(2, 3, 20, 16, device="meta") for _ in range(3)))
    assert output.shape == outside.shape == meta.shape == (2, 3, 20, 16) and lse.shape == (2, 3, 20)


def test_subclasses_go_through_the_operator(registered_calls):
    (q, k, v), _ = leaves()
    expected, _ = tiled(q, k, v)
    output, _ = tiled(q.detach().as_subclass(Plain), k, v)
    assert registered_calls == ["_registered"]
    assert torch.equal(output.as_subclass(Tensor), expected)


@BACKENDS
def test_transforms_that_differentiate_are_refused(backend):
    (q, k, v), _ = leaves()
    q, k, v = (x.detach() for x in (q, k, v))

    def loss(q):
        return flash_attention(q, k[:1], v[:1], backend=backend).sum()

    message = r"torch\.func's grad, vjp, jacrev and hessian are not supported here; backend='reference' has them"
    for transformed in (
        torch.func.grad(loss), torch.func.jacrev(loss), lambda q: torch.func.vjp(loss, q),
        torch.vmap(torch.func.grad(lambda q: loss(q[None]))),
        torch.func.grad(lambda q: torch.vmap(lambda x: loss(x[None]))(q).sum()),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match=message):
            transformed(q[:1])
    # What is not differentiated is a constant.
    constant = torch.func.grad(lambda x: x * flash_attention(q, k, v, backend=backend).sum())(torch.tensor(2.0))
    torch.testing.assert_close(constant, flash_attention(q, k, v, backend=backend).sum())


def test_batched_gradients_equal_a_loop():
    """`is_grads_batched` maps the backward over gradients; the forward ran directly."""
    tensors, grad_output = leaves()
    output, _ = tiled(*tensors)
    stack = torch.stack([grad_output, 2 * grad_output, grad_output - 1])
    batched = torch.autograd.grad(output, tensors, stack, is_grads_batched=True, retain_graph=True)
    looped = [torch.autograd.grad(output, tensors, grad, retain_graph=True) for grad in stack]
    for ours, each in zip(batched, zip(*looped)):
        torch.testing.assert_close(ours, torch.stack(each))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_the_same(reentrant):
    tensors, grad_output = leaves()
    plain = torch.autograd.grad(tiled(*tensors)[0], tensors, grad_output)
    checkpoint(lambda *x: tiled(*x)[0], *tensors, use_reentrant=reentrant).backward(grad_output)
    for x, expected in zip(tensors, plain):
        assert torch.equal(x.grad, expected)


def test_the_graph_dies_with_its_output():
    """A saved output that its own node held would be a cycle."""
    tensors, _ = leaves()
    gc.disable()
    try:
        output, lse = tiled(*tensors)
        alive = weakref.ref(output)
        del output, lse
        assert alive() is None
    finally:
        gc.enable()


def test_what_autograd_asks_of_a_function_is_kept():
    tensors, grad_output = leaves()
    copies = [x * 1 for x in tensors]
    output, _ = tiled(*copies)
    torch.autograd.grad(output, tensors, grad_output)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(output, tensors, grad_output)
    output, _ = tiled(*copies)
    copies[1].detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(output, copies, grad_output)
