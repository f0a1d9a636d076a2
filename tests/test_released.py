"""Wrappers and optimizers that hook gradients do not outlive their last reference.

Zero1Optimizer and FSDP once stayed alive for good: parameters held them through hooks, a cycle that the garbage
collector cannot see. A process that trained twice kept the memory of both models.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.zero1 import Zero1Optimizer
from cs336_systems.model import AdamW, TransformerLM

MODEL = {"vocab_size": 16, "context_length": 8, "d_model": 16, "num_layers": 2, "num_heads": 2, "d_ff": 32}
TOKENS = torch.arange(8).view(1, 8)


def trained_with_zero1() -> list[Any]:
    model = TransformerLM(**MODEL)
    optimizer = Zero1Optimizer(model.parameters(), AdamW, lr=1e-3)
    model(TOKENS).sum().backward()
    optimizer.step()
    return [model, optimizer, optimizer.buckets[0].flat]


def trained_with_fsdp() -> list[Any]:
    model = FSDP(TransformerLM(**MODEL), torch.bfloat16)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    model(TOKENS).sum().backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    return [model, optimizer, next(model.parameters())]


@pytest.mark.parametrize("train", [trained_with_zero1, trained_with_fsdp])
def test_nothing_of_a_training_step_outlives_its_last_reference(train, alone_in_a_group):
    references = [weakref.ref(thing) for thing in train()]
    gc.collect()
    assert [reference() for reference in references] == [None, None, None]


def test_a_model_trains_on_after_its_optimizer_is_gone(alone_in_a_group):
    model = nn.Linear(3, 2)
    optimizer = Zero1Optimizer(model.parameters(), AdamW, lr=1e-3)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    model(torch.ones(2, 3)).sum().backward()
    assert model.bias.grad.tolist() == [2.0, 2.0]
