"""Run the course's own tests against a file of adapters, by default `tests/adapters.py`.

    python tools/course_tests.py path/to/assignment2-systems [path/to/adapters.py]

Either edition of the assignment will do. Phases: find the tests and the `cs336_basics` of the
project that
the adapters belong to, else the course's; copy both to a temporary folder, since neither checkout
is
written to; put the adapters and the modules beside them in place of the course's; give the tests'
processes
a free port in the place of the fixed one; run pytest there, serially, because they share that port.
A file
that wants a name or a package that is missing is an error of pytest's, and the others run. The exit
code is
pytest's, or 124 after `TIME_LIMIT_S`.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from cs336_systems.grading.project import find_package, project_root  # noqa: E402

ADAPTERS = ROOT / "tests" / "adapters.py"
TIME_LIMIT_S = 1800.0
EXIT_TIMED_OUT = 124  # as of timeout(1)
BASICS_PLACES = ("cs336-basics/cs336_basics", "cs336_basics", "cs336-basics/src/cs336_basics")
PYTEST_SETTINGS = ("pyproject.toml", "pytest.ini", "setup.cfg", "tox.ini", "conftest.py")
IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc", ".pytest_cache")


class CourseError(Exception):
    """The folder is not a checkout of the assignment; the message says what it lacks."""


def find_basics(checkout: Path) -> Path:
    """The course's `cs336_basics` package in `checkout`; CourseError when the tests or the package
    are not there.
    """
    if not checkout.is_dir():
        raise CourseError(f"{checkout} is not a folder: give DIR=path/to/assignment2-systems")
    if not (checkout / "tests").is_dir():
        raise CourseError(
            f"{checkout} has no tests/ folder: it is not a checkout of the assignment"
        )
    for place in BASICS_PLACES:
        if (checkout / place / "__init__.py").is_file():
            return checkout / place
    raise CourseError(
        f"{checkout} has no cs336_basics package in any of {', '.join(BASICS_PLACES)}"
    )


def lay_out(checkout: Path, adapters: Path, folder: Path) -> None:
    """Copy tests, packages and pytest's settings to `folder`, with `adapters` in place of the
    course's.
    """
    root = project_root(adapters)
    own = find_package(root, "cs336_basics") if root != ROOT else None
    basics = own or find_basics(checkout)
    shutil.copytree(checkout / "tests", folder / "tests", ignore=IGNORED)
    # what the adapters import as `from .ddp import DDP`
    for beside in adapters.parent.glob("*.py"):
        # of the project: not the course's
        is_test = beside.name.startswith("test_") or beside.name == "conftest.py"
        if not is_test and not (folder / "tests" / beside.name).exists():
            shutil.copyfile(beside, folder / "tests" / beside.name)
    shutil.copyfile(adapters, folder / "tests" / "adapters.py")
    shutil.copytree(basics, folder / "cs336_basics", ignore=IGNORED)
    for name in PYTEST_SETTINGS:
        if (checkout / name).is_file():
            shutil.copyfile(checkout / name, folder / name)
    if root != ROOT and find_package(root, "cs336_systems") is None:
        (folder / "cs336_systems.py").write_text(
            f"raise ImportError('{root} has no folder cs336_systems')\n"
        )

    common = folder / "tests" / "common.py"
    if common.is_file():
        fixed_port = r'(os\.environ\["MASTER_PORT"\] = )"\d+"'
        common.write_text(re.sub(fixed_port, rf'\1"{free_port()}"', common.read_text()))

    # The package asks importlib.metadata for its version, which an uninstalled copy answers through
    # this folder.
    metadata = folder / "cs336_basics-0.dist-info"
    metadata.mkdir()
    version = _declared_version(basics.parent / "pyproject.toml")
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: cs336_basics\nVersion: {version}\n"
    )


def free_port() -> int:
    """A port of this machine that nothing listens on now."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def run(checkout: Path, adapters: Path = ADAPTERS, time_limit_s: float = TIME_LIMIT_S) -> int:
    """Run the tests of `checkout` against `adapters`; pytest's exit code, or 124 after
    `time_limit_s`.
    """
    if not adapters.is_file():
        raise CourseError(f"{adapters} does not exist: there is nothing to test")
    adapters = adapters.resolve()
    with tempfile.TemporaryDirectory(prefix="course-tests-") as name:
        folder = Path(name).resolve()
        lay_out(checkout, adapters, folder)
        root = project_root(adapters)
        package = find_package(root, "cs336_systems")
        places = [folder, root, root / "src", adapters.parent]
        places += [package.parent] if package is not None else []
        # grade the files that can be
        options = ["-p", "no:cacheprovider", "--continue-on-collection-errors"]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, places)),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        tests = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, "tests"],
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        try:
            return tests.wait(time_limit_s)
        except subprocess.TimeoutExpired:
            print(f"error: the tests have not ended after {time_limit_s:g} s", file=sys.stderr)
            return EXIT_TIMED_OUT
        finally:
            if tests.poll() is None:
                os.killpg(tests.pid, signal.SIGKILL)  # the ranks too
                tests.wait()


def _declared_version(pyproject: Path) -> str:
    if not pyproject.is_file():
        return "0"
    project = tomllib.loads(pyproject.read_text()).get("project", {})
    return str(project.get("version", "0"))


def main(arguments: list[str]) -> int:
    if len(arguments) not in (1, 2) or not all(arguments):
        print(
            "usage: make course-tests DIR=path/to/assignment2-systems [ADAPTERS=adapters.py]",
            file=sys.stderr,
        )
        return 2
    try:
        return run(*(Path(argument).expanduser() for argument in arguments))
    except CourseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
