"""`BlockMask`: which queries attend which keys, as lists of tiles that a kernel walks.

The (queries, keys) plane of each batch entry and head is cut into tiles of `block_size`. A tile is dead (no pair
attended: in no list, never read), full (every pair attended: no mask is read) or partial (its pairs are bits).
For the forward and dQ, each row of tiles lists its key tiles; for dK and dV, each column lists its query tiles.

Layout, for a mask of b = batch or 1 and h = query heads or 1 (1 broadcasts), int32, contiguous, on one device:

    kv_num_blocks        (b, h, query_blocks)               partial tiles of a row of tiles
    kv_indices           (b, h, query_blocks, width >= 1)   their key tiles, ascending, 0 behind the last
    full_kv_num_blocks, full_kv_indices                     the same of full tiles
    q_num_blocks         (b, h, key_blocks)                 transposed: partial tiles of a column of tiles
    q_indices            (b, h, key_blocks, width >= 1)     their query tiles, ascending, 0 behind the last
    full_q_num_blocks, full_q_indices                       the same of full tiles
    kv_tokens            shape of kv_indices                row of token_bits of each partial tile
    q_tokens             shape of q_indices                 the same for the transposed lists
    token_bits           (patterns >= 1, query_block, ceil(key_block / 32))

The first eight have the names of torch's FlexAttention. Query row r of a tile attends its key column c where

    token_bits[kv_tokens[b, h, row, slot], r, c // 32] >> (c % 32) & 1

Tiles with equal tokens may share a pattern: a causal mask stores one triangle, whatever its length. A tile that the end
of the queries or keys cuts is never full, and its bits past the end are 0: a loop over full tiles needs no bounds.

    mask = BlockMask.document([1000, 0, 3096], is_causal=True)
    flash_attention(q, k, v, block_mask=mask)

On the back end `triton` the kernels walk the lists; `reference`, `compiled` and `tiled` attend through `to_dense()`, a
bool tensor of (b, h, queries, keys) for `attention_reference(mask=...)`: O(queries · keys) memory, the oracle's price.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cs336_systems.attention.masks import patterns
from cs336_systems.attention.masks.checks import (
    Device,
    check_block_size,
    check_count,
    check_density,
    check_device,
    check_document_lengths,
    check_flag,
    check_lengths,
    check_seed,
    check_seqlens,
    check_storage,
    check_tensor,
    has_values,
    kind_of,
)
from cs336_systems.attention.masks.tiles import (
    DEAD,
    FULL,
    BlockSize,
    TileMap,
    count_tokens,
    num_blocks,
    unpack_tokens,
    words_per_row,
)
from cs336_systems.measure.stages import stage

DEFAULT_BLOCK = 128
Arguments = ParamSpec("Arguments")
Mask = TypeVar("Mask")


def _built(constructor: Callable[Arguments, Mask]) -> Callable[Arguments, Mask]:
    """`constructor` as the stage `mask_build` of what `profiling.stages` times."""

    @wraps(constructor)
    def build(*arguments: Arguments.args, **options: Arguments.kwargs) -> Mask:
        with stage("mask_build"):
            return constructor(*arguments, **options)

    return build


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockMask:
    """See the module's docstring for the fields' shapes. `block_mask & other` attends what both attend.

    Fields put together by hand must agree: kernels follow the lists wherever they lead. Shapes are checked; values
    on the CPU alone, and only that tiles and patterns exist. On a GPU a look would stall the host: they are trusted.
    """

    kv_num_blocks: Int[Tensor, "b h query_blocks"]
    kv_indices: Int[Tensor, "b h query_blocks width"]
    full_kv_num_blocks: Int[Tensor, "b h query_blocks"]
    full_kv_indices: Int[Tensor, "b h query_blocks full_width"]
    q_num_blocks: Int[Tensor, "b h key_blocks"]
    q_indices: Int[Tensor, "b h key_blocks width_t"]
    full_q_num_blocks: Int[Tensor, "b h key_blocks"]
    full_q_indices: Int[Tensor, "b h key_blocks full_width_t"]
    kv_tokens: Int[Tensor, "b h query_blocks width"]
    q_tokens: Int[Tensor, "b h key_blocks width_t"]
    token_bits: Int[Tensor, "patterns query_block words"]
    block_size: BlockSize  # query rows and key columns of a tile, powers of two from 16 on
    seq_lengths: tuple[int, int]  # queries and keys, in tokens

    def __post_init__(self) -> None:
        check_block_size(self.block_size)
        leading = tuple(self.kv_num_blocks.shape[:2])
        blocks = dict(zip(("kv", "q"), map(num_blocks, self.seq_lengths, self.block_size)))
        for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
            self._check(name, (*leading, blocks["kv" if "kv" in name else "q"]))
        for name in ("kv_indices", "full_kv_indices", "q_indices", "full_q_indices"):
            self._check(name, (*leading, blocks["kv" if "kv" in name else "q"], None))
        self._check("kv_tokens", tuple(self.kv_indices.shape))
        self._check("q_tokens", tuple(self.q_indices.shape))
        self._check("token_bits", (None, self.block_size[0], words_per_row(self.block_size[1])))
        if has_values(self.kv_num_blocks):
            self._check_values()
        # Autograd saves no tensor of inference mode, and what an evaluation has made may be kept and trained with.
        for name, tensor in vars(self).items():
            if isinstance(tensor, Tensor) and tensor.is_inference():
                with torch.inference_mode(False):
                    object.__setattr__(self, name, tensor.clone())

    def _check_values(self) -> None:
        """Raise unless counts fit their lists, and tiles and patterns exist: kernels follow them without a look."""
        whole = [seqlen // block for seqlen, block in zip(self.seq_lengths, self.block_size)]
        num_tiles = [self.kv_num_blocks.shape[2], self.q_num_blocks.shape[2]]
        for side, other in (("kv", 1), ("q", 0)):  # lists of key tiles, lists of query tiles
            for prefix, existing in (("", num_tiles[other]), ("full_", whole[other])):
                indices = f"{prefix}{side}_indices"
                self._check_range(f"{prefix}{side}_num_blocks", min(existing, getattr(self, indices).shape[3]))
                self._check_range(indices, max(0, existing - 1))
            self._check_range(f"{side}_tokens", len(self.token_bits) - 1)

    def _check_range(self, name: str, largest: int) -> None:
        """Raise unless the values of the tensor `name` are 0 to `largest`."""
        tensor = getattr(self, name)
        if tensor.numel():
            least, most = (int(x) for x in tensor.aminmax())
            if least < 0 or most > largest:
                raise ValueError(f"BlockMask.{name} must have values from 0 to {largest}, got {least} to {most}")

    def _check(self, name: str, shape: tuple[int | None, ...]) -> None:
        """Raise unless the tensor `name` has `shape`, where None is any length from 1 on, and fits the others."""
        tensor = getattr(self, name)
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.int32:
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"BlockMask.{name} must be an int32 tensor, got {kind}")
        fits = len(tensor.shape) == len(shape) and all(
            actual == wanted or (wanted is None and actual >= 1) for actual, wanted in zip(tensor.shape, shape)
        )
        if not fits:
            wanted_shape = ", ".join("at least 1" if length is None else str(length) for length in shape)
            raise ValueError(f"BlockMask.{name} must have shape ({wanted_shape}), got {tuple(tensor.shape)}")
        if tensor.device != self.kv_num_blocks.device or not tensor.is_contiguous():
            raise ValueError(
                f"BlockMask.{name} must be contiguous on {self.kv_num_blocks.device}, "
                f"got strides {tensor.stride()} on {tensor.device}"
            )

    # Constructors

    @classmethod
    @_built
    def from_dense(
        cls, mask: Bool[Tensor, "... queries keys"], block_size: int | BlockSize = DEFAULT_BLOCK
    ) -> BlockMask:
        """The tiles of a token mask, True where attended: (queries, keys), or with (batch or 1, heads or 1) before."""
        mask = check_tensor("mask", mask, ("queries", "keys"), torch.bool)
        size = check_block_size(block_size)
        return cls._of(patterns.dense(mask, size), size, (mask.shape[2], mask.shape[3]))

    @classmethod
    @_built
    def from_blocks(
        cls,
        blocks: Bool[Tensor, "... query_blocks key_blocks"],
        block_size: int | BlockSize = DEFAULT_BLOCK,
        *,
        seq_lengths: tuple[int, int] | None = None,
        is_causal: bool = False,
    ) -> BlockMask:
        """Whole tiles where `blocks`, (query_blocks, key_blocks) or with batch and heads before, is True.

        `seq_lengths` default to whole tiles; others must need just as many. `is_causal` also drops the pairs above the
        diagonal, from the top left. No (queries, keys) tensor is made.
        """
        blocks = check_tensor("blocks", blocks, ("query_blocks", "key_blocks"), torch.bool)
        size = check_block_size(block_size)
        check_flag("is_causal", is_causal)
        lengths = check_lengths(blocks, size, seq_lengths)
        mask = cls._of(patterns.blocks(blocks, lengths, size), size, lengths)
        return mask & cls.causal(*lengths, block_size=size, device=mask.device) if is_causal else mask

    @classmethod
    @_built
    def causal(
        cls,
        seqlen_q: int,
        seqlen_k: int | None = None,
        *,
        bottom_right: bool = False,
        block_size: int | BlockSize = DEFAULT_BLOCK,
        device: Device = "cpu",
    ) -> BlockMask:
        """Query i attends keys j <= i; with `bottom_right` j <= i + seqlen_k - seqlen_q, as decoding with a cache does.

        Bottom right with more queries than keys leaves the first seqlen_q - seqlen_k rows without a key.
        """
        lengths = check_seqlens(seqlen_q, seqlen_k)
        size = check_block_size(block_size)
        check_flag("bottom_right", bottom_right)
        shift = lengths[1] - lengths[0] if bottom_right else 0
        return cls._of(patterns.band(lengths, size, 0, sum(lengths), shift, check_device(device)), size, lengths)

    @classmethod
    @_built
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
        """The `window` most recent keys of each query, its own included: 0 <= i - j < window.

        Without `is_causal` |i - j| < window. `bottom_right` adds seqlen_k - seqlen_q to i.
        """
        lengths = check_seqlens(seqlen_q, seqlen_k)
        size = check_block_size(block_size)
        check_count("window", window, 1, most=None)
        window = min(window, 1 + sum(lengths))  # no two tokens are further apart
        check_flag("is_causal", is_causal)
        check_flag("bottom_right", bottom_right)
        shift = lengths[1] - lengths[0] if bottom_right else 0
        low = 0 if is_causal else 1 - window
        return cls._of(patterns.band(lengths, size, low, window - 1, shift, check_device(device)), size, lengths)

    @classmethod
    @_built
    def prefix(
        cls,
        lengths: Int[Tensor, "... queries"],
        seqlen_k: int,
        *,
        block_size: int | BlockSize = DEFAULT_BLOCK,
    ) -> BlockMask:
        """Query i attends the first lengths[i] of `seqlen_k` keys; lengths: (queries,) or (batch, heads, queries)."""
        size = check_block_size(block_size)
        check_count("seqlen_k", seqlen_k, 0)
        integral = isinstance(lengths, Tensor) and lengths.dtype in (torch.int32, torch.int64)
        if not integral or lengths.ndim not in (1, 3):
            raise TypeError(
                "lengths must be an int32 or int64 tensor of shape (queries,) or (batch or 1, heads or 1, queries), "
                f"got {kind_of(lengths)}"
            )
        check_storage("lengths", lengths)
        lengths = lengths if lengths.ndim == 3 else lengths[None, None]
        return cls._of(patterns.prefix(lengths, seqlen_k, size), size, (lengths.shape[2], seqlen_k))

    @classmethod
    @_built
    def document(
        cls,
        lengths: Sequence[int] | Int[Tensor, " documents"] | None = None,
        *,
        ids: Int[Tensor, "... tokens"] | None = None,
        is_causal: bool = False,
        block_size: int | BlockSize = DEFAULT_BLOCK,
        device: Device | None = None,
    ) -> BlockMask:
        """Tokens attend their own document, by `lengths` of documents in order (0 allowed) or an id for each token.

        `ids` is (tokens,) or (batch, tokens); equal ids are one document, wherever they stand. `device` defaults to the
        CPU for lengths and to that of ids.
        """
        size = check_block_size(block_size)
        check_flag("is_causal", is_causal)
        device = None if device is None else check_device(device)
        if (lengths is None) == (ids is None):
            raise ValueError("document needs either lengths or ids")
        if lengths is not None:
            lengths = check_document_lengths(lengths)
            number = torch.arange(len(lengths), device=device or "cpu")
            ids = number.repeat_interleave(torch.tensor(lengths, dtype=torch.int64, device=number.device))
        assert ids is not None
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64) or ids.ndim not in (1, 2):
            raise TypeError(
                f"ids must be an int32 or int64 tensor of shape (tokens,) or (batch, tokens), got {kind_of(ids)}"
            )
        check_storage("ids", ids)
        ids = (ids if ids.ndim == 2 else ids[None]).to(device or ids.device)
        return cls._of(patterns.documents(ids, is_causal, size), size, (ids.shape[1], ids.shape[1]))

    @classmethod
    @_built
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
        """What `dilated_attention` computes, as a mask: its oracle. Tokens of one segment and phase attend each other.

        The phase is the position in the segment modulo `dilation_rate`. With `heads`, head h keeps only the tokens of
        phase h % dilation_rate, and all other rows have no key: LongNet's form (Ding et al. 2023, section 2.3).
        """
        size = check_block_size(block_size)
        check_count("seqlen", seqlen, 0)
        check_count("segment_length", segment_length, 1, most=None)
        check_count("dilation_rate", dilation_rate, 1, most=None)
        if heads is not None:
            check_count("heads", heads, 1)
        check_flag("is_causal", is_causal)
        device = check_device(device)
        segment_length = min(segment_length, max(1, seqlen))  # more is one segment
        dilation_rate = min(dilation_rate, max(segment_length, heads or 1))  # more is a phase for each token, and head
        tile_map = patterns.dilated(seqlen, segment_length, dilation_rate, heads, is_causal, size, device)
        return cls._of(tile_map, size, (seqlen, seqlen))

    @classmethod
    @_built
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
        """In each row of tiles round(density * key_blocks) random ones, at least one, of every batch entry and head.

        Drawn on the CPU, so that a seed means the same mask everywhere.
        """
        lengths = check_seqlens(seqlen_q, seqlen_k)
        size = check_block_size(block_size)
        device = _check_draw(density, seed, batch, heads, device)
        shape = (batch, heads, *map(num_blocks, lengths, size))
        generator = torch.Generator().manual_seed(seed)
        scores = torch.rand(shape, dtype=torch.float32, device="cpu", generator=generator)
        live = patterns.best_blocks(scores, max(1, round(density * shape[3])))
        return cls.from_blocks(live.to(device), size, seq_lengths=lengths)

    @classmethod
    @_built
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
        """Each pair attended with probability `density`, alone: no tile is dead, so no kernel gains from skipping."""
        lengths = check_seqlens(seqlen_q, seqlen_k)
        size = check_block_size(block_size)
        device = _check_draw(density, seed, batch, heads, device)
        generator = torch.Generator().manual_seed(seed)

        def rows(queries: slice) -> Tensor:
            shape = (batch, heads, queries.stop - queries.start, lengths[1])
            drawn = torch.rand(shape, dtype=torch.float32, device="cpu", generator=generator)
            return (drawn < density).to(device)

        return cls._of(patterns.by_rows(rows, (batch, heads), lengths, size, device), size, lengths)

    @classmethod
    @_built
    def topk_blocks(
        cls,
        scores: Float[Tensor, "... query_blocks key_blocks"],
        num_kept: int,
        block_size: int | BlockSize = DEFAULT_BLOCK,
        *,
        seq_lengths: tuple[int, int] | None = None,
        is_causal: bool = False,
    ) -> BlockMask:
        """In each row of tiles the `num_kept` of highest score, all of them where that is more than there are.

        With `is_causal` only tiles with a visible pair compete, and pairs above the diagonal are dropped. Tiles of
        score -inf are never kept; of equal scores the earlier is.
        """
        scores = check_tensor("scores", scores, ("query_blocks", "key_blocks"), None)
        size = check_block_size(block_size)
        check_count("num_kept", num_kept, 0, most=None)
        check_flag("is_causal", is_causal)
        lengths = check_lengths(scores, size, seq_lengths)
        if is_causal:
            visible = cls.causal(*lengths, block_size=size, device=scores.device)._tile_map().tiles != DEAD
            scores = scores.masked_fill(~visible, -torch.inf)
        live = patterns.best_blocks(scores, min(num_kept, scores.shape[3]))
        return cls.from_blocks(live, size, seq_lengths=lengths, is_causal=is_causal)

    @classmethod
    @_built
    def dynamic_topk(
        cls,
        bias: Float[Tensor, "... queries_or_1 keys"],
        num_keys: int,
        block_size: int | BlockSize = DEFAULT_BLOCK,
        *,
        seqlen_q: int | None = None,
        is_causal: bool = True,
    ) -> BlockMask:
        """Each query attends the `num_keys` keys of highest bias among those it may see (flash dynamic-mask attention).

        `bias` is (queries or 1, keys), or with batch and heads before; a single row is shared by all `seqlen_q` queries
        (default: as many as keys). `num_keys` may exceed the keys: then all are attended. Keys of bias -inf never are.
        A query's keys depend on the bias of the keys that it sees alone. A row of tiles is looked at at a time.
        """
        bias = check_tensor("bias", bias, ("queries or 1", "keys"), None)
        size = check_block_size(block_size)
        check_count("num_keys", num_keys, 0, most=None)
        check_flag("is_causal", is_causal)
        rows, seqlen_k = bias.shape[2:]
        seqlen_q = (seqlen_k if rows == 1 else rows) if seqlen_q is None else seqlen_q
        check_count("seqlen_q", seqlen_q, 0)
        if rows not in (1, seqlen_q):
            raise ValueError(f"bias must have 1 row or seqlen_q={seqlen_q}, got {rows}")
        return cls._of(patterns.top_keys(bias, num_keys, is_causal, seqlen_q, size), size, (seqlen_q, seqlen_k))

    @classmethod
    def _of(cls, tile_map: TileMap, block_size: BlockSize, seq_lengths: tuple[int, int]) -> BlockMask:
        """The lists of a tile map."""
        tiles, token_bits = tile_map
        if not len(token_bits):
            token_bits = token_bits.new_zeros(1, *token_bits.shape[1:])
        kv_num, kv_indices, kv_tokens = _lists(tiles >= 0, tiles)
        q_num, q_indices, q_tokens = _lists((tiles >= 0).mT, tiles.mT)
        full_kv_num, full_kv_indices, _ = _lists(tiles == FULL, tiles)
        full_q_num, full_q_indices, _ = _lists((tiles == FULL).mT, tiles.mT)
        return cls(
            kv_num_blocks=kv_num, kv_indices=kv_indices,
            full_kv_num_blocks=full_kv_num, full_kv_indices=full_kv_indices,
            q_num_blocks=q_num, q_indices=q_indices,
            full_q_num_blocks=full_q_num, full_q_indices=full_q_indices,
            kv_tokens=kv_tokens, q_tokens=q_tokens, token_bits=token_bits.contiguous(),
            block_size=block_size, seq_lengths=seq_lengths,
        )  # fmt: skip

    # What a mask is

    @property
    def device(self) -> torch.device:
        return self.kv_num_blocks.device

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch or 1, heads or 1, queries, keys)."""
        return (*self.kv_num_blocks.shape[:2], *self.seq_lengths)

    @property
    def num_full(self) -> int:
        """Full tiles over all batch entries and heads of the mask."""
        return int(self.full_kv_num_blocks.sum())

    @property
    def num_partial(self) -> int:
        return int(self.kv_num_blocks.sum())

    @property
    def num_tiles(self) -> int:
        """All tiles, dead ones included."""
        return self.kv_num_blocks.numel() * self.q_num_blocks.shape[2]

    @property
    def num_dead(self) -> int:
        return self.num_tiles - self.num_full - self.num_partial

    @property
    def num_attended(self) -> int:
        """Attended (query, key) pairs over all batch entries and heads of the mask, exactly."""
        whole = self.num_full * self.block_size[0] * self.block_size[1]
        return whole + int(count_tokens(self.token_bits)[self.kv_tokens[self._is_listed()].long()].sum())

    @property
    def density(self) -> float:
        """Share of pairs that are attended; 0 of none."""
        return self.num_attended / max(1, math.prod(self.shape))

    @property
    def block_density(self) -> float:
        """Share of tiles that are live, full or partial; 0 of none."""
        return (self.num_full + self.num_partial) / max(1, self.num_tiles)

    @property
    def ideal_speed_up(self) -> float:
        """All tiles over live ones: what skipping dead tiles can gain at most; inf if all are dead."""
        live = self.num_full + self.num_partial
        return self.num_tiles / live if live else math.inf

    @property
    def num_bytes(self) -> int:
        """Bytes of all lists and token bits."""
        values = (getattr(self, field.name) for field in fields(self))
        return sum(x.nbytes for x in values if isinstance(x, Tensor))

    @property
    def empty_rows(self) -> int:
        """Query rows that attend no key, over all batch entries and heads of the mask."""
        return int((~self.rows_with_keys()).sum())

    def rows_with_keys(self) -> Bool[Tensor, "b h queries"]:
        """True for each query that attends at least one key."""
        has_keys = (self.token_bits != 0).any(-1)  # (patterns, query_block)
        rows = (self.full_kv_num_blocks > 0)[..., None].repeat(1, 1, 1, self.block_size[0])
        listed = self._is_listed()
        for slot in range(self.kv_tokens.shape[3]):
            rows |= has_keys[self.kv_tokens[..., slot].long()] & listed[..., slot, None]
        return rows.flatten(2)[..., : self.seq_lengths[0]]

    def to(self, device: Device) -> BlockMask:
        """The same mask on `device`."""
        device = check_device(device, with_values=False)
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: x.to(device) for name, x in values.items() if isinstance(x, Tensor)}
        return replace(self, **moved)

    def to_dense(self) -> Bool[Tensor, "b h queries keys"]:
        """True where a query attends a key: O(queries · keys) memory, for oracles and pictures."""
        tiles, token_bits = self._tile_map()
        batch, heads, rows, columns = tiles.shape
        tokens = unpack_tokens(token_bits, self.block_size[1])
        tokens = torch.cat([tokens, torch.zeros_like(tokens[:1]), torch.ones_like(tokens[:1])])
        pattern = torch.where(tiles >= 0, tiles, torch.where(tiles == FULL, len(tokens) - 1, len(tokens) - 2))
        dense = tokens[pattern.long()].transpose(3, 4).reshape(
            batch, heads, rows * self.block_size[0], columns * self.block_size[1]
        )  # fmt: skip
        return dense[:, :, : self.seq_lengths[0], : self.seq_lengths[1]]

    def to_flex(self, mask_mod: Callable[..., Tensor] | None = None) -> Any:
        """torch's BlockMask with the same lists, for `flex_attention`.

        `mask_mod(batch, head, query, key)` must agree with the mask; without it, tokens are looked up in `token_bits`.
        """
        if mask_mod is not None and not callable(mask_mod):
            raise TypeError(f"mask_mod must be callable or None, got {mask_mod!r}")
        from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

        widths = {"kv": self.q_num_blocks.shape[2], "q": self.kv_num_blocks.shape[2]}
        lists = {
            name: getattr(self, name)
            for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks")
        }
        for name in ("kv_indices", "full_kv_indices", "q_indices", "full_q_indices"):
            indices = getattr(self, name)
            missing = widths["kv" if "kv" in name else "q"] - indices.shape[3]
            lists[name] = torch.nn.functional.pad(indices, (0, missing)) if missing > 0 else indices
        return FlexBlockMask(
            seq_lengths=self.seq_lengths,
            BLOCK_SIZE=self.block_size,
            mask_mod=self._token_lookup() if mask_mod is None else mask_mod,
            **lists,
        )

    def __and__(self, other: BlockMask) -> BlockMask:
        """What both masks attend; batch and heads broadcast. Block sizes and lengths must be equal."""
        if not isinstance(other, BlockMask):
            return NotImplemented
        for name in ("block_size", "seq_lengths", "device"):
            if getattr(self, name) != getattr(other, name):
                raise ValueError(f"masks must have one {name}, got {getattr(self, name)} and {getattr(other, name)}")
        if any(1 != left != right != 1 for left, right in zip(self.shape[:2], other.shape[:2])):
            raise ValueError(
                f"masks must have as many batch entries and heads, or 1, got {self.shape[:2]} and {other.shape[:2]}"
            )
        both = patterns.intersect(self._tile_map(), other._tile_map(), self.block_size)
        return self._of(both, self.block_size, self.seq_lengths)

    def __repr__(self) -> str:
        if self.device.type == "meta":  # counts have no values there
            return f"BlockMask(shape={self.shape}, block_size={self.block_size}, device=meta)"
        return (
            f"BlockMask(shape={self.shape}, block_size={self.block_size}, density={self.density:.4f}, "
            f"full={self.num_full}, partial={self.num_partial}, dead={self.num_dead})"
        )

    def _is_listed(self) -> Bool[Tensor, "b h query_blocks width"]:
        """True for the slots of kv_indices that hold a tile."""
        slots = torch.arange(self.kv_indices.shape[3], device=self.device)
        return slots < self.kv_num_blocks[..., None]

    def _tile_map(self) -> TileMap:
        """The map that the lists were made of."""
        shape = (*self.kv_num_blocks.shape, self.q_num_blocks.shape[2])
        tiles = torch.full(shape, DEAD, dtype=torch.int32, device=self.device)
        for counts, indices, values in (
            (self.kv_num_blocks, self.kv_indices, self.kv_tokens),
            (self.full_kv_num_blocks, self.full_kv_indices, None),
        ):
            slots = torch.arange(indices.shape[3], device=self.device)
            batch, head, row, slot = (slots < counts[..., None]).nonzero(as_tuple=True)
            column = indices[batch, head, row, slot].long()
            tiles[batch, head, row, column] = FULL if values is None else values[batch, head, row, slot]
        return TileMap(tiles, self.token_bits)

    def _token_lookup(self) -> Callable[..., Tensor]:
        """FlexAttention's mask_mod: a pair's bit. Dead and full tiles get patterns of their own, all 0 and all 1."""
        tiles, token_bits = self._tile_map()
        token_bits = torch.cat([token_bits, torch.zeros_like(token_bits[:1]), torch.full_like(token_bits[:1], -1)])
        pattern = torch.where(tiles >= 0, tiles, torch.where(tiles == FULL, len(token_bits) - 1, len(token_bits) - 2))
        (q_block, k_block), (many_batches, many_heads) = self.block_size, (size > 1 for size in tiles.shape[:2])

        def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            batch, head = batch if many_batches else batch * 0, head if many_heads else head * 0
            row = pattern[batch, head, query // q_block, key // k_block]
            column = key % k_block
            return (token_bits[row, query % q_block, column // 32] >> (column % 32) & 1) == 1

        return mask_mod


def _check_draw(density: float, seed: int, batch: int, heads: int, device: Device) -> torch.device:
    """Check what a random mask is drawn with; the device."""
    check_density(density)
    check_seed(seed)
    check_count("batch", batch, 1)
    check_count("heads", heads, 1)
    return check_device(device)


def _lists(
    chosen: Bool[Tensor, "b h rows columns"], values: Int[Tensor, "b h rows columns"]
) -> tuple[Tensor, Tensor, Tensor]:
    """How many columns of each row are chosen, which (ascending), and their `values`; padded with zeros."""
    counts = chosen.sum(-1, dtype=torch.int32)
    width = max(1, int(counts.max())) if counts.numel() else 1
    # The chosen fill slots from the left, and all others one slot behind the last, which is cut off.
    slots = torch.where(chosen, chosen.cumsum(-1) - 1, width)
    columns = torch.arange(chosen.shape[-1], dtype=torch.int32, device=chosen.device).expand_as(slots)
    empty = torch.zeros((*counts.shape, width + 1), dtype=torch.int32, device=chosen.device)
    indices, listed = (empty.scatter(-1, slots, x)[..., :width].contiguous() for x in (columns, values))
    return counts, indices, listed
