"""The package's shape: data flows one way, and imports have no effects. Ruff keeps the dangerous
constructs out.
"""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests import quick

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "cs336_systems"

# A file imports from its own unit (a module or a folder directly under the package) and from those
# before it.
ORDER = (
    "handout", "config", "accounting", "device", "processes", "analysis", "inputs", "grids",
    "measure", "stepper", "attention", "compiler", "model", "distributed", "training", "integrations",
    "bench", "book", "subjects", "experiments", "grading", "commands", "cli", "notebook",
    "learning",
)  # fmt: skip
# The only modules that may load Triton when imported: they hold or list kernels and nothing imports
# them eagerly.
TRITON_FOLDERS = (
    f"{PACKAGE}/attention/triton/", f"{PACKAGE}/attention/hopper/", f"{PACKAGE}/compiler/hopper_reports.py",
    f"{PACKAGE}/stepper/hooks.py", f"{PACKAGE}/learning/examples.py",
)  # fmt: skip

PICKLERS = ("pickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve")


def source_files(*folders: str) -> list[str]:
    """The Python files below `folders`, relative to the repository's root."""
    return sorted(
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
    )


def module_name(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported_modules(tree: ast.AST, file: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that `file` imports, at any depth."""
    package = (
        module_name(file) if file.endswith("__init__.py") else module_name(file).rpartition(".")[0]
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = (
                package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            )
            module = ".".join([*parents, *([node.module] if node.module else [])])
            # `from package import name` may mean the module package.name, so the name belongs to
            # what is imported.
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def order_violations(source: str, file: str) -> list[str]:
    """Imports of `file` that go against ORDER. `__init__` imports nothing of the package,
    `__main__` only the cli.
    """
    unit = file.split("/")[1].removesuffix(".py")
    if unit not in (*ORDER, "__init__", "__main__"):
        return [f"{file}: {unit} has no place in ORDER"]
    allowed = {"__init__": (), "__main__": ("cli",)}.get(unit) or ORDER[
        : ORDER.index(unit) + 1 if unit in ORDER else 0
    ]
    violations = []
    for line, name in imported_modules(ast.parse(source), file):
        parts = name.split(".")
        if parts[0] != PACKAGE or name == f"{PACKAGE}.__version__":
            continue
        target = parts[1] if len(parts) > 1 else "__init__"
        if target not in allowed:
            violations.append(f"{file}:{line}: {unit} must not import {name}")
    return violations


def test_package_files_import_only_what_stands_before_them():
    files = source_files(PACKAGE)
    assert f"{PACKAGE}/config.py" in files
    violations = [
        violation
        for file in files
        for violation in order_violations((ROOT / file).read_text(), file)
    ]
    assert not violations, "\n".join(violations)
    for source in (
        "from cs336_systems.bench import spec",
        "from ..bench.spec import measured_problems",
    ):
        assert len(order_violations(source, f"{PACKAGE}/model/layers.py")) == 1, (
            "an import against the order is found"
        )


def test_one_module_may_write_pickles_and_one_read_them():
    """The one writes the snapshots that the other must read or refuse; its unpickler finds no name.
    Ruff refuses eval, exec, shells, and exceptions that are swallowed.
    """
    found = set()
    for file in source_files(PACKAGE, "tests", "tools"):
        tree = ast.parse((ROOT / file).read_text())
        found |= {
            (file, name)
            for _, name in imported_modules(tree, file)
            if name.split(".")[0] in PICKLERS
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert "weights_only=True" in ast.unparse(node), f"{file}:{node.lineno}"
    reader = f"{PACKAGE}/measure/snapshot.py"
    assert found == {("tests/snapshot_files.py", "pickle.dumps"), (reader, "pickle")}
    assert re.findall(r"pickle\.\w+", (ROOT / reader).read_text()) == [
        "pickle.Unpickler",
        "pickle.UnpicklingError",
    ]


# Imports each module named on stdin in one process and prints, as JSON, what that did beyond
# defining names.
IMPORT_PROBE = """
import importlib, json, os, sys

# What PyTorch's compiler and Matplotlib do when imported (load Triton, set a cache folder, write a font cache) is
# theirs; with them loaded, what is left is the doing of the modules under test.
import matplotlib.pyplot, torch._dynamo

def state():
    files = sorted(os.path.join(folder, name) for folder, _, names in os.walk(".") for name in names)
    return {"os.environ": dict(os.environ), "files": files}

before = state()
for name in json.load(sys.stdin):
    importlib.import_module(name)
after = state()
kernels = [name for name in sys.modules if name.startswith("cs336_systems.attention.")
           and name.split(".")[2] in ("triton", "hopper")]
print(json.dumps([*(key for key in before if before[key] != after[key]), *kernels]))
"""


def test_importing_the_package_has_no_effects(tmp_path):
    """Nor is a kernel loaded: the interpreter may still be chosen."""
    files = [file for file in source_files(PACKAGE) if not file.startswith(TRITON_FOLDERS)]
    modules = [module_name(file) for file in files if not file.endswith("__main__.py")]
    assert f"{PACKAGE}.config" in modules
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Caches and configuration land in the folder that is watched, wherever a library would keep
    # them.
    environment |= {"HOME": str(tmp_path), "TMPDIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [sys.executable, "-c", IMPORT_PROBE],
        input=json.dumps(modules), capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout) == []


def test_quick_names_tests_that_exist(request):
    """After a renaming all cases of a test would be run again, or, of a kept one, none."""
    here = {item.nodeid for item in request.session.items}
    for name, kept in quick.KEPT.items():
        file, test = name.split("::")
        source = (ROOT / "tests" / f"{file}.py").read_text(encoding="utf-8")
        assert test == "*" or re.search(rf"^def {test}\(", source, re.MULTILINE), name
        if isinstance(kept, str) and any(
            nodeid.startswith(f"tests/{file}.py::") for nodeid in here
        ):
            assert f"tests/{file}.py::{test}[{kept}]" in here, name
