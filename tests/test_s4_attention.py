"""Section 4: the attention stages against the float64 oracle, on CPU (Triton through its
interpreter) and on CUDA.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from cs336_systems.attention import AttentionConfig, FlashAttentionPyTorch, flash_attention
from cs336_systems.attention.contract import Oracle, compute_oracle, contract_errors
from cs336_systems.attention.masks import BlockMask
from cs336_systems.attention.reference import attention_reference
from cs336_systems.attention.tiles import KernelConfig, head_tile, target_of
from cs336_systems.attention.tiles.choice import TABLES
from cs336_systems.attention.tiles.kernel_config import KERNELS
from cs336_systems.device import has_cxx_compiler
from tests import adapters
from tests.covered import ATTENTION
from tests.wrong_attention import BUGS, wrong_attention

COVERS = (*ATTENTION, "tests/adapters.py")

BACKENDS = ["reference", "tiled", "triton"]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def draw(*size: int, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator).to(device=device, dtype=dtype)


def inputs(
    batch: int,
    heads: int,
    kv_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, grad_output = (
        draw(batch, heads, seqlen_q, head_dim, dtype=dtype, device=device, seed=seed)
        for seed in (0, 3)
    )
    k, v = (
        draw(batch, kv_heads, seqlen_k, head_dim, dtype=dtype, device=device, seed=seed)
        for seed in (1, 2)
    )
    return q, k, v, grad_output


NAMES = ("output", "lse", "grad_q", "grad_k", "grad_v")


def all_results(
    attend: Callable[..., Any], tensors: Sequence[Tensor], *upstream: Tensor
) -> dict[str, Tensor]:
    """Output and log-sum-exp of `attend(q, k, v)`, and the gradients of those that `upstream` is
    for.
    """
    leaves = [x.detach().requires_grad_() for x in tensors]
    results = attend(*leaves)
    return dict(
        zip(
            NAMES,
            (*results, *torch.autograd.grad(results[: len(upstream)], leaves, upstream)),
            strict=True,
        )
    )


def run(q: Tensor, k: Tensor, v: Tensor, grad_output: Tensor, **options) -> dict[str, Tensor]:
    """`all_results` of `flash_attention`."""
    return all_results(partial(flash_attention, return_lse=True, **options), (q, k, v), grad_output)


def with_gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], grad_output: Tensor
) -> list[Tensor]:
    """The output of `function(*inputs)`, and its gradients by the inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output = function(*leaves)
    return [output, *torch.autograd.grad(output, leaves, grad_output)]


def assert_within(oracle: Oracle, results: dict[str, Tensor]) -> None:
    errors = contract_errors(oracle, results)
    assert max(errors.values()) <= 1, f"error over bound: {errors}"


def assert_contract(q: Tensor, k: Tensor, v: Tensor, grad_output: Tensor, **options) -> None:
    results = run(q, k, v, grad_output, **options)
    known = {name: value for name, value in options.items() if name in ("is_causal", "scale")}
    assert_within(compute_oracle(q, k, v, grad_output, **known), results)


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    for name, expected in theirs.items():
        assert torch.equal(ours[name], expected), name


