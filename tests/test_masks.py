"""Masks by tiles: every constructor against its definition token by token, and what is built on them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from cs336_systems.attention import BlockMask, attention_reference, flash_attention
from cs336_systems.attention.dilated import dilated_attention
from cs336_systems.attention.dynamic import choose_keys, shared_keys_attention
from cs336_systems.attention.masks import MAX_LIST_DENSITY, parse_mask, patterns, use_lists
from cs336_systems.attention.masks.staircase import staircase_mask, steps_of
from cs336_systems.attention.masks.tiles import count_tokens, pack_tokens, unpack_tokens
from cs336_systems.cli import app

LENGTHS = {"whole_tiles": (128, 128), "ragged": (100, 137), "more_queries": (137, 60), "one_query": (1, 70)}
BLOCKS = {"square": (32, 32), "wide": (16, 64), "tall": (64, 16)}
LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
TRANSPOSED = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")


def positions(seqlen_q: int, seqlen_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)[None, :]


def brute_force_counts(dense: torch.Tensor, block_size: tuple[int, int]) -> tuple[int, int, int]:
    """(dead, full, partial) tiles, tile by tile; a tile that an end cuts is never full."""
    dead = full = partial = 0
    for head in dense.flatten(0, 1):
        for row in head.split(block_size[0], dim=0):
            for tile in row.split(block_size[1], dim=1):
                if not tile.any():
                    dead += 1
                elif tile.all() and tuple(tile.shape) == block_size:
                    full += 1
                else:
                    partial += 1
    return dead, full, partial


def listed_tiles(mask: BlockMask, counts: str, indices: str) -> set[tuple[int, ...]]:
    """(batch, head, query tile, key tile) of every entry of a pair of lists, whichever way they run."""
    found = set()
    numbers, entries = getattr(mask, counts), getattr(mask, indices)
    for place in torch.cartesian_prod(*(torch.arange(size) for size in numbers.shape)).tolist():
        batch, head, line = place
        others = entries[batch, head, line, : numbers[batch, head, line]].tolist()
        assert others == sorted(set(others)), f"{indices} must ascend"
        assert not entries[batch, head, line, numbers[batch, head, line] :].any(), f"{indices} must be padded with 0"
        found |= {(batch, head, *((line, other) if "kv" in counts else (other, line))) for other in others}
    assert numbers.sum() == len(found)
    return found


def check(mask: BlockMask, expected: torch.Tensor) -> None:
    """`mask` attends exactly `expected`, and everything that it says of itself is true."""
    dense = mask.to_dense()
    assert torch.equal(dense, expected.expand_as(dense))
    assert mask.shape == tuple(dense.shape)
    dead, full, partial = brute_force_counts(dense, mask.block_size)
    assert (mask.num_dead, mask.num_full, mask.num_partial) == (dead, full, partial)
    assert mask.num_attended == dense.sum()
    assert mask.density == pytest.approx(dense.float().mean().item())
    assert mask.block_density == pytest.approx((full + partial) / (dead + full + partial))
    assert mask.ideal_speed_up == (pytest.approx(1 / mask.block_density) if full + partial else math.inf)
    assert torch.equal(mask.rows_with_keys(), dense.any(-1))
    assert mask.empty_rows == (~dense.any(-1)).sum()
    for first, second in zip(LISTS[::2], LISTS[1::2]):
        transposed = first.replace("kv_", "q_"), second.replace("kv_", "q_")
        assert set(transposed) <= set(TRANSPOSED)
        assert listed_tiles(mask, first, second) == listed_tiles(mask, *transposed)
    check_transposed_tokens(mask)


def check_transposed_tokens(mask: BlockMask) -> None:
    """The columns' lists point at the same patterns as the rows' lists."""
    by_tile = {}
    for counts, indices, tokens in (
        ("kv_num_blocks", "kv_indices", "kv_tokens"), ("q_num_blocks", "q_indices", "q_tokens"),
    ):  # fmt: skip
        numbers, entries, patterns = (getattr(mask, name) for name in (counts, indices, tokens))
        for batch, head, line in torch.cartesian_prod(*(torch.arange(size) for size in numbers.shape)).tolist():
            for slot in range(numbers[batch, head, line]):
                other = int(entries[batch, head, line, slot])
                tile = (batch, head, *((line, other) if counts.startswith("kv") else (other, line)))
                pattern = int(patterns[batch, head, line, slot])
                assert by_tile.setdefault(tile, pattern) == pattern
    assert len(by_tile) == mask.num_partial


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("block_size", BLOCKS.values(), ids=BLOCKS)
class TestConstructors:
    def test_from_dense(self, lengths, block_size):
        generator = torch.Generator().manual_seed(0)
        tokens = torch.rand(2, 3, *lengths, generator=generator) < 0.3
        tokens[:, 0, :, : lengths[1] // 2] = False
        tokens[0, 1] = True
        check(BlockMask.from_dense(tokens, block_size), tokens)
        check(BlockMask.from_dense(tokens[0, 0], block_size), tokens[0, 0])

    def test_from_blocks(self, lengths, block_size):
        shape = [-(-length // block) for length, block in zip(lengths, block_size)]
        blocks = torch.rand(2, 2, *shape, generator=torch.Generator().manual_seed(1)) < 0.5
        tokens = blocks.repeat_interleave(block_size[0], dim=2).repeat_interleave(block_size[1], dim=3)
        tokens = tokens[..., : lengths[0], : lengths[1]]
        check(BlockMask.from_blocks(blocks, block_size, seq_lengths=lengths), tokens)
        query, key = positions(*lengths)
        causal = BlockMask.from_blocks(blocks, block_size, seq_lengths=lengths, is_causal=True)
        check(causal, tokens & (query >= key))

    def test_causal(self, lengths, block_size):
        query, key = positions(*lengths)
        check(BlockMask.causal(*lengths, block_size=block_size), query >= key)
        bottom_right = BlockMask.causal(*lengths, bottom_right=True, block_size=block_size)
        check(bottom_right, query + lengths[1] - lengths[0] >= key)

    @pytest.mark.parametrize("window", [1, 33, 500])
    def test_sliding_window(self, lengths, block_size, window):
        query, key = positions(*lengths)
        check(
            BlockMask.sliding_window(*lengths, window=window, block_size=block_size),
            (key <= query) & (query - key < window),
        )
        shifted = query + lengths[1] - lengths[0]
        two_sided = BlockMask.sliding_window(
            *lengths, window=window, is_causal=False, bottom_right=True, block_size=block_size
        )
        check(two_sided, (shifted - key).abs() < window)

    def test_prefix(self, lengths, block_size):
        seen = torch.randint(0, lengths[1] + 1, (2, 1, lengths[0]), generator=torch.Generator().manual_seed(2))
        _, key = positions(*lengths)
        check(BlockMask.prefix(seen, lengths[1], block_size=block_size), key < seen[..., None])

    def test_dynamic_topk(self, lengths, block_size):
        """Against a loop over queries; ties (the bias is rounded) go to the earlier key, -inf is never chosen."""
        bias = torch.randn(2, 1, 1, lengths[1], generator=torch.Generator().manual_seed(3)).round(decimals=1)
        bias[..., ::7] = -math.inf
        for is_causal in (True, False):
            mask = BlockMask.dynamic_topk(bias, 20, block_size, seqlen_q=lengths[0], is_causal=is_causal)
            expected = torch.zeros(2, 1, *lengths, dtype=torch.bool)
            for batch in range(2):
                for query in range(lengths[0]):
                    visible = range(min(query + 1, lengths[1]) if is_causal else lengths[1])
                    allowed = [key for key in visible if bias[batch, 0, 0, key] > -math.inf]
                    best = sorted(allowed, key=lambda key: (-bias[batch, 0, 0, key].item(), key))[:20]
                    expected[batch, 0, query, best] = True
            check(mask, expected)

    def test_intersection(self, lengths, block_size):
        query, key = positions(*lengths)
        tokens = torch.rand(1, 3, *lengths, generator=torch.Generator().manual_seed(4)) < 0.4
        window = BlockMask.sliding_window(*lengths, window=30, is_causal=False, block_size=block_size)
        mask = BlockMask.from_dense(tokens, block_size) & window
        check(mask, tokens & ((query - key).abs() < 30))
        assert len(mask.token_bits) <= max(1, mask.num_partial)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", [[100, 0, 17, 1, 90], [64, 64], [0, 0, 33], [5]], ids=str)
def test_document(lengths, is_causal):
    ids = torch.tensor([number for number, length in enumerate(lengths) for _ in range(length)])
    query, key = positions(len(ids), len(ids))
    expected = (ids[:, None] == ids[None, :]) & ((query >= key) | (not is_causal))
    check(BlockMask.document(lengths, is_causal=is_causal, block_size=32), expected)
    check(BlockMask.document(torch.tensor(lengths), is_causal=is_causal, block_size=(16, 32)), expected)
    check(BlockMask.document(ids=ids, is_causal=is_causal, block_size=32), expected)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_documents_whose_tokens_are_apart_and_differ_between_batch_entries(is_causal):
    ids = torch.randint(-1, 2, (2, 90), generator=torch.Generator().manual_seed(0))
    query, key = positions(90, 90)
    expected = (ids[:, :, None] == ids[:, None, :]) & ((query >= key) | (not is_causal))
    check(BlockMask.document(ids=ids, is_causal=is_causal, block_size=32), expected[:, None])


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("segment_length", "rate"), [(64, 2), (50, 3), (500, 4), (3, 5)])
def test_dilated_mask(segment_length, rate, is_causal):
    query, key = positions(150, 150)
    phase = torch.arange(150) % segment_length % rate
    expected = (query // segment_length == key // segment_length) & (phase[:, None] == phase[None, :])
    expected &= (query >= key) | (not is_causal)
    options = {"segment_length": segment_length, "dilation_rate": rate, "is_causal": is_causal, "block_size": 32}
    check(BlockMask.dilated(150, **options), expected)
    by_head = torch.stack([expected & (phase == head % rate)[:, None] for head in range(5)])
    check(BlockMask.dilated(150, heads=5, **options), by_head[None])


def test_random_blocks_have_their_density_in_every_row_and_repeat():
    mask = BlockMask.random_blocks(640, density=0.3, seed=3, batch=2, heads=3, block_size=64)
    assert (mask.full_kv_num_blocks == 3).all() and not mask.num_partial
    assert mask.density == mask.block_density == pytest.approx(0.3)
    again = BlockMask.random_blocks(640, density=0.3, seed=3, batch=2, heads=3, block_size=64)
    other = BlockMask.random_blocks(640, density=0.3, seed=4, batch=2, heads=3, block_size=64)
    assert torch.equal(mask.full_kv_indices, again.full_kv_indices)
    assert not torch.equal(mask.full_kv_indices, other.full_kv_indices)
    assert not torch.equal(mask.full_kv_indices[:, 0], mask.full_kv_indices[:, 1])
    assert BlockMask.random_blocks(640, density=0.0, block_size=64).empty_rows == 0


@pytest.mark.parametrize("density", [0.5, 0.1])
def test_random_tokens_leave_no_tile_dead(density):
    mask = BlockMask.random_tokens(256, density=density, heads=2, block_size=64)
    check(mask, mask.to_dense())
    assert mask.density == pytest.approx(density, abs=0.01)
    assert mask.num_dead == mask.num_full == 0 and mask.ideal_speed_up == 1


def test_topk_blocks():
    scores = torch.tensor(
        [[3.0, 1.0, 2.0, -math.inf], [5.0, 5.0, 5.0, 0.0], [0.0, 9.0, 1.0, 8.0], [1.0, 2.0, 3.0, 4.0]]
    )
    two = BlockMask.topk_blocks(scores, 2, 16)
    assert two.full_kv_indices[0, 0].tolist() == [[0, 2], [0, 1], [1, 3], [2, 3]]
    everything = BlockMask.topk_blocks(scores, 99, 16)
    assert everything.full_kv_num_blocks[0, 0].tolist() == [3, 4, 4, 4]
    causal = BlockMask.topk_blocks(scores, 2, 16, is_causal=True)
    best = [[0], [0, 1], [1, 2], [2, 3]]  # among the tiles that the row sees
    query, key = positions(64, 64)
    expected = torch.zeros(4, 4, dtype=torch.bool)
    for row, columns in enumerate(best):
        expected[row, columns] = True
    check(causal, expected.repeat_interleave(16, 0).repeat_interleave(16, 1) & (query >= key))
    assert BlockMask.topk_blocks(scores, 0, 16).ideal_speed_up == math.inf


def test_more_keys_wanted_than_there_are():
    bias = torch.randn(1, 1, 1, 50, generator=torch.Generator().manual_seed(0))
    query, key = positions(50, 50)
    check(BlockMask.dynamic_topk(bias, 50, 16), query >= key)
    check(BlockMask.dynamic_topk(bias, 999, 16), query >= key)
    check(BlockMask.dynamic_topk(bias[0, 0], 999, 16, is_causal=False), (query >= 0) & (key >= 0))
    check(BlockMask.dynamic_topk(bias, 0, 16), (query < 0) & (key < 0))


def test_dynamic_topk_with_a_bias_for_each_query():
    bias = torch.randn(1, 2, 40, 70, generator=torch.Generator().manual_seed(0))
    mask = BlockMask.dynamic_topk(bias, 9, 16, is_causal=False)
    expected = torch.zeros_like(bias, dtype=torch.bool).scatter_(-1, bias.topk(9, dim=-1).indices, True)
    check(mask, expected)


def test_a_causal_mask_of_any_length_stores_one_pattern():
    for seqlen in (256, 4096):
        mask = BlockMask.causal(seqlen, block_size=64)
        assert mask.token_bits.shape == (1, 64, 2)
        assert mask.num_attended == seqlen * (seqlen + 1) // 2


def test_memory_is_that_of_tiles_not_of_tokens():
    """65,536 tokens: a token mask would take 4 GiB, the lists a few bytes a tile."""
    mask = BlockMask.random_blocks(65536, density=0.1, heads=8)
    assert mask.num_tiles == 8 * 512**2
    assert mask.num_bytes < 8 * mask.num_tiles
    document = BlockMask.document([65536 // 8] * 8, is_causal=True)
    assert document.num_bytes < 8 * document.num_tiles


def test_tokens_are_packed_lowest_bit_first():
    tokens = torch.zeros(1, 16, 64, dtype=torch.bool)
    tokens[0, 0, [0, 31]] = True
    tokens[0, 1, 33] = True
    words = pack_tokens(tokens)
    assert words.shape == (1, 16, 2) and words.dtype == torch.int32
    assert words[0, 0].tolist() == [-(2**31) + 1, 0] and words[0, 1].tolist() == [0, 2]
    assert count_tokens(words).tolist() == [3]
    narrow = torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(0)) < 0.5
    assert pack_tokens(narrow).shape == (3, 16, 1)
    assert torch.equal(unpack_tokens(pack_tokens(narrow), 16), narrow)


def test_empty_sequences_have_masks():
    for mask in (BlockMask.causal(0), BlockMask.document([]), BlockMask.causal(0, 64), BlockMask.causal(64, 0)):
        assert mask.to_dense().shape == mask.shape and mask.density == mask.block_density == 0
        assert mask.ideal_speed_up == math.inf
    assert BlockMask.causal(64, 0).empty_rows == 64


def test_to_moves_every_tensor():
    mask = BlockMask.causal(64, block_size=16).to("meta")
    assert mask.device.type == mask.token_bits.device.type == mask.q_tokens.device.type == "meta"


@pytest.mark.parametrize("pattern", ["causal", "random:0.4", "tokens:0.3", "document:33,0,67+causal"])
def test_to_flex_means_the_same_mask(pattern):
    """Token by token, through FlexAttention's own expansion, and tile by tile, through its counts."""
    from torch.nn.attention.flex_attention import create_block_mask, create_mask

    mask = parse_mask(pattern, seqlen=100, block_size=32, heads=2)
    flex = mask.to_flex()
    heads = mask.shape[1]
    assert torch.equal(create_mask(flex.mask_mod, 1, heads, 100, 100, device="cpu"), mask.to_dense())
    theirs = create_block_mask(flex.mask_mod, 1, heads, 100, 100, device="cpu", BLOCK_SIZE=32)
    for name in (*LISTS[::2], *TRANSPOSED[::2]):
        assert torch.equal(getattr(flex, name), getattr(theirs, name)), name
    assert torch.equal(flex.to_dense(), theirs.to_dense())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_attends_the_same():
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = torch.randn(3, 1, 2, 100, 16, generator=torch.Generator().manual_seed(0)).double()
    mask = parse_mask("random:0.5+causal", seqlen=100, block_size=32, heads=2)
    expected = attention_reference(q, k, v, mask=mask.to_dense())
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask.to_flex()), expected)


