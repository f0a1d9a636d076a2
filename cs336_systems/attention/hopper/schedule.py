"""Which program of the Hopper forward computes what and when, on plain numbers: no GPU, no Triton.

The kernel's schedules and the choice among them. `tests/hopper_protocol.py` has a model of what a
program does with one: it runs the protocol between the warp that copies and those that compute for
every short length, in any order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import NamedTuple

import numpy as np

from cs336_systems.attention.hopper.division import MAX_ROUNDS, MULTIPROCESSORS
from cs336_systems.attention.tiles.kernel_config import (
    HALF_L2_SHARE_BYTES,
    L2_SHARE_BYTES,
    head_tile,
)

CONSUMER_ROWS = 64  # rows of queries of a warp group
# a warp group's; kernels are launched with the first consumer's and specialise the others
CONSUMER_WARPS = 4
THREADS_OF_GROUP = 32 * CONSUMER_WARPS
REGISTERS_OF_MULTIPROCESSOR = 65536
# queries from which a causal backward of head tile 128 forms dQ a step late, see `dq_way`
LATE_FROM = 8192
ORDERS = ("tiles", "pairs", "dynamic")
UNPAIRED = ("tiles", "dynamic")
WIDE = ("tiles", "pairs")  # above 128 columns, where the counter's order measured up to 7 % slower
PREFIX = "hopper_forward_"
BYTES_PER_ELEMENT = 2
# What a tile takes beside its steps, in steps: a program starts and ends with nothing to overlap, a
# further tile of the same program has its copies behind it. Tiles and pairs fitted to 14 shapes on
# an H200, triton 3.6.0, 2026-11-21; in a dynamic order a tile is taken to cost what it costs in
# pairs.
TILE_COST_STEPS = {"tiles": 1.7, "pairs": 0.8, "dynamic": 0.8}
# And once for a program of a dynamic order, which begins as one of the order `tiles` does, after
# the counter's kernel.
START_COST_STEPS = TILE_COST_STEPS["tiles"] - TILE_COST_STEPS["dynamic"] + 2
# What merging divided walks takes, in steps: at all, and for each part of 128 rows. Fitted to 20
# calls of 1 to 8 heads on an H100, triton 3.6.0, 2026-11-27; the first is a step more than they
# take, as a launch keeps the host, too.
MERGE_STEPS, PART_STEPS = 3, 1 / 32
NUMBERS_OF_PARTS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 64, 128)  # that are tried


def columns_of(width: int) -> int:
    """Columns that are multiplied for heads of `width`: at 96 not the last of a head tile
    (`columns.py`).
    """
    return 96 if 64 < width <= 96 else head_tile(width)


@dataclass(frozen=True, kw_only=True)
class ForwardSchedule:
    """How the forward divides a head of `head_tile` columns."""

    head_tile: int
    consumers: int  # warp groups that compute, 64 rows of queries each
    key_tile: int
    slots: int  # of the ring, each with a tile of keys and one of values
    # of a consumer's thread; the first consumer has what the others leave, at least these
    registers: int
    softmax_overlaps: bool  # the softmax of a step runs over the step's second product
    resident: int = 1  # programs that share a multiprocessor
    # a step's time where all of them run, in steps of the head tile's first schedule; fitted
    step_cost: float = 1.0

    @property
    def query_tile(self) -> int:
        return self.consumers * CONSUMER_ROWS

    @property
    def launch_options(self) -> dict[str, int]:
        """What the compiler is told beside the plan.

        A program starts with equally many registers for each thread, the copier's group among them:
        as many as there are on a multiprocessor, unless there is a limit.
        """
        threads = self.resident * (self.consumers + 1) * THREADS_OF_GROUP
        limit = {"maxnreg": REGISTERS_OF_MULTIPROCESSOR // threads} if self.resident > 1 else {}
        return {"num_warps": CONSUMER_WARPS, **limit}

    @property
    def alignment(self) -> int:
        """Tiles of queries start and end at multiples of this, so that the diagonal cuts
        `masked_tiles` at most.
        """
        return gcd(self.query_tile, self.key_tile)

    def masked_tiles(self, is_causal: bool) -> int:
        """Key tiles at the end of a tile's walk of which some query may not see all, at most."""
        return -(-self.query_tile // self.key_tile) if is_causal else 1

    def name(self, order: str) -> str:
        return f"{PREFIX}{self.query_tile}x{self.key_tile}_{order}"


# By head tile, the schedule of large grids first; then one of 64 queries a program, for grids that
# would leave multiprocessors idle: its steps are shorter, and programs that are short or many share
# them out better. Measured on an H200, triton 3.6.0, 2026-11-22. At 64 columns a program of two
# consumers is 18 % slower than of three on large grids, and on small ones slower than two programs
# of one; at 128, two consumers that wait for both products are 7 % (full) to 21 % (causal) slower
# than these. With two slots the copier is a step ahead; at 128 columns, 64 KiB a slot, a third does
# not fit beside two consumers, nor a second program beside one. The costs of small steps are fitted
# to 38 shapes and masks of 512 to 4,096 tokens; on 70 of 128 to 16,384 what `plan_forward` chooses
# was mostly the best of all schedules and orders, and up to 8.3 % slower. At 256 columns a small
# step's cost is of two masks of 2,048 tokens on an H100, 2026-11-25, where the order that is chosen
# was the best or within 2 % of it at 2,048 to 8,192 tokens.
SCHEDULES = {
    64: (
        ForwardSchedule(head_tile=64, consumers=3, key_tile=128, slots=2, registers=160, softmax_overlaps=False),
        ForwardSchedule(
            head_tile=64, consumers=1, key_tile=128, slots=2, registers=232, softmax_overlaps=False, resident=2,
            step_cost=0.72,
        ),
    ),
    128: (
        ForwardSchedule(head_tile=128, consumers=2, key_tile=128, slots=2, registers=240, softmax_overlaps=True),
        ForwardSchedule(
            head_tile=128, consumers=1, key_tile=128, slots=2, registers=256, softmax_overlaps=True, step_cost=0.8
        ),
    ),
    256: (
        ForwardSchedule(head_tile=256, consumers=2, key_tile=64, slots=2, registers=240, softmax_overlaps=True),
        ForwardSchedule(
            head_tile=256, consumers=1, key_tile=64, slots=3, registers=256, softmax_overlaps=True, step_cost=0.72
        ),
    ),
}  # fmt: skip


class KernelPlan(NamedTuple):
    """What the kernel is compiled for, beside the element type."""

    head_tile: int
    columns: int  # of them that are multiplied
    consumers: int
    key_tile: int
    slots: int
    registers: int
    softmax_overlaps: bool
    masked_tiles: int
    is_causal: bool
    paired: bool
    dynamic: bool  # programs take work items from a counter
    alignment: int
    # Rows and columns of a mask's tiles, whose lists are walked; 0 where the walk is a range of key
    # tiles.
    query_block: int = 0
    key_block: int = 0
    packed: bool = False
    split: bool = False  # walks are divided, as `walk.Parts` says


@dataclass(frozen=True, kw_only=True)
class ForwardPlan:
    """One call's schedule, order of tiles and number of programs; `kernel_plan` is what of it the
    compiler is told.
    """

    schedule: ForwardSchedule
    columns: int  # of a head, that are multiplied
    is_causal: bool
    order: str
    num_queries: int
    num_keys: int
    batch_heads: int
    # whose tiles are taken in turns, so that the L2 cache holds their keys and values
    heads_together: int
    block_size: tuple[int, int] = (0, 0)  # of a mask whose lists are walked
    documents: int | None = None  # that are packed into the queries and keys
    part_tiles: int = 0  # key tiles of a part, where walks are divided
    whole: int = 0  # tiles whose walks then are not
    num_programs: int = 0  # 0: one for each item

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_programs", self.num_programs or self.num_items)

    @property
    def num_tiles(self) -> int:
        """Tiles of queries of one head, or of packed documents slots for them."""
        if self.documents is not None:
            return self.num_queries // self.schedule.query_tile + self.documents + 1
        return -(-self.num_queries // self.schedule.query_tile)

    @property
    def paired(self) -> bool:
        return self.order == "pairs"

    @property
    def num_items(self) -> int:
        """What programs are handed, of all heads: in the order `pairs` pairs of tiles, in the
        others tiles.
        """
        items = (-(-self.num_tiles // 2) if self.paired else self.num_tiles) * self.batch_heads
        return self.whole + (items - self.whole) * self.num_parts

    @property
    def num_parts(self) -> int:
        """Of a divided walk, at most; a causal tile has those that it sees."""
        return -(-int(_steps_of_tiles(self)[-1]) // self.part_tiles) if self.part_tiles else 1

    @property
    def first_divided_row(self) -> int:
        """Of the rows of all heads; the divided tiles have those from it on."""
        head, tile = divmod(self.whole, self.num_tiles)
        return head * self.num_queries + max(0, self.first_query(tile))

    def first_query(self, tile: int) -> int:
        """The first row of a tile of queries, below 0 where the first tile has rows to spare.

        The last tile ends with the queries, so that rows to spare are in the first, the shortest
        causal one.
        """
        alignment = self.alignment
        return (
            -(-self.num_queries // alignment) * alignment
            - (self.num_tiles - tile) * self.schedule.query_tile
        )

    @property
    def alignment(self) -> int:
        """Where tiles of queries start: those of lists within the mask's."""
        return self.schedule.query_tile if self.block_size[0] else self.schedule.alignment

    @property
    def kernel_plan(self) -> KernelPlan:
        schedule = self.schedule
        return KernelPlan(
            head_tile=schedule.head_tile, columns=self.columns, consumers=schedule.consumers,
            key_tile=schedule.key_tile, slots=schedule.slots, registers=schedule.registers,
            softmax_overlaps=schedule.softmax_overlaps, masked_tiles=schedule.masked_tiles(self.is_causal),
            is_causal=self.is_causal, paired=self.paired, dynamic=self.order == "dynamic",
            alignment=self.alignment, query_block=self.block_size[0],
            key_block=self.block_size[1], packed=self.documents is not None, split=self.part_tiles > 0,
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
    """The plan of a call: as `config` names it (`hopper_forward_128x128_pairs`), or as it is
    estimated best.

    `group` query heads share a key head; `num_multiprocessors` is 0 where there is no GPU. Orders,
    with as many places for programs as multiprocessors hold at a time:
      tiles   one program a tile, the longest causal ones first, and the GPU balances them by handing them out.
      pairs   as many programs as places, each taking pairs of tiles, under a causal mask a long and a short
              one; the next tile's copies run under the last one's end. That wants enough pairs to
              go round.
      dynamic as many programs, which take the tiles of `tiles`, in its order, from a counter:
      balanced as `tiles` is,
              with the copies of `pairs`. A kernel before it sets the counter to 0.
              Above 128 columns it is up to 7 % slower than `tiles` and not chosen.
    A block mask's lists, of which the host knows no length, and packed documents take `tiles` or
    `dynamic`.

    Heads of 64 and 128 columns whose walks would leave multiprocessors idle may have them divided
    into parts, with as many further items; not by name, along lists or of documents.
    """
    num_multiprocessors = num_multiprocessors or MULTIPROCESSORS
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
                f"a mask's tiles of {block_size} hold no whole ones of the kernel at head_dim {head_dim}"
            )
    possible = {
        schedule.name(order): (schedule, order) for schedule in schedules for order in orders
    }
    if named and named[0] not in possible:
        raise ValueError(
            f"config of the Hopper forward must be {' or '.join(possible)} for head_dim {head_dim}, got {named[0]!r}"
        )
    key_head_bytes = 2 * num_keys * head_dim * BYTES_PER_ELEMENT
    together = 1
    if is_causal or block_size is not None:
        share = L2_SHARE_BYTES if is_causal else HALF_L2_SHARE_BYTES
        together = max(1, share // key_head_bytes) * group
    plans = [
        ForwardPlan(
            schedule=schedule, columns=columns_of(head_dim), is_causal=is_causal, order=order, num_queries=num_queries,
            num_keys=num_keys, batch_heads=batch_heads, heads_together=min(together, batch_heads),
            block_size=block_size or (0, 0),
        )
        for schedule, order in ([possible[named[0]]] if named else possible.values())
    ]  # fmt: skip
    if not (named or packed or block_size is not None) and head_dim in (64, 128):
        plans += [divided for plan in plans for divided in _divided(plan, num_multiprocessors)]
    # Rounded, so that of equal ones the first is taken and not what the last bit says.
    plan = min(plans, key=lambda plan: round(estimated_steps(plan, num_multiprocessors), 6))
    return _with_programs(plan, num_multiprocessors)


def _divided(plan: ForwardPlan, num_multiprocessors: int) -> Iterator[ForwardPlan]:
    """The plan with the walks of its last round divided, or of a causal call all, if that has few.

    `_store_part` writes whole head tiles, and the part with the diagonal has one masked step.
    """
    places, longest = num_multiprocessors * plan.schedule.resident, int(_steps_of_tiles(plan)[-1])
    divided = plan.num_items if plan.is_causal else plan.num_items % places
    in_one_step = plan.schedule.masked_tiles(plan.is_causal) == 1
    if (
        plan.order != ("tiles" if divided == plan.num_items else "dynamic")
        or not in_one_step
        or not divided
    ):
        return  # where parts are of a few rounds at most, a counter would save nothing
    most = min(longest, MAX_ROUNDS * places // divided)
    for part_tiles in {-(-longest // parts) for parts in NUMBERS_OF_PARTS if parts <= most}:
        yield replace(plan, part_tiles=part_tiles, whole=plan.num_items - divided, num_programs=0)


def _with_programs(plan: ForwardPlan, num_multiprocessors: int) -> ForwardPlan:
    """The plan with as many programs as run at a time, where they stay."""
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
    """The plan for packed documents: that of as many of the longest as there may be, over slots for
    any lengths.
    """
    num_multiprocessors = num_multiprocessors or MULTIPROCESSORS
    longest, longest_keys = (
        max(1, min(max_seqlens[0], num_queries)),
        max(1, min(max_seqlens[1], num_keys)),
    )
    like = plan_forward(
        head_dim=head_dim, is_causal=is_causal, num_queries=longest, num_keys=longest_keys,
        batch_heads=heads * max(1, num_queries // longest), group=group, num_multiprocessors=num_multiprocessors,
        config=config, packed=True,
    )  # fmt: skip
    together = max(1, L2_SHARE_BYTES // (2 * num_keys * head_dim * BYTES_PER_ELEMENT)) * group
    plan = replace(
        like, num_queries=num_queries, num_keys=num_keys, batch_heads=heads, heads_together=min(together, heads),
        documents=documents, num_programs=0,
    )  # fmt: skip
    return _with_programs(plan, num_multiprocessors)


def estimated_steps(plan: ForwardPlan, num_multiprocessors: int) -> float:
    """How long a call takes, in steps of a consumer's loop in the schedule of large grids."""
    schedule, steps = plan.schedule, _steps_of_tiles(plan) + TILE_COST_STEPS[plan.order]
    places = num_multiprocessors * schedule.resident  # for programs that run at a time
    turns = -(-plan.num_items // places)
    merging = 0.0
    if plan.part_tiles:
        walks, cost = _steps_of_tiles(plan), TILE_COST_STEPS[plan.order]
        parts = (
            int((-(-walks // plan.part_tiles)).sum()) * plan.batch_heads
            - plan.whole * plan.num_parts
        )
        own_steps = plan.part_tiles + cost
        if plan.whole + parts > places:
            work = float(walks.sum()) * plan.batch_heads + (plan.whole + parts) * cost
            own_steps = work / places + own_steps / 2
        merging = MERGE_STEPS + PART_STEPS * parts * schedule.query_tile / 128
    elif plan.paired:
        own_steps = turns * float((steps + steps[::-1]).max())
    elif (
        plan.is_causal and turns > 1
    ):  # handed out longest first, they end within a short tile of one another
        own_steps = max(
            float(steps[-1]), float(steps.sum()) * plan.batch_heads / places + float(steps[0])
        )
    else:
        own_steps = turns * float(steps[-1])
    return schedule.step_cost * (own_steps + START_COST_STEPS * (plan.order == "dynamic")) + merging


def _steps_of_tiles(plan: ForwardPlan) -> np.ndarray:
    """The key tiles that each tile of queries of a head walks, at once: a call's first plan keeps
    the host waiting.
    """
    return _walks(
        plan.schedule,
        plan.is_causal,
        plan.num_tiles,
        plan.first_query(0),
        plan.num_queries,
        plan.num_keys,
    )


@lru_cache(maxsize=64)
def _walks(
    schedule: ForwardSchedule,
    is_causal: bool,
    num_tiles: int,
    first_query: int,
    num_queries: int,
    num_keys: int,
) -> np.ndarray:
    ends = np.full(num_tiles, num_keys)
    if is_causal:
        rows = first_query + schedule.query_tile * np.arange(1, num_tiles + 1)
        ends = np.minimum(rows, min(num_keys, num_queries))
    return np.maximum(-(-ends // schedule.key_tile), schedule.masked_tiles(is_causal))
