"""Activation checkpointing of a TransformerLM: store some blocks' inputs, and compute the rest again for backward.

    checkpoint_blocks(model, 1)              # one block a group: the least memory of a single level for real models
    checkpoint_recursively(model)            # O(log N) stored inputs, for O(N log N) block forwards
    checkpoint_selectively(model, 1)         # groups, but the output of fused attention is kept, not computed again
    store_all(model)                         # undo

With N blocks, r bytes of residual stream at a boundary and a bytes that one block saves for backward, groups of g
blocks store the N/g inputs of the groups, and during backward the activations of one group: r·N/g + a·g, least at
g = sqrt(N·r/a), with the familiar 2·sqrt(N) where r = a (Chen et al. 2016, arXiv:1604.06174). A Transformer block saves
tens of times what its input occupies, so that g = 1 is best up to N = a/r. Recursion (Griewank 1992's schedules, here
simply by halves) stores one input for each halving, r·log2 N + a, and never more than one block's activations.

What is computed again gives bit-identical gradients: the model has no dropout, so no random state needs restoring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cs336_systems.model.transformer import BlockRunner, TransformerLM, run_in_order

# Operators that are an attention as a whole, whose output (and log-sum-exp) selective checkpointing keeps.
FUSED_ATTENTION = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "cs336_systems::triton_attention",
    "cs336_systems::hopper_attention",
    "cs336_systems::tiled_attention",
)
FUSED_ATTENTION_NAMES = ("sdpa", "tiled", "triton", "hopper")  # attentions of the model that are one operator


def checkpoint_blocks(model: nn.Module, blocks_per_group: int) -> None:
    """Store only the input of every `blocks_per_group` consecutive blocks; the last group may be shorter.

    Parameters, state dict and results stay as they are. Raises TypeError if `model` is no TransformerLM, ValueError if
    `blocks_per_group` is not a positive int.
    """
    _transformer(model).run_blocks = partial(_run_groups, _positive(blocks_per_group), _checkpointed)


def checkpoint_recursively(model: nn.Module) -> None:
    """Store the input of the first half of the blocks, and treat the second half likewise, down to single blocks.

    A half that is computed again is itself checkpointed by halves. Raises TypeError if `model` is no TransformerLM.
    """
    _transformer(model).run_blocks = _run_halves


def checkpoint_selectively(model: nn.Module, blocks_per_group: int) -> None:
    """As `checkpoint_blocks`, but the outputs of attention operators are kept, so that attention runs only once.

    Raises ValueError where the model's attention is not one operator (reference, compiled): to keep its output would
    save nothing, since its backward needs the probabilities again.
    """
    transformer = _transformer(model)
    names: set[Any] = {block.attn.attention for block in transformer.layers}  # type: ignore[union-attr]
    for name in sorted(names - set(FUSED_ATTENTION_NAMES)):
        fused = ", ".join(FUSED_ATTENTION_NAMES)
        raise ValueError(f"model must have an attention that is one operator ({fused}) to keep its output, got {name}")
    transformer.run_blocks = partial(_run_groups, _positive(blocks_per_group), _selectively_checkpointed)


def store_all(model: nn.Module) -> None:
    """No checkpointing: every block keeps what its backward needs."""
    _transformer(model).run_blocks = run_in_order


def compile_blocks(model: nn.Module) -> None:
    """Compile each block by itself, in place; under checkpointing, which stays outside.

    In this order the compiler sees one block without checkpoints and compiles it once, for all blocks and for the
    recomputation. Around a checkpoint it would trace into it, and decide by itself what to compute again. Every shape
    is compiled for itself: after a second shape the compiler would otherwise keep sizes open, and store and fuse
    differently in a model that was built after another one.
    """
    for block in _transformer(model).layers:
        block.compile(dynamic=False)


# What a strategy costs, in closed form


def grouped_bytes(num_blocks: int, blocks_per_group: int, input_bytes: float, block_bytes: float) -> float:
    """Peak bytes stored between blocks by groups: inputs of the groups so far, and one group's activations.

    The last group comes first in backward, when all inputs are there; if it is shorter, the one before may be the peak.
    """
    _positive(num_blocks), _positive(blocks_per_group)
    num_groups = -(-num_blocks // blocks_per_group)
    last = num_blocks - (num_groups - 1) * blocks_per_group
    peaks = [num_groups * input_bytes + last * block_bytes]
    if num_groups > 1:
        peaks.append((num_groups - 1) * input_bytes + blocks_per_group * block_bytes)
    return max(peaks)


def best_blocks_per_group(num_blocks: int, input_bytes: float, block_bytes: float) -> int:
    """The group size of the least `grouped_bytes`: next to sqrt(num_blocks · input_bytes / block_bytes)."""
    sizes = range(1, _positive(num_blocks) + 1)
    return min(sizes, key=lambda size: grouped_bytes(num_blocks, size, input_bytes, block_bytes))


def recursive_inputs(num_blocks: int) -> int:
    """Inputs that recursion stores at most: one for each halving, ceil(log2 N)."""
    return math.ceil(math.log2(_positive(num_blocks)))


def recursive_bytes(num_blocks: int, input_bytes: float, block_bytes: float) -> float:
    """Peak bytes stored between blocks by recursion: an input for each halving, and one block's activations."""
    return recursive_inputs(num_blocks) * input_bytes + block_bytes


