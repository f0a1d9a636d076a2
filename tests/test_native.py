"""The optional plug-in that replays attention calls in C++: `attention/native`."""

from __future__ import annotations

import shutil

import pytest

from cs336_systems.attention import native


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


def test_what_another_process_has_built_is_seen(folder):
    assert native.load() is None
    plant(0o700)
    native.build()
    with pytest.warns(UserWarning, match="replayed by Python"):  # it was looked at, and is not a library
        native.load()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_it_compiles(folder):
    path = native.build()
    assert native.load() is not None and native.build() == path
    assert [x.name for x in path.parent.iterdir()] == [path.name]
