"""The Hopper forward's order of work and its protocol between warps, without a GPU:
`attention/hopper/schedule.py`.
"""

import math
import random
from collections import Counter
from dataclasses import replace
from itertools import accumulate, product

import numpy as np
import pytest
import torch

pytest.importorskip(
    "cs336_systems.attention.hopper.walk", reason="this triton has no Gluon for Hopper"
)

from cs336_systems.attention.hopper import forward
from cs336_systems.attention.hopper import walk as kernel
from cs336_systems.attention.hopper.entry import kernel_names
from cs336_systems.attention.hopper.schedule import (
    CONSUMER_ROWS,
    ORDERS,
    SCHEDULES,
    UNPAIRED,
    ForwardPlan,
    _steps_of_tiles,
    estimated_steps,
    plan_forward,
    plan_packed_forward,
)
from cs336_systems.attention.masks import BlockMask
from cs336_systems.attention.triton import split
from cs336_systems.attention.triton.launch import launch
from tests.hopper_protocol import (
    first_query,
    forward_arrivals,
    forward_partitions,
    items_of_program,
    key_tiles,
    keys_of_part,
    run_at_random,
    run_forward,
    skips_first_key_tile,
)

# those of large grids
LARGE = {head_tile: schedules[0] for head_tile, schedules in SCHEDULES.items()}
ALL_SCHEDULES = [schedule for schedules in SCHEDULES.values() for schedule in schedules]
EACH_SCHEDULE = pytest.mark.parametrize(
    "schedule",
    ALL_SCHEDULES,
    ids=[f"d{schedule.head_tile}-{schedule.query_tile}" for schedule in ALL_SCHEDULES],
)


EACH_MASK = pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])


def each_launch(test):
    """With every schedule, mask and order."""
    return pytest.mark.parametrize("order", ORDERS)(EACH_MASK(EACH_SCHEDULE(test)))


def plan(
    head_dim, is_causal, num_queries, num_keys, batch_heads=1, num_multiprocessors=132, **options
) -> ForwardPlan:
    return plan_forward(
        head_dim=head_dim, is_causal=is_causal, num_queries=num_queries, num_keys=num_keys, batch_heads=batch_heads,
        group=1, num_multiprocessors=num_multiprocessors, **options,
    )  # fmt: skip


def make_launch(
    schedule,
    is_causal,
    num_queries,
    num_keys,
    *,
    order="tiles",
    batch_heads=3,
    together=2,
    num_multiprocessors=4,
) -> ForwardPlan:
    shape = (schedule.head_tile, is_causal, num_queries, num_keys, batch_heads, num_multiprocessors)
    launch = plan(*shape, config=schedule.name(order))
    assert launch.schedule == schedule
    return replace(launch, heads_together=together)


def all_shapes():
    """(num_queries, num_keys): every length up to 300, and unequal ones around the tiles' edges."""
    edges = (1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 300, 385, 641)
    return dict.fromkeys([(n, n) for n in range(1, 301)] + list(product(edges, edges)))


@EACH_MASK
@EACH_SCHEDULE
def test_each_query_meets_each_key_that_it_sees_once(schedule, is_causal):
    """And no other: steps past the masked ones hide nothing. A consumer skips a key tile that none
    of its rows sees.

    Tiles start where a consumer's rows do, are never empty, and the diagonal cuts few key tiles.
    """
    masked = schedule.masked_tiles(is_causal)
    for num_queries, num_keys in all_shapes():
        launch = make_launch(schedule, is_causal, num_queries, num_keys)
        sees = (
            np.tri(num_queries, num_keys, dtype=int)
            if is_causal
            else np.ones((num_queries, num_keys), dtype=int)
        )
        met = np.zeros_like(sees)
        starts = [first_query(launch, tile) for tile in range(launch.num_tiles)]
        assert starts == [launch.first_query(tile) for tile in range(launch.num_tiles)], (
            "as the host has them"
        )
        assert (
            all(first % CONSUMER_ROWS == 0 for first in starts) and starts[0] > -schedule.query_tile
        )
        assert starts[-1] + schedule.query_tile - num_queries < schedule.alignment
        for tile, first in enumerate(starts):
            rows = slice(max(first, 0), first + schedule.query_tile)
            walk = key_tiles(launch, tile)
            for step, read in enumerate(walk):
                # The kernel hides by the position that a tile would have, not by where it was read
                # from.
                place = (len(walk) - 1 - step) * schedule.key_tile
                keys = slice(place, place + schedule.key_tile)
                if read == place:
                    met[rows, keys] += sees[rows, keys] if step < masked else 1
                else:
                    assert read == num_keys and step < masked and not sees[rows, keys].any(), (
                        "read from behind the end"
                    )
            for consumer in range(schedule.consumers):
                own = first + consumer * CONSUMER_ROWS
                is_hidden = is_causal and (len(walk) - 1) * schedule.key_tile >= own + CONSUMER_ROWS
                assert own < 0 or skips_first_key_tile(launch, tile, consumer) == is_hidden
        assert (met == sees).all(), (num_queries, num_keys)
        # All tiles at once, and not one after the other: of 64 heads of 131,072 tokens that took
        # the host 36 ms.
        assert _steps_of_tiles(launch).tolist() == [
            len(key_tiles(launch, tile)) for tile in range(launch.num_tiles)
        ]


