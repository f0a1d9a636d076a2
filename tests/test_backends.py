"""Attention's back ends: which run on a machine, and which one a call takes, with what machines
have replaced.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cs336_systems import device
from cs336_systems.attention import AttentionConfig, flash_attention, flash_attention_varlen
from cs336_systems.attention import choose as backends
from cs336_systems.attention.choose import (
    BACKENDS,
    HOPPER_KERNELS,
    HOPPER_TRITON,
    INTERPRETER_HINT,
    LIMITS,
    available_backends,
    select_backend,
)
from cs336_systems.attention.hopper_table import HOPPER_FROM
from cs336_systems.bench.records import Record, Run, case_to_dict
from cs336_systems.config import RunConfig
from cs336_systems.device import DeviceInfo
from cs336_systems.experiments.beyond.backend_choice import (
    COMMON_HEAD_DIMS,
    HEAD_DIMS,
    BackendChoice,
    taken_by_auto,
)
from tools import backend_table

ALL_OK = dict.fromkeys(BACKENDS, "ok")
NO_TRITON = ALL_OK | dict.fromkeys(("triton_first", "triton", "hopper"), "triton is not installed")
CPU_INFO = DeviceInfo(name="AMD EPYC", kind="cpu", memory_bytes=8 * 2**30, num_cores=2)


def gpu(name: str = "NVIDIA H200", capability: tuple[int, int] | None = (9, 0)) -> DeviceInfo:
    return DeviceInfo(
        name=name, kind="cuda", compute_capability=capability, memory_bytes=141 * 10**9
    )


# Which back ends run


def test_the_inputs_own_gpu_is_asked(monkeypatch):
    """And not the one that is current."""
    capabilities, current = {0: (7, 5), 1: (9, 0)}, [0]

    @contextmanager
    def on(chosen: torch.device) -> Iterator[None]:
        before, current[0] = current[0], chosen.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(
        backends, "get_device_info", lambda kind: gpu(capability=capabilities[current[0]])
    )
    monkeypatch.setattr(backends, "_available", {})
    monkeypatch.setattr(backends, "interpreter_is_on", lambda: False)
    found = [backends.available_here(torch.device("cuda", index))["hopper"] for index in (0, 1)]
    assert "compute capability 9.0" in found[0] and "compute capability 9.0" not in found[1]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes this process look like a machine with these tools."""

    def install(
        *, tools: tuple[str, ...] = ("g++", "gcc"), triton: bool = True, interpreter: bool = False,
        system: str = "linux", gluon: str | None = None,
    ) -> None:  # fmt: skip
        real_find_spec = importlib.util.find_spec
        for owner, name, value in (
            (backends, "_gluon_reason", lambda: gluon),
            (device.shutil, "which", lambda name: name if name in tools else None),
            (
                importlib.util,
                "find_spec",
                lambda name: (triton or None) if name == "triton" else real_find_spec(name),
            ),
            (sys, "platform", system),
        ):
            monkeypatch.setattr(owner, name, value)
        for variable in ("CC", "CXX", "TRITON_INTERPRET"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.delitem(sys.modules, "triton.knobs", raising=False)
        if interpreter:
            monkeypatch.setenv("TRITON_INTERPRET", "1")

    return install


NEEDS_8_0 = "triton kernels need a CUDA device of compute capability 8.0 or higher, "
NEEDS_9_0 = "hopper kernels need a GPU of compute capability 9.0 (H100, H200), "


@pytest.mark.parametrize(
    ("setup", "info", "reasons"),
    [
        ({"tools": ("gcc",)}, gpu(), {}),  # the GPU's code needs no C++ compiler
        ({}, CPU_INFO, {"triton": NEEDS_8_0 + "AMD EPYC is no NVIDIA GPU; " + INTERPRETER_HINT,
                        "hopper": NEEDS_9_0 + "AMD EPYC is no NVIDIA GPU"}),
        ({"interpreter": True}, CPU_INFO, {"hopper": NEEDS_9_0 + "AMD EPYC is no NVIDIA GPU"}),
        ({"tools": (), "interpreter": True}, CPU_INFO, {
            "compiled": "no C++ compiler", "hopper": NEEDS_9_0 + "AMD EPYC is no NVIDIA GPU"}),
        ({"tools": ()}, gpu(), dict.fromkeys(
            ("compiled", "triton", "hopper"), "no C compiler, which triton needs to build its launchers")),
        ({"triton": False}, gpu(), {
            "compiled": "torch.compile needs triton on a GPU, and it is not installed",
            "triton": "triton is not installed", "hopper": "triton is not installed"}),
        ({"triton": False, "interpreter": True}, CPU_INFO, {
            "triton": "triton is not installed", "hopper": NEEDS_9_0 + "AMD EPYC is no NVIDIA GPU"}),
        ({"gluon": "no Gluon"}, gpu(), {"hopper": "no Gluon"}),
        *(({"system": "darwin", "interpreter": interpreter}, CPU_INFO, {
            "compiled": "no C++ compiler",  # clang++ there, and only g++ is found
            "triton": "triton kernels run on Linux, and this is darwin",
            "hopper": NEEDS_9_0 + "AMD EPYC is no NVIDIA GPU"}) for interpreter in (False, True)),
        ({}, gpu("Tesla P100", (6, 0)), {
            "compiled": "torch.compile needs compute capability 7.0 or higher, Tesla P100 has 6.0",
            "triton": NEEDS_8_0 + "Tesla P100 has 6.0; " + INTERPRETER_HINT,
            "hopper": NEEDS_9_0 + "Tesla P100 has 6.0"}),
        ({}, gpu("Tesla T4", (7, 5)), {
            "triton": NEEDS_8_0 + "Tesla T4 has 7.5; " + INTERPRETER_HINT, "hopper": NEEDS_9_0 + "Tesla T4 has 7.5"}),
        ({}, gpu("AMD Instinct MI300X", None), {
            "triton": NEEDS_8_0 + "AMD Instinct MI300X is no NVIDIA GPU; " + INTERPRETER_HINT,
            "hopper": NEEDS_9_0 + "AMD Instinct MI300X is no NVIDIA GPU"}),
        ({}, gpu("A100", (8, 0)), {"hopper": NEEDS_9_0 + "A100 has 8.0"}),
        ({"interpreter": True}, gpu(), {"hopper": "hopper kernels have no interpreter; run without TRITON_INTERPRET"}),
    ],
)  # fmt: skip
def test_reasons(machine, setup, info, reasons) -> None:
    machine(**setup)
    if "triton" in reasons:
        reasons = reasons | {"triton_first": reasons["triton"]}
    assert available_backends(info) == ALL_OK | reasons


@pytest.mark.parametrize(
    ("version", "missing", "reason"),
    [
        ("3.6.0", None, None),
        ("3.7.1+git0123", None, None),
        ("3.5.1", None, "hopper kernels need triton from 3.6 to below 3.8, this is 3.5.1"),
        ("3.8.0", None, "hopper kernels need triton from 3.6 to below 3.8, this is 3.8.0"),
        ("3.6.0", "cannot import name 'mbarrier'",
         "the Gluon of this triton lacks what the hopper kernels are written in (cannot import name 'mbarrier')"),
    ],
)  # fmt: skip
def test_gluon_is_looked_at_before_it_is_promised(
    monkeypatch: pytest.MonkeyPatch, version: str, missing: str | None, reason: str | None
) -> None:
    def import_module(name: str) -> SimpleNamespace:
        if name == HOPPER_KERNELS and missing:
            raise ImportError(missing)
        return SimpleNamespace(__version__=version)

    monkeypatch.setattr(backends.importlib, "import_module", import_module)
    assert backends._gluon_reason() == reason


def test_the_installed_triton_has_what_the_hopper_kernels_import() -> None:
    """`auto` took them on an H100 with triton 3.9, where the first call failed to compile."""
    version = pytest.importorskip("triton").__version__
    has_changed = tuple(map(int, version.split(".")[:2])) >= HOPPER_TRITON[1]
    assert (backends._gluon_reason() is not None) == has_changed


# Which back end is taken, by a table of the tests' own

TABLE = {
    ("dense", False): ((64, (1024, 0)), (96, None), (128, (4096, 65536))),
    ("dense", True): ((64, (2048, 0)),),
    ("block_mask", False): ((64, None), (128, (4096, 65536))),
    ("packed", False): ((128, (1024, 0)),),
}
MASK = {"layout": "block_mask", "block_size": (128, 128)}


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "HOPPER_FROM", TABLE)


