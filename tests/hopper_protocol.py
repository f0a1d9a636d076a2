"""Models of what the Hopper kernels do, on plain numbers: no GPU, and of Triton the kernels' own
integer functions.

Of the forward, `items_of_program` and `key_tiles` say what a program computes, in the order in
which it does where that is not dynamic. A program's protocol is a list of partitions, each the list
of what it waits for, signals, writes and reads, in order; a copy engine is one, and may deliver a
tile any time after it was asked. `explore` runs every interleaving of such partitions and
`run_at_random` one. A kernel that waits for an arrival that never comes hangs the GPU without a
word; here it is an AssertionError.

Of the backward in a fixed order, `run_in_turns` has the programs that wait for each other through
memory: so many of them at a time as there are multiprocessors.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from cs336_systems.attention.hopper import walk as kernel
from cs336_systems.attention.hopper.schedule import CONSUMER_ROWS, ForwardPlan

# (index into batch and heads, tile of queries) -> first keys of its key tiles; none for a slot
# without a tile
Walk = Callable[[int, int], list[int]]
ANYTHING = -2  # of a place that is read, whatever lies there


@dataclass(frozen=True)
class Arrive:
    barrier: str


class Signal(Arrive):
    """bar.arrive: be counted. A second one before the `Await` would end the barrier without it."""


class Await(Arrive):
    """bar.sync with the other side's `Signal`."""


@dataclass(frozen=True)
class Wait:
    """Go on once the phase of this parity is over (mbarrier.try_wait.parity)."""

    barrier: str
    parity: int


@dataclass(frozen=True)
class Write:
    place: str
    content: Any


class Use(Write):
    """Read a place, which must hold this; what matmuls and the copy engine read is there twice, at
    start and end.
    """


Operation = Wait | Arrive | Write
Partition = list[Operation]
# (phase, arrivals that are missing) of an mbarrier, what lies in a place, a signal that waits
State = dict[str, Any]


def start(partitions: list[Partition], arrivals: Mapping[str, int]) -> tuple[State, dict[str, int]]:
    """The state at the start, and how many arrivals end a phase of each mbarrier: 2 or as its
    prefix says.
    """
    names = {
        op.barrier for partition in partitions for op in partition if type(op) in (Wait, Arrive)
    }
    counts = {
        name: next((count for prefix, count in arrivals.items() if name.startswith(prefix)), 2)
        for name in names
    }
    return {name: (0, count) for name, count in counts.items()}, counts


def advance(operation: Operation, state: State, counts: Mapping[str, int]) -> bool:
    """Carry out an operation in `state`; False where it has to wait.

    AssertionError where it reads what was not meant, or signals twice.
    """
    match operation:
        case Wait(barrier, parity):
            return state[barrier][0] != parity
        case Signal(barrier):
            assert barrier not in state, f"{barrier} twice"
            state[barrier] = ()
        case Await(barrier):
            return state.pop(barrier, None) is not None
        case Use(place, content):
            found = state.get(place)
            assert content in (ANYTHING, found), f"{place} must hold {content}, found {found}"
        case Arrive(barrier):
            phase, missing = state[barrier]
            state[barrier] = (phase, missing - 1) if missing > 1 else (phase ^ 1, counts[barrier])
        case Write(place, content):
            state[place] = content
    return True


def ring(step: int, slots: int = 2) -> tuple[int, int]:
    """(slot, parity of its round) of a step."""
    return kernel.ring_slot.fn(step, slots)


def copies(name: str, steps: int, slots: int = 2) -> Partition:
    """The copy engine, which may deliver a tile any time after it was asked."""
    operations: Partition = []
    for step in range(steps):
        slot, _ = ring(step, slots)
        operations += [
            Wait(f"asked_{name}{step}", 0),
            Write(f"{name}{slot}", step),
            Arrive(f"{name}_full{slot}"),
        ]
    return operations


def explore(partitions: list[Partition], arrivals: Mapping[str, int]) -> None:
    """Run every interleaving; AssertionError where one hangs or goes wrong as `advance` says."""
    state, counts = start(partitions, arrivals)
    first = ((0,) * len(partitions), frozenset(state.items()))
    seen, stack = {first}, [first]
    while stack:
        places, frozen = stack.pop()
        left = [who for who, place in enumerate(places) if place < len(partitions[who])]
        moves = 0
        for who in left:
            state = dict(frozen)
            if advance(partitions[who][places[who]], state, counts):
                moves += 1
                after = (
                    tuple(x + (i == who) for i, x in enumerate(places)),
                    frozenset(state.items()),
                )
                if after not in seen:
                    seen.add(after)
                    stack.append(after)
        assert moves or not left, f"hangs at {places}"


def run_at_random(
    partitions: list[Partition],
    arrivals: Mapping[str, int],
    rng: random.Random,
    ahead: tuple[str, ...] = (),
) -> None:
    """Run one interleaving, as `explore` does. The barriers `ahead` begin a phase ahead: a mistake."""
    state, counts = start(partitions, arrivals)
    state |= {barrier: (1, counts[barrier]) for barrier in ahead}
    places, left = (
        [0] * len(partitions),
        [who for who, partition in enumerate(partitions) if partition],
    )
    while left:
        first = rng.randrange(len(left))
        in_turn = left[first:] + left[:first]
        who = next((x for x in in_turn if advance(partitions[x][places[x]], state, counts)), None)
        assert who is not None, f"hangs at {places}"
        places[who] += 1
        if places[who] == len(partitions[who]):
            left.remove(who)


