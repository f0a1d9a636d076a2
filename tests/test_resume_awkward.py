"""Resuming where some parameters had no gradient yet, or are 0-d, and clipping where all are frozen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cs336_systems.distributed.checkpoint import load_checkpoint, save_checkpoint
from cs336_systems.distributed.launch import run_ranks
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from cs336_systems.distributed.zero1 import Zero1Optimizer
from cs336_systems.model import AdamW

COVERS = ("cs336_systems/distributed",)


class Gated(nn.Module):
    """A 0-d parameter, and a layer that a step may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.used, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, all_of_it: bool) -> Tensor:
        x = self.used(x * self.scale)
        return self.sometimes(x) if all_of_it else x


def resume_both(rank: int, num_ranks: int, folder: str) -> list[float]:
    """Largest differences between a run that went on and one that was saved and loaded, by optimizer."""
    found = []
    for kind in (ShardedOptimizer, Zero1Optimizer):
        for wrapped in (AdamW, torch.optim.AdamW):
            torch.manual_seed(0)
            model = Gated()
            optimizer = kind(model.parameters(), wrapped, lr=0.01)
            for all_of_it in (False, False):
                train_step(model, optimizer, all_of_it)
            path = Path(folder) / f"{kind.__name__}-{wrapped.__module__}"
            save_checkpoint(path, 2, model, optimizer)
            train_step(model, optimizer, True)
            expected = [parameter.detach().clone() for parameter in model.parameters()]
            again = Gated()
            optimizer = kind(again.parameters(), wrapped, lr=0.01)
            load_checkpoint(path, again, optimizer)
            train_step(again, optimizer, True)
            pairs = zip(expected, again.parameters())
            found.append(max((one - other).abs().max().item() for one, other in pairs))
    return found


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, all_of_it: bool) -> None:
    optimizer.zero_grad()
    model(torch.arange(8.0).view(2, 4), all_of_it).square().mean().backward()
    optimizer.step()


@pytest.mark.problem("optimizer_state_sharding", 15)
def test_unused_and_0d_parameters_resume(tmp_path):
    for differences in run_ranks(resume_both, 2, str(tmp_path)):
        assert differences == [0.0] * 4


def clip_frozen(rank: int, num_ranks: int) -> float:
    model = nn.Linear(3, 3).requires_grad_(False)
    optimizer = Zero1Optimizer(model.parameters(), AdamW, lr=0.1)
    norm = optimizer.clip_grad_norm_(1.0).item()
    optimizer.step()
    return norm


@pytest.mark.slow
def test_a_frozen_model_has_no_gradients_to_clip():
    assert run_ranks(clip_frozen, 2) == [0.0, 0.0]
