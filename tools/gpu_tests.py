"""Run the GPU tests side by side, many processes a GPU, and record their outcomes in one file.

    python tools/gpu_tests.py --commit SHA --clean                      # every visible GPU, 16 processes on each
    python tools/gpu_tests.py --commit SHA --clean --gpus 2,3 --time-limit 300 -- -k hopper

Most tests wait for compilers and small launches, so that a GPU has room for many of them. First
these run, each process on one GPU. Then one process with all GPUs runs what is marked
`several_gpus`, since ranks wait for one another and are timed. At last what is marked `alone` (it
times, or fills the memory, or counts all of it) runs in one process a GPU. Every test's row is
written when it ends: what a time limit cuts off keeps the rows it has. Arguments after `--` are
pytest's. The exit code is 1 if any test fails.
"""

import argparse
import contextlib
import io
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import pytest

# tests that stay together: neighbours use the same kernels, and the slowest are neighbours too
GROUP = 3
RECORD = "results/nvidia-h200/tests.jsonl"
NO_TESTS_RAN = 5  # pytest's exit code


class GpuTest(NamedTuple):
    """A collected GPU test, by pytest's node id."""

    name: str
    alone: bool = False
    several_gpus: bool = False


class Share(NamedTuple):
    """The tests of one process, and the GPUs that it sees."""

    gpus: tuple[str, ...]
    tests: tuple[str, ...]


class Collector:
    """A plugin of pytest that keeps what is left to run."""

    def __init__(self) -> None:
        self.tests: list[GpuTest] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.tests = [
            GpuTest(
                item.nodeid, item.get_closest_marker("alone") is not None,
                item.get_closest_marker("several_gpus") is not None,
            )
            for item in session.items
        ]  # fmt: skip


