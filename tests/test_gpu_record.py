"""The record of GPU tests, and the pytest plugin that writes and judges it.

The plugin is tested as it is used: pytest runs in a process of its own over a small repository that
holds copies of conftest.py and gpu_record.py, with a stand-in for torch that says whether there is
a GPU.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests import ptx
from tests.gpu_record import (
    CHANGED,
    GpuRow,
    GpuTest,
    changing,
    drop_removed,
    read_rows,
    source_hash,
    stale_reason,
)

TESTS = Path(__file__).resolve().parent
TEST = GpuTest(
    test="tests/test_kernel.py::test_forward[64]", covers=("kernel.py",), source_hash="abc"
)
ROW = GpuRow(
    test=TEST.test,
    outcome="passed",
    message="",
    covers=["kernel.py"],
    source_hash="abc",
    device="NVIDIA H200",
    torch="2.11.0",
    triton="3.6.0",
    date="2026-01-02T03:04:05Z",
    commit="0123456789ab",
    dirty=False,
)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    (tmp_path / "kernels/deep").mkdir(parents=True)
    for name in ("kernels/a.py", "kernels/deep/b.py", "table.py", "test_x.py", "other.py"):
        (tmp_path / name).write_text(f"name = {name!r}\n")
    return tmp_path


def test_source_hash_sees_what_is_covered_and_nothing_else(sources):
    def digest(*covers: str) -> str:
        return source_hash(sources, "test_x.py", covers or ("kernels", "table.py"))

    before = digest()
    (sources / "other.py").write_text("changed = 1\n")
    (sources / "kernels/a.pyc").write_bytes(b"compiled")
    assert digest("table.py", "kernels", "kernels/a.py") == before
    for changed in ("kernels/a.py", "kernels/deep/b.py", "table.py", "test_x.py", "kernels/new.py"):
        (sources / changed).write_text("changed = 1\n")
        assert digest() != before, changed
        before = digest()
    (sources / "kernels/a.py").rename(sources / "kernels/c.py")
    assert digest() != before


def test_source_hash_passes_over_what_only_readers_see(sources):
    def digest(source: str) -> str:
        (sources / "table.py").write_text(source)
        return source_hash(sources, "test_x.py", ["table.py"])

    plain = digest('def f(x):\n    y = "# no comment"\n    return y\n')
    told = digest(
        '"""A.\n\nB."""\n\n# C\ndef f(x):  # D\n    """E."""\n\n    y = "# no comment"  # F\n    return y\n'
    )
    assert told == plain
    assert digest('def f(x):\n    y = "# a comment"\n    return y\n') != plain
    assert digest('def f(x): "E."\n') != digest('def g(x): "E."\n')


PTX = """\
.version 8.7
.file 1 "kernels.py"
.visible .entry NAME(
{
.loc 1 30 4
	mov.u32 %r1, %tid.x;	// a comment
	ret;
}
	.section	.debug_abbrev
	{
"""


def test_names_and_places_in_the_sources_are_no_ptx():
    first = PTX.replace("NAME", "flash_kernel")
    second = PTX.replace("NAME", "dense_kernel").replace(".loc 1 30", ".loc 1 7")
    assert ptx.plain(first) == ptx.plain(second)
    assert ptx.plain(first.replace("%tid.x", "%tid.y")) != ptx.plain(second)


def test_a_hash_of_kernels_is_that_of_their_ptx_and_unknown_of_other_sources(sources, monkeypatch):
    monkeypatch.setattr(ptx, "SOURCES", ("kernels",))

    def compiled(**kernels: str) -> str:
        ptx.sources_digest.cache_clear()
        found = {
            "sources": ptx.sources_digest(sources),
            "kernels": {"triton": {"dense d64": kernels}},
        }
        (sources / ptx.FILE).write_text(json.dumps(found))
        return digest()

    def digest() -> str:
        ptx.sources_digest.cache_clear()
        return source_hash(sources, "test_x.py", ["table.py", "ptx:triton"])

    (sources / "tests").mkdir()
    before = compiled(forward="12", dq="34")
    assert compiled(forward="12", renamed="34") == before != compiled(forward="12", dq="56")
    (sources / "kernels/a.py").write_text("# a comment\nname = 'kernels/a.py'\n")
    assert digest() == compiled(forward="12", dq="56")
    (sources / "kernels/a.py").write_text("other = 1\n")
    assert digest() == ptx.UNKNOWN
    assert compiled(forward="12", dq="34") == before, "other sources, the same PTX"
    (sources / "table.py").write_text("other = 1\n")
    assert digest() != before


def test_what_is_unknown_twice_is_stale():
    """A run on a GPU whose kernels nobody had compiled offline held for any kernels that came after
    them.
    """
    unknown = replace(TEST, source_hash=ptx.UNKNOWN)
    assert stale_reason(unknown, replace(ROW, source_hash=ptx.UNKNOWN)) == f"{CHANGED} {ROW.date}"


def test_ptx_json_is_of_the_kernels_of_this_checkout():
    """Else `make ptx` has to run, and what it says is to be committed."""
    ptx.sources_digest.cache_clear()
    assert {ptx.digest_of(ptx.ROOT, family) for family in ("triton", "hopper")}.isdisjoint(
        {ptx.UNKNOWN}
    )


def _add_rows(path: Path, worker: int) -> None:
    for number in range(20):
        with changing(path) as rows:
            new = replace(ROW, test=f"tests/test_{worker}.py::test_{number}")
            rows[new.test] = new


def test_processes_that_share_a_record_lose_no_row(tmp_path):
    """Each once wrote back all that it had read at its start, over what the others had found out
    since.
    """
    path = tmp_path / "tests.jsonl"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_add_rows, args=(path, worker)) for worker in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert len(read_rows(path)) == 60


def test_rows_of_removed_tests_are_dropped_and_of_other_files_kept(sources):
    names = ("test_x.py::here", "test_x.py::removed", "other.py::not_collected", "gone.py::removed")
    collected = {names[0]: replace(TEST, test=names[0])}
    assert set(drop_removed(dict.fromkeys(names, ROW), collected, {"test_x.py"}, sources)) == {
        names[0],
        names[2],
    }
    # The last GPU test of a file that has others still.
    assert set(drop_removed(dict.fromkeys(names, ROW), {}, {"test_x.py"}, sources)) == {names[2]}


GPU_TESTS = """
import os, pytest

COVERS = ("kernel.py",)

def test_interpreted(): assert os.environ.get("TRITON_INTERPRET") == "1"

@pytest.mark.gpu
def test_on_gpu(): assert "TRITON_INTERPRET" not in os.environ

@pytest.mark.gpu
def test_wrong_on_gpu(): assert False, "boom"
"""
TORCH = """
import os

__version__ = "2.11.0"

class cuda:
    is_available = staticmethod(lambda: "STAND_IN_GPU" in os.environ)
    get_device_name = staticmethod(lambda index: os.environ["STAND_IN_GPU"])
"""
SETTINGS = """
[tool.pytest.ini_options]
addopts = "--strict-markers"
markers = ["gpu: x", "slow: x", "slow_if(**parameters): x"]
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with GPU tests, this one's test infrastructure and a stand-in for torch."""
    for folder in ("tests", "stand_in/torch", "stand_in/triton-3.6.0.dist-info"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("__init__.py", "conftest.py", "gpu_record.py", "ptx.py", "quick.py"):
        shutil.copy(TESTS / name, tmp_path / "tests" / name)
    (tmp_path / "tests/test_kernel.py").write_text(GPU_TESTS)
    (tmp_path / "kernel.py").write_text("VALUE = 1\n")
    (tmp_path / "pyproject.toml").write_text(SETTINGS)
    (tmp_path / "stand_in/torch/__init__.py").write_text(TORCH)
    (tmp_path / "stand_in/triton-3.6.0.dist-info/METADATA").write_text(
        "Name: triton\nVersion: 3.6.0\n"
    )
    return tmp_path


def run_pytest(
    repository: Path, *arguments: str, gpu: str | None = None, **variables: str
) -> tuple[int, str]:
    """pytest's exit code and output in `repository`, on a machine whose GPU is named `gpu`."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(repository / "stand_in")} | variables
    # plugins that happen to be installed: slow, and not tested
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    if gpu is not None:
        environment["STAND_IN_GPU"] = gpu
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    process = subprocess.run(
        command, cwd=repository, env=environment, capture_output=True, text=True, timeout=180
    )
    return process.returncode, process.stdout + process.stderr


RECORD = (
    "-m",
    "gpu",
    "--gpu-record=results/nvidia-h200/tests.jsonl",
    "--gpu-commit=abc123",
    "--gpu-clean",
)


def test_a_run_on_a_gpu_is_recorded_and_holds_until_a_source_changes(repository):
    code, output = run_pytest(repository)
    assert code == 0 and "1 passed, 2 deselected" in output, output
    assert "2 of 2 GPU tests are STALE in results/nvidia-*/tests.jsonl:" in output

    record = repository / "results/nvidia-h200/tests.jsonl"
    code, output = run_pytest(repository, *RECORD, gpu="NVIDIA H200")
    assert code == 1, output
    rows = {
        row["test"].split("::")[1]: row for row in map(json.loads, record.read_text().splitlines())
    }
    assert {name: (row["outcome"], row["message"]) for name, row in rows.items()} == {
        "test_on_gpu": ("passed", ""),
        "test_wrong_on_gpu": ("failed", "AssertionError: boom"),
    }
    row = rows["test_on_gpu"]
    assert (row["device"], row["torch"], row["triton"]) == ("NVIDIA H200", "2.11.0", "3.6.0")
    assert (row["commit"], row["dirty"], row["covers"]) == ("abc123", False, ["kernel.py"])

    # Mended and recorded alone: the other test's row stays, but its file has changed since.
    tests = repository / "tests/test_kernel.py"
    tests.write_text(tests.read_text().replace('assert False, "boom"', "pass"))
    code, output = run_pytest(repository, *RECORD, "-k", "test_wrong_on_gpu", gpu="NVIDIA H200")
    assert code == 0 and len(record.read_text().splitlines()) == 2
    assert re.search(
        r"tests/test_kernel\.py: sources changed since 20\S+, when they passed \(1 test\)", output
    )
    run_pytest(repository, *RECORD, gpu="NVIDIA H200")
    _, output = run_pytest(repository)
    assert "all 2 GPU tests are up to date (NVIDIA H200)" in output

    before = record.read_bytes()
    code, output = run_pytest(repository, *RECORD, gpu="NVIDIA A100")
    assert code == pytest.ExitCode.USAGE_ERROR and record.read_bytes() == before
    assert "holds rows of NVIDIA H200, this is NVIDIA A100: name another file" in output

    # Each GPU has a record of its own; without a GPU the newest row of a test counts.
    others = [argument.replace("h200", "a100") for argument in RECORD]
    run_pytest(repository, *others, "-k", "test_on_gpu", gpu="NVIDIA A100")
    newer = repository / "results/nvidia-a100/tests.jsonl"
    # not of the same second
    newer.write_text(newer.read_text().replace('"date": "20', '"date": "21'))
    _, output = run_pytest(repository)
    assert "all 2 GPU tests are up to date (NVIDIA A100, NVIDIA H200)" in output
    (repository / "kernel.py").write_text("VALUE = 2\n")
    _, output = run_pytest(repository)
    assert "2 of 2 GPU tests are STALE" in output


def test_several_processes_share_the_record_and_print_the_same(repository):
    """The controller collects nothing: what it prints about tests comes from the workers."""
    pytest.importorskip("xdist")
    (repository / "tests/test_more.py").write_text(GPU_TESTS)
    processes = ("-p", "xdist", "-n", "2", "--dist", "loadfile")
    code, output = run_pytest(repository, *RECORD, *processes, gpu="NVIDIA H200")
    assert code == 1 and "2 of 4 GPU tests are STALE" in output, output
    assert len(read_rows(repository / "results/nvidia-h200/tests.jsonl")) == 4
    tests = repository / "tests/test_kernel.py"
    tests.write_text(tests.read_text().replace('("kernel.py",)', '""'))
    code, output = run_pytest(repository, *processes)
    assert (
        code == pytest.ExitCode.USAGE_ERROR
        and "COVERS of tests/test_kernel.py must be a non-empty" in output
    )


def test_slow_if_and_parts_choose_tests(repository):
    names = [f"test_{number}" for number in range(12)]
    (repository / "tests/test_many.py").write_text(
        "import pytest\n"
        "@pytest.mark.slow_if(a=1, b='x')\n"
        "@pytest.mark.slow_if(a=3)\n"
        "@pytest.mark.parametrize('a', [1, 2, 3])\n"
        "@pytest.mark.parametrize('b', ['x', 'y'])\n"
        "def test_pair(a, b): pass\n"
        + "".join(f"@pytest.mark.parametrize('a', [1, 2])\ndef {name}(a): pass\n" for name in names)
    )
    code, output = run_pytest(repository, "-v", "-m", "slow", "tests/test_many.py")
    assert code == 0 and sorted(re.findall(r"test_pair\[(\S+)\] PASSED", output)) == [
        "x-1",
        "x-3",
        "y-3",
    ]
    parts = []
    for part in range(2):
        _, output = run_pytest(
            repository, "-v", f"--part={part}/2", "-k", "not pair", "tests/test_many.py"
        )
        ran = re.findall(r"(test_\d+)\[(\d)\] PASSED", output)
        assert {name: [a for one, a in ran if one == name] for name, _ in ran} == {
            name: ["1", "2"] for name, _ in ran
        }
        parts.append({name for name, _ in ran})
    assert sorted(parts[0] | parts[1]) == sorted(names) and not parts[0] & parts[1] and all(parts)
    code, output = run_pytest(repository, "--at-most=0", "-rs", "tests/test_many.py")
    assert code == 0 and "30 skipped" in output and "not begun in the first 0 seconds" in output
    code, output = run_pytest(repository, "--part=2/2")
    assert code == 4 and "must be K/N with K from 0 to N - 1, got '2/2'" in output
