"""The loss scale: equal to training without one, and a step that overflows on one rank is skipped by all (D5, D16)."""

from typing import Any

import pytest
import torch
from torch import nn

from cs336_systems.distributed.loss_scale import LossScaler
from cs336_systems.distributed.zero1 import Zero1Optimizer
from cs336_systems.model import AdamW
from tests.one_job import OneJob
from tests.sharding_models import batch, finish, part, seeded, shard, token_loss, transformer, whole

COVERS = ("cs336_systems/distributed", "tests/sharding_models.py")
TWO_RANKS = OneJob(2)
SCHEMES = ("ddp", "sharded", "zero1", "fsdp")


def train(rank: int, num_ranks: int, scheme: str, scaled: bool) -> dict[str, Any]:
    """Four steps; the loss of the last rank overflows in the second, which without a scale is left out."""
    model, optimizer = shard(scheme, seeded(transformer), AdamW, lr=1e-2)
    scaler = LossScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=scaled)
    scales = []
    for step in range(4):
        if step == 1 and not scaled:
            continue
        optimizer.zero_grad()
        loss = token_loss(model, *(part(one, rank, num_ranks) for one in batch(step)))
        if step == 1 and rank == num_ranks - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        finish(model)
        if step % 2:  # where gradients are clipped; otherwise `step` does it
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return {"scales": scales, "weights": whole(model), "state": scaler.state_dict()}


@pytest.mark.slow
@TWO_RANKS.check
def test_a_step_that_overflows_on_one_rank_is_skipped_by_all_and_the_others_are_as_without_a_scale(
    rank: int, num_ranks: int
) -> None:
    """Sharded gradients that overflow on one rank once made that rank alone skip, under torch's own scaler."""
    for scheme in SCHEMES:
        scaled, plain = (train(rank, num_ranks, scheme, scaled) for scaled in (True, False))
        assert scaled["scales"] == [1024, 512, 512, 1024], scheme
        assert (scaled["state"]["scale"], scaled["state"]["_growth_tracker"]) == (1024, 0)
        for name, weight in plain["weights"].items():  # powers of two: not a bit is lost
            assert torch.equal(scaled["weights"][name], weight), (scheme, name)


def test_torchs_scaler_is_refused_where_it_would_not_unscale(alone_in_a_group):
    """It unscaled the parameters' gradients, and Zero1Optimizer took its step with those of its buckets (D16)."""
    weights = []
    for scaler in (LossScaler("cpu", init_scale=8.0), torch.amp.GradScaler("cpu", enabled=False)):
        model = seeded(lambda: nn.Linear(3, 3))
        optimizer = Zero1Optimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        scaler.scale(model(torch.ones(2, 3)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        weights.append(model.weight.detach().clone())
    assert torch.equal(*weights)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 3)).sum()).backward()
    with pytest.raises(TypeError, match="Zero1Optimizer needs LossScaler of cs336_systems.distributed.loss_scale"):
        scaler.step(optimizer)
    assert torch.equal(model.weight, weights[1])


def test_one_process_needs_no_group_and_a_rank_no_gradients():
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = LossScaler("cpu", init_scale=8.0)
    scaler.scale(weight.sum())
    scaler.step(optimizer)
    scaler.update()
    scaler.scale(weight.sum()).backward()
    assert weight.grad is not None and weight.grad.tolist() == [8.0] * 3
    scaler.step(optimizer)
    assert weight.tolist() == [0.0] * 3
