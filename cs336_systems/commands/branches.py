"""`cs336-systems branches BASE TARGET PROBLEM`: two revisions measured on this machine, then
compared.

Each revision is checked out by `git worktree` into a temporary folder and runs there, with its own
code and nothing of this checkout's; the folders are gone afterwards, also after Ctrl-C. Records
stay, under results/branches, and name their revision. With several rounds the revisions take turns
(base target, target base, ...), so that a clock that drifts is not taken for a change.
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

GIT_TIMEOUT_S = 120
EXIT_INCOMPLETE = 2  # as `compare` says that there is no whole comparison; 1 would be a regression
STOP_TIMEOUT_S = 60  # for a measuring run to end in good order
FOLDER = "branches"  # in results; git ignores it
SIDES = ("base", "target")


def branches(
    base: Annotated[str, typer.Argument(help="A revision: branch, tag or commit.")],
    target: Annotated[str, typer.Argument(help="The revision that is compared with it.")],
    problem: Annotated[str, typer.Argument(help="What is measured; see `list`.")],
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
    """Measure a problem at two revisions, in worktrees of their own, and compare; exits as
    `compare` does.
    """
    from cs336_systems.book.comparison import compare_records, exit_code, pool, read_all

    with one_line_errors():
        check_options(threshold, fail_on)
        # that the command was typed in
        repository = Path(_git(Path.cwd(), "rev-parse", "--show-toplevel"))
        revisions = dict(zip(SIDES, (_resolve(repository, name) for name in (base, target))))
        options = ["--scale", scale, "--device", device]
        options += [f"--implementation={name}" for name in implementation or []]
        options += [] if time_budget is None else ["--time-budget", str(time_budget)]
        folder = (
            results.resolve() / FOLDER / "-".join(revision[:12] for revision in revisions.values())
        )
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


def _git(repository: Path, *arguments: str) -> str:
    """What git answers; ValueError with its complaint. Hooks of the repository do not run."""
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
    """The commit that `name` means; ValueError if there is none, or if the package is not in it."""
    try:
        commit = _git(
            repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}"
        )
    except ValueError:
        raise ValueError(f"no revision {name!r} in {repository.name}") from None
    try:
        _git(repository, "cat-file", "-e", f"{commit}:cs336_systems/__main__.py")
    except ValueError:
        raise ValueError(f"revision {name!r} has no cs336_systems to measure") from None
    return commit


@contextmanager
def _worktrees(repository: Path, revisions: dict[str, str]) -> Iterator[dict[str, Path]]:
    """A detached worktree of each revision in a temporary folder, removed however the context ends."""
    folder = Path(tempfile.mkdtemp(prefix="branches-"))
    try:
        paths = {side: folder / side for side in revisions}
        for side, path in paths.items():
            _git(repository, "worktree", "add", "--detach", "--quiet", str(path), revisions[side])
        yield paths
    finally:
        # a second Ctrl-C must not leave half of it
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            shutil.rmtree(folder, ignore_errors=True)
            # forgets worktrees whose folders are gone, and only those
            _git(repository, "worktree", "prune")
        finally:
            signal.signal(signal.SIGINT, previous)


def _measure(
    worktree: Path, revision: str, problem: str, options: list[str], results: Path
) -> None:
    """`run` in `worktree` with its own code; typer.Exit(2) where nothing could be measured."""
    command = [sys.executable, "-m", "cs336_systems", "run", problem, *options]
    command += ["--results", str(results), "--commit", revision[:12], "--clean"]
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
        process.terminate()  # after Ctrl-C it is ending already
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise
    if code == shared.EXIT_WRONG_ARGUMENT:
        raise typer.Exit(code)  # it has said what was wrong
    if code:
        typer.echo(f"error: measuring {revision[:12]} ended with exit code {code}", err=True)
        raise typer.Exit(EXIT_INCOMPLETE)
