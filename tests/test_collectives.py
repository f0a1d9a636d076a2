"""The collectives against what one process computes from all ranks' tensors."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.distributed.collectives import (
    all_gather_flat,
    all_reduce_mean,
    broadcast_parameters,
    num_ranks,
    rank_in,
    reduce_scatter_mean_flat,
    wait_for,
)
from cs336_systems.distributed.ddp_naive import NaiveDDP
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.guards import check_same_shapes
from cs336_systems.distributed.loss_scale import LossScaler
from cs336_systems.distributed.ring_attention import ring_attention
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from cs336_systems.distributed.spawn import run_ranks
from cs336_systems.distributed.zero1 import Zero1Optimizer
from tests.one_job import OneJob

TWO_RANKS = OneJob(2)


def inputs(rank: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(
        dtype
    )


def mean_over_ranks(ranks: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Summed and divided in `dtype`, in float64 in between only for the order not to matter."""
    return (sum(inputs(rank, size, dtype).double() for rank in range(ranks)) / ranks).to(dtype)


# What the ranks do


@TWO_RANKS.check
def test_a_rank_outside_of_a_group_is_refused_by_all_that_takes_one(rank: int, ranks: int) -> None:
    """PyTorch counts -1 ranks there, which wrappers once took for a group of one: the rank trained
    alone in silence, and ring attention was zeros.
    """
    first = dist.new_group([0])
    if rank == 0:
        assert (num_ranks(first), rank_in(first)) == (1, 0)
        return
    for use in (
        lambda: num_ranks(first), lambda: rank_in(first), lambda: all_reduce_mean(torch.ones(2), first),
        lambda: NaiveDDP(nn.Linear(2, 2), first), lambda: FSDP(nn.Linear(2, 2), process_group=first),
        lambda: ring_attention(*[torch.ones(1, 1, 2, 4)] * 3, group=first), lambda: LossScaler(process_group=first),
    ):  # fmt: skip
        with pytest.raises(
            ValueError,
            match="this process must be a member of the process group, and rank 1 is none",
        ):
            use()
    with pytest.raises(TypeError, match=r"group must be a process group or None, got \[0, 1\]"):
        num_ranks([0, 1])


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def to_average(rank: int) -> dict[Any, Tensor]:
    return {dtype: inputs(rank, 12, dtype) for dtype in DTYPES} | {
        "strided": inputs(rank, 12).view(3, 4).t(), "0-d": torch.tensor(float(rank)), "empty": torch.empty(0),
        "complex": torch.tensor([complex(rank, 1)]), "parameter": nn.Parameter(inputs(rank, 5)),
    }  # fmt: skip


