"""What every way through attention keeps: dense, along a mask's lists, over packed documents."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from cs336_systems.attention import (
    BlockMask,
    attention_reference,
    flash_attention,
    flash_attention_varlen,
)
from cs336_systems.attention.call import Call
from cs336_systems.attention.choose import available_backends
from cs336_systems.attention.contract import compute_oracle
from cs336_systems.attention.tiled import tiled_attention
from cs336_systems.attention.triton.launch import describable
from tests.covered import ATTENTION
from tests.test_s4_attention import (
    BACKENDS,
    DTYPES,
    FUNCTIONS,
    HARD_VALUES,
    NAMES,
    all_results,
    assert_refused,
    assert_repeats,
    assert_within,
    draw,
    hard_inputs,
    inputs,
    run,
    shipped_configs,
    tiles,
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


def attend(
    path: str, where: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp) of causal attention over (1, heads, seqlen, head_dim) inputs."""
    options |= {"enable_gqa": True, "return_lse": True}
    if path == "packed":
        rows, seqlen = [x[0].transpose(0, 1) for x in (q, k, v)], q.shape[2]
        output, lse = flash_attention_varlen(
            *rows, where, where, seqlen, seqlen, is_causal=True, **options
        )
        return output.transpose(0, 1)[None], lse[None]
    masks = {"block_mask": where} if path == "block_mask" else {"is_causal": True}
    return flash_attention(q, k, v, **masks, **options)


def token_mask(path: str, seqlen: int, device: str) -> Tensor:
    """The pairs that `attend` attends."""
    causal = torch.ones(seqlen, seqlen, dtype=torch.bool, device=device).tril()
    document = torch.arange(seqlen, device=device) < seqlen // 3
    return causal & (document[:, None] == document) if path == "packed" else causal


def results_of(
    path: str,
    where: Any,
    tensors: list[Tensor],
    *upstream: Tensor,
    call: Any = attend,
    **options: Any,
) -> dict[str, Tensor]:
    return all_results(partial(call, path, where, **options), tensors, *upstream)


def assert_same(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 1e-5
) -> None:
    for name in NAMES:
        torch.testing.assert_close(
            ours[name], theirs[name], rtol=tolerance, atol=1e-5 if tolerance else 0, msg=name
        )


# Strides

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "fused": lambda x: torch.cat([x, x, x], dim=-1)[..., x.shape[-1] : 2 * x.shape[-1]],
    "expanded": lambda x: x[:, :1].expand(x.shape),  # as of one key head
    "offset": lambda x: torch.nn.functional.pad(x, (8, 0, 3, 0))[..., 3:, 8:],
    "unaligned": lambda x: torch.nn.functional.pad(x, (1, 0, 3, 0))[..., 3:, 1:],
    "head-dim-strided": lambda x: x.mT.contiguous().mT,
}


def laid_out(
    layout: str, batch: int, heads: int, seqlen: int, head_dim: int, dtype: torch.dtype, device: str
) -> list[Tensor]:
    """q, k, v and an upstream gradient of shape (batch, heads, seqlen, head_dim), not contiguous."""
    tensors = [
        draw(batch, heads, seqlen, head_dim, dtype=dtype, device=device, seed=seed)
        for seed in range(4)
    ]
    if layout == "expanded":  # as of `output.sum().backward()`, with strides of 0
        tensors[3] = torch.ones((), dtype=dtype, device=device).expand(tensors[3].shape)
    if layout == "mixed":  # so that no operand's strides serve another
        return [
            LAYOUTS[name](x)
            for name, x in zip(("transposed", "fused", "offset", "head-dim-strided"), tensors)
        ]
    return [LAYOUTS[layout](x) for x in tensors]


