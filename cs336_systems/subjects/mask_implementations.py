"""What is measured on a case of attention: `implementations` without a mask or under the causal
one, others here.

`build_case(name, case, run)` returns a `Built`, or raises `Unsupported` with the reason. Layouts
differ (packed documents, a padded batch), so each says how inputs are packed and results unpacked,
outside the timing.
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
from cs336_systems.subjects.implementations import (
    FLEX_BLOCK,
    IMPLEMENTATIONS,
    Built,
    build,
    compiled_flex,
    first_of,
    flash_attention_4,
    ran,
    taken_by,
)


def build_case(name: str, case: Any, run: RunConfig) -> Built:
    """The implementation `name` of what `case` attends, on the run's device; ValueError for an
    unknown name.
    """
    masked = masked_of(case)
    if masked is None:
        return build(name, case, run.device)
    if run.device == "cpu" and name == "flex":
        raise Unsupported(
            "compiled FlexAttention is measured on a GPU: on CPU it compiles anew for each mask"
        )
    if (dense := name.removesuffix("_lists")) in IMPLEMENTATIONS:
        built = build(dense, masked.shape, run.device)  # refuses what does not run here
        if name == dense and is_plain(masked.mask):
            return built
    if name not in BUILDERS:
        raise ValueError(f"implementation must be one of {', '.join(BUILDERS)}, got {name!r}")
    return BUILDERS[name](masked, run)


def masked_of(case: Any) -> MaskCase | None:
    """The mask by name that a case is, or has as its `mask_case`; None where its shape says what is
    attended.
    """
    return case if isinstance(case, MaskCase) else getattr(case, "mask_case", None)


def shape_of(case: Any) -> AttentionShape:
    return case.shape if isinstance(case, MaskCase) else case


@kept_for_a_case
def mask_of(case: MaskCase, run: RunConfig) -> BlockMask:
    """The mask that `case` names, on the run's device."""
    size = (case.query_block, case.key_block)
    return parse_mask(
        case.mask, seqlen=case.seqlen_q, block_size=size, seed=run.seed, device=run.device
    )


def is_plain(pattern: str) -> bool:
    """Whether a mask is one that dense kernels know: none, or causal."""
    return pattern in ("full", "causal")


def mask_parts(pattern: str) -> tuple[str, str, bool]:
    """A mask's kind, its argument, and whether it is causal; of several masks together, which only
    lists hold, no kind.

    >>> mask_parts("document:60,40+causal"), mask_parts("full"),
    mask_parts("document:60,40+window:8")
    (('document', '60,40', True), ('full', '', False), ('', '', False))
    """
    parts = pattern.split("+")
    first, *others = [part for part in parts if part != "causal"] or ["causal"]
    kind, _, argument = ("" if others else first).partition(":")
    return kind, argument, "causal" in parts


def document_lengths(case: MaskCase) -> list[int]:
    """Lengths of the documents of a case's mask; `Unsupported` if it has none."""
    kind, argument, _ = mask_parts(case.mask)
    if kind != "document":
        raise Unsupported("the mask is not one of documents")
    return [int(length) for length in argument.split(",")]


# Ours


def _ours(backend: str, case: MaskCase, run: RunConfig) -> Built:
    """Our best path for the mask: varlen, gathered keys, dilated by reshape; lists for every other."""
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
    return _lists(backend, case, run)


def _lists(backend: str, case: MaskCase, run: RunConfig) -> Built:
    """Our kernels that walk the mask's lists; those of documents and of each query's keys change
    from call to call.
    """
    size, build_mask = (case.query_block, case.key_block), None
    taken_by(backend, case.shape, run.device, layout="block_mask", block_size=size)
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


