"""tools/sanitize.py and what it runs: every shipped configuration is called, and what a sanitizer
says is judged.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cs336_systems.attention.hopper.schedule import ORDERS, SCHEDULES, UNPAIRED
from cs336_systems.attention.tiles.choice import TABLES
from cs336_systems.compiler.offline import compile_all, compiled_launches
from tests.every_config import DTYPES, FAMILIES, cases
from tests.ptx_order import disorder
from tools import sanitize

ROOT = Path(__file__).resolve().parent.parent
GROUPS = sanitize.GROUPS

# Stands in for compute-sanitizer: runs the program, then says what FINDS_<tool> holds.
SANITIZER = """#!{python}
import os, subprocess, sys
if "--version" in sys.argv:
    sys.exit(print("NVIDIA (R) Compute Sanitizer\\nVersion 2026.1.0.0 (build 1)"))
tool = sys.argv[sys.argv.index("--tool") + 1]
code = subprocess.call(sys.argv[sys.argv.index("--error-exitcode") + 2:])
found = os.environ.get("FINDS_" + tool.upper(), "")
print(found)
errors = found.count("Invalid")
print(f"========= ERROR SUMMARY: {{errors}} errors")
sys.exit(99 if errors else code)
"""


@pytest.mark.parametrize("target", [target for target in TABLES if target != "portable"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_row_of_a_table_is_called(target, dtype):
    """Dense, causal, under masks, on packed documents."""
    rows = [row for (_, width, _), row in TABLES[target].items() if width == DTYPES[dtype]]
    shipped = {config.name: config for row in rows for config in row.configs}
    called = {
        family: {name for case in cases(target, [family], [dtype]) for name in case.configs}
        for family in FAMILIES
    }
    for family in GROUPS["triton"]:
        assert called[family] == set(shipped), family
    for family in GROUPS["split"]:
        assert called[family] == {
            name for name, config in shipped.items() if config.kernel == "forward"
        }, family
    schedules = [schedule for schedules in SCHEDULES.values() for schedule in schedules]
    dense, packed = (
        {one.name(order) for one in schedules for order in orders} for orders in (ORDERS, UNPAIRED)
    )
    small, large = (
        {f"hopper_forward_{rows}x128_{order}" for order in UNPAIRED} for rows in (64, 128)
    )
    for family in (*GROUPS["hopper"], *GROUPS["hopper_masked"]):
        expected = packed if "varlen" in family else {"deterministic", "atomic", "parts", *dense}
        if "blocks" in family:
            expected = small | large if family == "hopper_blocks128" else small
        assert called[family] == (expected if dtype == "bfloat16" else set()), family


@pytest.fixture
def sanitizer(tmp_path):
    program = tmp_path / "sanitizer"
    program.write_text(SANITIZER.format(python=sys.executable))
    program.chmod(0o755)
    return program


def run_tool(sanitizer, *options, **environment):
    record = sanitizer.parent / "record.jsonl"
    command = [
        sys.executable, "tools/sanitize.py", "--commit", "abc", "--clean", "--sanitizer", str(sanitizer),
        "--record", str(record), "--processes", "1", "--families", "dense", *options,
        "--", "--device", "cpu", "--dtypes", "float32", "--shard", "0/40",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={"PYTHONPATH": ".", "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]} | environment,
    )  # fmt: skip
    return done, [
        json.loads(line) for line in record.read_text().splitlines()
    ] if record.exists() else []


@pytest.mark.slow
def test_a_clean_run_is_recorded(sanitizer):
    done, rows = run_tool(sanitizer)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["tool"] for row in rows] == ["oracle", "memcheck", "racecheck"]
    expected = {
        "calls": 1, "finished": True, "errors": 0, "wrong": 0, "commit": "abc", "sanitizer": "2026.1.0.0",
        "dirty": False, "device": "cpu",
    }  # fmt: skip
    assert all(row | expected == row for row in rows)


@pytest.mark.slow
def test_what_a_tool_finds_decides_the_exit_code_and_is_shown(sanitizer):
    found = "========= Invalid __global__ read\n" * 3
    done, (oracle, memcheck) = run_tool(sanitizer, "--tools", "memcheck", FINDS_MEMCHECK=found)
    assert done.returncode == 1 and oracle["errors"] == 0 and memcheck["errors"] == 3
    assert (
        "memcheck: NOT CLEAN: 1 calls, 3 errors" in done.stdout
        and "Invalid __global__ read" in done.stdout
    )


def test_racecheck_judges_the_triton_kernels_alone():
    assert list(FAMILIES) == sanitize.FAMILIES
    assert [*sanitize.JUDGED_BY_RACECHECK] == [
        family for family in FAMILIES if "hopper" not in family
    ]


def compile_ptx(name: str) -> str:
    """Of a kernel by its request's representation."""
    from cs336_systems.compiler.hopper_reports import ARCH, _launch, shipped_hopper_kernels

    request = next(request for request in shipped_hopper_kernels() if repr(request) == name)
    (kernel,) = compiled_launches(ARCH, request.function, lambda: _launch(request))
    return kernel.asm["ptx"]


@pytest.mark.slow
def test_specialised_warps_take_what_they_share_in_order():
    """All kernels that ship; and that they do is seen: it is not without any one of their barriers."""
    reports = pytest.importorskip(
        "cs336_systems.compiler.hopper_reports", reason="no Gluon for Hopper in this triton"
    )
    names = list(map(repr, reports.shipped_hopper_kernels()))
    compiled = dict(compile_all(names, compile_ptx, jobs=2))
    assert {name: ptx and disorder(ptx) for name, ptx in compiled.items()} == {
        name: [] for name in names
    }
    ring = compiled[
        next(
            name for name in names if "kernel='backward'" in name and "deterministic=False" in name
        )
    ]
    for barrier, complaint in {
        "mbarrier.try_wait": "no wait before", "bar.warp.sync": "nothing between st.shared",
        "bar.sync": "nothing between ld.shared", "barrier.sync": "no barrier of all around",
        "cp.async.bulk.wait_group": "a partition ends before its copies",
    }.items():  # fmt: skip
        assert any(x.startswith(complaint) for x in disorder(ring.replace(barrier, "nop"))), barrier
