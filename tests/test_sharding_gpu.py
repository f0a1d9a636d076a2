"""FSDP and the sharded optimizers on GPUs: NCCL with two, gloo and both ranks on one where there is
only one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cs336_systems.distributed.fsdp import FSDP, wrap_blocks
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from cs336_systems.distributed.spawn import run_ranks
from cs336_systems.distributed.zero1 import Zero1Optimizer
from cs336_systems.grading.reference_training import largest_difference
from cs336_systems.model import AdamW, TransformerLM
from tests.sharding_models import TINY, batch, part, seeded, token_loss, transformer

COVERS = ("cs336_systems/distributed", "tests/sharding_models.py")
BOUND = 1e-5  # float32 on a GPU: other orders of summation, and atomics in the embedding's backward


def gpu_ranks(function: Any) -> list[Any]:
    backend = "nccl" if torch.cuda.device_count() > 1 else "gloo"
    return run_ranks(function, 2, backend=backend, device="cuda")


def train(rank: int, num_ranks: int, model: Any, optimizer: Any, steps: int = 4) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        tokens, targets = (part(x, rank, num_ranks).cuda() for x in batch(step))
        token_loss(model, tokens, targets).backward()
        if isinstance(model, FSDP):
            model.finish_gradient_synchronization()
        optimizer.step()


def train_variants(rank: int, num_ranks: int) -> dict[str, float]:
    single = seeded(transformer).cuda()
    train(0, 1, single, torch.optim.SGD(single.parameters(), lr=0.1))
    expected = dict(single.named_parameters())
    models = {
        "plain": FSDP(seeded(transformer), device="cuda"),
        "layers": FSDP(seeded(transformer), device="cuda", granularity="layer"),
        "fp32 reduce": FSDP(
            seeded(transformer), torch.float32, reduce_dtype=torch.float64, device="cuda"
        ),
        "checkpointed": FSDP(
            wrap_blocks(seeded(transformer), checkpointing="non_reentrant"), device="cuda"
        ),
        "compiled": FSDP(wrap_blocks(seeded(transformer).cuda(), compiled=True)),
    }
    found = {}
    for name, model in models.items():
        train(rank, num_ranks, model, torch.optim.SGD(model.parameters(), lr=0.1))
        full = model.gather_full_params()
        found[name] = largest_difference(full, expected)[0]
    model = seeded(transformer).cuda()
    train(rank, num_ranks, model, Zero1Optimizer(model.parameters(), torch.optim.SGD, lr=0.1))
    found["zero1"] = largest_difference(dict(model.named_parameters()), expected)[0]
    model = seeded(transformer).cuda()
    # equal gradients on all ranks
    train(0, 1, model, ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1))
    found["sharded"] = largest_difference(dict(model.named_parameters()), expected)[0]
    return found


@pytest.mark.gpu
@pytest.mark.several_gpus
def test_every_sharding_on_gpus_trains_like_one_process():
    for found in gpu_ranks(train_variants):
        assert not {
            name: difference for name, difference in found.items() if not difference <= BOUND
        }


def watch_memory(rank: int, num_ranks: int) -> dict[str, int]:
    """Bytes after 3 and after 12 steps, and their peaks; the model is built on the meta device in
    bfloat16 compute.
    """
    with torch.device("meta"):
        model = TransformerLM.from_config(TINY)
    torch.manual_seed(0)
    fsdp = FSDP(model, torch.bfloat16, reduce_dtype=torch.float32)
    assert fsdp.device.type == "cuda"
    optimizer = AdamW(fsdp.parameters(), lr=1e-3)
    found = {}
    for name, steps in (("warm", 3), ("early", 3), ("late", 9)):
        torch.cuda.reset_peak_memory_stats()
        train(rank, num_ranks, fsdp, optimizer, steps)
        optimizer.zero_grad()
        torch.cuda.synchronize()
        found[f"{name} peak"], found[name] = (
            torch.cuda.max_memory_allocated(),
            torch.cuda.memory_allocated(),
        )
    assert fsdp.gathered_units() == []
    return found


@pytest.mark.gpu
@pytest.mark.several_gpus
def test_memory_does_not_grow_from_step_to_step():
    for found in gpu_ranks(watch_memory):
        assert found["late"] == found["early"]
        assert found["late peak"] <= found["early peak"]
