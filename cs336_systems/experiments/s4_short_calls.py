"""Beyond the handout: `short_calls`, attention calls that end before the host has launched the next, by turns.

Such a call takes what the host takes, and a busy host slows everything for seconds: whoever is measured then seems to
be slow. So the implementations take turns. A turn is CALLS calls in a row, and a round a turn of each, begun by another
one each time. Ratios are of one round, and the middle one of ROUNDS counts. Of a turn three things are told apart:

  host_time    until the last call has returned: what the calls keep the host from doing
  time         until the GPU is done as well: what such a call takes in a step that is nothing but them
  graph_time   the same calls replayed from a CUDA graph: what is left without a host

Unlike elsewhere, the cache is not overwritten between calls: while the GPU does that, the host launches what is timed.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from cs336_systems.attention.contract import Oracle, compute_oracle, contract_errors
from cs336_systems.config import AttentionShape, RunConfig
from cs336_systems.experiments.attention_cells import BOTH, FORWARD
from cs336_systems.experiments.cells import Cell, Disagreement, Measurement, Row, Unsupported
from cs336_systems.experiments.implementations import AttentionFunction, build, kernel_name, without_overhead
from cs336_systems.experiments.s4_shapes import sized_shape
from cs336_systems.inputs import AttentionInputs, attention_inputs
from cs336_systems.profiling.timing import synchronize, time_calls

PROBLEM = "short_calls"
BY_TURNS = "by turns"
CALL_IMPLEMENTATIONS = ("triton", "hopper", "sdpa_flash", "sdpa_cudnn")
# (batch, heads, length, head_dim), causal: one head, as the handout's grid has it; some heads; and a call of 1 ms.
SHAPES = {
    "tiny": ((1, 1, 64, 64),),
    "smoke": ((1, 1, 128, 64),),
    "handout": (
        (1, 1, 1024, 64),
        (1, 1, 2048, 16),
        (1, 1, 2048, 64),
        (1, 1, 2048, 128),
        (1, 8, 1024, 64),
        (1, 16, 512, 64),
        (8, 16, 2048, 128),
    ),
}
HOST_FORWARD = Row(mode="forward", quantity="host_time", unit="ms")
HOST_BOTH = Row(mode="forward_backward", quantity="host_time", unit="ms")
GRAPH_FORWARD = Row(mode="forward", quantity="graph_time", unit="ms")
GRAPH_BOTH = Row(mode="forward_backward", quantity="graph_time", unit="ms")
ROWS = {"cpu": (FORWARD, BOTH), "cuda": (FORWARD, BOTH, HOST_FORWARD, HOST_BOTH, GRAPH_FORWARD, GRAPH_BOTH)}
ROUNDS = {"cpu": 3, "cuda": 25}
CALLS = {"cpu": 1, "cuda": 20}  # a turn's: a GPU queues a thousand launches before the host waits, a call makes ten
GRAPH_SAMPLES = 10

Call = Callable[[], object]


@dataclass
class Player:
    """One of those that take turns: correct, and with its CUDA graphs captured."""

    name: str
    function: AttentionFunction
    kernel: str
    error: float
    calls: dict[str, Callable[[AttentionFunction], object]]  # by mode
    graphs: dict[str, torch.cuda.CUDAGraph] = field(default_factory=dict)


def short_calls_cells(run: RunConfig) -> list[Cell]:
    """A cell for each shape, with the rows of all implementations."""
    rows = tuple(replace(row, implementation=name) for name in CALL_IMPLEMENTATIONS for row in ROWS[run.device])
    shapes = [sized_shape(run, *sizes, True) for sizes in SHAPES[run.scale]]
    return [Cell(problem=PROBLEM, case=shape, implementation=BY_TURNS, rows=rows) for shape in shapes]


def measure_short_calls(cell: Cell, run: RunConfig) -> Iterator[Measurement]:
    """Each implementation checked against the oracle, then all that are right by turns.

    Those that do not exist here are skipped. Of those that are wrong the last words are, in a Disagreement.
    """
    shape, device = cell.case, run.device
    inputs = attention_inputs(shape, device=device, seed=run.seed)
    oracle = compute_oracle(*inputs, is_causal=shape.is_causal)
    players, wrong = [], []
    for name in cell.implementations:
        try:
            players.append(_player(name, shape, inputs, oracle, device))
        except Unsupported as reason:
            rows = [row for row in cell.rows if row.implementation == name]
            yield from (Measurement(row=row, skipped=str(reason)) for row in rows)
        except Disagreement as error:
            wrong.append(f"{name}: {error}")
    del oracle
    samples = play(players, device)
    for player in players:
        for row in cell.rows:
            if row.implementation == player.name:
                taken = samples[player.name, row.mode, row.quantity]
                yield Measurement(row=row, samples=taken, kernel=player.kernel, error=player.error)
    if wrong:
        raise Disagreement("; ".join(wrong))


def play(players: Sequence[Player], device: str) -> dict[tuple[str, str, str], list[float]]:
    """Milliseconds a call by (name, mode, quantity), one for each of ROUNDS rounds, after one that is not kept.

    Samples of one round have the same place in every list. Who begins moves on by one from round to round.
    """
    samples: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for number in range(-1, ROUNDS[device]):
        first = number % len(players) if players else 0
        for player in (*players[first:], *players[:first]):
            for mode in player.calls:
                for quantity, taken_ms in _turn(player, mode, device).items():
                    if number >= 0:
                        samples[player.name, mode, quantity].append(taken_ms)
    return samples


def graph_times(call: Call) -> list[float]:
    """Milliseconds of `call`, CUDA kernels of fixed shapes, replayed from a graph of CALLS calls in a row."""
    graph = _captured(call)
    return [sample / CALLS["cuda"] for sample in time_calls(graph.replay, device="cuda", num_samples=GRAPH_SAMPLES)]


def _player(name: str, shape: AttentionShape, inputs: AttentionInputs, oracle: Oracle, device: str) -> Player:
    """Raises Unsupported where `name` does not exist, Disagreement where its results break the numerical contract."""
    function = build(name, shape, device)
    leaves = [x.detach().clone().requires_grad_() for x in inputs[:3]]

    def forward(attend: AttentionFunction) -> Tensor:
        with torch.no_grad():
            return attend(*inputs[:3])

    def both(attend: AttentionFunction) -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(*leaves), leaves, inputs.grad_output)

    names = ("output", "grad_q", "grad_k", "grad_v")
    errors = contract_errors(oracle, dict(zip(names, (forward(function), *both(function)))))
    worst = max(errors, key=errors.__getitem__)
    if not errors[worst] <= 1:
        raise Disagreement(f"{worst} is off by {errors[worst]:.3g} times the numerical contract's bound")
    player = Player(
        name=name, function=function, kernel=kernel_name(name, shape, device), error=errors[worst],
        calls={"forward": forward, "forward_backward": both},
    )  # fmt: skip
    if device == "cuda":
        with without_overhead(function) as attend:
            player.graphs = {mode: _captured(partial(call, attend)) for mode, call in player.calls.items()}
    return player


def _turn(player: Player, mode: str, device: str) -> dict[str, float]:
    """Milliseconds a call by quantity: CALLS calls in a row after one that is not timed, then the graph's once."""
    count, call = CALLS[device], player.calls[mode]
    with without_overhead(player.function) as attend:
        call(attend)
        synchronize(device)
        start = time.perf_counter()
        for _ in range(count):
            call(attend)
        queued = time.perf_counter()
        synchronize(device)
        done = time.perf_counter()
    taken = {"host_time": (queued - start) * 1e3 / count, "time": (done - start) * 1e3 / count}
    if player.graphs:
        (replayed,) = time_calls(player.graphs[mode].replay, device=device, warmup=1, num_samples=1)
        taken["graph_time"] = replayed / count
    return taken


def _captured(call: Call) -> torch.cuda.CUDAGraph:
    """CALLS calls in a row as a CUDA graph."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # what runs for the first time loads code, which no graph can hold
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS["cuda"]):
            call()
    return graph