def lengths_of_programs(launch: ForwardPlan) -> list[list[int]]:
    """How many key tiles each tile of a program walks."""
    programs = range(launch.num_programs)
    return [
        [len(key_tiles(launch, tile)) for _, tile in items_of_program(launch, program)]
        for program in programs
    ]


def test_long_causal_tiles_start_first_and_pairs_are_equally_long():
    tiles = lengths_of_programs(
        make_launch(LARGE[128], True, 1024, 1024, batch_heads=4, together=4)
    )
    assert tiles == sorted(tiles, reverse=True)
    paired = make_launch(
        LARGE[128], True, 2048, 2048, order="pairs", batch_heads=8, num_multiprocessors=64
    )
    assert set(map(sum, lengths_of_programs(paired))) == {17}


@each_launch
def test_the_protocol_ends_for_every_short_length(schedule, is_causal, order):
    rng, alike = random.Random(0), set()
    for num_queries, num_keys in all_shapes():
        launch = make_launch(
            schedule,
            is_causal,
            num_queries,
            num_keys,
            order=order,
            batch_heads=2,
            num_multiprocessors=2,
        )
        tiles = range(launch.num_tiles)
        skips = [
            skips_first_key_tile(launch, *piece)
            for piece in product(tiles, range(schedule.consumers))
        ]
        kinds = [[key == num_keys for key in key_tiles(launch, tile)] for tile in tiles]
        protocol = str((kinds, skips))
        if protocol not in alike:
            alike.add(protocol)
            for _ in range(2):
                assert Counter(run_forward(launch, rng)) == Counter(product(range(2), tiles)), (
                    num_queries,
                    num_keys,
                )


def test_the_protocol_holds_over_many_interleavings():
    """One program with every kind of tile, so that barriers pass through their phases many times."""
    for schedule, seed in product(ALL_SCHEDULES, range(40)):
        order = ("pairs", "dynamic")[seed % 2]
        launch = make_launch(
            schedule, True, 700, 650, order=order, batch_heads=2, num_multiprocessors=1
        )
        assert len(run_forward(launch, random.Random(seed))) == 2 * launch.num_tiles


def test_the_estimates_tell_the_measured_orders_apart():
    """Time of pairs, as measured on an H200, and of a dynamic order, on an H100, over that of
    tiles.
    """
    for batch_heads, seqlen, head_dim, is_causal, order, measured in (
        (16, 16384, 64, True, "pairs", 1.127), (32, 16384, 64, False, "pairs", 1.043),
        (128, 2048, 128, True, "pairs", 0.892), (32, 8192, 128, True, "pairs", 0.990),
        (32, 32768, 128, True, "pairs", 1.022), (128, 2048, 128, False, "pairs", 0.921),
        (128, 1024, 128, True, "pairs", 0.867), (128, 4096, 64, True, "pairs", 0.972),
        (16, 16384, 64, True, "dynamic", 0.989), (128, 2048, 64, True, "dynamic", 0.941),
        (128, 4096, 64, False, "dynamic", 0.958), (128, 2048, 128, True, "dynamic", 0.920),
        (16, 16384, 128, True, "dynamic", 0.965), (64, 4096, 128, False, "dynamic", 0.960),
    ):  # fmt: skip
        other, tiles = (
            estimated_steps(
                plan(
                    head_dim, is_causal, seqlen, seqlen, batch_heads, config=LARGE[head_dim].name(x)
                ),
                132,
            )
            for x in (order, "tiles")
        )
        assert other / tiles == pytest.approx(measured, rel=0.04), order


