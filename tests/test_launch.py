"""Launching ranks: results in order, the first failure told, nobody left behind, the same script
under torchrun.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from cs336_systems.config import FieldError
from cs336_systems.distributed.checkpoint import on_rank_0
from cs336_systems.distributed.spawn import (
    TORCHRUN_VARIABLES,
    RankError,
    is_torchrun,
    launch,
    run_ranks,
)
from tests.processes import is_running

# the package exports the function of that name
launching = sys.modules["cs336_systems.distributed.spawn"]
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As users' ranks are; conftest.py has those of other tests copied."""
    monkeypatch.setattr(launching, "START_METHOD", "spawn")


def await_gone(pids: list[int], seconds: float = 30) -> list[int]:
    """Those of `pids` that still run after at most `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def own_ports() -> list[str]:
    """What `ss` says of the sockets on which this process listens: earlier tests may have left a
    group's.
    """
    lines = subprocess.run(["ss", "-Hltp"], capture_output=True, text=True).stdout.splitlines()
    return [line for line in lines if f"pid={os.getpid()}," in line]


# What the ranks do


def sum_of_ranks(rank: int, num_ranks: int, base: int) -> torch.Tensor:
    total = torch.tensor([float(base + rank)])
    dist.all_reduce(total)
    return total


def own_place(rank: int, num_ranks: int) -> tuple[int, bool, int, int, int, int, str | None]:
    """Leaves the group in a reference cycle: at the exit of such a process gloo used to abort."""
    starter, imported, _ = own_start(rank, num_ranks)
    module = torch.nn.Linear(2, 2)
    module.owner = [module, dist.group.WORLD]
    module.weight.register_post_accumulate_grad_hook(lambda parameter, module=module: None)
    dist.all_reduce(torch.ones(1))
    place = rank, num_ranks, dist.get_rank(), dist.get_world_size()
    return starter, imported, *place, os.environ.get("NCCL_NVLS_ENABLE")


def fail_in_one(rank: int, num_ranks: int, folder: str, how: str) -> None:
    """Rank 1 ends in the way `how` while the others wait for it in a collective."""
    (Path(folder) / str(rank)).write_text(str(os.getpid()))
    if rank == 1:
        if how == "raises":
            raise KeyError("planted in rank 1")
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exits":
            os._exit(3)
        time.sleep(600)
    dist.all_reduce(torch.ones(3))


class Mute(Exception):
    """Cannot be shown."""

    def __str__(self) -> str:
        raise ValueError("no text")


def raise_mute(rank: int, num_ranks: int) -> None:
    raise Mute


def tell_of_a_field(rank: int, num_ranks: int) -> None:
    """Rank 0 refuses a field; rank 1 fails by the error that it is told, and rank 0 does not."""

    def refuse() -> None:
        raise FieldError("seed", "must be 0, got 1", owner="RunConfig")

    try:
        on_rank_0(refuse)
    except FieldError:
        if rank == 1:
            raise


def sleep_long(rank: int, num_ranks: int, folder: str) -> None:
    (Path(folder) / str(rank)).write_text(str(os.getpid()))
    time.sleep(600)


def raise_at_length(rank: int, num_ranks: int) -> None:
    raise ValueError("x" * 9_000_000)


def fail_without_sockets(rank: int, num_ranks: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    raise ValueError("no file more")


def return_a_generator(rank: int, num_ranks: int) -> object:
    return (number for number in range(3))


@dataclass(frozen=True)
class Outer:
    """What ranks return may be of a class within a class."""

    @dataclass(frozen=True)
    class Inner:
        many: tuple[torch.Tensor, ...]


def return_many(rank: int, num_ranks: int, count: int) -> Outer.Inner:
    return Outer.Inner(
        tuple(torch.full((2,), float(rank * count + index)) for index in range(count))
    )


def return_views(rank: int, num_ranks: int) -> tuple[torch.Tensor, ...]:
    """Of 4 MB; a parameter and a type of few bits are handled apart by PyTorch."""
    whole = torch.arange(2.0**20)
    views = whole.view(64, -1).unbind()
    return (
        *views,
        torch.nn.Parameter(whole[3:5]),
        whole[3:5].to(torch.float8_e4m3fn),
        torch.empty(0),
    )


def leave_early(rank: int, num_ranks: int) -> None:
    if rank != 1:
        dist.all_reduce(torch.ones(3))


def own_start(rank: int, num_ranks: int) -> tuple[int, bool, int]:
    """Which process started this one, whether an optimizer finds its imports here, and a random
    number.
    """
    return os.getppid(), "torch._dynamo" in sys.modules, torch.randint(2**40, ()).item()


# One job


METHODS = ("spawn", "forkserver")
BOTH = pytest.mark.parametrize("start_method", METHODS)


def test_results_come_back_in_the_order_of_ranks_which_end_in_good_order(monkeypatch, capfd):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    assert run_ranks(own_place, 3) == [
        (os.getpid(), False, rank, 3, rank, 3, "0") for rank in range(3)
    ]
    assert "terminate called" not in capfd.readouterr().err


def test_copied_ranks_are_new_processes_with_pytorch_imported():
    first, second = (run_ranks(own_start, 2, start_method="forkserver") for _ in range(2))
    assert {parent for parent, *_ in first + second} == {first[0][0]} != {os.getpid()}
    assert all(imported for _, imported, _ in first + second)


def test_ranks_share_the_cores_that_there_are(monkeypatch):
    monkeypatch.setattr(launching, "get_device_info", lambda _: SimpleNamespace(num_cores=6))
    # of the host, where a container has fewer
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    for num_ranks in (2, 4, 8):
        launching._share_cores(num_ranks)
    assert chosen == [3, 1, 1]


@pytest.mark.slow
@BOTH
def test_D7_four_jobs_at_once_do_not_clash(start_method):
    run = partial(run_ranks, start_method=start_method)
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(run, sum_of_ranks, 2, 10 * number) for number in range(4)]
        assert [job.result()[0].item() for job in jobs] == [
            20.0 * number + 1 for number in range(4)
        ]


@pytest.fixture
def few_files() -> Iterator[int]:
    """How many files this process may still open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = max(int(name) for name in os.listdir("/proc/self/fd"))
    left = 60
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, opened + left), hard))
    yield left
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_result_of_many_tensors_needs_no_file_for_each(few_files):
    """Each was shared by a file descriptor: 600 ended a finished job where 1,024 files may be open."""
    first, second = run_ranks(return_many, 2, 4 * few_files)
    values = [tensor[0].item() for tensor in (*first.many, *second.many)]
    assert values == [float(index) for index in range(8 * few_files)]


