"""Wrappers by name: one object with everything that a training loop asks of a scheme.

trainee = build_trainee(config, torch.device("cpu"))
with trainee.no_sync(): ...    # micro-batches before the last
trainee.finish(); trainee.clip(1.0); trainee.optimizer.step()
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from cs336_systems.distributed.ddp_bucketed import BucketedDDP
from cs336_systems.distributed.ddp_flat import FlatDDP
from cs336_systems.distributed.ddp_naive import NaiveDDP
from cs336_systems.distributed.ddp_overlap import OverlapDDP
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.loss_scale import LossScaler
from cs336_systems.distributed.ring_attention import split_context, zigzag_split
from cs336_systems.distributed.sharded_muon import ShardedMuon
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from cs336_systems.distributed.tensor_parallel import apply_tensor_parallel, clip_grad_norm_
from cs336_systems.distributed.zero1 import Zero1Optimizer
from cs336_systems.model import AdamW, build_model, clip_gradients, cross_entropy
from cs336_systems.model.muon import Muon, muon_groups
from cs336_systems.training.hyperparameters import TrainingConfig

BETAS = (0.9, 0.95)
DDPS = {"naive": NaiveDDP, "flat": FlatDDP, "overlap": OverlapDDP, "bucketed": BucketedDDP}


@dataclass(frozen=True, kw_only=True)
class Trainee:
    """A model in its wrapper, its optimizer, and what the wrapper needs around a step."""

    device: torch.device
    module: nn.Module  # tokens -> logits, on this rank's share of the batch
    optimizer: torch.optim.Optimizer
    # scales all gradients to at most this norm, and returns the norm before
    clip: Callable[[float], Tensor]
    scaler: torch.amp.GradScaler  # of the loss; does nothing except in float16
    # context of the module's and the loss's forward
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    # called after backward; then gradients are the means over all ranks
    finish: Callable[[], None] = lambda: None
    # context in which backward only accumulates
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext
    # sequences -> this rank's part of each
    split: Callable[[Tensor], Tensor] = lambda sequences: sequences
    # called before the module takes whole sequences again
    make_whole: Callable[[], None] = lambda: None

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of this rank's part of sequences that lie on the CPU."""
        with self.autocast():
            logits = self.module(self.split(tokens).to(self.device))
            return cross_entropy(logits, self.split(targets).to(self.device))


def build_trainee(config: TrainingConfig, device: torch.device) -> Trainee:
    """Return the model of `config` with seeded weights on `device`, in its wrapper.

    With a wrapper or several ranks the default process group must be up.
    """
    dtype = getattr(torch, config.precision.parameters)
    model = build_model(
        config.model, attention=config.attention, device=device, dtype=dtype, seed=config.seed
    )
    parts: dict[str, Any] = {"clip": lambda max_norm: clip_gradients(model.parameters(), max_norm)}

    # Context parallelism comes before any wrapper: they average over parts as over sequences.
    if config.context_parallel > 1:
        group, _ = dist.new_subgroups(config.context_parallel)
        parts["make_whole"] = split_context(
            model, group, "auto" if config.attention == "sdpa" else config.attention
        )
        place = dist.get_rank(group), config.context_parallel
        parts["split"] = lambda sequences: zigzag_split(sequences, *place, dim=1)

    # Tensor parallelism does, too: wrappers then work over the ranks that have the same parts.
    groups: dict[str, dist.ProcessGroup | None] = {"shard": None, "replicate": None}
    if config.tensor_parallel > 1 or config.replicas > 1:
        shape = {"replicate": config.replicas, "shard": -1, "tensor": config.tensor_parallel}
        shape["shard"] = config.num_ranks // (config.replicas * config.tensor_parallel)
        mesh = init_device_mesh(device.type, (*shape.values(),), mesh_dim_names=(*shape,))
        groups = {
            name: mesh.get_group(name) for name in shape if shape[name] > 1 or name == "shard"
        }
    if config.tensor_parallel > 1:
        ranks = apply_tensor_parallel(
            model, groups["tensor"], sequence_parallel=config.sequence_parallel
        )
        parts["make_whole"] = partial(setattr, ranks, "sequence_parallel", False)
        parts["clip"] = partial(clip_grad_norm_, model)

    autocast = (
        None if config.precision.autocast is None else getattr(torch, config.precision.autocast)
    )
    scaler = LossScaler(device.type, enabled=autocast == torch.float16)
    options: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": BETAS,
        "weight_decay": config.weight_decay,
    }

    kind: type[AdamW] = AdamW
    updated: Any = model.parameters()
    if config.optimizer == "muon":
        kind, updated = Muon, muon_groups(model)

    # The wrapper comes before its optimizer: FSDP replaces the parameters by shards.
    wrapped: Any = model
    optimizer: Any
    if config.wrapper == "fsdp":
        # FSDP gathers weights in low precision, so autocast has nothing to do.
        wrapped = FSDP(
            model,
            compute_dtype=autocast,
            process_group=groups["shard"],
            replicate_group=groups.get("replicate"),
        )
        autocast = None
        optimizer = (
            ShardedMuon(muon_groups(model), **options)
            if config.optimizer == "muon"
            else AdamW(wrapped.parameters(), **options)
        )
        parts["clip"] = wrapped.clip_grad_norm_
    elif config.wrapper == "zero1":
        optimizer = Zero1Optimizer(model.parameters(), AdamW, **options)
        parts["clip"] = optimizer.clip_grad_norm_
    elif config.wrapper == "sharded-optimizer":
        wrapped = OverlapDDP(model, groups["shard"])
        optimizer = ShardedOptimizer(updated, kind, groups["shard"], **options)
    else:
        wrapped = (
            model
            if config.wrapper == "none"
            else DDPS[config.wrapper](model, group=groups["shard"])
        )
        optimizer = kind(updated, **options)

    if autocast is not None:
        parts["autocast"] = partial(torch.autocast, device.type, dtype=autocast)
    if config.wrapper != "none":
        # the object that averages the gradients
        synchronizes = optimizer if config.wrapper == "zero1" else wrapped
        parts |= {
            "finish": synchronizes.finish_gradient_synchronization,
            "no_sync": synchronizes.no_sync,
        }
    return Trainee(device=device, module=wrapped, optimizer=optimizer, scaler=scaler, **parts)
