"""Which program of the Hopper forward computes what and when, on plain numbers: no GPU, no Triton.

The module has the kernel's schedules and the choice among them. `tests/hopper_protocol.py` models
what a program does with a schedule: it runs the protocol between the warp that copies and those
that compute for every short length, in any order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import NamedTuple

import numpy as np

from cs336_systems.attention.hopper.division import MAX_ROUNDS, MULTIPROCESSORS
from cs336_systems.attention.tiles.choice import Walks, heads_at_a_time
from cs336_systems.attention.tiles.kernel_config import (
    HALF_L2_SHARE_BYTES,
    L2_SHARE_BYTES,
    head_tile,
)

CONSUMER_ROWS = 64  # rows of queries of a warp group
# Warps of a warp group. Kernels are launched with the first consumer's; `warp_specialize` adds the
# others'.
CONSUMER_WARPS = 4
THREADS_OF_GROUP = 32 * CONSUMER_WARPS
REGISTERS_OF_MULTIPROCESSOR = 65536
# From so many queries on, a causal backward of head tile 128 forms dQ a step late, see `dq_way`.
LATE_FROM = 8192
ORDERS = ("tiles", "pairs", "dynamic")
UNPAIRED = ("tiles", "dynamic")
WIDE = ("tiles", "pairs")  # above 128 columns, where the counter's order measured up to 7 % slower
PREFIX = "hopper_forward_"
BYTES_PER_ELEMENT = 2
# What a tile takes beside its steps, in steps. A program starts and ends with nothing to overlap;
# the copies of a further tile run under the end of the tile before. Tiles and pairs are fitted to
# 14 shapes on an H200, triton 3.6.0, 2026-11-21. In a dynamic order a tile is assumed to cost what
# it costs in pairs.
TILE_COST_STEPS = {"tiles": 1.7, "pairs": 0.8, "dynamic": 0.8}
# What a dynamic order takes besides, once a call: its programs begin as those of the order `tiles`
# do, after the counter's kernel.
START_COST_STEPS = TILE_COST_STEPS["tiles"] - TILE_COST_STEPS["dynamic"] + 2
# What merging divided walks takes, in steps: once a call, and for each part of 128 rows. Fitted to
# 20 calls of 1 to 8 heads on an H100, triton 3.6.0, 2026-11-27. MERGE_STEPS is a step more than the
# fit, as a launch takes time on the host too.
MERGE_STEPS, PART_STEPS = 3, 1 / 32
NUMBERS_OF_PARTS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 64, 128)  # that are tried


def columns_of(width: int) -> int:
    """Return how many columns the kernels multiply for heads of `width` columns.

    That is the head tile, but 96 at 65 to 96, where the last 32 columns are zeros (`columns.py`).
    """
    return 96 if 64 < width <= 96 else head_tile(width)


def forward_columns_of(width: int) -> int:
    """Return how many columns the forward multiplies for heads of `width`: 32 up to that width.

    Both products then take half as long as of 64 columns: 1.06 to 1.12 times as fast in all on an
    H200, triton 3.6.0, 2026-11-29.
    """
    return 32 if width <= 32 else columns_of(width)


@dataclass(frozen=True, kw_only=True)
class ForwardSchedule:
    """How the forward divides a head of `head_tile` columns."""

    head_tile: int
    consumers: int  # warp groups that compute, 64 rows of queries each
    key_tile: int
    slots: int  # of the ring, each with a tile of keys and one of values
    # of a thread of a consumer; the first consumer has what the others leave, at least as many
    registers: int
    softmax_overlaps: bool  # the softmax of a step may run over the step's second product
    query_in_registers: bool = False  # and not in shared memory, from where a product reads it anew
    resident: int = 1  # programs that share a multiprocessor
    # time of a step where all resident programs run, in steps of the head tile's first schedule
    step_cost: float = 1.0

    @property
    def query_tile(self) -> int:
        """Return how many rows of queries a program computes at a time."""
        return self.consumers * CONSUMER_ROWS

    @property
    def launch_options(self) -> dict[str, int]:
        """Return the launch options beside the plan: `num_warps`, and `maxnreg` if programs share.

        A program starts with equally many registers for each thread, the copier's group among them.
        Without a limit these are all registers of a multiprocessor, and no second program would
        fit.
        """
        threads = self.resident * (self.consumers + 1) * THREADS_OF_GROUP
        limit = {"maxnreg": REGISTERS_OF_MULTIPROCESSOR // threads} if self.resident > 1 else {}
        return {"num_warps": CONSUMER_WARPS, **limit}

    @property
    def alignment(self) -> int:
        """Return the multiple at which query tiles start, so that the diagonal cuts few key tiles.

        `masked_tiles` is the most that it cuts.
        """
        return gcd(self.query_tile, self.key_tile)

    def masked_tiles(self, is_causal: bool) -> int:
        """Return how many key tiles of a walk, at most, have keys that some query does not see."""
        return -(-self.query_tile // self.key_tile) if is_causal else 1

    def name(self, order: str) -> str:
        """Return the schedule's name with its order, such as "hopper_forward_128x128_pairs"."""
        return f"{PREFIX}{self.query_tile}x{self.key_tile}_{order}"