@pytest.mark.parametrize(("path", "backend"), [*CALLS, ("dense", "triton_first")])
@pytest.mark.parametrize("layout", [*LAYOUTS, "mixed"])
def test_any_strides_equal_contiguous(layout, path, backend, device):
    """In bits where kernels are interpreted: compiled ones' sums may follow the strides, if not the
    first kernel's of a fused projection; PyTorch's matmuls do as well.
    """
    seqlen = 128 if backend == "triton_first" else 97
    *tensors, grad_output = laid_out(
        layout, 1 if path == "packed" else 2, 2, seqlen, 32, torch.float32, device
    )
    call = partial(results_of, path, place(path, seqlen, device), backend=backend)
    ours, theirs = (
        call(tensors, grad_output),
        call([x.contiguous() for x in tensors], grad_output.contiguous()),
    )
    assert_same(ours, theirs)
    if backend.startswith("triton") and (
        device == "cpu" or (backend, layout) == ("triton_first", "fused")
    ):
        assert torch.equal(ours["output"], theirs["output"]) and torch.equal(
            ours["lse"], theirs["lse"]
        )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tma_reads_any_strides_that_it_can(layout, path, device):
    """A gradient that it cannot read is copied, an input refused; of packed documents the backward
    alone reads q.
    """
    *tensors, grad_output = laid_out(
        layout, 1 if path == "packed" else 2, 2, 70, 64, torch.float16, device
    )
    contiguous = [x.contiguous() for x in tensors]
    config = tiles("64x64_w4_s2_tma", device)
    call = partial(results_of, path, place(path, 70, device), backend="triton", config=config)
    expected = call(contiguous, grad_output.contiguous())
    assert_same(call(contiguous, grad_output), expected, tolerance=0)
    if describable(*tensors):
        assert_same(call(tensors, grad_output), expected, tolerance=0)
        return
    message = "ValueError: .*_tma reads tiles by TMA, which needs {} with contiguous rows at multiples of 16 bytes, got"
    for operand, name in enumerate("qkv"):
        given = [*contiguous[:operand], tensors[operand], *contiguous[operand + 1 :]]
        assert_refused(message.format(name), call, given, grad_output)
        if path == "packed" and name == "q":
            output, _ = attend(
                path, place(path, 70, device), *given, backend="triton", config=config
            )
            assert torch.equal(output, expected["output"])


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("path", PATHS)
def test_offsets_beyond_32_bits(path):
    storage = torch.empty(130 * 2**25, dtype=torch.bfloat16, device="cuda")  # 8.1 GiB
    dense = inputs(1, 1, 1, 129, 129, 64, torch.bfloat16, "cuda")
    spread = [
        storage.as_strided((1, 1, 129, 64), (1, 1, 2**25, 1), 64 * index) for index in range(4)
    ]
    for x, y in zip(spread, dense):
        x.copy_(y)
    call = partial(results_of, path, place(path, 129, "cuda"), backend="triton")
    assert_same(call(spread[:3], spread[3]), call(dense[:3], dense[3]), tolerance=0)


@pytest.mark.parametrize(("path", "backend"), [*CALLS, ("packed", "auto")])
def test_gradients_flow_through_the_lse(path, backend, device):
    *tensors, grad_output = inputs(1, 2, 2, 90, 90, 32, torch.float32, device)
    grad_lse = draw(1, 2, 90, dtype=torch.float32, device=device, seed=7)
    ours = results_of(
        path, place(path, 90, device), tensors, grad_output, grad_lse, backend=backend
    )
    leaves = [x.double().requires_grad_() for x in tensors]
    exact = attention_reference(*leaves, mask=token_mask(path, 90, device), return_lse=True)
    grads = torch.autograd.grad(exact, leaves, (grad_output.double(), grad_lse.double()))
    assert_same(
        {name: x.double() for name, x in ours.items()},
        dict(zip(NAMES, (*exact, *grads))),
        tolerance=1e-4,
    )


@pytest.mark.parametrize(("path", "backend"), [*WHOLE, ("dense", "auto")])
def test_compile_fullgraph_around_the_operator(path, backend, device):
    """torch.compile takes a call whole, forward and backward; aot_eager needs no compiler on the
    machine.
    """
    *tensors, grad_output = inputs(1, 2, 2, 70, 70, 32, torch.float32, device)
    torch.compiler.reset()  # calls of other ways count as recompilations of the same code
    compiled = torch.compile(
        attend, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager"
    )
    results = partial(
        results_of, path, place(path, 70, device), tensors, grad_output, backend=backend
    )
    assert_same(results(), results(call=compiled))


@pytest.mark.parametrize(("path", "backend"), WHOLE[1:])
def test_operator_check(path, backend, device):
    """PyTorch's own checks of a custom operator, schema and fake tensors; and its own before it
    launches.
    """
    import cs336_systems.attention.triton.passes  # noqa: F401 (registers the operators)

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
    more = (*more, path != "block_mask", 0.25, False, "")
    operator = getattr(torch.ops.cs336_systems, f"{name}_attention").default
    torch.library.opcheck(operator, (q, k, v, *more), test_utils=("test_schema", "test_faketensor"))
    with pytest.raises(ValueError, match="v must have k's shape"):
        operator(q, k, v[..., :8], *more)
    with pytest.raises(ValueError, match=r"q must have shape \("):
        operator(q[0], k[0], v[0], *more)


