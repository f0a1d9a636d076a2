"""The package's shape: data flows one way, imports have no effects, and the dangerous constructs stay out.

The rules are functions from a file's text to its violations, so that the last tests can plant a violation in a string
and see it found.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "cs336_systems"

# A file imports from its own unit (a module or a folder directly under the package) and from those before it.
ORDER = (
    "config", "accounting", "device", "analysis", "inputs", "grids", "measure", "kernels", "attention",
    "model", "distributed", "training", "integrations", "experiments", "compare", "grading", "commands",
    "cli",
)  # fmt: skip
# The only modules that may load Triton when imported: they hold @triton.jit kernels and nothing imports them eagerly.
TRITON_FOLDERS = (f"{PACKAGE}/attention/triton/", f"{PACKAGE}/attention/hopper/")
BROAD_EXCEPTIONS = ("Exception", "BaseException", "builtins.Exception", "builtins.BaseException")
PICKLERS = ("pickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve")
# The one writes the snapshots, hostile ones too, that the other must read or refuse; its unpickler finds no name.
PICKLE_USERS = (("tests/snapshot_files.py", "pickle.dumps"), ("cs336_systems/measure/snapshot.py", "pickle"))


def source_files(*folders: str) -> list[str]:
    """The Python files below `folders`, relative to the repository's root."""
    return sorted(path.relative_to(ROOT).as_posix() for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_name(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported_modules(tree: ast.AST, file: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that `file` imports, at any depth, including import_module("literal")."""
    package = module_name(file) if file.endswith("__init__.py") else module_name(file).rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            # `from package import name` may mean the module package.name, so the name belongs to what is imported.
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _called_name(node) in ("import_module", "__import__"):
            literals = [argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)]
            yield from ((node.lineno, name) for name in literals if isinstance(name, str))


def order_violations(source: str, file: str) -> list[str]:
    """Imports of `file` that go against ORDER. `__init__` imports nothing of the package, `__main__` only the cli."""
    unit = file.split("/")[1].removesuffix(".py")
    if unit not in (*ORDER, "__init__", "__main__"):
        return [f"{file}: {unit} has no place in ORDER"]
    allowed = {"__init__": (), "__main__": ("cli",)}.get(unit) or ORDER[: ORDER.index(unit) + 1 if unit in ORDER else 0]
    violations = []
    for line, name in imported_modules(ast.parse(source), file):
        parts = name.split(".")
        if parts[0] != PACKAGE or name == f"{PACKAGE}.__version__":
            continue
        target = parts[1] if len(parts) > 1 else "__init__"
        if target not in allowed:
            violations.append(f"{file}:{line}: {unit} must not import {name}")
    return violations


def construct_violations(source: str, file: str) -> list[str]:
    """Handlers that swallow everything, and ways to run text or unpickle data as code.

    A handler of Exception or BaseException passes only if it ends by raising, so that it translates and hides nothing.
    """
    violations = []

    def refuse(node: ast.stmt | ast.expr | ast.ExceptHandler, what: str) -> None:
        violations.append(f"{file}:{node.lineno}: {what}")

    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            broad = [_dotted(name) for name in caught if name is not None and _dotted(name) in BROAD_EXCEPTIONS]
            if node.type is None:
                refuse(node, "bare except")
            elif broad and not isinstance(node.body[-1], ast.Raise):
                refuse(node, f"except {broad[0]} that does not end by raising")
        elif isinstance(node, ast.Call):
            name = _dotted(node.func)
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            if name.removeprefix("builtins.") in ("eval", "exec"):
                refuse(node, f"call of {name}")
            elif name == "os.system" or _is_true(keywords.get("shell")):
                refuse(node, "command run through a shell")
            elif name == "torch.load" and not _is_true(keywords.get("weights_only")):
                refuse(node, "torch.load without weights_only=True")
    for line, name in imported_modules(tree, file):
        if name.split(".")[0] in PICKLERS and (file, name) not in PICKLE_USERS:
            violations.append(f"{file}:{line}: import of {name}")
    return violations


def _dotted(node: ast.expr) -> str:
    """`torch.load` for the expression torch.load; empty for anything but names and attributes."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (value := _dotted(node.value)):
        return f"{value}.{node.attr}"
    return ""


def _called_name(node: ast.Call) -> str:
    return _dotted(node.func).rpartition(".")[2]


def _is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def test_package_files_import_only_what_stands_before_them():
    files = source_files(PACKAGE)
    assert f"{PACKAGE}/config.py" in files
    violations = [violation for file in files for violation in order_violations((ROOT / file).read_text(), file)]
    assert not violations, "\n".join(violations)


def test_no_file_swallows_errors_or_runs_data_as_code():
    files = source_files(PACKAGE, "tests", "tools")
    violations = [violation for file in files for violation in construct_violations((ROOT / file).read_text(), file)]
    assert not violations, "\n".join(violations)


# Imports each module named on stdin in one process and prints, as JSON, what each import did beyond defining names.
IMPORT_PROBE = """
import builtins, importlib, json, os, sys

# What PyTorch's compiler and Matplotlib do when imported (load Triton, set a cache folder, write a font cache) is
# theirs; with them loaded, what is left is the doing of the modules under test.
import matplotlib.pyplot, torch._dynamo

triton_importers = []
original_import = builtins.__import__

def watched_import(name, globals=None, *rest, **named):
    importer = (globals or {}).get("__name__", "")
    if name.split(".")[0] == "triton" and importer.split(".")[0] not in ("torch", "triton"):
        triton_importers.append(importer)
    return original_import(name, globals, *rest, **named)

def state():
    files = sorted(os.path.join(folder, name) for folder, _, names in os.walk(".") for name in names)
    return {"os.environ": dict(os.environ), "files": files, "triton": list(triton_importers)}

builtins.__import__ = watched_import
effects = {}
before = state()
for name in json.load(sys.stdin):
    importlib.import_module(name)
    after = state()
    changed = [key for key in before if before[key] != after[key]]
    if changed:
        effects[name] = changed
    before = after
print(json.dumps(effects))
"""


def import_effects(modules: list[str], folder: Path, path: Path = ROOT) -> dict[str, list[str]]:
    """What importing each of `modules`, found on `path`, did: change os.environ, leave files, import Triton."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"}
    # Caches and configuration land in the folder that is watched, wherever a library would keep them.
    environment |= {"HOME": str(folder), "TMPDIR": str(folder), "XDG_CACHE_HOME": str(folder)}
    process = subprocess.run(
        [sys.executable, "-c", IMPORT_PROBE],
        input=json.dumps(modules),
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def test_importing_the_package_has_no_effects(tmp_path):
    files = [file for file in source_files(PACKAGE) if not file.startswith(TRITON_FOLDERS)]
    modules = [module_name(file) for file in files if not file.endswith("__main__.py")]
    assert f"{PACKAGE}.config" in modules
    assert import_effects(modules, tmp_path) == {}


def test_import_probe_sees_a_module_with_effects(tmp_path):
    (tmp_path / "planted").mkdir()
    (tmp_path / "watched").mkdir()
    (tmp_path / "planted/noisy.py").write_text(
        "import os\nos.environ['NOISE'] = '1'\nopen('left_behind', 'w').close()\n"
        "try:\n    import triton\nexcept ImportError:\n    pass  # not every platform has it; trying counts\n"
    )
    (tmp_path / "planted/quiet.py").write_text("VALUE = 1\n")
    effects = import_effects(["noisy", "quiet"], tmp_path / "watched", tmp_path / "planted")
    assert effects == {"noisy": ["os.environ", "files", "triton"]}


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("cs336_systems/config.py", "import cs336_systems.compare"),
        ("cs336_systems/config.py", "from cs336_systems import compare"),
        ("cs336_systems/config.py", "from . import compare"),
        ("cs336_systems/config.py", "def late():\n    from cs336_systems.compare import Verdict"),
        ("cs336_systems/config.py", "if TYPE_CHECKING:\n    from cs336_systems.compare import Verdict"),
        ("cs336_systems/config.py", "importlib.import_module('cs336_systems.compare')"),
        ("cs336_systems/model/layers.py", "from ..experiments.registry import PROBLEMS"),
        ("cs336_systems/model/__init__.py", "from ..experiments.registry import PROBLEMS"),
        ("cs336_systems/attention/triton/forward.py", "from ...model import layers"),
        ("cs336_systems/grids.py", "from cs336_systems import flash_attention"),
        ("cs336_systems/grids.py", "import cs336_systems"),
        ("cs336_systems/helpers.py", "import json"),
        ("cs336_systems/__init__.py", "from cs336_systems.attention import flash_attention"),
        ("cs336_systems/__main__.py", "from cs336_systems.compare import Verdict"),
    ],
)
def test_an_import_against_the_order_is_found(file, source):
    assert len(order_violations(source, file)) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("cs336_systems/grids.py", "import json, torch\nfrom cs336_systems.config import MODES"),
        ("cs336_systems/attention/api.py", "from .triton.function import f\nfrom ..device import g"),
        ("cs336_systems/attention/__init__.py", "from .api import flash_attention"),
        ("cs336_systems/cli.py", "from cs336_systems import __version__\nfrom cs336_systems.compare import Verdict"),
        ("cs336_systems/__main__.py", "from cs336_systems.cli import main"),
    ],
)
def test_an_import_with_the_order_passes(file, source):
    assert order_violations(source, file) == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("try:\n    f()\nexcept:\n    raise", "bare except"),
        ("try:\n    f()\nexcept Exception:\n    pass", "except Exception that does not end by raising"),
        ("try:\n    f()\nexcept (ValueError, Exception) as e:\n    log(e)", "except Exception that does not end"),
        ("try:\n    f()\nexcept BaseException:\n    done = True", "except BaseException that does not end"),
        ("eval('1')", "call of eval"),
        ("builtins.exec('x = 1')", "call of builtins.exec"),
        ("subprocess.run('ls', shell=True)", "through a shell"),
        ("os.system('ls')", "through a shell"),
        ("torch.load(path)", "torch.load without weights_only=True"),
        ("torch.load(path, weights_only=False)", "torch.load without weights_only=True"),
        ("import pickle", "import of pickle"),
        ("def f():\n    from pickle import loads", "import of pickle.loads"),
    ],
)
def test_a_forbidden_construct_is_found(source, message):
    violations = construct_violations(source, "planted.py")
    assert len(violations) == 1 and message in violations[0]


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "torch.load(path, weights_only=True)",
        "subprocess.run(['ls'])",
        "try:\n    f()\nexcept torch.OutOfMemoryError:\n    pass",
        "try:\n    f()\nexcept Exception as error:\n    raise ValueError('no') from error",
    ],
)
def test_an_allowed_construct_passes(source):
    assert construct_violations(source, "planted.py") == []


def test_one_module_may_write_pickles_and_one_read_them():
    (writer, _), (reader, _) = PICKLE_USERS
    assert construct_violations("from pickle import dumps", writer) == []
    assert construct_violations("import pickle", reader) == []
    assert len(construct_violations("from pickle import dumps", "tests/other.py")) == 1
    assert len(construct_violations("import pickle", writer)) == 1
    assert len(construct_violations("from pickle import dumps, loads", writer)) == 1
    text = (ROOT / reader).read_text()
    assert re.findall(r"pickle\.\w+", text) == ["pickle.Unpickler", "pickle.UnpicklingError"]
