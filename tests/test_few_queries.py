"""`few_queries`: what is measured, that it is checked first."""

from dataclasses import replace

import pytest

from cs336_systems.attention.triton import function
from cs336_systems.config import RunConfig
from cs336_systems.experiments.few_queries import WHOLE, build_forward
from cs336_systems.experiments.registry import PROBLEMS

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
    split, whole = (build_forward(name, shape, "cpu").kernel for name in ("triton", WHOLE))
    assert split == f"{whole}/16" and whole == "interpreter portable_forward_64x64_w8_s1"
