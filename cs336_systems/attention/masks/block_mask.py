"""`BlockMask`: which queries attend which keys, as lists of tiles that a kernel walks.

    mask = BlockMask.document([1000, 0, 3096], is_causal=True)
    flash_attention(q, k, v, block_mask=mask)

The (queries, keys) plane of each batch entry and head is cut into tiles of `block_size`. A tile is
dead (no pair attended: in no list, never read), full (every pair attended: no mask is read) or
partial (its pairs are bits). For the forward and dQ, each row of tiles lists its key tiles. For dK
and dV, each column of tiles lists its query tiles.

The fields of `TileLists` are the layout: int32, contiguous, on one device, for a mask of b = batch
or 1 and h = query heads or 1 (1 broadcasts). Lists ascend, and are 0 behind the last entry. All but
`kv_tokens`, `q_tokens` and `token_bits` have the names of torch's FlexAttention. Query row r of a
tile attends its key column c where

    token_bits[kv_tokens[b, h, row, slot], r, c // 32] >> (c % 32) & 1

Tiles with equal tokens may share a pattern: a causal mask stores one triangle, whatever its length.
A tile that the end of the queries or keys cuts is never full, and its bits past the end are 0: a
loop over full tiles needs no bounds.

The kernels of `triton` and `hopper` walk the lists; the other back ends attend through
`to_dense()`.

Every constructor checks its arguments and calls `_make`, which finds the mask's pattern in
`patterns.py` by its name, classifies the tiles and lists them. Under torch.compile that is one
operator, and the compiler does not know the widths of the lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cs336_systems.attention.checks import (
    FLOATING_DTYPES,
    check_count,
    check_flag,
    check_tensor,
    has_values,
    kind_of,
)
from cs336_systems.attention.masks import patterns
from cs336_systems.attention.masks.tiles import (
    FULL,
    BlockSize,
    Plane,
    TileLists,
    check_block_size,
    combine,
    count_attended,
    num_blocks,
    unpack_tokens,
    words_per_row,
)
from cs336_systems.measure.stages import stage

Device = torch.device | str
DenseForm = Literal["full", "causal"]
DEFAULT_BLOCK = 128
# A list costs an indirect load for each tile, so a mask that skips little is slower than dense
# attention. On an H100 (`block_sparse`: S=16384, d=128, forward and backward of `hopper`) lists of
# nine tenths of the tiles take as long as dense attention; all tiles take 6 % longer.
# `doctor --mask` says on which side a mask is. Only exactly full and causal masks have a dense
# kernel to give way to (`dense_form`).
MAX_LIST_DENSITY = 0.9
# Packed kernels take a mask of documents whose lengths, each weighted by its tokens, are at least
# this on average. Of 32,768 causal tokens on an H200 (triton 3.6.0, 2026-11-29, both passes of
# `hopper`) lists take 1.03 to 1.11 times the packed kernels' time where documents have 936 tokens
# on average, weighted 1,700; 0.88 to 0.96 times with 512 tokens each; 0.74 to 0.84 with 256, as
# packed tiles begin at each document.
MIN_PACKED_LENGTH = 1024


class PackedForm(NamedTuple):
    """Documents that a mask consists of: what `flash_attention_varlen` takes in place of lists."""

    # of consecutive documents, of one batch entry after the other; for a mask of one batch entry
    # the documents of each
    lengths: tuple[int, ...]
    is_causal: bool
    cu_seqlens: Int[Tensor, " documents_plus_1"]  # int32, on the mask's device

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(self.lengths, default=0)


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockMask:
    """Which queries attend which keys, as lists of tiles; made by the class methods.

    `a & b` attends the pairs that both masks attend, `a | b` those that at least one attends.

    TileLists put together by hand must agree with each other: kernels follow them unchecked. Shapes
    are checked. Values are checked on the CPU only: that listed tiles and patterns exist, and that
    a line lists no tile twice. On a GPU, reading them would stall the host, and they are trusted.
    TypeError or ValueError where a check fails.
    """

    lists: TileLists  # walked by the kernels
    block_size: BlockSize  # query rows and key columns of a tile, powers of two from 16 on
    seq_lengths: tuple[int, int]  # queries and keys, in tokens
    # The forms that a constructor has found, and the versions of the lists that they hold for.
    _found: tuple[DenseForm | None, PackedForm | None, tuple[int, ...]] | None = field(
        default=None, init=False, repr=False
    )

    def __post_init__(self) -> None:
        """Check the fields, and copy lists of inference mode out of it."""
        check_block_size(self.block_size)
        if not isinstance(self.lists, TileLists):
            raise TypeError(f"BlockMask.lists must be TileLists, got {type(self.lists).__name__}")
        leading = self.lists.kv_num_blocks.shape[:2]
        bits = (None, self.block_size[0], words_per_row(self.block_size[1]))
        num_patterns = len(self._check("token_bits", bits))
        tiles = [
            num_blocks(seqlen, block) for seqlen, block in zip(self.seq_lengths, self.block_size)
        ]
        whole = [seqlen // block for seqlen, block in zip(self.seq_lengths, self.block_size)]

        # the lists of key tiles in each row of tiles, then of query tiles in each column
        for side, lines, other in (("kv", tiles[0], 1), ("q", tiles[1], 0)):
            for prefix, existing in (("", tiles[other]), ("full_", whole[other])):
                indices = self._check(
                    f"{prefix}{side}_indices", (*leading, lines, None), max(0, existing - 1)
                )
                most = min(existing, indices.shape[3])
                self._check(f"{prefix}{side}_num_blocks", (*leading, lines), most)
            self._check(
                f"{side}_tokens", getattr(self.lists, f"{side}_indices").shape, num_patterns - 1
            )
            self._check_listed_once(side, tiles[other])

        # Autograd saves no tensor of inference mode, and a mask made in an evaluation may be used
        # in training later.
        if not torch.compiler.is_compiling() and self.lists.kv_num_blocks.is_inference():
            with torch.inference_mode(False):
                object.__setattr__(self, "lists", TileLists(*(x.clone() for x in self.lists)))

    if not TYPE_CHECKING:  # a type checker would take any name for a list

        def __getattr__(self, name: str) -> Tensor:
            """Return a list by its name, as torch's FlexAttention has them: `mask.kv_indices`."""
            if name in TileLists._fields:
                return getattr(self.lists, name)
            raise AttributeError(f"BlockMask has no attribute {name!r}")

    def _check(self, name: str, shape: Sequence[int | None], largest: int | None = None) -> Tensor:
        """Return the list `name`, or raise unless it is int32, contiguous and of `shape`.

        It must be on the mask's device. None in `shape` stands for any length from 1 on. If the
        host can read the values, they must be from 0 to `largest`: kernels index with them
        unchecked.
        """
        device = self.device
        tensor = check_tensor(f"BlockMask.{name}", getattr(self.lists, name), dtypes=(torch.int32,))
        if tensor.ndim != len(shape) or any(
            actual != wanted if wanted is not None else actual < 1
            for actual, wanted in zip(tensor.shape, shape)
        ):
            wanted_shape = ", ".join(
                "at least 1" if length is None else str(length) for length in shape
            )
            raise ValueError(
                f"BlockMask.{name} must have shape ({wanted_shape}), got {tuple(tensor.shape)}"
            )
        if tensor.device != device or not tensor.is_contiguous():
            raise ValueError(
                f"BlockMask.{name} must be contiguous on {device}, "
                f"got strides {tensor.stride()} on {tensor.device}"
            )
        if largest is not None and tensor.numel() and has_values(tensor):
            least, most = (int(x) for x in tensor.aminmax())
            if least < 0 or most > largest:
                raise ValueError(
                    f"BlockMask.{name} must have values from 0 to {largest}, got {least} to {most}"
                )
        return tensor

    def _check_listed_once(self, side: str, existing: int) -> None:
        """Raise ValueError if a line of tiles lists one of its `existing` tiles twice.

        Kernels would add such a tile twice, and `to_dense` would not show it. Lists whose values
        the host cannot read pass unchecked.
        """
        indices, counts = (
            [getattr(self.lists, f"{prefix}{side}_{name}") for prefix in ("", "full_")]
            for name in ("indices", "num_blocks")
        )
        if not indices[0].numel() or not all(map(has_values, (*indices, *counts))):
            return

        # how often each tile is listed; the last place counts slots behind a list's end
        times = indices[0].new_zeros((*indices[0].shape[:3], existing + 1))
        for listed, count in zip(indices, counts):
            is_entry = torch.arange(listed.shape[3], device=listed.device) < count[..., None]
            places = torch.where(is_entry, listed, existing).long()
            times.scatter_add_(3, places, torch.ones_like(listed))
        if existing and int(times[..., :existing].max()) > 1:
            raise ValueError(
                f"BlockMask.{side}_indices and full_{side}_indices must list each tile "
                "of a line once, got one twice"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a file holds."""
        return {
            "lists": self.lists,
            "block_size": self.block_size,
            "seq_lengths": self.seq_lengths,
            "dense_form": self.dense_form,
            "packed_form": self.packed_form and self.packed_form[:2],
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a mask from a copy or a file, with all checks of a mask made by hand.

        `torch.load` reads files of any origin.
        """
        for name in ("lists", "block_size", "seq_lengths"):
            object.__setattr__(self, name, state[name])
        object.__setattr__(self, "_found", None)
        self.__post_init__()
        if self.device.type == "meta" or torch.compiler.is_compiling():  # no values to check it by
            self._remember_forms(state["dense_form"], None)
            return
        dense = None if state["dense_form"] is None else self._find_dense_form()
        packed = None
        if state.get("packed_form") is not None:
            lengths, is_causal = state["packed_form"]
            packed = self._packed_form(check_document_lengths(lengths), bool(is_causal))
            if packed is not None and not self._has_documents(packed):
                raise ValueError("packed_form must be that of the lists, got other documents")
        self._remember_forms(dense, packed)

    # Constructors

    @classmethod
    def from_dense(
        cls, mask: Bool[Tensor, "... queries keys"], block_size: int | BlockSize = DEFAULT_BLOCK
    ) -> BlockMask:
        """Return the mask of a bool tensor that is True where a query attends a key.

        `mask` is (queries, keys) or (batch or 1, heads or 1, queries, keys).
        """
        mask = _four_dimensions("mask", mask, "queries, keys", (torch.bool,))
        return cls._make("dense", _plane(mask.shape[:2], mask.shape[2:], block_size), [mask])

    @classmethod
    def from_blocks(
        cls,
        blocks: Bool[Tensor, "... query_blocks key_blocks"],
        block_size: int | BlockSize = DEFAULT_BLOCK,
        *,
        seq_lengths: tuple[int, int] | None = None,
        is_causal: bool = False,
    ) -> BlockMask:
        """Return the mask of whole tiles where `blocks` is True.

        `blocks` is bool, (query_blocks, key_blocks) or (batch or 1, heads or 1, query_blocks,
        key_blocks). `seq_lengths` default to whole tiles; other lengths must be cut into just as
        many. `is_causal` also drops the pairs above the diagonal, from the top left. No (queries,
        keys) tensor is made.
        """
        blocks = _four_dimensions("blocks", blocks, "query_blocks, key_blocks", (torch.bool,))
        lengths = check_lengths(blocks, check_block_size(block_size), seq_lengths)
        plane = _plane(blocks.shape[:2], lengths, block_size)
        return cls._make("blocks", plane, [blocks], check_flag("is_causal", is_causal))

    @classmethod
    def from_mask_mod(
        cls,
        mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        batch: int = 1,
        heads: int = 1,
        block_size: int | BlockSize = DEFAULT_BLOCK,
        device: Device = "cpu",
    ) -> BlockMask:
        """Return the mask of FlexAttention's `mask_mod(batch, head, query, key)`.

        This is the reverse of `to_flex`. The function gets scalar index tensors under vmap, as from
        torch's `create_mask`. (That one counts the parameters, and takes a function of five for a
        score's.) Every pair is a bool meanwhile: O(queries · keys) memory.
        """
        if not callable(mask_mod):
            raise TypeError(f"mask_mod must be callable, got {mask_mod!r}")
        lengths = check_seqlens(seqlen_q, seqlen_k)
        rows, _ = check_block_size(block_size)
        leading = check_count("batch", batch, 1), check_count("heads", heads, 1)
        mask = torch.ones(*leading, *lengths, dtype=torch.bool, device=device)

        # map over keys, then queries, heads and batch entries
        attends: Any = mask_mod
        for mapped in (
            (None, None, None, 0),
            (None, None, 0, None),
            (None, 0, None, None),
            (0, None, None, None),
        ):
            attends = torch.vmap(attends, in_dims=mapped)

        # evaluate a row of tiles at a time
        batches, all_heads, queries, keys = (
            torch.arange(count, device=device) for count in mask.shape
        )
        if mask.numel():
            parts = [
                attends(batches, all_heads, part, keys).expand(*leading, -1, -1)
                for part in queries.split(rows)
            ]
            mask = torch.cat(parts, dim=2)
        return cls.from_dense(mask, block_size)

    @classmethod
    def causal(
        cls,
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        bottom_right: bool = False,
        block_size: int | BlockSize = DEFAULT_BLOCK,
        device: Device = "cpu",
    ) -> BlockMask:
        """Return the mask in which query i attends keys j <= i.

        With `bottom_right` these are j <= i + seqlen_k - seqlen_q, as in decoding with a cache.
        With more queries than keys the first seqlen_q - seqlen_k rows then have no key. `seqlen_k`
        defaults to `seqlen_q`.
        """
        lengths = check_seqlens(seqlen_q, seqlen_k)
        shift = lengths[1] - lengths[0] if check_flag("bottom_right", bottom_right) else 0
        return cls._make(
            "band", _plane((1, 1), lengths, block_size), device, 0, sum(lengths), shift
        )

    @classmethod
    def sliding_window(
        cls,
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        window: int,
        is_causal: bool = True,
        bottom_right: bool = False,
        block_size: int | BlockSize = DEFAULT_BLOCK,
        device: Device = "cpu",
    ) -> BlockMask:
        """Return the mask in which query i attends its `window` most recent keys, its own included.

        These are the keys with 0 <= i - j < window, without `is_causal` those with |i - j| <
        window. `bottom_right` adds seqlen_k - seqlen_q to i. `seqlen_k` defaults to `seqlen_q`.
        """
        lengths = check_seqlens(seqlen_q, seqlen_k)
        # a wider window than the longest distance changes nothing
        window = min(check_count("window", window, 1, most=None), 1 + sum(lengths))
        shift = lengths[1] - lengths[0] if check_flag("bottom_right", bottom_right) else 0
        low = 0 if check_flag("is_causal", is_causal) else 1 - window
        return cls._make(
            "band", _plane((1, 1), lengths, block_size), device, low, window - 1, shift
        )

    @classmethod
    def prefix(
        cls,
        lengths: Int[Tensor, "... queries"],
        seqlen_k: int,
        *,
        block_size: int | BlockSize = DEFAULT_BLOCK,
    ) -> BlockMask:
        """Return the mask in which query i attends the first lengths[i] of `seqlen_k` keys.

        `lengths` is int32 or int64, (queries,) or (batch or 1, heads or 1, queries).
        """
        shapes = {1: "(queries,)", 3: "(batch or 1, heads or 1, queries)"}
        lengths = check_tensor("lengths", lengths, shapes, (torch.int32, torch.int64))
        lengths = lengths if lengths.ndim == 3 else lengths[None, None]
        plane = _plane(
            lengths.shape[:2], (lengths.shape[2], check_count("seqlen_k", seqlen_k)), block_size
        )
        return cls._make("prefix", plane, [lengths])

    @classmethod
    def document(
        cls,
        lengths: Sequence[int] | Int[Tensor, " documents"] | None = None,
        *,
        ids: Int[Tensor, "... tokens"] | None = None,
        is_causal: bool = False,
        block_size: int | BlockSize = DEFAULT_BLOCK,
        device: Device | None = None,
    ) -> BlockMask:
        """Return the mask in which tokens attend the tokens of their own document.

        Documents are given by `lengths`, in their order (0 allowed), or by an id for each token:
        `ids` is (tokens,) or (batch, tokens), and equal ids are one document, wherever they stand.
        `is_causal` also drops the pairs above the diagonal. `device` defaults to the CPU for
        lengths, and for ids to theirs. Lengths in a tensor are read on the host, which
        torch.compile cannot trace.
        """
        check_flag("is_causal", is_causal)
        if (lengths is None) == (ids is None):
            raise ValueError("document needs either lengths or ids")
        if ids is None:
            assert lengths is not None
            found = check_document_lengths(lengths)
            plane = _plane((1, 1), (sum(found), sum(found)), block_size)
            mask = cls._make("documents", plane, device or "cpu", is_causal, *found)
            mask._remember_forms(mask.dense_form, mask._packed_form(found, is_causal))
            return mask
        ids = check_tensor(
            "ids", ids, {1: "(tokens,)", 2: "(batch, tokens)"}, (torch.int32, torch.int64)
        )
        ids = (ids if ids.ndim == 2 else ids[None]).to(device or ids.device)
        plane = _plane((len(ids), 1), (ids.shape[1], ids.shape[1]), block_size)
        mask = cls._make("documents", plane, [ids[:, None]], is_causal)
        if not torch.compiler.is_compiling():
            lengths = _consecutive_lengths(ids)
            packed = None if lengths is None else mask._packed_form(lengths, is_causal)
            mask._remember_forms(mask.dense_form, packed)
        return mask

    @classmethod
    def dilated(
        cls,
        seqlen: int,
        *,
        segment_length: int,
        dilation_rate: int,
        heads: int | None = None,
        is_causal: bool = False,
        block_size: int | BlockSize = DEFAULT_BLOCK,
        device: Device = "cpu",
    ) -> BlockMask:
        """Return the mask in which tokens of one segment and phase attend each other.

        This is the mask, and the oracle, of `dilated_attention`. The phase is the position in the
        segment modulo `dilation_rate`. With `heads`, head h keeps only the tokens of phase
        h % dilation_rate, and its other rows have no key: LongNet's form (Ding et al. 2023, section
        2.3).
        """
        check_count("seqlen", seqlen)
        if heads is not None:
            check_count("heads", heads, 1)

        # Longer segments than the sequence are one. Higher rates than the larger of segment and
        # heads leave a phase of its own to each token and each head.
        segment = min(check_count("segment_length", segment_length, 1, most=None), max(1, seqlen))
        rate = min(
            check_count("dilation_rate", dilation_rate, 1, most=None), max(segment, heads or 1)
        )
        plane = _plane((1, heads or 1), (seqlen, seqlen), block_size)
        causal = check_flag("is_causal", is_causal)
        return cls._make("dilated", plane, device, segment, rate, heads is not None, causal)

    @classmethod
    def random_blocks(
        cls,
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        density: float,
        seed: int = 0,
        batch: int = 1,
        heads: int = 1,
        block_size: int | BlockSize = DEFAULT_BLOCK,
        device: Device = "cpu",
    ) -> BlockMask:
        """Return the mask of random whole tiles, `density` of each row of tiles.

        Each row of tiles of each batch entry and head keeps round(density * key_blocks) tiles, at
        least one. They are drawn on the CPU, so that a seed means the same mask on every device.
        """
        check_draw(density, seed, batch, heads)
        plane = _plane((batch, heads), check_seqlens(seqlen_q, seqlen_k), block_size)
        return cls._make(
            "random_blocks", plane, device, max(1, round(density * plane.shape[3])), seed
        )

    @classmethod
    def random_tokens(
        cls,
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        density: float,
        seed: int = 0,
        batch: int = 1,
        heads: int = 1,
        block_size: int | BlockSize = DEFAULT_BLOCK,
        device: Device = "cpu",
    ) -> BlockMask:
        """Return the mask in which each pair is attended independently with probability `density`.

        At usual densities no tile is dead, so no kernel gains from skipping. Pairs are drawn on the
        CPU, so that a seed means the same mask on every device.
        """
        check_draw(density, seed, batch, heads)
        plane = _plane((batch, heads), check_seqlens(seqlen_q, seqlen_k), block_size)
        number = torch.tensor(density, dtype=torch.float64, device=device)
        return cls._make("random_tokens", plane, [number], seed)

    @classmethod
    def topk_blocks(
        cls,
        scores: Float[Tensor, "... query_blocks key_blocks"],
        num_kept: int,
        block_size: int | BlockSize = DEFAULT_BLOCK,
        *,
        seq_lengths: tuple[int, int] | None = None,
        is_causal: bool = False,
    ) -> BlockMask:
        """Return the mask of the `num_kept` tiles of highest score in each row of tiles.

        `scores` is (query_blocks, key_blocks) or (batch or 1, heads or 1, query_blocks,
        key_blocks). A row of fewer tiles keeps all. With `is_causal` only tiles with a visible pair
        compete, and pairs above the diagonal are dropped. Tiles of score -inf are never kept; of
        equal scores the earlier tile is. `seq_lengths` are as in `from_blocks`.
        """
        scores = _four_dimensions("scores", scores, "query_blocks, key_blocks")
        lengths = check_lengths(scores, check_block_size(block_size), seq_lengths)
        kept = min(check_count("num_kept", num_kept, most=None), scores.shape[3])
        plane = _plane(scores.shape[:2], lengths, block_size)
        return cls._make("top_blocks", plane, [scores], kept, check_flag("is_causal", is_causal))

    @classmethod
    def dynamic_topk(
        cls,
        bias: Float[Tensor, "... queries_or_1 keys"],
        num_keys: int,
        block_size: int | BlockSize = DEFAULT_BLOCK,
        *,
        seqlen_q: int | None = None,
        is_causal: bool = True,
    ) -> BlockMask:
        """Return the mask in which each query attends the `num_keys` keys of highest bias it sees.

        `bias` is (queries or 1, keys) or (batch or 1, heads or 1, queries or 1, keys). All
        `seqlen_q` queries (default: as many as keys) share a single row. With `is_causal` a query
        sees keys j <= i, and its choice depends on the bias of these keys alone. Of fewer than
        `num_keys` keys all are attended, but keys of bias -inf never are. One row of tiles is
        ranked at a time, to save memory.

        Source: flash dynamic-mask attention (SmallDoge, 2025).
        """
        bias = _four_dimensions("bias", bias, "queries or 1, keys")
        rows, seqlen_k = bias.shape[2:]
        seqlen_q = check_count(
            "seqlen_q", (seqlen_k if rows == 1 else rows) if seqlen_q is None else seqlen_q
        )
        if rows not in (1, seqlen_q):
            raise ValueError(f"bias must have 1 row or seqlen_q={seqlen_q}, got {rows}")
        kept = min(check_count("num_keys", num_keys, most=None), seqlen_k)
        plane = _plane(bias.shape[:2], (seqlen_q, seqlen_k), block_size)
        return cls._make("top_keys", plane, [bias], kept, check_flag("is_causal", is_causal))

    @classmethod
    def _make(
        cls, pattern: str, plane: Plane, data: list[Tensor] | Device, *numbers: int
    ) -> BlockMask:
        """Return the mask of `patterns.<pattern>(plane, data, *numbers)`.

        `data` is the pattern's tensors, or a device for a pattern that reads none.
        """
        if not isinstance(data, list):
            data = [torch.empty(0, dtype=torch.int32, device=data)]
        if data[0].is_meta:
            raise ValueError(
                "a mask must be made on a device whose tensors have values; "
                "it may move .to('meta') then"
            )
        leading, lengths, block_size = plane
        if torch.compiler.is_compiling():
            lists = opaque_lists(
                pattern, data, leading, lengths, block_size, [int(number) for number in numbers]
            )
        else:
            with stage("mask_build"):
                lists = make_lists(pattern, data, leading, lengths, block_size, numbers)
        mask = cls(lists=TileLists(*lists), block_size=block_size, seq_lengths=lengths)
        if not torch.compiler.is_compiling():
            mask._remember_forms(mask._find_dense_form(), None)
        return mask

    @property
    def dense_form(self) -> DenseForm | None:
        """ "full" or "causal" if the mask is known to be exactly that, else None.

        The dense kernels then serve it. Constructors find the form, but not under torch.compile,
        which knows no values. It is None for lists that were put together by hand, or that have
        been written into since. A compiled function does not notice writes.
        """
        # torch.compile guards the fields that it has read of a mask, and does not know versions.
        if torch.compiler.is_compiling() or self._is_as_found():
            return None if self._found is None else self._found[0]
        return None

    @property
    def packed_form(self) -> PackedForm | None:
        """The documents that the mask is known to consist of, if packed kernels serve it; else None.

        `document` finds the form, of consecutive documents of at least MIN_PACKED_LENGTH tokens on
        weighted average, and `&` with a causal mask keeps it. It is None in the cases in which
        `dense_form` is, and under torch.compile, which would compile anew for other documents.
        """
        if torch.compiler.is_compiling() or not self._is_as_found():
            return None
        return None if self._found is None else self._found[1]

    def _is_as_found(self) -> bool:
        """Return whether the lists are those that the forms were found for."""
        return self._found is not None and self._found[2] == self._versions()

    def _remember_forms(self, dense: DenseForm | None, packed: PackedForm | None) -> None:
        """Note the forms of the lists as they are now; nothing under torch.compile."""
        known = (dense is not None or packed is not None) and not torch.compiler.is_compiling()
        object.__setattr__(self, "_found", (dense, packed, self._versions()) if known else None)

    def _packed_form(self, lengths: Sequence[int], is_causal: bool) -> PackedForm | None:
        """Return the form of consecutive documents of these `lengths`, over all batch entries.

        None for shorter documents than MIN_PACKED_LENGTH. ValueError unless the documents fill the
        mask's batch entries.
        """
        if torch.compiler.is_compiling():
            return None
        tokens = self.shape[0] * self.seq_lengths[0]
        if sum(lengths) != tokens or self.seq_lengths[0] != self.seq_lengths[1]:
            raise ValueError(
                f"documents must have the mask's {tokens} tokens in all, got {sum(lengths)}"
            )
        if sum(length * length for length in lengths) < MIN_PACKED_LENGTH * max(1, tokens):
            return None
        ends = torch.tensor((0, *lengths)).cumsum(0).to(self.device, torch.int32)
        return PackedForm(tuple(lengths), is_causal, ends)

    def _has_documents(self, packed: PackedForm) -> bool:
        """Return whether the mask attends the pairs of these documents, and no other."""
        batch, heads, tokens, _ = self.shape
        if heads != 1:
            return False
        numbers = torch.arange(len(packed.lengths)).repeat_interleave(torch.tensor(packed.lengths))
        ids = numbers.view(batch, tokens).to(self.device)
        same = BlockMask.document(ids=ids, is_causal=packed.is_causal, block_size=self.block_size)
        # their lists may number equal patterns in another order
        maps = self.lists.tile_map(), same.lists.tile_map()
        common = count_attended(combine(*maps, self.block_size, either=False), self.block_size)
        return common == self.num_attended == same.num_attended

    def _versions(self) -> tuple[int, ...]:
        """Return how often each list has been written into, as autograd counts it."""
        return tuple([x._version for x in self.lists])

    def _find_dense_form(self) -> DenseForm | None:
        """Return "full" or "causal" (top left) if every batch entry and head is exactly that.

        Else return None. The host knows the widths of the lists. They rule out nearly all other
        masks without a wait for the device.
        """
        queries, keys = self.seq_lengths
        if not math.prod(self.shape):
            return None

        # widths that the lists of full tiles have in a full and in a causal mask
        whole_rows, whole_columns = queries // self.block_size[0], keys // self.block_size[1]
        last_row = (whole_rows - 1) * self.block_size[0]  # first query of the last whole row
        full_width = whole_columns if whole_rows else 0
        causal_width = min(whole_columns, (last_row + 1) // self.block_size[1]) if whole_rows else 0
        if self.lists.full_kv_indices.shape[3] not in (max(1, full_width), max(1, causal_width)):
            return None

        # numbers of attended pairs
        visible, num_masks, attended = (
            min(queries, keys),
            math.prod(self.shape[:2]),
            self.num_attended,
        )
        if attended == num_masks * queries * keys:
            return "full"
        if attended != num_masks * (visible * (visible + 1) // 2 + (queries - visible) * keys):
            return None

        # as many pairs as a causal mask: are they the same ones?
        plane = Plane((1, 1), self.seq_lengths, self.block_size)
        causal = patterns.band(plane, [torch.empty(0, device=self.device)], 0, queries + keys, 0)
        common = combine(self.lists.tile_map(), causal, self.block_size, either=False)
        return "causal" if count_attended(common, self.block_size) == attended else None

    # What a mask is like

    @property
    def device(self) -> torch.device:
        """Device of the lists."""
        return self.lists.kv_num_blocks.device

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The mask's shape in tokens, (batch or 1, heads or 1, queries, keys)."""
        return (*self.lists.kv_num_blocks.shape[:2], *self.seq_lengths)

    @property
    def num_full(self) -> int:
        """Number of full tiles over all batch entries and heads of the mask."""
        return int(self.lists.full_kv_num_blocks.sum())

    @property
    def num_partial(self) -> int:
        """Number of partial tiles over all batch entries and heads of the mask."""
        return int(self.lists.kv_num_blocks.sum())

    @property
    def num_tiles(self) -> int:
        """Number of all tiles, dead ones included."""
        return self.lists.kv_num_blocks.numel() * self.lists.q_num_blocks.shape[2]

    @property
    def num_dead(self) -> int:
        """Number of tiles without an attended pair."""
        return self.num_tiles - self.num_full - self.num_partial

    @property
    def num_attended(self) -> int:
        """Exact number of attended (query, key) pairs over all batch entries and heads."""
        return count_attended(self.lists.tile_map(), self.block_size)

    @property
    def density(self) -> float:
        """Share of pairs that are attended; 0 for a mask without pairs."""
        return self.num_attended / max(1, math.prod(self.shape))

    @property
    def block_density(self) -> float:
        """Share of tiles that are live, full or partial; 0 for a mask without tiles."""
        return (self.num_full + self.num_partial) / max(1, self.num_tiles)

    @property
    def ideal_speed_up(self) -> float:
        """Ratio of all tiles to live ones, the most that skipping gains; inf if all are dead."""
        live = self.num_full + self.num_partial
        return self.num_tiles / live if live else math.inf

    @property
    def num_bytes(self) -> int:
        """Bytes of all lists and token bits."""
        return sum(x.nbytes for x in self.lists)

    @property
    def empty_rows(self) -> int:
        """Number of query rows that attend no key, over all batch entries and heads of the mask."""
        pattern, token_bits = self._pattern_map()
        has_keys = (token_bits != 0).any(-1)  # (patterns, query_block)
        rows = torch.zeros(
            (*pattern.shape[:3], self.block_size[0]), dtype=torch.bool, device=self.device
        )
        for column in pattern.unbind(3):
            rows |= has_keys[column]
        return int((~rows.flatten(2)[..., : self.seq_lengths[0]]).sum())

    def to(self, device: Device) -> BlockMask:
        """Return the same mask on `device`."""
        moved = replace(self, lists=TileLists(*(x.to(device) for x in self.lists)))
        packed = self.packed_form
        if packed is not None:
            packed = packed._replace(cu_seqlens=packed.cu_seqlens.to(device))
        moved._remember_forms(self.dense_form, packed)
        return moved

    def to_dense(self) -> Bool[Tensor, "b h queries keys"]:
        """Return the mask as a bool tensor, True where a query attends a key.

        It takes O(queries · keys) memory: for oracles, pictures and back ends that walk no lists.
        """
        pattern, token_bits = self._pattern_map()
        dense = (
            unpack_tokens(token_bits, self.block_size[1])[pattern]
            .transpose(3, 4)
            .flatten(4, 5)
            .flatten(2, 3)
        )
        return dense[:, :, : self.seq_lengths[0], : self.seq_lengths[1]]

    def to_flex(self, mask_mod: Callable[..., Tensor] | None = None) -> Any:
        """Return torch's BlockMask with the same lists, for `flex_attention`.

        `mask_mod(batch, head, query, key)` must agree with the mask. None makes one that looks
        pairs up in `token_bits`.
        """
        if mask_mod is not None and not callable(mask_mod):
            raise TypeError(f"mask_mod must be callable or None, got {mask_mod!r}")
        from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

        lists, columns = self.lists, self.lists.q_num_blocks.shape[2]

        def with_room(indices: Tensor) -> Tensor:
            """Return the lists with a slot for every tile of a row, as torch has them."""
            return torch.nn.functional.pad(indices, (0, max(0, columns - indices.shape[3])))

        return FlexBlockMask.from_kv_blocks(
            lists.kv_num_blocks,
            with_room(lists.kv_indices),
            lists.full_kv_num_blocks,
            with_room(lists.full_kv_indices),
            self.block_size,
            self._token_lookup() if mask_mod is None else mask_mod,
            self.seq_lengths,
        )

    def __and__(self, other: BlockMask) -> BlockMask:
        """Return the mask of the pairs that both masks attend.

        Batch and heads broadcast; ValueError unless block size, lengths and device are equal.
        """
        return self._combine(other, either=False)

    def __or__(self, other: BlockMask) -> BlockMask:
        """Return the mask of the pairs that at least one mask attends; the rest is as with `&`."""
        return self._combine(other, either=True)

    def _combine(self, other: BlockMask, either: bool) -> BlockMask:
        """Return the mask of the pairs that both, or `either`, attend."""
        if not isinstance(other, BlockMask):
            return NotImplemented
        for name in ("block_size", "seq_lengths", "device"):
            if getattr(self, name) != getattr(other, name):
                raise ValueError(
                    f"masks must have one {name}, "
                    f"got {getattr(self, name)} and {getattr(other, name)}"
                )
        if any(1 != left != right != 1 for left, right in zip(self.shape[:2], other.shape[:2])):
            raise ValueError(
                f"masks must have as many batch entries and heads, or 1, "
                f"got {self.shape[:2]} and {other.shape[:2]}"
            )
        leading = [
            right if left == 1 else left for left, right in zip(self.shape[:2], other.shape[:2])
        ]
        plane = _plane(leading, self.seq_lengths, self.block_size)
        mask = self._make(
            "combined", plane, [*self.lists.tile_map(), *other.lists.tile_map()], either
        )
        if not either:  # causal documents, of the batch entries that have them
            for documents, rest in ((self, other), (other, self)):
                packed, same = documents.packed_form, leading == list(documents.shape[:2])
                if packed is not None and same and rest.dense_form == "causal":
                    mask._remember_forms(mask.dense_form, packed._replace(is_causal=True))
        return mask

    def __repr__(self) -> str:
        if self.device.type == "meta":  # counts have no values there
            return f"BlockMask(shape={self.shape}, block_size={self.block_size}, device=meta)"
        return (
            f"BlockMask(shape={self.shape}, block_size={self.block_size}, "
            f"density={self.density:.4f}, "
            f"full={self.num_full}, partial={self.num_partial}, dead={self.num_dead})"
        )

    def _pattern_map(self) -> tuple[Int[Tensor, "b h query_blocks key_blocks"], Tensor]:
        """Return the number of each tile's pattern, int64, and the bits of all patterns.

        Dead and full tiles have patterns too: the last but one, all 0, and the last, all 1.
        """
        tiles, token_bits = self.lists.tile_map()
        token_bits = torch.cat(
            [token_bits, torch.zeros_like(token_bits[:1]), torch.full_like(token_bits[:1], -1)]
        )
        pattern = torch.where(
            tiles >= 0, tiles, torch.where(tiles == FULL, len(token_bits) - 1, len(token_bits) - 2)
        )
        return pattern.long(), token_bits

    def _token_lookup(self) -> Callable[..., Tensor]:
        """Return a mask_mod for FlexAttention that looks up a pair's bit."""
        pattern, token_bits = self._pattern_map()
        (q_block, k_block), (many_batches, many_heads) = (
            self.block_size,
            (size > 1 for size in pattern.shape[:2]),
        )

        def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            batch, head = batch if many_batches else batch * 0, head if many_heads else head * 0
            row = pattern[batch, head, query // q_block, key // k_block]
            column = key % k_block
            return (token_bits[row, query % q_block, column // 32] >> (column % 32) & 1) == 1

        return mask_mod


def make_lists(
    pattern: str,
    data: Sequence[Tensor],
    leading: Sequence[int],
    lengths: Sequence[int],
    block_size: Sequence[int],
    numbers: Sequence[int],
) -> list[Tensor]:
    """Return the tensors of `TileLists` of the mask `patterns.<pattern>(plane, data, *numbers)`.

    The plane comes in parts, and the result is a list, as a registered operator takes and returns
    them.
    """
    plane = Plane(
        (leading[0], leading[1]), (lengths[0], lengths[1]), (block_size[0], block_size[1])
    )
    tiles, token_bits = getattr(patterns, pattern)(plane, data, *numbers)
    if not len(token_bits):
        token_bits = token_bits.new_zeros(1, *token_bits.shape[1:])

    lists = []
    for by_line in (tiles, tiles.mT):
        lists += [*_lists(by_line >= 0, by_line), *_lists(by_line == FULL, by_line)[:2]]
    return [*lists, token_bits.contiguous()]


def _lists(
    chosen: Bool[Tensor, "b h rows columns"], values: Int[Tensor, "b h rows columns"]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return how many columns of each row are chosen, which ones (ascending), and their `values`.

    Columns and values are (b, h, rows, width), padded with zeros; width is the largest number, at
    least 1. All are int32 and contiguous.
    """
    counts = chosen.sum(-1, dtype=torch.int32)
    width = max(1, int(counts.max())) if counts.numel() else 1
    # Chosen columns fill slots from the left; all others share one slot behind the last, which is
    # cut off.
    slots = torch.where(chosen, chosen.cumsum(-1) - 1, width)
    columns = torch.arange(chosen.shape[-1], dtype=torch.int32, device=chosen.device).expand_as(
        slots
    )
    empty = torch.zeros((*counts.shape, width + 1), dtype=torch.int32, device=chosen.device)
    indices, listed = (
        empty.scatter(-1, slots, x)[..., :width].contiguous() for x in (columns, values)
    )
    return counts, indices, listed


# `make_lists` as an operator that torch.compile keeps whole: the widths of the lists and the number
# of patterns depend on values.
opaque_lists = torch.library.custom_op(
    "cs336_systems::block_mask_lists",
    make_lists,
    mutates_args=(),
    schema="(str pattern, Tensor[] data, SymInt[] leading, SymInt[] lengths, int[] block_size, "
    "SymInt[] numbers)"
    " -> Tensor[]",
)


@opaque_lists.register_fake
def _(
    pattern: str,
    data: Sequence[Tensor],
    leading: Sequence[int],
    lengths: Sequence[int],
    block_size: Sequence[int],
    numbers: Sequence[int],
) -> list[Tensor]:
    """Return empty lists of the right shapes, with widths that the compiler does not know."""

    def empty(*shape: Any) -> Tensor:
        return data[0].new_empty(shape, dtype=torch.int32)

    def unknown() -> Any:
        return torch.library.get_ctx().new_dynamic_size(min=1)

    lists = []
    for length, block in zip(lengths, block_size):
        lines, width = (*leading, num_blocks(length, block)), unknown()
        lists += [
            empty(*lines),
            empty(*lines, width),
            empty(*lines, width),
            empty(*lines),
            empty(*lines, unknown()),
        ]
    return [*lists, empty(unknown(), block_size[0], words_per_row(block_size[1]))]


def _consecutive_lengths(ids: Int[Tensor, "batch tokens"]) -> list[int] | None:
    """Return the lengths of runs of equal ids, of one batch entry after the other.

    None if an id of a batch entry has two runs: these tokens attend each other.
    """
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    entries, positions = (x.cpu() for x in begins.nonzero(as_tuple=True))
    runs = torch.stack([entries, ids[begins].cpu().long()], dim=1)
    if len(runs.unique(dim=0)) < len(runs):
        return None
    starts = entries * ids.shape[1] + positions
    return torch.cat([starts, starts.new_tensor([ids.numel()])]).diff().tolist()


def _four_dimensions(
    name: str, tensor: Tensor, sides: str, dtypes: tuple[torch.dtype, ...] = FLOATING_DTYPES
) -> Float[Tensor, "batch heads rows columns"]:
    """Return the checked `tensor` with four dimensions: batch and heads of 1 before two `sides`."""
    tensor = check_tensor(
        name, tensor, {2: f"({sides})", 4: f"(batch or 1, heads or 1, {sides})"}, dtypes
    )
    return tensor if tensor.ndim == 4 else tensor[None, None]


def _plane(leading: Sequence[int], lengths: Sequence[int], block_size: int | BlockSize) -> Plane:
    """Return the Plane of (batch, heads), (queries, keys) and a block size, which is checked."""
    return Plane((leading[0], leading[1]), (lengths[0], lengths[1]), check_block_size(block_size))


# Checks of the arguments of constructors and attention calls


def check_seqlens(seqlen_q: int, seqlen_k: int | None) -> tuple[int, int]:
    """Return the checked lengths of queries and keys; the second defaults to the first."""
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    return check_count("seqlen_q", seqlen_q), check_count("seqlen_k", seqlen_k)


def check_lengths(
    tiles: Tensor, block_size: BlockSize, seq_lengths: tuple[int, int] | None
) -> tuple[int, int]:
    """Return `seq_lengths`, by default those of whole tiles.

    TypeError or ValueError unless they are cut into as many tiles as the last two dimensions of
    `tiles` have.
    """
    shape = tuple(tiles.shape[-2:])
    if seq_lengths is None:
        return shape[0] * block_size[0], shape[1] * block_size[1]
    if not isinstance(seq_lengths, tuple) or len(seq_lengths) != 2:
        raise TypeError(f"seq_lengths must be a tuple of queries and keys, got {seq_lengths!r}")
    lengths = check_count("seq_lengths", seq_lengths[0]), check_count("seq_lengths", seq_lengths[1])
    wanted = tuple(map(num_blocks, lengths, block_size))
    if wanted != shape:
        raise ValueError(
            f"seq_lengths {lengths} are {wanted} tiles of {block_size}, got {shape} tiles"
        )
    return lengths


def check_document_lengths(lengths: Sequence[int] | Tensor) -> list[int]:
    """Return the lengths as a list of ints; TypeError or ValueError unless none is negative.

    Their sum must be at most 2³¹ - 1.
    """
    if isinstance(lengths, Tensor):
        lengths = check_tensor(
            "lengths", lengths, {1: "(documents,)"}, (torch.int32, torch.int64)
        ).tolist()
    if not isinstance(lengths, Sequence) or isinstance(lengths, str):
        raise TypeError(f"lengths must be a sequence of ints, got {kind_of(lengths)}")
    found = [check_count("lengths", length) for length in lengths]
    check_count("the sum of lengths", sum(found))
    return found


def check_draw(density: float, seed: int, batch: int, heads: int) -> None:
    """Raise ValueError unless a random mask can be drawn with these arguments."""
    if isinstance(density, bool) or not isinstance(density, int | float) or not 0 <= density <= 1:
        raise ValueError(f"density must be between 0 and 1, got {density!r}")
    check_count("seed", seed, -(2**63), 2**63 - 1)
    check_count("batch", batch, 1)
    check_count("heads", heads, 1)


def check_block_mask(block_mask: BlockMask, q: Tensor, k: Tensor, *, is_causal: bool) -> None:
    """Raise TypeError or ValueError unless `block_mask` fits q and k, and the call is not causal.

    q and k are (..., heads, seq, head_dim).
    """
    if not isinstance(block_mask, BlockMask):
        kind = type(block_mask).__name__
        raise TypeError(
            f"block_mask must be a BlockMask or None, got {kind}; "
            "BlockMask.from_dense takes a bool tensor"
        )
    if is_causal:
        raise ValueError(
            "is_causal must be False with a mask, got True: "
            "put it into the mask, as in attn_mask.tril() or "
            "block_mask & BlockMask.causal(seqlen_q, seqlen_k, block_size=block_mask.block_size)"
        )
    if block_mask.device != q.device:
        raise ValueError(f"block_mask must be on q's device {q.device}, got {block_mask.device}")
    if block_mask.seq_lengths != (q.shape[-2], k.shape[-2]):
        raise ValueError(
            f"block_mask must be made for {q.shape[-2]} queries and {k.shape[-2]} keys, "
            "got one for {} and {}".format(*block_mask.seq_lengths)
        )
    for name, size, expected in zip(
        ("batch", "heads"), block_mask.shape, (math.prod(q.shape[:-3]), q.shape[-3])
    ):
        if size not in (1, expected):
            raise ValueError(f"block_mask must have {name} 1 or q's {expected}, got {size}")


def from_attn_mask(attn_mask: Bool[Tensor, "... queries keys"], q: Tensor, k: Tensor) -> BlockMask:
    """Return the BlockMask of an `attn_mask` as SDPA takes it, True where attended.

    It must broadcast to (..., heads, queries, keys) of q and k. Batch entries or heads that share
    a mask cost one. TypeError for an additive mask of floats, ValueError for another shape.
    """
    if not isinstance(attn_mask, Tensor) or attn_mask.dtype != torch.bool:
        raise TypeError(
            f"attn_mask must be a bool tensor, True where attended, got {kind_of(attn_mask)}; "
            "additive masks are not supported"
        )
    wanted = (*q.shape[:-1], k.shape[-2])
    shape = (1,) * (len(wanted) - attn_mask.ndim) + tuple(attn_mask.shape)
    if len(shape) > len(wanted) or any(size not in (1, most) for size, most in zip(shape, wanted)):
        raise ValueError(
            f"attn_mask must broadcast to (..., heads, queries, keys) = {wanted}, "
            f"got {tuple(attn_mask.shape)}"
        )

    # heads, then batch entries, that share their memory become one
    mask = attn_mask.expand(wanted)
    if mask.stride(-3) == 0:
        mask = mask[..., :1, :, :]
    if not any(mask.stride()[:-3]):
        mask = mask[(slice(1),) * (mask.ndim - 3)]
    return BlockMask.from_dense(mask.reshape(math.prod(mask.shape[:-3]), *mask.shape[-3:]))


# `torch.load(path)`, whose default is weights_only=True, may make these classes: a mask is checked
# when it is loaded.
torch.serialization.add_safe_globals([BlockMask, TileLists])
