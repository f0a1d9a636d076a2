"""Runs commands in this process or in one of their own, and knows what a refusal looks like."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from cs336_systems.cli import app

ROOT = Path(__file__).resolve().parent.parent


def invoke(*arguments: object, env: dict[str, str] | None = None) -> Any:
    """`cs336-systems ARGUMENTS`: its exit code, stdout and stderr."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=env)


def start(arguments: list[str], **options: bool) -> subprocess.Popen[str]:
    """`cs336-systems ARGUMENTS` in a process of its own; `interrupt` asks for a session of its own."""
    command = [sys.executable, "-m", "cs336_systems", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, **options)


def interrupt(process: subprocess.Popen[str]) -> str:
    """Ctrl-C as a terminal sends it, to the parent and to all of its processes; what was said."""
    os.killpg(process.pid, signal.SIGINT)
    return process.communicate(timeout=60)[1]


def tiny_run(results: Path, *arguments: str) -> list[str]:
    """The arguments of a run at the least scale into `results`."""
    options = (
        "--scale",
        "tiny",
        "--device",
        "cpu",
        "--results",
        str(results),
        "--commit",
        "0123456789ab",
        "--clean",
    )
    return ["run", *arguments, *options]


def assert_refused(result: Any, message: str, code: int = 2) -> None:
    """One clear line, which contains `message`, and the exit code."""
    lines = result.stderr.strip().splitlines()
    assert result.exit_code == code, result.output
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0], result.stderr
