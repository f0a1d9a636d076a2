"""An optional plug-in: replays of attention calls in C++, for calls so short that they wait for
Python.

    python -m cs336_systems.attention.native      # half a minute of a C++ compiler, once a machine

Without it everything works the same; `Replay.__call__` of `triton/launch.py`, the one place that
asks for it, does in Python what `replay.cpp` does. The library lies in the user's cache
(`TORCH_EXTENSIONS_DIR`, else `~/.cache/cs336_systems`), in a folder that only the user can write.
`CS336_ATTN_NATIVE=0`, set before the first call, switches it off.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

SWITCH = "CS336_ATTN_NATIVE"
SOURCE = Path(__file__).parent / "replay.cpp"
MODULE = "cs336_systems_replay"
COMPILE_TIMEOUT_S = 600


def library_path() -> Path:
    """Where the library for this source, Python, PyTorch and compiler's ABI is or would be."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "cs336_systems")
    facts = (torch.__version__, sys.version, sysconfig.get_config_var("SOABI"))
    digest = hashlib.sha256(SOURCE.read_bytes() + "\n".join(map(str, facts)).encode()).hexdigest()
    return root / f"{MODULE}-{os.getuid()}" / f"{digest[:16]}.so"


@cache
def load() -> ModuleType | None:
    """The library; None where it has not been built or is switched off, and with a warning where it
    does not load.
    """
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        path = library_path()
        if not path.exists():
            return None
        for place in (path, path.parent):
            if place.stat().st_uid != os.getuid() or place.stat().st_mode & 0o022:
                raise ImportError(f"others can write {place}")
        loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
        spec = importlib.util.spec_from_loader(MODULE, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        warnings.warn(f"attention calls are replayed by Python: {error}", stacklevel=2)
        return None
    return module


def build() -> Path:
    """Compile the library, unless it is there. RuntimeError with the compiler's words where it
    cannot be.
    """
    from torch.utils.cpp_extension import include_paths

    path, libraries = library_path(), Path(torch.__file__).parent / "lib"
    load.cache_clear()  # whatever was found before, another process may have built it since
    if path.exists():
        return path
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        unfinished = Path(folder) / path.name
        command = [
            *(os.environ.get("CXX", "").split() or ["c++"]),
            "-std=c++20",
            "-O2",
            "-fPIC",
            "-shared",
            "-fvisibility=hidden",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            f"-DTORCH_EXTENSION_NAME={MODULE}",
            *(
                option
                for place in (*include_paths(), sysconfig.get_path("include"))
                for option in ("-isystem", place)
            ),
            str(SOURCE),
            "-o",
            str(unfinished),
            f"-L{libraries}",
            "-lc10",
            "-ltorch_cpu",
            "-ltorch_python",
        ]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=COMPILE_TIMEOUT_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(f"{command[0]} does not compile {SOURCE.name}: {error}") from None
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or [
                "no reason given"
            ]
            raise RuntimeError(f"{command[0]} does not compile {SOURCE.name}: {errors[0]}")
        unfinished.chmod(0o700)
        unfinished.replace(path)
    return path
