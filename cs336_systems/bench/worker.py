"""Measure cells in a child process, so that an out-of-memory error or a hang costs one cell only.

Parent side: `Worker.measure(cell)` returns an `Outcome`; a child that died or ran out of time is
replaced before the next cell. Child side: `_serve` answers cells over a pipe until it is told to
stop. After an out-of-memory error the child frees its memory and goes on. Any unexpected error ends
the child, since a CUDA fault leaves its context unusable; the error is its last message to the
parent.
"""

import gc
import multiprocessing
import os
import signal
import sys
import traceback
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path

from cs336_systems.bench.records import Status
from cs336_systems.bench.spec import Cell, Disagreement, Sample, Unsupported
from cs336_systems.config import RunConfig
from cs336_systems.processes import end_with_parent, exit_reason, log_output

START_TIMEOUT_S = 300  # importing torch on a cold disk
STOP_TIMEOUT_S = 10
READY = "ready"
# a child's answer to a cell that it must not measure, since it still holds too much GPU memory
USED_UP = "used up"
# GPU memory that a process may still hold when a case begins: workspaces of cuBLAS, of kernels, of
# Triton.
MOST_HELD_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a cell: its measurements, and the reason why others are missing."""

    measurements: list[Sample] = field(default_factory=list)
    # status of the rows without a measurement: ok (there are none), oom, failed or skipped
    status: Status = "ok"
    message: str = ""
    # GPU memory that the process held as the cell began; None: not counted
    held_bytes: int | None = None


class Worker:
    """A child process that measures cells one after the other, started when it is needed.

    The child's output goes to the file `log`: compiler warnings, tracebacks. `interpret` runs
    Triton's kernels in its interpreter.
    """

    def __init__(self, run: RunConfig, log: Path, interpret: bool) -> None:
        self.run, self.log, self.interpret = run, log, interpret
        self.process: multiprocessing.process.BaseProcess | None = None
        self.pipe: Connection | None = None

    def measure(self, cell: Cell) -> Outcome:
        """Measure `cell` in the child and return the outcome; "failed" if the child dies or hangs.

        The child hangs if no sample arrives for the run's `cell_timeout_s`. A cell with
        `fresh_process` gets a new child.
        """
        if cell.fresh_process:
            self.stop()
        if self.process is not None and not self.process.is_alive():
            self.kill()
        if self.process is None:
            self._start()
        assert self.pipe is not None and self.process is not None

        measurements: list[Sample] = []
        try:
            self.pipe.send(cell)
            while self.pipe.poll(self.run.cell_timeout_s):
                answer = self.pipe.recv()
                if isinstance(answer, Sample):
                    measurements.append(answer)
                    continue
                if answer == USED_UP:
                    # A new process holds no memory.
                    self.stop()
                    return self.measure(cell)
                if answer.status == "failed" or cell.fresh_process:
                    self.stop()
                return replace(answer, measurements=measurements)
            message = f"no result within {self.run.cell_timeout_s} s"
        except (EOFError, ConnectionError):
            self.process.join(STOP_TIMEOUT_S)
            message = f"the measuring process died ({exit_reason(self.process.exitcode)})"
        self.kill()
        return Outcome(measurements=measurements, status="failed", message=message)

    def stop(self) -> None:
        """Ask the child to end, and kill it if it has not after STOP_TIMEOUT_S."""
        if self.process is not None and self.pipe is not None:
            try:
                self.pipe.send(None)
                self.process.join(STOP_TIMEOUT_S)
            except (BrokenPipeError, OSError):
                pass  # it is gone already
            self.kill()

    def kill(self) -> None:
        """Kill the child at once; it is gone when this returns."""
        if self.process is not None and self.pipe is not None:
            self.process.kill()
            self.process.join()
            self.pipe.close()
        self.process = self.pipe = None

    def _start(self) -> None:
        """Start the child and wait until it is ready; OSError if it is not in START_TIMEOUT_S."""
        # Python's resource tracker warns of semaphores that a killed process leaves. It removes
        # them anyway, so the warning is silenced.
        os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")
        context = multiprocessing.get_context("spawn")
        self.pipe, child_pipe = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(child_pipe, self.run, self.log, self.interpret)
        )
        self.process.start()
        child_pipe.close()  # so that the parent sees the end of the pipe when the child dies
        try:
            ready = self.pipe.poll(START_TIMEOUT_S) and self.pipe.recv() == READY
        except (EOFError, ConnectionResetError):
            ready = False
        if not ready:
            self.kill()
            raise OSError(f"the measuring process could not start; {self.log} says why")


def outcome_of(error: BaseException) -> Outcome:
    """Return the outcome of a cell that `error` ended: oom, skipped or failed, with a message."""
    import torch

    if isinstance(error, Unsupported):
        return Outcome(status="skipped", message=str(error))
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "triton":
        return Outcome(status="skipped", message="triton is not installed")
    if isinstance(error, torch.OutOfMemoryError):
        return Outcome(status="oom", message=_first_line(error))
    if isinstance(error, Disagreement):
        return Outcome(status="failed", message=str(error))
    return Outcome(status="failed", message=f"{type(error).__name__}: {_first_line(error)}")


def search_current_folder() -> None:
    """Append the current folder to `sys.path`, so that a user's own model there can be imported.

    It comes last, so that no file in it (a `sympy.py`, a `triton.py`) hides an installed package.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def _serve(pipe: Connection, run: RunConfig, log: Path, interpret: bool) -> None:
    """Run the child: prepare the process, then answer cells until None or the end of the pipe.

    For each cell it sends a `Sample` per measured row and then an `Outcome`, or USED_UP and ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C

    log_output(log)

    search_current_folder()  # for a user's own model or implementation
    if interpret:
        from cs336_systems.device import interpret_kernels

        # This precedes the import of triton, whose own jitted functions must be interpreted, too.
        interpret_kernels()

    import torch
    import torch._dynamo
    import torch._functorch.config

    end_with_parent()
    # A backward is timed several times on one graph, which donated buffers do not allow. A sweep
    # over lengths and head dims compiles more variants of one function than the default limit.
    torch._functorch.config.donated_buffer = False
    torch._dynamo.config.recompile_limit = 64

    from cs336_systems.bench.spec import load
    from cs336_systems.measure.allocations import (
        forget_case,
        held_bytes,
        one_out_of_memory_error,
        release,
    )

    # Imported modules stay alive. Without freeze, the collector would scan them several times a
    # cell, for 0.2 s each.
    gc.collect()
    gc.freeze()
    pipe.send(READY)

    problem, case = "", None
    while True:
        try:
            cell = pipe.recv()
        except EOFError:
            return
        if cell is None:
            return

        # A new problem compiles its functions again, whatever problems before it compiled.
        if cell.problem != problem:
            problem = cell.problem
            torch._dynamo.reset()

        # A case's implementations share tensors, which a new case does not need.
        if cell.case != case and case is not None:
            forget_case()
            release(run.device)
            if (held_bytes(run.device) or 0) > MOST_HELD_BYTES:
                print(
                    f"{held_bytes(run.device):,} bytes are left of {case}: "
                    "going on in a new process",
                    flush=True,
                )
                pipe.send(USED_UP)
                return

        case = cell.case
        held = held_bytes(run.device)
        outcome = Outcome()
        try:
            with one_out_of_memory_error():
                for measurement in load(cell.measured_by or problem).measure(cell, run):
                    if not isinstance(measurement, Sample):
                        raise TypeError(
                            f"measure must yield Samples, got a {type(measurement).__name__}"
                        )
                    pipe.send(measurement)
        except (Unsupported, ModuleNotFoundError, torch.OutOfMemoryError, Disagreement) as error:
            # The process is sound and goes on, but the parent ends it if the status is "failed".
            outcome = outcome_of(error)
        except BaseException as error:
            # The process may be unusable: report the error and end.
            traceback.print_exc()
            pipe.send(replace(outcome_of(error), held_bytes=held))
            raise
        release(run.device)
        pipe.send(replace(outcome, held_bytes=held))


def _first_line(error: BaseException) -> str:
    """Return the first non-blank line of the message, cut to 300 characters, or the type's name."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip()[:300] if lines else type(error).__name__