# By head tile: first the schedule of large grids, then one of 64 queries a program, for grids that
# would leave multiprocessors idle. The second has shorter steps, and more programs, which
# multiprocessors share more evenly.
#
# Measured on an H200, triton 3.6.0, 2026-11-22. At 64 columns a program of two consumers is 18 %
# slower than one of three on large grids, and slower on small ones than two programs of one
# consumer. To wait for both products is 4 % slower there without a mask, and turns that consumers
# take at named barriers change nothing (-0.6 to 1.0 %, triton 3.6.0, 2026-11-29).
# At 128 columns, two consumers that wait for both products are 7 % (full) to 21 %
# (causal) slower than these. With two slots the copier is a step ahead. At 128 columns, 64 KiB a
# slot, a third slot does not fit beside two consumers, nor a second program beside one consumer.
#
# The costs of small steps are fitted to 38 shapes and masks of 512 to 4,096 tokens, at 64 columns
# with large steps that wait for both products. On 70 of 128 to 16,384 tokens the choice of
# `plan_forward` was mostly the best of all schedules and orders, and up to 8.3 % slower. At 256
# columns the cost of a small step is from two masks of 2,048 tokens on an H100, 2026-11-25, where
# the chosen order was the best or within 2 % of it at 2,048 to 8,192 tokens.
SCHEDULES = {
    64: (
        ForwardSchedule(
            head_tile=64, consumers=3, key_tile=128,
            slots=2, registers=160, softmax_overlaps=True,
        ),
        ForwardSchedule(
            head_tile=64, consumers=1, key_tile=128,
            slots=2, registers=232, softmax_overlaps=False, resident=2, step_cost=0.72,
        ),
    ),
    128: (
        ForwardSchedule(
            head_tile=128, consumers=2, key_tile=128,
            slots=2, registers=240, softmax_overlaps=True, query_in_registers=True,
        ),
        ForwardSchedule(
            head_tile=128, consumers=1, key_tile=128,
            slots=2, registers=256, softmax_overlaps=True, query_in_registers=True, step_cost=0.8,
        ),
    ),
    256: (
        ForwardSchedule(
            head_tile=256, consumers=2, key_tile=64,
            slots=2, registers=240, softmax_overlaps=True,
        ),
        ForwardSchedule(
            head_tile=256, consumers=1, key_tile=64,
            slots=3, registers=256, softmax_overlaps=True, step_cost=0.72,
        ),
    ),
}  # fmt: skip


