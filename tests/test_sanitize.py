"""tools/sanitize.py and what it runs: every shipped configuration is called, and what a sanitizer says is judged."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys

import pytest

from cs336_systems.attention.compilation import compile_all, compiled_launches
from cs336_systems.attention.hopper.schedule import ORDERS, SCHEDULES, UNPAIRED
from cs336_systems.attention.tiles.tables import TABLES
from tests.every_config import DTYPES, FAMILIES, cases
from tests.ptx_order import disorder
from tests.test_tools import ROOT, load_tool

sanitize = load_tool("sanitize")
GROUPS = sanitize.GROUPS
HOPPER = "cs336_systems/attention/hopper"

# Stands in for compute-sanitizer: runs the program, then says what FINDS_<tool> holds. The controls and the calls of
# the Hopper kernels need a GPU: under racecheck it does not run them, and says what FINDS_<control>, FINDS_HOPPER hold.
SANITIZER = """#!{python}
import os, subprocess, sys
if "--version" in sys.argv:
    sys.exit(print("NVIDIA (R) Compute Sanitizer\\nVersion 2026.1.0.0 (build 1)"))
tool = sys.argv[sys.argv.index("--tool") + 1]
program = sys.argv[sys.argv.index("--error-exitcode") + 2:]
name, code = tool, 0
if "tests.sanitizer_controls" in program:
    name = program[-1]
elif tool == "racecheck" and "hopper" in program:
    name = "hopper"
else:
    code = subprocess.call(program)