def assert_refused(message: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """`call` raises the error whose name begins `message`, with a text that the rest of it matches."""
    with pytest.raises((TypeError, ValueError)) as caught:
        call(*arguments, **options)
    assert re.match(message, f"{caught.typename}: {caught.value}"), (
        f"{caught.typename}: {caught.value}"
    )


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results start as NaN, so that an element that no program writes cannot pass."""

    def poisoned(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate(*arguments: Any, **options: Any) -> Tensor:
            x = function(*arguments, **options)
            return x.fill_(math.nan) if x.is_floating_point() else x

        return allocate

    for owner, name in (
        (torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty"), (Tensor, "new_empty_strided"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
    from cs336_systems.attention.triton import launch

    assert launch.empty((2,), torch.float32, torch.device("cpu")).isnan().all(), (
        "the kernels' results come from there"
    )


def shipped_configs(head_dim: int, dtype: torch.dtype, device: str) -> list[AttentionConfig]:
    """All configurations of this GPU's (the interpreter's) table for a head dim and dtype, three
    kernels at a time.
    """
    target = target_of(torch.cuda.get_device_capability() if device == "cuda" else None)
    rows = {
        kernel: TABLES[target][kernel, dtype.itemsize, head_tile(head_dim)].configs
        for kernel in KERNELS
    }
    return [
        AttentionConfig(**{kernel: row[min(number, len(row) - 1)] for kernel, row in rows.items()})
        for number in range(max(map(len, rows.values())))
    ]


def tiles(spelling: str, device: str) -> AttentionConfig:
    """All three kernels with these tiles."""
    target = "sm90" if device == "cuda" else "portable"
    return AttentionConfig(
        **{kernel: KernelConfig.from_name(f"{target}_{kernel}_{spelling}") for kernel in KERNELS}
    )


def assert_repeats(call: Callable[[], dict[str, Tensor]], times: int) -> None:
    first = call()
    for _ in range(times):
        assert_equal(call(), first)


def skip_what_cannot_run(backend: str, dtype: str, device: str) -> None:
    if backend.startswith("triton") and device == "cpu" and dtype == "bfloat16":
        pytest.skip("Triton's interpreter computes wrong bfloat16 dots")


# The numerical contract

SHAPES = {
    "S1-d16": (2, 1, 1, 1, 1, 16),
    "S16-d32": (1, 2, 2, 16, 16, 32),
    "S97-d64": (2, 2, 2, 97, 97, 64),
    "S128-d128": (1, 2, 2, 128, 128, 128),
    "S257-d64": (1, 1, 1, 257, 257, 64),
    "S130-d256": (1, 1, 1, 130, 130, 256),
    "d40": (1, 1, 1, 70, 70, 40),
    "d59": (1, 1, 1, 130, 130, 59),
    "d80": (1, 1, 1, 65, 65, 80),
    "d96": (1, 1, 1, 129, 129, 96),
    "d111": (1, 1, 1, 100, 100, 111),
    "more-keys": (1, 2, 2, 37, 203, 64),
    "more-queries": (1, 2, 2, 203, 37, 64),
    "one-query": (2, 2, 2, 1, 300, 64),
    "one-key": (2, 2, 2, 150, 1, 32),
    "gqa": (1, 4, 2, 130, 100, 32),
    "mqa": (1, 4, 1, 65, 65, 64),
}
WHOLE_TILES = {  # for the handout's first kernel
    "one-tile-d16": (1, 1, 1, 64, 64, 16),
    "batch-d32": (2, 1, 1, 192, 192, 32),
    "heads-d128": (1, 2, 2, 128, 128, 128),
    "whole-tiles-more-keys": (2, 1, 1, 64, 256, 32),
    "whole-tiles-more-queries": (1, 2, 2, 256, 64, 32),
    "long-d64": (1, 1, 1, 512, 512, 64),
}
LONG = {"S1024-d64": (1, 1, 1, 1024, 1024, 64), "S1025-d128": (1, 1, 1, 1025, 1025, 128)}
CASES = [
    *(
        pytest.param(shape, backend, id=f"{name}-{backend}")
        for name, shape in SHAPES.items()
        for backend in BACKENDS
    ),
    *(
        pytest.param(shape, "triton_first", id=f"{name}-triton_first")
        for name, shape in WHOLE_TILES.items()
    ),
    *(
        pytest.param(
            shape, backend, id=f"{name}-{backend}", marks=[pytest.mark.slow] * (backend == "triton")
        )
        for name, shape in LONG.items()
        for backend in ("tiled", "triton")
    ),
]


@pytest.mark.slow_if(device="cpu", backend="triton", dtype="float16", is_causal=False)
@pytest.mark.slow_if(device="cpu", backend="reference", dtype="float16")
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "backend"), CASES)
def test_contract(shape, backend, dtype, is_causal, device):
    skip_what_cannot_run(backend, dtype, device)
    tensors = inputs(*shape, DTYPES[dtype], device)
    assert_contract(*tensors, is_causal=is_causal, backend=backend, enable_gqa=shape[1] != shape[2])


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_float64_where_it_is_taken(backend):
    q, k, v, grad_output = inputs(1, 2, 2, 97, 70, 24, torch.float64, "cpu")
    results = run(q, k, v, grad_output, backend=backend, is_causal=True)
    expected = compute_oracle(q, k, v, grad_output, is_causal=True).expected
    for name, result in results.items():
        torch.testing.assert_close(result, expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [0.01, 1.0, 3.0])
def test_scale(scale, backend, device):
    assert_contract(
        *inputs(1, 2, 2, 80, 80, 32, torch.float32, device),
        scale=scale,
        backend=backend,
        is_causal=True,
    )


@pytest.mark.parametrize("bug", BUGS)
def test_known_wrong_kernels_are_rejected(bug):
    tensors = inputs(2, 1, 1, 100, 100, 32, torch.float32, "cpu")
    oracle = compute_oracle(*tensors, is_causal=True)

    def worst(planted: str | None) -> float:
        results = wrong_attention(*(x[:, 0] for x in tensors), is_causal=True, bug=planted)
        return max(
            contract_errors(oracle, {name: x[:, None] for name, x in results.items()}).values()
        )

    assert worst(None) <= 1, "without a bug it must pass, or the rejection means nothing"
    assert worst(bug) > 1


def test_an_overflowing_yardstick_is_refused():
    q = torch.full((1, 1, 4, 64), 200.0, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"plain torch\.float16 attention is not finite in output"):
        compute_oracle(q, q, q)


# The handout's interface, as the course's own tests use it

FUNCTIONS = {
    "pytorch": adapters.get_flashattention_autograd_function_pytorch,
    "triton": adapters.get_flashattention_autograd_function_triton,
}


@pytest.mark.parametrize("around", ["nothing", "autocast", "compile"])
@pytest.mark.parametrize("implementation", FUNCTIONS)
def test_function_forward_and_backward(implementation, around, is_causal, device):
    """In float32 whatever is around it; it saves exactly one tensor of shape (batch, queries), the
    log-sum-exp.
    """
    attend = FUNCTIONS[implementation]().apply
    if around == "compile":
        attend = torch.compile(attend, backend="inductor" if device == "cuda" else "aot_eager")
    *tensors, grad_output = inputs(4, 1, 1, 128, 128, 64, torch.float32, device)
    leaves = [x[:, 0].requires_grad_() for x in tensors]
    with torch.autocast(device, dtype=torch.bfloat16, enabled=around == "autocast"):
        output = attend(*leaves, is_causal)
        saved = (
            []
            if around == "compile"
            else [x for x in output.grad_fn.saved_tensors if x.shape == (4, 128)]
        )
        grads = torch.autograd.grad(output, leaves, grad_output[:, 0])
    assert len(saved) == (around != "compile")
    results = {"output": output, **dict(zip(NAMES[2:], grads)), **dict(zip(["lse"], saved))}
    oracle = compute_oracle(*tensors, grad_output, is_causal=is_causal)
    assert_within(oracle, {name: x[:, None] for name, x in results.items()})


def test_gradcheck_of_the_pytorch_function(is_causal):
    leaves = [x[:, 0].requires_grad_() for x in inputs(2, 1, 1, 9, 9, 4, torch.float64, "cpu")[:3]]
    assert torch.autograd.gradcheck(
        lambda q, k, v: FlashAttentionPyTorch.apply(q, k, v, is_causal), leaves
    )


# Inputs as they come


HARD_VALUES = ["huge-logits", "hugely-negative-logits", "constant-rows", "outliers"]


def hard_inputs(
    kind: str, dtype: str, device: str, *, seqlen: int = 130, head_dim: int = 64, seed: int = 0
) -> list[Tensor]:
    q, k, v, grad_output, *others = (
        draw(1, 2, seqlen, head_dim, dtype=torch.float32, device=device, seed=10 * seed + number)
        for number in range(6)
    )
    if "logits" in kind:
        # A common offset of the scaled scores of +-1e5 (as far as float16's raw scores reach: 4e3),
        # over ordinary ones: the softmax is far from one-hot, and everything rides on how the
        # maximum is subtracted.
        offset = math.sqrt(4e3 * 8 if dtype == "float16" else 1e5 * 8)
        q[..., 0], k[..., 0] = offset, offset * (-1 if "negative" in kind else 1)
        if kind == "some-huge-logits":  # of two rows in three the scaled scores are ordinary
            q[:, :, 1::3, 0] = q[:, :, 2::3, 0] = 0.0
    elif kind == "constant-rows":
        q, k = torch.ones_like(q), torch.ones_like(k)
    else:
        q = q + (others[0] > 3.09) * 10 * others[1]  # about one in a thousand
    return [x.to(DTYPES[dtype]) for x in (q, k, v, grad_output)]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", HARD_VALUES)
def test_hard_values(kind, backend, dtype, device):
    assert_contract(*hard_inputs(kind, dtype, device), backend=backend, is_causal=True)


@pytest.mark.parametrize("backend", [*BACKENDS, "triton_first"])
def test_a_first_key_tile_of_scores_of_minus_infinity(backend, device):
    """Scores of -inf in a whole tile, before any finite one, made the running maximum -inf and the
    output NaN.
    """
    keys = 256 if backend == "triton_first" else 200  # which takes whole tiles
    q, k, v, _ = inputs(1, 2, 2, 128, keys, 32, torch.float32, device)
    q[..., 0] = q[..., 0].abs() + 0.1
    k[:, :, :128, 0] = -math.inf
    output, lse = flash_attention(q, k, v, backend=backend, return_lse=True)
    expected, expected_lse = attention_reference(q, k[:, :, 128:], v[:, :, 128:], return_lse=True)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_hot_rows_of_scores_of_1e5(backend, device):
    """Random scores of +-1e5 leave one key a row. Output and log-sum-exp stay within the contract.

    For the gradients the contract's bound is the bare 1e-5, made for inputs of order one: plain
    attention has no error here, its probabilities being exactly 0 and 1. A recomputed backward
    subtracts a float32 log-sum-exp of 1e5 (spaced by 0.008, in base 2 by 0.016), so its
    probabilities are good to 2 %, and dQ and dK, which are zero, keep the rounding of dP - D times
    the inputs' size of 300.
    """
    q, k, v, grad_output = inputs(1, 2, 2, 130, 130, 64, torch.float32, device)
    q, k = q * 300, k * 300
    results = run(q, k, v, grad_output, backend=backend, is_causal=True)
    oracle = compute_oracle(q, k, v, grad_output, is_causal=True)
    errors = contract_errors(oracle, results)
    assert max(errors["output"], errors["lse"]) <= 1, errors
    assert max(errors["grad_q"], errors["grad_k"]) <= 300, errors
    expected = oracle.expected["grad_v"]
    assert (results["grad_v"] - expected).abs().max() <= 0.02 * expected.abs().max()


@pytest.mark.parametrize("backend", ["tiled", "triton"])
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_of_enormous_scores_stay_finite(masked, backend, device):
    """Of scores of 1e9 a log-sum-exp is rounded by more than 100: recomputed probabilities were up
    to exp(100).
    """
    q, k, v, grad_output = inputs(1, 2, 2, 130, 130, 32, torch.float32, device)
    mask = BlockMask.causal(130, 130, device=device) if masked else None
    results = run(q * 2e4, k * 2e4, v, grad_output, backend=backend, block_mask=mask)
    assert all(results[name].isfinite().all() for name in ("grad_q", "grad_k", "grad_v"))
    # probabilities are at most 1
    assert results["grad_v"].abs().max() <= grad_output.abs().sum(dim=-2).max()


@pytest.mark.parametrize("backend", ["tiled", "triton"])
def test_dead_tiles_are_never_read(backend, device):
    """Keys that no query may see can hold NaN: results are bit-identical, and their own gradients
    are zero.
    """
    q, k, v, grad_output = inputs(1, 2, 2, 64, 300, 64, torch.float32, device)
    clean = run(q, k, v, grad_output, backend=backend, is_causal=True)
    for x in (k, v):
        x[:, :, 128:] = math.nan
    dirty = run(q, k, v, grad_output, backend=backend, is_causal=True)
    assert_equal(dirty, {name: clean[name] for name in ("output", "lse", "grad_q")})
    for name in ("grad_k", "grad_v"):
        assert torch.equal(clean[name][:, :, :128], dirty[name][:, :, :128])
        assert not clean[name][:, :, 64:].any(), "keys past the last query get no gradient"


def test_columns_farther_apart_than_32_bits_reach(device):
    """Their distance was taken in 32 bits, and another tensor's numbers were read."""
    head_dim = 64
    apart = -(-(2**31) // (head_dim - 1))
    # of which few pages are used
    memory = torch.empty(apart * (head_dim - 1) + 8, dtype=torch.float16, device=device)
    q, k, v, grad_output = inputs(1, 1, 1, 8, 8, head_dim, torch.float16, device)
    far = memory.as_strided((1, 1, 8, head_dim), (0, 0, 1, apart)).copy_(q)
    assert_equal(*(run(x, k, v, grad_output, backend="triton") for x in (far, q)))


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("head_dim", [16, 64])
def test_float32_sums_of_a_long_sequence(head_dim):
    """dK and dV of a key are sums over all later queries. With every product chained onto one
    accumulator the rounding of 32768 of them left the contract, by up to 1.2 times its bound.
    """
    assert_contract(
        *inputs(1, 1, 1, 32768, 32768, head_dim, torch.float32, "cuda"),
        is_causal=True,
        backend="triton",
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.filterwarnings("error:.*does not fit this GPU")
def test_every_shipped_configuration_is_bit_reproducible(head_dim, dtype, is_causal):
    """Each fits and is right on ragged lengths. Miscompiled kernels on sm_90 corrupt results now
    and then: 200 repeats of each, bit for bit.
    """
    tensors = inputs(1, 2, 2, 515, 515, head_dim, DTYPES[dtype], "cuda")
    oracle = compute_oracle(*tensors, is_causal=is_causal)
    for config in shipped_configs(head_dim, DTYPES[dtype], "cuda"):
        call = partial(run, *tensors, backend="triton", is_causal=is_causal, config=config)
        assert_within(oracle, call())
        assert_repeats(call, 200)


@pytest.mark.gpu
@pytest.mark.alone
def test_more_batches_than_a_grid_dimension_of_65535():
    assert_contract(
        *inputs(70_000, 1, 1, 3, 5, 16, torch.bfloat16, "cuda"), backend="triton", is_causal=True
    )


# Autograd's corners, torch.compile, threads


def test_a_call_of_any_length_is_compiled_once():
    """The back end's reason holds a size; in words it would be a constant of what is compiled."""
    counter = CompileCounter()
    compiled = torch.compile(
        partial(flash_attention, is_causal=True), dynamic=True, fullgraph=True, backend=counter
    )
    for length in (16, 40, 77):
        q, k, v, _ = inputs(1, 2, 2, length, length, 32, torch.float32, "cpu")
        torch.testing.assert_close(compiled(q, k, v), flash_attention(q, k, v, is_causal=True))
    assert counter.frame_count == 1


@pytest.mark.skipif(not has_cxx_compiler(), reason="no C++ compiler")
def test_compiled_stages_meet_the_contract(device):
    """`compiled` through the public function, and the tiled stage with its two tile steps compiled."""
    tensors = inputs(1, 2, 2, 150, 150, 32, torch.float32, device)
    assert_contract(*tensors, backend="compiled", is_causal=True)
    results = with_gradients(
        lambda *x: FlashAttentionPyTorch.apply(*x, True, None, True), tensors[:3], tensors[3]
    )
    assert_within(
        compute_oracle(*tensors, is_causal=True), dict(zip(("output", *NAMES[2:]), results))
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_grad_saves_nothing(backend, device):
    q, k, v, _ = (x.requires_grad_() for x in inputs(1, 1, 1, 40, 40, 16, torch.float32, device))
    saved: list[Tensor] = []
    with (
        torch.no_grad(),
        torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x),
    ):
        output = flash_attention(q, k, v, backend=backend)
    assert not saved and not output.requires_grad


@pytest.mark.parametrize("kind", ["tiled", "triton", "pytorch function", "triton function"])
def test_double_backward_is_refused(kind, device):
    """Also where a loss holds the output itself: a constant gradient in it once trained nothing,
    without a word.
    """
    name, _, is_function = kind.partition(" ")
    attend = FUNCTIONS[name]().apply if is_function else partial(flash_attention, backend=name)
    q, k, v, _ = (x.requires_grad_() for x in inputs(1, 1, 1, 8, 8, 16, torch.float32, device))
    output = attend(q, k, v)
    (grad_q,) = torch.autograd.grad(output.sum(), q, create_graph=True)
    with pytest.raises(
        NotImplementedError,
        match="double backward is not supported here; backend='reference' has it",
    ):
        (output.sum() + grad_q.square().sum()).backward()


def test_interpreted_calls_of_several_threads_wait_for_one_another():
    """The interpreter's place in a grid is global: threads computed each other's tiles."""
    calls = [
        inputs(1, 2, 2, length, length, 16, torch.float32, "cpu")[:3] for length in (70, 83, 96)
    ]
    expected = [flash_attention(*call, backend="triton") for call in calls]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(lambda call: flash_attention(*call, backend="triton"), calls * 3))
    finally:
        sys.setswitchinterval(before)
    assert all(map(torch.equal, found, expected * 3))


# Refusals


def good() -> dict[str, Tensor]:
    return dict(zip("qkv", inputs(2, 4, 4, 8, 9, 16, torch.float32, "cpu")[:3]))


MASK = BlockMask.causal(8, 9, block_size=64)
BOOLS = torch.ones(8, 9, dtype=torch.bool)
TILES = AttentionConfig()
RIGHT = {
    "backend": "triton",
    "is_causal": True,
    "enable_gqa": True,
    "scale": 1.0,
    "deterministic": False,
}
REFUSALS = {
    "not-a-tensor": ({"k": [1.0]}, r"TypeError: k must be a tensor of float64 or .*, got list"),
    "integers": ({"q": torch.ones(2, 4, 8, 16).long()}, r"TypeError: q must be a tensor of .*, got torch"),
    "two-dims": ({"v": torch.ones(9, 16)}, r"ValueError: v must have shape \(\.\.\., heads, seq, head_dim\), "),
    "mixed-dtypes": ({"k": torch.ones(2, 4, 9, 16).half()}, r"TypeError: k must have q's dtype torch\.float32"),
    "mixed-devices": ({"v": torch.ones(2, 4, 9, 16, device="meta")}, r"ValueError: v must be on q's device cpu"),
    "heads": ({"k": torch.ones(2, 2, 9, 16)}, r"ValueError: k must have q's 4 heads \(or pass enable_gqa=True\)"),
    "gqa-heads": ({"k": torch.ones(2, 3, 9, 16), "enable_gqa": True}, r"ValueError: .*heads that divides q's 4, got 3"),
    "key-head-dim": ({"k": torch.ones(2, 4, 9, 32)}, r"ValueError: k must have shape \(2, 4, 9, 16\)"),
    "value-head-dim": ({"v": torch.ones(2, 4, 9, 8)}, r"ValueError: .*a value head dim other than the key's"),
    **{
        f"scale-{scale}": ({"scale": scale}, r"ValueError: scale must be positive and a normal float32, times log2")
        for scale in (0.0, -1.0, math.nan, math.inf, 1e-38, 3e38, 10**400)
    },
    "is_causal-1": (RIGHT | {"is_causal": 1}, "TypeError: is_causal must be a bool, got 1"),
    "is_causal-list": (RIGHT | {"is_causal": []}, r"TypeError: is_causal must be a bool, got \[\]"),
    "enable_gqa-1": (RIGHT | {"enable_gqa": 1}, "TypeError: enable_gqa must be a bool, got 1"),
    "scale-True": (RIGHT | {"scale": True}, "TypeError: scale must be a float or None, got bool"),
    "scale-list": (RIGHT | {"scale": [1.0]}, "TypeError: scale must be a float or None, got list"),
    "deterministic-0": (RIGHT | {"deterministic": 0}, "TypeError: deterministic must be a bool, got 0"),
    "nested": (
        {"k": torch.nested.nested_tensor([torch.ones(4, 9, 16)] * 2, layout=torch.jagged)},
        r"TypeError: k must be a dense strided tensor, got a nested one",
    ),
    "meta": (
        dict.fromkeys("qkv", torch.ones(2, 4, 8, 16, device="meta")),
        r"ValueError: q must be on a cpu or cuda device, got meta",
    ),
    "mask-type": ({"block_mask": BOOLS}, r"TypeError: block_mask must be a BlockMask or None, got Tensor"),
    "mask-causal": (
        {"block_mask": MASK, "is_causal": True},
        r"ValueError: is_causal must be False with a mask, got True: put it into the mask, as in attn_mask.tril\(\)",
    ),
    "mask-device": ({"block_mask": MASK.to("meta")}, "ValueError: block_mask must be on q's device cpu, got meta"),
    "mask-lengths": (
        {"block_mask": BlockMask.causal(9)},
        "ValueError: block_mask must be made for 8 queries and 9 keys, got one for 9 and 9",
    ),
    "mask-batch": (
        {"block_mask": BlockMask.from_dense(BOOLS.expand(3, 1, -1, -1))},
        "ValueError: block_mask must have batch 1 or q's 2, got 3",
    ),
    "mask-heads": (
        {"block_mask": BlockMask.from_dense(BOOLS.expand(2, 2, -1, -1))},
        "ValueError: block_mask must have heads 1 or q's 4, got 2",
    ),
    "mask-small-tiles": (
        {"block_mask": BlockMask.causal(8, 9, block_size=32), "backend": "triton"},
        r"ValueError: .*triton walks lists of tiles of at least \(64, 64\), and the mask's are \(32, 32\)",
    ),
    "attn-mask-floats": ({"attn_mask": BOOLS.float()}, "TypeError: attn_mask must be a bool.*additive masks are not"),
    "attn-mask-keys": ({"attn_mask": BOOLS[:, :7]}, r"ValueError: .*broadcast to .* = \(2, 4, 8, 9\), .*got \(8, 7\)"),
    "attn-mask-rank": ({"attn_mask": BOOLS.expand(2, 2, 4, 8, 9)}, "ValueError: attn_mask must broadcast"),
    "attn-mask-twice": (
        {"attn_mask": BOOLS, "block_mask": MASK}, "ValueError: attn_mask must be None with a block_mask, got both"
    ),
    "config-type": ({"backend": "triton", "config": "x"}, "TypeError: config must be an AttentionConfig or None"),
    "config-tiled": ({"backend": "tiled", "config": TILES}, "ValueError: config chooses .*'triton', got .*'tiled'"),
    "config-hopper": ({"backend": "hopper", "config": TILES}, "ValueError: config chooses .*'triton', got .*'hopper'"),
}  # fmt: skip


@pytest.mark.parametrize("change, message", REFUSALS.values(), ids=REFUSALS.keys())
def test_wrong_arguments_are_named(change, message):
    """Also those that equal the right ones of a call before: the choice of a back end is kept by
    arguments.
    """
    flash_attention(**good(), **RIGHT)
    assert_refused(message, flash_attention, **good() | change)


@pytest.mark.parametrize("implementation", FUNCTIONS)
def test_functions_check_before_they_launch(implementation):
    """Unchecked, a kernel read past the end of a short v and returned what lay there."""
    attend = FUNCTIONS[implementation]().apply
    q, k, v = (torch.ones(1, rows, 16) for rows in (4, 64, 8))
    assert_refused("ValueError: v must have k's shape", attend, q, k, v)
    assert_refused(
        "ValueError: scale must be positive and a normal float32.* got -1",
        attend,
        q,
        k,
        k,
        False,
        -1.0,
    )


@pytest.mark.parametrize("kernel", ["forward", "dkdv", "dq"])
def test_tiles_that_triton_miscompiles_are_refused(kernel):
    """On sm_90 triton 3.6 corrupts results of 16-bit dots of 16 and 32 rows, without a word."""
    from cs336_systems.attention.triton.passes import kernel_config

    q, name = torch.ones(1, 1, 8, 64, dtype=torch.bfloat16), f"portable_{kernel}_64x32_w4_s1"
    with pytest.raises(
        ValueError, match=r"tiles of at least 64 rows for torch\.bfloat16 on sm90, .*got portable_"
    ):
        kernel_config(kernel, q, q, name, capability=(9, 0))
    assert kernel_config(kernel, q, q, name, capability=(8, 0)).name == name
    assert kernel_config(kernel, q.float(), q.float(), name, capability=(9, 0)).name == name


@pytest.mark.parametrize("kernel", ["dkdv", "dq"])
def test_query_tiles_longer_than_the_padding_of_rows_are_refused_in_the_backward(kernel):
    """They read L and delta past their end."""
    q, k, v = (x.requires_grad_() for x in good().values())
    config = AttentionConfig(**{kernel: KernelConfig.from_name(f"portable_{kernel}_512x16_w4_s1")})
    output = flash_attention(q, k, v, backend="triton", config=config)
    with pytest.raises(
        ValueError, match="query tiles of at most 256 rows in the backward, got portable_.*512x16"
    ):
        output.sum().backward()


@pytest.mark.gpu
def test_triton_refuses_cpu_tensors_on_a_gpu_machine():
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        flash_attention(**good(), backend="triton")


# The handout's first kernel


def test_the_first_kernel_saves_one_tensor_of_a_number_a_query(device):
    q, k, v, _ = (x.requires_grad_() for x in inputs(2, 3, 3, 64, 64, 16, torch.float32, device))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved.append(x.shape) or x, lambda x: x
    ):
        flash_attention(q, k, v, backend="triton_first")
    assert sorted(map(len, saved)) == [3, 4, 4, 4, 4] and (2, 3, 64) in saved


