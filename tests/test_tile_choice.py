"""`tile_choice`: what is measured to judge the tile tables."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

from cs336_systems.attention.tiles import KernelConfig
from cs336_systems.attention.tiles.kernel_config import KERNELS
from cs336_systems.bench.spec import Cell, Unsupported, load
from cs336_systems.compiler.offline import compile_all
from cs336_systems.config import AttentionShape, RunConfig
from cs336_systems.experiments.beyond import tile_choice
from cs336_systems.experiments.beyond.tile_choice import ROWS, cell_configs, plausible_grid
from cs336_systems.subjects import tuning
from cs336_systems.subjects.attention_passes import sized_shape
from cs336_systems.subjects.tuning import chosen_tiles, compile_on_shape

COVERS = (
    "cs336_systems/attention/tiles",
    "cs336_systems/attention/triton",
    "cs336_systems/experiments/beyond/tile_choice.py",
    "cs336_systems/subjects/tuning.py",
)
HAS_CUDA = torch.cuda.is_available()
NO_CUDA = pytest.mark.skipif(HAS_CUDA, reason="there is a CUDA device here")
CHOICE = load("tile_choice")
TINY = RunConfig(scale="tiny", device="cpu")
HANDOUT = RunConfig(scale="handout", device="cuda")


def handout_cells() -> list[Cell]:
    return CHOICE.cells(HANDOUT)


def tiny_cells(run: RunConfig = TINY) -> dict[str, Cell]:
    return {cell.implementation: cell for cell in CHOICE.cells(run)}


def tile_case(seqlen: int, head_dim: int = 64, kv_heads: int | None = None) -> AttentionShape:
    shape = sized_shape(HANDOUT, 1, 16, seqlen, head_dim, True)
    return replace(shape, kv_heads=kv_heads)


# What is measured


def test_every_kernel_of_twelve_shapes_is_judged():
    cells = handout_cells()
    grid = [
        cell
        for cell in cells
        if cell.implementation not in ("table", *tile_choice.FIXED, "compile_ahead")
    ]
    chosen = [cell for cell in grid if cell.implementation.startswith("table_")]
    assert len({cell.case for cell in grid}) == 12
    assert Counter(cell.implementation for cell in chosen) == dict.fromkeys(
        [f"table_{name}" for name in KERNELS], 12
    )
    assert tuple(ROWS) == KERNELS
    cases = {cell.case for cell in grid}
    assert {case.head_dim for case in cases} == {64, 128} and {
        case.is_causal for case in cases
    } == {True, False}
    assert any(case.kv_heads for case in cases) and any(case.batch > 1 for case in cases)
    assert (
        min(case.seqlen_q for case in cases) <= 512
        and max(case.seqlen_q for case in cases) >= 32768
    )


@NO_CUDA
def test_the_plan_without_a_gpu_is_for_hopper_and_compiles_first():
    first, *others = handout_cells()
    assert first.implementation == "compile_ahead" and first.rows == (tile_choice.COMPILE,)
    assert {cell.implementation.split("_")[0] for cell in others} == {"table", "fixed", "sm90"}


@NO_CUDA
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_grid_is_plausible_and_holds_the_table_s(kernel, head_dim):
    shape = tile_case(8192, head_dim)
    grid = plausible_grid(kernel, shape, "sm90")
    assert len(grid) == len(set(grid)) >= 8
    assert chosen_tiles(kernel, shape, (9, 0)) in grid
    for config in grid:
        held = config.key_tile if kernel == "dkdv" else config.query_tile
        assert 16 * config.num_warps <= held <= 128 and config.num_stages <= 3


def test_a_name_stands_for_its_configurations():
    shape = tile_case(8192)
    by_name = {
        name: [config.name for config in cell_configs(name, shape, TINY)]
        for name in ("table_dq", "fixed")
    }
    assert [name.split("_")[1] for name in by_name["table_dq"]] == ["dq"]
    assert by_name["fixed"] == ["portable_dkdv_64x64_w4_s2", "portable_dq_64x64_w4_s2"]
    assert [config.kernel for config in cell_configs("table", shape, TINY)] == ["dkdv", "dq"]
    with pytest.raises(
        Unsupported, match="GPUs of sm90 and sm100 read tiles by TMA, and this is portable"
    ):
        cell_configs("fixed_tma", shape, TINY)
    with pytest.raises(
        ValueError, match="config must be named like sm90_forward_128x64_w8_s3, got 'fastest'"
    ):
        cell_configs("fastest", shape, TINY)


# Measuring


@NO_CUDA
@pytest.mark.parametrize(
    "name", ["table_forward", "table_dkdv", "table_dq", "portable_dq_32x32_w8_s1", "table"]
)
def test_a_kernel_is_checked_and_timed_alone(name):
    cell = tiny_cells()[name]
    (measurement,) = CHOICE.measure(cell, TINY)
    assert measurement.row == cell.rows[0]
    assert len(measurement.samples) == 5 and min(measurement.samples) > 0
    assert 0 <= measurement.error <= 1
    kernels = ["forward"] if "forward" in name else ["dkdv", "dq"]
    first, *ran = measurement.kernel.split()
    assert first == "interpreter" and [kernel.split("_")[1] for kernel in ran] == kernels
    if not name.startswith("table"):
        assert name in ran


@NO_CUDA
def test_a_part_takes_less_than_the_whole(monkeypatch):
    """The row of one kernel must not hold the time of the others in the call."""
    given = {"dkv": [1.0], "dq": [2.0], "total": [4.0]}
    monkeypatch.setattr(tuning, "time_stages", lambda *_, **__: given)
    cells = tiny_cells()
    samples = [
        next(CHOICE.measure(cells[name], TINY)).samples for name in ("table_dkdv", "table_dq")
    ]
    assert samples == [[1.0], [2.0]]


@pytest.mark.gpu
@pytest.mark.alone
def test_every_kind_of_cell_is_measured_on_a_gpu():
    run = RunConfig(scale="tiny", device="cuda")
    cells = tiny_cells(run)
    for name in ("table_forward", "table_dkdv", "table_dq", "table", "fixed"):
        (measurement,) = CHOICE.measure(cells[name], run)
        assert len(measurement.samples) == 10 and min(measurement.samples) > 0, name
        assert 0 <= measurement.error <= 1, name
    # Long enough that the GPU, and not the host, is what takes the time.
    times = {}
    for name in ("table", "table_dkdv", "table_dq"):
        case = replace(cells[name].case, heads=16, kv_heads=None, seqlen_q=4096, seqlen_k=4096)
        times[name] = min(next(CHOICE.measure(replace(cells[name], case=case), run)).samples)
    # each alone, not the backward twice
    assert times["table_dkdv"] + times["table_dq"] < 1.5 * times["table"]


# Compiling ahead


@NO_CUDA
def test_the_grid_is_compiled_ahead(monkeypatch):
    seen = []
    monkeypatch.setattr(
        tile_choice, "compile_ahead", lambda tiles, arch: seen.extend([arch, *tiles])
    )
    first, *others = handout_cells()
    (measurement,) = CHOICE.measure(first, HANDOUT)
    assert measurement.row == tile_choice.COMPILE and seen[0] == "sm90"
    whole = ("table", *tile_choice.FIXED)
    grid = [(cell.case, cell.implementation) for cell in others if cell.implementation not in whole]
    assert seen[1:] == [(case, *cell_configs(name, case, HANDOUT)) for case, name in grid]
    with pytest.raises(Unsupported, match="no kernels are compiled ahead for this GPU"):
        next(CHOICE.measure(first, TINY))


def test_grouped_heads_compile_without_a_gpu():
    """Under its own shape: the reports of `tune flash` have as many key heads as query heads."""
    shape = tile_case(8192, kv_heads=4)
    good, bad = (
        (shape, KernelConfig.from_name(f"sm90_dkdv_{rest}"))
        for rest in ("64x64_w4_s2_tma", "2048x2048_w4_s1")
    )
    found = dict(compile_all([good, bad], partial(compile_on_shape, "sm90"), jobs=2))
    assert found[good] == "" and found[bad]
