"""Hugging Face Transformers with our attention: `register` it, then name it as a model's `attn_implementation`.

    from cs336_systems.integrations.transformers import register

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=register())     # forward, backward, generate
    model = LlamaForCausalLM._from_config(config, attn_implementation=register("cs336_hopper", backend="hopper"))

What a call of the attention may attend arrives as a mask, made once a forward by the rule that Transformers has for
`sdpa`: None where a flag says it all, else a bool tensor of (batch, 1, queries, keys), True where attended.

    mask                                        what is attended
    None, several queries of a causal module    query i the keys j <= i, from the top left: a prompt, a training batch
    None otherwise                              every key: one query against a key-value cache, an encoder
    a bool tensor                               its pairs: padding, packed documents, a window, a prompt in pieces
                                                against a cache, where query i is not the i-th token

A tensor becomes a `BlockMask`, exactly: kernels skip its dead tiles, and layers that are given one tensor share it. As
with SDPA a padded batch costs a (queries, keys) tensor; without padding there is none. A query without a key gives 0.

What we do not compute raises, where some of Transformers' own implementations go on without it.
"""

import importlib
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from cs336_systems.attention import BlockMask, flash_attention
from cs336_systems.attention.backends import BACKENDS

DEFAULT_NAME = "cs336"
# Transformers reads these words in a name: it then makes other masks, or loads other kernels.
RESERVED_WORDS = ("eager", "sdpa", "flash", "flex", "paged")
# Arguments that some model hands to every implementation and that change the result, with what they stand for.
REFUSED = {
    "softcap": "capped scores",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a bias on the scores",
    "head_mask": "a mask of heads",
    "indices": "keys chosen by index",
    "block_indices": "blocks of keys chosen by index",
    "cache": "a paged cache",
}

# The block mask of each bool mask that is still in use, with the version of the tensor that it was made of.
_block_masks: Any = WeakTensorKeyDictionary()


