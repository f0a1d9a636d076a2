"""What every way through attention keeps: dense, along a mask's lists, over packed documents."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from cs336_systems.attention import BlockMask, attention_reference, flash_attention, flash_attention_varlen
from cs336_systems.attention.backends import available_backends
from cs336_systems.attention.contract import compute_oracle, contract_errors
from tests.covered import ATTENTION
from tests.test_s4_attention import (
    BACKENDS,
    DEVICES,
    DTYPES,
    HARD_VALUES,
    NAMES,
    REPEATED,
    all_results,
    assert_repeats,
    draw,
    hard_inputs,
    inputs,
    shipped_configs,
    skip_what_cannot_run,
)

COVERS = ATTENTION

PATHS = ["dense", "block_mask", "packed"]
LISTED = [(path, backend) for path in PATHS[1:] for backend in ("tiled", "triton")]
CALLS = [*(("dense", backend) for backend in BACKENDS), *LISTED]
WHOLE = [call for call in CALLS if call != ("packed", "tiled")]  # which loops over documents


def place(path: str, seqlen: int, device: str) -> Any:
    """What an attention call is told: the lists of a causal mask, or where two documents end."""
    if path == "block_mask":
        return BlockMask.causal(seqlen, block_size=64, device=device)
    return torch.tensor([0, seqlen // 3, seqlen], dtype=torch.int32, device=device)


def attend(path: str, where: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp) of causal attention over (1, heads, seqlen, head_dim) inputs."""
    options |= {"enable_gqa": True, "return_lse": True}
    if path == "packed":
        rows, seqlen = [x[0].transpose(0, 1) for x in (q, k, v)], q.shape[2]
        output, lse = flash_attention_varlen(*rows, where, where, seqlen, seqlen, is_causal=True, **options)
        return output.transpose(0, 1)[None], lse[None]
    masks = {"block_mask": where} if path == "block_mask" else {"is_causal": True}
    return flash_attention(q, k, v, **masks, **options)


def token_mask(path: str, seqlen: int, device: str) -> Tensor:
    """The pairs that `attend` attends."""
    causal = torch.ones(seqlen, seqlen, dtype=torch.bool, device=device).tril()
    document = torch.arange(seqlen, device=device) < seqlen // 3
    return causal & (document[:, None] == document) if path == "packed" else causal


def results_of(
    path: str, where: Any, tensors: list[Tensor], *upstream: Tensor, call: Any = attend, **options: Any
) -> dict[str, Tensor]:
    return all_results(partial(call, path, where, **options), tensors, *upstream)


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    for name in NAMES:
        torch.testing.assert_close(ours[name], theirs[name], rtol=tolerance, atol=1e-5 if tolerance else 0, msg=name)


LAYOUTS = ["transposed", "fused", "expanded", "offset", "unaligned", "head-dim-strided"]