# Wrong arguments

BOOLS = torch.ones(64, 64, dtype=torch.bool)
SCORES = torch.ones(4, 4)
THREE_HEADS = BlockMask.random_blocks(8, density=0.5, heads=3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: BlockMask.from_dense(BOOLS.float()), TypeError, "mask must be a bool tensor, got torch.float32"),
        (lambda: BlockMask.from_dense([[True]]), TypeError, "mask must be a bool tensor, got list"),
        (lambda: BlockMask.from_dense(BOOLS[None]), ValueError, r"mask must have shape \(queries, keys\) or"),
        (lambda: BlockMask.from_dense(BOOLS, 48), ValueError, "block_size must be a power of two from 16 to .*48"),
        (lambda: BlockMask.causal(64, block_size=8192), ValueError, "block_size must be a .* from 16 to 4096, or two"),
        (lambda: BlockMask.from_dense(BOOLS.to("meta")), ValueError, "mask must have values, got a tensor on meta"),
        (lambda: BlockMask.from_dense(BOOLS.to_sparse()), TypeError, "mask must be a dense strided tensor, got t"),
        (lambda: BlockMask.topk_blocks(SCORES.to("meta"), 2), ValueError, "scores must have values"),
        (lambda: BlockMask.dynamic_topk(SCORES.to_sparse(), 2), TypeError, "bias must be a dense strided tensor"),
        (lambda: BlockMask.prefix(torch.ones(4).int().to("meta"), 4), ValueError, "lengths must have values"),
        (lambda: BlockMask.document(torch.ones(4).int().to("meta")), ValueError, "lengths must have values"),
        (lambda: BlockMask.document(ids=torch.ones(4).int().to_sparse()), TypeError, "ids must be a dense strided"),
        (lambda: BlockMask.causal(2**70), ValueError, "seqlen_q must be at most 2147483647, got 118059"),
        (lambda: BlockMask.causal(10**5000), ValueError, "seqlen_q must be at most .*, got an integer of 16"),
        (lambda: BlockMask.document([2**63]), ValueError, "lengths must be at most 2147483647"),
        (lambda: BlockMask.document([2**31 - 1, 1]), ValueError, "the sum of lengths must be at most 2147483647"),
        (lambda: BlockMask.prefix(torch.ones(4).int(), 2**63), ValueError, "seqlen_k must be at most 2147483647"),
        (lambda: BlockMask.random_blocks(8, density=1, heads=2**63), ValueError, "heads must be at most 2147483647"),
        (lambda: BlockMask.random_blocks(8, density=1, seed=10**999), ValueError, "64 bits, got an integer of 3"),
        (lambda: BlockMask.from_dense(BOOLS, 8), ValueError, "block_size must be a power of two from 16 to 4096"),
        (lambda: BlockMask.from_dense(BOOLS, (32, True)), ValueError, "block_size must be a power of two"),
        (lambda: BlockMask.from_dense(BOOLS, (32,)), ValueError, "block_size must be a power of two"),
        (lambda: BlockMask.from_blocks(BOOLS.int()), TypeError, "blocks must be a bool tensor, got torch.int32"),
        (lambda: BlockMask.from_blocks(BOOLS, 16, seq_lengths=(64, 64)), ValueError, r"\(64, 64\) are \(4, 4\) tiles"),
        (lambda: BlockMask.causal(-1), ValueError, "seqlen_q must be an int from 0 on, got -1"),
        (lambda: BlockMask.causal(4, 2.5), ValueError, "seqlen_k must be an int from 0 on, got 2.5"),
        (lambda: BlockMask.sliding_window(64, window=0), ValueError, "window must be an int from 1 on, got 0"),
        (lambda: BlockMask.prefix(SCORES, 4), TypeError, "lengths must be an int32 or int64 tensor"),
        (lambda: BlockMask.prefix(SCORES.int(), 4), TypeError, "lengths must be an int32 or int64 tensor of shape"),
        (lambda: BlockMask.document(), ValueError, "document needs either lengths or ids"),
        (lambda: BlockMask.document([1], ids=SCORES), ValueError, "document needs either lengths or ids"),
        (lambda: BlockMask.document([3, -1]), ValueError, "lengths must be an int from 0 on, got -1"),
        (lambda: BlockMask.document(ids=SCORES), TypeError, "ids must be an int32 or int64 tensor of shape"),
        (lambda: BlockMask.dilated(64, segment_length=0, dilation_rate=1), ValueError, "segment_length must be"),
        (lambda: BlockMask.dilated(64, segment_length=1, dilation_rate=0), ValueError, "dilation_rate must be"),
        (lambda: BlockMask.dilated(64, segment_length=1, dilation_rate=1, heads=0), ValueError, "heads must be"),
        (lambda: BlockMask.random_blocks(64, density=1.5), ValueError, "density must be between 0 and 1, got 1.5"),
        (lambda: BlockMask.random_tokens(64, density=-0.5), ValueError, "density must be between 0 and 1, got -0.5"),
        (
            lambda: BlockMask.topk_blocks(BOOLS, 2),
            TypeError,
            "scores must be a floating tensor of 16 bits or more, got torch.bool",
        ),
        (lambda: BlockMask.topk_blocks(SCORES, -2), ValueError, "num_kept must be an int from 0 on, got -2"),
        (lambda: BlockMask.dynamic_topk(SCORES, True), ValueError, "num_keys must be an int from 0 on, got True"),
        (lambda: BlockMask.dynamic_topk(SCORES, 2, seqlen_q=9), ValueError, "bias must have 1 row or seqlen_q=9"),
        (lambda: BlockMask.causal(64, block_size=16) & BlockMask.causal(64, block_size=32), ValueError, "one block_"),
        (lambda: BlockMask.causal(64) & BlockMask.causal(32), ValueError, "masks must have one seq_lengths"),
        (lambda: use_lists(1.1), ValueError, "block_density must be between 0 and 1, got 1.1"),
        (lambda: parse_mask("diagonal", seqlen=64), ValueError, "mask pattern must be one of full, causal.*'diagonal'"),
        (lambda: parse_mask("window:wide", seqlen=64), ValueError, "mask pattern must be one of.*'window:wide'"),
        (lambda: parse_mask("dilated:64", seqlen=64), ValueError, "mask pattern must be one of"),
        (lambda: parse_mask("document:1,2", seqlen=64), ValueError, "have 3 tokens, and the sequence has 64"),
        (lambda: parse_mask("full", seqlen=0), ValueError, "seqlen must be an int from 1 on, got 0"),
        (lambda: parse_mask(None, seqlen=8), TypeError, "mask pattern must be a string, got None"),
        (lambda: parse_mask("random:0.5", seqlen=8, seed=2**70), ValueError, "seed must be an int of 64 bits, got 11"),
        (lambda: BlockMask.from_blocks(BOOLS, seq_lengths=5), TypeError, "seq_lengths must be a tuple of .*got 5"),
        (lambda: BlockMask.from_blocks(BOOLS, seq_lengths=(5, None)), ValueError, "seq_lengths must be an int .*None"),
        (lambda: BlockMask.from_blocks(BOOLS, is_causal="no"), TypeError, "is_causal must be a bool, got 'no'"),
        (lambda: BlockMask.causal(8, device="meta"), ValueError, "device must be one whose tensors have values, got m"),
        (lambda: BlockMask.random_blocks(8, density=1, device="meta"), ValueError, "tensors have values, got meta"),
        (lambda: BlockMask.causal(8, bottom_right=1), TypeError, "bottom_right must be a bool, got 1"),
        (lambda: BlockMask.sliding_window(8, window=2, is_causal=None), TypeError, "is_causal must be a bool, got N"),
        (lambda: BlockMask.causal(8, device="nowhere"), ValueError, "device must be a torch.device or its name"),
        (lambda: BlockMask.causal(8, device=3.5), ValueError, r"device must be a torch.device or its name, got 3\.5"),
        (lambda: BlockMask.causal(8, device="cuda:99"), ValueError, "device must be one of this machine, .* cuda:99"),
        (lambda: BlockMask.causal(8).to("cuda:99"), ValueError, "device must be one of this machine, .*got cuda:99"),
        (lambda: BlockMask.document(5), TypeError, "lengths must be a sequence of ints, got int"),
        (lambda: BlockMask.document("12"), TypeError, "lengths must be a sequence of ints, got str"),
        (lambda: BlockMask.document(torch.tensor(3)), TypeError, "lengths must be a sequence of ints, got torch.int64"),
        (lambda: BlockMask.random_blocks(8, density=0.5, seed="a"), ValueError, "seed must be an int of 64 bits"),
        (lambda: BlockMask.random_blocks(8, density=0.5, batch=-1), ValueError, "batch must be an int from 1 on"),
        (lambda: BlockMask.random_tokens(8, density=0.5, heads="2"), ValueError, "heads must be an int from 1 on"),
        (lambda: THREE_HEADS & BlockMask.random_blocks(8, density=0.5, heads=2), ValueError,
         r"masks must have as many batch entries and heads, or 1, got \(1, 3\) and \(1, 2\)"),
        (lambda: THREE_HEADS.to_flex(3), TypeError, "mask_mod must be callable or None, got 3"),
        (lambda: use_lists("0.5"), ValueError, "block_density must be between 0 and 1, got '0.5'"),
    ],
)  # fmt: skip
def test_wrong_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("huge", [2**31, 2**63 - 1, 2**63, 2**63 + 2, 2**64 + 1, 2**200])
@pytest.mark.parametrize(
    ("build", "enough"),
    [
        (lambda n: BlockMask.sliding_window(40, 70, window=n, block_size=16), 40),
        (lambda n: BlockMask.sliding_window(40, 70, window=n, block_size=16, is_causal=False), 70),
        (lambda n: BlockMask.sliding_window(40, 70, window=n, block_size=16, bottom_right=True), 70),
        (lambda n: BlockMask.sliding_window(70, 40, window=n, block_size=16, bottom_right=True, is_causal=False), 70),
        (lambda n: BlockMask.dilated(70, segment_length=n, dilation_rate=3, block_size=16), 70),
        (lambda n: BlockMask.dilated(70, segment_length=20, dilation_rate=n, block_size=16), 20),
        (lambda n: BlockMask.dilated(70, segment_length=4, dilation_rate=n, heads=6, block_size=16), 6),
        (lambda n: BlockMask.topk_blocks(SCORES, n, 16), 4),
        (lambda n: BlockMask.dynamic_topk(SCORES, n, 16), 4),
    ],
)  # fmt: skip
def test_more_than_there_is_is_all_of_it(build, enough, huge):
    """Integers beyond 64 bits among them: they wrapped around in tensors, or overflowed."""
    assert torch.equal(build(huge).to_dense(), build(enough).to_dense())


