"""`hopper_ladder`: its rungs, what they run, and what the report makes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cs336_systems.config import RunConfig
from cs336_systems.experiments import s4_ladder
from cs336_systems.experiments.cells import Unsupported
from cs336_systems.experiments.registry import PROBLEMS
from cs336_systems.experiments.s4_ladder import RUNGS, build_rung
from cs336_systems.records import Record
from cs336_systems.report import ladder
from cs336_systems.report.answers import answer
from cs336_systems.report.frames import load_frame
from cs336_systems.report.plots import plots
from cs336_systems.report.styles import colour
from cs336_systems.report.tables import sections
from tests.shape_records import ladder_records, shape_case

TINY = RunConfig(scale="tiny", device="cpu")


def test_the_report_knows_every_rung():
    assert tuple(ladder.RUNGS) == RUNGS


def test_rungs_stand_side_by_side_in_colours_of_their_own():
    assert len({colour(rung) for rung in RUNGS}) == len(RUNGS)


def test_every_rung_has_every_shape():
    cells = PROBLEMS["hopper_ladder"].cells(RunConfig(scale="handout", device="cuda"))
    assert len(cells) == len(RUNGS) * len(s4_ladder.SHAPES["handout"])
    assert {cell.case.dtype for cell in cells} == {"bfloat16"}


def test_the_first_rung_is_measured_and_the_others_say_why_not():
    run = TINY
    cells = {cell.implementation: cell for cell in PROBLEMS["hopper_ladder"].cells(run)}
    measured = list(PROBLEMS["hopper_ladder"].measure(cells["triton_pointers"], run))
    assert {one.row.mode for one in measured} == {"forward", "backward", "forward_backward"}
    assert all(one.kernel.startswith("interpreter portable_forward_") for one in measured)
    for rung, why in (
        ("triton_tma", "TMA on GPUs of compute capability 9.0"),
        ("hopper_deterministic", "hopper kernels run on CUDA devices, and the inputs are on cpu"),
        ("hopper", "hopper kernels run on CUDA devices, and the inputs are on cpu"),
    ):
        with pytest.raises(Unsupported, match=why):
            list(PROBLEMS["hopper_ladder"].measure(cells[rung], run))


def test_an_unknown_rung_is_refused():
    with pytest.raises(ValueError, match="rung must be one of triton_pointers, .*, got 'flex'"):
        build_rung("flex", shape_case(1, 1, 64, 64, True), "cpu")


def test_rungs_differ_in_how_tiles_are_read(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    shape = shape_case(1, 16, 16384, 64, True)
    by_pointers, by_tma = (build_rung(name, shape, "cuda")[1].split() for name in RUNGS[:2])
    assert not any(name.endswith("_tma") for name in by_pointers) and all(name.endswith("_tma") for name in by_tma)
    assert len(by_pointers) == len(by_tma) == 3


# Report


def row_of(records: list[Record], rung: str) -> list[str]:
    (section,) = sections("hopper_ladder", load_frame(records))
    lines = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in section.body.splitlines()]
    return next(line[2:] for line in lines if line[1:2] == [ladder.RUNGS[rung]])


def test_a_rung_is_set_against_the_one_before_and_cudnn():
    forward = row_of(ladder_records(), "triton_tma")[:3]
    assert forward[1:] == ["1.33×", "0.500×"]  # 3 ms after 4, and cuDNN takes 1.5
    assert row_of(ladder_records(), "triton_pointers")[1] == "–"
    assert row_of(ladder_records(), "sdpa_cudnn")[1:3] == ["–", "1.00×"]


def test_a_rung_that_failed_says_so_and_is_compared_with_nothing():
    broken = [
        replace(row, samples=[], status="failed", message="no") if row.implementation == "triton_tma" else row
        for row in ladder_records()
    ]
    assert row_of(broken, "triton_tma")[:3] == ["failed [1]", "–", "–"]
    assert row_of(broken, "hopper_deterministic")[1] == "–"
    (plot,) = plots("hopper_ladder", load_frame(broken))
    assert not plot.data[plot.data["series"] == ladder.RUNGS["triton_tma"]]["drawn"].any()


def test_where_no_rung_has_a_rate_there_is_no_figure():
    """On a CPU the figure was three panels of the word `interpreter` over TFLOP/s from 0 to 1."""
    skipped = [replace(row, samples=[], status="skipped", message="no GPU") for row in ladder_records()]
    assert plots("hopper_ladder", load_frame(skipped)) == []


def test_sentences_climb_the_ladder():
    said = answer("hopper_ladder", load_frame(ladder_records()))
    assert said.count("\n") == 2 and "1 × 16 × 16384 × 64 causal, forward, in TFLOP/s: Triton, tiles read" in said
    (plot,) = plots("hopper_ladder", load_frame(ladder_records()))
    assert set(plot.data["panel"]) == {"forward", "backward", "forward + backward"}