def _torch_varlen(case: MaskCase, run: RunConfig) -> Built:
    """PyTorch's own packed attention (FlashAttention-2)."""
    if run.device == "cpu" or case.dtype == "float32":
        raise Unsupported("torch.nn.attention.varlen needs CUDA and 16 bits")
    from torch.nn.attention.varlen import varlen_attn

    ends, longest = _ends(case, run)
    window = (-1, 0) if mask_parts(case.mask)[2] else (-1, -1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return varlen_attn(q, k, v, ends, ends, longest, longest, window_size=window)

    return Built(attend=attend, pack=_pack, unpack=_unpack)


def _ends(case: MaskCase, run: RunConfig) -> tuple[Tensor, int]:
    """Where documents begin and end in the packed tokens, on the device once, and the longest one's
    length.
    """
    lengths = document_lengths(case)
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(run.device), max(lengths)


def _pack(x: Tensor) -> Tensor:
    """(1, heads, tokens, head_dim) as packed (tokens, heads, head_dim)."""
    return x[0].transpose(0, 1).contiguous()


def _unpack(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]


def _padded(case: MaskCase, run: RunConfig) -> Built:
    """SDPA on a batch of documents padded to the longest: what a batch costs without packing."""
    lengths = [length for length in document_lengths(case) if length]
    causal, longest = mask_parts(case.mask)[2], max(lengths)
    # (documents, longest)
    exists = (torch.arange(longest) < torch.tensor(lengths)[:, None]).to(run.device)
    # Under the causal mask no real query sees the padding behind it; without, it has to be masked.
    key_mask = None if causal else exists[:, None, None].expand(-1, 1, longest, -1)

    def pack(x: Tensor) -> Tensor:
        padded = x.new_zeros(len(lengths), longest, x.shape[1], x.shape[3])
        padded[exists] = x[0].transpose(0, 1)
        return padded.transpose(1, 2)

    def unpack(x: Tensor) -> Tensor:
        return x.transpose(1, 2)[exists].transpose(0, 1)[None]

    attend = partial(F.scaled_dot_product_attention, attn_mask=key_mask, is_causal=causal)
    return Built(attend=attend, pack=pack, unpack=unpack)


def _flex(case: MaskCase, run: RunConfig, **options: Any) -> Built:
    """FlexAttention, compiled, with the same tile lists; its token predicate is arithmetic where
    the mask has one.
    """
    if min(case.query_block, case.key_block) < FLEX_BLOCK:
        raise Unsupported(
            f"FlexAttention's backward has no kernel for mask tiles below {FLEX_BLOCK} (PyTorch 2.11)"
        )
    mask = mask_of(case, run)
    tiles = mask.to_flex(_predicate(case, mask))
    return Built(attend=partial(compiled_flex(dynamic=False), block_mask=tiles, **options))


def _flash_attention_4(case: MaskCase, run: RunConfig) -> Built:
    """FlashAttention-4 where it has the mask itself: a window, packed documents."""
    kind, argument, causal = mask_parts(case.mask)
    if kind == "window":
        window = {"causal": True, "window_size": (int(argument) - 1, 0)}
        return Built(attend=flash_attention_4(case.shape, run.device, **window))
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
    kind, _, causal = mask_parts(case.mask)
    if kind != "document":
        return None
    lengths = torch.tensor(document_lengths(case))
    ids = torch.arange(len(lengths)).repeat_interleave(lengths).to(mask.device)
    if causal:
        return lambda batch, head, query, key: (ids[query] == ids[key]) & (query >= key)
    return lambda batch, head, query, key: ids[query] == ids[key]


def _token_mask(case: MaskCase, run: RunConfig) -> Built:
    """SDPA with a bool mask of (queries, keys): it computes every pair and drops those that are
    masked.
    """
    return Built(
        attend=partial(F.scaled_dot_product_attention, attn_mask=mask_of(case, run).to_dense())
    )


# under a mask that dense kernels do not know
BUILDERS: dict[str, Callable[[MaskCase, RunConfig], Built]] = {
    "eager": lambda case, run: Built(
        attend=partial(attention_reference, mask=mask_of(case, run).to_dense())
    ),
    "tiled": lambda case, run: Built(
        attend=partial(flash_attention, block_mask=mask_of(case, run), backend="tiled")
    ),
    **{name: partial(_ours, name) for name in ("triton", "hopper")},
    **{f"{name}_lists": partial(_lists, name) for name in ("triton", "hopper")},
    "sdpa_mask": _token_mask,
    "sdpa_padded": _padded,
    "torch_varlen": _torch_varlen,
    "flex": _flex,
    "flex_flash": partial(_flex, kernel_options={"BACKEND": "FLASH"}),
    "fa4": _flash_attention_4,
}
