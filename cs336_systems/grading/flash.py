"""Section 4: FlashAttention-2 behind `apply(q, k, v, is_causal)`, in PyTorch on the CPU and in Triton.

Without a GPU, Triton's kernels run in its interpreter. All tensors are float32, (batch, sequence, head dim).
"""

import importlib.util
import math
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor

from cs336_systems.grading.checks import Adapters, Skipped, check

# batch, queries, keys, head dim; the handout promises powers of two from 16 on.
SQUARE = ((2, 128, 128, 64), (1, 256, 256, 16), (2, 64, 64, 128))
SHAPES = (*SQUARE, (2, 64, 256, 32), (1, 128, 32, 32))
RAGGED = ((2, 97, 97, 64), (1, 16, 131, 32))
SLACK = 1e-5  # added to twice the error of plain attention in the same dtype


def attention_check(problem: str, *, beyond: bool = False, only: str = "") -> Callable[[Any], Any]:
    """Register the check for both implementations, `pytorch` and `triton`, or one of them."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        for implementation in (only,) if only else ("pytorch", "triton"):
            one = update_wrapper(partial(function, implementation=implementation), function)
            check(problem, f"{implementation}_{function.__name__}", beyond=beyond)(one)
        return function

    return decorate


def autograd_function(adapters: Adapters, implementation: str) -> tuple[Any, str]:
    """The class under test and the device that it runs on."""
    if implementation == "triton" and importlib.util.find_spec("triton") is None:
        raise Skipped("triton is not installed")
    function = adapters.call(f"get_flashattention_autograd_function_{implementation}")
    on_gpu = implementation == "triton" and torch.cuda.is_available()
    return function, "cuda" if on_gpu else "cpu"


def draw(shape: tuple[int, int, int, int], device: str, scale: float = 1.0) -> list[Tensor]:
    """q, k, v and the gradient of the output, the same in every process."""
    batch, queries, keys, dim = shape
    generator = torch.Generator().manual_seed(sum(shape))
    lengths = (queries, keys, keys, queries)
    tensors = [torch.randn(batch, length, dim, generator=generator).to(device) for length in lengths]
    return [tensors[0] * scale, *tensors[1:]]


def plain_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """The output and the natural log-sum-exp of the scaled scores, by matmul, softmax, matmul."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if is_causal:  # query i sees the keys 0 ... i
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~visible, -math.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def run(
    attention: Callable[..., Tensor], tensors: list[Tensor], is_causal: bool, *, differentiates: bool
) -> dict[str, Tensor]:
    """The output of `attention` and, if it `differentiates`, the gradients of its inputs."""
    *inputs, grad_output = tensors
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    output = attention(*leaves, is_causal)
    if not differentiates:
        return {"O": output.detach()}
    output.backward(grad_output)
    gradients = {f"d{name}": leaf.grad for name, leaf in zip("QKV", leaves) if leaf.grad is not None}
    assert len(gradients) == 3, "the backward leaves an input without a gradient"
    return {"O": output.detach(), **gradients}


