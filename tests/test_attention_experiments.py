"""The attention experiments: how a pass is timed, the forward of few queries, the rungs of the
Hopper ladder.
"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cs336_systems.attention import flash_attention
from cs336_systems.attention.contract import compute_oracle
from cs336_systems.attention.triton import passes as function
from cs336_systems.bench.spec import Cell, Disagreement, Unsupported, load
from cs336_systems.config import RunConfig
from cs336_systems.experiments.beyond import few_queries
from cs336_systems.experiments.beyond.few_queries import GRAPH_FORWARD, GRAPH_SAMPLES, WHOLE
from cs336_systems.experiments.beyond.hopper_ladder import RUNGS
from cs336_systems.inputs import attention_inputs
from cs336_systems.subjects import attention_passes as attention
from cs336_systems.subjects import implementations
from cs336_systems.subjects.attention_builders import Built
from cs336_systems.subjects.attention_passes import KEPT_SAMPLES, sized_shape
from cs336_systems.subjects.implementations import REGISTRY

TINY = RunConfig(scale="tiny", device="cpu")
HANDOUT = RunConfig(scale="handout", device="cuda")
FEW, LADDER, FLASH = (load(name) for name in ("few_queries", "hopper_ladder", "flash_benchmarking"))
PLAIN = load("pytorch_attention")


def tiny_cell(problem: str, implementation: str) -> Cell:
    return next(cell for cell in load(problem).cells(TINY) if cell.implementation == implementation)


# How a pass is timed


def test_a_fast_row_keeps_few_samples_unless_the_handout_asks_for_more():
    cell = tiny_cell("pytorch_attention", "eager")
    kept = {len(measurement.samples) for measurement in PLAIN.measure(cell, TINY)}
    assert max(kept) <= KEPT_SAMPLES
    asked = {
        one.row: len(one.samples) for one in PLAIN.measure(cell, replace(TINY, scale="handout"))
    }
    assert asked[attention.FORWARD] == asked[attention.BACKWARD] == 100 > KEPT_SAMPLES


def stand_in(monkeypatch, cell: Cell) -> list[tuple[str, object]]:
    """A CPU in the place of a GPU for `cell`: what is measured, and what settles and is timed, call
    by call.
    """
    inputs = attention_inputs(cell.case, device="cpu")
    oracle = compute_oracle(*inputs, is_causal=cell.case.is_causal)
    ran: list[tuple[str, object]] = []
    attend = partial(
        flash_attention, is_causal=cell.case.is_causal, enable_gqa=True, backend="reference"
    )
    built = Built(attend=attend)
    monkeypatch.setattr(attention, "build_case", lambda *_: built)
    monkeypatch.setattr(attention, "inputs_of", lambda *_: inputs)
    monkeypatch.setattr(attention, "oracle_of", lambda *_: oracle)
    monkeypatch.setattr(attention, "release", lambda device: None)
    monkeypatch.setattr(attention, "time_once", lambda call, device: (call(), 1.0)[1])
    monkeypatch.setattr(attention, "settle", lambda call: ran.append(("settle", call)))
    monkeypatch.setattr(
        attention, "time_calls", lambda call, **_: ran.append(("time", call)) or [1.0]
    )
    return ran


@pytest.mark.parametrize(("device", "settled"), [("cuda", True), ("cuda", False), ("cpu", True)])
def test_what_settles_a_clock_is_the_pass_that_is_timed_next(device, settled, monkeypatch):
    """A CPU itself settles nothing."""
    cell = tiny_cell("flash_benchmarking", "sdpa_flash")
    cell = replace(cell, rows=(attention.FORWARD, attention.BACKWARD, attention.BOTH))
    ran = stand_in(monkeypatch, cell)
    monkeypatch.setattr(FLASH, "settled", settled)
    assert len(list(FLASH.measure(cell, replace(TINY, device=device)))) == 3
    settles = settled and device == "cuda"
    assert [kind for kind, _ in ran] == (["settle", "time"] * 3 if settles else ["time"] * 3)
    timed = [call for kind, call in ran if kind == "time"]
    assert [call for kind, call in ran if kind == "settle"] == (timed if settles else [])


def test_flex_on_a_cpu_has_a_forward_and_says_why_no_more(monkeypatch):
    """Its backward, which is not implemented, made failed rows that are nobody's mistake."""
    cell = replace(tiny_cell("flash_benchmarking", "sdpa_flash"), implementation="flex")
    attend = partial(flash_attention, is_causal=True, backend="reference")
    monkeypatch.setattr(implementations, "has_cxx_compiler", lambda: True)
    flex = replace(REGISTRY["flex"], plain=lambda *_: Built(attend=attend))
    monkeypatch.setitem(REGISTRY, "flex", flex)
    samples = FLASH.measure(cell, TINY)
    assert next(samples).row == attention.FORWARD
    with pytest.raises(Unsupported, match="^FlexAttention has no backward on a CPU$"):
        next(samples)


