"""The eager half of the attention operators in C++: built once a machine, used wherever it has been built.

    build()        # half a minute of a C++ compiler, the first time; `cs336-systems build` and `run` on a GPU call it
    load()         # the module, or None where it has not been built or is switched off

A call of attention on short sequences waits for the host, and of the host's time the larger part is Python's: an
autograd.Function that launches nothing takes more than half as long as both passes of cuDNN. `operator.cpp` is the same
half without Python; `attention/triton/calls.py` tells it what a call launches. Without it everything works as well, and
short calls take longer.

`CS336_ATTN_NATIVE=0` switches it off, if it is set before the first call.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

SWITCH = "CS336_ATTN_NATIVE"
SOURCE = Path(__file__).parent / "operator.cpp"
MODULE = "cs336_systems_operator"
COMPILE_TIMEOUT_S = 600

_looked = False  # whether `_module` is what there is
_module: ModuleType | None = None


def library_path() -> Path:
    """Where the library for this source, Python, PyTorch and system is or would be; OSError where no folder is known.

    In the folder that `TORCH_EXTENSIONS_DIR` names, else in the user's caches.
    """
    home = os.path.expanduser("~")
    caches = os.environ.get("XDG_CACHE_HOME") or ("" if home == "~" else f"{home}/.cache")
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or caches
    if not root:
        raise OSError("there is no home folder to keep the library in (TORCH_EXTENSIONS_DIR names another)")
    facts = (torch.__version__, sys.version, sysconfig.get_config_var("SOABI"), platform.machine(), platform.libc_ver(),
             "with a checksum beside it")  # fmt: skip
    digest = hashlib.sha256(SOURCE.read_bytes() + "\n".join(map(str, facts)).encode()).hexdigest()
    return Path(root) / MODULE / f"{digest[:16]}.so"


def checksum_path(library: Path) -> Path:
    """Where `build` writes what the library must hold: dlopen trusts a damaged file, and the process dies of it."""
    return library.with_suffix(".sha256")


def is_switched_off() -> bool:
    return os.environ.get(SWITCH, "") == "0"


def state() -> str:
    """What becomes of calls on a GPU, in one line for people."""
    if load() is not None:
        return "C++"
    if is_switched_off():
        return f"Python: {SWITCH}=0"
    try:
        exists = os.path.exists(library_path())
    except OSError as error:
        return f"Python: {error}"
    gain = "builds anew what does not load" if exists else "makes short calls faster"
    return f"Python: `cs336-systems build` {gain}"


def build() -> Path:
    """The library, compiled unless it is there and loads.

    RuntimeError with the compiler's words where it cannot be, OSError where the folder cannot be written. Of processes
    that build at the same time one compiles and the others wait for it.
    """
    global _looked
    path = library_path()
    if _is_fine(path):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone_in(path.parent), tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
        _looked = False  # another process may have built in the meantime
        if _is_fine(path):
            return path
        unfinished = Path(folder) / path.name
        command = [*_compiler(), *_options(), str(SOURCE), "-o", str(unfinished), *_libraries()]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=COMPILE_TIMEOUT_S
            )
        except FileNotFoundError:
            raise RuntimeError(f"there is no C++ compiler {command[0]!r} (CXX names another)") from None
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{command[0]} did not finish within {COMPILE_TIMEOUT_S} s") from None
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()[-1:]
            raise RuntimeError(f"{command[0]} failed with exit code {done.returncode}: {' | '.join(errors[:3])}")
        checksum_path(path).write_text(hashlib.sha256(unfinished.read_bytes()).hexdigest())
        unfinished.replace(path)
    _looked = False
    return path


def _is_fine(path: Path) -> bool:
    return os.path.exists(path) and (is_switched_off() or load() is not None)


def load() -> ModuleType | None:
    """The built module; None where there is none, where it is switched off, or, with a warning, where it is broken.

    Looked for once a process, and again after `build`.
    """
    global _looked, _module
    if not _looked:
        if _module is None and not is_switched_off():
            _module = _load()
        _looked = True
    return _module


def _load() -> ModuleType | None:
    try:
        path = str(library_path())
    except OSError:
        return None
    if not os.path.exists(path):  # unlike Path.exists quiet about folders that are not ours to look into
        return None
    loader = importlib.machinery.ExtensionFileLoader(MODULE, path)
    spec = importlib.util.spec_from_loader(MODULE, loader)
    assert spec is not None
    try:
        _check_whole(Path(path))
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except (ImportError, OSError) as error:
        warnings.warn(f"attention goes on without its C++ half, which does not load: {error}", stacklevel=4)
        return None
    return module


def _check_whole(path: Path) -> None:
    """ImportError unless the library is what `build` wrote."""
    checksum = checksum_path(path)
    expected = checksum.read_text() if checksum.exists() else ""
    if hashlib.sha256(path.read_bytes()).hexdigest() != expected:
        raise ImportError(f"{path} is not as it was built, or {checksum.name} beside it is missing")


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Until the end, or until this process ends, others wait here."""
    with (folder / "lock").open("w") as lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compiler() -> list[str]:
    return os.environ.get("CXX", "").split() or ["c++"]


def _options() -> list[str]:
    try:
        from torch.utils.cpp_extension import include_paths
    except ImportError as error:
        raise RuntimeError(f"PyTorch's torch.utils.cpp_extension does not import: {error}") from None

    folders = [*include_paths(), sysconfig.get_path("include")]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return [
        "-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", abi, f"-DTORCH_EXTENSION_NAME={MODULE}",
        *(option for folder in folders for option in ("-isystem", folder)),
    ]  # fmt: skip


def _libraries() -> list[str]:
    folder = Path(torch.__file__).parent / "lib"
    return [f"-L{folder}", "-lc10", "-ltorch_cpu", "-ltorch_python"]