# The forward


def items_of_program(launch: ForwardPlan, program: int) -> Iterator[tuple[int, int]]:
    """(index into batch and heads, tile of queries) of each tile of `program`, in its order."""
    for item in range(program, launch.num_items, launch.num_programs):
        yield from tiles_of_item(launch, item)


def tiles_of_item(launch: ForwardPlan, item: int) -> list[tuple[int, Any]]:
    """Of a divided call (index, (tile, part)), with -1 for a whole walk; none for a part that a
    tile has not.
    """
    in_turn = (
        launch.num_tiles,
        launch.batch_heads,
        launch.heads_together,
        launch.paired,
        launch.is_causal,
    )
    if launch.part_tiles:
        item, part = kernel.part_of_item.fn(
            item, launch.num_tiles, launch.batch_heads, launch.whole
        )
        tile, head = kernel.tile_of_item.fn(item, 0, *in_turn)
        return [(head, (tile, part))] if keys_of_part(launch, tile, part) else []
    sides = range(kernel.tiles_of_item.fn(item, launch.num_tiles, launch.paired))
    return [kernel.tile_of_item.fn(item, side, *in_turn)[::-1] for side in sides]


def first_query(launch: ForwardPlan, tile: int) -> int:
    """The first row of a tile of queries, below 0 where it has rows to spare."""
    sizes = launch.schedule.query_tile, launch.alignment
    return kernel.first_query_of.fn(tile, launch.num_tiles, launch.num_queries, *sizes)


def key_tiles(launch: ForwardPlan, tile: int) -> list[int]:
    """First keys of the key tiles that a tile of queries takes, in its order: from the last visible
    one to key 0.

    The masked steps are unrolled, so there are at least so many tiles; one that nobody sees is read
    from behind the end, as zeros, and its scores are hidden.
    """
    schedule, lengths = launch.schedule, (launch.num_queries, launch.num_keys)
    sizes = schedule.query_tile, schedule.key_tile
    live = kernel.live_key_tiles.fn(first_query(launch, tile), *lengths, *sizes, launch.is_causal)
    dead = max(0, schedule.masked_tiles(launch.is_causal) - live)
    return [launch.num_keys] * dead + [i * schedule.key_tile for i in reversed(range(live))]


def keys_of_part(launch: ForwardPlan, tile: int, part: int) -> list[int]:
    """First keys of the key tiles that a part of a tile's walk takes, in its order."""
    walk = key_tiles(launch, tile)
    first, steps = kernel.range_of_part.fn(part, len(walk), launch.part_tiles)
    return [i * launch.schedule.key_tile for i in reversed(range(first, first + max(0, steps)))]


def skips_first_key_tile(launch: ForwardPlan, tile: int, consumer: int) -> bool:
    """Whether a consumer's rows of a tile come before all keys of the key tile that is walked
    first.
    """
    if launch.schedule.masked_tiles(launch.is_causal) == 1:
        return False  # the rows of all consumers are cut by the diagonal, or there is none
    first_row = first_query(launch, tile) + consumer * CONSUMER_ROWS
    if first_row < 0:  # rows to spare, which are read from behind the end
        first_row = launch.num_queries
    return not kernel.sees_tile.fn(
        first_row, (len(key_tiles(launch, tile)) - 1) * launch.schedule.key_tile
    )


