"""Hash the operations that an experiment reaches, so that a record says which code it measured.

    sources_hash("attention_shapes")        # of this checkout: "3f0c8a51be27"

A record with another hash is older than the code, and its page says so. The hash needs no git and
no list of files: it follows imports from the experiment's file, at any depth, and covers the files
in the folders of OPERATIONS. Code that only measures and shows (`measure`, `experiments`) is left
out, and so are comments, docstrings and how the code is formatted.
"""

import ast
import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from cs336_systems.handout import HANDOUT

PACKAGE = "cs336_systems"
EXPERIMENTS = "experiments"  # folder of the handouts' problems, a file each
BEYOND = "beyond"  # its subfolder of problems that no handout has
OPERATIONS = ("attention", "model", "distributed", "training")  # folders whose code is measured
# fields of syntax trees that follow from other fields or mean nothing
UNSAID = ("ctx", "kind", "type_comment", "type_ignores")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# file in a folder of records: problem -> run -> hash, for records written without a hash
OLDER_RECORDS = "sources.json"
ROOT = Path(__file__).resolve().parents[2]


@cache
def sources_hash(problem: str, root: Path = ROOT) -> str:
    """Return twelve hex digits that identify the operations which `problem` reaches.

    They are those of the checkout `root`; "" if it has no file of the experiment.
    """
    if not file_of(problem, root).is_file():
        return ""
    digest = hashlib.sha256()
    for file in reached(problem, root):
        code = code_of(file.read_text(encoding="utf-8"), file.suffix).encode()
        name = file.relative_to(root).as_posix()
        # The length separates code from the next name.
        digest.update(f"{name}\0{len(code)}\0".encode())
        digest.update(code)
    return digest.hexdigest()[:12]


@cache
def reached(problem: str, root: Path = ROOT) -> tuple[Path, ...]:
    """Return the files in OPERATIONS that `problem` imports, itself or through others, sorted.

    C++ sources in the same folders are included.
    """
    waiting, seen = [file_of(problem, root)], set()
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        for name in _imported(file):
            waiting += _files_of(name, root)
    found = {file for file in seen if file.relative_to(root).parts[1] in OPERATIONS}
    return tuple(sorted(found | {native for file in found for native in file.parent.glob("*.cpp")}))


def file_of(problem: str, root: Path = ROOT) -> Path:
    """Return the path of the experiment `problem` in the checkout `root`; it need not exist."""
    folder = root / PACKAGE / EXPERIMENTS
    return (folder if problem in HANDOUT else folder / BEYOND) / f"{problem}.py"


@cache
def _imported(file: Path) -> tuple[str, ...]:
    """Return the dotted names that `file` imports from the package, also within functions."""
    names = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            # If the name is no module, `_files_of` still finds its parent.
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(name for name in names if name.startswith(f"{PACKAGE}."))


@cache
def _files_of(name: str, root: Path) -> tuple[Path, ...]:
    """Return the files that an import of `name` runs, except the top package's `__init__.py`.

    They are the file of the module `name` and the `__init__.py` of each package above it.
    """
    parts = name.split(".")
    places = [root.joinpath(*parts[:count]) for count in range(2, len(parts) + 1)]
    files = (file for place in places for file in (place.with_suffix(".py"), place / "__init__.py"))
    return tuple(file for file in files if file.is_file())


@cache
def code_of(source: str, suffix: str) -> str:
    """Return the syntax tree of a Python `source` as text, without docstrings.

    Comments, line breaks, redundant brackets and quotation marks are not in the tree, so that
    reformatted code keeps its hash. `ast.dump` is not used, since its text differs between versions
    of Python. A source with another `suffix` than ".py" is returned as it is. Raises SyntaxError if
    the source is no valid Python.
    """
    return "".join(_written(ast.parse(source))) if suffix == ".py" else source


def _written(node: ast.AST) -> Iterator[str]:
    """Yield the text of `node` in pieces: its type, then its non-empty fields in brackets."""
    yield f"{type(node).__name__}("
    for name in sorted(node._fields):
        value: Any = getattr(node, name, None)
        if (
            name == "body"
            and isinstance(node, DOCUMENTED)
            and ast.get_docstring(node, clean=False) is not None
        ):
            value = value[1:]  # drop the docstring
        if isinstance(node, ast.JoinedStr):
            value = _joined(node.values)
        if value is None and not isinstance(node, ast.Constant) or value == [] or name in UNSAID:
            continue
        yield f"{name}="
        for part in value if isinstance(value, list) else [value]:
            yield from _written(part) if isinstance(part, ast.AST) else [repr(part)]
            yield ","
    yield ")"


def _joined(parts: Sequence[ast.expr]) -> list[ast.expr]:
    """Return the parts of an f-string with adjacent texts joined into one.

    Versions of Python differ in how they split them.
    """
    joined: list[ast.expr] = []
    for part in parts:
        before = joined[-1] if joined else None
        if isinstance(part, ast.Constant) and isinstance(before, ast.Constant):
            joined[-1] = ast.Constant(str(before.value) + str(part.value))
        else:
            joined.append(part)
    return joined


def older_hashes(records: Path) -> dict[str, dict[str, str]]:
    """Return {problem: {run id: hash}} for records in a folder that were written without a hash.

    It is read from `sources.json` in the folder `records`; empty if there is no such file.
    """
    path = records / OLDER_RECORDS
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