def test_a_copier_that_brings_fewer_tiles_than_consumers_wait_for_is_a_hang():
    """The static masked steps hung the prototype at 128 queries: it copied live tiles only. The
    model must see it.
    """
    launch = make_launch(LARGE[64], True, 128, 128, batch_heads=1)
    assert key_tiles(launch, 0) == [128, 0]
    right, fewer = (
        forward_partitions(launch, [0], lambda *_, keys=keys: keys) for keys in ([128, 0], [0])
    )
    consumers = launch.schedule.consumers
    with pytest.raises(AssertionError, match="hangs|found"):
        run_at_random(
            [*fewer[:-consumers], *right[-consumers:]], forward_arrivals(launch), random.Random(0)
        )


@pytest.mark.parametrize("barrier", ["full0", "empty0"])
def test_a_wrong_phase_is_seen(barrier):
    """A barrier that is initialised a phase ahead: somebody does not wait, or waits for ever."""
    launch = make_launch(LARGE[128], False, 1000, 1000, batch_heads=1)
    partitions = forward_partitions(launch, [0], lambda _, tile: key_tiles(launch, tile))
    with pytest.raises(AssertionError, match="hangs|found"):
        for seed in range(50):
            run_at_random(
                partitions, forward_arrivals(launch), random.Random(seed), ahead=(barrier,)
            )


@pytest.mark.parametrize("head_dim, is_causal, seqlen, batch_heads, rows, order", [
    (128, True, 2048, 128, 128, "pairs"), (128, True, 16384, 16, 128, "dynamic"),
    (128, False, 2048, 128, 128, "pairs"), (128, False, 8192, 64, 128, "dynamic"),
    # pairs would go round 10.7, 5.2 and 5.8 times
    (64, True, 4096, 128, 192, "dynamic"), (64, True, 16384, 16, 192, "dynamic"),
    (64, False, 2048, 128, 192, "dynamic"), (40, True, 16384, 16, 192, "dynamic"),
    # fewer large tiles than multiprocessors, and fewer small ones than programs that run at a time
    (64, True, 512, 16, 64, "tiles"), (64, False, 1024, 16, 64, "tiles"), (128, True, 512, 16, 64, "tiles"),
    (128, False, 1024, 16, 128, "tiles"),  # a multiprocessor for each large tile
    # small tiles share the work out more evenly
    (64, True, 1024, 64, 64, "pairs"), (64, False, 2048, 16, 64, "pairs"), (128, True, 1024, 16, 64, "pairs"),
    (128, True, 1024, 32, 128, "pairs"), (128, True, 512, 32, 64, "pairs"),
    (64, True, 256, 512, 64, "pairs"),  # large ones would be half empty
    # on an H100
    (256, True, 2048, 64, 128, "pairs"), (256, True, 4096, 32, 128, "pairs"), (256, True, 8192, 16, 128, "tiles"),
    (256, False, 8192, 16, 128, "pairs"), (160, False, 512, 16, 64, "tiles"),
    # where a step of a small tile that costs a twentieth more or less would decide otherwise
    (64, False, 4096, 16, 64, "pairs"), (64, True, 2048, 256, 192, "dynamic"), (64, False, 4096, 64, 192, "dynamic"),
])  # fmt: skip
def test_schedule_and_order_are_chosen_by_shape(
    head_dim, is_causal, seqlen, batch_heads, rows, order
):
    """Small tiles where they were measured as the best of all on an H200, and large ones where they
    were, or where the GPU is full of them.
    """
    launch = plan(head_dim, is_causal, seqlen, seqlen, batch_heads)
    assert (launch.schedule.query_tile, launch.order) == (rows, order)
    places = 132 * launch.schedule.resident
    assert launch.num_programs == (
        min(places, launch.num_items) if order != "tiles" else launch.num_items
    )


def test_a_configuration_of_another_head_dim_is_refused():
    with pytest.raises(
        ValueError, match=r"must be hopper_forward_192x128_tiles or .* for head_dim 64, got 'hop"
    ):
        plan(64, True, 1, 1, config="hopper_forward_128x128_tiles")