@pytest.mark.parametrize(("path", "backend"), CALLS)
def test_autocast_casts_like_sdpa(path, backend, device):
    """Also where only some inputs are of low precision, as after a float32 rotary embedding. Sums
    stay in float32: autocast turned the tiled stage's matmuls, and the reference's log-sum-exp,
    into 16-bit ones.
    """
    dtype = torch.float16 if device == "cpu" and backend == "triton" else torch.bfloat16
    q, k, v, grad_output = inputs(1, 2, 2, 150, 150, 32, dtype, device)
    tensors, where = [q * 4, k * 4, v], place(path, 150, device)

    def under_autocast(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        with torch.autocast(device, dtype=dtype):
            return attend(*arguments, **options)

    mixed, _ = under_autocast(path, where, tensors[0].float(), *tensors[1:], backend=backend)
    results = results_of(path, where, tensors, grad_output, call=under_autocast, backend=backend)
    assert torch.equal(mixed, results["output"]) and results["lse"].dtype == torch.float32
    assert_within(
        compute_oracle(*tensors, grad_output, mask=token_mask(path, 150, device)), results
    )


@pytest.mark.parametrize(("path", "backend"), CALLS)
def test_lazily_negated_tensors_are_read_with_their_sign(path, backend, device):
    """The imaginary part of a conjugate lies in memory with the other sign, where kernels look."""
    lazy = [torch._neg_view(x) for x in inputs(1, 2, 2, 20, 20, 16, torch.float32, device)]
    call = partial(results_of, path, place(path, 20, device), backend=backend)
    assert_same(
        call(lazy[:3], lazy[3]), call([x.resolve_neg() for x in lazy[:3]], lazy[3].resolve_neg())
    )


@pytest.mark.parametrize(
    ("path", "backend", "compiled"),
    [
        *((*call, False) for call in LISTED),
        *((*call, True) for call in LISTED if call[0] == "block_mask"),
    ],
)
def test_what_inference_mode_has_made_trains(path, backend, device, compiled):
    """As a mask that an evaluation has made and a cache has kept: autograd saves no tensor of
    inference mode.
    """
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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("path", PATHS[1:])
def test_repeats_are_bit_equal(path, head_dim, dtype):
    """Every shipped configuration, 200 times; those of the dense kernels are in
    `test_s4_attention.py`.
    """
    *tensors, grad_output = inputs(1, 2, 1, 450, 450, head_dim, DTYPES[dtype], "cuda")
    call = partial(
        results_of, path, place(path, 450, "cuda"), tensors, grad_output, backend="triton"
    )
    for config in shipped_configs(head_dim, DTYPES[dtype], "cuda"):
        assert_repeats(partial(call, config=config), 200)


@pytest.mark.parametrize("kind", HARD_VALUES)
@pytest.mark.parametrize(
    ("path", "backend"), [("dense", "compiled"), ("block_mask", "triton"), ("packed", "triton")]
)
def test_k7_hard_values(path, backend, kind):
    """Beside `test_hard_values` of the dense back ends."""
    if (why := available_backends()[backend]) != "ok":
        pytest.skip(why)
    *tensors, grad_output = hard_inputs(kind, "float32", "cpu")
    seqlen = tensors[0].shape[2]
    results = results_of(path, place(path, seqlen, "cpu"), tensors, grad_output, backend=backend)
    assert_within(
        compute_oracle(*tensors, grad_output, mask=token_mask(path, seqlen, "cpu")), results
    )


# Shapes


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("leading", [(), (6,), (2, 3)], ids=len)
def test_leading_dimensions(leading, masked, backend, device):
    """A mask's batch is all of them, flattened."""
    tensors = [
        draw(*leading, 2, 70, 16, dtype=torch.float32, device=device, seed=seed)
        for seed in range(4)
    ]
    dense, masks = None, {}
    if masked:
        dense = (
            torch.rand(
                math.prod(leading), 1, 70, 70, generator=torch.Generator().manual_seed(1)
            ).to(device)
            < 0.5
        )
        masks = {"block_mask": BlockMask.from_dense(dense, 64)}
        dense = dense.view(*leading, 1, 70, 70)
    expected = all_results(
        partial(attention_reference, mask=dense, return_lse=True), tensors[:3], tensors[3]
    )
    assert_same(run(*tensors, **masks, backend=backend), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("empty", ["batch", "heads", "query heads", "queries", "keys"])
def test_empty_inputs(empty, masked, backend, device):
    """A shape without heads was refused with the sentence that it must have it."""
    batch, seqlen_q, seqlen_k = (0 if empty == name else 5 for name in ("batch", "queries", "keys"))
    heads, kv_heads = {"heads": (0, 0), "query heads": (0, 3)}.get(empty, (2, 2))
    q, k, v, grad_output = inputs(
        batch, heads, kv_heads, seqlen_q, seqlen_k, 16, torch.float32, device
    )
    mask = BlockMask.causal(seqlen_q, seqlen_k, device=device) if masked else None
    results = run(q, k, v, grad_output, backend=backend, enable_gqa=True, block_mask=mask)
    assert_nothing(results, q, k, q.shape[:-1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("empty", ["heads", "documents", "tokens"])
def test_empty_packed_inputs(empty, backend):
    """The log-sum-exp of no documents had no graph, so that a loss which used it alone could not go
    backward.
    """
    heads, rows = (0 if empty == name else 3 for name in ("heads", "tokens"))
    q, k, v, grad_output = (torch.randn(rows, number, 16) for number in (heads, 3, 3, heads))
    ends = torch.zeros(1 if empty == "documents" else 2, dtype=torch.int32)
    options = {"enable_gqa": True, "return_lse": True, "backend": backend}

    def attend_to_none(*leaves: Tensor) -> Any:
        return flash_attention_varlen(*leaves, ends, ends, 0, 0, **options)

    results = all_results(attend_to_none, (q, k, v), grad_output, torch.ones(heads, rows))
    assert_nothing(results, q, k, (heads, rows))


def assert_nothing(
    results: dict[str, Tensor], q: Tensor, k: Tensor, lse_shape: tuple[int, ...]
) -> None:
    for name, like in (("output", q), ("grad_q", q), ("grad_k", k), ("grad_v", k)):
        assert results[name].shape == like.shape and not results[name].any(), name
    assert results["lse"].shape == lse_shape and (results["lse"] == -math.inf).all()


# The operators' two ways: called directly in eager mode, through PyTorch's dispatcher where
# somebody watches. Where it says nothing else, the `tiled` stage stands for all: they share
# `AttentionOperator`.

# is_causal, scale, deterministic, config: as registered operators take them
REST = (True, 0.25, False, "")
OURS = pytest.mark.parametrize("backend", ["tiled", "triton"])


def tiled(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return tiled_attention(q, k, v, Call(*REST))


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


def leaves(device: str = "cpu") -> tuple[list[Tensor], Tensor]:
    *tensors, grad_output = inputs(2, 2, 2, 20, 30, 16, torch.float32, device)
    return [x.requires_grad_() for x in tensors], grad_output


@pytest.mark.parametrize("name", ["tiled_attention", "triton_attention"])
def test_both_ways_give_the_same(name, device):
    from cs336_systems.attention.triton.passes import triton_attention

    operator, flat = (
        (tiled_attention, (None, *REST)) if name == "tiled_attention" else (triton_attention, REST)
    )
    results = []
    registered = getattr(torch.ops.cs336_systems, name)
    for call, rest in ((operator, (Call(*REST),)), (registered, flat)):
        tensors, grad_output = leaves(device)
        output, lse = call(*tensors, *rest)
        grads = torch.autograd.grad((output, lse), tensors, (grad_output, torch.ones_like(lse)))
        only_output = torch.autograd.grad(call(*tensors, *rest)[0], tensors, grad_output)
        only_lse = torch.autograd.grad(call(*tensors, *rest)[1].sum(), tensors)
        results.append([output, lse, *grads, *only_output, *only_lse])
    assert all(map(torch.equal, *results))


def test_eager_mode_skips_the_dispatcher(monkeypatch):
    monkeypatch.setattr(tiled_attention, "_registered", None)
    monkeypatch.setattr(tiled_attention, "_registered_backward", None)
    tensors, grad_output = leaves()
    output, _ = tiled(*tensors)
    torch.autograd.grad(output, tensors, grad_output)
    tiled(*(torch.nn.Parameter(x.detach()) for x in tensors))
    with torch.no_grad():
        assert not tiled(*tensors)[0].requires_grad
    assert output.grad_fn.name() == "tiled_attentionBackward"


def test_subclasses_go_through_the_operator(monkeypatch):
    (q, k, v), _ = leaves()
    expected, _ = tiled(q, k, v)
    monkeypatch.setattr(tiled_attention, "apply", None)
    output, _ = tiled(q.detach().as_subclass(Plain), k, v)
    assert torch.equal(output.as_subclass(Tensor), expected)


@OURS
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


def test_fake_tensors_and_meta_tensors_are_never_launched(monkeypatch):
    monkeypatch.setattr(tiled_attention, "_forward", None)
    with FakeTensorMode() as mode:
        output, lse = tiled(*(torch.empty(2, 3, 20, 16) for _ in range(3)))
        x, ends = torch.empty(10, 2, 16), torch.empty(3, dtype=torch.int32)
        assert flash_attention_varlen(x, x, x, ends, ends, 6, 6, backend="triton").shape == x.shape
    outside, _ = tiled(*[mode.from_tensor(torch.empty(2, 3, 20, 16))] * 3)
    meta, _ = tiled(*(torch.empty(2, 3, 20, 16, device="meta") for _ in range(3)))
    assert output.shape == outside.shape == meta.shape == (2, 3, 20, 16) and lse.shape == (2, 3, 20)


# Transforms


@pytest.mark.parametrize(("path", "backend"), CALLS[1:])
def test_forward_mode_is_refused(path, backend):
    """The tangent of a custom backward's output was zero, silently; vmap hid it, and it would be
    lost to kernels.
    """
    q, k, v, grad = inputs(1, 2, 2, 20, 20, 16, torch.float32, "cpu")
    where, several = place(path, 20, "cpu"), torch.stack([q, 2 * q])

    def call(q: Tensor) -> Tensor:
        return attend(path, where, q, k, v, backend=backend)[0]

    mapped = torch.func.vmap(call)
    leaf = q.clone().requires_grad_()
    output = call(leaf)
    with forward_ad.dual_level():
        # without a tangent
        torch.testing.assert_close(mapped(several), torch.stack([call(x) for x in several]))
        for dual in (
            lambda: call(forward_ad.make_dual(q, q)),
            lambda: mapped(forward_ad.make_dual(several, several)),
            lambda: torch.autograd.grad(output, leaf, forward_ad.make_dual(grad, grad)),
        ):
            with pytest.raises(NotImplementedError, match="forward-mode AD is not supported here"):
                dual()
    for function, x in ((call, q), (mapped, several)):
        with pytest.raises(NotImplementedError, match="forward-mode AD is not supported here"):
            torch.func.jvp(function, (x,), (x,))


@pytest.mark.parametrize("implementation", FUNCTIONS)
def test_functions_have_no_forward_mode(implementation):
    q, k, v, _ = (x[:, 0] for x in inputs(2, 1, 1, 8, 9, 16, torch.float32, "cpu"))
    with (
        forward_ad.dual_level(),
        pytest.raises(RuntimeError, match="must implement the jvp function"),
    ):
        FUNCTIONS[implementation]().apply(forward_ad.make_dual(q, q), k, v)


@OURS
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
    constant = torch.func.grad(lambda x: x * flash_attention(q, k, v, backend=backend).sum())(
        torch.tensor(2.0)
    )
    torch.testing.assert_close(constant, flash_attention(q, k, v, backend=backend).sum())


@OURS
def test_a_tensor_that_has_left_a_transform_is_what_it_held(backend):
    (q, k, v), grad_output = leaves()
    left = []
    torch.func.grad(lambda x: left.append(x * 1) or x.sum())(q.detach())
    results = []
    for x in (left[0], q.detach()):
        output = flash_attention(x, k, v, is_causal=True, backend=backend)
        results.append([output, *torch.autograd.grad(output, (k, v), grad_output)])
    assert all(map(torch.equal, *results))


def test_batched_gradients_equal_a_loop():
    """`is_grads_batched` maps the backward over gradients; the forward ran directly."""
    tensors, grad_output = leaves()
    output, _ = tiled(*tensors)
    stack = torch.stack([grad_output, 2 * grad_output, grad_output - 1])
    batched = torch.autograd.grad(output, tensors, stack, is_grads_batched=True, retain_graph=True)
    looped = [torch.autograd.grad(output, tensors, grad, retain_graph=True) for grad in stack]
    for ours, each in zip(batched, zip(*looped)):
        torch.testing.assert_close(ours, torch.stack(each))


# What autograd asks of a function


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_the_same(reentrant):
    tensors, grad_output = leaves()
    plain = torch.autograd.grad(tiled(*tensors)[0], tensors, grad_output)
    checkpoint(lambda *x: tiled(*x)[0], *tensors, use_reentrant=reentrant).backward(grad_output)
    assert all(torch.equal(x.grad, expected) for x, expected in zip(tensors, plain))


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