def recursive_recomputed_blocks(num_blocks: int) -> int:
    """Block forwards that recursion adds to a step: R(n) = ceil(n/2) + R(ceil(n/2)) + R(floor(n/2)), N/2·log2 N for a
    power of two. A single level adds N."""
    if _positive(num_blocks) == 1:
        return 0
    left = -(-num_blocks // 2)
    return left + recursive_recomputed_blocks(left) + recursive_recomputed_blocks(num_blocks - left)


# How the blocks are run


def _run_groups(blocks_per_group: int, run_group: BlockRunner, blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    for start in range(0, len(blocks), blocks_per_group):
        x = run_group(list(blocks[start : start + blocks_per_group]), x)
    return x


def _run_halves(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    blocks = list(blocks)
    if len(blocks) <= 1 or not torch.is_grad_enabled():
        return run_in_order(blocks, x)
    middle = -(-len(blocks) // 2)
    x = _checkpoint(_run_halves, blocks[:middle], x)
    return _run_halves(blocks[middle:], x)


def _checkpointed(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    return _checkpoint(run_in_order, blocks, x)


def _selectively_checkpointed(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    return _checkpoint(
        run_in_order, blocks, x, context_fn=partial(create_selective_checkpoint_contexts, _keep_attention)
    )


def _checkpoint(run: BlockRunner, blocks: Sequence[nn.Module], x: Tensor, **options: Any) -> Tensor:
    if not torch.is_grad_enabled():
        return run(blocks, x)
    return checkpoint(partial(run, blocks), x, use_reentrant=False, preserve_rng_state=False, **options)


def _keep_attention(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = operator.name().partition(".")[0]
    return CheckpointPolicy.MUST_SAVE if name in FUSED_ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE


def _transformer(model: nn.Module) -> TransformerLM:
    if not isinstance(model, TransformerLM):
        raise TypeError(f"model must be a TransformerLM, whose blocks can be run in groups, got {type(model).__name__}")
    return model


def _positive(value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"blocks_per_group and num_blocks must be positive ints, got {value!r}")
    return value


def apply_checkpointing(model: nn.Module, name: str) -> None:
    """The strategy called `name`: "none", "recursive", a group size as "4", or "selective" (groups of one block).

    Raises ValueError for any other.
    """
    if name == "none":
        store_all(model)
    elif name == "recursive":
        checkpoint_recursively(model)
    elif name == "selective":
        checkpoint_selectively(model, 1)
    elif isinstance(name, str) and name.isdecimal() and int(name) > 0:
        checkpoint_blocks(model, int(name))
    else:
        raise ValueError(f"checkpointing must be none, recursive, selective or blocks per group, got {name!r}")