print("1 calls" if name != tool else "")
found = os.environ.get("FINDS_" + name.upper(), "")
print(found or "")
errors = found.count("Race reported") or found.count("Invalid")
print(f"========= ERROR SUMMARY: {{errors}} errors")
sys.exit(99 if errors else code)
"""


def line_of(source: str, text: str) -> int:
    """The number of the only line of a file that contains `text`."""
    lines = (ROOT / source).read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, start=1) if text in line]
    return number


def report(kernel: str, file: str, first: tuple[str, int], *others: tuple[str, int]) -> str:
    """What racecheck prints of one access and those that it races with."""
    lines = [f"========= Error: Race reported between {first[0]} access at {kernel}+0x180 in {file}:{first[1]}"]
    lines += [f"=========     and {kind} access at {kernel}+0xc9{n}0 in {file}:{line} [{n + 3} hazards]"
              for n, (kind, line) in enumerate(others)]  # fmt: skip
    return "\n".join([*lines, "========= "])


FORWARD_DEF = line_of(f"{HOPPER}/forward.py", "def hopper_forward_kernel(")
FORWARD_DISPATCH = line_of(f"{HOPPER}/forward.py", "if CONSUMERS == 1:")
L_STORE = line_of(f"{HOPPER}/backward.py", "shared.L_slots.index(slot).store(L)")
L_LOAD = line_of(f"{HOPPER}/backward.py", "shared.L_slots.index(slot).load(")
CONTROLS = "tests/sanitizer_controls.py"
IN_FORWARD = report(
    "hopper_forward_kernel", "forward.py", ("Read", FORWARD_DEF), ("Write", FORWARD_DEF), ("Write", FORWARD_DISPATCH)
)
IN_BACKWARD = report("hopper_backward_kernel", "backward.py", ("Write", L_STORE), ("Read", L_LOAD), ("Read", L_LOAD))
CONTROL_FINDINGS = {
    "FINDS_DISPATCH": report(
        "dispatch_kernel", "sanitizer_controls.py", ("Read", line_of(CONTROLS, "def dispatch_kernel(")),
        ("Write", line_of(CONTROLS, "def dispatch_kernel(")),
    ),
    "FINDS_RING": report(
        "ring_kernel", "sanitizer_controls.py", ("Write", line_of(CONTROLS, "row_slots.index(slot).store(")),
        ("Read", line_of(CONTROLS, "row_slots.index(slot).load(")),
    ),
}  # fmt: skip
RING_LINE = line_of(CONTROLS, "def ring_kernel(")
RING_DISPATCH = report("ring_kernel", "sanitizer_controls.py", ("Read", RING_LINE), ("Write", RING_LINE))
ELSEWHERE = report("exchange_kernel", "sanitizer_controls.py", ("Read", RING_LINE), ("Write", RING_LINE))


@pytest.mark.parametrize("target", [target for target in TABLES if target != "portable"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_row_of_a_table_is_called(target, dtype):
    """Dense, causal, under masks, on packed documents."""
    shipped = {
        config.name: config
        for (_, width, _), row in TABLES[target].items()
        for config in row.configs
        if width == DTYPES[dtype]
    }
    called = {
        family: {name for case in cases(target, [family], [dtype]) for name in case.configs} for family in FAMILIES
    }
    for family in GROUPS["triton"]:
        assert called[family] == set(shipped), family
    for family in GROUPS["split"]:
        assert called[family] == {name for name, config in shipped.items() if config.kernel == "forward"}, family
    schedules = [schedule for schedules in SCHEDULES.values() for schedule in schedules]
    dense, packed = ({one.name(order) for one in schedules for order in orders} for orders in (ORDERS, UNPAIRED))
    small, large = ({f"hopper_forward_{rows}x128_{order}" for order in UNPAIRED} for rows in (64, 128))
    for family in (*GROUPS["hopper"], *GROUPS["hopper_masked"]):
        expected = packed if "varlen" in family else {"deterministic", "atomic", *dense}
        if "blocks" in family:
            expected = small | large if family == "hopper_blocks128" else small
        assert called[family] == (expected if dtype == "bfloat16" else set()), family


@pytest.fixture
def sanitizer(tmp_path):
    program = tmp_path / "sanitizer"
    program.write_text(SANITIZER.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def run_tool(sanitizer, *options, families=("dense",), **environment):
    record = sanitizer.parent / "record.jsonl"
    command = [
        sys.executable, "tools/sanitize.py", "--commit", "abc", "--clean", "--sanitizer", str(sanitizer),
        "--record", str(record), "--processes", "1", "--families", *families, *options,
        "--", "--device", "cpu", "--dtypes", "float32", "--shard", "0/40",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={"PYTHONPATH": ".", "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]} | environment,
    )  # fmt: skip
    return done, [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


@pytest.mark.slow
def test_a_clean_run_is_recorded(sanitizer):
    done, rows = run_tool(sanitizer)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(row["tool"], row["group"]) for row in rows] == [
        ("oracle", "all"), ("memcheck", "all"), ("racecheck", "triton")
    ]  # fmt: skip
    for row in rows:
        assert row["calls"] == 1 and row["finished"] and row["errors"] == row["wrong"] == 0 and row["commit"] == "abc"
        assert row["sanitizer"] == "2026.1.0.0" and row["dirty"] is False and row["device"] == "cpu"


@pytest.mark.slow
def test_what_a_tool_finds_decides_the_exit_code_and_is_shown(sanitizer):
    done, (oracle, memcheck) = run_tool(
        sanitizer, "--tools", "memcheck", FINDS_MEMCHECK="========= Invalid __global__ read\n" * 3
    )
    assert done.returncode == 1 and oracle["errors"] == 0 and memcheck["errors"] == 3
    assert "memcheck, all: NOT CLEAN: 1 calls, 3 errors" in done.stdout and "Invalid __global__ read" in done.stdout


def racecheck_rows(finds: dict[str, str]) -> dict[str, dict]:
    """The rows of the controls and of the Hopper kernels, by group, if racecheck said this of them."""
    rows: dict[str, dict] = {}
    for name in (*sanitize.CONTROLS, "hopper"):
        log = finds.get(f"FINDS_{name.upper()}", "")
        row = sanitize.row_of("racecheck", name if name == "hopper" else f"control {name}", [99 if log else 0],
                              [f"1 calls\n{log}"], 1.0)  # fmt: skip
        sanitize.explain(row, dict(rows))
        rows[name] = row
    return rows


@pytest.mark.parametrize(
    "finds, not_right",
    [
        ({}, []),
        ({"FINDS_HOPPER": IN_FORWARD + IN_BACKWARD}, []),
        ({"FINDS_HOPPER": IN_FORWARD, "FINDS_RING": ""}, []),
        ({"FINDS_HOPPER": IN_BACKWARD, "FINDS_RING": ""}, ["hopper"]),
        ({"FINDS_HOPPER": IN_FORWARD, "FINDS_DISPATCH": ""}, ["hopper"]),
        ({"FINDS_HOPPER": IN_FORWARD, "FINDS_DISPATCH": "", "FINDS_RING": RING_DISPATCH}, []),
        ({"FINDS_HOPPER": IN_FORWARD, "FINDS_EXCHANGE": ELSEWHERE}, ["exchange", "hopper"]),
        ({"FINDS_DISPATCH": CONTROL_FINDINGS["FINDS_RING"]}, ["dispatch"]),
        ({"FINDS_HOPPER": "WRONG"}, ["hopper"]),
    ],
)
def test_a_hazard_is_explained_by_controls_that_are_right_and_by_nothing_else(finds, not_right):
    rows = racecheck_rows(CONTROL_FINDINGS | finds)
    assert [name for name, row in rows.items() if not sanitize.is_right(row)] == not_right


# Of compute-sanitizer 2025.3.1 on an H200.
LOG = """
========= COMPUTE-SANITIZER
hopper        bfloat16  d=64  deterministic
========= Error: Race reported between Read access at hopper_forward_kernel+0x180 in forward.py:443
=========     and Write access at hopper_forward_kernel+0xc9c0 in forward.py:443 [9 hazards]
=========     and Write access at hopper_forward_kernel+0xc9d0 in forward.py:443 [5 hazards]
=========     and Write access at hopper_forward_kernel+0x12010 in forward.py:474 [3 hazards]
=========
========= Error: Race reported between Write access at hopper_backward_kernel+0x5810 in backward.py:255
=========     and Read access at hopper_backward_kernel+0x16e0 in backward.py:294 [64 hazards]
=========     and Read access at hopper_backward_kernel+0x16f0 in backward.py:294 [1 hazard]
=========
1 calls, forward and backward, in 8 s; configurations covered:
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""


