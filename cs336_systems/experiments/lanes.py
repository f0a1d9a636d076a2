"""A sweep on several GPUs at once: a lane is a GPU and the process that measures on it.

What is handed to a lane is a group of cells (`Cell.group`): those that tables compare with one another, or that share
inputs, oracle and compiled kernels. They run on one GPU in their own order, as in a sweep without lanes, so no
comparison is one of two GPUs. A lane that is done takes the next group that none has begun. Cells that need the
machine for themselves (`Cell.alone`) come last, one by one, with every GPU in sight.

    lanes = Lanes(sweep, gpu_environments(4, "cuda"))
    for records in lanes.measure(cells):           # as each cell is done: on disk already
        ...

Each lane has a thread of this process, which waits for its measuring process; records are written by the caller's
thread alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import Empty, SimpleQueue
from threading import Event

import torch

from cs336_systems.experiments.cells import Cell
from cs336_systems.experiments.sweep import Sweep
from cs336_systems.experiments.worker import Outcome, Worker
from cs336_systems.records import Record

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
KILL_INTERVAL_S = 0.1


def gpu_environments(num_gpus: int, device: str) -> list[dict[str, str]]:
    """For each of the first `num_gpus` GPUs that this process sees, the variable by which a child sees it alone.

    Raises ValueError for less than one GPU, for a run that is not on `cuda`, for more GPUs than are visible, and for
    GPUs of different models.
    """
    if num_gpus < 1:
        raise ValueError(f"--gpus must be at least 1, got {num_gpus}")
    if device != "cuda":
        raise ValueError(f"--gpus {num_gpus} needs a run on CUDA devices, and this one is on the CPU")
    found = torch.cuda.device_count()
    if num_gpus > found:
        raise ValueError(f"--gpus must be at most {found}, the CUDA devices visible here, got {num_gpus}")
    models = list(dict.fromkeys(torch.cuda.get_device_properties(index).name for index in range(num_gpus)))
    if len(models) > 1:
        raise ValueError(f"--gpus {num_gpus}: all must be of one model to share tables, got {', '.join(models)}")
    # Numbers or UUIDs, in the order in which CUDA numbers them here; it ends the list at the first that it lacks.
    visible = os.environ.get(VISIBLE_DEVICES)
    names = [str(index) for index in range(found)] if visible is None else visible.split(",")
    return [{VISIBLE_DEVICES: name.strip()} for name in names[:num_gpus]]


def in_groups(cells: Sequence[Cell]) -> list[list[Cell]]:
    """`cells` by group, each in its order. Problems keep theirs; of one, the group with the largest cell goes first.

    The largest by the closed form of its memory: the wide float32 heads and the large models take the longest, and
    would leave the other GPUs idle if they came last.
    """
    groups: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.group, []).append(cell)
    problems = list(dict.fromkeys(cell.problem for cell in cells))

    def rank(group: list[Cell]) -> tuple[int, int]:
        return problems.index(group[0].problem), -max(cell.predicted_bytes for cell in group)

    return sorted(groups.values(), key=rank)


class Lanes:
    """`sweep` on several GPUs, once: a measuring process for each of `environments`, the variables that it sets first.

    Close it when an exception may have left `measure` half way, as Ctrl-C does.
    """

    def __init__(self, sweep: Sweep, environments: Sequence[dict[str, str]]) -> None:
        logs = sweep.folder / "logs"
        self.sweep = sweep
        self.workers = [
            Worker(sweep.run, logs / f"worker-lane{lane}.log", sweep.interpret, environment)
            for lane, environment in enumerate(environments)
        ]
        self._groups: SimpleQueue[list[Cell]] = SimpleQueue()
        self._reports: SimpleQueue[Cell | tuple[Cell, Outcome] | Future[None]] = SimpleQueue()
        self._lanes: list[Future[None]] = []
        self._stopping = Event()

    def measure(
        self,
        cells: Sequence[Cell],
        *,
        time_budget_s: float | None = None,
        started: Callable[[Cell], None] = lambda _: None,
    ) -> Iterator[list[Record]]:
        """`Sweep.measure` for cells of any problems: yields each one's records once they are on disk.

        No cell is started after `time_budget_s` seconds. All measuring processes are gone when the iteration ends,
        also by Ctrl-C or because one of them could not start, which raises OSError.
        """
        deadline = None if time_budget_s is None else time.monotonic() + time_budget_s
        yield from self._side_by_side([cell for cell in cells if not cell.alone], deadline, started)
        left = None if deadline is None else deadline - time.monotonic()
        yield from self.sweep.measure([cell for cell in cells if cell.alone], time_budget_s=left, started=started)

    def close(self) -> None:
        """End every lane at once; no process of theirs is left, and finished cells are on disk, when this returns."""
        self._stopping.set()
        while not all(lane.done() for lane in self._lanes):
            for worker in self.workers:
                worker.interrupt()
            wait(self._lanes, timeout=KILL_INTERVAL_S)  # again: a process may have been about to start
        reports = [self._reports.get() for _ in range(self._reports.qsize())]
        for report in reports:
            if isinstance(report, tuple):
                self.sweep.record(*report)

    def _side_by_side(
        self, cells: list[Cell], deadline: float | None, started: Callable[[Cell], None]
    ) -> Iterator[list[Record]]:
        groups = in_groups(cells)
        if not groups:
            return
        for group in groups:
            self._groups.put(group)
        workers = self.workers[: len(groups)]
        executor = ThreadPoolExecutor(len(workers), thread_name_prefix="lane")
        try:
            for worker in workers:
                lane = executor.submit(self._serve, worker, deadline)
                self._lanes.append(lane)
                lane.add_done_callback(self._reports.put)
            executor.shutdown(wait=False)  # a thread ends with its lane
            running = len(workers)
            while running:
                report = self._reports.get()
                if isinstance(report, Cell):
                    started(report)
                elif isinstance(report, Future):
                    report.result()  # raises what ended the lane
                    running -= 1
                else:
                    yield self.sweep.record(*report)
        finally:
            self.close()

    def _serve(self, worker: Worker, deadline: float | None) -> None:
        """A lane's thread: groups, until there are no more or the time is over.

        It outlives its measuring processes, which the kernel would end with the thread that started them.
        """
        try:
            while True:
                try:
                    group = self._groups.get_nowait()
                except Empty:
                    break
                for cell in group:
                    if self._stopping.is_set() or (deadline is not None and time.monotonic() > deadline):
                        return
                    self._reports.put(cell)
                    outcome = self.sweep.predict_overflow(cell) or worker.measure(cell)
                    if self._stopping.is_set():  # the outcome is that of the interruption
                        return
                    self._reports.put((cell, outcome))
            worker.stop()
        finally:
            worker.kill()