def test_views_of_one_tensor_come_back_as_such():
    """A copy of the whole for each would be 64 times as much."""
    *views, parameter, small, empty = run_ranks(return_views, 1)[0]
    assert torch.equal(torch.cat(views), torch.arange(2.0**20))
    assert len({view.untyped_storage().data_ptr() for view in (*views, parameter)}) == 1
    assert isinstance(
        parameter, torch.nn.Parameter
    ) and parameter.tolist() == small.float().tolist() == [3, 4]
    assert empty.numel() == 0
    views[0].add_(1)
    assert views[0][0] == 1, "it can be written"


# Failures


@pytest.mark.parametrize("how", ["-c", "stdin"])
def test_a_function_that_new_processes_cannot_import_is_refused(how):
    """Each rank had ended in an AttributeError or a FileNotFoundError; a notebook's cell is as -c."""
    code = """
from functools import partial
from cs336_systems.distributed import run_ranks
def train(rank, num_ranks): return rank
for function in (train, partial(train)):
    try:
        run_ranks(function, 2)
    except ValueError as error:
        print(error)
"""
    arguments = [sys.executable, "-c", code] if how == "-c" else [sys.executable]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.run(
        arguments, input=code, env=environment, cwd=ROOT, text=True, capture_output=True, check=True
    )
    assert (
        said.stdout.count(
            "function must be in a file, which new processes import, got train typed in a note"
        )
        == 2
    )


def test_a_rank_that_has_returned_is_named_when_the_others_time_out():
    """Nothing was said of it: all that was told is that rank 0 waited."""
    with pytest.raises(RankError, match=r"(?s)rank [02] of 3 failed:.*has returned: rank 1\.$"):
        run_ranks(leave_early, 3, timeout_s=3)


def lose_a_rank(rank: int, num_ranks: int) -> None:
    sent = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(3 if rank == 0 else 0)]
    if rank == 1:
        time.sleep(2)  # rank 0 fails in the meantime, after twice the time-out at most
        raise KeyError("planted")
    for work in sent[:-1]:
        with suppress(RuntimeError):
            work.wait()
    sent[-1].wait()  # "Application timeout caused pair closure"


def test_a_closed_pair_is_a_consequence_of_another_ranks_failure():
    """gloo's error for a second message to the same rank names no file of gloo's: it was told in
    place of the other rank's own error.
    """
    with pytest.raises(RankError, match="rank 1 of 2 failed: KeyError: 'planted'"):
        run_ranks(lose_a_rank, 2, timeout_s=0.5)


REASONS = {
    "raises": r"(?s)rank 1 of 2 failed:.*in fail_in_one.*KeyError: 'planted in rank 1'",
    "is killed": r"rank 1 of 2 died \(signal SIGKILL\)",
    "exits": r"rank 1 of 2 died \(exit code 3\)",
    "sleeps": r"(?s)rank 0 of 2 failed:.*Timed out waiting 3000ms.*nothing was heard of rank 1, which may",
}
FAST = [("raises", "spawn"), ("is killed", "forkserver"), ("exits", "forkserver")]
SLOW = [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in product(REASONS, METHODS)
    if case not in FAST
]


