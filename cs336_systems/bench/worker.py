"""The process that measures cells, so that an out-of-memory, a kernel fault or a hang costs one
cell and no sweep.

Parent side: `Worker.measure(cell)` returns an `Outcome`; a worker that died or ran out of time is
replaced before the next cell. Child side: `_serve` answers cells over a pipe until told to stop. An
out-of-memory is caught and the process goes on with its memory given back; any other error ends the
process, since a CUDA fault leaves its context unusable, and travels to the parent as its last
message.
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

START_TIMEOUT_S = 300  # importing torch on a cold disk
STOP_TIMEOUT_S = 10
READY = "ready"
# a child's answer to a cell that it must not measure, since its memory is not empty
USED_UP = "used up"
# Of the GPU's memory, what a process may still hold when a case begins: workspaces of cuBLAS, of
# kernels, of Triton.
MOST_HELD_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a cell came to: the measurements it got to, and why the rest is missing."""

    measurements: list[Sample] = field(default_factory=list)
    # of the rows without a measurement: ok (there are none), oom, failed or skipped
    status: Status = "ok"
    message: str = ""
    # of the GPU's memory, by the process as the cell began; None: not counted
    held_bytes: int | None = None


class Worker:
    """A child process for cells. `log` takes what libraries print there (compiler warnings,
    tracebacks).
    """

    def __init__(self, run: RunConfig, log: Path, interpret: bool) -> None:
        self.run, self.log, self.interpret = run, log, interpret
        self.process: multiprocessing.process.BaseProcess | None = None
        self.pipe: Connection | None = None

    def measure(self, cell: Cell) -> Outcome:
        """Measure `cell`, in a new process if it asks for one, within the run's time-out."""
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
                if answer == USED_UP:  # which a new process is not
                    self.stop()
                    return self.measure(cell)
                if answer.status == "failed" or cell.fresh_process:
                    self.stop()
                return replace(answer, measurements=measurements)
            message = f"no result within {self.run.cell_timeout_s} s"
        except (EOFError, ConnectionError):
            from cs336_systems.distributed.spawn import exit_reason

            self.process.join(STOP_TIMEOUT_S)
            message = f"the measuring process died ({exit_reason(self.process.exitcode)})"
        self.kill()
        return Outcome(measurements=measurements, status="failed", message=message)

    def stop(self) -> None:
        """End the child in good order."""
        if self.process is not None and self.pipe is not None:
            try:
                self.pipe.send(None)
                self.process.join(STOP_TIMEOUT_S)
            except (BrokenPipeError, OSError):
                pass  # it is gone already
            self.kill()

    def kill(self) -> None:
        """End the child at once; nothing of it is left when this returns."""
        if self.process is not None and self.pipe is not None:
            self.process.kill()
            self.process.join()
            self.pipe.close()
        self.process = self.pipe = None

    def _start(self) -> None:
        # Python's resource tracker warns of the semaphores that a killed process leaves; it removes
        # them all the same.
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
    """What an error makes of the rows that it kept from being measured."""
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
    """Let a user's own model be found where the command was typed.

    Last, so that no file of theirs (a `sympy.py`, a `triton.py`) takes the place of an installed
    package.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def _serve(pipe: Connection, run: RunConfig, log: Path, interpret: bool) -> None:
    """The child's main: prepare the process, then answer cells until None or the end of the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    search_current_folder()  # a reader's own model or implementation
    if interpret:
        from cs336_systems.device import interpret_kernels

        # before triton is imported: its own jitted functions must be interpreted, too
        interpret_kernels()
    import torch
    import torch._dynamo
    import torch._functorch.config

    from cs336_systems.distributed.spawn import end_with_parent

    end_with_parent()
    # A backward is timed several times on one graph, which donated buffers would not survive; a
    # sweep over lengths and head dims compiles more variants of one function than the default limit
    # allows.
    torch._functorch.config.donated_buffer = False
    torch._dynamo.config.recompile_limit = 64

    from cs336_systems.bench.spec import load
    from cs336_systems.measure.allocations import (
        forget_case,
        held_bytes,
        one_out_of_memory_error,
        release,
    )

    # What is imported stays: left to the collector it would be gone through several times a cell,
    # for 0.2 s each.
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
        # first calls compile, whatever another problem has compiled before
        if cell.problem != problem:
            problem = cell.problem
            torch._dynamo.reset()
        if cell.case != case and case is not None:  # a case's implementations share tensors
            forget_case()
            release(run.device)
            if (held_bytes(run.device) or 0) > MOST_HELD_BYTES:
                print(
                    f"{held_bytes(run.device):,} bytes are left of {case}: going on in a new process",
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
            # the process is sound; where it failed it is ended all the same
            outcome = outcome_of(error)
        except BaseException as error:
            traceback.print_exc()
            pipe.send(replace(outcome_of(error), held_bytes=held))
            raise
        release(run.device)
        pipe.send(replace(outcome, held_bytes=held))


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip()[:300] if lines else type(error).__name__
