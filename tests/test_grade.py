"""The grade, the record of GPU tests, and the pytest plugin that prints and writes them.

The plugin is tested as it is used: pytest runs in a process of its own over a small repository that holds copies of
conftest.py, grade.py and gpu_record.py, with a stand-in for torch that says whether there is a GPU.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu_record import (
    GpuRow,
    GpuTest,
    changing,
    drop_removed,
    read_rows,
    source_hash,
    stale_reason,
    summary_lines,
    write_rows,
)
from tests.grade import Grade

TESTS = Path(__file__).resolve().parent
TEST = GpuTest(test="tests/test_kernel.py::test_forward[64]", covers=("kernel.py",), source_hash="abc")
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


def graded(**outcomes: str) -> Grade:
    """A grade of the tests named by `outcomes`: `a1="passed"` is test 1 of problem a, worth 10 points."""
    grade = Grade()
    for test, outcome in outcomes.items():
        grade.register(test, test[0], 10)
        if outcome != "not run":
            grade.record(test, outcome)
    return grade


@pytest.mark.parametrize(
    ("outcomes", "earned", "verdict"),
    [
        ({"a1": "passed", "a2": "passed"}, 10, "ok"),
        ({"a1": "passed", "a2": "skipped"}, 10, "ok, 1 skipped"),
        ({"a1": "passed", "a2": "failed"}, 0, "1 failed"),
        ({"a1": "passed", "a2": "not run"}, 0, "1 not run"),
        ({"a1": "failed", "a2": "not run"}, 0, "1 failed"),
        ({"a1": "skipped", "a2": "not run"}, 0, "1 not run"),
        ({"a1": "skipped", "a2": "skipped"}, 0, "skipped only"),
    ],
)
def test_points_need_every_test_that_could_run(outcomes, earned, verdict):
    (problem,) = graded(**outcomes).problems()
    assert (problem.earned, problem.verdict, problem.total) == (earned, verdict, 2)


def test_score_adds_the_points_of_solved_problems():
    lines = graded(a1="passed", b1="failed", c1="skipped").lines()
    assert [line.split()[0] for line in lines[1:-1]] == ["a", "b", "c"]
    assert lines[-1] == "score: 10 of 30 points (10 of them not attempted: skipped only)"


def test_no_problem_no_table():
    assert Grade().lines() == []


def test_a_failure_in_tear_down_outlives_the_pass_of_the_call():
    grade = graded(a1="passed")
    grade.record("a1", "failed")
    grade.record("a1", "passed")
    assert grade.problems()[0].failed == 1


def test_a_test_may_grade_two_problems():
    grade = Grade()
    grade.register("t", "a", 1)
    grade.register("t", "b", 2)
    grade.record("t", "passed")
    assert [problem.earned for problem in grade.problems()] == [1, 2]


def test_grade_refuses_contradictions():
    grade = graded(a1="passed")
    with pytest.raises(ValueError, match="a2: problem a has 5 points here and 10 in an earlier test"):
        grade.register("a2", "a", 5)
    with pytest.raises(ValueError, match="name must be a non-empty str, got ''"):
        grade.register("a2", "", 5)
    with pytest.raises(ValueError, match="points must be an int of at least 0, got '5'"):
        grade.register("a2", "b", "5")
    with pytest.raises(ValueError, match="outcome must be one of passed, failed, skipped, not run, got 'ok'"):
        grade.record("a1", "ok")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    (tmp_path / "kernels/deep").mkdir(parents=True)
    for name in ("kernels/a.py", "kernels/deep/b.py", "table.py", "test_x.py", "other.py"):
        (tmp_path / name).write_text(f"# {name}\n")
    return tmp_path


@pytest.mark.parametrize("changed", ["kernels/a.py", "kernels/deep/b.py", "table.py", "test_x.py", "kernels/new.py"])
def test_source_hash_sees_a_change_in_what_is_covered(sources, changed):
    before = source_hash(sources, "test_x.py", ("kernels", "table.py"))
    (sources / changed).write_text("# changed\n")
    assert source_hash(sources, "test_x.py", ("kernels", "table.py")) != before


def test_source_hash_ignores_the_rest_and_the_order(sources):
    before = source_hash(sources, "test_x.py", ("kernels", "table.py"))
    (sources / "other.py").write_text("# changed\n")
    (sources / "kernels/a.pyc").write_bytes(b"compiled")
    assert source_hash(sources, "test_x.py", ("table.py", "kernels", "kernels/a.py")) == before


def test_source_hash_sees_a_renamed_file(sources):
    before = source_hash(sources, "test_x.py", ("kernels",))
    (sources / "kernels/a.py").rename(sources / "kernels/c.py")
    assert source_hash(sources, "test_x.py", ("kernels",)) != before


@pytest.mark.parametrize("covers", ["kernels", (), (1,), None])
def test_source_hash_refuses_covers_that_are_no_paths(sources, covers):
    with pytest.raises(ValueError, match="COVERS of test_x.py must be a non-empty tuple of paths, got "):
        source_hash(sources, "test_x.py", covers)


def test_source_hash_refuses_a_path_that_does_not_exist(sources):
    with pytest.raises(ValueError, match="COVERS of test_x.py names 'kernel', which is neither a file nor a folder"):
        source_hash(sources, "test_x.py", ("kernels", "kernel"))


def test_rows_come_back_as_written(tmp_path):
    path = tmp_path / "results/gpu/tests.jsonl"
    rows = {ROW.test: ROW, "b": replace(ROW, test="b", outcome="failed", message="no")}
    write_rows(path, rows)
    assert read_rows(path) == rows
    assert [file.name for file in path.parent.iterdir()] == ["tests.jsonl"]


def _add_rows(path: Path, worker: int) -> None:
    for number in range(20):
        with changing(path) as rows:
            new = replace(ROW, test=f"tests/test_{worker}.py::test_{number}")
            rows[new.test] = new


def test_processes_that_share_a_record_lose_no_row(tmp_path):
    """Each once wrote back all that it had read at its start, over what the others had found out since."""
    path = tmp_path / "tests.jsonl"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_add_rows, args=(path, worker)) for worker in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert len(read_rows(path)) == 60


def test_an_absent_record_has_no_rows(tmp_path):
    assert read_rows(tmp_path / "tests.jsonl") == {}


@pytest.mark.parametrize("line", ["{", "[]", '{"test": "a"}'])
def test_a_line_that_is_no_row_is_named(tmp_path, line):
    path = tmp_path / "tests.jsonl"
    write_rows(path, {ROW.test: ROW})
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=r"tests\.jsonl:2: not a row of a GPU test"):
        read_rows(path)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (ROW, None),
        (None, "never run"),
        (replace(ROW, source_hash="other"), "sources changed since 2026-01-02T03:04:05Z"),
        (replace(ROW, outcome="failed", message="boom"), "failed on NVIDIA H200: boom"),
        (replace(ROW, outcome="skipped", message=""), "skipped on NVIDIA H200"),
    ],
)
def test_stale_reason(row, reason):
    assert stale_reason(TEST, row) == reason


def test_summary_groups_the_cases_of_a_stale_test():
    cases = [replace(TEST, test=f"tests/test_kernel.py::test_forward[{size}]") for size in (64, 128)]
    other = replace(TEST, test="tests/test_kernel.py::test_backward")
    rows = {other.test: replace(ROW, test=other.test)}
    lines, up_to_date = summary_lines([*cases, other], rows, Path("tests.jsonl"))
    assert not up_to_date
    assert lines[0] == "2 of 3 GPU tests are STALE in tests.jsonl:"
    assert lines[1] == "  tests/test_kernel.py::test_forward: never run (2 cases)"
    changed = {test.test: replace(ROW, test=test.test, source_hash="other") for test in (*cases, other)}
    assert summary_lines([*cases, other], changed, Path("tests.jsonl"))[0][1:-1] == [
        "  tests/test_kernel.py: sources changed since 2026-01-02, when they passed (3 tests)"
    ]
    assert summary_lines([other], rows, Path("tests.jsonl")) == (["all 1 GPU tests are up to date (NVIDIA H200)"], True)


def test_rows_of_removed_tests_are_dropped_and_of_other_files_kept(sources):
    names = ("test_x.py::here", "test_x.py::removed", "other.py::not_collected", "gone.py::removed")
    collected = {names[0]: replace(TEST, test=names[0])}
    assert set(drop_removed(dict.fromkeys(names, ROW), collected, {"test_x.py"}, sources)) == {names[0], names[2]}
    # The last GPU test of a file that has others still.
    assert set(drop_removed(dict.fromkeys(names, ROW), {}, {"test_x.py"}, sources)) == {names[2]}


GRADED_TESTS = """
import os, pytest

