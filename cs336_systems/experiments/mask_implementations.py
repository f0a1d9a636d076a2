"""The implementations that the mask experiments compare, by name: ours, and what a user would write with a library.

`build_masked(name, case, mask, run)` returns a `MaskedAttention`, or raises `Unsupported` with the reason. Layouts
differ (packed documents, a padded batch), so each says how inputs are packed and results unpacked, outside the timing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cs336_systems.attention import BlockMask, attention_reference, flash_attention
from cs336_systems.attention.dilated import dilated_attention
from cs336_systems.attention.dynamic import choose_keys, mask_chosen, shared_keys_attention
from cs336_systems.attention.masks import parse_mask
from cs336_systems.attention.masks.parse import random_bias
from cs336_systems.config import AttentionShape, MaskCase, RunConfig
from cs336_systems.experiments.implementations import (
    FLEX_BLOCK,
    INTERPRETER_BFLOAT16,
    build,
    compiled_flex,
    kernel_name,
)
from cs336_systems.experiments.spec import Unsupported

Call = Callable[..., Any]


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, kw_only=True)
class MaskedAttention:
    """One implementation under one mask."""

    attend: Call  # (q, k, v) as packed -> output as packed
    pack: Callable[[Tensor], Tensor] = _same  # from (batch, heads, tokens, head_dim)
    unpack: Callable[[Tensor], Tensor] = _same  # back to it
    build_mask: Callable[[], object] | None = None  # what a call with a new mask has to do before, timed apart
    kernel: str = ""  # what really runs


def build_masked(name: str, case: MaskCase, mask: BlockMask, run: RunConfig) -> MaskedAttention:
    """The implementation `name` for `case` and its `mask`, on the run's device; ValueError for an unknown name."""
    if name not in BUILDERS:
        raise ValueError(f"implementation must be one of {', '.join(BUILDERS)}, got {name!r}")
    if name.startswith("triton") and run.device == "cpu" and case.dtype == "bfloat16":
        raise Unsupported(INTERPRETER_BFLOAT16)
    return BUILDERS[name](case, mask, run)


def is_plain(pattern: str) -> bool:
    """Whether a mask is one that dense kernels know: none, or causal."""
    return pattern in ("full", "causal")


def document_lengths(pattern: str) -> list[int]:
    """Lengths of the documents of a mask pattern; `Unsupported` if it has none."""
    for part in pattern.split("+"):
        if part.startswith("document:"):
            return [int(length) for length in part.removeprefix("document:").split(",")]
    raise Unsupported("the mask is not one of documents")


def shape_of(case: MaskCase) -> AttentionShape:
    """`case` under the dense kernels' own masks."""
    return AttentionShape(
        batch=case.batch, heads=case.heads, seqlen_q=case.seqlen_q, seqlen_k=case.seqlen_q, head_dim=case.head_dim,
        is_causal=case.mask == "causal", dtype=case.dtype,
    )  # fmt: skip


def _triton(case: MaskCase, mask: BlockMask, run: RunConfig) -> MaskedAttention:
    """Our best path for the mask: dense, varlen, gathered keys, dilated by reshape; lists for every other."""
    causal = "causal" in case.mask.split("+")
    name, _, argument = case.mask.partition("+")[0].partition(":")
    kernel = _kernel(name, case, run)
    if is_plain(case.mask):
        return MaskedAttention(
            attend=lambda q, k, v: flash_attention(q, k, v, is_causal=causal, backend="triton"),
            kernel=kernel_name("triton", shape_of(case), run.device),
        )
    if name == "document":
        return _varlen(case, causal, kernel, run)
    if name == "dilated":
        segment_length, rate = (int(number) for number in argument.split("/"))

        def dilated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            output = dilated_attention(q, k, v, segment_length, rate, is_causal=causal, backend="triton")
            assert isinstance(output, Tensor)
            return output

        return MaskedAttention(attend=dilated, kernel=kernel)
    if name == "shared":
        bias, num_keys = random_bias(case.seqlen_q, 1, run.seed).to(run.device), int(argument)

        def shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return shared_keys_attention(q, k, v, bias, num_keys, is_causal=causal, backend="triton")

        def choose() -> BlockMask:
            positions, chosen = choose_keys(bias, num_keys)
            return mask_chosen(positions, chosen, case.seqlen_q, case.seqlen_q, is_causal=causal)

        return MaskedAttention(attend=shared, build_mask=choose, kernel=kernel)
    return _lists(case, mask, run)


