"""Which code a record is of: a hash of the operations that its experiment reaches, stored beside
the samples.

    sources_hash("attention_shapes")        # of this checkout: "3f0c8a51be27"

A record whose hash is another one is older than the code, and its page says so. The hash needs no
git and no list of files: it follows imports from the experiment's file, at any depth, and takes
what it finds of OPERATIONS. What only measures and shows (`measure`, `experiments`) is left out,
and so are
comments, docstrings and how the code is formatted.
"""

import ast
import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from cs336_systems.handout import HANDOUT

PACKAGE = "cs336_systems"
OPERATIONS = ("attention", "model", "distributed", "training")  # folders whose code is measured
# fields that follow from others or say nothing
UNSAID = ("ctx", "kind", "type_comment", "type_ignores")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# in a folder of records: problem -> run -> hash, of records that hold none themselves
OLDER_RECORDS = "sources.json"
ROOT = Path(__file__).resolve().parents[2]


@cache
def sources_hash(problem: str, root: Path = ROOT) -> str:
    """Twelve digits of the operations that `problem` reaches in the checkout `root`; "" where it
    has no such file.
    """
    if not _file_of(problem, root).is_file():
        return ""
    digest = hashlib.sha256()
    for file in reached(problem, root):
        code = code_of(file.read_text(encoding="utf-8"), file.suffix).encode()
        name = file.relative_to(root).as_posix()
        # the length keeps code from passing as a name
        digest.update(f"{name}\0{len(code)}\0".encode())
        digest.update(code)
    return digest.hexdigest()[:12]


@cache
def reached(problem: str, root: Path = ROOT) -> tuple[Path, ...]:
    """The files of OPERATIONS that the file of `problem` imports, itself or through others."""
    waiting, seen = [_file_of(problem, root)], set()
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        for name in _imported(file):
            waiting += _files_of(name, root)
    found = {file for file in seen if file.relative_to(root).parts[1] in OPERATIONS}
    return tuple(sorted(found | {native for file in found for native in file.parent.glob("*.cpp")}))


def _file_of(problem: str, root: Path) -> Path:
    folder = root / PACKAGE / "experiments"
    return folder / f"{problem}.py" if problem in HANDOUT else folder / "beyond" / f"{problem}.py"


@cache
def _imported(file: Path) -> tuple[str, ...]:
    """The dotted names that `file` imports from the package, also within functions."""
    names = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            # what is no module has one for a parent
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(name for name in names if name.startswith(f"{PACKAGE}."))


@cache
def _files_of(name: str, root: Path) -> tuple[Path, ...]:
    """The files that an import of `name` runs: its own and its parents' `__init__.py`, but the
    package's.
    """
    parts = name.split(".")
    places = [root.joinpath(*parts[:count]) for count in range(2, len(parts) + 1)]
    files = (file for place in places for file in (place.with_suffix(".py"), place / "__init__.py"))
    return tuple(file for file in files if file.is_file())


@cache
def code_of(source: str, suffix: str) -> str:
    """Return what a Python `source` says to Python: its syntax tree, written out, without
    docstrings.

    Comments, line breaks, brackets that change nothing and how a string is quoted are not in the
    tree, so code that is formatted anew keeps its hash. `ast.dump` would differ between versions of
    Python, and is not used. A source of another `suffix` than ".py" is returned as it is.
    SyntaxError where the source is no Python.
    """
    return "".join(_written(ast.parse(source))) if suffix == ".py" else source


def _written(node: ast.AST) -> Iterator[str]:
    """Yield `node` as a kind and its fields in brackets, fields that are empty left out."""
    yield f"{type(node).__name__}("
    for name in sorted(node._fields):
        value = getattr(node, name, None)
        if (
            name == "body"
            and isinstance(node, DOCUMENTED)
            and ast.get_docstring(node, clean=False) is not None
        ):
            value = value[1:]
        if isinstance(node, ast.JoinedStr):
            value = _joined(value)
        if value is None and not isinstance(node, ast.Constant) or value == [] or name in UNSAID:
            continue
        yield f"{name}="
        for part in value if isinstance(value, list) else [value]:
            yield from _written(part) if isinstance(part, ast.AST) else [repr(part)]
            yield ","
    yield ")"


def _joined(parts: Sequence[ast.expr]) -> list[ast.expr]:
    """Join texts of an f-string that stand side by side: versions of Python part them differently."""
    joined: list[ast.expr] = []
    for part in parts:
        before = joined[-1] if joined else None
        if isinstance(part, ast.Constant) and isinstance(before, ast.Constant):
            joined[-1] = ast.Constant(before.value + part.value)
        else:
            joined.append(part)
    return joined


def older_hashes(records: Path) -> dict[str, dict[str, str]]:
    """Of the folder `records`, the hashes by problem and run of records that were written without
    one.
    """
    path = records / OLDER_RECORDS
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
