"""What the compiler makes of the Hopper kernels, judged without a GPU."""

from __future__ import annotations

import re

import pytest

pytest.importorskip(
    "cs336_systems.attention.hopper.backward", reason="this triton has no Gluon for Hopper"
)

from cs336_systems.attention.hopper.schedule import ORDERS, SCHEDULES, plan_forward
from cs336_systems.attention.tiles.choice import SHARED_MEMORY_LIMIT_BYTES
from cs336_systems.attention.tiles.kernel_config import head_tile
from cs336_systems.commands.kernels import print_hopper_reports
from cs336_systems.compiler.hopper_reports import (
    ARCH,
    BATCH,
    COLUMNS,
    HopperReport,
    HopperRequest,
    Loop,
    _launch,
    compile_hopper_kernels,
    main_loops,
    shipped_hopper_kernels,
)
from cs336_systems.compiler.offline import compile_all, compiled_launches, triton_version

JUDGE = "3.6.0"  # the Triton of the machines that the kernels were measured on
judged = pytest.mark.skipif(
    triton_version() != JUDGE, reason=f"registers and their order are triton {JUDGE}'s"
)
# Bytes that a thread of the backward spills, at most, by head tile: of its 240 registers dK and dV
# take 64 or 128, and a step's tiles the rest. Heads of 256 columns have kernels of one gradient a
# thread, which spill nothing. Nor may the forward, but there, and in parts of 192 queries, outside
# of its loops.
MAX_FORWARD_SPILL_BYTES = {(64, "split"): 4, (256, "dense"): 12, (256, "packed"): 12}
MAX_SPILL_BYTES = {
    (64, "dense"): 8, (96, "dense"): 0, (128, "dense"): 80, (256, "dense"): 0,
    (64, "listed"): 92, (96, "listed"): 8, (128, "listed"): 136,
    (64, "split"): 272, (128, "split"): 108,
    (64, "packed"): 32, (96, "packed"): 12, (128, "packed"): 160,
}  # fmt: skip
# Loads and stores of an iteration of some 1,000 instructions; else none.
MAX_LOOP_SPILLS = {
    (128, "dense"): 5, (128, "split"): 3, (64, "listed"): 2, (128, "listed"): 10, (128, "packed"): 19,
}  # fmt: skip
NAMED = {
    (columns, schedule.name(order)): schedule
    for columns in COLUMNS
    for schedule in SCHEDULES[head_tile(columns)]
    for order in ORDERS
}
A_FEW = [
    HopperRequest(kernel="forward", head_dim=128, is_causal=True),
    HopperRequest(
        kernel="backward",
        head_dim=40,
        is_causal=False,
        dtype="float16",
        group=4,
        whole_key_tiles=False,
        walk="split",
    ),
    HopperRequest(
        kernel="wide_dkdv",
        head_dim=160,
        is_causal=True,
        dtype="float16",
        group=4,
        whole_key_tiles=False,
    ),
    HopperRequest(kernel="wide_dq", head_dim=256, is_causal=True),
]


@pytest.fixture(scope="module")
def reports() -> list[HopperReport]:
    """All shipped kernels where their registers are judged, and elsewhere a few, to see that they
    compile.
    """
    requests = A_FEW + (shipped_hopper_kernels() if triton_version() == JUDGE else [])
    found = {report.request: report for report in compile_hopper_kernels(requests, jobs=2)}
    return [found[request] for request in requests]


def test_kernels_compile_and_fit(reports):
    for report in reports:
        assert not report.failure, report
        request = report.request
        schedule = NAMED.get((max(64, request.head_dim), request.config))
        if request.function == "hopper_split_forward_kernel":
            schedule = plan_forward(
                head_dim=request.head_dim, is_causal=request.is_causal, num_queries=request.seqlen,
                num_keys=request.seqlen, batch_heads=BATCH, group=1, num_multiprocessors=0,
            ).schedule  # fmt: skip
        consumers, resident = (schedule.consumers, schedule.resident) if schedule else (2, 1)
        # Every program on a multiprocessor has a KiB more, which is the system's.
        fits = (SHARED_MEMORY_LIMIT_BYTES["sm90"] + 1024) // resident - 1024
        assert 64 * 1024 < report.shared_bytes <= fits, report
        assert 128 < report.registers <= (240 if consumers > 1 else 255), report
        assert len(report.loops) >= consumers, report
        assert all("matmul." in loop.instructions for loop in report.loops), report
        with_exponentials = ["exp2" in loop.instructions for loop in report.loops]
        if request.kernel == "wide_dkdv":  # one consumer takes them for both
            assert sorted(with_exponentials) == [False, True], report
        else:
            assert all(with_exponentials), report


@judged
def test_no_kernel_lets_the_tensor_cores_wait(reports):
    """Exponentials of the forward run under matmuls. At head tile 64 they do in large tiles without
    a mask; in the others consumers cover each other, or two programs do. The backward's run under
    matmuls, and some of a step's under its own, but in `wide_dkdv`, where they run under the other
    consumer's.
    """
    for report in reports:
        assert report.serialized == 0, report
        request = report.request
        is_narrow = request.kernel == "forward" and request.head_dim <= 64
        is_large = request.config.startswith("hopper_forward_192x128")
        waits = is_narrow and (request.is_causal or request.walk != "dense" or not is_large)
        if waits or request.kernel == "wide_dkdv":
            assert not any(loop.overlap for loop in report.loops), report
        elif request.kernel == "forward":
            assert min(loop.overlap for loop in report.loops) == 1.0, report
        else:
            # of 96 columns a step's first matmul is two short ones
            least = 0.35 if request.head_dim == 96 else 0.6
            assert max(loop.overlap for loop in report.loops) > least, report


