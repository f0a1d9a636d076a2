"""What the tests grade: `make grade ADAPTERS=...` takes another file.

The names and parameters are the course's, the union of its 2025 and 2026 editions.
"""

from __future__ import annotations

from typing import Any

import torch


def get_flashattention_autograd_function_pytorch() -> type[torch.autograd.Function]:
    """An autograd.Function whose `apply(q, k, v, is_causal)` is FlashAttention-2 in PyTorch
    operations.
    """
    from cs336_systems.attention import FlashAttentionPyTorch

    return FlashAttentionPyTorch


def get_flashattention_autograd_function_triton() -> type[torch.autograd.Function]:
    """An autograd.Function whose `apply(q, k, v, is_causal)` is FlashAttention-2 in Triton kernels."""
    from cs336_systems.attention import FlashAttentionTriton

    return FlashAttentionTriton


def get_ddp(module: torch.nn.Module) -> torch.nn.Module:
    """`module` wrapped so that each parameter's gradient is averaged over the ranks while the
    backward runs.
    """
    from cs336_systems.distributed.ddp_overlap import OverlapDDP
    from cs336_systems.distributed.spawn import collect_garbage_at_exit

    collect_garbage_at_exit()  # in a process that the tests started: see there
    return OverlapDDP(module)


def ddp_on_after_backward(ddp_model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Called between the backward and the optimizer's step."""
    ddp_model.finish_gradient_synchronization()


# The 2025 edition's names
get_ddp_individual_parameters, ddp_individual_parameters_on_after_backward = (
    get_ddp,
    ddp_on_after_backward,
)


def get_ddp_bucketed(module: torch.nn.Module, bucket_size_mb: float | None) -> torch.nn.Module:
    """`module` wrapped so that buckets of at most `bucket_size_mb` MB of gradients are averaged;
    None: one bucket.
    """
    from cs336_systems.distributed.ddp_bucketed import BucketedDDP
    from cs336_systems.distributed.spawn import collect_garbage_at_exit

    collect_garbage_at_exit()
    return BucketedDDP(module, bucket_size_mb)


ddp_bucketed_on_after_backward = ddp_on_after_backward


def ddp_bucketed_on_train_batch_start(ddp_model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Called at the start of each step, before the forward."""


def get_sharded_optimizer(
    params: Any, optimizer_cls: type[torch.optim.Optimizer], **kwargs: Any
) -> Any:
    """An optimizer that keeps the state of this rank's share of `params` only, and exchanges what
    it updates.
    """
    from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
    from cs336_systems.distributed.spawn import collect_garbage_at_exit

    collect_garbage_at_exit()
    return ShardedOptimizer(params, optimizer_cls, **kwargs)


def get_fsdp(module: torch.nn.Module, compute_dtype: torch.dtype | None = None) -> torch.nn.Module:
    """`module` with the weights of its Linear and Embedding layers sharded, used in
    `compute_dtype`.
    """
    from cs336_systems.distributed.fsdp import FSDP
    from cs336_systems.distributed.spawn import collect_garbage_at_exit

    collect_garbage_at_exit()
    return FSDP(module, compute_dtype=compute_dtype)


def fsdp_on_after_backward(fsdp_model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Called after backward and before the optimizer's step."""
    fsdp_model.finish_gradient_synchronization()


def fsdp_gather_full_params(fsdp_model: Any) -> dict[str, torch.Tensor]:
    """All parameters of the wrapped module, whole and in float32, by their names in it."""
    return fsdp_model.gather_full_params()
