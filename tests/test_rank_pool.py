"""Ranks that stay for the next call: the same processes, ended by a failure, by another number of ranks and at exit."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cs336_systems.distributed.launch import RankError
from cs336_systems.experiments import rank_pool
from cs336_systems.experiments.rank_pool import close_pool, pooled

TIMEOUT_S = 60.0


@pytest.fixture(autouse=True)
def _own_ranks():
    close_pool()
    yield
    close_pool()


def who(rank: int, num_ranks: int, number: float) -> tuple[int, float, float]:
    total = torch.tensor([number + rank])
    dist.all_reduce(total)
    return os.getpid(), total.item(), torch.rand(1).item()


def fail(rank: int, num_ranks: int) -> None:
    if rank == 1:
        raise ValueError("planted")
    dist.barrier()


def die(rank: int, num_ranks: int) -> None:
    if rank == 0:
        os._exit(7)
    dist.barrier()


def is_gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not Path(f"/proc/{pid}").exists()


def test_calls_share_processes_until_one_fails():
    first, second = pooled(who, 2, 1.0, timeout_s=TIMEOUT_S), pooled(who, 2, 5.0, timeout_s=TIMEOUT_S)
    assert [pid for pid, *_ in first] == [pid for pid, *_ in second] and len({pid for pid, *_ in first}) == 2
    assert [total for _, total, _ in first] == [3.0, 3.0] and [total for _, total, _ in second] == [11.0, 11.0]
    assert [drawn for *_, drawn in first] == [drawn for *_, drawn in second], "random numbers begin anew"
    with pytest.raises(RankError, match="rank 1 of 2 failed: ValueError: planted") as caught:
        pooled(fail, 2, timeout_s=TIMEOUT_S)
    assert caught.value.rank == 1 and caught.value.error_type == "ValueError"
    assert all(is_gone(pid) for pid, *_ in second)
    with pytest.raises(RankError, match="rank 0 of 2 died .exit code 7."):
        pooled(die, 2, timeout_s=TIMEOUT_S)
    third = pooled(who, 2, 1.0, timeout_s=TIMEOUT_S)
    assert third[0][1] == 3.0 and third[0][0] != first[0][0]
    assert len(pooled(who, 1, 1.0, timeout_s=TIMEOUT_S)) == 1, "another number of ranks are other ranks"
    assert all(is_gone(pid) for pid, *_ in third)


def test_an_interrupted_call_leaves_no_process(monkeypatch):
    pids = [pid for pid, *_ in pooled(who, 2, 1.0, timeout_s=TIMEOUT_S)]

    def interrupt(self: object, pipe: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(rank_pool.RankPool, "_receive", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pooled(who, 2, 1.0, timeout_s=TIMEOUT_S)
    assert all(is_gone(pid) for pid in pids)


SCRIPT = """
import os, signal
from cs336_systems.experiments.rank_pool import pooled
from tests.test_rank_pool import who

if __name__ == "__main__":
    print(*(pid for pid, *_ in pooled(who, 2, 1.0, timeout_s=60.0)), flush=True)
    {end}
"""


@pytest.mark.parametrize(
    ("end", "code"), [("pass", 0), pytest.param("os.kill(os.getpid(), signal.SIGKILL)", -9, marks=pytest.mark.slow)]
)
def test_no_rank_outlives_its_process(tmp_path, end, code):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(end=end))
    root = Path(__file__).resolve().parent.parent
    begin = time.monotonic()
    ended = subprocess.run(
        [sys.executable, str(script)], cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == code, ended.stderr
    assert time.monotonic() - begin < 60
    assert all(is_gone(int(pid)) for pid in ended.stdout.split()) and len(ended.stdout.split()) == 2