def test_a_mask_without_values_has_a_name():
    assert repr(BlockMask.causal(8).to("meta")) == "BlockMask(shape=(1, 1, 8, 8), block_size=(128, 128), device=meta)"


def test_and_with_something_else_is_no_mask():
    with pytest.raises(TypeError, match="unsupported operand"):
        BlockMask.causal(64) & torch.ones(64, 64)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kv_num_blocks": torch.zeros(1, 1, 4)}, TypeError, "kv_num_blocks must be an int32 tensor, got torch.fl"),
        ({"q_indices": [[1]]}, TypeError, "BlockMask.q_indices must be an int32 tensor, got list"),
        ({"seq_lengths": (128, 64)}, ValueError, r"kv_num_blocks must have shape \(1, 1, 8\), got \(1, 1, 4"),
        (
            {"kv_indices": torch.zeros(1, 1, 4, 0, dtype=torch.int32)}, ValueError,
            r"kv_indices must have shape \(1, 1, 4, at least 1\), got \(1, 1, 4, 0\)",
        ),
        ({"token_bits": torch.zeros(1, 16, 4, dtype=torch.int32)}, ValueError, "BlockMask.token_bits must have shape"),
        (
            {"full_q_num_blocks": torch.zeros(1, 1, 4, 2, dtype=torch.int32)[..., 0]}, ValueError,
            "BlockMask.full_q_num_blocks must be contiguous on cpu",
        ),
        ({"block_size": (24, 16)}, ValueError, "block_size must be a power of two"),
    ],
)  # fmt: skip
def test_inconsistent_fields_are_refused(change, error, message):
    with pytest.raises(error, match=message):
        replace(BlockMask.causal(64, block_size=16), **change)


