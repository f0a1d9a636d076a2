"""Hugging Face Transformers with this package's attention, as a model's `attn_implementation`.

    from cs336_systems.integrations.transformers import register

    # forward, backward, generate
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=register())
    name = register("cs336_hopper", backend="hopper")
    model = LlamaForCausalLM._from_config(config, attn_implementation=name)

A mask tells each call of the attention what to attend; `make_mask` makes it once a forward:

    mask                        what is attended
    CausalMask                  query i attends keys j <= i, from the top left: a prompt, a training
                                batch. A single query, as against a key-value cache, attends every
                                key. The class alone says so: there is no tensor of pairs.
    PairsMask                   the pairs of a bool tensor: padding, packed documents, a window, a
                                prompt in pieces against a cache, where query i is not the i-th
                                token
    None                        every key, as in an encoder without padding
    a bool or a float tensor    its pairs: a mask of the user's, or one that the model made of ours

All code but this module sees the first two as eager's mask (`eager_mask.py`). A model, or a part of
one, may have attention code of its own and take our name for masks only: it computes what it
computes under `eager`.

Pairs become a `BlockMask`, exactly: kernels skip its dead tiles, and layers that are given one
tensor share it. As with SDPA a padded batch costs a (queries, keys) tensor; without padding there
is none. A query without a key gives 0.

An argument that asks for something unsupported raises. Some of Transformers' own implementations
ignore it instead.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from cs336_systems.attention import BlockMask, flash_attention
from cs336_systems.attention.choose import BACKENDS
from cs336_systems.integrations.eager_mask import CausalMask, PairsMask, causal_mask, pairs_mask

DEFAULT_NAME = "cs336"
# A name with one of these words makes Transformers make other masks, or load other kernels.
RESERVED_WORDS = ("eager", "sdpa", "flash", "flex", "paged")
# Arguments that some models hand to every implementation and that change the result, with their
# meaning for the message.
REFUSED = {
    "softcap": "capped scores",
    "position_bias": "a bias on the scores",
    "head_mask": "a mask of heads",
    "indices": "keys chosen by index",
    "block_indices": "blocks of keys chosen by index",
    "cache": "a paged cache",
}
# A mask of floats is added to the scores. A value as low as this leaves a key no weight; the lowest
# of float16 is -65504.
LOWEST_BIAS = -30000.0

# (version, block mask) of each mask tensor that is still in use: the tensor's version when the
# block mask was made of it.
_block_masks: Any = WeakTensorKeyDictionary()


def register(name: str = DEFAULT_NAME, *, backend: str = "auto") -> str:
    """Register this package's attention with Transformers as `name`, and return `name`.

    A later call with the same name replaces the earlier one.

    Args:
        name: the `attn_implementation` of models: a Python identifier without the words by which
            Transformers knows its own implementations (RESERVED_WORDS).
        backend: as in `flash_attention`. A back end that cannot serve a call raises in that call,
            with the reason.

    Raises ImportError without the package transformers or with a version before 4.53, TypeError or
    ValueError for a name or back end that is not allowed.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {type(name).__name__}")
    if not name.isidentifier() or any(word in name for word in RESERVED_WORDS):
        raise ValueError(
            f"name must be an identifier without {', '.join(RESERVED_WORDS)} in it, got {name!r}"
        )
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"backend must be one of auto, {', '.join(BACKENDS)}, got {backend!r}")
    attention, masks = _interfaces()
    attention.register(name, partial(attention_forward, backend=backend))
    # A name without a mask function would get no masks at all, and attend padding in silence.
    masks.register(name, partial(make_mask, masks()["sdpa"]))
    return name


def make_mask(sdpa_mask: Callable[..., Tensor | None], **arguments: Any) -> Tensor | None:
    """Return the mask of a forward: the pairs of `sdpa_mask`, readable as eager's floats.

    `arguments` are those of Transformers' mask functions, and `sdpa_mask` is one of them. The
    result is None only where eager's mask is None too. A model that computes attention itself takes
    None for "every key", though `sdpa_mask` returns None for "causal" too.
    """
    pairs = sdpa_mask(**arguments)
    dtype = arguments.get("dtype", torch.float32)
    if pairs is not None:
        return pairs_mask(pairs, dtype)
    if not arguments.get("allow_is_causal_skip", True):
        return None

    # causal; Transformers before 5 gives `cache_position` instead of a length and a device
    positions = arguments.get("cache_position")
    device = arguments.get("device", None if positions is None else positions.device)
    queries = arguments["q_length"] if positions is None else len(positions)
    return causal_mask((arguments["batch_size"], 1, queries, arguments["kv_length"]), dtype, device)