@pytest.mark.parametrize(
    ("name", "whose"),
    [
        ("triton", "bound$"),
        ("sdpa_flash", "bound; the kernel is PyTorch's, not this repository's$"),
    ],
)
def test_a_disagreement_says_when_the_kernel_is_a_librarys(name, whose):
    """That PyTorch's kernel on a CPU is off in float16 read as a mistake of this repository."""
    q, k, v, grad_output = attention_inputs(sized_shape(TINY, 1, 1, 32, 16, True), device="cpu")
    oracle = compute_oracle(q, k, v, grad_output, is_causal=True)
    with pytest.raises(Disagreement, match=f"^output is off by .* {whose}"):
        attention.checked_error(oracle, {"output": q}, name)


# Few queries


def test_few_queries_on_a_gpu():
    cells = FEW.cells(HANDOUT)
    assert len({(cell.case, cell.implementation) for cell in cells}) == len(cells)
    assert {row.quantity for cell in cells for row in cell.rows} == {"graph_time"}
    for cell in cells:
        assert (cell.implementation == "sdpa_efficient") <= (cell.case.dtype == "float32")
        assert (cell.implementation == "hopper") <= cell.case.is_causal
    tokens = [cell.case for cell in cells if cell.case.seqlen_q == 1]
    assert any(case.kv_heads not in (None, case.heads) for case in tokens)


@pytest.mark.parametrize("name", [WHOLE, "triton", "sdpa_flash"])
def test_the_forward_of_few_queries_is_measured(name):
    (measurement,) = FEW.measure(tiny_cell("few_queries", name), TINY)
    assert 0 <= measurement.error <= 1 and measurement.samples
    kernel = "" if name == "sdpa_flash" else "interpreter portable_forward_64x64_w8_s1"
    assert measurement.kernel == kernel


def test_stages_in_the_interpreter_are_said_to_be():
    """Their kernel was `triton`, so that reports and `compare` took the interpreter's times for the
    kernel's.
    """
    measured = load("attention_stages").measure(tiny_cell("attention_stages", "triton"), TINY)
    assert {one.kernel for one in measured} == {"interpreter triton"}


def test_few_queries_of_a_gpu_are_replayed_in_graphs_once_the_clock_has_settled(monkeypatch):
    cell = replace(tiny_cell("few_queries", "triton"), rows=(GRAPH_FORWARD,))
    ran = stand_in(monkeypatch, cell)
    captured = lambda call: ran.append(("graph", call)) or SimpleNamespace(replay=call)  # noqa: E731
    monkeypatch.setattr(few_queries, "captured", captured)
    monkeypatch.setattr(
        few_queries, "time_calls", lambda *_, num_samples, **__: [10.0] * num_samples
    )
    (measured,) = FEW.measure(cell, replace(TINY, device="cuda"))
    assert (measured.row, measured.samples) == (
        GRAPH_FORWARD,
        [0.5] * GRAPH_SAMPLES,
    ) and 0 <= measured.error <= 1
    assert [kind for kind, _ in ran] == ["settle", "graph"] and ran[0][1] is ran[1][1]


def test_whole_keys_have_the_same_tiles(monkeypatch):
    monkeypatch.setattr(function, "num_multiprocessors", lambda device: 132)
    shape = replace(tiny_cell("few_queries", "triton").case, seqlen_k=2048)
    split, whole = (FEW.built(name, shape, TINY).kernel for name in ("triton", WHOLE))
    assert split == f"{whole}/16" and whole == "interpreter portable_forward_64x64_w8_s1"


# The ladder


def test_the_first_rungs_are_measured_and_the_others_say_why_not():
    (cell,) = LADDER.cells(TINY)
    found: dict[str, list[Any]] = {name: [] for name in RUNGS}
    for one in LADDER.measure(cell, TINY):
        found[one.row.implementation].append(one)
    assert all(
        one.kernel.startswith("interpreter portable_forward_") for one in found["triton_pointers"]
    )
    assert {one.kernel for one in found["triton_first"]} == {
        "interpreter flash_fwd_kernel tiled_backward"
    }
    for name in ("triton_first", "triton_pointers"):
        assert {one.row.mode for one in found[name]} == {"forward", "backward", "forward_backward"}
        assert max(one.error for one in found[name]) <= 1
    hopper = "hopper kernels need a GPU of compute capability 9.0 (H100, H200)"
    for rung, why in (
        ("triton_tma", "TMA on GPUs of compute capability 9.0"),
        ("hopper_deterministic", hopper),
        ("hopper", hopper),
        ("fa4", "FlashAttention-4 needs CUDA"),
    ):
        assert {why in one.message for one in found[rung]} == {True}, rung


def test_rungs_differ_in_how_tiles_are_read(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    shape = sized_shape(HANDOUT, 1, 16, 16384, 64, True)
    by_pointers, by_tma = (
        LADDER.built(name, shape, HANDOUT).kernel.split() for name in tuple(RUNGS)[1:3]
    )
    assert not any(name.endswith("_tma") for name in by_pointers) and all(
        name.endswith("_tma") for name in by_tma
    )
    assert len(by_pointers) == len(by_tma) == 3
