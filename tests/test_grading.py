"""The grade itself: solutions whose score is known, what a failure costs, and the command."""

from __future__ import annotations

import csv
import json
import re
import signal
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path

import pytest
import torch

from cs336_systems.grading.formats import lines, reasons
from cs336_systems.grading.points import (
    HUNG,
    Grade,
    Grader,
    Result,
    checks_of,
    chosen_problems,
    grade,
)
from cs336_systems.grading.project import COURSE_PACKAGES
from cs336_systems.grading.reference_training import largest_difference
from cs336_systems.grading.registry import CHECKS
from cs336_systems.handout import HANDOUT, problems_of
from tests.command_line import assert_refused, invoke
from tests.grading_mutants import MUTANTS

ROOT = Path(__file__).resolve().parent.parent
SOLUTIONS = ROOT / "tests/solutions"
GRADED = problems_of(answer="graded")

# The problem that each wrong solution gets wrong, the points that are left there, and what says so;
# the
# rest is minimal.py's.
WRONG = {
    "causal_off_by_one": (
        "flash_backward", 5 * 4 / 5,
        "triton_causal_gradients: dQ is wrong by 2.3 in 127 of 128 rows",
    ),
    "base_two_lse": (
        "flash_forward", 15 * 13 / 14,
        "pytorch_saves_one_log_sum_exp: the log-sum-exp saved with is_causal=False is wrong by 0.44, at most "
        "0.001 is allowed, as if the logarithm were the binary one",
    ),
    "ddp_sums": (
        "ddp_overlap_individual_parameters", 5 * 2 / 3,
        "equals_one_process: last.bias differs by 0.096 from one process's after step 1, as if gradients "
        "were summed and not averaged",
    ),
    "ddp_after_backward": (
        "ddp_overlap_individual_parameters", 5 * 2 / 3,
        "overlaps_the_backward: none of 8 messages is sent before the backward has ended",
    ),
    "ddp_blocks": (
        "ddp_overlap_individual_parameters", 5 * 2 / 3,
        "overlaps_the_backward: the backward waits for each of the messages",
    ),
    "ddp_aborts": (
        "ddp_overlap_individual_parameters", 5 * 1 / 3,
        "equals_one_process, overlaps_the_backward: the process died (SIGABRT)",
    ),
    "bucket_ignored": (
        "ddp_overlap_bucketed", 8 * 4 / 5,
        "sends_fewer_messages_than_gradients: 8 gradients of 0.04 MB with bucket_size_mb=1.0 are 8 messages",
    ),
    "one_bucket": (
        "ddp_overlap_bucketed", 8 * 3 / 5,
        "overlaps_the_backward_bucket_by_bucket: none of 1 buckets is sent before the backward has ended",
    ),
    "optimizer_unsharded": (
        "optimizer_state_sharding", 0,
        "shards_the_state: the ranks keep 100%, 100% of AdamW's state: it is not sharded",
    ),
    "optimizer_forgets_to_send": (
        "optimizer_state_sharding", 15 * 1 / 7,
        "equals_the_unsharded_optimizer: ",
    ),
    "fsdp_replicates": (
        "fsdp", 0,
        "shards_the_weights, shards_every_weight: a rank holds 100% of the weights of Linear and Embedding "
        "layers after wrapping, not 50%",
    ),
    "fsdp_gives_shards": (
        "fsdp", 15 * 10 / 13,
        "equals_one_process, equals_one_process_in_float16: embedding.weight has shape (50, 64), not (100, 64)",
    ),
    "fsdp_ignores_dtype": (
        "fsdp", 15 * 11 / 13,
        "equals_one_process_in_float16: a Linear layer computes in torch.float32",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    """One process that has imported PyTorch, for all solutions here."""
    with Grader() as grader:
        yield grader


@pytest.fixture(scope="module")
def minimal(grader: Grader) -> Grade:
    required = [check.id for problem in GRADED for check in checks_of(problem.name, beyond=False)]
    found = graded(grader, "minimal", required)
    assert found.points == pytest.approx(63), "\n".join(lines(found))
    return found


def graded(grader: Grader, solution: str, checks: list[str], known: Grade | None = None) -> Grade:
    """The grade of a solution of which `checks` run; the others end as `known`."""
    found = Grade(GRADED, [], dict(known.results) if known is not None else {})
    for name in checks:
        found.results[name] = grader.run(CHECKS[name], SOLUTIONS / f"{solution}.py")
    return found


def test_the_empty_solution_earns_nothing(grader: Grader):
    found = graded(grader, "empty", list(CHECKS))
    statuses = {result.status for result in found.results.values()}
    assert found.points == 0 and statuses == {"not begun"}
    told = lines(found)
    assert told[-1] == "total: 0 of 63 points"
    assert (
        "fsdp                               0 of 15     not begun: get_fsdp is not implemented"
        in told
    )


def test_a_minimal_correct_solution_earns_everything(minimal: Grade):
    assert lines(minimal)[-1] == "total: 63 of 63 points", "\n".join(lines(minimal))
    assert minimal.is_complete
    by_edition = [chosen_problems(edition=edition) for edition in (2025, 2026)]
    assert [sum(problem.points for problem in problems) for problems in by_edition] == [48, 55]


@pytest.mark.parametrize("solution", WRONG)
def test_a_wrong_solution_loses_what_it_gets_wrong(solution: str, grader: Grader, minimal: Grade):
    problem, points, reason = WRONG[solution]
    checks = [check.id for check in checks_of(problem, beyond=False)]
    found = graded(grader, solution, checks, minimal)
    told = reasons(found, found.results_of(HANDOUT[problem], beyond=False))
    assert any(line.startswith(reason) for line in told), told
    assert found.earned(HANDOUT[problem]) == pytest.approx(points), told
    assert found.points == pytest.approx(63 - HANDOUT[problem].points + points)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_of_the_minimal_solution_is_told(name: str, grader: Grader, tmp_path: Path):
    mutant = MUTANTS[name]
    result = grader.run(CHECKS[mutant.check], solution(tmp_path, mutant.source()))
    assert result.status == "failed" and result.message.startswith(mutant.message), result.message


@pytest.mark.parametrize(
    ("adapter", "problem"),
    [
        ("get_sharded_optimizer = lambda params, cls, **kwargs: cls(params, **kwargs)", "optimizer_state_sharding"),
        ("get_ddp = Nothing", "ddp_overlap_individual_parameters"),
        ("get_ddp_bucketed = lambda module, bucket_size_mb: Nothing(module)", "ddp_overlap_bucketed"),
        ("get_fsdp = lambda module, compute_dtype=None: Nothing(module)", "fsdp"),
    ],
)  # fmt: skip
def test_a_wrapper_that_does_nothing_earns_nothing(
    adapter: str, problem: str, grader: Grader, tmp_path: Path
):
    path = solution(
        tmp_path,
        (SOLUTIONS / "minimal.py").read_text(),
        "class Nothing(nn.Module):",
        "    def __init__(self, module):",
        "        super().__init__()",
        "        self.module, self.shards = module, {}",
        "    def forward(self, x):",
        "        return self.module(x)",
        "    def finish_gradient_synchronization(self):",
        "        pass",
        adapter,
    )
    found = Grade([HANDOUT[problem]], [])
    for check in checks_of(problem, beyond=False):
        found.results[check.id] = grader.run(check, path)
    assert found.points == 0, lines(found)


def test_the_pytorch_class_may_ignore_the_causal_flag(grader: Grader, tmp_path: Path):
    """The handout says so; it cost 15 to 20 points."""
    ignores = "                if is_causal:\n                    scores = scores.masked_fill"
    source = (SOLUTIONS / "minimal.py").read_text()
    assert source.count(ignores) == 1
    path = solution(tmp_path, source.replace(ignores, ignores.replace("is_causal", "False")))
    for check in CHECKS.values():
        if check.name.startswith("pytorch_") and not check.beyond:
            result = grader.run(check, path)
            assert result.status == "passed", f"{check.id}: {result.message}"
    assert grader.run(CHECKS["flash_forward.pytorch_causal"], path).status == "failed"


def test_a_wrapper_may_have_names_of_its_own(grader: Grader, tmp_path: Path):
    """Parameters by other names were a KeyError in the check, and all of the problem's points."""
    path = solution(
        tmp_path,
        (SOLUTIONS / "minimal.py").read_text(),
        "class Renaming(FSDP):",
        "    def __init__(self, module, compute_dtype=None):",
        "        super().__init__(module, compute_dtype)",
        "        for layer in [x for x in module.modules() if getattr(x, 'weight', None) in self.shards]:",
        "            weight = layer._parameters.pop('weight')",
        "            layer.__dict__['weight'] = weight",
        "            layer.register_parameter('local_weight', weight)",
        "get_fsdp = Renaming",
        "gather_by_own_names = fsdp_gather_full_params",
        "def fsdp_gather_full_params(fsdp_model):",
        "    return {name.replace('local_', ''): x for name, x in gather_by_own_names(fsdp_model).items()}",
    )
    for check in checks_of("fsdp", beyond=False):
        result = grader.run(check, path)
        assert result.status == "passed", f"{check.id}: {result.message}"


@pytest.mark.parametrize(
    "body", ["", "def ddp_bucketed_on_train_batch_start(*_, **__): raise NotImplementedError"]
)
def test_an_adapter_that_the_handout_makes_optional_may_be_missing(
    body: str, grader: Grader, tmp_path: Path
):
    source = (SOLUTIONS / "minimal.py").read_text()
    start = "def ddp_bucketed_on_train_batch_start(ddp_model, optimizer):\n    pass\n"
    assert source.count(start) == 1
    check = CHECKS["ddp_overlap_bucketed.equals_one_process"]
    result = grader.run(check, solution(tmp_path, source.replace(start, body)))
    assert result.status == "passed", result.message


def test_every_solution_has_a_score():
    assert {path.stem for path in SOLUTIONS.glob("*.py")} == {"empty", "minimal", *WRONG}


def solution(folder: Path, *lines: str) -> Path:
    path = folder / "adapters.py"
    path.write_text("\n".join(lines) + "\n")
    return path


BROADCASTS = CHECKS["ddp_overlap_individual_parameters.broadcasts_the_parameters"]


def test_what_hangs_ends_at_the_time_limit_and_is_told_where(
    tmp_path: Path, grader: Grader, monkeypatch
):
    path = solution(tmp_path, "import time", "def get_ddp(module):", "    time.sleep(60)")
    monkeypatch.setattr(grader, "time_limit_s", 1.0)
    started = time.monotonic()
    result = grader.run(BROADCASTS, path)
    assert result.status == "failed"
    assert (
        result.message == "has not ended after 1 s (rank 0: adapters.py:3, rank 1: adapters.py:3)"
    )
    assert "line 3 in get_ddp" in result.detail
    assert time.monotonic() - started < 50


@pytest.mark.slow
def test_what_ends_the_process_that_runs_the_checks_costs_one_check(tmp_path: Path):
    """It ended the grade, at once or when it was ended between two checks; and a rank that went on
    was waited for.
    """
    ends = solution(
        tmp_path, "import os, signal, time", "import torch.distributed as dist", "def get_ddp(module):",
        "    if dist.get_rank() == 0:", "        os.kill(os.getppid(), signal.SIGKILL)", "    time.sleep(60)",
    )  # fmt: skip
    told = "the process that runs the checks has been ended"
    with Grader() as grader:
        started = time.monotonic()
        assert grader.run(BROADCASTS, ends).message == told
        assert time.monotonic() - started < 50
        nothing = solution(tmp_path, "")
        assert grader.run(BROADCASTS, nothing).message == "get_ddp is missing"
        assert grader._server is not None
        grader._server.kill()
        grader._server.wait()
        assert grader.run(BROADCASTS, nothing).message == told
        assert grader.run(BROADCASTS, nothing).message == "get_ddp is missing"


def test_behind_a_check_that_hangs_the_others_have_less_time(monkeypatch):
    """They may hang as well, and each would take its minutes; but their points are their own."""
    given = {}

    def run(self, check, adapters, limit):
        given[check.name] = limit
        hangs = check.name == "equals_one_process"
        status = "failed" if hangs else "passed"
        return Result(check=check, status=status, message=f"{HUNG} after 180 s" * hangs)

    monkeypatch.setattr(Grader, "run", run)
    found = grade(Path("adapters.py"), [HANDOUT["ddp_overlap_individual_parameters"]])
    assert list(given.values()) == [180.0, 180.0, 30.0]
    assert found.points == pytest.approx(5 * 2 / 3)


def test_no_check_begins_after_the_total_time_limit(monkeypatch):
    ran = []

    def run(self, check, adapters, limit):
        ran.append(limit)
        time.sleep(0.05)
        return Result(check=check, status="passed")

    monkeypatch.setattr(Grader, "run", run)
    problem = HANDOUT["ddp_overlap_individual_parameters"]
    found = grade(Path("adapters.py"), [problem], total_time_limit_s=0.04)
    assert len(ran) == 1 and ran[0] <= 0.04
    assert "overlaps_the_backward: not run: the whole grade has taken 0.04 s" in lines(found)[2]


def test_a_folder_of_modules_that_import_each_other(tmp_path: Path, grader: Grader, monkeypatch):
    """As in the course's tests, where adapters.py is a module of a package; and what is written is
    nobody else's.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ddp.py").write_text("from .base import DDP\n")
    (tmp_path / "base.py").write_text((SOLUTIONS / "minimal.py").read_text())
    result = grader.run(
        BROADCASTS,
        solution(tmp_path, "from .ddp import DDP as get_ddp", "open('log', 'w').write('')"),
    )
    assert result.status == "passed", result.detail
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {
        "adapters.py",
        "base.py",
        "ddp.py",
    }


def test_a_rank_that_dies_is_told_and_not_the_other_that_misses_it(tmp_path: Path, grader: Grader):
    rank_0_dies = "    os._exit(3) if dist.get_rank() == 0 else dist.barrier()"
    path = solution(
        tmp_path, "import os, torch.distributed as dist", "def get_ddp(module):", rank_0_dies
    )
    assert grader.run(BROADCASTS, path).message == "the process died (exit code 3)"


def test_a_file_that_cannot_be_loaded_says_why_in_one_line(tmp_path: Path, grader: Grader):
    result = grader.run(BROADCASTS, solution(tmp_path, "import no_such_package"))
    assert result.message == (
        "ModuleNotFoundError: No module named 'no_such_package' (adapters.py:1); it is neither in "
        f"{tmp_path} nor installed for {sys.executable}"
    )
    result = grader.run(
        BROADCASTS, solution(tmp_path, "def get_ddp(module):", "    return module.nothing")
    )
    assert "has no attribute 'nothing' (adapters.py:2)" in result.message
    assert "Traceback" in result.detail
    result = grader.run(BROADCASTS, solution(tmp_path, ""))
    assert (result.status, result.message) == ("not begun", "get_ddp is missing")
    result = grader.run(BROADCASTS, solution(tmp_path, "def get_ddp(module)"))
    version = ".".join(map(str, sys.version_info[:2]))
    assert f"Python {version} runs the checks: does the file need a newer one?" in result.message


@pytest.mark.parametrize(
    ("package", "install"),
    [("submitit", "'cs336-systems[course]'"), ("nowhere_else", "nowhere_else")],
)
def test_a_package_that_is_declared_and_missing_is_skipped(
    package: str, install: str, tmp_path: Path, grader: Grader
):
    """The machine lacks it, and the student is not at fault; nothing said what to install where."""
    declared = "[project]\ndependencies = [\"nowhere-else>=2; python_version > '3'\"]\n"
    (tmp_path / "pyproject.toml").write_text(declared)
    result = grader.run(BROADCASTS, solution(tmp_path, f"import {package}.nothing"))
    assert (result.status, result.message) == (
        "skipped",
        f"{package} is not installed: {sys.executable} -m pip install {install}",
    )


def test_the_extra_course_names_what_is_told_to_be_in_it():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = {re.match("[a-z]+", requirement).group() for requirement in extras["course"]}
    assert named | {"numpy", "einops", "jaxtyping", "pandas", "matplotlib"} == set(COURSE_PACKAGES)


@pytest.mark.parametrize(
    "body",
    [
        "    assert module.weight.is_cuda",
        "    raise ValueError('inputs must be on a GPU')",
        "    import torch; torch.cuda.Event(enable_timing=True).record()",
        "    import torch; torch.cuda.nvtx.range_push('wrap')",
        "    module.cuda()",
    ],
)
def test_what_refuses_a_cpu_needs_a_gpu(body: str, tmp_path: Path, grader: Grader):
    """The handout's own example asserts that its tensors are on a GPU; it lost 20 points."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    if "nvtx" in body and torch.version.cuda is not None:
        pytest.skip("a build with CUDA has NVTX, GPU or not")
    path = solution(
        tmp_path, "def get_ddp(module):", "    module.weight = next(module.parameters())", body
    )
    result = grader.run(BROADCASTS, path)
    assert (result.status, result.message) == ("skipped", "needs a GPU (adapters.py:3)"), result


# Where the code under test may lie: file by file, from the root of the project.
WRAPPER = "from minimal import DDP\nfrom cs336_basics import model\n"
LAYOUTS = {
    "the course's": ("cs336-basics/cs336_basics", "[tool.uv.sources]\n"),
    "a folder in a folder": ("cs336_basics/cs336_basics", "[tool.uv.sources]\n"),
    "named by uv": (
        "mine/cs336_basics",
        '[tool.uv.sources]\ncs336-basics = { path = "./mine", editable = true }\n',
    ),
    "named by uv, in src": (
        "mine/src/cs336_basics",
        '[tool.uv.sources]\ncs336_basics = { path = "mine" }\n',
    ),
    "beside": ("cs336_basics", ""),
    "without a pyproject.toml": ("cs336-basics/cs336_basics", None),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_packages_of_the_project_are_found(layout: str, tmp_path: Path, grader: Grader):
    """Her package is called as ours, which was imported in its place where no pyproject.toml was
    found.
    """
    place, pyproject = LAYOUTS[layout]
    files = {
        "minimal.py": (SOLUTIONS / "minimal.py").read_text(),
        "cs336_systems/__init__.py": "import importlib.metadata\nimportlib.metadata.version('cs336_systems')\n",
        "cs336_systems/wrapping.py": WRAPPER,
        f"{place}/__init__.py": "import importlib.metadata\nimportlib.metadata.version('cs336_basics')\n",
        f"{place}/model.py": "",
        "tests/common.py": "MARK = 'hers'\n",
    }
    if pyproject is not None:
        files["pyproject.toml"] = pyproject
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    path = solution(
        tmp_path / "tests",
        "from cs336_systems.wrapping import DDP",
        "from tests.common import MARK",
        "from .common import MARK",
        "get_ddp = DDP",
        "ddp_on_after_backward = lambda ddp, optimizer: ddp.finish_gradient_synchronization()",
    )
    result = grader.run(BROADCASTS, path)
    assert result.status == "passed", result.detail


def test_our_package_is_not_imported_in_the_place_of_hers(tmp_path: Path, grader: Grader):
    """It could give points: its wrappers are right."""
    (tmp_path / "tests").mkdir()
    path = solution(
        tmp_path / "tests", "from cs336_systems.distributed import OverlapDDP as get_ddp"
    )
    result = grader.run(BROADCASTS, path)
    assert result.message == (
        f"ModuleNotFoundError: {tmp_path} has no folder cs336_systems, and the grade's own is not served "
        "for it (adapters.py:1)"
    )


def test_her_layers_are_used_or_the_reason_is_told(tmp_path: Path, grader: Grader):
    """With our own layers in their place, in silence, FSDP that decides by class shards nothing."""
    basics = tmp_path / "cs336_basics"
    basics.mkdir()
    (basics / "__init__.py").write_text("")
    (basics / "model.py").write_text("import submitit\n")
    path = solution(tmp_path, (SOLUTIONS / "minimal.py").read_text())
    result = grader.run(CHECKS["fsdp.shards_the_weights"], path)
    assert result.status == "skipped" and result.message.startswith("submitit is not installed")


def test_adapters_may_call_their_arguments_what_they_like(tmp_path: Path, grader: Grader):
    """The course's tests pass them by position; by keyword, other names lost all points."""
    path = solution(
        tmp_path,
        (SOLUTIONS / "minimal.py").read_text(),
        "after_ddp, after_fsdp, gather = ddp_on_after_backward, fsdp_on_after_backward, fsdp_gather_full_params",
        "ddp_on_after_backward = lambda ddp, _: after_ddp(ddp, _)",
        "fsdp_on_after_backward = lambda model, _: after_fsdp(model, _)",
        "fsdp_gather_full_params = lambda model: gather(model)",
    )
    for name in ("ddp_overlap_individual_parameters", "fsdp"):
        result = grader.run(CHECKS[f"{name}.equals_one_process"], path)
        assert result.status == "passed", result.detail


def test_a_parameter_that_is_no_number_differs_by_more_than_any_bound():
    ones, broken = (
        {name: torch.tensor([1.0, value]) for name in "ab"} for value in (1.0, torch.nan)
    )
    assert largest_difference(ones | {"b": broken["b"]}, ones) == (float("inf"), "b")


def test_every_required_check_has_its_share_and_none_beyond():
    fsdp = HANDOUT["fsdp"]
    results = {check.id: Result(check=check, status="passed") for check in checks_of("fsdp")}
    beyond = checks_of("fsdp", beyond=True)[0]
    results[beyond.id] = Result(check=beyond, status="failed", message="no")
    found = Grade([fsdp], [], results)
    assert found.points == 15 and f"  fsdp.{beyond.name}: no" in lines(found)

    first, second, third = checks_of("fsdp", beyond=False)[1:4]
    for check in (first, second):
        results[check.id] = Result(check=check, status="skipped", message="needs a GPU (a.py:3)")
    assert found.is_complete
    assert (
        lines(found)[-1] == "total: 12.7 of 12.7 points that this machine can grade, 2.3 need a GPU"
    )
    results[third.id] = Result(check=third, status="failed", message="wrong")
    results[second.id] = Result(check=second, status="not begun", message="it is missing")
    assert not found.is_complete and found.points == pytest.approx(15 * 10 / 13)
    assert lines(found)[2:5] == [
        f"  {third.name}: wrong",
        f"  {first.name}: skipped: needs a GPU (a.py:3)",
        f"  {second.name}: not begun: it is missing",
    ]


def test_what_does_not_shard_earns_nothing_by_training_right():
    results = {check.id: Result(check=check, status="passed") for check in checks_of("fsdp")}
    shards = CHECKS["fsdp.shards_the_weights"]
    results[shards.id] = Result(check=shards, status="failed", message="no")
    found = Grade([HANDOUT["fsdp"]], [], results)
    assert found.points == 0
    assert lines(found)[3].startswith("  shards_every_weight, equals_one_process, ")
    assert " and 9 more: " in lines(found)[3], "twelve names filled three lines of a terminal"
    assert lines(found)[3].endswith(": earns nothing without shards_the_weights")


def test_checks_beyond_the_handout_are_counted_with_a_word_why_they_are_not_told():
    """A student read `0 of 5 checks pass` and no reason."""
    results = {
        check.id: Result(check=check, status="failed", message="no") for check in checks_of("fsdp")
    }
    told = lines(Grade([HANDOUT["fsdp"]], [], results))
    num_beyond = len(checks_of("fsdp", beyond=True))
    assert told[-3:-1] == [
        f"beyond the handout, without points: 0 of {num_beyond} checks pass",
        f"  told once the problem earns points: fsdp ({num_beyond})",
    ]


def test_each_missing_adapter_of_a_problem_is_named():
    checks = checks_of("flash_forward", beyond=False)
    results = {
        check.id: Result(check=check, status="not begun", message=f"{which} is not implemented")
        for check, which in zip(checks, ("pytorch", "triton") * len(checks))
    }
    told = lines(Grade([HANDOUT["flash_forward"]], [], results))
    assert told[1].endswith("not begun: pytorch is not implemented; triton is not implemented")


def test_a_problem_that_is_a_script_is_not_called_written():
    others = [problem for problem in problems_of(2026) if problem.answer != "graded"]
    told = lines(Grade([HANDOUT["fsdp"]], others, {}))
    assert "a script, no points here: naive_ddp" in told


def test_a_check_that_runs_can_be_interrupted(tmp_path: Path):
    """Ctrl-C of `--jobs 2` waited for the checks of the other submissions, up to their limit."""
    hangs = solution(tmp_path, "import time", "def get_ddp(module): time.sleep(60)")
    with Grader() as own:
        started = time.monotonic()
        timer = threading.Timer(8.0, own.interrupt)  # the first check imports PyTorch before
        timer.start()
        result = own.run(BROADCASTS, hangs)
        timer.cancel()
        assert result.status == "failed" and "has been ended" in result.message
        assert time.monotonic() - started < 30


def test_the_command_prints_json_and_exits_by_the_points(grader: Grader, monkeypatch):
    monkeypatch.setattr(
        "cs336_systems.grading.points.Grader", lambda time_limit_s: nullcontext(grader)
    )
    arguments = ["grade", str(SOLUTIONS / "bucket_ignored.py"), "--json", "--problem"]
    full = invoke(*arguments, "optimizer_state_sharding", "--no-beyond")
    assert full.exit_code == 0, full.stderr
    found = json.loads(full.stdout)
    assert (found["total"], found["gradable_here"], found["points"]) == (15, 15, 15)
    assert found["versions"]["torch"] == metadata.version("torch")
    assert [check["beyond_the_handout"] for check in found["problems"][0]["checks"]] == [False] * 7
    assert all(check["requires"] for check in found["problems"][0]["checks"])
    assert "[ 1/7] passed    optimizer_state_sharding.shards_the_state" in full.stderr
    lost = invoke(*arguments, "ddp_overlap_bucketed", "--problem", "optimizer_state_sharding")
    assert lost.exit_code == 1 and json.loads(lost.stdout)["total"] == pytest.approx(21.4)


def test_a_class_is_graded_in_one_call(tmp_path: Path):
    """Folders and files, two at a time, as a table, as CSV and as Gradescope's files."""
    for name in ("ann", "bob"):
        (tmp_path / name / "tests").mkdir(parents=True)
    (tmp_path / "ann/tests/adapters.py").write_text((SOLUTIONS / "minimal.py").read_text())
    solution(tmp_path / "bob", "")
    folders = [str(tmp_path / name) for name in ("ann", "bob")]
    table, results = tmp_path / "class.csv", tmp_path / "results.json"
    told = invoke(
        "grade", *folders, "--jobs", "2", "--csv", str(table), "--gradescope", str(results),
        "--no-beyond", "--problem", "ddp_overlap_individual_parameters",
    )  # fmt: skip
    assert told.exit_code == 1, told.stderr
    printed = told.stdout.splitlines()
    assert (printed[0], printed[3]) == (folders[0], "total: 5 of 5 points")
    assert (printed[4], printed[-1]) == (folders[1], "total: 0 of 5 points")
    header, ann, bob = csv.reader(table.read_text().splitlines())
    assert header[:4] == ["submission", "total", "gradable_here", "points"]
    assert ann[:5] == [folders[0], "5.0", "5.0", "5", "5.0"] and bob[:2] == [folders[1], "0.0"]
    ann, bob = (json.loads((tmp_path / f"results-{number}.json").read_text()) for number in (1, 2))
    assert ann["score"] == 5 and ann["tests"] == [
        {
            "name": "ddp_overlap_individual_parameters",
            "score": 5,
            "max_score": 5,
            "output": "every check passes",
        }
    ]
    assert bob["score"] == 0 and "not begun: get_ddp is missing" in bob["tests"][0]["output"]


def test_ctrl_c_keeps_the_submissions_that_are_graded(tmp_path: Path, monkeypatch):
    """All were lost, after an hour of a class."""
    paths = [
        solution(tmp_path / name, "") for name in ("ann", "bob") if not (tmp_path / name).mkdir()
    ]

    def grade_or_interrupt(adapters, problems, others, **_):
        if adapters == paths[1]:
            signal.raise_signal(signal.SIGINT)
        return Grade(problems, others)

    monkeypatch.setattr("cs336_systems.grading.points.grade", grade_or_interrupt)
    table = tmp_path / "class.csv"
    told = invoke("grade", *map(str, paths), "--problem", "fsdp", "--csv", str(table))
    assert told.exit_code == 128 + signal.SIGINT
    assert told.stderr == "interrupted: 1 of 2 submissions are graded\n"
    assert told.stdout.splitlines()[0] == str(paths[0]) and str(paths[1]) not in told.stdout
    assert [row[0] for row in csv.reader(table.read_text().splitlines())] == [
        "submission",
        str(paths[0]),
    ]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ("def get_ddp(module): pass", "failed", "get_ddp returns None"),
        ("def get_ddp_individual_parameters(module): raise NotImplementedError", "not begun",
         "get_ddp_individual_parameters is not implemented"),
        ("import torch.nn as nn\nclass get_ddp(nn.Module):\n    def parameters(self): return self.shards()\n"
         "    def shards(self): raise NotImplementedError\n    def __init__(self, module):\n"
         "        super().__init__()\n        self.named_parameters = lambda: self.shards()",
         "not begun", "shards is not implemented (adapters.py:4)"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(
    body: str, status: str, message: str, tmp_path: Path, grader: Grader
):
    check = (
        BROADCASTS
        if "shards" not in body
        else CHECKS["ddp_overlap_individual_parameters.equals_one_process"]
    )
    result = grader.run(check, solution(tmp_path, body))
    assert (result.status, result.message) == (status, message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], "nowhere.py does not exist"),
        (["Makefile"], "Makefile is not a .py file"),
        (["tests/adapters.py", "--csv", "docs"], "--csv: docs cannot be written: Is a directory"),
        (
            ["tests/adapters.py", "--gradescope", "no/x.json"],
            "--gradescope: no/x.json cannot be written: No such file",
        ),
        (["docs"], "docs has neither tests/adapters.py nor adapters.py"),
        (["tests/adapters.py", "--jobs", "0"], "--jobs must be positive, got 0"),
        (
            ["tests/adapters.py", "--edition", "2024"],
            "--edition must be one of 2025, 2026, got 2024",
        ),
        (
            ["tests/adapters.py", "--problem", "nsys_profile"],
            "nsys_profile is measured, not graded by running",
        ),
        (
            ["tests/adapters.py", "--problem", "flash"],
            "unknown problem 'flash'; graded are flash_forward",
        ),
        (
            ["tests/adapters.py", "--problem", "fsdp", "--edition", "2025"],
            "fsdp is a problem of 2026, not of 2025",
        ),
    ],
)
def test_wrong_arguments_are_one_line(arguments, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert_refused(invoke("grade", *arguments), message)


def test_the_page_says_what_each_check_requires():
    page = (ROOT / "docs/grading.md").read_text()
    for check in CHECKS.values():
        assert check.requires in page, f"{check.id} is not in docs/grading.md"
    for problem in HANDOUT.values():
        assert f"`{problem.name}`" in page


def test_a_whole_grade_names_what_has_no_points_here():
    others = [problem for problem in problems_of(2026) if problem.answer != "graded"]
    told = lines(Grade(chosen_problems("fsdp", 2026), others))
    assert any(line.startswith("written, no points here: alternate_ring") for line in told)
    assert told[-1] == "total: 0 of 15 points"
