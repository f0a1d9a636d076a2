"""Test set-up: the GPU tests and the record of their last run on a GPU.

    @pytest.mark.gpu                            # left out without CUDA; the module names its sources in COVERS

    pytest                                                                # names stale GPU tests
    pytest -m gpu --gpu-record=FILE --gpu-commit=REVISION --gpu-clean     # on a GPU: writes their outcomes to FILE

Write the options with "=": in `--gpu-record FILE`, pytest takes a FILE that exists for the tests to
run.

`make test` spreads the test files over processes with pytest-xdist. The workers collect and run;
the controller, which collects nothing, prints the stale tests from what the first worker to end
hands over. Without xdist there is one process and nothing to hand over.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import time
import zlib
from collections.abc import Generator, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cs336_systems.device import interpret_kernels
from tests import gpu_record, quick
from tests.gpu_record import GpuRow, GpuTest

STARTED = time.monotonic()  # of this process, for --at-most

HAS_CUDA = torch.cuda.is_available()

if find_spec("hypothesis") is not None:
    from hypothesis import settings

    settings.register_profile("ci", max_examples=200, deadline=None)
    settings.register_profile("fuzz", max_examples=2000, deadline=None)  # `make fuzz`
    settings.load_profile("ci")

# Without a GPU, Triton's kernels run in its interpreter. `@triton.jit` chooses when it decorates,
# so this must be set before any test module loads a kernel.
if not HAS_CUDA:
    interpret_kernels()


@pytest.fixture(scope="session", autouse=True)
def _interpreted_products_are_rounded_once() -> Iterator[None]:
    """In interpreted kernels q k^T and the transpose of k q^T are the same numbers, as they are on
    a GPU.

    The interpreter leaves products to NumPy's BLAS. With the code that this has for CPUs without
    AVX-512, and takes on some that have it, the second is added in another order, and a softmax
    computed again from scores of 1e5 shows it: probabilities of 1 became 1.03. Added in float64 and
    rounded once, products do not depend on the order. `test_interpreter.py` holds them to it.
    """
    if HAS_CUDA or find_spec("triton") is None:
        yield
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: Any, a: Any, b: Any, accumulator: Any, *_: Any) -> Any:
        assert a.dtype.primitive_bitwidth >= 16 and b.dtype.primitive_bitwidth >= 16, (
            "8 bits need Triton's own"
        )
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(accumulator.data.dtype)
        return TensorHandle(product + accumulator.data, accumulator.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", create_dot)
        yield


@pytest.fixture
def alone_in_a_group() -> Iterator[None]:
    """This process as the only rank of a default process group."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="session", autouse=True)
def _ranks_are_copies() -> None:
    """To import PyTorch takes a rank longer than most of what the tests have ranks do;
    `test_launch.py` spawns them.
    """
    launch: Any = sys.modules.get("cs336_systems.distributed.spawn")
    if launch is not None and not HAS_CUDA:
        launch.START_METHOD = "forkserver"


@pytest.fixture(scope="module", autouse=True)
def _collections_are_short() -> None:
    """A collection of garbage passes over what is there already, all that is imported: it took a
    quarter of the tests' time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _calls_are_new() -> None:
    """No call is replayed from another test: a test may change what a call would launch."""
    loaded: Any = sys.modules.get("cs336_systems.attention.replay")
    if loaded is not None:
        loaded.forget()
        sys.modules["cs336_systems.attention.choose"]._answer_once.cache_clear()


@pytest.hookimpl(trylast=True)  # so that their names end a test's id
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `is_causal` or `device` runs with both, unless it is parametrised by it
    itself.
    """
    own = " ".join(str(mark.args[0]) for mark in metafunc.definition.iter_markers("parametrize"))
    both = {
        "is_causal": [pytest.param(False, id="full"), pytest.param(True, id="causal")],
        "device": ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)],
    }
    for name, values in both.items():
        if name in metafunc.fixturenames and name not in own:
            metafunc.parametrize(name, values)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu record", "record of the GPU tests")
    group.addoption(
        "--gpu-record",
        metavar="FILE",
        help="write the outcome of each GPU test to FILE, as JSON lines",
    )
    group.addoption(
        "--gpu-commit", metavar="REVISION", help="revision of the code under test, for --gpu-record"
    )
    for option, action, meaning in (
        ("--gpu-dirty", "store_true", "the code has uncommitted changes, for --gpu-record"),
        ("--gpu-clean", "store_false", "the code has no uncommitted changes, for --gpu-record"),
    ):
        group.addoption(option, dest="gpu_dirty", action=action, default=None, help=meaning)
    parser.addoption(
        "--part", metavar="K/N", type=_part, help="run the K-th of N parts of the tests, K from 0"
    )
    parser.addoption(
        "--at-most",
        metavar="SECONDS",
        type=float,
        help="skip what has not begun SECONDS after the start",
    )


