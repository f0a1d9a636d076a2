"""Run every shipped configuration of every attention kernel under NVIDIA's compute-sanitizer, and record what it says.

    python tools/sanitize.py --commit SHA --clean                       # memcheck and racecheck
    python tools/sanitize.py --commit SHA --clean --tools memcheck --processes 4 --families hopper hopper_causal --keep

First the calls of `tests/every_config.py` run without it, in several processes: kernels are compiled, and results
compared with the oracle. Then they run under each tool. memcheck reports reads and writes out of bounds and misaligned
ones, racecheck hazards between threads that share memory.

racecheck is judged by groups of calls. The Triton kernels must be clean. In the Hopper kernels it may report hazards of
two mechanisms, by which specialised warps order what they share:

  dispatch   the number of each warp's partition: written and read between barriers of all warps, at the kernel's first
             line and at `gl.warp_specialize`
  ring       rows in `..._slots`, and the forward's `items`, guarded by mbarriers at which one thread arrives for those
             that it met before

A hazard is explained if its source lines are of one mechanism, and a control kernel, which is right and tiny
(`tests/sanitizer_controls.py`), shows that mechanism in the same run. Any other hazard is an error. Explained is not
checked: between specialised warps racecheck cannot tell right from wrong, and it is a test that reads the order of
these accesses off the compiled kernels (`tests/test_sanitize.py`).

The record holds a row a tool and group: calls, errors, hazards by their places, versions. What a time limit cuts off is
recorded as not finished. A run replaces the record, with `--keep` only the rows that it has itself. Arguments after
`--` go to every_config. The exit code is 1 unless all finished and every row is right.
"""

import argparse
import ast
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
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

RECORD = "results/nvidia-h200/sanitizer.jsonl"
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
ORACLE = "oracle"  # the run without a sanitizer
FOUND = 99  # exit code of a sanitizer that has found something
CALLS = re.compile(r"^(\d+) calls\b", re.MULTILINE)
ERRORS = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard", re.MULTILINE)
REPORT = "Race reported between"
ACCESS = re.compile(r"(Read|Write) access(?: at (\w+)\S* in (\S+):(\d+))?(?:.*\[(\d+) hazards?\])?")
SLOT_ACCESS = re.compile(r"\b(\w+_slots|items)\.index\(\w*slot\)\.(load|store)\(")

GROUPS = {
    "triton": ("dense", "causal", "blocks64", "blocks128", "varlen", "varlen_causal"),
    "split": ("split", "split_causal"),
    "hopper": ("hopper", "hopper_causal"),
    "hopper_masked": ("hopper_blocks64", "hopper_blocks128", "hopper_varlen", "hopper_varlen_causal"),
}
FAMILIES = [family for families in GROUPS.values() for family in families]
# Which mechanisms racecheck may report of a control.
CONTROLS = {"dispatch": {"dispatch"}, "ring": {"dispatch", "ring"}, "exchange": {"dispatch"}}
ROOT = Path(__file__).resolve().parent.parent
SOURCES = [*(ROOT / "cs336_systems/attention/hopper").glob("*.py"), ROOT / "tests/sanitizer_controls.py"]


class Access(NamedTuple):
    kind: str  # Read or Write
    kernel: str
    file: str  # its name
    line: int  # from 1; 0 where the sanitizer does not say

    def __str__(self) -> str:
        return f"{self.kind} {self.file}:{self.line}"


Hazard = tuple[Access, Access]  # a read comes before a write
UNKNOWN = Access("Write", "", "", 0)


def hazards_of(text: str) -> Counter[Hazard]:
    """How many hazards a log of racecheck reports between each two places."""
    hazards: Counter[Hazard] = Counter()
    for report in text.split(REPORT)[1:]:
        found = [(Access(kind, kernel, Path(file).name, int(line or 0)), int(count or 1))
                 for kind, kernel, file, line, count in ACCESS.findall(report)]  # fmt: skip
        first = found[0][0] if found else UNKNOWN
        for other, count in found[1:] or [(UNKNOWN, 1)]:
            one, other = sorted((first, other))
            hazards[one, other] += count
    return hazards


def mechanism(hazard: Hazard) -> str:
    """What the two source lines are of: `dispatch`, `ring`, or neither, an empty string."""
    read, write = hazard
    if (read.kind, write.kind) != ("Read", "Write") or (read.kernel, read.file) != (write.kernel, write.file):
        return ""
    first_line, dispatch_lines = dispatch_of(read.kernel, read.file)
    if read.line == first_line and write.line in dispatch_lines:
        return "dispatch"
    load, store = SLOT_ACCESS.search(line_of(read)), SLOT_ACCESS.search(line_of(write))
    if load and store and (load[1], load[2], store[2]) == (store[1], "load", "store"):
        return "ring"
    return ""


@cache
def source(file: str) -> str:
    return next((path.read_text() for path in SOURCES if path.name == file), "")


def line_of(access: Access) -> str:
    return dict(enumerate(source(access.file).splitlines(), start=1)).get(access.line, "")