@judged
def test_shipped_kernels_spill_no_more_than_is_known(reports):
    for report in reports[len(A_FEW) :]:
        spills = max(loop.spills for loop in report.loops)
        kernel = report.request.head_dim, report.request.walk
        allowed = MAX_FORWARD_SPILL_BYTES.get(kernel, 0), 0
        if report.request.kernel != "forward":
            allowed = MAX_SPILL_BYTES[kernel], MAX_LOOP_SPILLS.get(kernel, 0)
        assert report.spill_bytes <= allowed[0] and spills <= allowed[1], report


def read_registers(request: HopperRequest) -> tuple[int, int, set[int]]:
    """(registers of each thread at the start, threads of a program, registers that warp groups ask
    for later).
    """
    (kernel,) = compiled_launches(ARCH, "hopper_forward_kernel", lambda: _launch(request))
    ptx = kernel.asm["ptx"]
    limit, threads = (int(re.search(rf"\.{name} (\d+)", ptx)[1]) for name in ("maxnreg", "reqntid"))
    return (
        limit,
        threads,
        set(map(int, re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx))),
    )


@pytest.mark.slow
def test_programs_of_a_multiprocessor_share_its_registers():
    """setmaxnreg waits for ever if the warp groups of a program ask for more registers than it
    started with.
    """
    named = {
        HopperRequest(kernel="forward", head_dim=head_dim, is_causal=True, config=config): schedule
        for (head_dim, config), schedule in NAMED.items()
        if config.endswith("tiles")
    }
    for request, report in compile_all(list(named), read_registers, jobs=2):
        schedule, (limit, threads, asked) = named[request], report
        assert threads == 128 * (schedule.consumers + 1)
        assert limit * threads * schedule.resident <= 65536
        others = (schedule.consumers - 1) * schedule.registers + 24
        first = min(256, limit * threads // 128 - others)
        assert {first, schedule.registers, 24} <= asked and schedule.registers <= first, (
            request,
            limit,
            asked,
        )


def listing(*instructions: str) -> list[tuple[int, str]]:
    """A disassembly that ends with a branch to its second instruction."""
    return [
        *((16 * number, line) for number, line in enumerate(instructions)),
        (16 * len(instructions), "@P0 BRA 0x10"),
    ]


HALF, GROUP = (
    "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ",
    "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0",
)
WAIT_0, WAIT_1 = "WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.DEPBAR.LE gsb0, 0x1"
EXP = "MUFU.EX2 R5, R5"


def test_loops_are_read_in_order():
    lines = listing(
        "MOV R1, c[0x0][0x28]", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2", HALF, GROUP, WAIT_1, EXP, EXP,
        "STL [R1], R4", "BAR.SYNC.DEFER_BLOCKING 0x9, 0x100", "UTMAREDG.2D.ADD [UR4], [UR6]",
    )  # fmt: skip
    (loop,) = main_loops([*lines, (16 * len(lines), GROUP)])
    assert str(loop) == "matmul x2, wait to 1, exp2 x2, barrier, tma add, wait for slot"
    assert loop.spills == 1


@pytest.mark.parametrize(
    ("instructions", "overlap"),
    [
        ((GROUP, WAIT_0, EXP), 0.0),
        ((GROUP, EXP, WAIT_0), 1.0),
        ((GROUP, GROUP, WAIT_1, EXP, WAIT_0, EXP), 0.5),
        # in flight over the loop's end; the first time around nothing is
        ((EXP, WAIT_0, GROUP), 0.5),
        ((GROUP, WAIT_0), 0.0),
        ((HALF, EXP, GROUP, WAIT_0, EXP), 0.5),  # between the matmuls of one group
    ],
)
def test_overlap_counts_exponentials_under_matmuls(instructions, overlap):
    (loop,) = main_loops(listing("NOP", *instructions))
    assert loop.overlap == overlap


def test_doctor_prints_a_line_a_kernel_and_each_loop_once(capsys):
    loop = Loop(("wait for slot", "matmul.", "spill", "wait to 0", "exp2"))
    rotated = Loop(("matmul.", "wait to 0", "exp2", "wait for slot"))
    causal, full = (
        HopperRequest(kernel="backward", head_dim=64, is_causal=is_causal)
        for is_causal in (True, False)
    )
    numbers = {"registers": 200, "spill_bytes": 8, "shared_bytes": 100 * 1024, "serialized": 3}
    failed = HopperReport(request=full, failure="RuntimeError: PassManager::run failed")
    print_hopper_reports([HopperReport(request=causal, **numbers, loops=(loop, rotated)), failed])
    first, second, third, *loops = [
        " ".join(line.split()) for line in capsys.readouterr().out.splitlines()
    ]
    assert first.startswith(
        "Hopper kernel registers spilled bytes spills a step shared KiB waits exp2 under matmuls"
    )
    assert second == "hopper_backward, head dim 64, causal 200 8 1 100.0 3 0 %"
    assert (
        third
        == "hopper_backward, head dim 64, full - - - - - - RuntimeError: PassManager::run failed"
    )
    assert loops[1:] == [
        "matmul, wait to 0, exp2, wait for slot",
        "hopper_backward, head dim 64, causal",
    ]