def test_hazards_are_counted_by_their_places():
    hazards = sanitize.hazards_of(LOG + LOG.replace("backward.py", "/somewhere/backward.py"))
    assert {(one.kernel, str(one), str(other)): count for (one, other), count in hazards.items()} == {
        ("hopper_forward_kernel", "Read forward.py:443", "Write forward.py:443"): 28,
        ("hopper_forward_kernel", "Read forward.py:443", "Write forward.py:474"): 6,
        ("hopper_backward_kernel", "Read backward.py:294", "Write backward.py:255"): 130,
    }
    row = sanitize.row_of("racecheck", "hopper", [99, None], [LOG, LOG[: LOG.index("1 calls")]], 8.4)
    assert (row["errors"], row["calls"], row["finished"], row["seconds"]) == (4, 1, False, 8)
    assert not sanitize.hazards_of("1 calls\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)")


def test_the_tool_knows_all_families_and_controls():
    assert list(FAMILIES) == sanitize.FAMILIES
    controls = pytest.importorskip("tests.sanitizer_controls", reason="this triton has no Gluon for Hopper")
    assert tuple(sanitize.CONTROLS) == controls.CONTROLS


def compile_ptx(name: str) -> str:
    """Of a control, or of a kernel by its request's representation."""
    from cs336_systems.attention.hopper.reports import ARCH, _launch, shipped_hopper_kernels
    from tests.sanitizer_controls import CONTROLS, run_control

    requests = {repr(request): request for request in shipped_hopper_kernels()}
    (kernel,) = compiled_launches(
        ARCH,
        requests[name].function if name in requests else "_kernel",
        lambda: run_control(name, "meta") if name in CONTROLS else _launch(requests[name]),
    )
    return kernel.asm["ptx"]


def compiled_disorder(ptx: str) -> list[str]:
    """What is out of order in a compiled kernel where racecheck's reports are explained."""
    (kernel,) = re.findall(r"\.entry (\w+)", ptx)
    file = "sanitizer_controls.py"
    if kernel.startswith("hopper_"):
        file = f"{re.search('forward|wide|backward', kernel)[0]}.py".replace("wide", "wide_backward")
    _, dispatch_lines = sanitize.dispatch_of(kernel, file)
    assert dispatch_lines
    found = disorder(
        ptx,
        is_slot=lambda file, line: bool(
            sanitize.SLOT_ACCESS.search(sanitize.line_of(sanitize.Access("", "", file, line)))
        ),
        is_dispatch=lambda name, line: name == file and line in dispatch_lines,
    )
    has_ring = kernel in ("ring_kernel", "hopper_wide_dkdv_kernel") or kernel.endswith("backward_kernel")
    return found if has_ring else [x for x in found if x not in ("no load of a row", "no store of a row")]


@pytest.mark.slow
def test_controls_compile_and_are_in_order():
    """And that they are is seen: it is not without any one of their barriers."""
    pytest.importorskip("tests.sanitizer_controls", reason="this triton has no Gluon for Hopper")
    compiled = dict(compile_all(list(sanitize.CONTROLS), compile_ptx, jobs=2))
    assert {name: ptx and compiled_disorder(ptx) for name, ptx in compiled.items()} == {
        name: [] for name in sanitize.CONTROLS
    }
    ring = compiled["ring"]
    assert re.search(r"bar\.sync\s+9, 256", compiled["exchange"])
    for barrier, complaint in {
        "mbarrier.try_wait": "no wait before", "bar.warp.sync": "nothing between st.shared",
        "bar.sync": "nothing between ld.shared", "barrier.sync": "no barrier of all around",
    }.items():  # fmt: skip
        assert any(x.startswith(complaint) for x in compiled_disorder(ring.replace(f"{barrier}", "nop"))), barrier


@pytest.mark.slow
def test_where_racecheck_is_blind_the_kernels_are_in_order():
    """All that ship."""
    reports = pytest.importorskip(f"{HOPPER.replace('/', '.')}.reports", reason="this triton has no Gluon for Hopper")
    names = list(map(repr, reports.shipped_hopper_kernels()))
    found = {name: ptx and compiled_disorder(ptx) for name, ptx in compile_all(names, compile_ptx, jobs=2)}
    assert found == {name: [] for name in names}