def laid_out(
    layout: str, batch: int, heads: int, seqlen: int, head_dim: int, dtype: torch.dtype, device: str
) -> list[Tensor]:
    """q, k, v and an upstream gradient of shape (batch, heads, seqlen, head_dim), not contiguous.

    Expanded: as of one key head, and of `output.sum().backward()`, with strides of 0.
    """

    def make(*size: int) -> list[Tensor]:
        return [draw(*size, dtype=dtype, device=device, seed=seed) for seed in range(4)]

    if layout == "transposed":
        return [x.transpose(1, 2) for x in make(batch, seqlen, heads, head_dim)]
    if layout == "fused":
        return [*make(batch, seqlen, heads, 4 * head_dim)[0].transpose(1, 2).split(head_dim, dim=-1)]
    if layout == "expanded":
        *tensors, grad_output = (x.expand(-1, heads, -1, -1) for x in make(batch, 1, seqlen, head_dim))
        return [*tensors, torch.ones((), dtype=dtype, device=device).expand(grad_output.shape)]
    if layout == "head-dim-strided":
        return [x.transpose(2, 3) for x in make(batch, heads, head_dim, seqlen)]
    skipped = 8 if layout == "offset" else 1
    return [x[..., 3:, skipped:] for x in make(batch, heads, seqlen + 3, head_dim + skipped)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("path", "backend"), CALLS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_equal_contiguous(layout, path, backend, device):
    *tensors, grad_output = laid_out(layout, 1 if path == "packed" else 2, 2, 97, 32, torch.float32, device)
    call = partial(results_of, path, place(path, 97, device), backend=backend)
    assert_same(call(tensors, grad_output), call([x.contiguous() for x in tensors], grad_output.contiguous()))


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("path", PATHS)
def test_offsets_beyond_32_bits(path):
    storage = torch.empty(130 * 2**25, dtype=torch.bfloat16, device="cuda")  # 8.1 GiB
    dense = inputs(1, 1, 1, 129, 129, 64, torch.bfloat16, "cuda")
    spread = [storage.as_strided((1, 1, 129, 64), (1, 1, 2**25, 1), 64 * index) for index in range(4)]
    for x, y in zip(spread, dense):
        x.copy_(y)
    call = partial(results_of, path, place(path, 129, "cuda"), backend="triton")
    assert_same(call(spread[:3], spread[3]), call(dense[:3], dense[3]), tolerance=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("path", "backend"), [*CALLS, ("packed", "auto")])
def test_gradients_flow_through_the_lse(path, backend, device):
    *tensors, grad_output = inputs(1, 2, 2, 90, 90, 32, torch.float32, device)
    grad_lse = draw(1, 2, 90, dtype=torch.float32, device=device, seed=7)
    ours = results_of(path, place(path, 90, device), tensors, grad_output, grad_lse, backend=backend)
    leaves = [x.double().requires_grad_() for x in tensors]
    exact = attention_reference(*leaves, mask=token_mask(path, 90, device), return_lse=True)
    grads = torch.autograd.grad(exact, leaves, (grad_output.double(), grad_lse.double()))
    assert_same({name: x.double() for name, x in ours.items()}, dict(zip(NAMES, (*exact, *grads))), tolerance=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("path", "backend"), [*WHOLE, ("dense", "auto")])
def test_compile_fullgraph_around_the_operator(path, backend, device):
    """torch.compile takes a call whole, forward and backward; aot_eager needs no compiler on the machine."""
    *tensors, grad_output = inputs(1, 2, 2, 70, 70, 32, torch.float32, device)
    torch.compiler.reset()  # calls of other ways count as recompilations of the same code
    compiled = torch.compile(attend, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    results = partial(results_of, path, place(path, 70, device), tensors, grad_output, backend=backend)
    assert_same(results(), results(call=compiled))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("path", "backend"), WHOLE[1:])
def test_operator_check(path, backend, device):
    """PyTorch's own checks of a custom operator, schema and fake tensors; and its own before it launches."""
    import cs336_systems.attention.triton.function  # noqa: F401 (registers the operators)

    q, k, v, _ = (x.requires_grad_() for x in inputs(1, 2, 2, 20, 20, 16, torch.float32, device))
    where = place(path, 20, device)
    if path == "packed":
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    name, more = {
        ("dense", "tiled"): ("tiled", [None]),
        ("block_mask", "tiled"): ("tiled", [token_mask(path, 20, device)]),
        ("dense", "triton"): ("triton", []),
        ("block_mask", "triton"): ("block_sparse", getattr(where, "lists", [])),
        ("packed", "triton"): ("varlen", [where, where, 20, 20]),
    }[path, backend]
    more = (*more, path != "block_mask", 0.25, "")
    operator = getattr(torch.ops.cs336_systems, f"{name}_attention").default
    torch.library.opcheck(operator, (q, k, v, *more), test_utils=("test_schema", "test_faketensor"))
    with pytest.raises(ValueError, match="v must have k's shape"):
        operator(q, k, v[..., :8], *more)
    with pytest.raises(ValueError, match=r"q must have shape \("):
        operator(q[0], k[0], v[0], *more)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("path", "backend"), CALLS)