def forward_partitions(launch: ForwardPlan, items: list[int], walk: Walk) -> list[Partition]:
    """The copier of a program of these work items, the copies into each place, and at last the
    consumers.
    """
    schedule, copier = launch.schedule, Partition()
    consumers: list[Partition] = [[] for _ in range(schedule.consumers)]
    engines: dict[str, Partition] = {}

    def copy(place: str, content: object, barrier: str) -> None:
        engine = engines.setdefault(place, [])
        number = len(engine) // 3
        copier.append(Arrive(f"asked_{place}"))
        engine.extend([Wait(f"asked_{place}", number & 1), Write(place, content), Arrive(barrier)])

    step = tiles_done = 0
    for number, (item, following) in enumerate(zip(items, [*items[1:], None])):
        for head, tile in tiles_of_item(launch, item):
            keys = walk(head, tile)
            if not keys:
                continue
            for j in range(len(keys) + 1):
                slot, phase = ring(step, schedule.slots)
                # by its announcement and the copies of K and V; the first has no V, the last no K
                full = f"full{slot}"
                copier += [Wait(f"empty{slot}", phase ^ 1), Arrive(full)] + [Arrive(full)] * (
                    j in (0, len(keys))
                )
                if j < len(keys):
                    copy(f"K{slot}", (head, keys[j]), full)
                if j > 0:
                    copy(f"V{slot}", (head, keys[j - 1]), full)
                for consumer, own in enumerate(consumers):
                    own.append(Wait(full, phase))
                    if j == 0:
                        copier += [
                            Wait(f"q_empty{consumer}", tiles_done & 1 ^ 1),
                            Arrive(f"q_full{consumer}"),
                        ]
                        copy(f"Q{consumer}", (head, tile), f"q_full{consumer}")
                        own.append(Wait(f"q_full{consumer}", tiles_done & 1))
                    skips = (
                        j == 0
                        and launch.documents is None
                        and skips_first_key_tile(launch, tile, consumer)
                    )
                    reads: Partition = []
                    if j < len(keys) and not skips:
                        reads += [
                            Use(f"Q{consumer}", (head, tile)),
                            Use(f"K{slot}", (head, keys[j])),
                        ]
                    if j > 0:
                        reads.append(Use(f"V{slot}", (head, keys[j - 1])))
                    own += [*reads, *reads, Arrive(f"empty{slot}")]
                    if j == len(keys) - 1 and schedule.head_tile <= 128:
                        own.append(Arrive(f"q_empty{consumer}"))
                step += 1
            # O leaves from Q's memory
            for consumer, own in enumerate(consumers if schedule.head_tile > 128 else ()):
                own += [
                    Write(f"Q{consumer}", "O"),
                    Use(f"Q{consumer}", "O"),
                    Arrive(f"q_empty{consumer}"),
                ]
            tiles_done += 1
        if launch.order == "dynamic":
            slot, phase = ring(number)
            place, full, empty = f"item{slot}", f"item_full{slot}", f"item_empty{slot}"
            copier += [Wait(empty, phase ^ 1), Write(place, following), Arrive(full)]
            for own in consumers:
                own += [
                    Wait(full, phase),
                    Use(place, following),
                    Use(place, following),
                    Arrive(empty),
                ]
    return [copier, *engines.values(), *consumers]


def forward_arrivals(launch: ForwardPlan) -> dict[str, int]:
    consumers = launch.schedule.consumers
    return {
        "asked": 1,
        "full": 3,
        "empty": consumers,
        "q_empty": 1,
        "item_full": 1,
        "item_empty": consumers,
    }


def run_forward(
    launch: ForwardPlan, rng: random.Random, walk: Walk | None = None
) -> list[tuple[int, int]]:
    """`run_at_random` of every program, one after the other; the (head, tile) that they compute.

    Of a dynamic order the first program takes what is handed out. `walk` says which key tiles a
    tile of queries takes, where that is not `key_tiles`.
    """
    walk = walk or (lambda head, tile: key_tiles(launch, tile))
    done = []
    for program in range(launch.num_programs):
        items = list(range(program, launch.num_items, launch.num_programs))
        if launch.order == "dynamic":
            items = [program, *range(launch.num_programs, launch.num_items if program == 0 else 0)]
        run_at_random(forward_partitions(launch, items, walk), forward_arrivals(launch), rng)
        done += [place for item in items for place in tiles_of_item(launch, item) if walk(*place)]
    return done


# The backward in a fixed order

# (counter, turn): the sums that a step adds to, and how many programs add there before it
Addition = tuple[int, int]


def run_in_turns(
    programs: Callable[[int], list[Addition]],
    num_programs: int,
    places: int,
    step_time: Callable[[], float] = lambda: 1.0,
    hand_over: float = 0.5,
) -> tuple[float, dict[int, list[int]]]:
    """Run programs that add in turn, and return when the last one ends, and which programs added at
    each counter.

    Programs start in the order of their numbers, each as soon as one of so many `places` is free,
    and keep it to their end. A program computes a step while its last one is added, `step_time()`
    long at least; once its turn has come, its sums are where the next program finds them after a
    time of `hand_over`. AssertionError where it hangs.
    """
    rest: dict[int, list[Addition]] = {}  # of programs that run, backwards
    computed: dict[int, float] = {}  # when their steps were
    waiting: dict[Addition, int] = {}  # programs
    added: dict[int, list[int]] = {}
    events: list[tuple[float, int]] = []  # (when, program): its sums have been added
    started, end = 0, 0.0

    def add(program: int, time: float) -> None:
        computed[program] = time
        counter, turn = rest[program][-1]
        if len(added.setdefault(counter, [])) == turn:
            heappush(events, (time + hand_over, program))
        else:
            assert (counter, turn) not in waiting, "two programs have one turn"
            waiting[counter, turn] = program

    def start(time: float) -> None:
        nonlocal started
        if started < num_programs:
            rest[started] = programs(started)[::-1]
            started += 1
            add(started - 1, time + step_time())

    for _ in range(places):
        start(0.0)
    while events:
        end, program = heappop(events)
        counter, _ = rest[program].pop()
        added[counter].append(program)
        following = waiting.pop((counter, len(added[counter])), None)
        if following is not None:
            heappush(events, (max(end, computed[following]) + hand_over, following))
        if rest[program]:
            add(program, max(end, computed[program] + step_time()))
        else:
            del rest[program]
            start(end)
    assert not rest, f"hangs with {len(rest)} programs on {places} multiprocessors"
    return end, added
