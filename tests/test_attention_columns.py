"""Columns and numbers of the attention experiments that need other rows: ratios to a baseline, the
best of a grid.
"""

import pandas as pd
import pytest
from msgspec.structs import replace

from cs336_systems.bench.records import Record
from cs336_systems.bench.spec import load
from cs336_systems.book.frames import load_frame
from cs336_systems.config import MaskCase, RunConfig
from cs336_systems.subjects.attention_passes import sized_shape
from tests.test_records import GPU_RUN
from tests.test_records import gpu_record as row

HANDOUT = RunConfig(scale="handout", device="cuda")
SHAPE = sized_shape(HANDOUT, 1, 16, 16384, 64, True)


def frame_of(problem: str, *records: Record) -> pd.DataFrame:
    return load_frame(load(problem), records)


def masked(mask: str, pairs: float, live: float, **times: float) -> list[Record]:
    case = MaskCase(mask=mask, batch=1, heads=16, seqlen_q=16384, head_dim=128, dtype="bfloat16")
    shares = {"density": pairs, "block_density": live}
    return [
        *(
            row("block_sparse", case, "triton", [share], quantity=name, unit="1")
            for name, share in shares.items()
        ),
        *(row("block_sparse", case, name, [milliseconds]) for name, milliseconds in times.items()),
    ]


def test_dense_is_the_faster_of_ours_and_sdpa_flash():
    """A slow dense path of ours would flatter what is measured against it."""
    records = [
        *masked("full", 1.0, 1.0, triton=9.0, sdpa_flash=8.0, sdpa_cudnn=5.0),
        *masked("random:0.1", 0.1, 0.1, triton=1.0),
        *masked("tokens:0.1", 0.1, 1.0, triton=10.0),
    ]
    frame = frame_of("block_sparse", *records)
    times = frame[frame["quantity"] == "time"].set_index(["pattern", "implementation"])
    tiles, tokens = times.loc[("random:0.1", "triton")], times.loc[("tokens:0.1", "triton")]
    assert (tiles["over_dense"], tiles["ideal"], tiles["ideal_by_pairs"]) == pytest.approx(
        (8, 10, 10)
    )
    assert (tokens["over_dense"], tokens["ideal"], tokens["ideal_by_pairs"]) == pytest.approx(
        (0.8, 1, 10)
    )
    assert tiles["tflops"] == pytest.approx(4 * 0.1 * 16384**2 * 128 * 16 / 1e-3 / 1e12), (
        "by attended pairs"
    )
    elsewhere = [replace(one, run=replace(GPU_RUN, id="another")) for one in records[-3:]]
    assert frame_of("block_sparse", *records[:-3], *elsewhere)["over_dense"].iloc[-1:].isna().all()


def test_dense_is_the_hopper_kernel_where_it_ran():
    """What `auto` takes for attention without a mask is what skipping tiles has to beat."""
    records = [
        *masked("full", 1.0, 1.0, triton=9.0, sdpa_flash=8.0, hopper=6.0),
        *masked("random:0.5", 0.5, 0.5, triton=4.0),
    ]
    frame = frame_of("block_sparse", *records)
    (tiles,) = frame[(frame["quantity"] == "time") & (frame["pattern"] == "random:0.5")].to_dict(
        "records"
    )
    assert (tiles["dense"], tiles["over_dense"]) == ("hopper", pytest.approx(1.5))
    (shown,) = (
        load("block_sparse").tables["forward"].build(frame).only(["random:0.5"], ["dense"]).lines
    )
    assert shown[0].text == "hopper"


def test_the_tables_tiles_stand_beside_the_best_of_the_grid():
    forward = {
        "table_forward": 1.25,
        "sm90_forward_64x64_w4_s2": 1.0,
        "sm90_forward_128x64_w4_s2": 3.0,
    }
    records = [
        row(
            "tile_choice",
            SHAPE,
            name,
            [ms],
            kernel=name.replace("table_forward", "sm90_forward_64x128_w4_s2_tma"),
        )
        for name, ms in forward.items()
    ]
    experiment = load("tile_choice")
    frame = load_frame(
        experiment, [*records, row("tile_choice", SHAPE, "table", [9.0], mode="backward")]
    )
    (line,) = experiment.tables["grid"].build(frame).lines
    assert [cell.text for cell in line[1:]] == [
        "forward", "64x128_w4_s2_tma", "1.25", "64x64_w4_s2", "1.00", "1.25", "3"
    ]  # fmt: skip
    assert (
        experiment.numbers(frame)["judged"] == 1
        and experiment.numbers(frame)["worst"]["over_best"] == 1.25
    )


def test_a_kernels_longest_waits_are_waits():
    stalls = {
        "stall_gmma": 2.5,
        "stall_long_scoreboard": 4.0,
        "stall_barrier": 0.25,
        "stall_selected": 9.0,
    }
    ratios = {"tensor_pipe": 0.75} | stalls
    records = [
        row("kernel_counters", SHAPE, "hopper", [1.25], quantity="kernel_time"),
        *(
            row("kernel_counters", SHAPE, "hopper", [one], quantity=name, unit="1")
            for name, one in ratios.items()
        ),
    ]
    experiment = load("kernel_counters")
    frame = load_frame(experiment, records)
    (line,) = experiment.tables["counters"].build(frame).lines
    assert (
        line[-1].text == "long_scoreboard 4.00, gmma 2.50, barrier 0.250" and line[5].text == "75.0"
    )


def test_an_interval_is_of_the_rounds_ratios():
    rounds = [1.0 + number / 100 for number in range(8)]
    records = [
        row("attention_shapes", SHAPE, "hopper", [1.0] * 8),
        row("attention_shapes", SHAPE, "triton", rounds),
    ]
    interval = load("attention_shapes").numbers(frame_of("attention_shapes", *records))["interval"]
    assert interval("hopper", "triton", mode="forward") == "1.00 to 1.07", (
        "of eight the least and the largest"
    )


def test_shapes_that_lose_to_plain_attention_are_counted():
    records = [
        row("flash_benchmarking", sized_shape(HANDOUT, 1, 1, length, 64, True), name, [ms])
        for length, ours in ((1024, 2.0), (2048, 0.5))
        for name, ms in (("eager", 1.0), ("triton", ours))
    ]
    slower = load("flash_benchmarking").numbers(frame_of("flash_benchmarking", *records))["slower"]
    assert slower("forward", "bfloat16") == "1 of 2"
