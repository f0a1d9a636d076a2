"""Activation checkpointing of a TransformerLM: store some blocks' inputs, compute the rest again.

    apply_checkpointing(model, "1")          # a checkpoint a block
    apply_checkpointing(model, "recursive")  # O(log N) inputs, N/2·log2 N more block forwards
    apply_checkpointing(model, "selective")  # as "1", but fused attention's output is kept
    apply_checkpointing(model, "none")       # undo

With N blocks, r bytes of residual stream at a boundary and a bytes that one block saves for
backward, groups of g blocks store the N/g inputs of the groups, and during backward the activations
of one group: r·N/g + a·g. The sum is least at g = sqrt(N·r/a), with the familiar 2·sqrt(N) where
r = a (Chen et al. 2016, arXiv:1604.06174). A Transformer block saves tens of times what its input
occupies, so that g = 1 is best up to N = a/r: groups of one block need the least memory of a single
level for real models. Recursion (Griewank 1992's schedules, here simply by halves) stores one input
for each halving, r·log2 N + a, and never more than one block's activations.

What is computed again gives bit-identical gradients: the model has no dropout, so no random state
needs restoring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from cs336_systems.config import FUSED_ATTENTION, FieldError
from cs336_systems.model.transformer import BlockRunner, TransformerLM, run_in_order

# Operators that are a whole attention: selective checkpointing keeps their outputs and log-sum-exp.
FUSED_OPERATORS = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "cs336_systems::triton_attention",
    "cs336_systems::hopper_attention",
    "cs336_systems::tiled_attention",
)


def apply_checkpointing(model: nn.Module, name: str) -> None:
    """Choose by `name` what the blocks of `model` store for backward, in place.

    Parameters, state dict and results stay as they are. What is stored:

    - "none": everything that backward needs.
    - "4", or another number: the input of every four consecutive blocks; the last group may be
      shorter.
    - "recursive": the input of the first half of the blocks, and the second half likewise, down to
      single blocks. A half that is computed again is itself checkpointed by halves.
    - "selective": as "1", and the outputs of attention operators, so that attention runs only once.

    Raises TypeError if `model` is not a TransformerLM, ValueError for any other name, and for
    "selective" if the model's attention is not one operator (reference, compiled): keeping its
    output would save nothing, since its backward needs the probabilities again.
    """
    transformer = _transformer(model)
    if name == "none":
        transformer.run_blocks = run_in_order
    elif name == "recursive":
        transformer.run_blocks = _run_halves
    elif name == "selective":
        attentions: set[Any] = {
            block.attn.attention  # type: ignore[union-attr]
            for block in transformer.layers
        }
        for attention in sorted(attentions - set(FUSED_ATTENTION)):
            fused = ", ".join(FUSED_ATTENTION)
            raise ValueError(
                f"model must have an attention that is one operator ({fused}) to keep its output, "
                f"got {attention}"
            )
        keeping = partial(create_selective_checkpoint_contexts, _keep_attention)
        transformer.run_blocks = partial(_run_groups, 1, context_fn=keeping)
    elif isinstance(name, str) and name.isdecimal() and int(name) > 0:
        transformer.run_blocks = partial(_run_groups, int(name))
    else:
        raise FieldError(
            "checkpointing",
            f"must be none, recursive, selective or blocks per group, got {name!r}",
        )


def compile_blocks(model: nn.Module) -> None:
    """Compile each block of `model` by itself, in place; checkpoints stay outside of the compiler.

    In this order the compiler sees one block without checkpoints and compiles it once, for all
    blocks and for the recomputation. Around a checkpoint it would trace into it, and decide by
    itself what to compute again. Every shape is compiled for itself: after a second shape the
    compiler would otherwise keep sizes open, and store and fuse differently in a model that was
    built after another one. Raises TypeError if `model` is not a TransformerLM.
    """
    for block in _transformer(model).layers:
        block.compile(dynamic=False)


# What a strategy costs, in closed form


def grouped_bytes(
    num_blocks: int, blocks_per_group: int, input_bytes: float, block_bytes: float
) -> float:
    """Return the peak bytes stored between blocks that are checkpointed in groups.

    They are the inputs of the groups so far, and one group's activations. The last group comes
    first in backward, when all inputs are there; if it is shorter, the one before may be the peak.
    """
    num_groups = -(-num_blocks // blocks_per_group)
    last = num_blocks - (num_groups - 1) * blocks_per_group
    peaks = [num_groups * input_bytes + last * block_bytes]
    if num_groups > 1:
        peaks.append((num_groups - 1) * input_bytes + blocks_per_group * block_bytes)
    return max(peaks)


def best_blocks_per_group(num_blocks: int, input_bytes: float, block_bytes: float) -> int:
    """Return the group size with the least `grouped_bytes`.

    It lies next to sqrt(num_blocks · input_bytes / block_bytes).
    """
    return min(
        range(1, num_blocks + 1),
        key=lambda size: grouped_bytes(num_blocks, size, input_bytes, block_bytes),
    )


def recursive_bytes(num_blocks: int, input_bytes: float, block_bytes: float) -> float:
    """Return the peak bytes stored between blocks that are checkpointed by halves.

    They are an input for each halving, and one block's activations.
    """
    return math.ceil(math.log2(num_blocks)) * input_bytes + block_bytes


# How the blocks are run


def _run_groups(
    blocks_per_group: int, blocks: Sequence[nn.Module], x: Tensor, **options: Any
) -> Tensor:
    """Return `x` after `blocks`, run in groups of `blocks_per_group`, each under a checkpoint."""
    for start in range(0, len(blocks), blocks_per_group):
        x = _checkpoint(run_in_order, list(blocks[start : start + blocks_per_group]), x, **options)
    return x


def _run_halves(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Return `x` after `blocks`: a checkpoint around the first half, the second half likewise.

    A half that is computed again in backward is halved in the same way.
    """
    blocks = list(blocks)
    if len(blocks) <= 1 or not torch.is_grad_enabled():
        return run_in_order(blocks, x)
    middle = -(-len(blocks) // 2)
    x = _checkpoint(_run_halves, blocks[:middle], x)
    return _run_halves(blocks[middle:], x)


def _checkpoint(run: BlockRunner, blocks: Sequence[nn.Module], x: Tensor, **options: Any) -> Tensor:
    """Return `run(blocks, x)`, under a checkpoint if gradients are wanted."""
    if not torch.is_grad_enabled():
        return run(blocks, x)
    return checkpoint(
        partial(run, blocks), x, use_reentrant=False, preserve_rng_state=False, **options
    )


def _keep_attention(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return the policy of selective checkpointing for `operator`: save fused attention only."""
    name = operator.name().partition(".")[0]
    return (
        CheckpointPolicy.MUST_SAVE if name in FUSED_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE
    )


def _transformer(model: nn.Module) -> TransformerLM:
    """Return `model`; raise TypeError unless it is a TransformerLM."""
    if not isinstance(model, TransformerLM):
        raise TypeError(
            f"model must be a TransformerLM, whose blocks can be run in groups, "
            f"got {type(model).__name__}"
        )
    return model
