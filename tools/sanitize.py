"""Run every shipped configuration of every attention kernel under NVIDIA's compute-sanitizer, and record what it says.

    python tools/sanitize.py --commit SHA --clean                       # memcheck and racecheck
    python tools/sanitize.py --commit SHA --clean --tools memcheck --processes 4 -- --families hopper hopper_causal

First the calls of `tests/every_config.py` run without it, in several processes: kernels are compiled, and results
compared with the oracle. Then they run under each tool. memcheck reports reads and writes out of bounds and misaligned
ones, racecheck hazards between threads that share memory. The record holds a row a tool: calls, errors, versions. What
a time limit cuts off is recorded as not finished. Arguments after `--` go to every_config. The exit code is 1 unless
everything ran and nothing was found.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cs336_systems.distributed.processes import kill_group

RECORD = "results/nvidia-h200/sanitizer.jsonl"
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
ORACLE = "oracle"  # the run without a sanitizer
FOUND = 99  # exit code of a sanitizer that has found something
CALLS = re.compile(r"^(\d+) calls, forward and backward", re.MULTILINE)
ERRORS = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", re.MULTILINE)


def command_of(tool: str, sanitizer: str, shard: str, arguments: Sequence[str]) -> list[str]:
    """The command that runs one share of the calls under `tool`."""
    calls = [sys.executable, "-m", "tests.every_config", "--shard", shard, *arguments]
    if tool == ORACLE:
        return calls
    return [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), *calls, "--no-oracle"]


def run_tool(
    tool: str, sanitizer: str, processes: int, arguments: Sequence[str], folder: Path, deadline: float | None
) -> dict[str, Any]:
    """What `processes` processes found under `tool`: calls, errors, seconds, and whether all came to the end."""
    begin = time.monotonic()
    logs = [folder / f"{tool}{number}.log" for number in range(processes)]
    running: list[subprocess.Popen[bytes]] = []
    environment = os.environ | {"PYTHONPATH": ".", "OMP_NUM_THREADS": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        for number, log in enumerate(logs):
            command = command_of(tool, sanitizer, f"{number}/{processes}", arguments)
            with log.open("w") as output:
                running.append(
                    subprocess.Popen(
                        command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
                    )
                )
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(None if deadline is None else max(0.1, deadline - time.monotonic()))
            kill_group(process)
    finally:
        for process in running:
            kill_group(process)
    texts = [log.read_text(errors="replace") for log in logs]
    return {
        "tool": tool,
        "calls": sum(int(calls) for text in texts for calls in CALLS.findall(text)),
        "errors": sum(int(one or other) for text in texts for one, other in ERRORS.findall(text)),
        "wrong": sum(line.startswith("WRONG") for text in texts for line in text.splitlines()),
        "finished": all(process.returncode in (0, 1, FOUND) and CALLS.search(text) is not None
                        for process, text in zip(running, texts)),
        "exit_codes": sorted({process.returncode for process in running}),
        "seconds": round(time.monotonic() - begin),
    }  # fmt: skip


def is_clean(row: dict[str, Any]) -> bool:
    return row["finished"] and row["calls"] > 0 and row["exit_codes"] == [0] and not row["errors"] + row["wrong"]


def show_findings(row: dict[str, Any], folder: Path) -> None:
    """The first lines that say what was found, or how a process ended."""
    for log in sorted(folder.glob(f"{row['tool']}*.log")):
        lines = log.read_text(errors="replace").splitlines()
        telling = [line for line in lines if line.startswith(("WRONG", "========= ", "Traceback"))] or lines[-5:]
        print("".join(f"    {line[:200]}\n" for line in telling[:12]), end="", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the attention kernels under compute-sanitizer.")
    parser.add_argument("--record", default=RECORD, type=Path, help="file of JSON lines, one a tool; replaced")
    parser.add_argument("--commit", required=True, help="revision of the code under test")
    state = parser.add_mutually_exclusive_group(required=True)
    state.add_argument("--clean", dest="dirty", action="store_false", help="the code has no uncommitted changes")
    state.add_argument("--dirty", dest="dirty", action="store_true", help="the code has uncommitted changes")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=["memcheck", "racecheck"])
    parser.add_argument("--processes", type=int, default=8, help="processes side by side (default: %(default)s)")
    parser.add_argument("--time-limit", type=float, help="seconds (default: none)")
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="the program (default: %(default)s)")
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="for tests.every_config, after --")
    options = parser.parse_args()
    if options.processes < 1:
        parser.error(f"--processes must be positive, got {options.processes}")
    if shutil.which(options.sanitizer) is None:
        parser.error(f"no program {options.sanitizer!r}: it comes with the CUDA toolkit")
    deadline = None if options.time_limit is None else time.monotonic() + options.time_limit
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for tool in (ORACLE, *options.tools):
            row = run_tool(tool, options.sanitizer, options.processes, options.arguments, Path(folder), deadline)
            rows.append(row | described(options))
            verdict = "clean" if is_clean(row) else "NOT CLEAN"
            print(f"{tool}: {verdict}: {row['calls']} calls, {row['errors']} errors, {row['wrong']} wrong, "
                  f"exit codes {row['exit_codes']}, {row['seconds']} s", flush=True)  # fmt: skip
            if not is_clean(row):
                show_findings(row, Path(folder))
            options.record.parent.mkdir(parents=True, exist_ok=True)
            options.record.write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows))
    return 0 if all(map(is_clean, rows)) else 1


def described(options: argparse.Namespace) -> dict[str, Any]:
    """Where, when and on what: the rest of a row."""
    import torch
    import triton

    version = subprocess.run([options.sanitizer, "--version"], capture_output=True, text=True).stdout
    return {
        "arguments": options.arguments,
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu",
        "sanitizer": next(iter(re.findall(r"Version (\S+)", version)), ""),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": options.commit,
        "dirty": options.dirty,
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


if __name__ == "__main__":
    sys.exit(main())
