"""Surprises in a step for the optimizers of several ranks: sparse gradients and buckets without any."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cs336_systems.distributed.launch import run_ranks
from cs336_systems.distributed.zero1 import Zero1Optimizer

COVERS = ("cs336_systems/distributed",)


def meet_sparse_gradients(rank: int, num_ranks: int) -> None:
    tokens = torch.tensor([1, 2])
    message = r"gradients must be dense, got torch.sparse_coo of shape \(5, 3\)"
    embedding = nn.Embedding(5, 3, sparse=True)
    optimizer = Zero1Optimizer(embedding.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(TypeError, match=message):
        embedding(tokens).sum().backward()
    del optimizer


def test_sparse_gradients_are_refused_by_name():
    run_ranks(meet_sparse_gradients, 2)


def leave_a_bucket_unused(rank: int, num_ranks: int) -> bool:
    used, unused = nn.Linear(3, 3), nn.Linear(3, 3)
    parameters = [*used.parameters(), *unused.parameters()]
    optimizer = Zero1Optimizer(parameters, torch.optim.SGD, lr=0.5, weight_decay=0.5, bucket_size_mb=1e-6)
    before = unused.weight.detach().clone()
    used(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return len(optimizer.buckets) == 4 and torch.allclose(unused.weight, 0.75 * before)


@pytest.mark.slow
def test_zero1_takes_unused_parameters_for_having_zeros():
    """As its docstring says (D1): nobody waits, and weight decay goes on, also of a bucket without any gradient."""
    assert run_ranks(leave_a_bucket_unused, 2) == [True, True]
