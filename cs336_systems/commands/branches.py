"""`cs336-systems branches BASE TARGET PROBLEM`: measure two revisions here and compare them.

`git worktree` checks each revision out into a temporary folder. It runs there with its own code and
nothing of this checkout's. The folders are removed at the end, also after Ctrl-C. The records stay
under results/branches and name their revision. With several rounds the revisions take turns (base
target, target base, ...), so that a drifting clock does not look like a change.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from cs336_systems.commands import shared
from cs336_systems.commands.compare import (
    FailOnOption,
    ThresholdOption,
    check_options,
    show_comparison,
)
from cs336_systems.commands.shared import DeviceOption, ResultsOption, one_line_errors
from cs336_systems.processes import stop

GIT_TIMEOUT_S = 120
EXIT_INCOMPLETE = 2  # `compare` exits alike for an incomplete comparison; 1 means a regression
STOP_TIMEOUT_S = 60  # for a measuring run to end by itself after SIGTERM
FOLDER = "branches"  # below the results folder; git ignores it
SIDES = ("base", "target")


def branches(
    base: Annotated[str, typer.Argument(help="A revision: branch, tag or commit.")],
    target: Annotated[str, typer.Argument(help="The revision that is compared with it.")],
    problem: Annotated[str, typer.Argument(help="What is measured; see `list`.")],
    *,
    scale: shared.ScaleOption = "auto",
    device: DeviceOption = "auto",
    rounds: Annotated[
        int, typer.Option(min=1, help="How often each revision is measured, in turns.")
    ] = 1,
    implementation: Annotated[
        list[str] | None, typer.Option(help="Measure only these; may be repeated.")
    ] = None,
    time_budget: Annotated[
        float | None, typer.Option(help="Seconds of each run, after which no cell starts.")
    ] = None,
    threshold: ThresholdOption = 1.5,
    fail_on: FailOnOption = "regression",
    results: ResultsOption = Path("results"),
) -> None:
    """Measure a problem at two revisions, each in its own git worktree, and compare the records.

    The exit codes are those of `compare`.
    """
    from cs336_systems.book.comparison import compare_records, exit_code, pool, read_all

    with one_line_errors():
        check_options(threshold, fail_on)

        # The repository is the one that holds the current folder.
        repository = Path(_git(Path.cwd(), ["rev-parse", "--show-toplevel"]))
        revisions = dict(zip(SIDES, (_resolve(repository, name) for name in (base, target))))

        options = ["--scale", scale, "--device", device]
        options += [f"--implementation={name}" for name in implementation or []]
        options += [] if time_budget is None else ["--time-budget", str(time_budget)]
        folder = (
            results.resolve() / FOLDER / "-".join(revision[:12] for revision in revisions.values())
        )

    # Measure both sides in every round; the odd rounds begin with the base.
    interrupted = f"interrupted: the worktrees are gone, finished cells are in {folder}"
    with (
        one_line_errors(),
        shared.ends_at_a_signal(interrupted),
        _worktrees(repository, revisions) as worktrees,
    ):
        for round_number in range(1, rounds + 1):
            for side in SIDES if round_number % 2 else SIDES[::-1]:
                typer.echo(f"round {round_number}, {side}: {problem} at {revisions[side][:12]}")
                into = folder / f"round-{round_number}" / side
                _measure(worktrees[side], revisions[side], problem, options, into)

    # Pool the rounds of each side, then compare the two pools.
    with one_line_errors():
        sides = [
            pool([read_all(folder / f"round-{number}" / side) for number in range(1, rounds + 1)])
            for side in SIDES
        ]
        comparison = compare_records(*sides, threshold_percent=threshold)
        code = exit_code(comparison, fail_on)  # type: ignore[arg-type]
    show_comparison(comparison)
    typer.echo(f"records: {folder}")
    raise typer.Exit(code)


def _git(repository: Path, arguments: list[str]) -> str:
    """Return the output of a git command in `repository`; the repository's hooks do not run.

    ValueError with git's own message if the command fails or git is not installed.
    """
    command = ["git", "-c", "core.hooksPath=/dev/null", "-C", str(repository), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S)
    except FileNotFoundError:
        raise ValueError("branches needs git, and there is none on PATH") from None
    if result.returncode:
        raise ValueError(
            f"git {arguments[0]}: {result.stderr.strip() or f'exit code {result.returncode}'}"
        )
    return result.stdout.strip()


def _resolve(repository: Path, name: str) -> str:
    """Return the commit of the revision `name`.

    ValueError if there is no such revision, or if its tree holds no cs336_systems.
    """
    try:
        commit = _git(
            repository,
            ["rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}"],
        )
    except ValueError:
        raise ValueError(f"no revision {name!r} in {repository.name}") from None
    try:
        _git(repository, ["cat-file", "-e", f"{commit}:cs336_systems/__main__.py"])
    except ValueError:
        raise ValueError(f"revision {name!r} has no cs336_systems to measure") from None
    return commit


@contextmanager
def _worktrees(repository: Path, revisions: dict[str, str]) -> Iterator[dict[str, Path]]:
    """Yield a detached worktree of each revision in a temporary folder; remove them on exit.

    `revisions` maps a side to a commit; the mapping that is yielded has each side's folder.
    """
    folder = Path(tempfile.mkdtemp(prefix="branches-"))
    try:
        paths = {side: folder / side for side in revisions}
        for side, path in paths.items():
            add = ["worktree", "add", "--detach", "--quiet", str(path), revisions[side]]
            _git(repository, add)
        yield paths
    finally:
        # A second Ctrl-C must not interrupt the removal.
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            shutil.rmtree(folder, ignore_errors=True)
            # Prune drops only the records of worktrees whose folders are gone.
            _git(repository, ["worktree", "prune"])
        finally:
            signal.signal(signal.SIGINT, previous)


def _measure(
    worktree: Path, revision: str, problem: str, options: list[str], results: Path
) -> None:
    """Run `cs336-systems run` in `worktree`, with that worktree's code, into the folder `results`.

    typer.Exit(2) if the run fails, after a message that says why.
    """
    command = [sys.executable, "-m", "cs336_systems", "run", problem, *options]
    command += ["--results", str(results), "--commit", revision[:12], "--clean"]

    # The worktree comes first on the path; relative entries would lead elsewhere from there.
    inherited = [
        entry
        for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if os.path.isabs(entry)
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(worktree), *inherited])}

    process = subprocess.Popen(command, cwd=worktree, env=environment)
    try:
        code = process.wait()
    except BaseException:
        stop(process, STOP_TIMEOUT_S)  # after Ctrl-C the child is ending already
        raise

    if code == shared.EXIT_WRONG_ARGUMENT:
        raise typer.Exit(code)  # the child has printed the reason
    if code:
        typer.echo(f"error: measuring {revision[:12]} ended with exit code {code}", err=True)
        raise typer.Exit(EXIT_INCOMPLETE)
