"""tools/sanitize.py and what it runs: every shipped configuration is called, and what a sanitizer says is recorded."""

import json
import os
import stat
import subprocess
import sys

import pytest

from cs336_systems.attention.tiles.tables import TABLES
from tests.every_config import DTYPES, FAMILIES, cases
from tests.processes import is_running
from tests.test_tools import ROOT

# Stands in for compute-sanitizer: runs the program, then says what it was told to say.
SANITIZER = """#!{python}
import os, subprocess, sys
if "--version" in sys.argv:
    sys.exit(print("NVIDIA (R) Compute Sanitizer\\nVersion 2026.1.0.0 (build 1)"))
tool = sys.argv[sys.argv.index("--tool") + 1]
if "HANGS" in os.environ:
    hanging = subprocess.Popen(["sleep", "300"])
    open(os.environ["HANGS"], "w").write(str(hanging.pid))
    hanging.wait()
code = subprocess.call(sys.argv[sys.argv.index("--error-exitcode") + 2:])
errors = int(os.environ.get("FINDS_" + tool.upper(), "0"))
print("========= Invalid __global__ read of size 4 bytes" if errors else "")
print(f"========= ERROR SUMMARY: {{errors}} errors")
sys.exit(99 if errors else code)
"""


@pytest.mark.parametrize("target", [target for target in TABLES if target != "portable"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_row_of_a_table_is_called(target, dtype):
    """Dense, causal, under masks; the pointer rows on packed documents too, which TMA does not read."""
    shipped = {
        config.name: config
        for (_, width, _), row in TABLES[target].items()
        for config in row.configs
        if width == DTYPES[dtype]
    }
    called = {
        family: {name for case in cases(target, [family], [dtype]) for name in case.configs} for family in FAMILIES
    }
    for family in FAMILIES[:4]:
        assert called[family] == set(shipped), family
    for family in FAMILIES[4:6]:
        assert called[family] == {name for name, config in shipped.items() if not config.tma}, family
    for family in FAMILIES[6:]:
        assert called[family] == ({"deterministic", "atomic"} if dtype == "bfloat16" else set())


def test_importing_it_leaves_the_environment_alone():
    """PyTorch's cache is off in the process that runs it, not in one that imports it, such as pytest's."""
    probe = "import os; before = dict(os.environ); import tests.every_config; assert dict(os.environ) == before"
    done = subprocess.run(
        [sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={"PATH": os.environ["PATH"]},  # this process has imported it too
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.fixture
def sanitizer(tmp_path):
    program = tmp_path / "sanitizer"
    program.write_text(SANITIZER.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def run_tool(sanitizer, *options, calls=("--families", "dense", "--shard", "0/40"), **environment):
    record = sanitizer.parent / "record.jsonl"
    command = [
        sys.executable, "tools/sanitize.py", "--commit", "abc", "--clean", "--sanitizer", str(sanitizer),
        "--record", str(record), "--processes", "1", *options, "--", "--device", "cpu", "--dtypes", "float32", *calls,
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={"PYTHONPATH": ".", "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]} | environment,
    )  # fmt: skip
    return done, [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


@pytest.mark.slow
def test_a_clean_run_is_recorded(sanitizer):
    done, rows = run_tool(sanitizer)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["tool"] for row in rows] == ["oracle", "memcheck", "racecheck"]
    for row in rows:
        assert row["calls"] == 1 and row["finished"] and row["errors"] == row["wrong"] == 0 and row["commit"] == "abc"
        assert row["sanitizer"] == "2026.1.0.0" and row["dirty"] is False and row["device"] == "cpu"


@pytest.mark.slow
def test_what_a_tool_finds_decides_the_exit_code_and_is_shown(sanitizer):
    done, (oracle, memcheck) = run_tool(sanitizer, "--tools", "memcheck", FINDS_MEMCHECK="3")
    assert done.returncode == 1 and oracle["errors"] == 0 and memcheck["errors"] == 3
    assert "memcheck: NOT CLEAN: 1 calls, 3 errors" in done.stdout and "Invalid __global__ read" in done.stdout


@pytest.mark.slow
def test_a_run_that_calls_nothing_is_not_clean(sanitizer):
    done, rows = run_tool(sanitizer, calls=("--families", "hopper"))
    assert done.returncode == 1 and [row["calls"] for row in rows] == [0, 0, 0]


@pytest.mark.slow
def test_a_run_that_is_cut_off_is_recorded_as_such(sanitizer):
    done, rows = run_tool(sanitizer, "--time-limit", "0.5")
    assert done.returncode == 1 and not any(row["finished"] for row in rows)


@pytest.mark.slow
def test_what_a_sanitizer_runs_ends_with_it(sanitizer, tmp_path):
    """compute-sanitizer starts the program as a child, which would keep the GPU."""
    done, rows = run_tool(
        sanitizer, "--time-limit", "15", "--tools", "memcheck", calls=("--families", "hopper"),
        HANGS=str(tmp_path / "pid"),
    )  # fmt: skip
    assert done.returncode == 1 and [row["finished"] for row in rows] == [True, False]
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_without_the_program_nothing_runs(sanitizer):
    done, rows = run_tool(sanitizer.with_name("absent"))
    assert done.returncode == 2 and "it comes with the CUDA toolkit" in done.stderr and rows == []
    done, rows = run_tool(sanitizer, "--processes", "0")
    assert done.returncode == 2 and "--processes must be positive, got 0" in done.stderr