def dispatch_of(kernel: str, file: str) -> tuple[int, set[int]]:
    """A kernel's first line, and all of its dispatch: that and the statements around `gl.warp_specialize`, if any.

    They are the kernel's own, or those of a function that it calls, with that one's first line and the call's.
    """
    functions = {x.name: x for x in ast.parse(source(file)).body if isinstance(x, ast.FunctionDef)}
    if kernel not in functions:
        return 0, set()
    own = functions[kernel]
    statements: list[ast.stmt] = []
    firsts = {own.lineno}
    for x in own.body:
        called = next((name for name in functions if f"{name}(" in ast.unparse(x)), "")
        within = [y for y in functions[called].body if _specialises(y)] if called else []
        firsts |= {functions[called].lineno} if within else set()
        statements += [x, *within] if within or _specialises(x) else []
    lines = {line for x in statements for line in range(x.lineno, (x.end_lineno or x.lineno) + 1)}
    return own.lineno, firsts | lines if lines else set()


def _specialises(statement: ast.stmt) -> bool:
    return "gl.warp_specialize" in ast.unparse(statement)


def command_of(tool: str, sanitizer: str, program: Sequence[str]) -> list[str]:
    """The command that runs `program`, a module and its arguments, under `tool`."""
    if tool == ORACLE:
        return [sys.executable, "-m", *program]
    report = ["--racecheck-report", "analysis", "--print-limit", "100000"] if tool == "racecheck" else []
    return [sanitizer, "--tool", tool, *report, "--error-exitcode", str(FOUND), sys.executable, "-m", *program]


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """End `process`, started in a session of its own, if it still runs, with all that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_all(commands: Sequence[Sequence[str]], logs: Sequence[Path], deadline: float | None) -> list[int | None]:
    """Run `commands` side by side. Their exit codes; None for one that the time limit ended."""
    running: list[subprocess.Popen[bytes]] = []
    codes: list[int | None] = []
    environment = os.environ | {"PYTHONPATH": ".", "OMP_NUM_THREADS": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        for command, log in zip(commands, logs):
            with log.open("w") as output:
                running.append(
                    subprocess.Popen(
                        command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
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


def row_of(tool: str, group: str, codes: Sequence[int | None], texts: Sequence[str], seconds: float) -> dict[str, Any]:
    """What processes with these exit codes and logs found, and whether all came to the end."""
    hazards = sum(map(hazards_of, texts), Counter[Hazard]())
    reported = sum(int(one or other) for text in texts for one, other in ERRORS.findall(text))
    last_lines = [CALLS.search(text) is not None for text in texts]
    row = {
        "tool": tool,
        "group": group,
        "calls": sum(int(calls) for text in texts for calls in CALLS.findall(text)),
        # A process that was cut off has reports and no summary.
        "errors": max(reported, sum(text.count(REPORT) for text in texts)),
        "wrong": sum(line.startswith("WRONG") for text in texts for line in text.splitlines()),
        "finished": all(last and code in (0, 1, FOUND) for code, last in zip(codes, last_lines)),
        "killed_by_time_limit": codes.count(None),
        "killed_after_last_line": sum(last and code is None for code, last in zip(codes, last_lines)),
        "exit_codes": sorted({code for code in codes if code is not None}),
        "seconds": round(seconds),
    }
    if tool == "racecheck":
        row["hazards"] = [
            {"kernel": hazard[0].kernel, "places": list(map(str, hazard)), "mechanism": mechanism(hazard),
             "hazards": count}
            for hazard, count in sorted(hazards.items())
        ]  # fmt: skip
        row["explained"] = False
    return row


def mechanisms_in(row: dict[str, Any]) -> set[str]:
    return {hazard["mechanism"] for hazard in row["hazards"]}


def explain(row: dict[str, Any], controls: dict[str, dict[str, Any]]) -> None:
    """Whether what racecheck reported of a control, or of the Hopper kernels, is what it must be."""
    name = row["group"].removeprefix("control ")
    found = mechanisms_in(row)
    if name in CONTROLS:
        row["explained"] = found <= CONTROLS[name]
    elif row["group"].startswith("hopper") and {*CONTROLS} == {*controls} and all(map(is_right, controls.values())):
        row["explained"] = found <= set().union(*map(mechanisms_in, controls.values()))


def is_right(row: dict[str, Any]) -> bool:
    """Everything ran, and a sanitizer found nothing, or what is explained."""
    ran = row["finished"] and row["calls"] > 0 and not row["wrong"]
    if row["errors"]:
        return ran and row.get("explained", False) and {*row["exit_codes"]} <= {0, FOUND}
    return ran and row["exit_codes"] == [0]


def verdict(row: dict[str, Any]) -> str:
    """One line: whether a row is right, and its numbers."""
    words = "NOT CLEAN" if not is_right(row) else "explained" if row["errors"] else "clean"
    killed = ""
    if row["killed_by_time_limit"]:
        killed = (f", {row['killed_by_time_limit']} killed by the time limit"
                  f" ({row['killed_after_last_line']} after its last line)")  # fmt: skip
    return (f"{row['tool']}, {row['group']}: {words}: {row['calls']} calls, {row['errors']} errors, "
            f"{row['wrong']} wrong, exit codes {row['exit_codes']}{killed}, {row['seconds']} s")  # fmt: skip


def findings(row: dict[str, Any], texts: Sequence[str]) -> Iterator[str]:
    """Lines that say what was found: hazards by their places; elsewhere the first of each log, or how it ended."""
    for hazard in row.get("hazards", ()):
        yield (f"{hazard['kernel']}: {' and '.join(hazard['places'])}: {hazard['hazards']} hazards, "
               f"{hazard['mechanism'] or 'NOT EXPLAINED'}")  # fmt: skip
    for text in () if is_right(row) or row.get("hazards") else texts:
        lines = text.splitlines()
        telling = [line for line in lines if line.startswith(("WRONG", "========= ", "Traceback"))] or lines[-5:]
        yield from telling[:12]


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the attention kernels under compute-sanitizer.")
    parser.add_argument("--record", default=RECORD, type=Path, help="file of JSON lines, one a row: %(default)s")
    parser.add_argument("--keep", action="store_true", help="leave the record's rows that this run does not have")
    parser.add_argument("--commit", required=True, help="revision of the code under test")
    state = parser.add_mutually_exclusive_group(required=True)
    state.add_argument("--clean", dest="dirty", action="store_false", help="the code has no uncommitted changes")
    state.add_argument("--dirty", dest="dirty", action="store_true", help="the code has uncommitted changes")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=["memcheck", "racecheck"])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES, help="of calls (default: all)")
    parser.add_argument("--processes", type=int, default=8, help="processes side by side (default: %(default)s)")
    parser.add_argument("--time-limit", type=float, help="seconds (default: none)")
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="the program (default: %(default)s)")
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="for tests.every_config, after --")
    options = parser.parse_args()
    if options.processes < 1:
        parser.error(f"--processes must be positive, got {options.processes}")
    if options.keep and not options.record.is_file():
        parser.error(f"--keep needs a record, and {options.record} is no file")
    if shutil.which(options.sanitizer) is None:
        parser.error(f"no program {options.sanitizer!r}: it comes with the CUDA toolkit")
    old = [json.loads(line) for line in options.record.read_text().splitlines()] if options.keep else []
    rows: list[dict[str, Any]] = []
    for row in run_tools(options):
        rows.append(row | described(options))
        ran = set(map(what_ran, rows))
        kept = [row for row in old if what_ran(row) not in ran]
        options.record.parent.mkdir(parents=True, exist_ok=True)
        options.record.write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in kept + rows))
    return 0 if all(map(is_right, rows)) else 1


def what_ran(row: dict[str, Any]) -> tuple[str, str, tuple[str, ...]]:
    """What tells a row from the record's others: groups of racecheck have families of their own."""
    return row["tool"], row["group"], () if row["tool"] == "racecheck" else tuple(row["families"])