def _lists(case: MaskCase, mask: BlockMask, run: RunConfig) -> MaskedAttention:
    """Our kernels that walk the mask's lists."""
    return MaskedAttention(
        attend=lambda q, k, v: flash_attention(q, k, v, block_mask=mask, backend="triton"),
        build_mask=_mask_builder(case, run),
        kernel=_kernel("lists", case, run),
    )


def _mask_builder(case: MaskCase, run: RunConfig) -> Callable[[], BlockMask] | None:
    """Building the mask on the device, for masks that change from call to call."""
    size = (case.query_block, case.key_block)
    if case.mask.startswith("topk:"):
        bias = random_bias(case.seqlen_q, 1, run.seed).to(run.device)[:, :, None]
        return lambda: BlockMask.dynamic_topk(bias, int(case.mask.removeprefix("topk:")), size)
    if case.mask.startswith("document:"):
        lengths, causal = document_lengths(case.mask), case.mask.endswith("+causal")
        return lambda: BlockMask.document(lengths, is_causal=causal, block_size=size, device=run.device)
    return None


def _kernel(what: str, case: MaskCase, run: RunConfig) -> str:
    """What ran, for the record; the interpreter says so first."""
    return what if run.device == "cuda" else f"interpreter {what}"


def _varlen(case: MaskCase, causal: bool, kernel: str, run: RunConfig) -> MaskedAttention:
    from cs336_systems.attention import flash_attention_varlen

    cu_seqlens, longest = _cu_seqlens(case)
    ends = cu_seqlens.to(run.device)  # once, as peers have them: a copy in each call would stall the host

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash_attention_varlen(q, k, v, ends, ends, longest, longest, is_causal=causal, backend="triton")

    return MaskedAttention(attend=attend, pack=_pack, unpack=_unpack, kernel=kernel)


def _torch_varlen(case: MaskCase, mask: BlockMask, run: RunConfig) -> MaskedAttention:
    """PyTorch's own packed attention (FlashAttention-2)."""
    lengths = document_lengths(case.mask)
    if run.device == "cpu" or case.dtype == "float32":
        raise Unsupported("torch.nn.attention.varlen needs CUDA and 16 bits")
    from torch.nn.attention.varlen import varlen_attn

    cu_seqlens = _cu_seqlens(case)[0].to(run.device)
    window = (-1, 0) if case.mask.endswith("+causal") else (-1, -1)
    return MaskedAttention(
        attend=lambda q, k, v: varlen_attn(
            q, k, v, cu_seqlens, cu_seqlens, max(lengths), max(lengths), window_size=window
        ),
        pack=_pack,
        unpack=_unpack,
    )


def _cu_seqlens(case: MaskCase) -> tuple[Tensor, int]:
    lengths = document_lengths(case.mask)
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), max(lengths)


def _pack(x: Tensor) -> Tensor:
    """(1, heads, tokens, head_dim) as packed (tokens, heads, head_dim)."""
    return x[0].transpose(0, 1).contiguous()


def _unpack(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]


def _padded(case: MaskCase, mask: BlockMask, run: RunConfig) -> MaskedAttention:
    """SDPA on a batch of documents padded to the longest: what a batch costs without packing."""
    lengths = [length for length in document_lengths(case.mask) if length]
    causal, longest = case.mask.endswith("+causal"), max(lengths)
    counts = torch.tensor(lengths)
    document = torch.arange(len(lengths)).repeat_interleave(counts).to(run.device)
    position = torch.cat([torch.arange(length) for length in lengths]).to(run.device)
    # Under the causal mask no real query sees the padding behind it; without, it has to be masked.
    exists = (torch.arange(longest) < counts[:, None])[:, None, None].to(run.device)
    key_mask = None if causal else exists.expand(-1, 1, longest, -1)

    def pack(x: Tensor) -> Tensor:
        padded = x.new_zeros(len(lengths), longest, x.shape[1], x.shape[3])
        padded[document, position] = x[0].transpose(0, 1)
        return padded.transpose(1, 2)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=key_mask, is_causal=causal)

    return MaskedAttention(
        attend=attend, pack=pack, unpack=lambda x: x.transpose(1, 2)[document, position].transpose(0, 1)[None]
    )


