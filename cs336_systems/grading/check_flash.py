"""Checks of section 4: FlashAttention-2 behind `apply(q, k, v, is_causal)`, in PyTorch and Triton.

The PyTorch version runs on the CPU. Without a GPU, Triton's kernels run in its interpreter. All
tensors are float32 unless a check says otherwise, with the shape (batch, sequence, head dim).
"""

import gc
import importlib
import importlib.util
import math
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor

from cs336_systems.grading.counting import LiveBytes
from cs336_systems.grading.registry import Adapters, Skipped, check

# Shapes are (batch, queries, keys, head dim); the handout promises powers of two from 16 on.
SQUARE = ((2, 128, 128, 64), (1, 256, 256, 16))
UNEQUAL = ((2, 128, 256, 64), (1, 256, 128, 32))
SHORT = ((2, 64, 64, 128), (1, 32, 32, 32), (2, 16, 16, 16))
RAGGED = ((2, 97, 97, 64), (1, 16, 131, 32))
LONG = (1, 512, 512, 32)  # a matrix of scores is eight times as large as q
SLACK = 1e-5  # added to twice the error of plain attention in the same dtype
# The check that must pass before the other checks of an implementation earn points.
NEEDED = {
    ("flash_forward", "pytorch"): "pytorch_works_by_tiles",
    ("flash_forward", "triton"): "triton_calls_a_fused_kernel",
    ("flash_backward", "pytorch"): "pytorch_gradients",
    ("flash_backward", "triton"): "triton_gradients",
}
SOFTMAX = ("softmax", "scaled_dot", "logsumexp")  # in names of operators that need whole rows
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "exp", "exp2", "einsum", "linear")


def attention_check(
    problem: str, *, beyond: bool = False, implementations: tuple[str, ...] = ("pytorch", "triton")
) -> Callable[[Any], Any]:
    """Return a decorator that registers a check once for each of the `implementations`.

    A check's name begins with its implementation's. The function gets the adapters and the keyword
    argument `implementation`.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        for implementation in implementations:
            one = update_wrapper(partial(function, implementation=implementation), function)
            name, needs = f"{implementation}_{function.__name__}", NEEDED[problem, implementation]
            check(problem, name, beyond=beyond, needs="" if name == needs else needs)(one)
        return function

    return decorate


def autograd_function(adapters: Adapters, implementation: str) -> tuple[Any, str]:
    """Return the autograd class under test and the device on which it runs.

    Skipped if Triton is needed and not installed.
    """
    if implementation == "triton" and importlib.util.find_spec("triton") is None:
        raise Skipped("triton is not installed")
    function = adapters.call(f"get_flashattention_autograd_function_{implementation}")
    on_gpu = implementation == "triton" and torch.cuda.is_available()
    return function, "cuda" if on_gpu else "cpu"


def draw(shape: tuple[int, int, int, int], device: str, scale: float = 1.0) -> list[Tensor]:
    """Return q, k, v and the gradient of the output for a shape; every process draws the same.

    `scale` multiplies q, and with it the scores.
    """
    batch, queries, keys, dim = shape
    generator = torch.Generator().manual_seed(sum(shape))
    lengths = (queries, keys, keys, queries)
    tensors = [
        torch.randn(batch, length, dim, generator=generator).to(device) for length in lengths
    ]
    return [tensors[0] * scale, *tensors[1:]]


def plain_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output and the natural log-sum-exp of the scaled scores, in plain PyTorch."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if is_causal:  # query i sees the keys 0 ... i
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~visible, -math.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def run(
    attention: Callable[..., Tensor],
    tensors: list[Tensor],
    is_causal: bool,
    *,
    differentiates: bool,
) -> dict[str, Tensor]:
    """Return the output "O" of `attention` and, if it `differentiates`, "dQ", "dK" and "dV"."""
    *inputs, grad_output = tensors
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    output = attention(*leaves, is_causal)
    if not differentiates:
        return {"O": output.detach()}
    output.backward(grad_output)
    gradients = {
        f"d{name}": leaf.grad for name, leaf in zip("QKV", leaves) if leaf.grad is not None
    }
    assert len(gradients) == 3, "the backward leaves an input without a gradient"
    return {"O": output.detach(), **gradients}


def assert_contract(
    function: Any,
    shape: tuple[int, int, int, int],
    device: str,
    is_causal: bool,
    names: str,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Assert that the results `names` err at most twice as much as plain attention in that dtype.

    Both are compared with float64, and SLACK is allowed on top. With `names` "O" no backward runs.
    On a GPU plain attention multiplies in TF32 here, as Triton's `tl.dot` does by default.
    """
    results = partial(run, is_causal=is_causal, differentiates=names != "O")
    tensors = [tensor.to(dtype) for tensor in draw(shape, device, scale)]
    doubles = [tensor.double() for tensor in tensors]
    exact = results(lambda *x: plain_attention(*x)[0], doubles)
    torch.backends.cuda.matmul.allow_tf32 = True
    eager = results(lambda *x: plain_attention(*x)[0], tensors)
    ours = results(function.apply, tensors)
    batch, queries, keys, dim = shape
    flag = "causal" if is_causal else "not causal"
    what = f"{batch} x {queries} queries x {keys} keys x {dim}, {flag}"
    for name in names.split():
        assert ours[name].shape == exact[name].shape, (
            f"{name} has shape {tuple(ours[name].shape)}, not {tuple(exact[name].shape)} ({what})"
        )
        errors = (ours[name].double() - exact[name]).abs()
        allowed = 2 * (eager[name].double() - exact[name]).abs().max().item() + SLACK
        rows = (~(errors <= allowed)).any(-1).any(0).nonzero().flatten().tolist()
        if rows:
            cause = likely_cause(name, ours[name], wrong_results(doubles, is_causal))
            raise AssertionError(
                f"{name} is wrong by {errors.max():.2g} in {len(rows)} of {errors.shape[1]} rows, "
                f"first in row {rows[0]}, at most {allowed:.2g} is allowed ({what}){cause}"
            )