def run_tools(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of all tools, each printed as it is ready."""
    deadline = None if options.time_limit is None else time.monotonic() + options.time_limit
    controls: dict[str, dict[str, Any]] = {}

    def run(tool: str, group: str, programs: Sequence[Sequence[str]]) -> dict[str, Any]:
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            logs = [Path(folder) / f"{number}.log" for number in range(len(programs))]
            codes = run_all([command_of(tool, options.sanitizer, program) for program in programs], logs, deadline)
            texts = [log.read_text(errors="replace") for log in logs]
        row = row_of(tool, group, codes, texts, time.monotonic() - begin)
        if tool == "racecheck":
            explain(row, controls)
        print("\n    ".join([verdict(row), *(line[:200] for line in findings(row, texts))]), flush=True)
        return row

    def calls(tool: str, families: Sequence[str]) -> list[list[str]]:
        arguments = [*options.arguments, "--families", *families, *["--no-oracle"] * (tool != ORACLE)]
        shards = (f"{number}/{options.processes}" for number in range(options.processes))
        return [["tests.every_config", "--shard", shard, *arguments] for shard in shards]

    def run_control(name: str) -> dict[str, Any]:
        return run("racecheck", f"control {name}", [["tests.sanitizer_controls", name]])

    for tool in (ORACLE, *options.tools):
        if tool != "racecheck":
            yield run(tool, "all", calls(tool, options.families))
            continue
        groups = {name: [x for x in families if x in options.families] for name, families in GROUPS.items()}
        if groups["hopper"] or groups["hopper_masked"]:
            with ThreadPoolExecutor() as pool:
                controls |= zip(CONTROLS, pool.map(run_control, CONTROLS))
            yield from controls.values()
        for name, families in groups.items():
            if families:
                yield run(tool, name, calls(tool, families))


def described(options: argparse.Namespace) -> dict[str, Any]:
    """Where, when and on what: the rest of a row."""
    import torch
    import triton

    version = subprocess.run([options.sanitizer, "--version"], capture_output=True, text=True).stdout
    return {
        "families": options.families,
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