def assert_contract(
    function: Any, shape: tuple[int, int, int, int], device: str, is_causal: bool, names: str, scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    """Each result errs at most twice as much as plain attention of the same dtype, both against float64.

    Of the output alone no backward runs. On a GPU plain attention multiplies in TF32 here, as Triton's `tl.dot` does
    unless told otherwise.
    """
    results = partial(run, is_causal=is_causal, differentiates=names != "O")
    tensors = [tensor.to(dtype) for tensor in draw(shape, device, scale)]
    exact = results(lambda *x: plain_attention(*x)[0], [tensor.double() for tensor in tensors])
    torch.backends.cuda.matmul.allow_tf32 = True
    eager, ours = results(lambda *x: plain_attention(*x)[0], tensors), results(function.apply, tensors)
    what = f"{shape[0]} x {shape[1]} queries x {shape[2]} keys x {shape[3]}, {'causal' if is_causal else 'not causal'}"
    for name in names.split():
        assert ours[name].shape == exact[name].shape, (
            f"{name} has shape {tuple(ours[name].shape)}, not {tuple(exact[name].shape)} ({what})"
        )
        errors = (ours[name].double() - exact[name]).abs()
        allowed = 2 * (eager[name].double() - exact[name]).abs().max().item() + SLACK
        rows = (~(errors <= allowed)).any(-1).any(0).nonzero().flatten().tolist()
        assert not rows, (
            f"{name} is wrong by {errors.max():.2g} in {len(rows)} of {errors.shape[1]} rows, first in row {rows[0]}, "
            f"at most {allowed:.2g} is allowed ({what})"
        )


def saved_lse(function: Any, tensors: list[Tensor], is_causal: bool) -> Tensor:
    q, k, v = (tensor.detach().clone().requires_grad_() for tensor in tensors[:3])
    output = function.apply(q, k, v, is_causal)
    assert output.grad_fn is not None, "the output has no grad_fn"
    saved = [tensor for tensor in output.grad_fn.saved_tensors if tensor.shape == q.shape[:2]]
    shapes = [tuple(tensor.shape) for tensor in output.grad_fn.saved_tensors]
    assert len(saved) == 1, f"{len(saved)} saved tensors have shape (batch, queries), not 1; saved: {shapes}"
    return saved[0]


# flash_forward


@attention_check("flash_forward")
def output(adapters: Adapters, implementation: str) -> None:
    """O of `apply(q, k, v, False)` within the numerical contract, also for unequal numbers of queries and keys."""
    function, device = autograd_function(adapters, implementation)
    for shape in SHAPES:
        assert_contract(function, shape, device, False, "O")


@attention_check("flash_forward")
def causal_output(adapters: Adapters, implementation: str) -> None:
    """O of `apply(q, k, v, True)` within the numerical contract: query i sees the keys 0 to i."""
    function, device = autograd_function(adapters, implementation)
    for shape in SQUARE:
        assert_contract(function, shape, device, True, "O")


@attention_check("flash_forward")
def large_scores(adapters: Adapters, implementation: str) -> None:
    """Scores of several hundred overflow nothing: the maximum is subtracted before the exponential."""
    function, device = autograd_function(adapters, implementation)
    assert_contract(function, (2, 64, 64, 32), device, False, "O", scale=200.0)


@attention_check("flash_forward")
def saves_one_log_sum_exp(adapters: Adapters, implementation: str) -> None:
    """Exactly one saved tensor has shape (batch, queries): the natural log-sum-exp of the scaled scores."""
    function, device = autograd_function(adapters, implementation)
    for is_causal in (False, True):
        tensors = draw((2, 128, 128, 64), device)
        lse = saved_lse(function, tensors, is_causal)
        q, k, v = (tensor.double() for tensor in tensors[:3])
        exact = plain_attention(q, k, v, is_causal)[1]
        error = ((lse.double() - exact).abs() / exact.abs().clamp(min=1)).max().item()
        assert error <= 1e-3, f"the saved log-sum-exp is wrong by {error:.2g}, at most 0.001 is allowed"


# flash_backward


@attention_check("flash_backward")
def gradients(adapters: Adapters, implementation: str) -> None:
    """dQ, dK and dV within the numerical contract, also for unequal numbers of queries and keys."""
    function, device = autograd_function(adapters, implementation)
    for shape in SHAPES:
        assert_contract(function, shape, device, False, "dQ dK dV")


@attention_check("flash_backward")
def causal_gradients(adapters: Adapters, implementation: str) -> None:
    """dQ, dK and dV within the numerical contract under the causal mask."""
    function, device = autograd_function(adapters, implementation)
    for shape in SQUARE:
        assert_contract(function, shape, device, True, "dQ dK dV")


@attention_check("flash_backward")
def saves_no_matrix_of_scores(adapters: Adapters, implementation: str) -> None:
    """The backward recomputes: no saved tensor is as large as queries times keys."""
    function, device = autograd_function(adapters, implementation)
    q, k, v = (tensor.requires_grad_() for tensor in draw((1, 256, 256, 16), device)[:3])
    output = function.apply(q, k, v, False)
    saved = [tuple(tensor.shape) for tensor in output.grad_fn.saved_tensors if tensor.numel() >= 256 * 256]
    output.sum().backward()
    assert not saved, f"a tensor of shape {saved[0]} is saved for 256 queries and 256 keys"


# Beyond the handout


@attention_check("flash_forward", beyond=True)
def ragged_lengths(adapters: Adapters, implementation: str) -> None:
    """Lengths that no tile divides, forward and backward."""
    function, device = autograd_function(adapters, implementation)
    for shape in RAGGED:
        assert_contract(function, shape, device, False, "O dQ dK dV")
        assert_contract(function, shape, device, shape[1] == shape[2], "O dQ dK dV")


@attention_check("flash_forward", beyond=True)
def causal_rectangles(adapters: Adapters, implementation: str) -> None:
    """Unequal numbers of queries and keys under the causal mask, aligned at the top left."""
    function, device = autograd_function(adapters, implementation)
    for shape in SHAPES[len(SQUARE) :]:
        assert_contract(function, shape, device, True, "O dQ dK dV")


@attention_check("flash_forward", beyond=True)
def strided_inputs(adapters: Adapters, implementation: str) -> None:
    """Inputs that are slices of one tensor give what contiguous ones do."""
    function, device = autograd_function(adapters, implementation)
    packed = torch.cat(draw((2, 64, 64, 32), device)[:3], dim=-1)
    slices = packed.split(32, dim=-1)
    difference = function.apply(*slices, True) - function.apply(*(x.contiguous() for x in slices), True)
    assert difference.abs().max().item() == 0, "slices of one tensor give another output than contiguous tensors"


@attention_check("flash_forward", beyond=True, only="pytorch")
def bfloat16(adapters: Adapters, implementation: str) -> None:
    """bfloat16 inputs within the contract: sums are kept in float32."""
    function, device = autograd_function(adapters, implementation)
    assert_contract(function, (2, 128, 128, 64), device, True, "O dQ dK dV", dtype=torch.bfloat16)