COVERS = ("kernel.py",)

@pytest.mark.problem("solved", 3)
def test_solved(): assert os.environ.get("TRITON_INTERPRET") == os.environ["EXPECT_INTERPRET"]

@pytest.mark.problem("unsolved", 4)
@pytest.mark.parametrize("right", [True, False])
def test_unsolved(right): assert right

@pytest.mark.problem("expected", 5)
@pytest.mark.xfail
def test_expected_failure(): assert False

@pytest.mark.problem("on_gpu", 6)
@pytest.mark.gpu
def test_on_gpu(): pass

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
markers = ["problem(name, points): x", "gpu: x", "slow: x", "slow_if(**parameters): x"]
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with graded tests, this one's test infrastructure and a stand-in for torch."""
    for folder in ("tests", "stand_in/torch", "stand_in/triton-3.6.0.dist-info"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("__init__.py", "conftest.py", "grade.py", "gpu_record.py"):
        shutil.copy(TESTS / name, tmp_path / "tests" / name)
    (tmp_path / "tests/test_graded.py").write_text(GRADED_TESTS)
    (tmp_path / "kernel.py").write_text("VALUE = 1\n")
    (tmp_path / "pyproject.toml").write_text(SETTINGS)
    (tmp_path / "stand_in/torch/__init__.py").write_text(TORCH)
    (tmp_path / "stand_in/triton-3.6.0.dist-info/METADATA").write_text("Name: triton\nVersion: 3.6.0\n")
    return tmp_path


def run_pytest(repository: Path, *arguments: str, gpu: str | None = None, **variables: str) -> tuple[int, str]:
    """pytest's exit code and output in `repository`, on a machine whose GPU is named `gpu`."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(repository / "stand_in"), "EXPECT_INTERPRET": "1"} | variables
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # plugins that happen to be installed: slow, and not tested
    if gpu is not None:
        environment["STAND_IN_GPU"] = gpu
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    process = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, timeout=180)
    return process.returncode, process.stdout + process.stderr


def words(output: str) -> str:
    """`output` with runs of spaces and line ends collapsed."""
    return " ".join(output.split())


TWO_PROCESSES = ("-p", "xdist", "-n", "2", "--dist", "loadfile")
RECORD = ("-m", "gpu", "--gpu-record=results/nvidia-h200/tests.jsonl", "--gpu-commit=abc123", "--gpu-clean")


def test_without_a_gpu_problems_are_graded_and_gpu_tests_skipped_and_named(repository):
    code, output = run_pytest(repository, "-rs")
    assert code == 1
    for line in (
        "solved 3 1 1 ok",
        "unsolved 4 1 2 1 failed",
        "expected 5 0 1 1 failed",
        "on_gpu 6 0 1 skipped only",
        "score: 3 of 18 points (6 of them not attempted: skipped only)",
        "needs a CUDA GPU; torch.cuda.is_available() is False",
        "2 of 2 GPU tests are STALE in results/nvidia-h200/tests.jsonl:",
        "tests/test_graded.py::test_on_gpu: never run",
    ):
        assert line in words(output)


def test_slow_if_makes_slow_what_has_all_of_its_parameters(repository):
    (repository / "tests/test_pairs.py").write_text(
        "import pytest\n"
        "@pytest.mark.slow_if(a=1, b='x')\n"
        "@pytest.mark.slow_if(a=3)\n"
        "@pytest.mark.parametrize('a', [1, 2, 3])\n"
        "@pytest.mark.parametrize('b', ['x', 'y'])\n"
        "def test_pair(a, b): pass\n"
    )
    code, output = run_pytest(repository, "-v", "-m", "slow", "tests/test_pairs.py")
    assert code == 0 and sorted(re.findall(r"test_pair\[(\S+)\] PASSED", output)) == ["x-1", "x-3", "y-3"]


def test_parts_are_all_tests_and_share_none(repository):
    names = [f"test_{number}" for number in range(12)]
    body = "".join(f"@pytest.mark.parametrize('a', [1, 2])\ndef {name}(a): pass\n" for name in names)
    (repository / "tests/test_many.py").write_text(f"import pytest\n{body}")
    parts = []
    for part in range(2):
        code, output = run_pytest(repository, "-v", f"--part={part}/2", "tests/test_many.py")
        ran = re.findall(r"(test_\d+)\[(\d)\] PASSED", output)
        assert code == 0 and ran, output
        assert {name: [a for one, a in ran if one == name] for name, _ in ran} == {name: ["1", "2"] for name, _ in ran}
        parts.append({name for name, _ in ran})
    assert sorted(parts[0] | parts[1]) == sorted(names) and not parts[0] & parts[1]
    for wrong in ("2/2", "x/2", "1"):
        code, output = run_pytest(repository, f"--part={wrong}")
        assert code == 4 and f"must be K/N with K from 0 to N - 1, got '{wrong}'" in output


def test_deselected_tests_earn_nothing(repository):
    _, output = run_pytest(repository, "-k", "not False")
    assert "unsolved 4 1 2 1 not run" in words(output)


def test_a_run_on_a_gpu_is_recorded_and_holds_until_a_source_changes(repository):
    record = repository / "results/nvidia-h200/tests.jsonl"
    code, output = run_pytest(repository, *RECORD, gpu="NVIDIA H200")
    assert code == 1, output
    rows = {row["test"].split("::")[1]: row for row in map(json.loads, record.read_text().splitlines())}
    assert {name: (row["outcome"], row["message"]) for name, row in rows.items()} == {
        "test_on_gpu": ("passed", ""),
        "test_wrong_on_gpu": ("failed", "AssertionError: boom"),
    }
    row = rows["test_on_gpu"]
    assert (row["device"], row["torch"], row["triton"]) == ("NVIDIA H200", "2.11.0", "3.6.0")
    assert (row["commit"], row["dirty"], row["covers"]) == ("abc123", False, ["kernel.py"])

    _, output = run_pytest(repository)
    assert "1 of 2 GPU tests are STALE" in output
    assert "test_wrong_on_gpu: failed on NVIDIA H200: AssertionError: boom" in output

    # Mended and recorded alone: the other test's row stays, but its file has changed since.
    tests = repository / "tests/test_graded.py"
    tests.write_text(tests.read_text().replace('assert False, "boom"', "pass"))
    code, output = run_pytest(repository, *RECORD, "-k", "test_wrong_on_gpu", gpu="NVIDIA H200")
    assert code == 0 and len(record.read_text().splitlines()) == 2
    assert re.search(r"tests/test_graded\.py: sources changed since 20\S+, when they passed \(1 test\)", output)
    run_pytest(repository, *RECORD, gpu="NVIDIA H200")
    _, output = run_pytest(repository)
    assert "all 2 GPU tests are up to date (NVIDIA H200)" in output

    (repository / "kernel.py").write_text("VALUE = 2\n")
    _, output = run_pytest(repository)
    assert "2 of 2 GPU tests are STALE" in output


def test_what_tests_start_can_be_interrupted_in_a_background_job_too(repository):
    """Started with `&`, pytest had Ctrl-C ignored, and so had the runs that tests interrupt."""
    lines = ("import signal", "def test_it(): assert signal.getsignal(signal.SIGINT) is signal.default_int_handler")
    (repository / "tests/test_graded.py").write_text("\n".join(lines))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code, output = run_pytest(repository)
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 0, output


def test_kernels_are_not_interpreted_on_a_gpu(repository):
    _, output = run_pytest(repository, "-k", "test_solved", gpu="NVIDIA H200", EXPECT_INTERPRET="1")
    assert "assert None == '1'" in output


def test_a_record_of_another_gpu_is_not_overwritten(repository):
    run_pytest(repository, *RECORD, gpu="NVIDIA H200")
    before = (repository / "results/nvidia-h200/tests.jsonl").read_bytes()
    code, output = run_pytest(repository, *RECORD, gpu="NVIDIA A100")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "holds rows of NVIDIA H200, this is NVIDIA A100: name another file" in output
    assert (repository / "results/nvidia-h200/tests.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "gpu", "variables", "message"),
    [
        (RECORD, None, {}, "--gpu-record needs a CUDA device"),
        (RECORD, "NVIDIA H200", {"TRITON_INTERPRET": "1"}, "--gpu-record refuses TRITON_INTERPRET"),
        (RECORD[:-1], "NVIDIA H200", {}, "needs --gpu-commit REVISION and one of --gpu-clean, --gpu-dirty"),
        ((*RECORD[:3], "--gpu-dirty"), "NVIDIA H200", {}, "needs --gpu-commit REVISION and one of"),
    ],
)
def test_a_record_that_would_say_nothing_is_refused_before_any_test(repository, arguments, gpu, variables, message):
    code, output = run_pytest(repository, *arguments, gpu=gpu, **variables)
    assert code == pytest.ExitCode.USAGE_ERROR
    assert message in output
    assert not (repository / "results").exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('COVERS = ("kernel.py",)', "", "COVERS of tests/test_graded.py must be a non-empty tuple of paths"),
        ('problem("solved", 3)', 'problem("solved")', "write @pytest.mark.problem(name, points)"),
        ('problem("solved", 3)', 'problem("unsolved", 3)', "has 4 points here and 3 in an earlier test"),
    ],
)
def test_a_wrong_mark_stops_the_collection(repository, old, new, message):
    tests = repository / "tests/test_graded.py"
    tests.write_text(tests.read_text().replace(old, new))
    code, output = run_pytest(repository)
    assert code == pytest.ExitCode.USAGE_ERROR
    assert message in output


def sections(output: str) -> list[str]:
    """The lines of the table of problems and of what is said about GPU tests."""
    lines = output.splitlines()
    printed = []
    for heading in (" problems ", " GPU tests "):
        start = next(number for number, line in enumerate(lines) if line.strip("=") == heading)
        printed += itertools.takewhile(lambda line: not line.startswith("==="), lines[start + 1 :])
    return [line for line in printed if line]


SEVERAL_FILES = """
import pytest

COVERS = ("kernel.py",)

@pytest.mark.problem("unsolved", 4)
def test_more(): pass

@pytest.mark.gpu
@pytest.mark.problem("other", 2)
def test_more_on_gpu(): pass
"""


@pytest.fixture
def spread(repository: Path) -> Path:
    """`repository` with a second file of tests, so that there is something to spread over processes."""
    pytest.importorskip("xdist")
    (repository / "tests/test_more.py").write_text(SEVERAL_FILES)
    return repository


@pytest.mark.parametrize("arguments", [(), ("-k", "nothing"), ("-x",)], ids=" ".join)
def test_several_processes_print_the_same_grade_and_stale_tests(spread, arguments):
    """The controller collects nothing: what it prints about tests comes from the workers."""
    code, output = run_pytest(spread, *TWO_PROCESSES, *arguments)
    expected_code, expected = run_pytest(spread, *arguments)
    assert "tests/test_more.py::test_more_on_gpu: never run" in expected
    if arguments == ("-x",):  # how far the other process got is not fixed, so neither are the counts
        assert [line.split()[:2] for line in sections(output)] == [line.split()[:2] for line in sections(expected)]
    else:
        assert (code, sections(output)) == (expected_code, sections(expected))


def test_a_worker_that_dies_fails_its_test_and_leaves_a_grade(spread):
    tests = spread / "tests/test_graded.py"
    tests.write_text(tests.read_text().replace("assert right", "assert right or os._exit(3)"))
    code, output = run_pytest(spread, *TWO_PROCESSES)
    assert code == 1 and "crashed while running" in output
    assert "solved 3 1 1 ok" in words(output) and "unsolved 4 2 3 1 failed" in words(output)


def test_several_processes_share_the_record_of_a_gpu(spread):
    code, output = run_pytest(spread, *RECORD, *TWO_PROCESSES, gpu="NVIDIA H200")
    assert code == 1, output
    rows = read_rows(spread / "results/nvidia-h200/tests.jsonl")
    assert {test.split("::")[1]: row.outcome for test, row in rows.items()} == {
        "test_on_gpu": "passed",
        "test_wrong_on_gpu": "failed",
        "test_more_on_gpu": "passed",
    }
    assert "1 of 3 GPU tests are STALE" in output


def test_a_wrong_mark_stops_the_collection_of_several_processes(spread):
    tests = spread / "tests/test_graded.py"
    tests.write_text(tests.read_text().replace('problem("solved", 3)', 'problem("unsolved", 3)'))
    code, output = run_pytest(spread, *TWO_PROCESSES)
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "has 4 points here and 3 in an earlier test" in output
