"""A model of the Hopper forward on plain numbers: no GPU, no Triton.

`items_of_program` and `key_tiles` say what a program computes, in the order in which it does where that is not dynamic,
and `simulate` runs the protocol between the warp that copies and those that compute, with copies and warps advancing in
any order. A kernel that waits for an arrival that never comes hangs the GPU without a word; here it is an exception.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from cs336_systems.attention.hopper.schedule import Launch

# (index into batch and heads, tile of queries) -> first keys of its key tiles; none for a slot without a tile
Walk = Callable[[int, int], list[int]]


def items_of_program(launch: Launch, program: int) -> Iterator[tuple[int, int]]:
    """(index into batch and heads, tile of queries) of each tile of `program`, in its order."""
    for item in range(program, launch.num_items, launch.num_programs):
        yield from tiles_of_item(launch, item)


def tiles_of_item(launch: Launch, item: int) -> list[tuple[int, int]]:
    num_tiles = launch.num_tiles
    if launch.paired:
        head, position = divmod(item, -(-num_tiles // 2))
        return [(head, tile) for tile in dict.fromkeys((num_tiles - 1 - position, position))]
    group = item // (launch.heads_together * num_tiles) * launch.heads_together
    width = min(launch.heads_together, launch.batch_heads - group)
    tile, head = divmod(item - group * num_tiles, width)
    return [(group + head, num_tiles - 1 - tile if launch.is_causal else tile)]


def _walks(launch: Launch, item: int, walk: Walk) -> list[tuple[int, int, list[int]]]:
    return [(head, tile, keys) for head, tile in tiles_of_item(launch, item) if (keys := walk(head, tile))]


def key_tiles(launch: Launch, tile: int) -> list[int]:
    """First keys of the key tiles that a tile of queries takes, in its order: from the last visible one to key 0.

    The masked steps are unrolled, so there are at least so many tiles; one that nobody sees is read from behind the
    end, as zeros, and its scores are hidden.
    """
    live, dead = launch.num_key_tiles(tile)
    return [launch.num_keys] * dead + [i * launch.schedule.key_tile for i in reversed(range(live))]


class ProtocolError(Exception):
    """A run of the model in which somebody waits for ever, or reads what it should not."""


@dataclass
class _Barrier:
    """An mbarrier: a phase ends when all arrivals and all announced bytes are in."""

    count: int
    phase: int = 0
    arrived: int = 0
    bytes_missing: int = 0

    def arrive(self) -> None:
        if self.arrived == self.count:
            raise ProtocolError("more arrivals in a phase than the barrier counts")
        self.arrived += 1
        self._end_phase()

    def expect(self, num_bytes: int) -> None:
        self.bytes_missing += num_bytes
        self.arrive()

    def deliver(self, num_bytes: int) -> None:
        self.bytes_missing -= num_bytes
        self._end_phase()

    def passes(self, parity: int) -> bool:
        """Whether a wait for the phase of this parity is over."""
        return self.phase != parity

    def _end_phase(self) -> None:
        if self.arrived == self.count and self.bytes_missing == 0:
            self.phase ^= 1
            self.arrived = 0


Wait = tuple[_Barrier, int]  # a process yields what it waits for
Memory = dict[tuple[str, int], object]  # (kind of tile, slot) -> what lies there
ITEM_SLOTS = 2


@dataclass
class _Machine:
    """Shared memory, barriers, and copies under way, of one program."""

    launch: Launch
    walk: Walk  # that consumers wait for
    counter: Iterator[int]  # of all programs: the work items that a dynamic order hands out
    memory: Memory = field(default_factory=dict)
    copies: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        schedule = self.launch.schedule
        self.q_full = [_Barrier(1) for _ in range(schedule.consumers)]
        self.q_empty = [_Barrier(1) for _ in range(schedule.consumers)]
        self.full = [_Barrier(1) for _ in range(schedule.slots)]
        self.empty = [_Barrier(schedule.consumers) for _ in range(schedule.slots)]
        self.item_full = [_Barrier(1) for _ in range(ITEM_SLOTS)]
        self.item_empty = [_Barrier(schedule.consumers) for _ in range(ITEM_SLOTS)]

    def copy(self, place: tuple[str, int], content: object, barrier: _Barrier) -> None:
        self.memory.pop(place, None)  # from here on the old content is being overwritten

        def arrive() -> None:
            self.memory[place] = content
            barrier.deliver(1)

        self.copies.append(arrive)

    def read(self, place: tuple[str, int], expected: object) -> None:
        if self.memory.get(place) != expected:
            raise ProtocolError(f"{place} should hold {expected}, holds {self.memory.get(place)}")


def _copier(machine: _Machine, program: int, walk: Walk | None = None) -> Iterator[Wait]:
    launch, step, tiles_done, items_done, item = machine.launch, 0, 0, 0, program
    slots = launch.schedule.slots
    while item < launch.num_items:
        next_item = next(machine.counter) if launch.order == "dynamic" else item + launch.num_programs
        for head, tile, keys in _walks(launch, item, walk or machine.walk):
            for j in range(len(keys) + 1):
                slot, phase = step % slots, step // slots & 1
                yield machine.empty[slot], phase ^ 1
                loads = [("K", keys[j])] if j < len(keys) else []
                loads += [("V", keys[j - 1])] if j > 0 else []
                machine.full[slot].expect(len(loads))
                for kind, first_key in loads:
                    machine.copy((kind, slot), (head, first_key), machine.full[slot])
                if j == 0:
                    for consumer in range(launch.schedule.consumers):
                        yield machine.q_empty[consumer], tiles_done & 1 ^ 1
                        machine.q_full[consumer].expect(1)
                        machine.copy(("Q", consumer), (head, tile), machine.q_full[consumer])
                step += 1
            tiles_done += 1
        if launch.order == "dynamic":
            slot, phase = items_done % ITEM_SLOTS, items_done // ITEM_SLOTS & 1
            yield machine.item_empty[slot], phase ^ 1
            machine.memory["item", slot] = next_item
            machine.item_full[slot].arrive()
            items_done += 1
        item = next_item


def _consumer(machine: _Machine, program: int, consumer: int, done: list[tuple[int, int, int]]) -> Iterator[Wait]:
    launch, step, tiles_done, items_done, item = machine.launch, 0, 0, 0, program
    slots, is_wide = launch.schedule.slots, launch.schedule.head_tile > 128
    while item < launch.num_items:
        for head, tile, keys in _walks(launch, item, machine.walk):
            for j in range(len(keys) + 1):
                slot, phase = step % slots, step // slots & 1
                yield machine.full[slot], phase
                if j == 0:
                    yield machine.q_full[consumer], tiles_done & 1
                operands: list[tuple[tuple[str, int], object]] = []
                skips = j == 0 and launch.documents is None and launch.skips_first_key_tile(tile, consumer)
                if j < len(keys) and not skips:
                    operands += [(("Q", consumer), (head, tile)), (("K", slot), (head, keys[j]))]
                if j > 0:
                    operands += [(("V", slot), (head, keys[j - 1]))]
                for _ in range(2):  # what the products read lies there when they start and when they end
                    for place, expected in operands:
                        machine.read(place, expected)
                    yield _Barrier(1), 1
                machine.empty[slot].arrive()
                step += 1
                if j == len(keys) - 1 and not is_wide:
                    machine.q_empty[consumer].arrive()
            if is_wide:  # O leaves from Q's memory
                machine.memory["Q", consumer] = "O"
                yield _Barrier(1), 1
                machine.read(("Q", consumer), "O")
                machine.q_empty[consumer].arrive()
            tiles_done += 1
            done.append((head, tile, consumer))
        if launch.order == "dynamic":
            slot, phase = items_done % ITEM_SLOTS, items_done // ITEM_SLOTS & 1
            yield machine.item_full[slot], phase
            item = machine.memory["item", slot]
            yield _Barrier(1), 1
            machine.read(("item", slot), item)
            machine.item_empty[slot].arrive()
            items_done += 1
        else:
            item += launch.num_programs


def simulate_all(launch: Launch, rng: random.Random, walk: Walk | None = None) -> list[tuple[int, int, int]]:
    """`simulate` of every program, one after the other; of a dynamic order the first one takes what is handed out."""
    counter = count(launch.num_programs)
    return [
        piece for program in range(launch.num_programs) for piece in simulate(launch, program, rng, walk, counter)
    ]


def simulate(
    launch: Launch, program: int, rng: random.Random, walk: Walk | None = None, counter: Iterator[int] | None = None
) -> list[tuple[int, int, int]]:
    """Run one program, whoever can advance doing so at random; the (head, tile, consumer) that it computed.

    `walk` says which key tiles a tile of queries takes, without a mask's lists `key_tiles`.

    ProtocolError when nobody can advance, a tile is read that is not the one wanted, or an arrival is one too many.
    """
    counter = counter or count(launch.num_programs)
    machine = _Machine(launch, walk or (lambda head, tile: key_tiles(launch, tile)), counter)
    done: list[tuple[int, int, int]] = []
    processes = [_copier(machine, program)]
    processes += [_consumer(machine, program, consumer, done) for consumer in range(launch.schedule.consumers)]
    waits: dict[Iterator[Wait], Wait | None] = {process: next(process, None) for process in processes}
    while True:
        able = [process for process, wait in waits.items() if wait is not None and wait[0].passes(wait[1])]
        choices = len(able) + len(machine.copies)
        if not choices:
            break
        choice = rng.randrange(choices)
        if choice < len(able):
            waits[able[choice]] = next(able[choice], None)
        else:
            machine.copies.pop(choice - len(able))()
    if any(wait is not None for wait in waits.values()):
        raise ProtocolError("everybody waits")
    return done