def _eager(case: MaskCase, mask: BlockMask, run: RunConfig) -> MaskedAttention:
    dense = mask.to_dense()
    return MaskedAttention(attend=lambda q, k, v: attention_reference(q, k, v, mask=dense))


def _tiled(case: MaskCase, mask: BlockMask, run: RunConfig) -> MaskedAttention:
    return MaskedAttention(attend=lambda q, k, v: flash_attention(q, k, v, block_mask=mask, backend="tiled"))


def _sdpa_mask(case: MaskCase, mask: BlockMask, run: RunConfig) -> MaskedAttention:
    """SDPA with a bool mask of (queries, keys): it computes every pair and drops those that are masked."""
    dense = mask.to_dense()
    return MaskedAttention(
        attend=lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense)
    )


def _dense(name: str) -> Callable[[MaskCase, BlockMask, RunConfig], MaskedAttention]:
    def builder(case: MaskCase, mask: BlockMask, run: RunConfig) -> MaskedAttention:
        if not is_plain(case.mask):
            raise Unsupported(f"{name} takes no mask but the causal one")
        shape = shape_of(case)
        return MaskedAttention(attend=build(name, shape, run.device), kernel=kernel_name(name, shape, run.device))

    return builder


def _flex(case: MaskCase, mask: BlockMask, run: RunConfig) -> MaskedAttention:
    """FlexAttention, compiled, with the same tile lists; its token predicate is arithmetic where the mask has one."""
    if run.device == "cpu":
        raise Unsupported("compiled FlexAttention is measured on a GPU: on CPU it compiles anew for each mask")
    if case.mask == "full":
        return MaskedAttention(attend=build("flex", shape_of(case), run.device))
    if min(case.query_block, case.key_block) < FLEX_BLOCK:
        raise Unsupported(f"FlexAttention's backward has no kernel for mask tiles below {FLEX_BLOCK} (PyTorch 2.11)")
    flex, block_mask = compiled_flex(dynamic=False), mask.to_flex(_predicate(case, mask))
    return MaskedAttention(attend=lambda q, k, v: flex(q, k, v, block_mask=block_mask))


def _predicate(case: MaskCase, mask: BlockMask) -> Call | None:
    causal = "causal" in case.mask.split("+")
    if case.mask == "causal":
        return lambda batch, head, query, key: query >= key
    if case.mask.startswith("document:"):
        lengths = torch.tensor(document_lengths(case.mask))
        ids = torch.arange(len(lengths)).repeat_interleave(lengths).to(mask.device)
        if causal:
            return lambda batch, head, query, key: (ids[query] == ids[key]) & (query >= key)
        return lambda batch, head, query, key: ids[query] == ids[key]
    return None


BUILDERS: dict[str, Callable[[MaskCase, BlockMask, RunConfig], MaskedAttention]] = {
    "eager": _eager,
    "tiled": _tiled,
    "triton": _triton,
    "triton_lists": _lists,
    "hopper": _dense("hopper"),
    "sdpa_flash": _dense("sdpa_flash"),
    "sdpa_cudnn": _dense("sdpa_cudnn"),
    "sdpa_mask": _sdpa_mask,
    "sdpa_padded": _padded,
    "torch_varlen": _torch_varlen,
    "flex": _flex,
}


def mask_of(case: MaskCase, device: str, seed: int) -> BlockMask:
    """The mask that `case` names, on `device`."""
    size = (case.query_block, case.key_block)
    return parse_mask(case.mask, seqlen=case.seqlen_q, block_size=size, seed=seed, device=device)