@pytest.mark.parametrize(
    ("name", "value", "largest"),
    [
        ("kv_num_blocks", 9, 4),
        ("kv_indices", 1000, 3),
        ("kv_indices", -1, 3),
        ("kv_tokens", 5, 4),
        ("full_kv_num_blocks", 4, 2),
        ("full_kv_indices", 3, 2),  # the last tile is cut, and would be read past its end
        ("q_num_blocks", -1, 2),
        ("q_indices", 4, 3),
        ("q_tokens", 5, 4),
        ("full_q_num_blocks", 3, 2),
        ("full_q_indices", 3, 2),
    ],
)
def test_values_that_lead_out_of_the_mask_are_refused(name, value, largest):
    """Kernels follow the lists without a look: an index too large was a wrong result or a segmentation fault."""
    mask = BlockMask.causal(60, block_size=16)
    tensor = getattr(mask, name).clone()
    tensor.view(-1)[0] = value
    values = f"{min(value, int(tensor.min()))} to {max(value, int(tensor.max()))}"
    with pytest.raises(ValueError, match=f"BlockMask.{name} must have values from 0 to {largest}, got {values}"):
        replace(mask, **{name: tensor})


def drawn_masks():
    return [
        BlockMask.random_blocks(200, density=0.3, seed=1, block_size=16),
        BlockMask.random_tokens(200, density=0.3, seed=1, block_size=16),
        parse_mask("topk:8", seqlen=200, block_size=16),
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_seed_means_the_same_mask_under_any_default_dtype(dtype):
    expected = drawn_masks()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        drawn = drawn_masks()
    finally:
        torch.set_default_dtype(before)
    assert all(torch.equal(ours.to_dense(), theirs.to_dense()) for ours, theirs in zip(drawn, expected))


def test_a_seed_means_the_same_mask_under_any_default_device():
    """The numbers were drawn on the default device, by a generator of the CPU: an error."""
    expected = drawn_masks()
    with torch.device("meta"):
        drawn = drawn_masks()
    for ours, theirs in zip(drawn, expected):
        assert ours.device.type == "cpu" and torch.equal(ours.to_dense(), theirs.to_dense())


# The adaptive rule


def test_lists_only_below_the_measured_density():
    assert 0 < MAX_LIST_DENSITY < 1
    assert use_lists(0.0) and use_lists(MAX_LIST_DENSITY - 1e-6)
    assert not use_lists(MAX_LIST_DENSITY) and not use_lists(1.0)
    assert use_lists(BlockMask.causal(4096).block_density)
    assert not use_lists(BlockMask.random_tokens(256, density=0.1, block_size=64).block_density)


# Causality: editing token t changes neither an earlier row nor its gradients


def with_rows_before(change_from: int, masks: dict[str, BlockMask], seqlen: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = torch.randn(4, 1, 2, seqlen, 8, generator=generator, dtype=torch.float64)
    grad[:, :, change_from:] = 0  # a loss of the earlier rows alone
    edited = [x.clone() for x in (q, k, v)]
    for x in edited:
        x[:, :, change_from:] += 1
    for name, mask in masks.items():
        results = []
        for inputs in ((q, k, v), edited):
            leaves = [x.clone().requires_grad_() for x in inputs]
            output = attention_reference(*leaves, mask=mask.to_dense())
            results.append((output, *torch.autograd.grad(output, leaves, grad)))
        for before, after in zip(*results):
            assert torch.equal(before[:, :, :change_from], after[:, :, :change_from]), name
            if before is not results[0][0]:
                assert not before[:, :, change_from:].any(), name  # later tokens got no gradient from earlier rows


@pytest.mark.parametrize("changed", [1, 37, 64, 95])
def test_no_causal_mask_sees_the_future(changed):
    bias = torch.randn(1, 2, 1, 96, generator=torch.Generator().manual_seed(0))
    scores = torch.randn(1, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    masks = {
        "causal": BlockMask.causal(96, block_size=16),
        "window": BlockMask.sliding_window(96, window=20, block_size=16),
        "document": BlockMask.document([30, 0, 40, 26], is_causal=True, block_size=16),
        "dilated": BlockMask.dilated(96, segment_length=50, dilation_rate=3, is_causal=True, block_size=16),
        "blocks": BlockMask.from_blocks(scores > 0, 16, is_causal=True),
        "topk_blocks": BlockMask.topk_blocks(scores, 3, 16, is_causal=True),
        "dynamic_topk": BlockMask.dynamic_topk(bias, 10, 16),
    }
    with_rows_before(changed, masks, 96)


def test_the_causality_check_finds_a_leak():
    leaking = BlockMask.causal(96, block_size=16).to_dense()
    leaking[..., 10, 40] = True
    with pytest.raises(AssertionError, match="leak"):
        with_rows_before(37, {"leak": BlockMask.from_dense(leaking, 16)}, 96)


def test_dynamic_topk_does_not_read_the_bias_of_later_keys():
    bias = torch.randn(1, 1, 1, 96, generator=torch.Generator().manual_seed(0))
    edited = bias.clone()
    edited[..., 40:] += 3
    before, after = (BlockMask.dynamic_topk(x, 10, 16).to_dense() for x in (bias, edited))
    assert torch.equal(before[..., :40, :], after[..., :40, :]) and not torch.equal(before, after)


# Dilated attention

DILATED = {
    "whole_segments": (96, 32, 4), "ragged_tail": (100, 32, 2), "rate_does_not_divide": (100, 30, 4),
    "one_segment": (50, 200, 3), "rate_above_segment": (20, 3, 5), "rate_1": (60, 20, 1), "one_token": (1, 8, 2),
}  # fmt: skip


def gradients(function, inputs, grad_output):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output = function(*leaves)
    return output, *torch.autograd.grad(output, leaves, grad_output)


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize("phases", ["all", "by_head"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("seqlen", "segment_length", "rate"), DILATED.values(), ids=DILATED)
def test_dilated_attention_equals_its_mask(seqlen, segment_length, rate, is_causal, phases, backend):
    generator = torch.Generator().manual_seed(0)
    *inputs, grad_output = torch.randn(4, 2, 5, seqlen, 8, dtype=torch.float64, generator=generator)
    mask = BlockMask.dilated(
        seqlen, segment_length=segment_length, dilation_rate=rate, heads=5 if phases == "by_head" else None,
        is_causal=is_causal, block_size=16,
    )  # fmt: skip
    expected = gradients(lambda q, k, v: attention_reference(q, k, v, mask=mask.to_dense()), inputs, grad_output)

    def dilated(q, k, v):
        return dilated_attention(q, k, v, segment_length, rate, phases=phases, is_causal=is_causal, backend=backend)

    for result, wanted in zip(gradients(dilated, inputs, grad_output), expected):
        assert (result - wanted).abs().max() <= 1e-12


@pytest.mark.parametrize("phases", ["all", "by_head"])
def test_dilated_attention_compiles_whole_for_lengths_that_vary(phases):
    """torch.compile refused `divmod` of a length that it had not been told."""

    def dilated(x):
        return dilated_attention(x, x, x, 32, 3, phases=phases, is_causal=True, backend="tiled")

    compiled = torch.compile(dilated, fullgraph=True, dynamic=True, backend="aot_eager")
    for seqlen in (70, 75, 96):
        x = torch.randn(1, 4, seqlen, 8, generator=torch.Generator().manual_seed(seqlen))
        assert torch.equal(compiled(x), dilated(x))


def test_by_head_is_longnets_formula():
    """LongNet's equations as they stand: segment i of head j is X[i w + s_j :: r] up to (i + 1) w, s_j = j mod r."""
    seqlen, width, rate, heads = 96, 32, 4, 6
    q, k, v = torch.randn(3, 1, heads, seqlen, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = torch.zeros_like(q)
    for head in range(heads):
        for segment in range(seqlen // width):
            rows = torch.arange(segment * width + head % rate, (segment + 1) * width, rate)
            scores = q[0, head, rows] @ k[0, head, rows].T / 8**0.5
            expected[0, head, rows] = torch.softmax(scores, dim=-1) @ v[0, head, rows]
    result = dilated_attention(q, k, v, width, rate, phases="by_head", backend="reference")
    assert (result - expected).abs().max() <= 1e-12


def test_dilated_attention_makes_no_quadratic_tensor():
    """No tensor of the forward or backward has tokens² elements, nor a share of them that scores would need."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            for x in result if isinstance(result, tuple | list) else (result,):
                if isinstance(x, torch.Tensor):
                    largest = max(largest, x.numel())
            return result

    tokens = 4096
    leaves = [torch.randn(1, 1, tokens, 16, requires_grad=True) for _ in range(3)]
    with Watch():
        dilated_attention(*leaves, tokens, 4, is_causal=True, backend="tiled").sum().backward()
    assert largest <= tokens * 64, largest  # a tile of 64 by 64 for each of tokens / 64 rows; scores would be 64 times


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0, 1), {}, "segment_length must be a positive int, got 0"),
        ((8, 0), {}, "dilation_rate must be a positive int, got 0"),
        ((8, 2.0), {}, "dilation_rate must be a positive int, got 2.0"),
        ((8, 2), {"phases": "some"}, "phases must be one of all, by_head, got 'some'"),
    ],
)
def test_dilated_attention_refuses(arguments, options, message):
    q = torch.zeros(1, 2, 16, 8)
    with pytest.raises(ValueError, match=message):
        dilated_attention(q, q, q, *arguments, **options)


def test_dilated_attention_refuses_shapes():
    q = torch.zeros(1, 2, 16, 8)
    with pytest.raises(ValueError, match=r"q must have shape \(batch, heads, tokens, head_dim\), got \(2, 16, 8\)"):
        dilated_attention(q[0], q[0], q[0], 8, 2)
    with pytest.raises(
        ValueError, match=r"k must have q's shape \(1, 2, 16, 8\) in dilated attention, got \(1, 2, 9, 8"
    ):
        dilated_attention(q, q[:, :, :9], q[:, :, :9], 8, 2)


# Dynamic masks


@pytest.mark.slow_if(num_keys=30, backend="triton")
@pytest.mark.slow_if(num_keys=500, backend="triton")
@pytest.mark.parametrize("backend", ["reference", "tiled", "triton"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("num_keys", [0, 1, 30, 80, 500])
def test_shared_keys_equal_their_token_mask(num_keys, is_causal, backend):
    """Gathered keys against the mask over all keys: grouped heads, a bias a key head, keys never chosen, W >= K."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if backend == "triton" else torch.float64
    q, grad_output = torch.randn(2, 2, 4, 70, 16, dtype=dtype, generator=generator)
    k, v = torch.randn(2, 2, 2, 80, 16, dtype=dtype, generator=generator)
    bias = torch.randn(2, 2, 80, generator=generator)
    bias[:, :, ::3] = -math.inf
    kept = torch.zeros(2, 2, 80, dtype=torch.bool)
    for batch in range(2):
        for head in range(2):
            order = sorted(range(80), key=lambda key: -bias[batch, head, key].item())[:num_keys]
            kept[batch, head, [key for key in order if bias[batch, head, key] > -math.inf]] = True
    query, key = positions(70, 80)
    mask = kept.repeat_interleave(2, dim=1)[:, :, None] & ((query >= key) | (not is_causal))

    def oracle(q, k, v):
        k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
        return attention_reference(q, k, v, mask=mask)

    def shared(q, k, v):
        return shared_keys_attention(q, k, v, bias, num_keys, is_causal=is_causal, enable_gqa=True, backend=backend)

    tolerance = 1e-5 if backend == "triton" else 1e-12
    expected = gradients(oracle, [x.double() for x in (q, k, v)], grad_output.double())
    for result, wanted in zip(gradients(shared, (q, k, v), grad_output), expected):
        assert (result - wanted).abs().max() <= tolerance


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0], ids=["flat", "gentle", "steep"])
@pytest.mark.parametrize("block", [16, 32, 64])
@pytest.mark.parametrize(
    ("queries", "keys"), [(128, 128), (100, 128), (128, 90), (100, 37), (65, 200), (17, 16), (1, 1)]
)
def test_staircase(queries, keys, block, share):
    """A column's rows end with those that see all of it, but a row that the end cuts sees none so."""
    climbs = torch.rand(2, 3, queries, generator=torch.Generator().manual_seed(queries + block)) < share
    lengths = climbs.cumsum(-1).clamp(max=keys)
    mask = staircase_mask(lengths, keys, block)
    check(mask, positions(queries, keys)[1] < lengths[..., None])
    expected = BlockMask.prefix(lengths, keys, block_size=block)
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(mask, name), getattr(expected, name))
    whole = queries // block
    assert (mask.kv_num_blocks[:, :, :whole] <= steps_of(block, -(-keys // block))).all()


def test_staircase_of_nothing():
    assert staircase_mask(torch.zeros(1, 1, 0, dtype=torch.int64), 5).shape == (1, 1, 0, 5)
    assert staircase_mask(torch.zeros(1, 1, 5, dtype=torch.int64), 0).num_attended == 0


def test_staircase_reads_no_value_back():
    """Whatever read a length on the host, and so waited for the GPU, would fail on tensors without values."""
    lengths = torch.empty(2, 3, 300, dtype=torch.int32, device="meta")
    with pytest.raises((RuntimeError, NotImplementedError)):
        patterns.prefix(lengths, 200, (128, 128))
    assert staircase_mask(lengths, 200).shape == (2, 3, 300, 200)


def test_shared_bias_broadcasts_over_heads():
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 3, 40, 8, dtype=torch.float64, generator=generator)
    bias = torch.randn(1, 1, 40, generator=generator)
    one = shared_keys_attention(q, k, v, bias, 9, is_causal=True, backend="reference")
    each = shared_keys_attention(q, k, v, bias.expand(1, 3, 40), 9, is_causal=True, backend="reference")
    assert torch.equal(one, each)


def test_chosen_keys_ascend_and_ties_go_to_the_earlier():
    positions, chosen = choose_keys(torch.tensor([[[1.0, 3.0, 3.0, -math.inf, 3.0]]]), 2)
    assert positions.tolist() == [[[1, 2]]] and chosen.all()
    positions, chosen = choose_keys(torch.tensor([[[1.0, 3.0, 3.0, -math.inf, 3.0]]]), 9)
    assert positions.tolist() == [[[0, 1, 2, 4, 3]]] and chosen.tolist() == [[[True, True, True, True, False]]]


@pytest.mark.parametrize(
    ("bias", "num_keys", "error", "message"),
    [
        (
            torch.zeros(1, 1, 16, dtype=torch.int64),
            4,
            TypeError,
            "bias must be a floating tensor of 16 bits or more, got torch.int64",
        ),
        (torch.zeros(1, 1, 16).to(torch.float8_e4m3fn), 4, TypeError, "16 bits or more, got torch.float8_e4m3fn"),
        (None, 4, TypeError, "bias must be a floating tensor of 16 bits or more, got NoneType"),
        (
            torch.zeros(1, 1, 15),
            4,
            ValueError,
            r"bias must have shape \(1, 2 or 1, 16\) to go with k .*got \(1, 1, 15\)",
        ),
        (torch.zeros(1, 1, 16, device="meta"), 4, ValueError, "bias must be on k's device cpu, got meta"),
        (torch.zeros(1, 1, 16), -1, ValueError, "num_keys must be an int from 0 on, got -1"),
        (torch.zeros(1, 1, 16), 1.5, ValueError, "num_keys must be an int from 0 on, got 1.5"),
    ],
)
def test_shared_keys_attention_refuses(bias, num_keys, error, message):
    q = torch.zeros(1, 2, 16, 8)
    with pytest.raises(error, match=message):
        shared_keys_attention(q, q, q, bias, num_keys)


@pytest.mark.parametrize("attend", [
    lambda q: dilated_attention(q, q, q, 4, 2, is_causal="no"),
    lambda q: shared_keys_attention(q, q, q, torch.zeros(1, 1, 8), 4, is_causal="no"),
], ids=["dilated", "shared"])  # fmt: skip
def test_flags_are_bools(attend):
    with pytest.raises(TypeError, match="is_causal must be a bool, got 'no'"):
        attend(torch.ones(1, 1, 8, 16))


def test_shared_keys_attention_refuses_three_dimensions():
    q = torch.zeros(2, 16, 8)
    with pytest.raises(ValueError, match=r"k must have shape \(batch, kv_heads, keys, head_dim\), got \(2, 16, 8\)"):
        shared_keys_attention(q, q, q, torch.zeros(1, 1, 16), 4)


@pytest.mark.parametrize("backend", ["reference", "tiled", "triton"])
@pytest.mark.parametrize("pattern", ["tokens:0.5", "tokens:0.1", "topk:20", "dilated:50/3+causal"])
def test_partial_tiles_equal_sdpa_with_a_bool_mask(pattern, backend):
    q, k, v = torch.randn(3, 1, 2, 100, 16, generator=torch.Generator().manual_seed(0))
    mask = parse_mask(pattern, seqlen=100, block_size=64, heads=2)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask.to_dense())
    output = flash_attention(q, k, v, block_mask=mask, backend=backend)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)


# doctor --mask


def test_doctor_diagnoses_a_mask(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    result = CliRunner().invoke(app, ["doctor", "--mask", "causal", "--seqlen", "512", "--block-size", "64"])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    said = {" ".join(line[:42].split()): line[42:].strip() for line in lines}
    assert said["density (attended pairs)"] == "0.5010"
    assert said["block density (live tiles)"] == "0.5625"
    assert said["dead tiles"] == "28 of 64" and said["full tiles"] == "28"
    assert said["partial tiles"].startswith("8 ")
    assert said["empty rows (queries without a key)"] == "0"
    assert said["ideal speed-up (all tiles / live tiles)"] == "1.78×"
    assert said["verdict"] == "lists pay: block density below 0.95"
    assert lines[-8:] == ["█" * row + "▒" + "·" * (7 - row) for row in range(8)]


@pytest.mark.parametrize(
    ("pattern", "verdict"),
    [
        ("tokens:0.1", "0 % dead tiles, ideal 1.00×: skipping tiles gains nothing on this mask"),
        ("random:0.96", "lists gain nothing: block density not below 0.95"),
        ("topk:0", "nothing is attended"),
    ],
)
def test_doctor_says_what_skipping_gains(pattern, verdict, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    result = CliRunner().invoke(app, ["doctor", "--mask", pattern, "--seqlen", "1280", "--block-size", "64"])
    assert result.exit_code == 0 and verdict in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mask", "nothing"], "mask pattern must be one of"),
        (["--seqlen", "64"], "--seqlen, --block-size, --heads and --seed go with --mask"),
        (["--seed", "1"], "--seqlen, --block-size, --heads and --seed go with --mask"),
        (["--mask", "causal", "--seqlen", str(2**40)], "tiles, and at most 4,194,304 are diagnosed"),
        (["--mask", "random:0.5", "--seqlen", "100", "--heads", str(2**31 - 1)], "tiles, and at most 4,194,304"),
        (["--mask", "tokens:0.5", "--seqlen", "262144", "--block-size", "4096"], "pairs of tokens of tokens:0.5"),
        (["--mask", "topk:5", "--seqlen", "4000000", "--block-size", "4096"], "of topk:5, and at most 1,073,741,824"),
        (["--mask", "causal+dilated:8192/2", "--seqlen", "262144"], "2,147,483,648 pairs of tokens of dilated:8192/2"),
        (["--mask", "random:0.5", "--seed", str(2**70)], "seed must be an int of 64 bits"),
        (["--mask", "causal", "--block-size", "100"], "block_size must be a power of two"),
    ],
)
def test_doctor_refuses_wrong_masks_in_one_line(arguments, message):
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ") and message in result.stderr and len(result.stderr.splitlines()) == 1


def test_doctor_builds_long_dilated_masks_of_short_segments():
    """Their pairs are those within segments, and one mask serves all heads."""
    result = CliRunner().invoke(app, ["doctor", "--mask", "dilated:256/4", "--seqlen", "32768", "--heads", "8"])
    assert result.exit_code == 0 and "(1, 1, 32768, 32768)" in result.output, result.output