def test_autocast_casts_like_sdpa(path, backend, device):
    """Also where only some inputs are of low precision, as after a float32 rotary embedding. Sums stay in float32:
    autocast turned the tiled stage's matmuls, and the reference's log-sum-exp, into 16-bit ones."""
    dtype = torch.float16 if device == "cpu" and backend == "triton" else torch.bfloat16
    q, k, v, grad_output = inputs(1, 2, 2, 150, 150, 32, dtype, device)
    tensors, where = [q * 4, k * 4, v], place(path, 150, device)

    def under_autocast(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        with torch.autocast(device, dtype=dtype):
            return attend(*arguments, **options)

    mixed, _ = under_autocast(path, where, tensors[0].float(), *tensors[1:], backend=backend)
    results = results_of(path, where, tensors, grad_output, call=under_autocast, backend=backend)
    assert torch.equal(mixed, results["output"]) and results["lse"].dtype == torch.float32
    oracle = compute_oracle(*tensors, grad_output, mask=token_mask(path, 150, device))
    errors = contract_errors(oracle, results)
    assert max(errors.values()) <= 1, errors


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("path", "backend"), CALLS)
def test_lazily_negated_tensors_are_read_with_their_sign(path, backend, device):
    """The imaginary part of a conjugate lies in memory with the other sign, where kernels look."""
    numbers = torch.randn(4, 1, 2, 20, 16, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)).to(device)
    lazy = [x.conj().imag for x in numbers]
    assert all(x.detach().is_neg() for x in lazy)
    call = partial(results_of, path, place(path, 20, device), backend=backend)
    assert_same(call(lazy[:3], lazy[3]), call([x.resolve_neg() for x in lazy[:3]], lazy[3].resolve_neg()))


@pytest.mark.parametrize(("path", "backend"), CALLS[1:])
def test_forward_mode_is_refused(path, backend):
    """The tangent of a custom backward's output was zero, silently."""
    q, k, v, _ = inputs(1, 2, 2, 20, 20, 16, torch.float32, "cpu")
    where = place(path, 20, "cpu")
    with pytest.raises(NotImplementedError, match="forward-mode AD is not supported here"):
        torch.func.jvp(lambda q: attend(path, where, q, k, v, backend=backend)[0], (q,), (q,))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("path", "backend", "compiled"),
    [*((*call, False) for call in LISTED), *((*call, True) for call in LISTED if call[0] == "block_mask")],
)
def test_what_inference_mode_has_made_trains(path, backend, device, compiled):
    """As a mask that an evaluation has made and a cache has kept: autograd saves no tensor of inference mode."""
    *tensors, grad_output = inputs(1, 2, 2, 70, 70, 32, torch.float32, device)
    with torch.inference_mode():
        inferred = place(path, 70, device)
    torch.compiler.reset()
    call = torch.compile(attend, backend="aot_eager") if compiled else attend
    results = [
        results_of(path, where, tensors, grad_output, call=call, backend=backend)
        for where in (place(path, 70, device), inferred)
    ]
    assert_same(*results, tolerance=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim, device", REPEATED)
@pytest.mark.parametrize("path", PATHS[1:])
def test_repeats_are_bit_equal(path, head_dim, dtype, device):
    """Every shipped configuration, 200 times on a GPU."""
    skip_what_cannot_run("triton", dtype, device)
    seqlen = 450 if device == "cuda" else 70
    *tensors, grad_output = inputs(1, 2, 1, seqlen, seqlen, head_dim, DTYPES[dtype], device)
    call = partial(results_of, path, place(path, seqlen, device), tensors, grad_output, backend="triton")
    for config in shipped_configs(head_dim, DTYPES[dtype], device):
        assert_repeats(partial(call, config=config), 200 if device == "cuda" else 1)


@pytest.mark.parametrize("kind", HARD_VALUES)
@pytest.mark.parametrize(("path", "backend"), [("dense", "compiled"), ("block_mask", "triton"), ("packed", "triton")])
def test_k7_hard_values(path, backend, kind):
    """Beside `test_hard_values` of the dense back ends."""
    if (why := available_backends()[backend]) != "ok":
        pytest.skip(why)
    *tensors, grad_output = hard_inputs(kind, "float32", "cpu")
    seqlen = tensors[0].shape[2]
    results = results_of(path, place(path, seqlen, "cpu"), tensors, grad_output, backend=backend)
    oracle = compute_oracle(*tensors, grad_output, mask=token_mask(path, seqlen, "cpu"))
    errors = contract_errors(oracle, results)
    assert max(errors.values()) <= 1, errors