def wrong_results(tensors: list[Tensor], is_causal: bool) -> dict[str, dict[str, Tensor]]:
    """Return what common mistakes give instead of O, L, dQ, dK and dV, by mistake and name.

    A mistake completes the sentence "as if ...".
    """
    q, k, v, grad_output = tensors
    scale = q.shape[-1] ** -0.5
    shown = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
    hidden = ~shown.tril() if is_causal else ~shown

    def attention(scale_of_s: float, masked: bool) -> dict[str, Tensor]:
        scores = q @ k.transpose(-2, -1) * scale_of_s
        scores = scores.masked_fill(hidden, -math.inf) if masked else scores
        return {"O": scores.softmax(-1) @ v, "L": scores.logsumexp(-1)}

    # Gradients from the backward's equations; unless `right`, without the mask in P.
    def backward(right: bool) -> dict[str, Tensor]:
        scores = q @ k.transpose(-2, -1) * scale
        lse = scores.masked_fill(hidden, -math.inf).logsumexp(-1, keepdim=True)
        p = torch.exp(scores if not right else scores.masked_fill(hidden, -math.inf)) / lse.exp()
        output = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
        delta = (output * grad_output).sum(-1, keepdim=True)
        ds = p * (grad_output @ v.transpose(-2, -1) - delta)
        return {
            "dQ": ds @ k,
            "dK": ds.transpose(-2, -1) @ q,
            "dV": p.transpose(-2, -1) @ grad_output,
        }

    # dQ and dK of `backward` lack the factor `scale`.
    right = attention(scale, masked=True)
    maximum = (q @ k.transpose(-2, -1) * scale).masked_fill(hidden, -math.inf).amax(-1)
    unscaled = backward(right=True)
    unmasked = {
        name: x * (1 if name == "dV" else scale) for name, x in backward(right=False).items()
    }
    return {
        "the scores were not scaled by 1/sqrt(d)": attention(1.0, masked=True),
        "the causal mask were missing": attention(scale, masked=False),
        "its logarithm were missing": {"L": right["L"].exp()},
        "the sum were added to the maximum without its logarithm": {
            "L": maximum + (right["L"] - maximum).exp()
        },
        "the logarithm were the binary one": {"L": right["L"] / math.log(2)},
        "it were the logarithm of the sum without the maximum": {"L": right["L"] - maximum},
        "the scale were missing in the backward": {name: unscaled[name] for name in ("dQ", "dK")},
        "the causal mask were missing in the backward": unmasked if is_causal else {},
    }


def likely_cause(name: str, found: Tensor, wrong: dict[str, dict[str, Tensor]]) -> str:
    """Return ", as if" and the mistake in `wrong` that gives the result `found`, or ""."""
    for mistake, results in wrong.items():
        if name in results:
            error = (found.double() - results[name]).abs() / results[name].abs().clamp(min=1)
            if error.max().item() < 1e-3:
                return f", as if {mistake}"
    return ""