class KernelPlan(NamedTuple):
    """What the forward kernel is compiled for, beside the element type."""

    head_tile: int
    columns: int  # of a head tile's, those that are multiplied
    consumers: int
    key_tile: int
    slots: int
    registers: int
    softmax_overlaps: bool
    query_in_registers: bool
    masked_tiles: int
    is_causal: bool
    paired: bool
    dynamic: bool  # programs take work items from a counter
    alignment: int
    # rows and columns of a block mask's tiles; 0 where no lists are walked
    query_block: int = 0
    key_block: int = 0
    packed: bool = False
    split: bool = False  # walks are divided (`walk.Parts`)


@dataclass(frozen=True, kw_only=True)
class ForwardPlan:
    """One call's schedule, order of tiles and number of programs.

    `kernel_plan` is the part of it for which the kernel is compiled.
    """

    schedule: ForwardSchedule
    columns: int  # of a head tile's, those that are multiplied
    is_causal: bool
    order: str
    num_queries: int
    num_keys: int
    batch_heads: int
    # heads whose tiles are taken in turns, so that the L2 cache holds their keys and values
    heads_together: int
    # rows and columns of a block mask's tiles; (0, 0) where no lists are walked
    block_size: tuple[int, int] = (0, 0)
    documents: int | None = None  # number of packed documents; None where none are packed
    part_tiles: int = 0  # key tiles of a part; 0 where no walk is divided
    whole: int = 0  # tiles of queries whose walks are not divided, if `part_tiles`
    num_programs: int = 0  # 0: one for each work item

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_programs", self.num_programs or self.num_items)

    @property
    def num_tiles(self) -> int:
        """Return the number of query tiles of a head; for packed documents, of slots for them."""
        if self.documents is not None:
            return self.num_queries // self.schedule.query_tile + self.documents + 1
        return -(-self.num_queries // self.schedule.query_tile)

    @property
    def paired(self) -> bool:
        """Return whether a work item is a pair of query tiles."""
        return self.order == "pairs"

    @property
    def num_items(self) -> int:
        """Return the number of work items of all heads: tiles, pairs or parts of walks."""
        items = (-(-self.num_tiles // 2) if self.paired else self.num_tiles) * self.batch_heads
        return self.whole + (items - self.whole) * self.num_parts

    @property
    def num_parts(self) -> int:
        """Return the most parts that a divided walk has; 1 where no walk is divided.

        A causal tile has only the parts that it sees.
        """
        return -(-int(_steps_of_tiles(self)[-1]) // self.part_tiles) if self.part_tiles else 1

    @property
    def first_divided_row(self) -> int:
        """Return the first row, counted over all heads, of the tiles whose walks are divided."""
        head, tile = divmod(self.whole, self.num_tiles)
        return head * self.num_queries + max(0, self.first_query(tile))

    def first_query(self, tile: int) -> int:
        """Return the first row of a query tile, below 0 if the first tile has rows to spare.

        The last tile ends with the queries, so that rows to spare are in the first tile, the
        shortest causal one.
        """
        alignment = self.alignment
        return (
            -(-self.num_queries // alignment) * alignment
            - (self.num_tiles - tile) * self.schedule.query_tile
        )

    @property
    def alignment(self) -> int:
        """Return the multiple at which query tiles start; along lists it is the query tile."""
        return self.schedule.query_tile if self.block_size[0] else self.schedule.alignment

    @property
    def softmax_overlaps(self) -> bool:
        """Return whether the softmax of a step runs while its second product does.

        At 64 columns it does not under a mask, where a row may see one key and O must be exactly
        that key's value: raw maxima are subtracted there, and to do so under a product takes longer
        than to wait for both products (docs/log.md). In parts of walks the kernel would spill.
        """
        masked = self.is_causal or self.block_size[0] > 0 or self.documents is not None
        waits = self.schedule.head_tile == 64 and (masked or self.part_tiles > 0)
        return self.schedule.softmax_overlaps and not waits

    @property
    def kernel_plan(self) -> KernelPlan:
        """Return the part of this plan for which the kernel is compiled."""
        schedule = self.schedule
        return KernelPlan(
            head_tile=schedule.head_tile, columns=self.columns, consumers=schedule.consumers,
            key_tile=schedule.key_tile, slots=schedule.slots, registers=schedule.registers,
            softmax_overlaps=self.softmax_overlaps,
            query_in_registers=schedule.query_in_registers,
            masked_tiles=schedule.masked_tiles(self.is_causal),
            is_causal=self.is_causal, paired=self.paired, dynamic=self.order == "dynamic",
            alignment=self.alignment,
            query_block=self.block_size[0], key_block=self.block_size[1],
            packed=self.documents is not None, split=self.part_tiles > 0,
        )  # fmt: skip


@lru_cache(maxsize=4096)
def plan_forward(
    *,
    head_dim: int,
    is_causal: bool,
    num_queries: int,
    num_keys: int,
    batch_heads: int,
    group: int,
    num_multiprocessors: int,
    config: str = "",
    block_size: tuple[int, int] | None = None,
    packed: bool = False,
) -> ForwardPlan:
    """Return the plan of a call that `config` names, or the one that is estimated to end first.

    `config` is a list of names with commas; one such as `hopper_forward_128x128_pairs` names a
    schedule and an order, and other kernels' names are ignored. `group` query heads share a key
    head. `num_multiprocessors` is 0 where there is no GPU. `block_size` has the rows and columns of
    a block mask's tiles. ValueError if the kernel's tiles do not divide these, or has no schedule
    of the name.

    The orders, where `places` is how many programs the multiprocessors hold at a time:

      tiles    One program a tile, the longest causal tiles first. The GPU balances them by handing
               them out.
      pairs    As many programs as places. Each takes pairs of tiles, under a causal mask a long and
               a short one. The next tile's copies run under the end of the tile before. The order
               needs enough pairs to go round.
      dynamic  As many programs as places, which take tiles from a counter, in the order of `tiles`:
               balanced as in `tiles`, with the copies of `pairs`. A kernel before it sets the
               counter to 0. Above 128 columns it is up to 7 % slower than `tiles`, and not chosen.

    The lists of a block mask, whose lengths the host does not know, and packed documents take
    `tiles` or `dynamic`.

    At 64 and 128 columns, walks that would leave multiprocessors idle may be divided into parts,
    each a further work item. They are not where `config` names a plan, along lists, or of
    documents.
    """
    num_multiprocessors = num_multiprocessors or MULTIPROCESSORS

    # the schedules and orders that this call may have
    schedules: Sequence[ForwardSchedule] = SCHEDULES[head_tile(head_dim)]
    named = [name for name in config.split(",") if name.startswith(PREFIX)]
    orders: tuple[str, ...] = UNPAIRED if packed or block_size is not None else ORDERS
    if head_tile(head_dim) > 128 and not named:
        orders = tuple(order for order in orders if order in WIDE)
    if block_size is not None:
        fits = head_tile(head_dim) <= 128 and block_size[1] % schedules[0].key_tile == 0
        schedules = [one for one in schedules if fits and block_size[0] % one.query_tile == 0][:1]
        if not schedules:
            raise ValueError(
                f"a mask's tiles of {block_size} hold no whole ones of the kernel "
                f"at head_dim {head_dim}"
            )

    # those that `config` names
    possible = {
        schedule.name(order): (schedule, order) for schedule in schedules for order in orders
    }
    if named and named[0] not in possible:
        raise ValueError(
            f"config of the Hopper forward must be {' or '.join(possible)} "
            f"for head_dim {head_dim}, got {named[0]!r}"
        )

    # heads whose keys and values fill the share of the L2 cache
    together = 1
    if is_causal or block_size is not None:
        share = L2_SHARE_BYTES if is_causal else HALF_L2_SHARE_BYTES
        together = max(1, share // _key_head_bytes(num_keys, head_dim)) * group

    # the fastest plan
    plans = [
        ForwardPlan(
            schedule=schedule, columns=forward_columns_of(head_dim), is_causal=is_causal, order=order,
            num_queries=num_queries, num_keys=num_keys, batch_heads=batch_heads,
            heads_together=min(together, batch_heads), block_size=block_size or (0, 0),
        )
        for schedule, order in ([possible[named[0]]] if named else possible.values())
    ]  # fmt: skip
    if not (named or packed or block_size is not None) and head_dim in (64, 128):
        plans += [divided for plan in plans for divided in _divided(plan, num_multiprocessors)]
    # Rounded, so that the first of equal plans is taken, whatever the last bit.
    plan = min(plans, key=lambda plan: round(estimated_steps(plan, num_multiprocessors), 6))
    if is_causal and not (packed or plan.paired or plan.part_tiles):
        walks = Walks(plan.num_tiles, plan.num_tiles)
        plan = _with_heads_at_a_time(plan, walks, num_keys, head_dim, group, num_multiprocessors)
    return _with_programs(plan, num_multiprocessors)


def _key_head_bytes(num_keys: int, head_dim: int) -> int:
    """Return the bytes of one key head's keys and values."""
    return 2 * num_keys * head_dim * BYTES_PER_ELEMENT


def _with_heads_at_a_time(
    plan: ForwardPlan,
    walks: Walks,
    streamed_keys: int,
    head_dim: int,
    group: int,
    num_multiprocessors: int,
) -> ForwardPlan:
    """Return `plan` with the heads at a time with which it is estimated to end soonest.

    The programs of a key head stream `streamed_keys` keys and values at a time.
    """
    schedule = plan.schedule
    key_heads = heads_at_a_time(
        walks,
        heads=plan.batch_heads // group,
        fitting=L2_SHARE_BYTES // _key_head_bytes(streamed_keys, head_dim),
        block_steps=schedule.query_tile / schedule.key_tile,
        group=group,
        start_steps=TILE_COST_STEPS[plan.order],
        places=num_multiprocessors * schedule.resident,
    )
    return replace(plan, heads_together=key_heads * group)


def _divided(plan: ForwardPlan, num_multiprocessors: int) -> Iterator[ForwardPlan]:
    """Yield `plan` with walks divided into parts, once for each number of parts that may help.

    Walks of the last round are divided, or all of a causal call that has few. Yields nothing where
    no division would help. A divided walk has one masked step at most, in the part with the
    diagonal, and head_dim is 64 or 128, as `_store_part` writes whole head tiles.
    """
    places, longest = num_multiprocessors * plan.schedule.resident, int(_steps_of_tiles(plan)[-1])
    divided = plan.num_items if plan.is_causal else plan.num_items % places
    in_one_step = plan.schedule.masked_tiles(plan.is_causal) == 1
    if (
        plan.order != ("tiles" if divided == plan.num_items else "dynamic")
        or not in_one_step
        or not divided
    ):
        return  # parts fill a few rounds at most, in which a counter would save nothing
    most = min(longest, MAX_ROUNDS * places // divided)
    for part_tiles in {-(-longest // parts) for parts in NUMBERS_OF_PARTS if parts <= most}:
        yield replace(plan, part_tiles=part_tiles, whole=plan.num_items - divided, num_programs=0)


def _with_programs(plan: ForwardPlan, num_multiprocessors: int) -> ForwardPlan:
    """Return `plan` with as many programs as run at a time, unless it has one program a tile."""
    places = num_multiprocessors * plan.schedule.resident
    return (
        plan if plan.order == "tiles" else replace(plan, num_programs=min(plan.num_items, places))
    )


def plan_packed_forward(
    *,
    head_dim: int,
    is_causal: bool,
    num_queries: int,
    num_keys: int,
    heads: int,
    group: int,
    documents: int,
    max_seqlens: tuple[int, int],
    num_multiprocessors: int,
    config: str = "",
) -> ForwardPlan:
    """Return the plan for packed documents, chosen as if all were as long as the longest.

    `max_seqlens` are the largest numbers of queries and of keys of a document, `num_queries` and
    `num_keys` those of all. The plan has slots of tiles for documents of any lengths.
    """
    num_multiprocessors = num_multiprocessors or MULTIPROCESSORS
    longest, longest_keys = (
        max(1, min(max_seqlens[0], num_queries)),
        max(1, min(max_seqlens[1], num_keys)),
    )
    like = plan_forward(
        head_dim=head_dim, is_causal=is_causal, num_queries=longest, num_keys=longest_keys,
        batch_heads=heads * max(1, num_queries // longest), group=group,
        num_multiprocessors=num_multiprocessors, config=config, packed=True,
    )  # fmt: skip
    together = max(1, L2_SHARE_BYTES // _key_head_bytes(longest_keys, head_dim)) * group
    plan = replace(
        like, num_queries=num_queries, num_keys=num_keys, batch_heads=heads,
        heads_together=min(together, heads), documents=documents, num_programs=0,
    )  # fmt: skip
    if is_causal:
        query_tile = plan.schedule.query_tile
        of_longest, of_all = (-(-queries // query_tile) for queries in (longest, num_queries))
        walks = Walks(of_longest, of_longest, documents, of_all)
        plan = _with_heads_at_a_time(
            plan, walks, longest_keys, head_dim, group, num_multiprocessors
        )
    return _with_programs(plan, num_multiprocessors)


def estimated_steps(plan: ForwardPlan, num_multiprocessors: int) -> float:
    """Return how long a call is estimated to take, in steps of its head tile's first schedule."""
    schedule, steps = plan.schedule, _steps_of_tiles(plan) + TILE_COST_STEPS[plan.order]
    places = num_multiprocessors * schedule.resident  # number of programs that run at a time
    turns = -(-plan.num_items // places)
    merging = 0.0

    if plan.part_tiles:
        walks, cost = _steps_of_tiles(plan), TILE_COST_STEPS[plan.order]
        parts = (
            int((-(-walks // plan.part_tiles)).sum()) * plan.batch_heads
            - plan.whole * plan.num_parts
        )
        own_steps = plan.part_tiles + cost
        if plan.whole + parts > places:  # several rounds: all work evenly, and half of the last one
            work = float(walks.sum()) * plan.batch_heads + (plan.whole + parts) * cost
            own_steps = work / places + own_steps / 2
        merging = MERGE_STEPS + PART_STEPS * parts * schedule.query_tile / 128
    elif plan.paired:  # a long tile with a short one
        own_steps = turns * float((steps + steps[::-1]).max())
    elif plan.is_causal and turns > 1:
        # Tiles are handed out longest first, so programs end within a short tile of one another.
        own_steps = max(
            float(steps[-1]), float(steps.sum()) * plan.batch_heads / places + float(steps[0])
        )
    else:
        own_steps = turns * float(steps[-1])
    return schedule.step_cost * (own_steps + START_COST_STEPS * (plan.order == "dynamic")) + merging


def _steps_of_tiles(plan: ForwardPlan) -> np.ndarray:
    """Return how many key tiles each query tile of a head walks, as an array, for speed.

    A call's first plan keeps the host waiting, so no loop runs over the tiles.
    """
    return _walks(
        plan.schedule, plan.is_causal, plan.num_tiles, plan.first_query(0), plan.num_queries,
        plan.num_keys,
    )  # fmt: skip


@lru_cache(maxsize=64)
def _walks(
    schedule: ForwardSchedule,
    is_causal: bool,
    num_tiles: int,
    first_query: int,
    num_queries: int,
    num_keys: int,
) -> np.ndarray:
    """Return how many key tiles each query tile walks; the first one starts at `first_query`."""
    ends = np.full(num_tiles, num_keys)
    if is_causal:
        rows = first_query + schedule.query_tile * np.arange(1, num_tiles + 1)
        ends = np.minimum(rows, min(num_keys, num_queries))
    return np.maximum(-(-ends // schedule.key_tile), schedule.masked_tiles(is_causal))
