"""Profile of a closure by torch.profiler, as a `Trace`.

    trace = capture(step.train_step, device="cuda", num_steps=3, before=step.reset)
    trace.top_kernels(5)

The trace is also a file that https://ui.perfetto.dev opens, if `path` is given; it names this
machine, so it stays out of git, under a results folder's logs.
"""

import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from cs336_systems.measure.ranges import STEP, named_range
from cs336_systems.measure.timing import synchronize
from cs336_systems.measure.trace import Trace, read_events, trace_of


def capture(
    call: Callable[[], object],
    *,
    device: str,
    num_steps: int = 1,
    warmup: int = 1,
    before: Callable[[], object] = lambda: None,
    path: Path | None = None,
) -> Trace:
    """Return the trace of `num_steps` profiled calls (`run_steps`) after `warmup` unprofiled ones.

    `before` runs ahead of every call, outside of its range (resetting gradients). With `path`, a
    name that ends in .trace.json or .trace.json.gz, the trace is kept there, also when a call
    raised: the events before an out-of-memory are in it.
    """
    run_steps(call, device, warmup, before)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    return trace_of(
        record_events(lambda: run_steps(call, device, num_steps, before), activities, path)
    )


def run_steps(
    call: Callable[[], object], device: str, count: int, before: Callable[[], object]
) -> None:
    """Call `call` `count` times, each synchronised and in a range of its own.

    `before` runs ahead of each call, outside of the range.
    """
    for _ in range(count):
        before()
        synchronize(device)
        with named_range(STEP):
            call()
            synchronize(device)


def record_events(
    run: Callable[[], object], activities: Sequence[ProfilerActivity], path: Path | None = None
) -> list[dict[str, Any]]:
    """Return the events of a chrome trace of `run()`.

    `path` keeps the file, also if `run` raises.
    """
    profiler = profile(activities=activities)
    with tempfile.TemporaryDirectory(prefix="trace-") as folder, warnings.catch_warnings():
        # PyTorch advises to accumulate events (acc_events). That would build all of them again in
        # Python at the end of the profile, which takes longer than the steps; the file needs none.
        warnings.filterwarnings(
            "ignore", message="Warning: Profiler clears events", category=UserWarning
        )
        if ProfilerActivity.CUDA in activities:
            # The first use loads CUPTI, which must not be in the profile.
            with profile(activities=activities):
                pass
        target = path or Path(folder) / "step.trace.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        profiler.start()
        try:
            run()
        finally:
            profiler.stop()
            profiler.export_chrome_trace(str(target))
        return read_events(target)