def register(name: str = DEFAULT_NAME, *, backend: str = "auto") -> str:
    """Make our attention known to Transformers as `name`, and return `name`; again with the same name replaces it.

    Args:
        name: what models are given as `attn_implementation`: a Python identifier without the words by which
            Transformers knows its own implementations.
        backend: as in `flash_attention`. One that cannot serve a call raises in that call, with the reason.

    Raises ImportError without the package transformers or with one before 4.53, TypeError or ValueError for a name or
    back end that cannot be.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {type(name).__name__}")
    if not name.isidentifier() or any(word in name for word in RESERVED_WORDS):
        raise ValueError(f"name must be an identifier without {', '.join(RESERVED_WORDS)} in it, got {name!r}")
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"backend must be one of auto, {', '.join(BACKENDS)}, got {backend!r}")
    attention, masks = _interfaces()
    attention.register(name, partial(attention_forward, backend=backend))
    # A name without a mask function would get no masks at all, and attend padding in silence.
    masks.register(name, masks()["sdpa"])
    return name


def attention_forward(
    module: nn.Module,
    query: Float[Tensor, "batch heads queries head_dim"],
    key: Float[Tensor, "batch kv_heads keys head_dim"],
    value: Float[Tensor, "batch kv_heads keys head_dim"],
    attention_mask: Bool[Tensor, "batch one queries keys"] | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    *,
    backend: str = "auto",
    **others: Any,
) -> tuple[Float[Tensor, "batch queries heads head_dim"], None]:
    """What Transformers calls in each layer; (output, no attention weights).

    `is_causal` is the module's unless given. `sliding_window` is in the mask already, which is None only where the
    window holds every key. Of `others` those in REFUSED must be None; what is left says nothing about the result.

    Raises TypeError or ValueError, before anything is launched, for what is not supported.
    """
    refuse_unsupported(dropout, attention_mask, sliding_window, key.shape[2], others)
    block_mask = None
    if attention_mask is not None:
        is_causal = False  # the mask says which of the past is attended
        # A replayed CUDA graph writes a new mask into the same tensor, and no version says so.
        may_be_known = not torch.compiler.is_compiling()
        block_mask = _block_mask_of(check_mask(attention_mask, query, key), may_be_known)
    else:
        wanted = getattr(module, "is_causal", True) if is_causal is None else is_causal
        is_causal = bool(wanted) and query.shape[2] > 1
    output = flash_attention(
        query, key, value, is_causal=is_causal, block_mask=block_mask, scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1], backend=backend,
    )  # fmt: skip
    assert isinstance(output, Tensor)
    return output.transpose(1, 2).contiguous(), None


def refuse_unsupported(
    dropout: float, attention_mask: object, sliding_window: int | None, num_keys: int, others: dict[str, Any]
) -> None:
    """ValueError for an argument of a call that would change its result and that we do not compute."""
    if dropout:
        raise ValueError(f"dropout must be 0, got {dropout}: set the model's attention_dropout to 0, or call .eval()")
    if others.get("output_attentions"):
        raise ValueError("output_attentions must be False, got True: the weights are never stored; take 'eager'")
    for name, meaning in REFUSED.items():
        if others.get(name) is not None:
            raise ValueError(
                f"{name} must be None, got {type(others[name]).__name__}: there is no support for {meaning}"
            )
    if attention_mask is not None:
        return
    if sliding_window is not None and num_keys > sliding_window:
        raise ValueError(f"attention_mask must hold the window of {sliding_window} among {num_keys} keys, got None")
    boundaries = others.get("cu_seq_lens_k")
    if boundaries is not None and len(boundaries) > 2:
        raise ValueError(
            f"attention_mask must keep the {len(boundaries) - 1} documents of cu_seq_lens_k apart, got None: "
            "give the model their position_ids and no attention_mask"
        )


def check_mask(mask: object, query: Tensor, key: Tensor) -> Tensor:
    """`mask` broadcast over queries and keys; TypeError or ValueError unless it is a bool tensor for them."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"attention_mask must be a bool tensor or None, got {type(mask).__name__}")
    if mask.dtype != torch.bool:
        raise ValueError(
            f"attention_mask must be of dtype bool, True where attended, got {mask.dtype}: "
            "what would be added to the scores is not supported"
        )
    batch, heads, num_queries = query.shape[:3]
    sizes = ((1, batch), (1, heads), (1, num_queries), (1, key.shape[2]))
    if mask.ndim != 4 or any(size not in allowed for size, allowed in zip(mask.shape, sizes)):
        raise ValueError(
            f"attention_mask must have shape ({batch} or 1, {heads} or 1, {num_queries} or 1, {key.shape[2]} or 1), "
            f"got {tuple(mask.shape)}"
        )
    whole = (num_queries, key.shape[2])
    return mask if mask.shape[2:] == whole else mask.expand(-1, -1, *whole)


@torch.compiler.disable(reason="the number of live tiles depends on the mask's values")
def _block_mask_of(mask: Tensor, may_be_known: bool) -> BlockMask:
    """The tiles of `mask`: those found before if it is the same tensor and nobody has written to it since.

    PyTorch counts who writes to a tensor, but not through `.data` or the NumPy array whose memory it shares: a mask
    that is refilled so has to be another tensor each time.
    """
    if not may_be_known or mask.is_inference():  # made in inference mode, it does not count who writes to it
        return BlockMask.from_dense(mask)
    version, block_mask = _block_masks.get(mask, (None, None))
    if version != mask._version:
        block_mask = BlockMask.from_dense(mask)
        _block_masks[mask] = (mask._version, block_mask)
    return block_mask


def _interfaces() -> tuple[Any, Any]:
    """The classes with which Transformers registers attention functions and mask functions."""
    try:  # by name: its annotations are not ours to check, and it takes seconds to load
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise ImportError(
            "transformers is not installed: pip install -e '.[hf]' in the repository, as docs/attention.md says"
        ) from None
    if not hasattr(transformers, "AttentionMaskInterface"):
        raise ImportError(f"transformers must be of version 4.53 or later, got {transformers.__version__}")
    return transformers.AttentionInterface, transformers.AttentionMaskInterface
