"""Wrappers by name: one small object a scheme with the five things that a training loop asks of it.

trainee = build_trainee(config, torch.device("cpu"))
with trainee.no_sync(): ...                   # micro-batches before the last
trainee.finish(); trainee.clip(1.0); trainee.optimizer.step()
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cs336_systems.model import AdamW, build_model, clip_gradients
from cs336_systems.training.config import TrainingConfig

if TYPE_CHECKING:
    from cs336_systems.distributed.loss_scale import LossScaler

BETAS = (0.9, 0.95)
BUCKET_SIZE_MB = 25.0


@dataclass(frozen=True, kw_only=True)
class Trainee:
    """A model in its wrapper, and its optimizer."""

    module: nn.Module  # tokens -> logits, on this rank's share of the batch
    optimizer: torch.optim.Optimizer
    finish: Callable[[], None]  # after backward: gradients are the means over all ranks
    no_sync: Callable[[], AbstractContextManager[Any]]  # backward inside it only accumulates
    clip: Callable[[float], Tensor]  # scales all gradients to at most this norm; the norm before
    autocast: torch.dtype | None  # what the loop must autocast to; None where the wrapper casts by itself
    scaler: LossScaler | None = None  # of the loss, in float16


def build_trainee(config: TrainingConfig, device: torch.device) -> Trainee:
    """The model of `config` with seeded weights on `device`, in its wrapper; the process group must be up."""
    model = build_model(
        config.model,
        attention=config.attention,
        device=device,
        dtype=getattr(torch, config.precision.parameters),
        seed=config.seed,
    )
    autocast = None if config.precision.autocast is None else getattr(torch, config.precision.autocast)
    trainee = _wrap(model, config, autocast)
    if autocast != torch.float16:
        return trainee
    from cs336_systems.distributed.loss_scale import LossScaler

    return replace(trainee, scaler=LossScaler())


def _wrap(model: nn.Module, config: TrainingConfig, autocast: torch.dtype | None) -> Trainee:
    if config.wrapper == "none":
        return _plain(model, config, autocast)
    if config.wrapper == "fsdp":
        return _fsdp(model, config, autocast)
    if config.wrapper == "zero1":
        return _zero1(model, config, autocast)
    return _ddp(model, config, autocast)


def _options(config: TrainingConfig) -> dict[str, Any]:
    return {"lr": config.learning_rate, "betas": BETAS, "weight_decay": config.weight_decay}


def _plain(model: nn.Module, config: TrainingConfig, autocast: torch.dtype | None) -> Trainee:
    parameters = list(model.parameters())
    return Trainee(
        module=model,
        optimizer=AdamW(parameters, **_options(config)),
        finish=lambda: None,
        no_sync=nullcontext,
        clip=lambda max_norm: clip_gradients(parameters, max_norm),
        autocast=autocast,
    )


def _ddp(model: nn.Module, config: TrainingConfig, autocast: torch.dtype | None) -> Trainee:
    """Replicas with averaged gradients; `sharded-optimizer` is overlapped DDP whose moments are shared out."""
    from cs336_systems.distributed.ddp_bucketed import BucketedDDP
    from cs336_systems.distributed.ddp_flat import FlatDDP
    from cs336_systems.distributed.ddp_naive import NaiveDDP
    from cs336_systems.distributed.ddp_overlap import OverlapDDP
    from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer

    wrapped: Any
    if config.wrapper == "bucketed":
        wrapped = BucketedDDP(model, bucket_size_mb=BUCKET_SIZE_MB)
    else:
        wrapped = {"naive": NaiveDDP, "flat": FlatDDP}.get(config.wrapper, OverlapDDP)(model)
    parameters = list(wrapped.parameters())
    optimizer: torch.optim.Optimizer
    if config.wrapper == "sharded-optimizer":
        optimizer = ShardedOptimizer(parameters, AdamW, **_options(config))
    else:
        optimizer = AdamW(parameters, **_options(config))
    return Trainee(
        module=wrapped,
        optimizer=optimizer,
        finish=wrapped.finish_gradient_synchronization,
        no_sync=wrapped.no_sync,
        clip=lambda max_norm: clip_gradients(parameters, max_norm),
        autocast=autocast,
    )


def _fsdp(model: nn.Module, config: TrainingConfig, autocast: torch.dtype | None) -> Trainee:
    """Shards of everything; low precision is the dtype that weights are gathered in, so nothing is autocast."""
    from cs336_systems.distributed.fsdp import FSDP

    wrapped = FSDP(model, compute_dtype=autocast)
    return Trainee(
        module=wrapped,
        optimizer=AdamW(wrapped.parameters(), **_options(config)),
        finish=wrapped.finish_gradient_synchronization,
        no_sync=wrapped.no_sync,
        clip=wrapped.clip_grad_norm_,
        autocast=None,
    )


def _zero1(model: nn.Module, config: TrainingConfig, autocast: torch.dtype | None) -> Trainee:
    """The optimizer itself reduces gradients, each rank the slices whose moments it keeps."""
    from cs336_systems.distributed.zero1 import Zero1Optimizer

    optimizer = Zero1Optimizer(model.parameters(), AdamW, **_options(config))
    return Trainee(
        module=model,
        optimizer=optimizer,
        finish=optimizer.finish_gradient_synchronization,
        no_sync=optimizer.no_sync,
        clip=optimizer.clip_grad_norm_,
        autocast=autocast,
    )