def attention_forward(
    module: nn.Module,
    query: Float[Tensor, "batch heads queries head_dim"],
    key: Float[Tensor, "batch kv_heads keys head_dim"],
    value: Float[Tensor, "batch kv_heads keys head_dim"],
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    s_aux: Float[Tensor, "heads"] | None = None,
    backend: str = "auto",
    **others: Any,
) -> tuple[Float[Tensor, "batch queries heads head_dim"], None]:
    """Return (output, None) of one layer's attention; Transformers calls this function.

    None stands for the attention weights, which are not computed.

    Args:
        module: the layer; its class and model type end each error message.
        attention_mask: what to attend, as in the module's docstring.
        scaling: factor of the scores; 1/sqrt(head_dim) by default.
        is_causal: by default the module's. A causal call of several queries needs a mask, which
            already says what is attended.
        sliding_window: must be in the mask already.
        s_aux: learnable sinks, a score for each head that takes weight and gives no value
            (docs/sinks.md).
        backend: as in `flash_attention`.
        others: those in REFUSED must be None; the rest does not change the result.

    Raises TypeError or ValueError, before anything is launched, for what is not supported.
    """
    caller = name_of(module)
    refuse_unsupported(dropout, attention_mask, sliding_window, key.shape[2], others, caller)

    # what to attend: a flag, a block mask, or every key
    block_mask = None
    if isinstance(attention_mask, CausalMask):
        check_shape(attention_mask, query, key, caller)
        is_causal = query.shape[2] > 1
    elif attention_mask is not None:
        is_causal = False  # the mask says which past keys are attended
        # A replayed CUDA graph writes a new mask into the same tensor without a new version.
        may_be_known = not torch.compiler.is_compiling()
        block_mask = _block_mask_of(
            check_mask(attention_mask, query, key, caller), may_be_known, caller
        )
    else:
        # Without a mask eager attends every key, and SDPA of a causal module the past: a causal
        # call is refused.
        if query.shape[2] > 1 and (
            getattr(module, "is_causal", False) if is_causal is None else is_causal
        ):
            raise ValueError(
                f"attention_mask must be given where is_causal is True, got None ({caller})"
            )
        is_causal = False

    value_dim = value.shape[-1]
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    query, key, value = with_one_head_dim(query, key, value)
    output = flash_attention(
        query,
        key,
        value,
        is_causal=is_causal,
        block_mask=block_mask,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        return_lse=s_aux is not None,
        backend=backend,
    )
    if s_aux is not None:
        output = with_sinks(output[0], output[1], s_aux, caller)
    assert isinstance(output, Tensor)
    return output[..., :value_dim].transpose(1, 2).contiguous(), None