def select(**overrides: Any) -> tuple[str, str]:
    fields: dict[str, Any] = {
        "device_kind": "cuda", "dtype": "bfloat16", "head_dim": 64, "batch_heads": 8, "seqlen_q": 1024,
        "seqlen_k": 1024, "available": ALL_OK,
    }  # fmt: skip
    return select_backend(**(fields | overrides))


CPU = {"device_kind": "cpu", "dtype": "float32", "available": NO_TRITON}
LONG = {"seqlen_q": 16384, "seqlen_k": 16384}


@pytest.mark.parametrize(
    ("inputs", "name", "reason"),
    [
        # hopper on its GPU
        ({}, "hopper", "ours at head_dim 64 from 1024 tokens and 0 queries in all heads on"),
        ({"dtype": "float16", "head_dim": 128} | LONG, "hopper", "128 from 4096 tokens and 65536 queries"),
        # the next larger head dim's row
        ({"head_dim": 104} | LONG, "hopper", "104 from 4096 tokens"),
        (MASK | {"head_dim": 72} | LONG, "hopper", "72 under a block mask from 4096 tokens"),
        (MASK | {"head_dim": 128, "block_size": (64, 128)} | LONG, "hopper", "128 under a block mask"),
        ({"head_dim": 128, "layout": "packed", "longest": (1024, 1024)} | LONG, "hopper", "128 over packed documents"),
        # not by the table
        ({"is_causal": True}, "triton", "triton serves"),  # from 2048 tokens on
        ({"head_dim": 100} | LONG, "triton", "triton serves"),  # rows that TMA cannot read
        ({"head_dim": 56} | LONG, "triton", "triton serves"),  # below the smallest measured
        ({"available": ALL_OK | {"hopper": "no Gluon"}}, "triton", "triton serves"),
        (MASK | {"head_dim": 128, "block_size": (128, 64)} | LONG, "triton", "triton serves"),
        (MASK | {"head_dim": 128, "batch_heads": 3} | LONG, "triton", "triton serves"),
        ({"head_dim": 128, "layout": "packed", "longest": (1024, 1000)} | LONG, "triton", "triton serves"),
        # triton on CUDA
        ({"seqlen_q": 1023}, "triton", "triton serves bfloat16 with head_dim 64 on this GPU"),
        ({"head_dim": 128, "batch_heads": 3} | LONG, "triton", "triton serves"),
        ({"dtype": "float32"}, "triton", "serves float32"),
        ({"head_dim": 256}, "triton", "head_dim 256"),
        ({"seqlen_q": 0, "seqlen_k": 0}, "triton", "triton serves"),
        ({"layout": "block_mask"} | LONG, "triton", "this GPU; hopper has not been measured to be faster there$"),
        ({"layout": "packed", "head_dim": 256}, "triton", "256 on this GPU; hopper has not been measured to be faster"),
        ({"layout": "block_mask", "head_dim": 256, "block_size": (128, 128)}, "triton", "256 on this GPU$"),
        # CUDA, but not for triton
        ({"dtype": "float64"}, "reference", "triton takes float32, float16, bfloat16, not float64"),
        ({"layout": "block_mask", "block_size": (64, 32)} | LONG, "tiled", r"tiles of at least \(64, 64\)"),
        ({"head_dim": 257}, "reference", "triton takes a head_dim of at most 256, not 257"),
        ({"available": NO_TRITON}, "reference", r"\(triton is not installed\)"),
        # elsewhere
        (CPU, "reference", "the inputs are on cpu.*takes 4.0 MiB, at most 64 MiB"),
        (CPU | LONG, "tiled", "the inputs are on cpu.*takes 1024.0 MiB, more than 64 MiB"),
        # the interpreter is for tests
        (CPU | {"available": ALL_OK}, "reference", "the inputs are on cpu"),
        (CPU | {"seqlen_q": 0}, "reference", "takes 0.0 MiB"),
        # the threshold, in bytes of one head's scores
        (CPU | {"seqlen_q": 4096, "seqlen_k": 4096}, "reference", "takes 64.0 MiB, at most"),
        (CPU | {"seqlen_q": 4096, "seqlen_k": 4097}, "tiled", "more than 64 MiB"),
        (CPU | {"seqlen_q": 4096, "seqlen_k": 4096, "dtype": "float64"}, "tiled", "takes 128.0 MiB"),
        # by name
        ({"requested": "reference"} | LONG, "reference", "reference was asked for"),
        ({"requested": "tiled", "dtype": "float64", "head_dim": 512}, "tiled", "tiled was asked for"),
        (CPU | {"requested": "triton", "available": ALL_OK}, "triton", "triton was asked for"),
        ({"requested": "hopper", "dtype": "float16", "head_dim": 1, "seqlen_q": 0}, "hopper", "hopper was asked for"),
        ({"requested": "hopper", "head_dim": 256, "layout": "packed"}, "hopper", "hopper was asked for"),
    ],
)  # fmt: skip
def test_select_backend(table: None, inputs: dict[str, Any], name: str, reason: str) -> None:
    chosen, why = select(**inputs)
    assert chosen == name
    assert re.search(reason, why), why


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"requested": "flash"},
         "^backend must be one of auto, reference, compiled, tiled, triton_first, triton, hopper, got 'flash'$"),
        ({"dtype": "int8"}, "^dtype must be one of float64, float32, float16, bfloat16, got 'int8'$"),
        ({"requested": "triton", "available": NO_TRITON}, "^backend 'triton' cannot be used: triton is not installed$"),
        ({"requested": "compiled", "available": ALL_OK | {"compiled": "no C++ compiler"}},
         r"^backend 'compiled' cannot be used: no C\+\+ compiler$"),
        ({"requested": "tiled", "available": {}},
         "^backend 'tiled' cannot be used: it is not among the available back ends$"),
        ({"requested": "triton", "dtype": "float64"}, "triton takes float32, float16, bfloat16, not float64$"),
        ({"requested": "triton", "head_dim": 320}, "triton takes a head_dim of at most 256, not 320$"),
        (CPU | {"requested": "triton", "available": ALL_OK, "dtype": "bfloat16"},
         "Triton's CPU interpreter computes wrong bfloat16 products; use float32"),
        ({"requested": "hopper", "dtype": "float32"}, "hopper takes float16, bfloat16, not float32$"),
        ({"requested": "hopper", "head_dim": 129, "layout": "block_mask", "block_size": (128, 128)},
         "hopper takes a head_dim of at most 128 under a block mask, not 129$"),
        ({"requested": "hopper", "head_dim": 257}, f"a head_dim of at most {LIMITS['hopper'].head_dim}, not 257$"),
        ({"requested": "triton_first", "layout": "packed"},
         "^backend 'triton_first' cannot be used: the first kernel takes neither block masks nor packed documents"),
        ({"requested": "hopper", "layout": "block_mask", "block_size": (64, 64)},
         r"^backend 'hopper' cannot be used: hopper walks lists of tiles of at least \(64, 128\), and the mask's are "),
    ],
)  # fmt: skip
def test_select_backend_refuses_with_the_reason(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select(**inputs)


ONE_HEAD = {"batch_heads": 1, "seqlen_q": 2048, "seqlen_k": 2048, "is_causal": True}
DETERMINISTIC = {"deterministic": True}


@pytest.mark.parametrize(
    ("inputs", "name", "reason"),
    [
        (ONE_HEAD, "hopper", "from 1448 tokens and 2048 queries"),
        (ONE_HEAD | DETERMINISTIC, "triton",
         "from 2048 tokens and 65536 queries in all heads on, where deterministic=True divides no work$"),
        (ONE_HEAD | DETERMINISTIC | {"is_causal": False, "head_dim": 128}, "triton", "1024 tokens and 16384 queries"),
        (ONE_HEAD | DETERMINISTIC | {"batch_heads": 32}, "hopper", "2048 tokens and 65536 queries"),
        (ONE_HEAD | DETERMINISTIC | {"batch_heads": 4, "head_dim": 256}, "hopper", "512 tokens and 8192 queries"),
        # its forward is not divided
        (ONE_HEAD | {"head_dim": 56}, "triton", "65536 queries in all heads on$"),
        (ONE_HEAD | {"head_dim": 104, "is_causal": False}, "triton", "16384 queries in all heads on$"),
        (ONE_HEAD | {"head_dim": 104, "batch_heads": 32}, "hopper", "104 from 2048 tokens"),
        (ONE_HEAD | {"seqlen_q": 1024}, "triton", "faster from 1448 tokens and 2048 queries in all heads on$"),
    ],
)  # fmt: skip
def test_calls_whose_work_is_not_divided_need_more_queries_for_hopper(
    inputs: dict[str, Any], name: str, reason: str
) -> None:
    """By the shipped table, whose rows of few queries were measured with divided work: one head of
    2,048 tokens took hopper with `deterministic`, which had 0.67 to 0.82 of triton's speed.
    """
    chosen, why = select(**inputs)
    assert chosen == name, why
    assert re.search(reason, why), why


def test_auto_asks_whether_gradients_must_be_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """`flash_attention` and `explain_backend`, of the call or of PyTorch's own setting."""
    asked = []

    def select(*, deterministic: bool, **_: Any) -> tuple[str, str]:
        asked.append(deterministic)
        return "reference", "the test says so"

    monkeypatch.setattr(backends, "select_backend", select)
    # a choice is remembered
    q, *others = (torch.zeros(1, 2, length, 16) for length in (64, 65, 66, 67))
    flash_attention(q, q, q, deterministic=True)
    flash_attention(others[0], others[0], others[0])
    torch.use_deterministic_algorithms(True)
    try:
        flash_attention(others[1], others[1], others[1])
        backends.explain_backend(others[2], others[2], deterministic=False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked == [True, False, True, False]


# The table behind `auto`


LOSES_AT_MOST = 1.05


def test_auto_takes_the_kernel_that_the_published_records_have_as_faster() -> None:
    """Row by row, of both passes. `auto` knows the least tokens and the least queries: it may take
    triton for a call that hopper attends faster, where hopper is slower, by more than the table
    allows, for another with at least as many of both.
    """
    cases = backend_table.measured(backend_table.CHOICE, *backend_table.OTHERS)
    assert len(cases) >= 90

    def hides(other: dict[str, Any], case: dict[str, Any]) -> bool:
        same_row = all(
            other[name] == case[name] for name in ("layout", "is_causal", "head_dim", "dtype")
        )
        return (
            same_row and other["tokens"] >= case["tokens"] and other["queries"] >= case["queries"]
        )

    slower = [case for case in cases if case["over_triton"] * backend_table.SLOWER < 1]
    for case in cases:
        taken, over = taken_by_auto(case), case["over_triton"]
        if taken == "triton" and over > LOSES_AT_MOST:
            assert any(hides(other, case) for other in slower), case
        else:
            assert (over if taken == "triton" else 1 / over) <= LOSES_AT_MOST, f"{taken} in {case}"


def test_the_table_is_that_of_the_published_records() -> None:
    text = backend_table.table_text(
        backend_table.measured(backend_table.CHOICE, *backend_table.OTHERS)
    )
    assert backend_table.TABLE.read_text() == text, "run tools/backend_table.py"


def test_tiles_of_triton_ask_for_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `auto` would take another back end, as on this CPU and on a Hopper GPU."""
    asked = []

    def select(*, requested: str, **_: Any) -> tuple[str, str]:
        asked.append(requested)
        raise ValueError("enough")

    q, ends = torch.zeros(1, 2, 64, 16), torch.tensor([0, 64], dtype=torch.int32)
    monkeypatch.setattr(backends, "select_backend", select)
    for config in (None, AttentionConfig()):
        with pytest.raises(ValueError, match="enough"):
            flash_attention(q, q, q, config=config)
        with pytest.raises(ValueError, match="enough"):
            flash_attention_varlen(*[q[0].transpose(0, 1)] * 3, ends, ends, 64, 64, config=config)
    assert asked == ["auto", "auto", "triton", "triton"]


def test_packed_documents_take_turns() -> None:
    """Laid out as the packed kernels take them, and checked as the oracle has them."""
    run = RunConfig(scale="smoke", device="cpu")
    (cell,) = (cell for cell in BackendChoice().cells(run) if cell.case.layout == "packed")
    triton, hopper = sorted(
        BackendChoice().measure(cell, run), key=lambda one: one.row.implementation, reverse=True
    )
    assert triton.samples and triton.error is not None and triton.error <= 1
    assert "hopper kernels need a GPU of compute capability 9.0 (H100, H200)" in hopper.message


def test_a_table_is_made_of_records() -> None:
    """A probe counts to the next larger head dim, whose row it takes."""
    facts: dict[str, Any] = {
        "id": "1",
        "scale": "handout",
        "software": {},
        "commit": "c",
        "dirty": False,
        "date": "",
    }
    run = Run(device={"name": "NVIDIA H200", "kind": "cuda"}, **facts)
    cells = BackendChoice().cells(RunConfig(scale="handout", device="cuda"))

    def cases(slow: int, **hopper_ms: float) -> list[dict[str, Any]]:
        """Hopper takes 0.5 ms where triton takes 1, but in a layout of `hopper_ms`, and twice at
        head dim `slow`.
        """
        made = [
            Record(
                run=run, problem="backend_choice", case=case_to_dict(cell.case), mode=row.mode, quantity="time",
                unit="ms", status="ok", implementation=row.implementation,
                samples=[1.0 if row.implementation == "triton" else
                         2.0 if cell.case.head_dim == slow else hopper_ms.get(cell.case.layout, 0.5)],
            )
            for cell in cells
            for row in cell.rows
        ]  # fmt: skip
        return list(backend_table.cases_of(made))

    def rows(text: str) -> dict[Any, Any]:
        return ast.literal_eval(text.partition(" = ")[2])

    fast = rows(backend_table.table_text(cases(0, packed=1.1)))
    assert list(fast) == list(HOPPER_FROM)
    fewest = {head_dim: 1024 if head_dim in COMMON_HEAD_DIMS else 8192 for head_dim in HEAD_DIMS}
    assert fast["dense", True] == tuple(
        (head_dim, (512, queries)) for head_dim, queries in fewest.items()
    )
    assert fast["block_mask", False] == ((64, (2048, 32768)), (128, (2048, 32768)))
    assert fast["packed", False] == fast["packed", True] == ((64, None), (128, None))
    probed = dict(rows(backend_table.table_text(cases(48)))["dense", False])
    assert probed[64] == (512, 262144) and probed[80] == (512, 8192)


def test_thresholds_lose_least_of_those_from_which_hopper_is_never_slower() -> None:
    def limits(*cases: tuple[int, int, float]) -> tuple[int, int] | None:
        return backend_table.limits_of(
            [dict(zip(("tokens", "queries", "over_triton"), case)) for case in cases]
        )

    assert limits((512, 8192, 0.8), (512, 32768, 1.2), (4096, 65536, 1.3)) == (512, 32768)
    assert limits((512, 8192, 0.8), (512, 32768, 0.9), (4096, 16384, 1.2), (4096, 65536, 0.99)) == (
        1448,
        16384,
    )
    assert limits((512, 8192, 1.2), (4096, 65536, 0.97)) is None  # slower at last
    assert limits((512, 8192, 0.99)) is None  # nothing is gained


@pytest.mark.parametrize("layout", ["dense", "block_mask", "packed"])
def test_the_choice_can_be_traced_with_lengths_and_head_dims_that_vary(layout: str) -> None:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        length, head_dim = x.shape
        name, _ = select(head_dim=head_dim, seqlen_q=length, seqlen_k=length, layout=layout)
        return x * (2 if name == "hopper" else 3)

    torch.compiler.reset()  # the layouts before count as recompilations of the same code
    compiled = torch.compile(scaled, fullgraph=True, backend="eager", dynamic=True)
    for shape in ((4096, 96), (8192, 128), (100, 128), (8192, 64)):
        torch.testing.assert_close(compiled(torch.ones(shape)), scaled(torch.ones(shape)))


def test_a_choice_is_made_again_when_the_interpreter_is_switched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What runs here depends on it, and a remembered choice said otherwise."""
    q = torch.zeros(1, 2, 64, 16)
    monkeypatch.setattr(
        backends, "available_here", lambda _: dict.fromkeys(backends.BACKENDS, "ok")
    )
    monkeypatch.setattr(backends, "interpreter_is_on", lambda: False)
    assert backends.explain_backend(q, q, backend="triton")[0] == "triton"
    monkeypatch.setattr(
        backends, "available_here", lambda _: dict.fromkeys(backends.BACKENDS, "not here")
    )
    monkeypatch.setattr(backends, "interpreter_is_on", lambda: True)
    with pytest.raises(ValueError, match="not here"):
        backends.explain_backend(q, q, backend="triton")