@each_launch
def test_programs_share_out_every_tile_once(schedule, is_causal, order):
    shapes = product((1, 64, 128, 129, 192, 193, 300, 1000, 1025), ((1, 1), (5, 2), (6, 4), (8, 8)))
    for num_queries, (batch_heads, together) in shapes:
        launch = make_launch(
            schedule,
            is_causal,
            num_queries,
            num_queries,
            order=order,
            batch_heads=batch_heads,
            together=together,
        )
        assert (
            kernel.num_work_items.fn(launch.num_tiles, batch_heads, launch.paired)
            == launch.num_items
        )
        tiles = Counter(
            item
            for program in range(launch.num_programs)
            for item in items_of_program(launch, program)
        )
        assert tiles == Counter(product(range(batch_heads), range(launch.num_tiles)))


# Divided walks


@pytest.mark.parametrize("head_dim, is_causal, seqlen, batch_heads, rows, order, whole, parts", [
    # the last round of a large grid: up to 4 % faster on an H100
    (128, False, 8192, 64, 128, "dynamic", 4092, 16), (128, False, 16384, 16, 128, "dynamic", 1980, 5),
    (128, False, 8192, 5, 128, "dynamic", 264, 4),
    # all of a small one: 1.4 to 2.1 times as fast
    (128, True, 4096, 1, 128, "tiles", 0, 7), (64, True, 4096, 1, 64, "tiles", 0, 7),
    (64, True, 1024, 1, 64, "tiles", 0, 8),
    (128, False, 2048, 1, 64, "tiles", 0, 4), (64, False, 8192, 1, 64, "tiles", 0, 2),
    # where parts were measured as slower, or no faster: programs enough, or short walks
    (128, True, 2048, 4, 64, "tiles", None, 1), (64, False, 2048, 4, 64, "tiles", None, 1),
    (128, False, 1024, 8, 64, "tiles", None, 1), (64, True, 1024, 8, 64, "tiles", None, 1),
    (128, False, 4096, 32, 128, "pairs", None, 1), (64, False, 2048, 12, 192, "tiles", None, 1),
    # not possible: a head tile with columns to spare, wide heads
    (40, True, 4096, 1, 64, "tiles", None, 1), (256, True, 4096, 1, 64, "tiles", None, 1),
])  # fmt: skip
def test_walks_are_divided_where_that_was_measured_faster(
    head_dim, is_causal, seqlen, batch_heads, rows, order, whole, parts
):
    launch = plan(head_dim, is_causal, seqlen, seqlen, batch_heads)
    assert (launch.schedule.query_tile, launch.order, launch.num_parts) == (rows, order, parts)
    assert bool(launch.part_tiles) == launch.kernel_plan.split == (parts > 1)
    if parts > 1:
        assert launch.whole == whole
        assert (
            launch.num_items
            == whole + (launch.num_tiles * batch_heads - whole) * parts
            <= whole + 4 * 132 * 2
        )


@pytest.mark.parametrize("head_dim, padded", [(124, 128), (60, 64)])
def test_a_padded_head_is_named_as_it_runs(head_dim, padded):
    """Rows are padded to whole 16 bytes before the plan is made; the name was that of the narrower
    head's plan.
    """
    tensors = [
        torch.empty(1, 2, 2048, width, dtype=torch.bfloat16, device="meta")
        for width in (head_dim, padded)
    ]
    named, expected = (kernel_names(x, x, is_causal=False) for x in tensors)
    assert named == expected
    assert named.startswith(plan(padded, False, 2048, 2048, 2).schedule.name("tiles"))