def with_one_head_dim(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value with the shorter head dims padded with zeros to the longest.

    Latent attention has another head dim for values than for keys. Zeros change no score; in the
    values they give columns of the output that the caller drops.
    """
    if value.shape[-1] == key.shape[-1]:
        return query, key, value
    wanted = max(key.shape[-1], value.shape[-1])
    query, key, value = (
        nn.functional.pad(x, (0, wanted - x.shape[-1])) for x in (query, key, value)
    )
    return query, key, value


def with_sinks(
    output: Float[Tensor, "batch heads queries head_dim"],
    lse: Float[Tensor, "batch heads queries"],
    sinks: Float[Tensor, "heads"],
    caller: str,
) -> Float[Tensor, "batch heads queries head_dim"]:
    """Return the output of attention in which each head's sink takes part in the softmax.

    That is the output without sinks times sigmoid(L - sink).
    """
    if sinks.shape != output.shape[1:2]:
        raise ValueError(
            f"s_aux must have shape ({output.shape[1]},), a sink for each head, "
            f"got {tuple(sinks.shape)} ({caller})"
        )
    kept = torch.sigmoid(lse - sinks[:, None].to(lse.dtype))
    return (output * kept[..., None]).to(output.dtype)


def name_of(module: nn.Module) -> str:
    """Return a module's name for messages: its class and, if it has a config, its model's type."""
    model_type = getattr(getattr(module, "config", None), "model_type", "")
    return f"{type(module).__name__} of {model_type}" if model_type else type(module).__name__


def refuse_unsupported(
    dropout: float,
    attention_mask: object,
    sliding_window: int | None,
    num_keys: int,
    others: dict[str, Any],
    caller: str,
) -> None:
    """Raise ValueError for an argument that would change the result and is not supported."""
    if dropout:
        raise ValueError(
            f"dropout must be 0, got {dropout}: "
            f"set the model's attention_dropout to 0, or call .eval() ({caller})"
        )
    if others.get("output_attentions"):
        raise ValueError(
            f"output_attentions must be False, got True: "
            f"the weights are never stored; take 'eager' ({caller})"
        )
    for name, meaning in REFUSED.items():
        if others.get(name) is not None:
            raise ValueError(
                f"{name} must be None, got {type(others[name]).__name__}: "
                f"there is no support for {meaning} ({caller})"
            )

    # without a mask, or with a causal one, windows and documents would be lost
    if attention_mask is None and sliding_window is not None and num_keys > sliding_window:
        raise ValueError(
            f"attention_mask must hold the window of {sliding_window} among {num_keys} keys, "
            f"got None ({caller})"
        )
    boundaries = others.get("cu_seq_lens_k")
    is_one_document = attention_mask is None or isinstance(attention_mask, CausalMask)
    if is_one_document and boundaries is not None and len(boundaries) > 2:
        raise ValueError(
            f"attention_mask must keep the {len(boundaries) - 1} documents of cu_seq_lens_k apart, "
            f"got None: "
            f"give the model their position_ids and no attention_mask ({caller})"
        )


def check_mask(mask: object, query: Tensor, key: Tensor, caller: str) -> Tensor:
    """Return `mask` expanded over all queries and keys; a PairsMask gives its pairs.

    TypeError unless it is a tensor, ValueError unless it holds bools or floats and broadcasts to
    the scores.
    """
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"attention_mask must be a tensor or None, got {type(mask).__name__} ({caller})"
        )
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise ValueError(
            f"attention_mask must be of dtype bool, True where attended, or of floats, "
            f"got {mask.dtype} ({caller})"
        )
    check_shape(mask, query, key, caller)
    pairs = mask.pairs if isinstance(mask, PairsMask) else mask
    whole = (query.shape[2], key.shape[2])
    return pairs if pairs.shape[2:] == whole else pairs.expand(-1, -1, *whole)


def check_shape(mask: Tensor, query: Tensor, key: Tensor, caller: str) -> None:
    """Raise ValueError unless `mask` broadcasts to the scores, (batch, heads, queries, keys)."""
    batch, heads, num_queries = query.shape[:3]
    sizes = ((1, batch), (1, heads), (1, num_queries), (1, key.shape[2]))
    if mask.ndim != 4 or any(size not in allowed for size, allowed in zip(mask.shape, sizes)):
        raise ValueError(
            f"attention_mask must have shape "
            f"({batch} or 1, {heads} or 1, {num_queries} or 1, {key.shape[2]} or 1), "
            f"got {tuple(mask.shape)} ({caller})"
        )


def pairs_of(mask: Tensor, caller: str) -> Tensor:
    """Return a mask as bools, True where attended; floats are taken as added to the scores.

    ValueError for floats other than 0 and those so low that a key has no weight (LOWEST_BIAS): a
    bias is not supported.
    """
    if mask.dtype == torch.bool:
        return mask
    attended = mask == 0
    biased = ~attended & ~(mask <= LOWEST_BIAS)  # a NaN is biased
    if biased.any():
        raise ValueError(
            f"attention_mask must be of bools, or of floats that are 0 or below {LOWEST_BIAS:g}, "
            f"got "
            f"{mask[biased][0]:g}: there is no support for a bias on the scores ({caller})"
        )
    return attended


@torch.compiler.disable(reason="the number of live tiles depends on the mask's values")
def _block_mask_of(mask: Tensor, may_be_known: bool, caller: str) -> BlockMask:
    """Return the BlockMask of `mask`, from a cache if the tensor has not been written to since.

    `may_be_known` False leaves the cache out. PyTorch counts writes to a tensor, but not those
    through `.data` or a NumPy array that shares its memory: a mask that is refilled so must be
    another tensor each time.
    """
    # a tensor made in inference mode does not count its writes
    if not may_be_known or mask.is_inference():
        return BlockMask.from_dense(pairs_of(mask, caller))
    version, block_mask = _block_masks.get(mask, (None, None))
    if version != mask._version:
        block_mask = BlockMask.from_dense(pairs_of(mask, caller))
        _block_masks[mask] = (mask._version, block_mask)
    return block_mask


def _interfaces() -> tuple[Any, Any]:
    """Return the classes with which Transformers registers attention functions and mask functions.

    ImportError if the package is missing or older than 4.53.
    """
    # By name, so that type checkers do not follow its annotations; it takes seconds to load.
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise ImportError(
            "transformers is not installed: pip install -e '.[hf]' in the repository, "
            "as docs/attention.md says"
        ) from None
    if not hasattr(transformers, "AttentionMaskInterface"):
        raise ImportError(
            f"transformers must be of version 4.53 or later, got {transformers.__version__}"
        )
    return transformers.AttentionInterface, transformers.AttentionMaskInterface
