"""Time our own attention back ends, and the choice of `auto`, on one shape.

    rows = benchmark_backends(shape, device="cuda")
    auto_ratio(rows)      # time of auto / time of the fastest: at most 1.1 if auto chooses well

Every back end has a row: its times, or the reason why it has none. Correct ones are measured by
turns (bench/turns.py): measured one after the other, two times of the same kernel can differ by a
tenth if other processes use the processor.
"""

from dataclasses import dataclass
from functools import partial
from statistics import median

from cs336_systems.attention import flash_attention
from cs336_systems.attention.api import explain_backend
from cs336_systems.attention.choose import BACKENDS
from cs336_systems.bench.spec import Sample, Unsupported, turns_cell
from cs336_systems.config import AttentionShape, RunConfig
from cs336_systems.device import interpreter_is_on
from cs336_systems.subjects.attention_builders import Built, query_and_key
from cs336_systems.subjects.attention_by_turns import AttentionByTurns
from cs336_systems.subjects.attention_passes import BOTH, FORWARD
from cs336_systems.subjects.implementations import check_runs

AUTO = "auto"
ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class BackendTiming:
    """One back end on one shape: medians in milliseconds, or why there are none."""

    backend: str  # the requested name
    chosen: str = ""  # the back end that runs: auto's choice, or the requested name
    forward_ms: float | None = None
    forward_backward_ms: float | None = None
    status: str = "ok"  # ok, skipped, oom or failed
    reason: str = ""  # why it was chosen, or why there is no time
    interpreted: bool = False  # whether Triton's interpreter ran, whose times say nothing of speed


def benchmark_backends(
    shape: AttentionShape, *, device: str, seed: int = 0, num_samples: int = ROUNDS
) -> list[BackendTiming]:
    """Return the timing of every back end of this package on `shape`, and last that of `auto`.

    The medians are over `num_samples` rounds.
    """
    names = (*BACKENDS, AUTO)
    ours = _OurBackends(num_samples)
    cell = turns_cell(shape, names, (FORWARD, BOTH))
    run = RunConfig(scale="smoke", device=device, seed=seed)  # type: ignore[arg-type]
    found = {one.row: one for one in ours.measure(cell, run)}
    samples = [found[row] for row in cell.rows]
    return [
        _timing(name, ours.explained.get(name, ("", "")), device, forward, both)
        for name, forward, both in zip(names, samples[::2], samples[1::2])
    ]


class _OurBackends(AttentionByTurns):
    """Our back ends measured by turns; `explained` maps a name to (chosen back end, reason)."""

    def __init__(self, num_rounds: int) -> None:
        self.rounds = {"cpu": num_rounds, "cuda": num_rounds}
        self.explained: dict[str, tuple[str, str]] = {}

    def built(self, name: str, case: AttentionShape, run: RunConfig) -> Built:
        """Return `flash_attention` with the back end `name`; Unsupported if it refuses `case`."""
        try:
            inputs = query_and_key(case, run.device)
            self.explained[name] = explain_backend(*inputs, backend=name, is_causal=case.is_causal)
        except ValueError as error:
            raise Unsupported(str(error)) from None
        if name == "triton_first":
            check_runs(name, case, run.device)  # this back end takes few shapes
        return Built(
            attend=partial(flash_attention, is_causal=case.is_causal, enable_gqa=True, backend=name)
        )


def _timing(
    name: str, explained: tuple[str, str], device: str, forward: Sample, both: Sample
) -> BackendTiming:
    """Return the timing of one back end from its samples of both rows."""
    chosen, reason = explained
    if not forward.samples:
        return BackendTiming(
            backend=name, chosen=chosen, status=forward.status, reason=forward.message
        )
    interpreted = chosen.startswith("triton") and device == "cpu" and interpreter_is_on()
    return BackendTiming(
        backend=name,
        chosen=chosen,
        reason=reason,
        interpreted=interpreted,
        forward_ms=median(forward.samples),
        forward_backward_ms=median(both.samples),
    )


def auto_ratio(rows: list[BackendTiming]) -> float | None:
    """Return the time of `auto` over that of the fastest named back end, forward and backward.

    Interpreted times do not count. It is None if `auto` or all of the others have no time.
    """
    times = {
        row.backend: ms
        for row in rows
        if (ms := row.forward_backward_ms) is not None and not row.interpreted
    }
    auto = times.pop(AUTO, None)
    return auto / min(times.values()) if auto is not None and times else None