@pytest.mark.parametrize(("how", "start_method"), [*FAST, *SLOW])
def test_D6_a_failing_rank_ends_the_job_with_its_reason(how, start_method, tmp_path):
    rank, message = int(how != "sleeps"), REASONS[how]
    ports, start = own_ports(), time.monotonic()
    with pytest.raises(RankError, match=message) as caught:
        run_ranks(fail_in_one, 2, str(tmp_path), how, timeout_s=3, start_method=start_method)
    assert time.monotonic() - start < 60, "the sleeping rank sleeps for 600 s"
    assert caught.value.rank == rank
    assert caught.value.error_type == {"raises": "KeyError", "sleeps": "RuntimeError"}.get(how, "")
    pids = [int(file.read_text()) for file in tmp_path.iterdir()]
    assert len(pids) == 2 and await_gone(pids, 0) == []
    assert own_ports() == ports, "the store's"


@pytest.mark.slow
@BOTH
def test_D6_ranks_die_with_their_parent(start_method, tmp_path):
    """A killed parent cannot clean up; its ranks must go all the same."""
    call = f"run_ranks(sleep_long, 2, {str(tmp_path)!r}, start_method={start_method!r})"
    code = f"from tests.test_launch import *; {call}"
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("[01]"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    pids = [int(file.read_text()) for file in tmp_path.glob("[01]")]
    assert len(pids) == 2
    parent.kill()
    parent.wait()
    assert await_gone(pids) == []


@pytest.mark.parametrize(
    ("function", "error_type", "message"),
    [
        (return_a_generator, "TypeError", "cannot pickle 'generator' object"),
        # Of these a rank had "died (exit code 1)", the last one after minutes.
        (raise_mute, "Mute", "Mute.*in raise_mute"),
        (raise_at_length, "ValueError", "xxx"),
        (fail_without_sockets, "ValueError", "no file more"),
    ],
)
def test_a_result_that_cannot_be_sent_and_an_exception_without_a_text_are_told(
    function, error_type, message
):
    with pytest.raises(RankError, match=rf"(?s)rank 0 of 1 failed:.*{message}") as caught:
        run_ranks(function, 1)
    assert caught.value.error_type == error_type


def test_the_field_of_an_error_comes_from_rank_to_rank_and_to_the_caller():
    with pytest.raises(RankError, match="RunConfig.seed must be 0, got 1") as caught:
        run_ranks(tell_of_a_field, 2)
    assert (caught.value.rank, caught.value.error_type) == (1, "FieldError")
    error = caught.value.field_error
    assert (error.field, error.problem, error.owner) == ("seed", "must be 0, got 1", "RunConfig")


def test_arguments_are_checked_before_anything_starts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cases = [
        (0, {}, "num_ranks must be a positive int, got 0"),
        (True, {}, "num_ranks must be a positive int, got True"),
        (
            2,
            {"backend": "mpi"},
            "backend must be gloo, or nccl with device 'cuda', got 'mpi' and 'cpu'",
        ),
        (
            2,
            {"device": "tpu"},
            "backend must be gloo, or nccl with device 'cuda', got 'gloo' and 'tpu'",
        ),
        (
            2,
            {"backend": "nccl"},
            "backend must be gloo, or nccl with device 'cuda', got 'nccl' and 'cpu'",
        ),
        (2, {"timeout_s": "1"}, "timeout_s must be a positive number, got '1'"),
        (
            2,
            {"start_method": "fork"},
            "start_method must be spawn, or forkserver for device 'cpu', got 'fork'",
        ),
        (
            2,
            {"device": "cuda"},
            r"device 'cuda' was asked for, and torch.cuda.is_available\(\) is False",
        ),
    ]
    for num_ranks, options, message in cases:
        with pytest.raises(ValueError, match=message):
            run_ranks(own_place, num_ranks, **options)
    with pytest.raises(ValueError, match="function must be callable, got 'train'"):
        run_ranks("train", 2)
    with pytest.raises(
        ValueError, match="function must be at the top level of a module, .*, got .*<lambda>"
    ):
        run_ranks(lambda rank, num_ranks: rank, 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(
        ValueError, match="'nccl' needs a GPU a rank: num_ranks is 3 on this host, which has 2"
    ):
        run_ranks(own_place, 3, backend="nccl", device="cuda")


# torchrun


def test_the_number_of_ranks_is_told_once(monkeypatch):
    for name in TORCHRUN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert not is_torchrun()
    with pytest.raises(ValueError, match="num_ranks must be given where torchrun does not say it"):
        launch(own_place, None)
    for name, value in zip(TORCHRUN_VARIABLES, ("0", "1", "0", "127.0.0.1", "0")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="num_ranks must be torchrun's WORLD_SIZE=1, got 2"):
        launch(own_place, 2)
    # which counted for nothing
    with pytest.raises(TypeError, match="unexpected keyword argument 'backnd'"):
        launch(own_place, 1, backnd="nccl")


def start_agents(
    script: Path, nodes: int, ranks_a_node: int, arguments: list[str]
) -> list[subprocess.Popen[str]]:
    """`nodes` torchrun agents on this host; the first one's rendezvous port is one that was free
    just before.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        str(nodes),
        "--nproc-per-node",
    ]
    command += [str(ranks_a_node), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [*command, "--node-rank", str(node), str(script), *arguments], env=environment, cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for node in range(nodes)
    ]  # fmt: skip
