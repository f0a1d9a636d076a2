"""`branches`: two revisions of a repository of this test's own, one of them slower, measured and
compared.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from cs336_systems.bench.records import read_records
from cs336_systems.book.comparison import pool
from tests.command_line import assert_refused, invoke
from tests.processes import wait_until
from tests.test_compare import record
from tests.test_records import broken

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = "cs336_systems/attention/reference.py"

pytestmark = pytest.mark.slow


def git(repository: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    result = subprocess.run(
        ["git", *identity, *arguments], cwd=repository, capture_output=True, text=True, check=True
    )
    return result.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Three commits: without the package, with it (tag `before`), with a pause in plain attention
    (tag `after`).
    """
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    (folder / "notes.txt").write_text("first\n")
    # of the command, which is found in the folder it is typed in
    (folder / ".gitignore").write_text("__pycache__\n")
    git(folder, "add", "-A")
    git(folder, "commit", "--quiet", "-m", "notes")
    git(folder, "tag", "empty")
    shutil.copytree(
        ROOT / "cs336_systems",
        folder / "cs336_systems",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    git(folder, "add", "-A")
    git(folder, "commit", "--quiet", "-m", "package")
    git(folder, "tag", "before")
    source = (folder / REFERENCE).read_text()
    call = "    scores = masked_scores(q.dtype)\n"
    assert source.count(call) == 1
    pause = "    __import__('time').sleep(0.05)\n"
    (folder / REFERENCE).write_text(source.replace(call, pause + call))
    git(folder, "add", "-A")
    git(folder, "commit", "--quiet", "-m", "slower")
    git(folder, "tag", "after")
    hook = folder / ".git" / "hooks" / "post-checkout"
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/hook-ran\n")
    hook.chmod(0o755)
    (folder / "notes.txt").write_text("a change that nobody committed\n")
    return folder


def start(repository: Path, problem: str) -> subprocess.Popen[str]:
    """Begin to compare both revisions, with folders `temporary` and `results` beside the
    repository.
    """
    beside = repository.parent
    (beside / "temporary").mkdir()
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(beside / "temporary"),
        "OMP_NUM_THREADS": "1",
    }
    arguments = [
        "before",
        "after",
        problem,
        "--scale",
        "tiny",
        "--device",
        "cpu",
        "--results",
        str(beside / "results"),
    ]
    return subprocess.Popen(
        [sys.executable, "-m", "cs336_systems", "branches", *arguments],
        cwd=repository, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def checkout_state(repository: Path) -> tuple[str, str]:
    return git(repository, "status", "--porcelain"), git(repository, "rev-parse", "HEAD")


def assert_untouched(repository: Path, state: tuple[str, str]) -> None:
    """The checkout is as it was, no worktree is known any more and no temporary folder is left."""
    assert checkout_state(repository) == state
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    assert not list(repository.parent.glob("temporary/branches-*"))


def test_a_slower_revision_is_found_and_the_checkout_is_not_touched(
    repository: Path, tmp_path: Path
) -> None:
    state = checkout_state(repository)
    process = start(repository, "pytorch_attention")
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 1, output + errors
    assert "regression" in output and "pytorch_attention eager" in output
    assert_untouched(repository, state)
    assert not (tmp_path / "hook-ran").exists(), "hooks of the repository do not run"
    for side, tag in (("base", "before"), ("target", "after")):
        (path,) = tmp_path.glob(f"results/**/round-1/{side}/*/records/pytorch_attention.jsonl")
        commits = {record.run.commit for record in read_records(path)}
        assert commits == {git(repository, "rev-parse", tag)[:12]}


def test_ctrl_c_removes_the_worktrees(repository: Path, tmp_path: Path) -> None:
    state = checkout_state(repository)
    process = start(repository, "benchmarking_script")
    # it measures
    wait_until(lambda: list(tmp_path.glob("results/branches/*/round-1/base/*/logs")), process)
    assert list(tmp_path.glob("temporary/branches-*/base/cs336_systems"))
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "interrupted: the worktrees are gone" in errors
    assert_untouched(repository, state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["before", "nowhere", "pytorch_attention"], "no revision 'nowhere' in repository"),
        (
            ["empty", "before", "pytorch_attention"],
            "revision 'empty' has no cs336_systems to measure",
        ),
        (["--", "--upload-pack=x", "before", "pytorch_attention"], "no revision '--upload-pack=x'"),
        (["before", "after", "x", "--threshold", "nan"], "--threshold must be a finite percentage"),
        (
            ["before", "after", "x", "--fail-on", "all"],
            "--fail-on must be one of regression, any, none, got 'all'",
        ),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: list[str], message: str, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository)
    assert_refused(invoke("branches", *arguments), message)


def test_a_row_that_failed_in_one_round_is_failed() -> None:
    good = record(128, [1.0, 2.0])
    bad = broken(good, "failed", "cell took longer than 600 s")
    assert pool([[good], [bad], [good]]) == [bad] and pool([[bad], [good]]) == [bad]
    again = replace(good, samples=[3.0])
    assert pool([[good, again]]) == [again], "inside a round the newest counts"
