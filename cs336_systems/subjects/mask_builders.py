"""Build attention under masks that dense kernels do not know, and read what a mask's name says.

A builder of `implementations.REGISTRY` takes the case and the run, and returns a `Built`, or raises
`Unsupported` for a mask that it does not know. Layouts differ (packed documents, a padded batch),
so each `Built` says how inputs are packed and results unpacked, outside the timing.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cs336_systems.attention import (
    BlockMask,
    attention_reference,
    flash_attention,
    flash_attention_varlen,
)
from cs336_systems.attention.dilated import dilated_attention
from cs336_systems.attention.dynamic import choose_keys, mask_chosen, shared_keys_attention
from cs336_systems.attention.masks import parse_mask
from cs336_systems.attention.masks.parse import random_bias
from cs336_systems.bench.spec import Unsupported
from cs336_systems.config import AttentionShape, MaskCase, RunConfig
from cs336_systems.measure.allocations import kept_for_a_case
from cs336_systems.subjects.attention_builders import (
    FLEX_BLOCK,
    Built,
    check_backend,
    compiled_flex,
    first_of,
    flash_attention_4,
    ran,
)


def masked_of(case: Any) -> MaskCase | None:
    """Return the MaskCase that `case` is or has as its `mask_case`; None if it has no mask."""
    return case if isinstance(case, MaskCase) else getattr(case, "mask_case", None)


def shape_of(case: Any) -> AttentionShape:
    """Return the attention shape of a case, which is one itself unless it is a MaskCase."""
    return case.shape if isinstance(case, MaskCase) else case


@kept_for_a_case
def mask_of(case: MaskCase, run: RunConfig) -> BlockMask:
    """Return the mask that `case` names, on the run's device; kept until another case."""
    size = (case.query_block, case.key_block)
    return parse_mask(
        case.mask, seqlen=case.seqlen_q, block_size=size, seed=run.seed, device=run.device
    )


def is_plain(pattern: str) -> bool:
    """Return whether dense kernels know the mask: it is "full" or "causal"."""
    return pattern in ("full", "causal")


def mask_parts(pattern: str) -> tuple[str, str, bool]:
    """Return a mask's kind, its argument, and whether it is causal, from its name.

    The kind is "" for a combination of masks other than causal, which only lists of tiles hold.

    >>> mask_parts("document:60,40+causal"), mask_parts("full")
    (('document', '60,40', True), ('full', '', False))
    >>> mask_parts("document:60,40+window:8")
    ('', '', False)
    """
    parts = pattern.split("+")
    first, *others = [part for part in parts if part != "causal"] or ["causal"]
    kind, _, argument = ("" if others else first).partition(":")
    return kind, argument, "causal" in parts


def document_lengths(case: MaskCase) -> list[int]:
    """Return the lengths of the documents of a case's mask; raise Unsupported if it has none."""
    kind, argument, _ = mask_parts(case.mask)
    if kind != "document":
        raise Unsupported("the mask is not one of documents")
    return [int(length) for length in argument.split(",")]


# Ours


def eager_masked(case: MaskCase, run: RunConfig) -> Built:
    """Return plain PyTorch attention under the mask of tokens."""
    return Built(attend=partial(attention_reference, mask=mask_of(case, run).to_dense()))


def tiled_masked(case: MaskCase, run: RunConfig) -> Built:
    """Return FlashAttention in PyTorch, which walks the mask's lists of tiles."""
    return Built(attend=partial(flash_attention, block_mask=mask_of(case, run), backend="tiled"))