@pytest.mark.skipif(torch.cuda.is_available(), reason="of tensors on a CPU, interpreted")
@pytest.mark.parametrize(("q", "k", "dtype", "message"), [
    ((1, 64, 16), (1, 100, 16), torch.float32, r"whole tiles of 64, .*100, 16\)"),
    ((1, 64, 40), (1, 64, 40), torch.float32, r"head dims of \(16, 32, 64, 128\) .* q .*64, 40\)"),
    ((70000, 1, 64, 16), (70000, 1, 64, 16), torch.float32, "65,535 in the batch at most"),
    ((1, 64, 16), (1, 64, 16), torch.float64, "triton takes float32, float16, bfloat16, not float64"),
    ((1, 64, 16), (1, 64, 16), torch.bfloat16, "wrong bfloat16 products"),
    ((2, 64, 16), (1, 64, 16), torch.float32, "k must have q's 2 heads"),
], ids=str)  # fmt: skip
def test_the_first_kernel_refuses_what_it_cannot(q, k, dtype, message):
    q, k = (torch.zeros(1, dtype=dtype).expand(shape) for shape in (q, k))
    assert_refused(f"ValueError: .*{message}", flash_attention, q, k, k, backend="triton_first")


def test_the_first_kernel_refuses_grouped_heads():
    from cs336_systems.attention.triton.first import flash_forward_first

    q, k = torch.zeros(1, 4, 64, 16), torch.zeros(1, 2, 64, 16)
    assert_refused(
        "ValueError: .*as many key heads as query heads", flash_forward_first, q, k, k, False, 1.0
    )