@pytest.mark.parametrize("order", UNPAIRED)
@EACH_MASK
@EACH_SCHEDULE
def test_parts_are_walked_whole_and_the_protocol_ends(schedule, is_causal, order):
    """Each tile's key tiles once, by its parts; its rows are among those that parts have room for."""
    if schedule.masked_tiles(is_causal) > 1:
        return
    rng = random.Random(0)
    for num_queries, num_keys in [
        (1, 1),
        (65, 700),
        (300, 300),
        (513, 200),
        (700, 650),
        (640, 1025),
    ]:
        launch = make_launch(
            schedule, is_causal, num_queries, num_keys, order=order, together=1 + 2 * is_causal
        )
        tiles = list(product(range(3), range(launch.num_tiles)))
        longest = len(key_tiles(launch, launch.num_tiles - 1))
        numbers = {0} if is_causal else {0, 1, launch.num_tiles, len(tiles) - 1}
        for part_tiles, whole in product(range(1, longest + 1), numbers):
            divided = replace(launch, part_tiles=part_tiles, whole=whole, num_programs=0)
            divided = replace(
                divided, num_programs=min(divided.num_items, 4) if order == "dynamic" else 0
            )
            walks, done = (
                {},
                run_forward(divided, rng, lambda head, of, plan=divided: keys_of_part(plan, *of)),
            )
            for head, (tile, part) in done:
                keys = keys_of_part(divided, tile, part)
                if part >= 0:
                    assert len(keys) <= part_tiles and part < divided.num_parts
                walks.setdefault((head, tile), []).extend(keys)
            assert sorted(walks) == tiles
            assert all(
                sorted(keys) == sorted(key_tiles(launch, tile)) for (_, tile), keys in walks.items()
            )
            in_parts = {place[:1] + place[1][:1] for place in done if place[1][1] >= 0}
            assert len(tiles) - len(in_parts) == whole
            first_rows = [
                head * num_queries + max(0, first_query(divided, tile)) for head, tile in in_parts
            ]
            assert divided.first_divided_row == min(first_rows)


@pytest.mark.parametrize("whole", [0, 1, 7])
@EACH_MASK
def test_parts_are_merged_where_their_rows_are(is_causal, whole, monkeypatch):
    """What the kernel leaves of parts, here by torch; NaN where it writes nothing. The merging
    kernel is interpreted.

    It is given O and L themselves and not their ends, of which a replay would not know the tensor.
    """
    q, k, v = torch.randn(3, 1, 3, 300, 64, generator=torch.Generator().manual_seed(0)).half()
    scores = (q.float() @ k.float().mT) / 8
    if is_causal:
        scores.masked_fill_(~torch.ones(300, 300, dtype=torch.bool).tril(), -torch.inf)

    def divided(**call):
        tiles = plan_forward(**(call | {"config": SCHEDULES[64][1].name("tiles")}))
        return replace(tiles, part_tiles=1, whole=0 if is_causal else whole, num_programs=0)

    def run(kernel, grid, tensors, numbers, options):
        states, (num_parts, first_row, num_rows) = tensors[-1].fill_(torch.nan), numbers[-3:]
        O, m, l = states.split(
            [num_parts * num_rows * 64, num_parts * num_rows, num_parts * num_rows]
        )
        for part in range(num_parts):
            keys = slice(part * 128, (part + 1) * 128)
            own = scores[..., keys] / math.log(2)
            top = own.amax(-1, keepdim=True)
            seen = (top > -torch.inf).view(-1)[first_row:, None]
            P = torch.exp2(own - top)
            for state, values in (
                (O, P @ v[..., keys, :].float()),
                (m, top),
                (l, P.sum(-1, keepdim=True)),
            ):
                state = state.view(num_parts, num_rows, -1)[part]
                state[:] = torch.where(seen, values.flatten(0, 2)[first_row:], torch.nan)
        merged.append(first_row)

    def merge(kernel, grid, tensors, *rest):
        given.extend(tensors)
        launch(kernel, grid, tensors, *rest)

    merged, given = [], []
    monkeypatch.setattr(forward, "plan_forward", divided)
    monkeypatch.setattr(forward, "launch", run)
    monkeypatch.setattr(split, "launch", merge)
    output, lse = forward.hopper_forward(q, k, v, is_causal, 1 / 8)
    (first_row,) = merged
    assert first_row == (0 if is_causal else {0: 0, 1: 64, 7: 428}[whole])
    expected = (torch.softmax(scores, -1) @ v.float()).flatten(0, 2)[first_row:]
    torch.testing.assert_close(
        output.float().flatten(0, 2)[first_row:], expected, atol=1e-3, rtol=1e-3
    )
    torch.testing.assert_close(
        lse.flatten()[first_row:], scores.logsumexp(-1).flatten()[first_row:]
    )
    assert given[1] is output and given[2] is lse


# Along the lists of a block mask


