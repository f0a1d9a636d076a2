"""Run the course's own tests, unmodified, against a file of adapters, by default `tests/adapters.py`.

    python tools/course_tests.py path/to/assignment2-systems [path/to/adapters.py]

Either edition of the assignment will do. Phases: find the tests and the course's `cs336_basics` in the checkout; copy
both to a temporary folder, since the checkout is never written to; put the adapters in place of theirs; say which
names and packages the tests want and cannot have; run pytest there, serially, because their processes share a port.
The exit code is pytest's, and never 0 when a name is missing.
"""

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from importlib.machinery import PathFinder
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ADAPTERS = ROOT / "tests" / "adapters.py"
BASICS_PLACES = ("cs336-basics/cs336_basics", "cs336_basics", "cs336-basics/src/cs336_basics")
PYTEST_SETTINGS = ("pyproject.toml", "pytest.ini", "setup.cfg", "tox.ini", "conftest.py")
IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc", ".pytest_cache")


class CourseError(Exception):
    """The folder is not a checkout of the assignment; the message says what it lacks."""


def find_basics(checkout: Path) -> Path:
    """The course's `cs336_basics` package in `checkout`; CourseError when the tests or the package are not there."""
    if not checkout.is_dir():
        raise CourseError(f"{checkout} is not a folder: give DIR=path/to/assignment2-systems")
    if not (checkout / "tests").is_dir():
        raise CourseError(f"{checkout} has no tests/ folder: it is not a checkout of the assignment")
    for place in BASICS_PLACES:
        if (checkout / place / "__init__.py").is_file():
            return checkout / place
    raise CourseError(f"{checkout} has no cs336_basics package in any of {', '.join(BASICS_PLACES)}")


def lay_out(checkout: Path, adapters: Path, folder: Path) -> None:
    """Copy tests, package and pytest's settings of `checkout` to `folder`, with `adapters` in place of theirs."""
    basics = find_basics(checkout)
    shutil.copytree(checkout / "tests", folder / "tests", ignore=IGNORED)
    shutil.copyfile(adapters, folder / "tests" / "adapters.py")
    shutil.copytree(basics, folder / "cs336_basics", ignore=IGNORED)
    for name in PYTEST_SETTINGS:
        if (checkout / name).is_file():
            shutil.copyfile(checkout / name, folder / name)
    # The package asks importlib.metadata for its version, which an uninstalled copy answers through this folder.
    metadata = folder / "cs336_basics-0.dist-info"
    metadata.mkdir()
    version = _declared_version(basics.parent / "pyproject.toml")
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: cs336_basics\nVersion: {version}\n")


def missing_adapters(tests: Path) -> dict[str, list[str]]:
    """The test files that import names from `.adapters` which adapters.py does not define, with those names."""
    defined = _defined_names(ast.parse((tests / "adapters.py").read_text()))
    missing = {}
    for file in sorted(tests.glob("*.py")):
        wanted = {
            alias.name
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[-1] == "adapters"
            for alias in node.names
        }
        if names := sorted(wanted - defined - {"*"}):
            missing[file.name] = names
    return missing


def missing_packages(folder: Path, own: list[str]) -> dict[str, list[str]]:
    """Packages that files of `folder` import at module level, neither installed nor in folders of `own`; with files."""
    local = {path.stem for path in (folder / "tests").glob("*.py")} | {"tests", "cs336_basics", "cs336_systems"}
    missing: dict[str, list[str]] = {}
    for file in sorted([*(folder / "tests").rglob("*.py"), *(folder / "cs336_basics").rglob("*.py")]):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names = [node.module]
            else:
                continue
            for name in {name.split(".")[0] for name in names} - local:
                if importlib.util.find_spec(name) is None and PathFinder.find_spec(name, own) is None:
                    missing.setdefault(name, []).append(file.relative_to(folder).as_posix())
    return missing


def run(checkout: Path, adapters: Path = ADAPTERS, pytest_arguments: tuple[str, ...] = ()) -> int:
    """Run the tests of `checkout` against `adapters`; pytest's exit code, or 1 where names are missing and it has 0."""
    if not adapters.is_file():
        raise CourseError(f"{adapters} does not exist: there is nothing to test")
    with tempfile.TemporaryDirectory(prefix="course-tests-") as name:
        folder = Path(name).resolve()
        lay_out(checkout, adapters, folder)
        names = missing_adapters(folder / "tests")
        own = [str(path) for path in adapters.resolve().parents[:2]]  # what the adapters import lies beside or above
        packages = missing_packages(folder, own)
        notes = [f"adapters.py lacks {', '.join(wanted)}, wanted by {file}" for file, wanted in names.items()]
        notes += [f"package {package} is not installed, wanted by {files[0]}" for package, files in packages.items()]
        options = ["-p", "no:cacheprovider", "--continue-on-collection-errors"]  # grade the files that can be
        command = [sys.executable, "-m", "pytest", *options, "tests", *pytest_arguments]
        path = os.pathsep.join([str(folder), *reversed(own), str(ROOT)])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        code = subprocess.run(command, cwd=folder, env=environment, check=False).returncode
        for note in notes:
            print(f"course-tests: {note}", file=sys.stderr)
        return code or int(bool(names))


def _defined_names(tree: ast.Module) -> set[str]:
    """Names that a module binds at its top level."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def _declared_version(pyproject: Path) -> str:
    if not pyproject.is_file():
        return "0"
    project = tomllib.loads(pyproject.read_text()).get("project", {})
    return str(project.get("version", "0"))


def main(arguments: list[str]) -> int:
    if len(arguments) not in (1, 2) or not all(arguments):
        print("usage: make course-tests DIR=path/to/assignment2-systems [ADAPTERS=adapters.py]", file=sys.stderr)
        return 2
    try:
        return run(*(Path(argument).expanduser() for argument in arguments))
    except CourseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