def _part(text: str) -> tuple[int, int]:
    """(K, N) of `K/N`."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise argparse.ArgumentTypeError(f"must be K/N with K from 0 to N - 1, got {text!r}")
    return int(part), int(parts)


def pytest_runtest_setup(item: pytest.Item) -> None:
    longest = item.config.getoption("--at-most")
    if longest is not None and time.monotonic() - STARTED > longest:
        pytest.skip(f"not begun in the first {longest:g} seconds")


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts what it runs in the background with Ctrl-C ignored, nohup with hang-ups
    # ignored; what the tests start would inherit that.
    for number, default in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, default)
    config.pluginmanager.register(GpuPlugin(config), "gpu-record")


def outcome_of(report: pytest.TestReport) -> str | None:
    """passed, failed or skipped if `report` decides it, else None (a set-up or tear-down that went
    well).

    An expected failure is a failure here: the kernel is not right.
    """
    if hasattr(report, "wasxfail") and report.outcome == "skipped":
        return "failed"
    if report.when == "call" or report.outcome != "passed":
        return report.outcome
    return None


def hand_over(config: pytest.Config, name: str, value: list[Any]) -> None:
    """In a worker of xdist, send `value` to the controller when the worker ends; elsewhere nothing."""
    if hasattr(config, "workeroutput"):
        config.workeroutput[name] = value


def handed_over(node: Any, name: str) -> list[Any]:
    """What the worker that ended handed over; a worker that died handed over nothing, and another
    takes its place.
    """
    return getattr(node, "workeroutput", {}).get(name, [])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    """A worker that may not run its tests says why; xdist alone would only report that it had left
    them undone.

    Before tests are chosen, those of the parameters that `slow_if` names become slow and what
    `quick.py` does not keep, and what is of another `--part` goes. All parameters of a test are of
    one part, as they may share a fixture.
    """
    for item in items:
        parameters = getattr(item, "callspec", None)
        for marker in item.iter_markers("slow_if"):
            if parameters and marker.kwargs.items() <= parameters.params.items():
                item.add_marker(pytest.mark.slow)
    quick.mark_slow(items)
    if part := config.getoption("--part"):
        others = {
            item
            for item in items
            if zlib.crc32(item.nodeid.split("[")[0].encode()) % part[1] != part[0]
        }
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]
    try:
        return (yield)
    except pytest.UsageError as error:
        hand_over(config, "refusal", [str(error)])
        raise


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for message in handed_over(node, "refusal"):
        raise pytest.UsageError(message)


class GpuPlugin:
    """Leaves GPU tests out without a GPU, writes their outcomes when asked, and says which are
    stale.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.root = config.rootpath
        self.record: str | None = config.getoption("--gpu-record")
        self.commit: str | None = config.getoption("--gpu-commit")
        self.dirty: bool | None = config.getoption("gpu_dirty")
        self.tests: dict[str, GpuTest] = {}
        if self.record is not None:
            self._refuse_useless_record(Path(self.record))

    def _refuse_useless_record(self, record: Path) -> None:
        """UsageError, before any test has run, where the rows would say nothing."""
        if not HAS_CUDA:
            raise pytest.UsageError(
                "--gpu-record needs a CUDA device, and torch.cuda.is_available() is False"
            )
        if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
            raise pytest.UsageError(
                "--gpu-record refuses TRITON_INTERPRET: interpreted kernels do not run on the GPU"
            )
        if not self.commit or self.dirty is None:
            raise pytest.UsageError(
                "--gpu-record needs --gpu-commit REVISION and one of --gpu-clean, --gpu-dirty"
            )
        device = torch.cuda.get_device_name(0)
        try:
            rows = gpu_record.read_rows(record)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from error
        others = {row.device for row in rows.values()} - {device}
        if others:
            names = ", ".join(sorted(others))
            raise pytest.UsageError(
                f"--gpu-record {record} holds rows of {names}, this is {device}: name another file"
            )

    # before -m deselects: the summary is about every GPU test collected
    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        hashes: dict[str, tuple[tuple[str, ...], str]] = {}
        for item in items:
            if item.get_closest_marker("gpu") is None:
                continue
            test_file = item.nodeid.split("::")[0]
            if test_file not in hashes:
                covers = getattr(item.getparent(pytest.Module).obj, "COVERS", ())  # type: ignore[union-attr]
                try:
                    hashes[test_file] = (
                        covers,
                        gpu_record.source_hash(self.root, test_file, covers),
                    )
                except ValueError as error:
                    raise pytest.UsageError(str(error)) from error
            covers, digest = hashes[test_file]
            self.tests[item.nodeid] = GpuTest(
                test=item.nodeid, covers=tuple(covers), source_hash=digest
            )
        if not HAS_CUDA:
            config.hook.pytest_deselected(
                items=[item for item in items if item.nodeid in self.tests]
            )
            items[:] = [item for item in items if item.nodeid not in self.tests]
        if self.record is not None and not any("::" in argument for argument in config.args):
            with gpu_record.changing(Path(self.record)) as rows:
                files = {item.nodeid.split("::")[0] for item in items}
                kept = gpu_record.drop_removed(rows, self.tests, files, self.root)
                for test in rows.keys() - kept.keys():
                    del rows[test]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self.tests.get(report.nodeid)
        outcome = outcome_of(report)
        if self.record is None or test is None or outcome is None:
            return
        row = GpuRow(
            test=test.test,
            outcome=outcome,
            message="" if outcome == "passed" else _reason(report),
            covers=list(test.covers),
            source_hash=test.source_hash,
            device=torch.cuda.get_device_name(0),
            torch=torch.__version__,
            triton=metadata.version("triton"),
            date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            commit=self.commit or "",
            dirty=bool(self.dirty),
        )
        # After every test, so that a run cut off by its time limit keeps what it found out.
        with gpu_record.changing(Path(self.record)) as rows:
            rows[row.test] = row

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        hand_over(session.config, "gpu tests", [asdict(test) for test in self.tests.values()])

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        if not self.tests:
            self.tests = {test["test"]: GpuTest(**test) for test in handed_over(node, "gpu tests")}

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.tests:
            return
        terminalreporter.section("GPU tests")
        name: Path | str = gpu_record.PUBLISHED_RECORDS
        try:
            if self.record is None:
                rows = gpu_record.published_rows(self.root)
            else:
                rows = gpu_record.read_rows(Path(self.record))
                name = Path(self.record)
        except ValueError as error:
            terminalreporter.write_line(
                f"STALE, the record cannot be read: {error}", red=True, bold=True
            )
            return
        lines, up_to_date = gpu_record.summary_lines(list(self.tests.values()), rows, name)
        for line in lines:
            terminalreporter.write_line(
                line, green=up_to_date, red=not up_to_date, bold=not up_to_date
            )


def _reason(report: pytest.TestReport) -> str:
    """The last line of a failure, or the reason of a skip, at most 200 characters."""
    if isinstance(report.longrepr, tuple):  # a skip: file, line, reason
        return report.longrepr[2].removeprefix("Skipped: ")[:200]
    crash = getattr(report.longrepr, "reprcrash", None)
    message = crash.message if crash is not None else str(report.longrepr)
    return (message.strip().splitlines() or [""])[0][:200]