def draw_mask(block_size, num_queries, num_keys, heads, density):
    generator = torch.Generator().manual_seed(num_queries)
    shape = (1, heads, -(-num_queries // block_size[0]), -(-num_keys // block_size[1]))
    blocks = torch.rand(shape, generator=generator) < density
    blocks[:, :, -1] = False  # a row of tiles without a key
    mask = BlockMask.from_blocks(blocks, block_size, seq_lengths=(num_queries, num_keys))
    return mask & BlockMask.random_tokens(
        num_queries, num_keys, density=0.999, block_size=block_size
    )


def listed_walk(launch, mask, head, tile):
    """(first key, whether its bits are read) of each step, by the kernel's own arithmetic, run as
    Python.
    """
    (rows, columns), key_tile = mask.block_size, launch.schedule.key_tile
    number = kernel.list_of_tile.fn(
        head,
        first_query(launch, tile),
        launch.num_queries,
        launch.batch_heads,
        *mask.shape[:2],
        rows,
    )
    num_partial, num_full = (
        int(counts.flatten()[number]) for counts in (mask.kv_num_blocks, mask.full_kv_num_blocks)
    )
    masked, steps = kernel.steps_of_lists.fn(num_partial, num_full, columns // key_tile)
    walk = []
    for step in range(steps):
        entry, part = kernel.place_in_lists.fn(step, masked, columns // key_tile)
        indices = mask.kv_indices if step < masked else mask.full_kv_indices
        first_key = int(indices.flatten(0, 2)[number, entry]) * columns + part * key_tile
        walk.append((first_key if num_partial + num_full else launch.num_keys, step < masked))
    return walk


@pytest.mark.parametrize("order", UNPAIRED)
@pytest.mark.parametrize("block_size", [(64, 128), (128, 128), (128, 256), (512, 128)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lists_are_walked_whole_and_the_protocol_ends(head_dim, block_size, order):
    """Each tile of queries meets its key tiles once, partial ones first and those with their bits;
    one without a key has a step that reads nothing; and copier and consumers agree, in any order of
    events.
    """
    rng = random.Random(0)
    for (num_queries, num_keys), mask_heads in product(
        [(1, 1), (129, 1000), (640, 640), (1100, 130)], (1, 3)
    ):
        mask = draw_mask(block_size, num_queries, num_keys, mask_heads, 0.4)
        launch = plan(head_dim, False, num_queries, num_keys, 3, 2, block_size=block_size)
        query_tile = launch.schedule.query_tile
        assert (
            query_tile == (64 if head_dim == 64 else min(block_size[0], 128))
            and launch.order in UNPAIRED
        )
        starts = [first_query(launch, tile) for tile in range(launch.num_tiles)]
        assert starts == list(range(0, num_queries, query_tile)) and block_size[0] % query_tile == 0
        stays = order == "dynamic"
        launch = replace(
            launch,
            order=order,
            num_programs=min(launch.num_items, 2) if stays else launch.num_items,
        )
        walks = {
            (head, tile): listed_walk(launch, mask, head, tile)
            for head, tile in product(range(3), range(launch.num_tiles))
        }
        tiles, key_tile = mask.lists.tile_map().tiles, launch.schedule.key_tile
        for (head, tile), walk in walks.items():
            row = tiles[0, head % mask_heads, first_query(launch, tile) // block_size[0]].tolist()
            parts = [
                (column * block_size[1] + part, kind >= 0)
                for column, kind in enumerate(row)
                for part in range(0, block_size[1], key_tile)
                if kind != -1
            ]
            assert sorted(walk) == sorted(parts or [(num_keys, True)])
            kinds = [is_partial for _, is_partial in walk]
            assert kinds == sorted(kinds, reverse=True)
        keys = {place: [key for key, _ in walk] for place, walk in walks.items()}
        done = Counter(run_forward(launch, rng, lambda *place, keys=keys: keys[place]))
        assert done == Counter(product(range(3), range(launch.num_tiles)))


# Within packed documents

LENGTHS = [
    (300, 300),
    (0, 0),
    (1, 129),
    (127, 0),
    (0, 40),
    (128, 128),
    (193, 1000),
    (64, 1),
    (0, 0),
]


@pytest.mark.parametrize("order", UNPAIRED)
@EACH_MASK
@EACH_SCHEDULE
def test_documents_are_walked_whole_and_the_protocol_ends(schedule, is_causal, order, monkeypatch):
    """Every tile of queries of each document, and of the rows behind the last, has one slot, and
    walks its document's key tiles; slots that are left over have none, for copier and consumers
    alike.
    """
    monkeypatch.setattr(
        kernel, "_boundary", lambda ends, document, total: min(max(ends[document], 0), total)
    )
    rng = random.Random(0)
    for trial in range(12):
        lengths = rng.sample(LENGTHS, rng.randint(0, len(LENGTHS)))
        behind = (0, 1, 200)[trial % 3]
        ends_q, ends_k = (
            [0, *accumulate(document[side] for document in lengths)] for side in (0, 1)
        )
        total, total_keys = ends_q[-1] + behind or 1, ends_k[-1] + 7
        launch = plan_packed_forward(
            head_dim=schedule.head_tile, is_causal=is_causal, num_queries=total, num_keys=total_keys, heads=3, group=1,
            documents=len(lengths), max_seqlens=(300, 1000), num_multiprocessors=2, config=schedule.name(order),
        )  # fmt: skip
        assert launch.schedule == schedule
        slots = kernel.slots_of_documents.fn(total, len(lengths), schedule.query_tile)
        assert slots == launch.num_tiles
        # the rows behind the last document see no key
        sequences = [*lengths, (total - ends_q[-1], 0)]
        walks = {}
        tiles = Counter()
        for slot in range(slots):
            document, tile = kernel.document_of_slot.fn(
                slot, ends_q, len(lengths), total, schedule.query_tile
            )
            num_queries, num_keys = sequences[document]
            walks[slot] = []
            if tile < 0 or tile * schedule.query_tile >= num_queries:
                continue
            alone = replace(launch, documents=None, num_queries=num_queries, num_keys=num_keys)
            walks[slot] = [ends_k[document] + key for key in key_tiles(alone, tile)]
            tiles[document, tile] += 1
        assert tiles == Counter(
            (document, tile)
            for document, (num_queries, _) in enumerate(sequences)
            for tile in range(-(-num_queries // schedule.query_tile))
        )
        done = Counter(run_forward(launch, rng, lambda _, slot, walks=walks: walks[slot]))
        assert done == Counter(product(range(3), [slot for slot, keys in walks.items() if keys]))


@EACH_MASK
@pytest.mark.parametrize("head_dim", SCHEDULES)
def test_slots_of_documents_are_never_paired(head_dim, is_causal):
    """Above 128 columns they once were, where the launcher chose the order: half of them were not
    computed.
    """
    for documents, length, heads in product((1, 16), (512, 1024, 2048), (16, 32)):
        launch = plan_packed_forward(
            head_dim=head_dim, is_causal=is_causal, num_queries=documents * length, num_keys=documents * length,
            heads=heads, group=1, documents=documents, max_seqlens=(length, length), num_multiprocessors=132,
        )  # fmt: skip
        assert launch.order in UNPAIRED


@pytest.mark.parametrize(
    ("head_dim", "block_size"), [(128, (128, 64)), (64, (32, 128)), (160, (128, 128))]
)
def test_lists_of_tiles_that_hold_none_of_the_kernels_are_refused(head_dim, block_size):
    """An operator called by itself: tiles of 64 keys were walked as one step of zeros."""
    with pytest.raises(
        ValueError,
        match=f"{block_size[1]}\\) hold no whole ones of the kernel at head_dim {head_dim}",
    ):
        plan(head_dim, False, 512, 512, 4, 132, block_size=block_size)


@EACH_MASK
@pytest.mark.parametrize("head_dim", [64, 128])
def test_divided_plans_keep_to_what_the_kernel_can(head_dim: int, is_causal: bool) -> None:
    """One masked step a tile; heads one after the other without a mask, so that divided rows are
    the last ones; parts of at most 34 MiB; and none of packed documents.
    """
    divided = 0
    for heads in (1, 2, 5, 16, 64):
        for tokens in (1000, 2048, 4096, 8192, 16384):
            plan = plan_forward(
                head_dim=head_dim, is_causal=is_causal, num_queries=tokens, num_keys=tokens, batch_heads=heads,
                group=1, num_multiprocessors=132,
            )  # fmt: skip
            packed = plan_packed_forward(
                head_dim=head_dim, is_causal=is_causal, num_queries=tokens, num_keys=tokens, heads=heads, group=1,
                documents=1, max_seqlens=(tokens, tokens), num_multiprocessors=132,
            )  # fmt: skip
            assert packed.part_tiles == 0
            if plan.part_tiles:
                divided += 1
                assert plan.schedule.masked_tiles(is_causal) == 1
                assert is_causal or plan.heads_together == 1
                rows = heads * tokens - plan.first_divided_row
                assert plan.num_parts * rows * (head_dim + 2) * 4 <= 34 * 2**20
    assert divided >= 3
