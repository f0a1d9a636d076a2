"""Run every shipped configuration of every attention kernel under NVIDIA's compute-sanitizer, and
record what it says.

    python tools/sanitize.py --commit SHA --clean                       # memcheck and racecheck
    python tools/sanitize.py --commit SHA --clean --tools memcheck --processes 4 --families hopper
    hopper_causal --keep

First the calls of `tests/every_config.py` run without it, in several processes: kernels are
compiled, and results compared with the oracle. Then they run under each tool. memcheck reports
reads and writes out of bounds and misaligned ones.

racecheck reports hazards between threads that share memory. It runs on the Triton kernels alone:
between the specialised warps of the Hopper kernels it cannot tell right from wrong. It does not see
that barriers of all warps and mbarriers order what they share, and reports hundreds of hazards that
are none; small kernels without their barriers it passed (2025.3.1). What orders those accesses a
test reads off the compiled kernels (`tests/ptx_order.py`), and models of the protocols run their
interleavings (`tests/hopper_protocol.py`).

The record holds a row a tool: calls, errors, versions. What a time limit cuts off is recorded as
not finished. A run replaces the record, with `--keep` only the rows that it has itself. Arguments
after `--` go to every_config. The exit code is 1 unless all finished and every row is right.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RECORD = "results/nvidia-h100/sanitizer.jsonl"
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
ORACLE = "oracle"  # the run without a sanitizer
FOUND = 99  # exit code of a sanitizer that has found something
CALLS = re.compile(r"^(\d+) calls\b", re.MULTILINE)
ERRORS = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", re.MULTILINE)
REPORT = "Race reported between"

GROUPS = {
    "triton": ("dense", "causal", "blocks64", "blocks128", "varlen", "varlen_causal"),
    "split": ("split", "split_causal"),
    "hopper": ("hopper", "hopper_causal"),
    "hopper_masked": (
        "hopper_blocks64",
        "hopper_blocks128",
        "hopper_varlen",
        "hopper_varlen_causal",
    ),
}
JUDGED_BY_RACECHECK = (*GROUPS["triton"], *GROUPS["split"])
FAMILIES = [family for families in GROUPS.values() for family in families]


def command_of(tool: str, sanitizer: str, program: Sequence[str]) -> list[str]:
    """The command that runs `program`, a module and its arguments, under `tool`."""
    if tool == ORACLE:
        return [sys.executable, "-m", *program]
    report = (
        ["--racecheck-report", "analysis", "--print-limit", "100000"] if tool == "racecheck" else []
    )
    return [
        sanitizer,
        "--tool",
        tool,
        *report,
        "--error-exitcode",
        str(FOUND),
        sys.executable,
        "-m",
        *program,
    ]


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """End `process`, started in a session of its own, if it still runs, with all that it has
    started.
    """
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_all(
    commands: Sequence[Sequence[str]], logs: Sequence[Path], deadline: float | None
) -> list[int | None]:
    """Run `commands` side by side. Their exit codes; None for one that the time limit ended."""
    running: list[subprocess.Popen[bytes]] = []
    codes: list[int | None] = []
    environment = os.environ | {
        "PYTHONPATH": ".",
        "OMP_NUM_THREADS": "1",
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }
    try:
        for command, log in zip(commands, logs):
            with log.open("w") as output:
                running.append(
                    subprocess.Popen(
                        command,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env=environment,
                        start_new_session=True,
                    )
                )
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(None if deadline is None else max(0.1, deadline - time.monotonic()))
            codes.append(process.poll())
            kill_group(process)
    finally:
        for process in running:
            kill_group(process)
    return codes


def row_of(
    tool: str, codes: Sequence[int | None], texts: Sequence[str], seconds: float
) -> dict[str, Any]:
    """What processes with these exit codes and logs found, and whether all came to the end."""
    reported = sum(int(one or other) for text in texts for one, other in ERRORS.findall(text))
    last_lines = [CALLS.search(text) is not None for text in texts]
    return {
        "tool": tool,
        "calls": sum(int(calls) for text in texts for calls in CALLS.findall(text)),
        # A process that was cut off has reports and no summary.
        "errors": max(reported, sum(text.count(REPORT) for text in texts)),
        "wrong": sum(line.startswith("WRONG") for text in texts for line in text.splitlines()),
        "finished": all(last and code in (0, 1, FOUND) for code, last in zip(codes, last_lines)),
        "killed_by_time_limit": codes.count(None),
        "killed_after_last_line": sum(
            last and code is None for code, last in zip(codes, last_lines)
        ),
        "exit_codes": sorted({code for code in codes if code is not None}),
        "seconds": round(seconds),
    }


def is_right(row: dict[str, Any]) -> bool:
    """Everything ran, and nothing was found."""
    return (
        row["finished"]
        and row["calls"] > 0
        and not row["wrong"]
        and not row["errors"]
        and row["exit_codes"] == [0]
    )


def verdict(row: dict[str, Any]) -> str:
    """One line: whether a row is right, and its numbers."""
    words = "clean" if is_right(row) else "NOT CLEAN"
    killed = ""
    if row["killed_by_time_limit"]:
        killed = (f", {row['killed_by_time_limit']} killed by the time limit"
                  f" ({row['killed_after_last_line']} after its last line)")  # fmt: skip
    return (f"{row['tool']}: {words}: {row['calls']} calls, {row['errors']} errors, "
            f"{row['wrong']} wrong, exit codes {row['exit_codes']}{killed}, {row['seconds']} s")  # fmt: skip


def findings(row: dict[str, Any], texts: Sequence[str]) -> Iterator[str]:
    """The first lines of each log that say what was found, or how it ended."""
    for text in () if is_right(row) else texts:
        lines = text.splitlines()
        telling = [
            line for line in lines if line.startswith(("WRONG", "========= ", "Traceback"))
        ] or lines[-5:]
        yield from telling[:12]


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Run the attention kernels under compute-sanitizer."
    )
    parser.add_argument(
        "--record", default=RECORD, type=Path, help="file of JSON lines, one a row: %(default)s"
    )
    parser.add_argument(
        "--keep", action="store_true", help="leave the record's rows that this run does not have"
    )
    parser.add_argument("--commit", required=True, help="revision of the code under test")
    state = parser.add_mutually_exclusive_group(required=True)
    state.add_argument(
        "--clean", dest="dirty", action="store_false", help="the code has no uncommitted changes"
    )
    state.add_argument(
        "--dirty", dest="dirty", action="store_true", help="the code has uncommitted changes"
    )
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=["memcheck", "racecheck"])
    parser.add_argument(
        "--families", nargs="+", choices=FAMILIES, default=FAMILIES, help="of calls (default: all)"
    )
    parser.add_argument(
        "--processes", type=int, default=8, help="processes side by side (default: %(default)s)"
    )
    parser.add_argument("--time-limit", type=float, help="seconds (default: none)")
    parser.add_argument(
        "--sanitizer", default="compute-sanitizer", help="the program (default: %(default)s)"
    )
    parser.add_argument(
        "arguments", nargs="*", metavar="ARGUMENT", help="for tests.every_config, after --"
    )
    options = parser.parse_args()
    if options.processes < 1:
        parser.error(f"--processes must be positive, got {options.processes}")
    if options.keep and not options.record.is_file():
        parser.error(f"--keep needs a record, and {options.record} is no file")
    if shutil.which(options.sanitizer) is None:
        parser.error(f"no program {options.sanitizer!r}: it comes with the CUDA toolkit")
    old = (
        [json.loads(line) for line in options.record.read_text().splitlines()]
        if options.keep
        else []
    )
    rows: list[dict[str, Any]] = []
    for row in run_tools(options):
        rows.append(row | described(options))
        ran = set(map(what_ran, rows))
        kept = [row for row in old if what_ran(row) not in ran]
        options.record.parent.mkdir(parents=True, exist_ok=True)
        options.record.write_text(
            "".join(json.dumps(row, sort_keys=True) + "\n" for row in kept + rows)
        )
    return 0 if all(map(is_right, rows)) else 1


def what_ran(row: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """What tells a row from the record's others."""
    return row["tool"], tuple(row["families"])


