"""The optional plug-in that replays attention calls in C++: `attention/native`."""

from __future__ import annotations

import shutil

import pytest
import torch

from cs336_systems.attention import flash_attention, native
from tests.covered import ATTENTION

COVERS = ATTENTION


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


def test_without_a_library_python_replays(folder):
    assert native.load() is None


@pytest.mark.parametrize(("mode", "reason"), [(0o777, "others can write"), (0o700, "replayed by Python")])
def test_a_library_that_others_could_have_planted_or_that_is_broken_is_not_loaded(folder, mode, reason):
    plant(mode)
    with pytest.warns(UserWarning, match=reason):
        assert native.load() is None


def test_a_compiler_that_fails_is_named(folder, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match="no-such-compiler does not compile replay.cpp"):
        native.build()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_it_compiles(folder):
    path = native.build()
    assert native.load() is not None and native.build() == path
    assert [x.name for x in path.parent.iterdir()] == [path.name]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_replays_in_cpp_give_the_same_bits(backend, monkeypatch):
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    native.build()
    results = {}
    for plug_in in (native.load(), None):
        monkeypatch.setattr(native, "load", lambda plug_in=plug_in: plug_in)
        # Another scale is another call, so that neither finds the other's; this one differs by nothing in bfloat16.
        scale = 0.125 if plug_in is None else 0.125 + 2**-40
        for seed in range(4):
            generator = torch.Generator("cuda").manual_seed(seed)
            q, k, v, grad = (
                torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(4)
            )
            leaves = [x.requires_grad_() for x in (q, k, v)]
            output = flash_attention(*leaves, is_causal=True, scale=scale, deterministic=True, backend=backend)
            results[plug_in is None, seed] = [output, *torch.autograd.grad(output, leaves, grad)]
    for seed in range(4):
        for in_cpp, in_python in zip(results[False, seed], results[True, seed], strict=True):
            assert torch.equal(in_cpp, in_python)
