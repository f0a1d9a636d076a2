"""tools/gpu_tests.py: who runs what on which GPU, and what is said of it. The processes here only
print their GPUs.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import is_running, wait_until
from tools import gpu_tests

ROOT = Path(__file__).resolve().parent.parent
Collected = gpu_tests.GpuTest

CONFTEST = """
import os
import pathlib

def pytest_addoption(parser):
    parser.addoption("--gpu-record")
    parser.addoption("--gpu-commit")
    parser.addoption("--gpu-clean", action="store_true")

def pytest_configure(config):
    for name in ("gpu", "alone", "several_gpus"):
        config.addinivalue_line("markers", name)

def pytest_runtest_logreport(report):
    if report.when == "call":
        with pathlib.Path("rows").open("a") as rows:
            name = report.nodeid.split("::")[1]
            print(name, os.environ["CUDA_VISIBLE_DEVICES"], report.outcome, os.getpid(), file=rows)
"""
TESTS = """
import os, time
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("n", range(20))
def test_small(n):
    assert n != 13, "unlucky"

@pytest.mark.gpu
@pytest.mark.alone
def test_timed():
    assert len(open("rows").readlines()) >= 20, "the others have ended"
    time.sleep(float(os.environ.get("TEST_SLEEP", "0")))

@pytest.mark.gpu
@pytest.mark.several_gpus
def test_ranks():
    pass

def test_without_a_gpu():
    assert False
"""


def some_tests(together=0, alone=0, spread=0):
    names = [Collected(f"a{n}", alone=True) for n in range(alone)] + [
        Collected(f"t{n}") for n in range(together)
    ]
    return names + [Collected(f"s{n}", several_gpus=True) for n in range(spread)]


@pytest.mark.parametrize(
    "together, alone, spread", [(100, 5, 3), (1, 0, 0), (0, 1, 0), (0, 0, 2), (7, 30, 0)]
)
@pytest.mark.parametrize("gpus", [["0"], ["2", "3"]])
def test_every_test_runs_once_and_alone_where_it_must(together, alone, spread, gpus):
    tests = some_tests(together, alone, spread)
    phases = gpu_tests.plan(tests, gpus, processes=4)
    ran = [name for shares in phases for share in shares for name in share.tests]
    assert sorted(ran) == sorted(test.name for test in tests)
    for shares in phases:
        kinds = {name[0] for share in shares for name in share.tests}
        assert len(kinds) == 1, "what is marked has nothing else beside it"
        if kinds == {"s"}:
            assert [share.gpus for share in shares] == [tuple(gpus)]
        else:
            pinned = [gpu for share in shares for gpu in share.gpus]
            assert len(pinned) == len(shares) and set(pinned) <= set(gpus)
            assert max(map(pinned.count, pinned)) <= (1 if kinds == {"a"} else 4)


@pytest.fixture
def project(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    return tmp_path


def run_tool(project, *arguments, **environment):
    command = [
        sys.executable,
        str(ROOT / "tools/gpu_tests.py"),
        "--commit",
        "abc",
        "--clean",
        *arguments,
    ]
    return subprocess.run(
        command,
        cwd=project,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
    )


@pytest.mark.slow
def test_a_failure_is_named_and_decides_the_exit_code(project):
    done = run_tool(project, "--gpus", "5,6", "--processes", "2", "--", "-ra")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "    FAILED test_it.py::test_small[13]" in done.stdout and "unlucky" in done.stdout
    assert (
        "GPU 5,6, 1 tests, exit 0: 1 passed" in done.stdout and "NOT ALL PASSED in" in done.stdout
    )
    rows = [line.split() for line in (project / "rows").read_text().splitlines()]
    assert (
        len(rows) == 22
        and rows[-1][0] == "test_timed"
        and ["test_ranks", "5,6"] in [row[:2] for row in rows]
    )
    assert {gpu for name, gpu, *_ in rows if name.startswith("test_small")} == {"5", "6"}
    # four share two GPUs, one has both, one has one alone
    assert len({process for *_, process in rows}) == 6


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_tests_and_all_that_they_started(project, number):
    """They went on, on GPUs that the next run shared with them; so did what a killed test had
    started.
    """
    (project / "test_it.py").write_text(
        "import subprocess, sys, pytest\n"
        "@pytest.mark.gpu\n"
        "def test_hangs():\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "    import os, pathlib\n"
        "    pathlib.Path('pids').write_text(f'{os.getpid()} {child.pid}\\n')\n"
        "    child.wait()\n"
    )
    command = [
        sys.executable,
        str(ROOT / "tools/gpu_tests.py"),
        "--commit",
        "abc",
        "--clean",
        "--gpus",
        "0",
    ]
    pids = project / "pids"
    with subprocess.Popen(
        command, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as tool:
        wait_until(lambda: pids.exists() and pids.read_text().endswith("\n"), tool)
        tool.send_signal(number)
        _, errors = tool.communicate(timeout=60)
    assert tool.returncode == 128 + number, errors
    assert errors == "interrupted: the rows of what has ended are kept\n"
    wait_until(
        lambda: not any(is_running(int(pid)) for pid in pids.read_text().split()), seconds=60
    )


@pytest.mark.parametrize(
    "arguments, environment, message",
    [
        (["--gpus", "0", "--", "-k", "nothing"], {}, "no GPU test fits these arguments"),
        (["--gpus", "0", "--", "absent.py"], {}, "pytest could not collect the tests"),
        (
            ["--gpus", "0", "--processes", "0"],
            {},
            "--processes and --time-limit must be positive, got 0 and None",
        ),
        (
            ["--gpus", "0", "--time-limit", "-1"],
            {},
            "--processes and --time-limit must be positive, got 16 and -1.0",
        ),
        (["--gpus", "0", "--time-limit", "nan"], {}, "must be positive, got 16 and nan"),
        (["--gpus", "0,,1"], {}, "--gpus must name each GPU once, got 0,,1"),
        (["--gpus", "0,1, 0"], {}, "--gpus must name each GPU once, got 0,1, 0"),
        (["--dirty"], {}, "not allowed with argument --clean"),
        ([], {"CUDA_VISIBLE_DEVICES": ""}, "no CUDA GPU is visible here"),
    ],
)
def test_what_makes_no_sense_is_refused(project, arguments, environment, message):
    done = run_tool(project, *arguments, **environment)
    assert done.returncode != 0 and message in done.stderr and "Traceback" not in done.stderr
    assert not (project / "rows").exists()
