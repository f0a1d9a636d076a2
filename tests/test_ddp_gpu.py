"""Data parallelism on GPUs: NCCL equals one process, a killed rank ends the job, overlap is read
from a real trace.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from cs336_systems.config import ModelConfig, RunConfig
from cs336_systems.distributed.collectives import (
    all_gather_flat,
    all_reduce_mean,
    reduce_scatter_mean_flat,
    wait_for,
)
from cs336_systems.distributed.spawn import RankError, run_ranks
from cs336_systems.measure.overlap import trace_lanes
from cs336_systems.subjects.parallel_step import (
    OURS,
    DataParallelCase,
    ParallelStep,
    check_gradients,
    plain_mean,
)
from tests.module_kinds import KINDS, double
from tests.sharding_models import part, seeded
from tests.test_ddp import WRAPPERS
from tests.test_equality import mean_loss

COVERS = ("cs336_systems/distributed", "cs336_systems/measure", "tests/module_kinds.py")
pytestmark = [pytest.mark.gpu, pytest.mark.several_gpus]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
RUN = RunConfig(scale="handout", device="cuda")
# Wide enough that a layer's backward and its all-reduce take comparable times.
MODEL = ModelConfig(
    name="wide", d_model=2048, d_ff=8192, num_layers=6, num_heads=16, vocab_size=1000
)


def collectives_on_gpu(rank: int, ranks: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    mean = (ranks + 1) / 2
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensor = torch.full((12,), float(rank + 1), device=device, dtype=dtype)
        all_reduce_mean(tensor, async_op=True).wait()
        assert tensor.tolist() == [mean] * 12, (dtype, tensor)
        tensors = [torch.full_like(tensor, rank + 1 + i) for i in range(20)]
        wait_for([all_reduce_mean(each, async_op=True) for each in tensors])
        assert [each.tolist() for each in tensors] == [[mean + i] * 12 for i in range(20)], dtype
        part = torch.full((12 // ranks,), float("nan"), device=device)
        whole = torch.full((12,), float(rank + 1), device=device, dtype=dtype)
        reduce_scatter_mean_flat(part, whole)
        gathered = torch.full((12,), float("nan"), device=device)
        all_gather_flat(gathered, part)
        assert gathered.tolist() == [mean] * 12, (dtype, gathered)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=needs_two)])
def test_collectives(backend, ranks):
    run_ranks(collectives_on_gpu, ranks, backend=backend, device="cuda")


def test_gloo_ranks_may_share_a_gpu():
    run_ranks(collectives_on_gpu, 2, backend="gloo", device="cuda")


def train_on_gpu(rank: int, ranks: int) -> None:
    """Each wrapper on the GPU against one process on the CPU, both in float64."""
    for name, wrap in WRAPPERS.items():
        for kind in ("alternating branches", "mixed dtypes", "tied embedding and head"):
            module, alone = (double(seeded(KINDS[kind].build, seed)) for seed in (rank, 0))
            wrapped = wrap(module.cuda(), find_unused_parameters=True)
            for step in range(4):
                module.step = alone.step = step
                inputs = KINDS[kind].inputs(torch.Generator().manual_seed(step), 4)
                for model in (wrapped, alone):
                    model.zero_grad(set_to_none=True)
                mean_loss(alone(*inputs)).backward()
                mean_loss(wrapped(*(part(one, rank, ranks).cuda() for one in inputs))).backward()
                wrapped.finish_gradient_synchronization()
                for (parameter_name, parameter), expected in zip(
                    module.named_parameters(), alone.parameters()
                ):
                    assert (parameter.grad is None) == (expected.grad is None), (
                        name,
                        kind,
                        parameter_name,
                    )
                    if expected.grad is not None:
                        torch.testing.assert_close(
                            parameter.grad.cpu(), expected.grad, atol=1e-6, rtol=1e-6
                        )


@pytest.mark.parametrize(
    ("backend", "ranks"),
    [("nccl", 1), pytest.param("nccl", 2, marks=needs_two), ("gloo", 2)],
)
def test_gradients_equal_one_process(backend, ranks):
    run_ranks(train_on_gpu, ranks, backend=backend, device="cuda")


def fail_on_gpu(rank: int, ranks: int, how: str) -> None:
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    if rank == 1:
        if how == "raises":
            raise ArithmeticError("planted")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()


@needs_two
@pytest.mark.parametrize(
    ("how", "message"), [("raises", "ArithmeticError: planted"), ("dies", "signal SIGKILL")]
)
def test_a_failing_rank_ends_the_job(how, message):
    start = time.monotonic()
    with pytest.raises(RankError, match=rf"rank 1 of 2 .*{message}"):
        run_ranks(fail_on_gpu, 2, how, backend="nccl", device="cuda", timeout_s=60)
    assert time.monotonic() - start < 120


def read_overlap(rank: int, ranks: int) -> dict[str, float]:
    """Share of the communication of a traced step that ran beside compute, by implementation."""
    shares = {}
    for name in OURS:
        case = DataParallelCase(
            model=MODEL, batch=4, num_ranks=ranks, backend="nccl", attention="reference",
            bucket_size_mb=25.0 if name == "bucketed" else None,
        )  # fmt: skip
        expected, step = plain_mean(case, RUN, rank), ParallelStep(name, case, RUN, rank)
        assert check_gradients(step, expected) <= 1
        for _ in range(3):
            step.train_step()
        lanes = trace_lanes(step.train_step, "cuda")
        shares[name] = lanes.overlap_ms / lanes.communication_ms
        del step
        torch.cuda.empty_cache()
    return shares


@needs_two
def test_D13_overlap_is_near_nothing_for_naive_and_most_for_overlapped():
    shares = run_ranks(read_overlap, 2, backend="nccl", device="cuda")[0]
    assert shares["naive"] < 0.1 and shares["flat"] < 0.1, shares
    assert shares["overlap"] > 0.5 and shares["bucketed"] > 0.5, shares
