"""Calls replayed through the CUDA driver, `attention/replay.py`, against those that Python makes,
in bits.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cs336_systems.attention import api, flash_attention, native, replay
from cs336_systems.attention.call import Call, Documents
from tests.covered import HOPPER, REPLAY, TRITON

COVERS = (*TRITON, HOPPER, *REPLAY)


# On a GPU

GPU_SHAPES = {
    "short": (1, 16, 16, 512, 512, 64), "grouped, ragged": (2, 4, 2, 300, 300, 128),
    "fewer queries": (1, 2, 2, 77, 130, 64), "fewer keys": (1, 2, 2, 130, 77, 64),
    "head of 40": (1, 2, 2, 100, 100, 40), "one row": (1, 1, 1, 1, 1, 64), "split keys": (1, 1, 1, 2048, 2048, 64),
    "one row of a group": (2, 8, 2, 1, 4096, 128),
}  # fmt: skip
ON_GPU = [pytest.param(backend, marks=pytest.mark.gpu) for backend in ("triton", "hopper")]


@pytest.fixture
def by_python(monkeypatch):
    """`attend` without replays."""

    def call(*tensors, grad=None, **options):
        with monkeypatch.context() as patched:
            patched.setattr(replay.Replay, "__call__", lambda self, tensors, run: run())
            return attend(*tensors, grad=grad, **options)

    return call


def attend(*tensors: Tensor, grad: Tensor | None = None, **options: Any) -> list[Tensor]:
    """[output] and, of an upstream gradient, [dQ, dK, dV]."""
    output = flash_attention(*tensors, enable_gqa=True, **options)
    return [output, *(() if grad is None else torch.autograd.grad(output, tensors, grad))]


@pytest.fixture(params=["replay by Python", "replay by C++"])
def runs(request, backend, monkeypatch) -> list[str]:
    """The passes that were run and not replayed, in order."""
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    if request.param == "replay by Python":
        monkeypatch.setattr(replay.native, "load", lambda: None)
    elif shutil.which((os.environ.get("CXX") or "c++").split()[0]) is None:
        pytest.skip("needs a C++ compiler")
    else:
        replay.native.build()
        assert replay.native.load() is not None
    operator, runs = api.operator_of(backend), []
    for name in ("_forward", "_backward"):
        run = getattr(operator, name)
        monkeypatch.setattr(
            operator, name, lambda *given, name=name, run=run: runs.append(name[1:]) or run(*given)
        )
    return runs


def gpu_leaves(batch, heads, kv_heads, queries, keys, head_dim, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    sizes = ((heads, queries), (kv_heads, keys), (kv_heads, keys), (heads, queries))
    *leaves, grad = (
        torch.randn(
            batch, n, rows, head_dim, device="cuda", dtype=torch.bfloat16, generator=generator
        )
        for n, rows in sizes
    )
    return [x.requires_grad_() for x in leaves], grad


def assert_same(ours: list[Tensor], theirs: list[Tensor], *, exact: bool) -> None:
    """(output, dQ, dK, dV); dQ of hopper is summed in any order."""
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if exact or number != 1:
            assert torch.equal(a, b), number
        else:
            torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("deterministic", [None, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", GPU_SHAPES)
@pytest.mark.parametrize("backend", ON_GPU)
def test_replays_give_the_same_bits(backend, shape, is_causal, deterministic, by_python, runs):
    options = {"is_causal": is_causal, "backend": backend, "deterministic": deterministic}
    passes = []
    for seed in range(4):
        leaves, grad = gpu_leaves(*GPU_SHAPES[shape], seed=seed)
        runs.clear()
        ours = attend(*leaves, grad=grad, **options)
        passes.append([*runs])
        exact = backend == "triton" or bool(deterministic)
        assert_same(ours, by_python(*leaves, grad=grad, **options), exact=exact)
    assert passes[:2] == [["forward", "backward"]] * 2 and all(
        "forward" not in later for later in passes[2:]
    )
    # hopper fills gradients of unseen keys
    if backend == "triton" or shape in ("short", "grouped, ragged"):
        assert passes[2:] == [[], []]


@pytest.mark.parametrize("backend", ON_GPU)
def test_inputs_and_gradients_of_any_layout(backend, by_python, runs):
    (q, k, v), grad = gpu_leaves(2, 4, 4, 200, 200, 64)

    def transposed(x: Tensor) -> Tensor:
        return x.detach().transpose(1, 2).contiguous().transpose(1, 2)

    def shifted(x: Tensor) -> Tensor:
        return (
            torch.empty(x.numel() + 1, device="cuda", dtype=x.dtype)[1:]
            .view(x.shape)
            .copy_(x.detach())
        )

    expanded = torch.ones_like(grad[:1, :1, :1, :1]).expand(grad.shape)
    for given, upstream in itertools.product(
        (
            (q, k, v),
            [transposed(x) for x in (q, k, v)],
            (shifted(q), k, v),
            (q, k, shifted(v)),
            (q, q, q),
            (q, k, v),
        ),
        (grad, grad, grad, transposed(grad), expanded, shifted(grad), grad),
    ):
        leaves = [x.detach().requires_grad_() for x in given]
        options = {"grad": upstream, "backend": backend, "is_causal": True}
        assert_same(
            attend(*leaves, **options), by_python(*leaves, **options), exact=backend == "triton"
        )
    output = flash_attention(q, k, v, backend=backend, is_causal=True)
    ours = torch.autograd.grad(output, (q, k, v), output)  # its own gradient
    other, *theirs = by_python(q, k, v, grad=output.detach(), backend=backend, is_causal=True)
    assert_same([output, *ours], [other, *theirs], exact=backend == "triton")


@pytest.mark.parametrize("backend", ON_GPU)
def test_streams_threads_and_graphs(backend, by_python, runs):
    leaves, grad = gpu_leaves(1, 4, 4, 256, 256, 64)
    options = {"backend": backend, "is_causal": True}
    (wanted,) = by_python(*leaves, **options)
    torch.cuda.synchronize()
    results = [flash_attention(*leaves, **options) for _ in range(3)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)  # a launch on another stream would not wait
        late = [x.detach() * 1 for x in leaves]
        results.append(flash_attention(*late, **options))
    stream.synchronize()
    for _ in range(2):  # of threads that have no CUDA context: their first kernel would be this one
        with ThreadPoolExecutor(1) as pool:
            results.append(pool.submit(lambda: attend(*leaves, grad=grad, **options)).result()[0])
    static = [x.detach().clone() for x in leaves]
    runs.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flash_attention(*static, **options)
    assert runs == []
    static[0].neg_()
    graph.replay()
    torch.cuda.synchronize()
    assert len(results) == 6 and all(torch.equal(output, wanted) for output in results)
    assert torch.equal(captured, by_python(*static, **options)[0])


def test_a_tensor_given_twice_is_bound_where_the_facts_say_so(monkeypatch):
    """Boundaries of documents that queries and keys share; two tensors in one place could be two in
    the next call.
    """
    monkeypatch.setattr(
        replay, "parameters_of", lambda launched: [("pointer", x) for x in launched.arguments]
    )
    monkeypatch.setattr(replay, "_BoundKernel", lambda launched, memory, places, maps: places)
    compiled = SimpleNamespace(
        src=SimpleNamespace(signature=dict.fromkeys("abc", "*i32")), metadata=SimpleNamespace()
    )
    q, boundaries = torch.zeros(8), torch.zeros(8, dtype=torch.int32)
    words = (ctypes.c_uint64 * 3)()

    def bind(*tensors: Tensor) -> list[int] | None:
        launched: Any = SimpleNamespace(compiled=compiled, arguments=list(tensors))
        places: Any = replay.bind(launched, tensors, words)
        return places and [(place - ctypes.addressof(words)) // 8 for place in places]

    assert bind(q, boundaries, boundaries) == [0, 1, 1]
    assert bind(q, boundaries, boundaries.clone()) == [0, 1, 2]
    assert bind(q, boundaries, boundaries.view(8)) is None
    assert bind(q, q, boundaries) is None


def test_calls_that_share_boundaries_have_their_own_replay():
    q, cu_seqlens = torch.randn(8, 1, 16), torch.tensor([0, 3, 8], dtype=torch.int32)
    operator = api.operator_of("triton", "packed")
    used = [
        replay.replayed(
            operator,
            q,
            q,
            q,
            Call(False, 0.25, documents=Documents(cu_seqlens, boundaries_k, 5, 5)),
        )
        for boundaries_k in (cu_seqlens, cu_seqlens.clone(), cu_seqlens.clone(), cu_seqlens)
    ]
    assert used[0] is used[3] is not used[1] and used[1] is used[2]


def test_saved_tensors_go_through_hooks(device):
    """They come back with other strides than the calls that are replayed have."""
    tensors = [torch.randn(1, 2, 65, 32, device=device) for _ in range(4)]
    leaves, grad, packed = [x.requires_grad_() for x in tensors[:3]], tensors[3], []
    for _ in range(3):
        expected = attend(*leaves, grad=grad, backend="triton", is_causal=True)

    def pack(x: Tensor) -> Tensor:
        packed.append(x)
        return x.mT.contiguous() if x.ndim == 4 else x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x.mT if x.ndim == 4 else x):
        output = flash_attention(*leaves, backend="triton", is_causal=True)
    assert len(packed) == 5
    results = [output, *torch.autograd.grad(output, leaves, grad)]
    for ours, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


# The optional plug-in that replays in C++: `attention/native`


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty place for the library, in which nothing has been looked for."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    native.load.cache_clear()
    yield tmp_path
    native.load.cache_clear()


def plant(mode: int) -> None:
    path = native.library_path()
    path.parent.mkdir(mode=0o700, parents=True)
    path.write_bytes(b"not a library")
    path.chmod(mode)


@pytest.mark.parametrize(
    ("mode", "reason"), [(0o777, "others can write"), (0o700, "replayed by Python")]
)
def test_a_library_that_others_could_have_planted_or_that_is_broken_is_not_loaded(
    folder, mode, reason
):
    plant(mode)
    with pytest.warns(UserWarning, match=reason):
        assert native.load() is None


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_a_compiler_that_fails_is_named(compiler, folder, monkeypatch):
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(RuntimeError, match=f"{compiler} does not compile replay.cpp"):
        native.build()


def test_what_another_process_has_built_is_seen(folder):
    assert native.load() is None  # without a library Python replays
    plant(0o700)
    native.build()
    # it was looked at, and is not a library
    with pytest.warns(UserWarning, match="replayed by Python"):
        native.load()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_it_compiles(folder):
    path = native.build()
    assert native.load() is not None and native.build() == path
    assert [x.name for x in path.parent.iterdir()] == [path.name]


def test_a_call_that_cannot_be_bound_is_not_recorded_for_ever(monkeypatch):
    """It was recorded anew each time, which takes longer than the call's own launches."""
    recordings = []
    recorded = replay.recorded
    monkeypatch.setattr(replay, "recorded", lambda: recordings.append(1) or recorded())
    one = replay.Replay()
    for _ in range(4 * replay.MOST_RECORDINGS):
        x = SimpleNamespace(is_cuda=True, data_ptr=lambda: 0)
        one((x,), lambda: (torch.empty(1),))  # a result that no launch's recording knows
    assert len(recordings) == replay.MOST_RECORDINGS
