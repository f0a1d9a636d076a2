"""The loss scale: equal to training without one, and a step that overflows on one rank is skipped by all (D5)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cs336_systems.distributed.ddp_overlap import OverlapDDP
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.launch import run_ranks
from cs336_systems.distributed.loss_scale import LossScaler
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from cs336_systems.distributed.zero1 import Zero1Optimizer
from cs336_systems.model import AdamW
from tests.sharding_models import batch, part, seeded, token_loss, transformer

COVERS = ("cs336_systems/distributed", "tests/sharding_models.py")
SCHEMES = ("ddp", "sharded-optimizer", "zero1", "fsdp")
LEARNING_RATE = 1e-2


def build(scheme: str) -> tuple[nn.Module, Any]:
    """A wrapped Transformer and its optimizer."""
    model = seeded(transformer)
    if scheme == "fsdp":
        model = FSDP(model)
        return model, AdamW(model.parameters(), lr=LEARNING_RATE)
    if scheme == "zero1":
        return model, Zero1Optimizer(model.parameters(), AdamW, lr=LEARNING_RATE)
    model = OverlapDDP(model)
    optimizer: Any = (
        ShardedOptimizer if scheme == "sharded-optimizer" else lambda parameters, cls, lr: cls(parameters, lr)
    )
    return model, optimizer(model.parameters(), AdamW, lr=LEARNING_RATE)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    if isinstance(model, FSDP):
        return model.gather_full_params()
    inner: Any = getattr(model, "module", model)
    return {name: parameter.detach().clone() for name, parameter in inner.named_parameters()}


def train(rank: int, num_ranks: int, scheme: str, scaled: bool) -> dict[str, Any]:
    """Four steps; the loss of the last rank overflows in the second, which without a scale is left out."""
    model, optimizer = build(scheme)
    scaler = LossScaler(2.0**10, growth_interval=2)
    made, scales = [], []
    for step in range(4):
        if step == 1 and not scaled:
            continue
        optimizer.zero_grad()
        loss = token_loss(model, *(part(one, rank, num_ranks) for one in batch(step)))
        if step == 1 and rank == num_ranks - 1:
            loss = loss * float("inf")
        (scaler.scale(loss) if scaled else loss).backward()
        synchronized: Any = optimizer if scheme == "zero1" else model
        synchronized.finish_gradient_synchronization()
        made.append(not scaled or scaler.unscale(optimizer))
        if made[-1]:
            optimizer.step()
        scales.append(scaler.value)
    return {"made": made, "scales": scales, "weights": whole(model), "state": scaler.state_dict()}


def train_all(rank: int, num_ranks: int) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    return {scheme: (train(rank, num_ranks, scheme, True), train(rank, num_ranks, scheme, False)) for scheme in SCHEMES}


@pytest.mark.slow
def test_a_step_that_overflows_on_one_rank_is_skipped_by_all_and_the_others_are_as_without_a_scale():
    """Sharded gradients that overflow on one rank once made that rank alone skip, under torch's own scaler."""
    for rank in run_ranks(train_all, 2):
        for scheme, (scaled, plain) in rank.items():
            assert scaled["made"] == [True, False, True, True], scheme
            assert scaled["scales"] == [1024, 512, 512, 1024], scheme
            assert scaled["state"] == {"value": 1024, "good_steps": 0}
            for name, weight in plain["weights"].items():  # powers of two: not a bit is lost
                assert torch.equal(scaled["weights"][name], weight), (scheme, name)


def test_one_process_needs_no_group_and_a_state_loads_again():
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = LossScaler(8.0)
    assert scaler.unscale(optimizer)  # no gradients, no objection
    scaler.scale(weight.sum()).backward()
    assert weight.grad is not None and weight.grad.tolist() == [8.0] * 3
    assert scaler.unscale(optimizer) and weight.grad.tolist() == [1.0] * 3
    again = LossScaler()
    again.load_state_dict(scaler.state_dict())
    assert (again.value, again.good_steps) == (8.0, 2)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan"), pytest.param(10**400, id="huge"), "8", None])
def test_a_scale_must_be_positive_and_finite(value):
    scaler = LossScaler(4.0)
    with pytest.raises(ValueError, match="value must be positive and finite, got"):
        LossScaler(value)
    with pytest.raises(ValueError, match="value must be positive and finite, got"):
        scaler.load_state_dict({"value": value, "good_steps": 1})
    assert scaler.state_dict() == {"value": 4.0, "good_steps": 0}


@pytest.mark.parametrize("good_steps", [-1, 1.5, "1", None])
def test_good_steps_must_be_a_count(good_steps):
    scaler = LossScaler(4.0)
    with pytest.raises(ValueError, match=f"good_steps must be an int of at least 0, got {good_steps!r}"):
        scaler.load_state_dict({"value": 8.0, "good_steps": good_steps})
    assert scaler.state_dict() == {"value": 4.0, "good_steps": 0}


def test_an_interval_must_be_positive():
    with pytest.raises(ValueError, match="growth_interval must be at least 1, got 0"):
        LossScaler(growth_interval=0)
