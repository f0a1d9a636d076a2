"""Run the course's own tests, unmodified, against a file of adapters, by default `tests/adapters.py`.

    python tools/course_tests.py path/to/assignment2-systems [path/to/adapters.py]

Either edition of the assignment will do. Phases: find the tests and the course's `cs336_basics` in the checkout; copy
both to a temporary folder, since the checkout is never written to; put the adapters in place of theirs; run pytest
there, serially, because their processes share a port. A file that wants a name or a package that is missing is an error
of pytest's, and the others run. The exit code is pytest's.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
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


def run(checkout: Path, adapters: Path = ADAPTERS, pytest_arguments: tuple[str, ...] = ()) -> int:
    """Run the tests of `checkout` against `adapters`; pytest's exit code."""
    if not adapters.is_file():
        raise CourseError(f"{adapters} does not exist: there is nothing to test")
    with tempfile.TemporaryDirectory(prefix="course-tests-") as name:
        folder = Path(name).resolve()
        lay_out(checkout, adapters, folder)
        own = [str(path) for path in adapters.resolve().parents[:2]]  # what the adapters import lies beside or above
        options = ["-p", "no:cacheprovider", "--continue-on-collection-errors"]  # grade the files that can be
        command = [sys.executable, "-m", "pytest", *options, "tests", *pytest_arguments]
        path = os.pathsep.join([str(folder), *reversed(own), str(ROOT)])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


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
