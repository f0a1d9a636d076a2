"""Runs commands in this process, and knows what a refusal looks like."""

from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from cs336_systems.cli import app


def invoke(*arguments: object, env: dict[str, str] | None = None) -> Any:
    """`cs336-systems ARGUMENTS`: its exit code, stdout and stderr."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=env)


def tiny_run(results: Path, *arguments: str) -> list[str]:
    """The arguments of a run at the least scale into `results`."""
    options = ("--scale", "tiny", "--device", "cpu", "--results", str(results), "--commit", "0123456789ab", "--clean")
    return ["run", *arguments, *options]


def assert_refused(result: Any, message: str, code: int = 2) -> None:
    """One clear line, which contains `message`, and the exit code."""
    lines = result.stderr.strip().splitlines()
    assert result.exit_code == code, result.output
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0], result.stderr
