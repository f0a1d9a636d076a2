"""`few_queries`: what is measured, that it is checked first, and what the report makes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cs336_systems.attention.triton import function
from cs336_systems.config import RunConfig
from cs336_systems.experiments import s4_few_queries
from cs336_systems.experiments.cells import Disagreement, Unsupported
from cs336_systems.experiments.registry import PROBLEMS
from cs336_systems.experiments.s4_few_queries import WHOLE, build_forward
from cs336_systems.report.answers import answer
from cs336_systems.report.comparisons import OTHER_RUN
from cs336_systems.report.frames import load_frame
from cs336_systems.report.markdown import provenance
from cs336_systems.report.tables import sections
from tests.shape_records import few_queries_records

TINY = RunConfig(scale="tiny", device="cpu")
PROBLEM = PROBLEMS["few_queries"]


def tiny_cells():
    return {cell.implementation: cell for cell in PROBLEM.cells(TINY)}


def test_shapes_on_a_gpu():
    cells = PROBLEM.cells(RunConfig(scale="handout", device="cuda"))
    assert len({(cell.case, cell.implementation) for cell in cells}) == len(cells)
    assert {row.quantity for cell in cells for row in cell.rows} == {"graph_time"}
    for cell in cells:
        assert (cell.implementation == "sdpa_efficient") <= (cell.case.dtype == "float32")
        assert (cell.implementation == "hopper") <= cell.case.is_causal
    tokens = [cell.case for cell in cells if cell.case.seqlen_q == 1]
    assert any(case.kv_heads not in (None, case.heads) for case in tokens)


@pytest.mark.parametrize("name", [WHOLE, "triton", "sdpa_flash"])
def test_a_cell_is_measured(name):
    (measurement,) = PROBLEM.measure(tiny_cells()[name], TINY)
    assert 0 <= measurement.error <= 1 and measurement.samples
    kernel = "" if name == "sdpa_flash" else "interpreter portable_forward_64x64_w8_s1"
    assert measurement.kernel == kernel


def test_whole_keys_have_the_same_tiles(monkeypatch):
    monkeypatch.setattr(function, "num_multiprocessors", lambda device: 132)
    shape = replace(tiny_cells()["triton"].case, seqlen_k=2048)
    (_, split), (_, whole) = (build_forward(name, shape, "cpu") for name in ("triton", WHOLE))
    assert split == f"{whole}/16" and whole == "interpreter portable_forward_64x64_w8_s1"


def test_what_cannot_run_says_why():
    with pytest.raises(Unsupported, match="sdpa_efficient needs CUDA"):
        list(PROBLEM.measure(tiny_cells()["sdpa_efficient"], TINY))


def test_wrong_results_are_not_timed(monkeypatch):
    def wrong(name, shape, device):
        attend, kernel = build_forward(name, shape, device)
        return lambda *tensors: attend(*tensors) + 1, kernel

    monkeypatch.setattr(s4_few_queries, "build_forward", wrong)
    with pytest.raises(Disagreement, match="output is off by"):
        list(PROBLEM.measure(tiny_cells()["sdpa_flash"], TINY))


# Report


def test_the_table_has_parts_and_ratios():
    (section,) = sections("few_queries", load_frame(few_queries_records()))
    lines = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in section.body.splitlines()]
    rows = {line[0]: line[1:] for line in lines if "×" in line[0] and len(line) > 5}
    head, token = rows["1 × 1 × 4096 × 4096 × 64 causal"], rows["64 × 32/8 × 1 × 4096 × 128 full"]
    assert head[0] == "4" and head[-2:] == ["4.00×", "0.800×"]
    assert token[0] == "1" and token[-2:] == ["–", "0.800×"], "nothing is split"
    assert "–" in token[1:-2], "a kernel that has no record there"


def test_only_replayed_calls_are_said_to_be():
    records = few_queries_records()
    plain = [replace(one, quantity="time") for one in records]
    (replayed,), (called,) = (sections("few_queries", load_frame(found)) for found in (records, plain))
    assert "in a replayed CUDA graph" in replayed.title and "graph" not in called.title


def test_times_of_two_runs_are_not_divided():
    """And the line below says how many samples there are."""
    records = few_queries_records()
    later = [replace(one, commit="0ther") if one.implementation == "triton_whole" else one for one in records]
    (section,) = sections("few_queries", load_frame(later))
    assert section.body.count(OTHER_RUN) == 1
    assert "3 timed samples a cell" in provenance(load_frame(records))
    once = [replace(one, samples=one.samples[:1]) for one in records]
    assert "1 timed sample a cell" in provenance(load_frame(once))
    assert "1 to 3 timed samples a cell" in provenance(load_frame([*once[1:], records[0]]))


def test_the_answer_names_the_range():
    said = answer("few_queries", load_frame(few_queries_records()))
    assert "splits the keys of 1 of 2 shapes" in said and "4.00× (1 × 1 × 4096 × 4096 × 64 causal)" in said
    assert "ahead on 0 of 2 shapes" in said