def run_tools(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of all tools, each printed as it is ready."""
    deadline = None if options.time_limit is None else time.monotonic() + options.time_limit

    def run(tool: str, families: Sequence[str]) -> dict[str, Any]:
        begin = time.monotonic()
        arguments = [
            *options.arguments,
            "--families",
            *families,
            *["--no-oracle"] * (tool != ORACLE),
        ]
        shards = (f"{number}/{options.processes}" for number in range(options.processes))
        programs = [["tests.every_config", "--shard", shard, *arguments] for shard in shards]
        with tempfile.TemporaryDirectory() as folder:
            logs = [Path(folder) / f"{number}.log" for number in range(len(programs))]
            codes = run_all(
                [command_of(tool, options.sanitizer, program) for program in programs],
                logs,
                deadline,
            )
            texts = [log.read_text(errors="replace") for log in logs]
        row = row_of(tool, codes, texts, time.monotonic() - begin)
        print(
            "\n    ".join([verdict(row), *(line[:200] for line in findings(row, texts))]),
            flush=True,
        )
        return row | {"families": list(families)}

    for tool in (ORACLE, *options.tools):
        judged = [
            family
            for family in options.families
            if tool != "racecheck" or family in JUDGED_BY_RACECHECK
        ]
        if judged:
            yield run(tool, judged)


def described(options: argparse.Namespace) -> dict[str, Any]:
    """Where, when and on what: the rest of a row."""
    import torch
    import triton

    version = subprocess.run(
        [options.sanitizer, "--version"], capture_output=True, text=True
    ).stdout
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