def best_path(case: MaskCase, run: RunConfig, backend: str) -> Built:
    """Return our best path for the mask with the kernels of `backend`.

    Documents use the varlen path, shared keys are gathered, and a dilated mask is a reshape; every
    other mask uses lists of tiles.
    """
    kind, argument, causal = mask_parts(case.mask)
    kernel = ran(kind, run.device)
    if kind == "document":
        ends, longest = _ends(case, run)

        def packed(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return flash_attention_varlen(
                q, k, v, ends, ends, longest, longest, is_causal=causal, backend=backend
            )

        return Built(attend=packed, pack=_pack, unpack=_unpack, kernel=kernel)

    if kind == "dilated":
        segment_length, rate = map(int, argument.split("/"))

        def dilated(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return dilated_attention(
                q, k, v, segment_length, rate, is_causal=causal, backend=backend
            )

        return Built(attend=dilated, kernel=kernel)

    if kind == "shared":
        bias, num_keys = random_bias(case.seqlen_q, 1, run.seed).to(run.device), int(argument)

        def shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return shared_keys_attention(q, k, v, bias, num_keys, is_causal=causal, backend=backend)

        def choose() -> BlockMask:
            return mask_chosen(
                *choose_keys(bias, num_keys), case.seqlen_q, case.seqlen_q, is_causal=causal
            )

        return Built(attend=shared, build_mask=choose, kernel=kernel)

    return lists(case, run, backend)


def lists(case: MaskCase, run: RunConfig, backend: str) -> Built:
    """Return our kernels that walk the mask's lists of tiles, with the kernels of `backend`.

    Masks of documents and of each query's best keys change from call to call, so that the result
    has a `build_mask`.
    """
    size, build_mask = (case.query_block, case.key_block), None
    check_backend(backend, case.shape, run.device, layout="block_mask", block_size=size)
    kind, argument, causal = mask_parts(case.mask)
    if kind == "topk":
        bias = random_bias(case.seqlen_q, 1, run.seed).to(run.device)[:, :, None]
        build_mask = partial(BlockMask.dynamic_topk, bias, int(argument), size)
    elif kind == "document":
        lengths = document_lengths(case)
        build_mask = partial(
            BlockMask.document, lengths, is_causal=causal, block_size=size, device=run.device
        )
    return Built(
        attend=partial(flash_attention, block_mask=mask_of(case, run), backend=backend),
        build_mask=build_mask,
        kernel=ran("lists", run.device),
    )


# The libraries


def torch_varlen(case: MaskCase, run: RunConfig) -> Built:
    """Return PyTorch's attention on packed documents (FlashAttention-2)."""
    from torch.nn.attention.varlen import varlen_attn

    ends, longest = _ends(case, run)
    window = (-1, 0) if mask_parts(case.mask)[2] else (-1, -1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return varlen_attn(q, k, v, ends, ends, longest, longest, window_size=window)

    return Built(attend=attend, pack=_pack, unpack=_unpack)


def _ends(case: MaskCase, run: RunConfig) -> tuple[Tensor, int]:
    """Return cu_seqlens of the packed documents, (documents + 1,) int32, and the longest's length.

    They are made here, so that no call copies them to the device.
    """
    lengths = document_lengths(case)
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(run.device), max(lengths)


def _pack(x: Tensor) -> Tensor:
    """Return x of (1, heads, tokens, head_dim) as packed (tokens, heads, head_dim)."""
    return x[0].transpose(0, 1).contiguous()


def _unpack(x: Tensor) -> Tensor:
    """Return packed x of (tokens, heads, head_dim) as (1, heads, tokens, head_dim)."""
    return x.transpose(0, 1)[None]


def sdpa_padded(case: MaskCase, run: RunConfig) -> Built:
    """Return SDPA on a batch of documents padded to the longest, the cost without packing."""
    lengths = [length for length in document_lengths(case) if length]
    causal, longest = mask_parts(case.mask)[2], max(lengths)
    # (documents, longest): True for real tokens
    exists = (torch.arange(longest) < torch.tensor(lengths)[:, None]).to(run.device)
    # A causal mask hides the padding behind each real query. Without it, padding must be masked.
    key_mask = None if causal else exists[:, None, None].expand(-1, 1, longest, -1)

    def pack(x: Tensor) -> Tensor:
        padded = x.new_zeros(len(lengths), longest, x.shape[1], x.shape[3])
        padded[exists] = x[0].transpose(0, 1)
        return padded.transpose(1, 2)

    def unpack(x: Tensor) -> Tensor:
        return x.transpose(1, 2)[exists].transpose(0, 1)[None]

    attend = partial(F.scaled_dot_product_attention, attn_mask=key_mask, is_causal=causal)
    return Built(attend=attend, pack=pack, unpack=unpack)


def flex_masked(case: MaskCase, run: RunConfig, **options: Any) -> Built:
    """Return compiled FlexAttention with the mask's lists of tiles.

    The token predicate of document masks is arithmetic; other masks look it up in their tiles.
    `options` are FlexAttention's.
    """
    if min(case.query_block, case.key_block) < FLEX_BLOCK:
        raise Unsupported(
            f"FlexAttention's backward has no kernel for mask tiles below {FLEX_BLOCK} "
            "(PyTorch 2.11)"
        )
    mask = mask_of(case, run)
    tiles = mask.to_flex(_predicate(case, mask))
    return Built(attend=partial(compiled_flex(dynamic=False), block_mask=tiles, **options))


def fa4_masked(case: MaskCase, run: RunConfig) -> Built:
    """Return FlashAttention-4 for the masks that it has itself: a window, packed documents.

    Raises Unsupported for other masks.
    """
    kind, argument, causal = mask_parts(case.mask)
    if kind == "window":
        return Built(attend=flash_attention_4(causal=True, window_size=(int(argument) - 1, 0)))
    from flash_attn.cute import flash_attn_varlen_func

    ends, longest = _ends(case, run)

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return first_of(
            flash_attn_varlen_func(
                q,
                k,
                v,
                cu_seqlens_q=ends,
                cu_seqlens_k=ends,
                max_seqlen_q=longest,
                max_seqlen_k=longest,
                causal=causal,
            )
        )

    return Built(attend=packed, pack=_pack, unpack=_unpack)


def _predicate(case: MaskCase, mask: BlockMask) -> Callable[..., Tensor] | None:
    """Return the predicate (batch, head, query, key) of a document mask; None for other masks."""
    kind, _, causal = mask_parts(case.mask)
    if kind != "document":
        return None
    lengths = torch.tensor(document_lengths(case))
    ids = torch.arange(len(lengths)).repeat_interleave(lengths).to(mask.device)
    if causal:
        return lambda batch, head, query, key: (ids[query] == ids[key]) & (query >= key)
    return lambda batch, head, query, key: ids[query] == ids[key]


def sdpa_mask(case: MaskCase, run: RunConfig) -> Built:
    """Return SDPA with a bool mask of (queries, keys), which computes every pair of tokens."""
    return Built(
        attend=partial(F.scaled_dot_product_attention, attn_mask=mask_of(case, run).to_dense())
    )