@TWO_RANKS.call
def means(rank: int, ranks: int) -> dict[Any, Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = to_average(rank)
        for tensor in found.values():
            handle = all_reduce_mean(tensor, async_op=tensor.ndim == 1)
            handle.wait()
            handle.wait()  # harmless
        again = to_average(rank)
        wait_for([all_reduce_mean(tensor, async_op=True) for tensor in again.values()])
        assert all(torch.equal(tensor, found[name]) for name, tensor in again.items()), (
            "bit for bit the same"
        )
        whole = inputs(rank, 12)
        found["part"] = torch.full((12 // ranks,), float("nan"))
        reduce_scatter_mean_flat(found["part"], whole, async_op=True).wait()
        assert torch.equal(whole, inputs(rank, 12)), "the input must stay"
        found["half part"] = torch.full((12 // ranks,), float("nan"), dtype=torch.float32)
        reduce_scatter_mean_flat(found["half part"], inputs(rank, 12, torch.float16))
        found["gathered"] = torch.full((12,), float("nan"))
        all_gather_flat(found["gathered"], found["part"], async_op=True).wait()
        all_gather_flat(torch.empty(0), torch.empty(0))
        reduce_scatter_mean_flat(torch.empty(0), torch.empty(0))
    return {name: tensor.detach() for name, tensor in found.items()}


@TWO_RANKS.check
def test_every_kind_of_tensor_is_broadcast_bit_for_bit(rank: int, ranks: int) -> None:
    def tensors(seed: int) -> list[Tensor]:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        return [
            x.t(),
            x.bfloat16(),
            x[:0],
            torch.view_as_complex(x.view(6, 2)),
            x > 0,
            torch.tensor(seed),
        ]

    module = nn.Module()
    for place, tensor in enumerate(tensors(rank)):
        module.register_buffer(f"buffer_{place}", tensor)
    broadcast_parameters(module)
    assert all(map(torch.equal, module.buffers(), tensors(0)))


DIFFERENT = [  # the layers behind the first on rank 1, and what every rank must be told
    (
        [nn.Linear(4, 3)],
        r"rank 0 has '1.weight' of shape \(2, 4\), float32, rank 1 '1.weight' of shape \(3, 4\)",
    ),
    (
        [nn.Linear(4, 2).double()],
        r"rank 0 has '1.weight' of .*, float32, rank 1 '1.weight' of shape \(2, 4\), float64",
    ),
    (
        [nn.Linear(4, 2, bias=False)],
        r"the same on all ranks: rank 0 has '1.bias' of .*, rank 1 no more",
    ),
    (
        [nn.Linear(4, 2).requires_grad_(False)],
        r"rank 0 has '1.weight' of .*, rank 1 '1.weight' of .*, float32, frozen",
    ),
    ([nn.ReLU(), nn.Linear(4, 2)], r"rank 0 has '1.weight' of .*, rank 1 '2.weight' of"),
]


@TWO_RANKS.check
def test_D8_ranks_built_differently_are_told_the_parameter(rank: int, ranks: int) -> None:
    for layers, message in DIFFERENT:
        module = nn.Sequential(nn.Linear(3, 4), *(layers if rank == 1 else [nn.Linear(4, 2)]))
        with pytest.raises(ValueError, match=message):
            check_same_shapes(module.named_parameters())
    parameters = [nn.Parameter(torch.zeros(4 + rank))]  # (4,) and (5,) once trained on in silence
    for build in (ShardedOptimizer, Zero1Optimizer):
        with pytest.raises(
            ValueError, match=r"rank 0 has .* of shape \(4,\), float32, rank 1 .* of shape \(5,\)"
        ):
            build(parameters, torch.optim.SGD)
    for wrap in (NaiveDDP, FSDP):
        with pytest.raises(
            ValueError, match=r"rank 0 has 'weight' of shape \(4, 4\), float32, rank 1 'weight' of"
        ):
            wrap(nn.Linear(4, 4 + rank))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_D3_D9_means_gathers_and_scatters(ranks):
    results = TWO_RANKS.results(means) if ranks == 2 else run_ranks(means, ranks)
    expected = mean_over_ranks(ranks, 12)
    for rank, found in enumerate(results):
        for dtype in DTYPES:
            # Summed in the dtype itself, on values below 4: each addition and the division round
            # once.
            bound = ranks * 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(
                found[dtype], mean_over_ranks(ranks, 12, dtype), atol=bound, rtol=0
            )
        torch.testing.assert_close(found["strided"], expected.view(3, 4).t())
        assert found["0-d"].item() == pytest.approx((ranks - 1) / 2) and found["0-d"].shape == ()
        torch.testing.assert_close(found["complex"], torch.tensor([complex((ranks - 1) / 2, 1)]))
        torch.testing.assert_close(found["parameter"], mean_over_ranks(ranks, 5))
        torch.testing.assert_close(found["part"], expected.chunk(ranks)[rank])
        torch.testing.assert_close(
            found["half part"], mean_over_ranks(ranks, 12).chunk(ranks)[rank], atol=2e-3, rtol=0
        )
        torch.testing.assert_close(found["gathered"], expected)


def test_D9_without_a_process_group_the_way_to_one_is_told():
    def parameters() -> Any:
        return nn.Linear(2, 2).parameters()

    for call in (
        num_ranks, rank_in, lambda: all_reduce_mean(torch.ones(2)), lambda: NaiveDDP(nn.Linear(2, 2)),
        lambda: ring_attention(*[torch.ones(1, 1, 2, 4)] * 3), lambda: FSDP(nn.Linear(2, 2)),
        lambda: ShardedOptimizer(parameters(), torch.optim.SGD), lambda: Zero1Optimizer(parameters(), torch.optim.SGD),
    ):  # fmt: skip
        with pytest.raises(
            RuntimeError, match="there is no process group: start the ranks with run_ranks, or by"
        ):
            call()