def saved_lse(function: Any, tensors: list[Tensor], is_causal: bool) -> Tensor:
    """Return the one tensor of shape (batch, queries) that `function` saves for its backward.

    AssertionError if there is none, or several.
    """
    q, k, v = (tensor.detach().clone().requires_grad_() for tensor in tensors[:3])
    output = function.apply(q, k, v, is_causal)
    assert output.grad_fn is not None, "the output has no grad_fn"
    saved = [tensor for tensor in output.grad_fn.saved_tensors if tensor.shape == q.shape[:2]]
    shapes = [tuple(tensor.shape) for tensor in output.grad_fn.saved_tensors]
    assert len(saved) == 1, (
        f"{len(saved)} saved tensors have shape (batch, queries), not 1; saved: {shapes}"
    )
    return saved[0]


def count_launches() -> list[str]:
    """Return a list to which every Triton kernel's name is added when it is launched from now on.

    Kernels count on a GPU and in the interpreter; warm-up compilations do not.
    """
    launched: list[str] = []

    def counted(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            if not kwargs.get("warmup"):
                launched.append(kernel.fn.__name__)
            return run(kernel, *args, **kwargs)

        return call

    for path, name in (("interpreter", "InterpretedFunction"), ("jit", "JITFunction")):
        kind = getattr(importlib.import_module(f"triton.runtime.{path}"), name)
        kind.run = counted(kind.run)
    return launched


# flash_forward


@attention_check("flash_forward", implementations=("pytorch",))
def works_by_tiles(adapters: Adapters, implementation: str) -> None:
    """Scores are computed by tiles: no tensor is as large as queries times keys, nor is a row's
    softmax taken.
    """
    function, device = autograd_function(adapters, implementation)
    q, k, v = draw(LONG, device)[:3]
    with LiveBytes([q, k, v]) as seen:
        function.apply(q, k, v, False)
    _, queries, keys, _ = LONG
    large = [shape for shape in sorted(seen.shapes) if math.prod(shape) >= queries * keys]
    assert not large, f"a tensor of shape {large[0]} is made for {queries} queries and {keys} keys"
    whole = [name for name in sorted(seen.operators) if any(part in name for part in SOFTMAX)]
    assert not whole, f"the forward calls {whole[0]}, which needs whole rows of scores"


@attention_check("flash_forward", implementations=("triton",))
def calls_a_fused_kernel(adapters: Adapters, implementation: str) -> None:
    """The forward launches a Triton kernel, and PyTorch multiplies and exponentiates nothing in
    it.
    """
    function, device = autograd_function(adapters, implementation)
    q, k, v = draw(SQUARE[0], device)[:3]
    launched = count_launches()
    with LiveBytes([q, k, v]) as seen:
        function.apply(q, k, v, False)
    assert launched, "the forward launches no Triton kernel"
    outside = [
        name
        for name in sorted(seen.operators)
        if name in PRODUCTS or any(part in name for part in SOFTMAX)
    ]
    assert not outside, f"the forward computes {', '.join(outside)} in PyTorch, not in its kernel"


@attention_check("flash_forward")
def output(adapters: Adapters, implementation: str) -> None:
    """O of `apply(q, k, v, False)` within the numerical contract."""
    function, device = autograd_function(adapters, implementation)
    for shape in SQUARE:
        assert_contract(function, shape, device, False, "O")


@attention_check("flash_forward")
def unequal_lengths(adapters: Adapters, implementation: str) -> None:
    """O for other numbers of keys than of queries, of which the algorithm speaks as N_k and N_q."""
    function, device = autograd_function(adapters, implementation)
    for shape in UNEQUAL:
        assert_contract(function, shape, device, False, "O")


@attention_check("flash_forward")
def short_lengths(adapters: Adapters, implementation: str) -> None:
    """O where lengths are 16, 32 and 64: any power of two from 16 on may be smaller than a tile."""
    function, device = autograd_function(adapters, implementation)
    for shape in SHORT:
        assert_contract(function, shape, device, False, "O")


@attention_check("flash_forward", implementations=("triton",))
def causal_output(adapters: Adapters, implementation: str) -> None:
    """O of `apply(q, k, v, True)` within the numerical contract: query i sees the keys 0 to i."""
    function, device = autograd_function(adapters, implementation)
    for shape in SQUARE:
        assert_contract(function, shape, device, True, "O")


@attention_check("flash_forward", implementations=("triton",))
def causal_flag_is_optional(adapters: Adapters, implementation: str) -> None:
    """`apply(q, k, v)` is `apply(q, k, v, False)`."""
    function, device = autograd_function(adapters, implementation)
    q, k, v = draw(SQUARE[0], device)[:3]
    difference = (function.apply(q, k, v) - function.apply(q, k, v, False)).abs().max().item()
    assert difference == 0, "without its last argument `apply` gives another output than with False"


@attention_check("flash_forward")
def large_scores(adapters: Adapters, implementation: str) -> None:
    """Scores of several hundred overflow nothing: the maximum is subtracted before the
    exponential.
    """
    function, device = autograd_function(adapters, implementation)
    assert_contract(function, (2, 128, 128, 32), device, False, "O", scale=200.0)


@attention_check("flash_forward")
def saves_one_log_sum_exp(adapters: Adapters, implementation: str) -> None:
    """Exactly one saved tensor has shape (batch, queries): the natural log-sum-exp of the scaled
    scores.
    """
    function, device = autograd_function(adapters, implementation)
    for is_causal in (False, True) if implementation == "triton" else (False,):
        assert_lse(function, device, is_causal)


def assert_lse(function: Any, device: str, is_causal: bool) -> None:
    """Assert that the saved log-sum-exp is the natural one of the scaled scores, within 0.001."""
    tensors = draw((2, 128, 128, 64), device)
    lse = saved_lse(function, tensors, is_causal)
    doubles = [tensor.double() for tensor in tensors]
    q, k, v, _ = doubles
    exact = plain_attention(q, k, v, is_causal)[1]
    error = ((lse.double() - exact).abs() / exact.abs().clamp(min=1)).max().item()
    if not error <= 1e-3:
        cause = likely_cause("L", lse, wrong_results(doubles, is_causal))
        raise AssertionError(
            f"the log-sum-exp saved with is_causal={is_causal} is wrong by {error:.2g}, "
            f"at most 0.001 is allowed{cause}"
        )


# flash_backward


@attention_check("flash_backward")
def gradients(adapters: Adapters, implementation: str) -> None:
    """dQ, dK and dV within the numerical contract."""
    function, device = autograd_function(adapters, implementation)
    for shape in SQUARE:
        assert_contract(function, shape, device, False, "dQ dK dV")


@attention_check("flash_backward", implementations=("triton",))
def causal_gradients(adapters: Adapters, implementation: str) -> None:
    """dQ, dK and dV within the numerical contract under the causal mask."""
    function, device = autograd_function(adapters, implementation)
    for shape in SQUARE:
        assert_contract(function, shape, device, True, "dQ dK dV")


@attention_check("flash_backward")
def keeps_no_matrix_of_scores(adapters: Adapters, implementation: str) -> None:
    """The backward recomputes: between the passes less is alive than one matrix of queries times
    keys.
    """
    function, device = autograd_function(adapters, implementation)
    shape = (1, 256, 256, 16)
    q, k, v = (tensor.requires_grad_() for tensor in draw(shape, device)[:3])
    _, queries, keys, _ = shape
    with LiveBytes([q, k, v]) as live:
        output = function.apply(q, k, v, False)
        gc.collect()
        kept = live.now()
    output.sum().backward()
    matrix = queries * keys * q.element_size()
    assert kept < matrix, (
        f"{kept:,} bytes are alive between forward and backward of {queries} queries "
        f"and {keys} keys; one matrix of their scores takes {matrix:,}"
    )


# Beyond the handout


@attention_check("flash_forward", beyond=True, implementations=("pytorch",))
def causal(adapters: Adapters, implementation: str) -> None:
    """The causal flag, which the handout asks of the Triton class: O, its log-sum-exp and the
    gradients.
    """
    function, device = autograd_function(adapters, implementation)
    for shape in SQUARE:
        assert_contract(function, shape, device, True, "O dQ dK dV")
    assert_lse(function, device, True)


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
    for shape in UNEQUAL:
        assert_contract(function, shape, device, True, "O dQ dK dV")


@attention_check("flash_forward", beyond=True)
def strided_inputs(adapters: Adapters, implementation: str) -> None:
    """Inputs that are slices of one tensor give what contiguous ones do."""
    function, device = autograd_function(adapters, implementation)
    packed = torch.cat(draw((2, 64, 64, 32), device)[:3], dim=-1)
    slices = packed.split(32, dim=-1)
    difference = function.apply(*slices, True) - function.apply(
        *(x.contiguous() for x in slices), True
    )
    assert difference.abs().max().item() == 0, (
        "slices of one tensor give another output than contiguous tensors"
    )


@attention_check("flash_forward", beyond=True, implementations=("pytorch",))
def bfloat16(adapters: Adapters, implementation: str) -> None:
    """bfloat16 inputs within the contract: sums are kept in float32."""
    function, device = autograd_function(adapters, implementation)
    assert_contract(function, (2, 128, 128, 64), device, True, "O dQ dK dV", dtype=torch.bfloat16)
