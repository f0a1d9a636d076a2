"""`kernel_counters`: what ncu is asked and says, which kernel of a pass is meant."""

import csv
import io

import pandas as pd
import pytest

from cs336_systems.bench.spec import Unsupported, load
from cs336_systems.config import RunConfig
from cs336_systems.experiments.beyond import kernel_counters
from cs336_systems.measure.counters import (
    COUNTERS,
    CountersUnavailableError,
    parse_counters,
    read_counters,
)

MEASURE = load("kernel_counters").measure
HANDOUT = RunConfig(scale="handout", device="cuda")
METRICS = [metric for metric, *_ in COUNTERS.values()]
UNITS = {"gpu__time_duration.sum": "ns", "sm__cycles_elapsed.avg.per_second": "hz"}


def ncu_page(kernels: dict[str, dict[str, str]], units: dict[str, str] = UNITS) -> str:
    """What `ncu --csv --page raw` prints: its own lines, the program's, then the table with a row
    of units.
    """
    output = io.StringIO()
    writer = csv.writer(output, quoting=csv.QUOTE_ALL)
    writer.writerow(["ID", "Process ID", "Kernel Name", "Context", *METRICS])
    writer.writerow(
        [
            "",
            "",
            "",
            "",
            *(units.get(metric, "%" if ".pct" in metric else "inst") for metric in METRICS),
        ]
    )
    for number, (name, values) in enumerate(kernels.items()):
        writer.writerow([number, 77, name, 1, *(values.get(metric, "0.5") for metric in METRICS)])
    return f"==PROF== Connected to process 77\nwhat the program prints\n{output.getvalue()}"


def a_kernel(milliseconds: str, busy: str = "50") -> dict[str, str]:
    pipe = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
    return {
        "gpu__time_duration.sum": milliseconds,
        pipe: busy,
        "sm__cycles_elapsed.avg.per_second": "1,500,000,000",
    }


# ncu


def test_numbers_come_in_our_units():
    kernels = parse_counters(
        ncu_page({"a<1, 2>": a_kernel("1,250,000"), "b": a_kernel("2000", busy="75.5")})
    )
    assert kernels["name"].tolist() == ["a<1, 2>", "b"] and [*kernels] == ["name", *COUNTERS]
    assert kernels["kernel_time"].tolist() == pytest.approx([1.25, 0.002])
    assert kernels["tensor_pipe"].tolist() == pytest.approx([0.5, 0.755])
    assert kernels["sm_clock"].tolist() == pytest.approx([1.5, 1.5])
    assert kernels["stall_gmma"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("absent", ["", "n/a", "nan"])
def test_a_counter_that_the_gpu_lacks_has_no_number(absent):
    kernels = parse_counters(ncu_page({"a": a_kernel("5") | {COUNTERS["stall_gmma"][0]: absent}}))
    assert [name for name in kernels if kernels[name].isna().any()] == ["stall_gmma"]


def test_other_units_are_refused_and_no_table_is_no_kernel():
    with pytest.raises(
        ValueError, match="ncu's gpu__time_duration.sum must be numbers, got '\\(!\\) n/a'"
    ):
        parse_counters(ncu_page({"a": a_kernel("(!) n/a")}))
    for unit in ("", "us"):
        with pytest.raises(
            ValueError, match=f"ncu's gpu__time_duration.sum must be in ns, got '{unit}'"
        ):
            parse_counters(ncu_page({"a": a_kernel("5")}, UNITS | {"gpu__time_duration.sum": unit}))
    assert parse_counters("==PROF== Disconnected\nnothing was profiled\n").empty


@pytest.mark.parametrize(
    "message",
    [
        "ERR_NVGPUCTRPERM - The user does not have permission",
        "Failed to initialize the profiler: NotLoaded",
    ],
)
def test_counters_that_may_not_be_read_are_no_failure(tmp_path, monkeypatch, message):
    program = tmp_path / "ncu"
    program.write_text(
        f"#!/bin/sh\necho '==PROF== Connected'\necho '==ERROR== {message}' >&2\nexit 1\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(
        CountersUnavailableError, match=f"ncu cannot read the counters: {message[:20]}"
    ):
        read_counters([])


# Cells


def cells(run: RunConfig = HANDOUT):
    return load("kernel_counters").cells(run)


def test_the_longest_kernels_of_both_passes_are_recorded(monkeypatch):
    def kernel(name: str, milliseconds: float) -> dict[str, object]:
        values = dict.fromkeys(COUNTERS, 0.25) | {
            "kernel_time": milliseconds,
            "stall_drain": float("nan"),
        }
        return {"name": name} | values

    asked = []

    def read(arguments: list[str]) -> pd.DataFrame:
        asked.append(arguments)
        forward = [kernel("copy", 0.1), kernel("attend", 2.0)]
        both = [
            *forward,
            kernel("delta", 0.2),
            kernel("dkv", 1.0),
            kernel("not timed", float("nan")),
        ]
        return pd.DataFrame(forward if "forward" in arguments else both)

    monkeypatch.setattr(kernel_counters, "read_counters", read)
    monkeypatch.setattr(kernel_counters, "check_runs", lambda *_: None)
    cell = next(
        cell for cell in cells() if cell.implementation == "hopper" and not cell.case.is_causal
    )
    measured = list(MEASURE(cell, HANDOUT))
    assert {one.row for one in measured} == set(cell.rows)
    assert {(one.row.mode, one.kernel) for one in measured} == {
        ("forward", "attend"),
        ("backward", "dkv"),
    }
    for one in measured:
        if one.row.quantity == "stall_drain":
            assert one.message == "this GPU has no such counter" and not one.samples
    assert [words[1:4] for words in asked] == [
        ["1x64x8192x128", "--mode", "forward"], ["1x64x8192x128", "--mode", "forward_backward"]
    ]  # fmt: skip
    assert all("--full" in words and "hopper" in words and "bfloat16" in words for words in asked)


def test_no_gpu_and_no_access_are_reasons(monkeypatch):
    run = RunConfig(scale="tiny", device="cpu")
    with pytest.raises(Unsupported, match="a CPU has no counters"):
        list(MEASURE(cells(run)[0], run))

    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(kernel_counters, "check_runs", lambda *_: None)
    with pytest.raises(Unsupported, match="ncu is not on PATH"):
        list(MEASURE(cells()[0], HANDOUT))