def collect(arguments: Sequence[str]) -> list[GpuTest]:
    """The GPU tests that pytest finds with `arguments`; SystemExit with its output where it finds
    none.
    """
    collector, output = Collector(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        status = pytest.main(["-m", "gpu", "--collect-only", "-q", *arguments], plugins=[collector])
    if status not in (0, NO_TESTS_RAN):
        raise SystemExit(f"{output.getvalue()}error: pytest could not collect the tests")
    if not collector.tests:
        raise SystemExit("error: no GPU test fits these arguments")
    return collector.tests


def plan(tests: Sequence[GpuTest], gpus: Sequence[str], processes: int) -> list[list[Share]]:
    """Who runs what, phase after phase: `processes` on each of `gpus`, one on all, then one on
    each.
    """
    together = [test.name for test in tests if not test.alone and not test.several_gpus]
    spread = tuple(test.name for test in tests if test.several_gpus)
    alone = [test.name for test in tests if test.alone and not test.several_gpus]
    first = [
        Share((gpus[n % len(gpus)],), names)
        for n, names in enumerate(_deal(together, len(gpus) * processes))
    ]
    second = [Share(tuple(gpus), spread)] if spread else []
    third = [Share((gpu,), names) for gpu, names in zip(gpus, _deal(alone, len(gpus)))]
    return [phase for phase in (first, second, third) if phase]


def _deal(names: Sequence[str], hands: int) -> list[tuple[str, ...]]:
    """`names` in at most `hands` parts, dealt out in groups of neighbours."""
    size = max(1, min(GROUP, -(-len(names) // hands)))
    groups = [names[start : start + size] for start in range(0, len(names), size)]
    dealt = [
        tuple(name for group in groups[hand::hands] for name in group) for hand in range(hands)
    ]
    return [part for part in dealt if part]


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """End `process`, started in a session of its own, if it still runs, with all that it has
    started.
    """
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_phase(
    shares: Sequence[Share], pytest_options: Sequence[str], folder: Path, deadline: float | None
) -> bool:
    """Run a process for each share until `deadline` (time.monotonic), say how each ended; whether
    all tests passed.

    None of them, nor of what they started, is left when this ends by an exception.
    """
    folder.mkdir()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number, share in enumerate(shares):
            processes.append(_start(share, folder / f"{number}.log", pytest_options))
        return _await_all(shares, processes, folder, deadline)
    finally:
        for process in processes:
            kill_group(process)


def _await_all(
    shares: Sequence[Share],
    processes: Sequence[subprocess.Popen[bytes]],
    folder: Path,
    deadline: float | None,
) -> bool:
    passed = True
    for number, (share, process) in enumerate(zip(shares, processes)):
        try:
            process.wait(None if deadline is None else max(0.1, deadline - time.monotonic()))
            ended = f"exit {process.returncode}"
        except subprocess.TimeoutExpired:
            kill_group(process)
            ended = "killed by the time limit"
        lines = (folder / f"{number}.log").read_text(errors="replace").splitlines() or [""]
        print(
            f"GPU {','.join(share.gpus)}, {len(share.tests)} tests, {ended}: {lines[-1].strip('= ')[:200]}"
        )
        failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        if process.returncode != 0:
            passed = False
            print(
                "".join(f"    {line[:300]}\n" for line in failures or lines[-10:]),
                end="",
                flush=True,
            )
    return passed


def _start(share: Share, log: Path, pytest_options: Sequence[str]) -> subprocess.Popen[bytes]:
    listed = log.with_suffix(".txt")
    listed.write_text("".join(f"{name}\n" for name in share.tests))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        *pytest_options,
    ]
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": ",".join(share.gpus),
        "OMP_NUM_THREADS": "1",
    }
    with log.open("w") as output:
        return subprocess.Popen(
            [*command, f"@{listed}"],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def _interrupt(number: int, _: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


def visible_gpus() -> list[str]:
    """The GPUs of this process, as `CUDA_VISIBLE_DEVICES` names them."""
    import torch

    if named := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return named.split(",")
    return [str(index) for index in range(torch.cuda.device_count())]


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Run the GPU tests side by side and record their outcomes."
    )
    parser.add_argument(
        "--record", default=RECORD, help="file of JSON lines, one a test (default: %(default)s)"
    )
    parser.add_argument("--commit", required=True, help="revision of the code under test")
    state = parser.add_mutually_exclusive_group(required=True)
    state.add_argument(
        "--clean", dest="dirty", action="store_false", help="the code has no uncommitted changes"
    )
    state.add_argument(
        "--dirty", dest="dirty", action="store_true", help="the code has uncommitted changes"
    )
    parser.add_argument("--gpus", help="which GPUs, such as 0,1 (default: all that are visible)")
    parser.add_argument(
        "--processes", type=int, default=16, help="processes a GPU (default: %(default)s)"
    )
    parser.add_argument("--time-limit", type=float, help="seconds (default: none)")
    parser.add_argument(
        "pytest_arguments", nargs="*", metavar="ARGUMENT", help="for pytest, after --"
    )
    options = parser.parse_args()
    gpus = [gpu.strip() for gpu in options.gpus.split(",")] if options.gpus else visible_gpus()
    if not gpus:
        parser.error("no CUDA GPU is visible here")
    if not all(gpus) or len(set(gpus)) < len(gpus):
        parser.error(f"--gpus must name each GPU once, got {options.gpus}")
    limit = math.inf if options.time_limit is None else options.time_limit
    if options.processes < 1 or not limit > 0:
        parser.error(
            f"--processes and --time-limit must be positive, got {options.processes} and {options.time_limit}"
        )
    begin = time.monotonic()
    deadline = None if options.time_limit is None else begin + options.time_limit
    phases = plan(collect(options.pytest_arguments), gpus, options.processes)
    recording = [
        f"--gpu-record={options.record}", f"--gpu-commit={options.commit}",
        "--gpu-dirty" if options.dirty else "--gpu-clean",
    ]  # fmt: skip
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # under nohup a hang-up stays ignored
        if signal.getsignal(signal_number) is not signal.SIG_IGN:
            signal.signal(signal_number, _interrupt)
    passed = True
    try:
        with tempfile.TemporaryDirectory() as folder:
            for number, shares in enumerate(phases):
                passed &= run_phase(shares, recording, Path(folder, str(number)), deadline)
    except KeyboardInterrupt as interrupt:
        print("interrupted: the rows of what has ended are kept", file=sys.stderr)
        return 128 + int(interrupt.args[0])
    print(
        f"{'passed' if passed else 'NOT ALL PASSED'} in {time.monotonic() - begin:.0f} s",
        flush=True,
    )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
