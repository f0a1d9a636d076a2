"""The Hopper backward as far as a CPU can judge it: which tiles are visited and masked, and whether
barriers can hang.

The kernel's own integer functions run here as Python; around them stands a model of what a program
does with each tile and of the order in which its partitions wait. The kernel itself is checked on a
GPU, in `test_hopper.py`.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton
from torch import Tensor

pytest.importorskip("hypothesis")  # a GPU machine may lack it
pytest.importorskip(
    "cs336_systems.attention.hopper.backward", reason="this triton has no Gluon for Hopper"
)

from hypothesis import given
from hypothesis import strategies as st
from triton.runtime.jit import JITFunction

from cs336_systems.attention import BlockMask
from cs336_systems.attention.call import Documents, Saved
from cs336_systems.attention.choose import HOPPER_TRITON
from cs336_systems.attention.hopper import backward, light
from cs336_systems.attention.hopper import backward_walk as walk
from cs336_systems.attention.hopper import wide_backward as wide
from cs336_systems.attention.hopper.division import Division, divide_walks
from cs336_systems.attention.hopper.schedule import SCHEDULES
from cs336_systems.attention.masks.tiles import TileLists, pack_tokens
from cs336_systems.attention.reference import attention_reference
from cs336_systems.measure.stages import STAGES, TOTAL, time_stages
from tests.hopper_protocol import (
    ANYTHING,
    Addition,
    Arrive,
    Await,
    Operation,
    Partition,
    Signal,
    Use,
    Wait,
    Write,
    copies,
    explore,
    ring,
    run_in_turns,
)

KEY_TILE, SLOTS = backward.KEY_TILE.value, backward.SLOTS.value
EACH_MASK = pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])


def plain(result: Any) -> Any:
    """What a kernel's function returned, without Triton's wrapper around constants."""
    if isinstance(result, tuple):
        return tuple(plain(x) for x in result)
    return getattr(result, "value", result)


@dataclass(frozen=True)
class Walks:
    """Which queries the key tiles of a head walk."""

    queries: int
    keys: int
    is_causal: bool
    query_tile: int

    @property
    def key_tiles(self) -> int:
        return plain(walk.key_tiles.fn(self.queries, self.keys, self.is_causal))

    @property
    def query_tiles(self) -> int:
        return plain(walk.query_tiles.fn(self.queries, self.query_tile, KEY_TILE))

    def starts(self, key_tile: int) -> list[int]:
        """The first query of each step."""
        call = (self.query_tiles, self.query_tile, self.is_causal)
        first_tile, steps = plain(walk.walk_of_tile.fn(key_tile, *call))
        return [plain(walk.query_of_step.fn(step, first_tile, *call)) for step in range(steps)]


LENGTHS = st.integers(1, 300) | st.sampled_from(
    (63, 64, 65, 127, 128, 129, 192, 193, 255, 256, 257, 640)
)
each_problem = given(
    queries=LENGTHS, keys=LENGTHS, is_causal=st.booleans(), group=st.sampled_from((1, 3)), together=st.integers(1, 5),
    head_dim=st.sampled_from((64, 128)),
)  # fmt: skip


# (key head, its first key, [(query head, its first query, (keys, queries): which of the tile are
# seen)]) of a program
Program = tuple[int, int, list[tuple[int, int, Tensor]]]


def assert_gradients(
    programs: Iterable[Program],
    queries: int,
    keys: int,
    group: int,
    is_causal: bool,
    key_tile: int,
    *,
    sums_dq: bool,
) -> None:
    """Of four key heads, the tiles of all programs add up to the gradients, in float64, and none is
    written twice.

    Reads past the end are zeros, and L past the end is +inf. Scores are near -1e3, where a key that
    does not exist and scores 0 has a P of exp(1e3) = inf. Key tiles that no query sees are NaN, and
    0 · NaN in dQ if they are visited.
    """
    generator = torch.Generator().manual_seed(queries * 1000 + keys)
    sizes = [(4 * group, queries)] * 2 + [(4, keys)] * 2
    q, do, k, v = (
        torch.randn(*size, 8, generator=generator, dtype=torch.float64) for size in sizes
    )
    q[..., 0], k[..., 0] = 100.0, -10.0
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    repeated = [leaves[0], *(x.repeat_interleave(group, dim=0) for x in leaves[1:])]
    output, lse = attention_reference(*repeated, is_causal=is_causal, scale=1.0, return_lse=True)
    expected = torch.autograd.grad(output, leaves, do)

    def padded(x: Tensor, value: float = 0.0) -> Tensor:
        return torch.nn.functional.pad(x, (0, 0) * (x.ndim - 2) + (0, 128), value=value)

    delta, lse = padded((do * output.detach()).sum(-1)), padded(lse.detach(), math.inf)
    q, do, k, v = map(padded, (q, do, k, v))
    seen = -(-min(queries, keys) // key_tile) * key_tile if is_causal else keys
    k[:, seen:keys], v[:, seen:keys] = math.nan, math.nan
    dq, dk, dv = torch.zeros_like(q), torch.full_like(k, math.nan), torch.full_like(v, math.nan)
    for kv_head, first_key, steps in programs:
        sum_k = sum_v = 0
        for head, first_query, mask in steps:
            own, streamed = (
                slice(first_key, first_key + len(mask)),
                slice(first_query, first_query + mask.shape[1]),
            )
            p = torch.where(
                mask, (k[kv_head, own] @ q[head, streamed].T - lse[head, streamed]).exp(), 0.0
            )
            ds = p * (v[kv_head, own] @ do[head, streamed].T - delta[head, streamed])
            sum_k, sum_v = sum_k + ds @ q[head, streamed], sum_v + p @ do[head, streamed]
            dq[head, streamed] += ds.T @ k[kv_head, own]
        assert dk[kv_head, own].isnan().all(), "a program writes its tile alone"
        dk[kv_head, own], dv[kv_head, own] = sum_k, sum_v
    for sums, exact in zip((dk, dv), expected[1:]):
        torch.testing.assert_close(sums[:, :keys][:, :seen], exact[:, :seen])
        assert not exact[:, seen:].any()
    if sums_dq:
        torch.testing.assert_close(dq[:, :queries], expected[0])
        assert not dq[:, queries:].any()


@each_problem
def test_the_tiles_add_up_to_the_gradients(queries, keys, is_causal, group, together, head_dim):
    """Those of the grid that is launched, by the plan that the kernel is compiled for."""
    with pytest.MonkeyPatch.context() as patch:
        launched = record_launches(patch, backward, light)
        q, k = (
            torch.empty(2, heads, rows, head_dim).bfloat16()
            for heads, rows in ((2 * group, queries), (2, keys))
        )
        backward.hopper_backward(
            Saved(q, k, k, q, torch.empty(q.shape[:3]), q, None),
            deterministic=False,
            is_causal=is_causal,
            scale=1.0,
        )
    (num_programs,), _, _, options = launched["backward"]
    plan = options["PLAN"]
    walks = Walks(queries, keys, is_causal, plan.query_tile)
    assert plan.whole_key_tiles == (
        walks.key_tiles * KEY_TILE <= keys or (is_causal and queries <= keys)
    )
    # which a causal program runs without a bound
    masked_steps = walk.least_steps(plan) if is_causal else 0

    def steps_of(program: int) -> Program:
        kv_head, key_tile = divmod(program, walks.key_tiles)
        if is_causal:
            call = (program, num_programs, walks.key_tiles, min(together, num_programs))
            key_tile, kv_head = plain(walk.tile_of_program.fn(*call))
        starts = walks.starts(key_tile)
        assert len(starts) >= max(1, masked_steps)
        steps = []
        for member, (step, start) in itertools.product(range(group), enumerate(starts)):
            key, query = (
                key_tile * KEY_TILE + torch.arange(KEY_TILE)[:, None],
                start + torch.arange(plan.query_tile),
            )
            mask = (query >= key if step < masked_steps else query >= 0) & (
                plan.whole_key_tiles | (key < keys)
            )
            steps.append((kv_head * group + member, start, mask))
        return kv_head, key_tile * KEY_TILE, steps

    assert_gradients(
        map(steps_of, range(num_programs)), queries, keys, group, is_causal, KEY_TILE, sums_dq=True
    )


@given(
    queries=LENGTHS, keys=LENGTHS, is_causal=st.booleans(), group=st.sampled_from((1, 3)),
    head_dim=st.sampled_from((64, 128)), parts=st.integers(1, 9), last=st.integers(1, 30),
)  # fmt: skip
def test_parts_of_walks_add_up_to_the_gradients(
    queries, keys, is_causal, group, head_dim, parts, last
):
    """Without a mask those of the last tiles, beside whole walks of the others."""
    keys = queries if is_causal else keys

    def divide(*, key_tiles: int, batch_heads: int, steps: int, **_: Any) -> Division:
        tiles = key_tiles * batch_heads
        if is_causal:
            return Division(
                0,
                parts,
                batch_heads * sum(-(-length // parts) for length in range(1, key_tiles + 1)),
            )
        own, divided = min(parts, steps), min(last, tiles)
        return Division(tiles - divided, own, divided * own)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backward, "divide_walks", divide)
        launched = record_launches(patch, backward, light)
        q, k = (
            torch.empty(2, heads, rows, head_dim).bfloat16()
            for heads, rows in ((2 * group, queries), (2, keys))
        )
        _, *grads = backward.hopper_backward(
            Saved(q, k, k, q, torch.empty(q.shape[:3]), q, None),
            deterministic=False,
            is_causal=is_causal,
            scale=0.5,
        )
    walks = Walks(queries, keys, is_causal, backward.QUERY_TILES[head_dim])
    (num_programs,), tensors, (*_, whole, size), options = launched["split_backward"]
    assert options["PLAN"].split and launched.get("backward", [(0,)])[0] == (whole,)
    grid, (sums, *joined), numbers, joining = launched["backward_join"]
    assert sums is tensors[-1] and sums.shape == (num_programs, 4, 64 * head_dim)
    assert all(x is grad for x, grad in zip(joined, grads, strict=True))
    assert grid == ((4 * walks.key_tiles - whole) * 4 * (head_dim // 16),)
    assert (
        numbers == (whole, size, keys, walks.key_tiles, 0.5) and joining["IS_CAUSAL"] == is_causal
    )
    masked_steps = walk.least_steps(options["PLAN"]) if is_causal else 0
    steps_of: dict[tuple[int, int], list[tuple[int, int, Tensor]]] = {}
    for tile in range(whole):
        kv_head, key_tile = divmod(tile, walks.key_tiles)
        steps_of[kv_head, key_tile] = [(start, 0) for start in walks.starts(key_tile)]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("parts_before", "walk_of_tile", "part_of_walk"):
            patch.setattr(walk, name, getattr(walk, name).fn)
        for program in range(num_programs):
            found = walk.part_of_program.fn(program, walks.key_tiles, whole, size, is_causal)
            key_tile, kv_head, part, parts_of_walk = plain(found)
            tile = SimpleNamespace(
                number=key_tile, query_tiles=walks.query_tiles, part=part, parts=parts_of_walk
            )
            _, first_tile, steps, *_ = plain(walk.walk_of.fn(0, tile, None, None, options["PLAN"]))
            assert steps >= max(1, masked_steps) and 0 <= part < parts_of_walk
            for step in range(steps):
                call = (step, first_tile, walks.query_tiles, walks.query_tile, is_causal)
                place = plain(walk.query_of_step.fn(*call)), step < masked_steps
                steps_of.setdefault((kv_head, key_tile), []).append(place)

    def program_of(kv_head: int, key_tile: int) -> Program:
        """All parts of a tile as one program."""
        steps = []
        for member, (start, is_masked) in itertools.product(
            range(group), steps_of[kv_head, key_tile]
        ):
            key, query = (
                key_tile * KEY_TILE + torch.arange(KEY_TILE)[:, None],
                start + torch.arange(walks.query_tile),
            )
            seen = (key <= query) if is_masked else (query >= 0)
            steps.append(
                (
                    kv_head * group + member,
                    start,
                    seen & (options["PLAN"].whole_key_tiles | (key < keys)),
                )
            )
        return kv_head, key_tile * KEY_TILE, steps

    tiles = list(itertools.product(range(4), range(walks.key_tiles)))
    assert_gradients(
        itertools.starmap(program_of, tiles),
        queries,
        keys,
        group,
        is_causal,
        KEY_TILE,
        sums_dq=True,
    )


def test_what_has_one_order_or_sums_in_two_pieces_is_not_divided(monkeypatch):
    launched = record_launches(monkeypatch, backward, light)
    monkeypatch.setattr(backward, "num_multiprocessors", lambda device: 132)
    fewer_keys = (64, 400, False, True)
    cases = ((64, 900, True, False), (96, 900, False, True), fewer_keys)
    for head_dim, keys, deterministic, is_causal in cases:
        launched.clear()
        q, k = low(1, 1, 900, head_dim), low(1, 1, keys, head_dim)
        backward.hopper_backward(
            Saved(q, k, k, q, torch.randn(1, 1, 900), q, None),
            deterministic=deterministic,
            is_causal=is_causal,
            scale=1.0,
        )
        assert launched.keys() == {"backward_preprocess", "backward", "backward_convert"}


@EACH_MASK
@pytest.mark.parametrize("head_dim", [40, 128])
@pytest.mark.parametrize(("whole", "parts"), [(0, 3), (4, 9)])
def test_parts_are_joined_where_their_tiles_are(head_dim, whole, parts, is_causal):
    """dK of two heads of 1100 keys, with its scale, and dV; what whole walks wrote stays. In the
    interpreter.
    """
    D_TILE, keys, key_tiles = 64 if head_dim <= 64 else 128, 1100, 9
    whole *= not is_causal
    tiles = [(head, number) for head in range(2) for number in range(key_tiles)][whole:]
    expected = torch.full((2, 2, key_tiles * 128, head_dim), 7.0)
    if is_causal:
        num_programs = 2 * sum(-(-length // parts) for length in range(1, key_tiles + 1))
    else:
        num_programs = len(tiles) * parts
    sums = torch.randn(num_programs, 2, 2, 64, D_TILE, generator=torch.Generator().manual_seed(0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walk, "parts_before", walk.parts_before.fn)
        for head, number in tiles:
            expected[:, head, number * 128 : (number + 1) * 128] = 0
        for program in range(num_programs):
            number, head, *_ = plain(
                walk.part_of_program.fn(program, key_tiles, whole, parts, is_causal)
            )
            # (dK and dV, keys, columns)
            own = sums[program].transpose(0, 1).flatten(1, 2)[..., :head_dim]
            expected[:, head, number * 128 : (number + 1) * 128] += (
                own * torch.tensor([0.5, 1.0])[:, None, None]
            )
    in_threads = sums.view(-1, 4, 2, 8, D_TILE // 8, 4, 2).permute(0, 4, 1, 3, 5, 2, 6)
    grads = [torch.full((1, 2, keys, head_dim), 7.0, dtype=torch.float16) for _ in range(2)]
    division = Division(whole, parts, num_programs)
    light.join(
        in_threads.reshape(num_programs, 4, 64 * D_TILE),
        *grads,
        key_tiles,
        division,
        is_causal,
        0.5,
    )
    for grad, exact in zip(grads, expected):
        torch.testing.assert_close(grad[0].float(), exact[:, :keys], rtol=2**-10, atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "key_tiles", "steps", "is_causal", "group", "places", "divided"),
    [
        pytest.param(64, 64, 128, False, 1, 132, (4092, 26, 104), id="four tiles in a last round"),
        pytest.param(1, 32, 64, False, 1, 132, (0, 4, 128), id="a head of 4,096 tokens"),
        pytest.param(
            64, 16, 32, False, 1, 132, (1024, 1, 0), id="a last round that is nearly full"
        ),
        pytest.param(2, 2, 2, False, 1, 132, (4, 1, 0), id="walks too short to divide"),
        pytest.param(4, 66, 64, False, 1, 132, (264, 1, 0), id="full rounds"),
        pytest.param(2, 57, 64, False, 1, 114, (114, 1, 0), id="a full round of another GPU"),
        pytest.param(1, 32, 64, True, 1, 132, (0, 5, 119), id="a causal head of 4,096 tokens"),
        pytest.param(16, 128, 256, True, 1, 132, (2048, 1, 0), id="causal walks enough"),
        pytest.param(8, 8, 8, True, 1, 132, (64, 1, 0), id="causal walks too short to divide"),
        pytest.param(8, 8, 8, True, 4, 132, (0, 3, 120), id="four query heads each"),
    ],
)
def test_walks_are_divided_where_multiprocessors_would_be_idle(
    heads, key_tiles, steps, is_causal, group, places, divided
):  # fmt: skip
    call = {"group": group, "head_tile": 128, "is_causal": is_causal, "num_multiprocessors": places}
    assert divide_walks(key_tiles=key_tiles, batch_heads=heads, steps=steps, **call) == divided


@given(
    st.integers(1, 40),
    st.integers(1, 70),
    st.sampled_from((1, 2)),
    st.sampled_from((1, 4)),
    st.booleans(),
)
def test_every_part_has_a_step_and_whole_walks_fill_rounds(
    heads, key_tiles, tiles_of_block, group, is_causal
):
    call = {"group": group, "head_tile": 128, "is_causal": is_causal, "num_multiprocessors": 132}
    steps, tiles = key_tiles * tiles_of_block, heads * key_tiles
    whole, parts, programs = divide_walks(
        key_tiles=key_tiles, batch_heads=heads, steps=steps, **call
    )
    assert programs <= 4 * 132
    if not programs:
        assert (whole, parts) == (tiles, 1)
    elif is_causal:
        assert whole == 0 and programs == heads * sum(
            -(-length // parts) for length in range(1, key_tiles + 1)
        )
    else:
        assert (
            whole == tiles // 132 * 132 < tiles
            and 2 <= parts <= steps
            and programs == (tiles - whole) * parts
        )


def test_long_causal_programs_start_first():
    """Within the heads that run together work never grows from one program to the next."""
    walks = Walks(1024, 1024, True, 64)
    places = [
        plain(walk.tile_of_program.fn(program, 48, walks.key_tiles, 3)) for program in range(48)
    ]
    steps = [len(walks.starts(key_tile)) for key_tile, _ in places]
    assert all(some == sorted(some, reverse=True) for some in (steps[:24], steps[24:]))


# Barriers: what each partition waits for and signals, in order. Every interleaving is tried.


ALONE, BY_SENDERS, LATE = (
    way.value for way in (backward.ALONE, backward.BY_SENDERS, backward.LATE)
)
ASKED = {"asked": 1}  # one partition asks for a copy


def slots(steps: int, producer_steps: int | None = None) -> list[Partition]:
    """The ring of Q and dO in a program of so many steps in all, as `_produce` and `_consume` have
    it.

    A step waits for the next one's slot and reads it before it releases its own.
    """
    producer: Partition = []
    consumer: Partition = [Wait("q_full0", 0), Use("q0", 0)] if steps else []
    num_produced = steps if producer_steps is None else producer_steps
    for step in range(num_produced):
        slot, phase = ring(step, SLOTS)
        producer += [
            Wait(f"empty{slot}", phase ^ 1),
            Arrive(f"asked_q{step}"),
            Arrive(f"q_full{slot}"),
        ]
    for step in range(steps):
        slot, _ = ring(step, SLOTS)
        following = min(step + 1, steps - 1)
        next_slot, next_phase = ring(following, SLOTS)
        scores, own = Use(f"q{next_slot}", following), Use(f"q{slot}", step)
        consumer += [
            own,
            Wait(f"q_full{next_slot}", next_phase),
            scores,
            own,
            Arrive(f"empty{slot}"),
            scores,
        ]
    return [producer, copies("q", num_produced, SLOTS), consumer, [*consumer]]


def gradients(steps: int, way: int, tiles: int | None = None) -> list[Partition]:
    """The way of dS and dQ through shared memory, as `_step`, `_consume` and `_send` have it.

    What matmuls and the copy engine read they may read until they are waited for: such reads are
    there twice. Consumers meet where both arrive and then wait.
    """
    tiles = tiles or (3 if way == LATE else 2)
    programs: list[Partition] = []
    for own in (0, 1):
        part = f"dQ{own}"
        copied: Partition = []

        def read(step: int) -> Partition:
            return [
                Use(f"dS{half}{step % tiles}", step if step >= 0 else ANYTHING) for half in (0, 1)
            ]

        def hand_over(step: int) -> Partition:
            return [Await(f"sent{own}"), Write(part, step), Signal(f"written{own}")]  # noqa: B023

        consumer: Partition = [Signal(f"ready{own}1")] if way == LATE else []
        for step in range(steps):
            write = Write(f"dS{own}{step % tiles}", step)
            if way == LATE:
                consumer += [
                    Await(f"ready{1 - own}{(step + 1) & 1}"),
                    write,
                    Signal(f"ready{own}{step & 1}"),
                ]
                consumer += [*read(step - 1), *read(step - 1), *hand_over(step - 1)]
            else:
                consumer += [
                    write,
                    *copied,
                    Arrive("dS"),
                    Wait("dS", step & 1),
                    *read(step),
                    *read(step),
                ]
                if way == ALONE:
                    copied = [Use(part, step)]
                    consumer += [Write(part, step), *copied]
                else:
                    consumer += hand_over(step)
        if way == LATE:
            consumer += [
                Await(f"ready{1 - own}{(steps - 1) & 1}"),
                *read(steps - 1),
                *read(steps - 1),
            ]
            consumer += hand_over(steps - 1)
        sender: Partition = []
        if way != ALONE:
            consumer.append(Await(f"sent{own}"))
            sender += [
                Signal(f"sent{own}"),
                *([Await(f"written{own}"), Signal(f"sent{own}")] if way == LATE else []),
            ]
            for step in range(steps):
                sender += [
                    Await(f"written{own}"),
                    Use(part, step),
                    Use(part, step),
                    Signal(f"sent{own}"),
                ]
        programs += [[*consumer, Arrive("read"), Wait("read", 0)], sender]
    return programs


@pytest.mark.parametrize("steps", range(8))
def test_no_interleaving_hangs_or_reads_the_wrong_tile(steps):
    explore(slots(steps), ASKED)


@pytest.mark.parametrize("way", [ALONE, BY_SENDERS, LATE], ids=["alone", "by senders", "late"])
@pytest.mark.parametrize("steps", range(1, 7))
def test_no_interleaving_sends_the_wrong_gradients(steps, way):
    explore(gradients(steps, way), ASKED)


def early(partition: Partition, operation: Operation, before: Operation) -> Partition:
    """`partition` with its first `operation` before another."""
    rest = list(partition)
    rest.remove(operation)
    place = rest.index(before)
    return [*rest[:place], operation, *rest[place:]]


def overwritten(way: int) -> list[Partition]:
    first, *others = gradients(4, way)
    return [[op for op in first if op != Await("sent0")], *others]


@pytest.mark.parametrize(
    "partitions, complaint",
    [
        pytest.param(slots(4, producer_steps=3), "hangs", id="a producer that stops early"),
        pytest.param([*slots(5)[:3], early(slots(5)[3], Arrive("empty0"), Use("q0", 0))], "found|hangs",
                     id="a slot that is released too early"),
        pytest.param(overwritten(BY_SENDERS), "found|twice", id="a part that is overwritten before it is sent"),
        pytest.param(overwritten(LATE), "found|twice", id="a late part that is overwritten before it is sent"),
        pytest.param(gradients(4, LATE, tiles=2), "found", id="two tiles where late gradients need three"),
    ],
)  # fmt: skip
def test_the_search_finds_mistakes(partitions, complaint):
    with pytest.raises(AssertionError, match=complaint):
        explore(partitions, ASKED)


class Sent(NamedTuple):
    """What a sender does with a step's part of dQ."""

    counter: int  # number of the one whose turn it waits for, and passes
    turn: int
    row: int  # of dQ's accumulator
    is_stored: bool  # in place of what lies there; else added


class Senders:
    """`_send` as Python, for the launch of an ordered backward of these heads, of one of the two
    consumers.
    """

    def __init__(
        self,
        queries: int,
        keys: int,
        is_causal: bool,
        *,
        head_dim: int = 64,
        heads: int = 1,
        group: int = 1,
    ) -> None:
        with pytest.MonkeyPatch.context() as patch:
            launched = record_launches(patch, backward, light)
            q, k = (torch.empty(1, n * heads, rows, head_dim, dtype=torch.bfloat16, device="meta")
                    for n, rows in ((group, queries), (1, keys)))  # fmt: skip
            lse = torch.empty(q.shape[:3], device="meta")
            backward.hopper_backward(
                Saved(q, k, k, q, lse, q, None), deterministic=True, is_causal=is_causal, scale=1.0
            )
        (self.num_programs,), tensors, numbers, options = launched["backward"]
        self.problem, self.plan = walk.Problem(*numbers), options["PLAN"]
        self.counters = tensors[-1].numel()
        self.tiles_of_head = self.num_programs // heads
        self.head_rows = -(-queries // KEY_TILE) * KEY_TILE
        self.rows = heads * group * self.head_rows
        _, _, (*_, self.second_rows), _ = launched["backward_convert"]

    def steps(self, program: int, consumer: int = 0) -> list[Sent]:
        found: list[Sent] = []
        turn: list[tuple[int, int]] = []

        def note(is_stored: bool, place: list[Any]) -> None:
            sent_rows = self.plan.head_tile // backward.SENT_COLUMNS
            row = (place[2] - consumer * backward.SENT_ROWS) // sent_rows
            found.append(Sent(*turn[-1], plain(row), is_stored))

        with pytest.MonkeyPatch.context() as patch:
            padding = walk.query_padding(self.plan.query_block)
            patch.setattr(walk, "query_padding", lambda query_block: padding)
            for name, value in [*vars(walk).items(), *vars(backward).items()]:
                is_function = name in vars(walk) and isinstance(value, JITFunction)
                own = value.fn if is_function else getattr(value, "value", value)
                for module in (walk, backward):
                    if own is not value and name in vars(module):
                        patch.setattr(module, name, own)
            numbers = {
                "program_id": lambda axis: program,
                "num_programs": lambda axis: self.num_programs,
            }
            patch.setattr(walk, "gl", SimpleNamespace(**numbers))
            for name in ("wait_at", "arrive_at", "_await_preprocess", "as_block"):
                patch.setattr(backward, name, lambda *_: None)
            patch.setattr(backward, "wait_for_turn", lambda *own: turn.append(plain(own)))
            patch.setattr(backward, "pass_turn", lambda counter: None)
            patch.setattr(backward, "tma_add", lambda desc, place, tile: note(False, place))
            copy = SimpleNamespace(
                async_copy_shared_to_global=lambda desc, place, tile: note(True, place),
                store_wait=lambda count: None,
            )
            patch.setattr(backward, "tma", copy)
            shared = SimpleNamespace(dQ_tiles=SimpleNamespace(index=lambda number: None))
            backward._send.fn(shared, self.problem, None, None, 0, consumer, self.plan)
        return found

    def additions(self, program: int) -> list[Addition]:
        return [(sent.counter, sent.turn) for sent in self.steps(program)]


class SendersOfOneSum(Senders):
    """A known-wrong order: one sum for both laps, and programs from the first tile on, which wait
    for later ones.
    """

    def additions(self, program: int) -> list[Addition]:
        head, tile = divmod(program, self.tiles_of_head)
        blocks, together = self.head_rows // KEY_TILE, min(self.head_rows // KEY_TILE, 132)
        first = tile - tile % together
        width, result = min(together, self.tiles_of_head - first), []
        for step in range(blocks):
            block = (tile + step) % blocks
            last = min((block - first) % blocks, width - 1)
            own = tile % together
            result.append((head * blocks + block, first + last - own + width * (own > last)))
        return result


ORDERED_LENGTHS = (1, 128, 129, 500, 900, 1500)


@EACH_MASK
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_turns_are_of_programs_that_have_started(head_dim, group, is_causal):
    """Each sum has all its turns, the first of which stores, and programs wait for lower ones
    alone.

    Without a mask they waited for higher ones, with no more programs than the GPU has
    multiprocessors; and where other work held one of these, for ever.
    """
    for queries, keys in itertools.product(ORDERED_LENGTHS, repeat=2):
        call = Senders(queries, keys, is_causal, head_dim=head_dim, heads=2, group=group)
        sums: dict[int, dict[int, tuple[int, Sent]]] = {}
        rows: dict[int, set[int]] = {}
        visits = Counter()
        for program in range(call.num_programs):
            for consumer in (0, 1):
                for sent in call.steps(program, consumer):
                    assert sent.turn not in sums.setdefault(sent.counter, {})
                    sums[sent.counter][sent.turn] = program, sent
                    rows.setdefault(sent.counter, set()).add(sent.row)
                    visits[program, consumer, sent.row % call.rows] += 1
        assert all(0 <= counter < call.counters and len(rows[counter]) == 1 for counter in sums)
        assert set(visits.values()) == {1}
        for turns in sums.values():
            assert sorted(turns) == list(range(len(turns)))
            in_order = [turns[turn] for turn in range(len(turns))]
            assert [program for program, _ in in_order] == sorted(
                program for program, _ in in_order
            )
            assert [sent.is_stored for _, sent in in_order] == [True] + [False] * (
                len(in_order) - 1
            )
        own_rows, laps = range(0, call.rows, call.plan.query_tile), 1 if is_causal else 2
        second = [
            call.rows + row for row in own_rows if row % call.head_rows < (call.second_rows or 0)
        ]
        assert {row for found in rows.values() for row in found} == {*own_rows, *second}
        assert (call.second_rows is None) == (laps == 1)


@EACH_MASK
@given(
    queries=st.sampled_from(ORDERED_LENGTHS), keys=st.sampled_from((*ORDERED_LENGTHS, 2900)),
    heads=st.integers(1, 3), places=st.integers(1, 40), seed=st.integers(0, 9),
)  # fmt: skip
def test_additions_in_order_end_however_few_multiprocessors_are_free(
    is_causal, queries, keys, heads, places, seed
):
    """And come in one order at any pace."""
    call = Senders(queries, keys, is_causal, heads=heads)
    steps = [call.additions(program) for program in range(call.num_programs)]
    rng = random.Random(seed)
    _, order = run_in_turns(
        steps.__getitem__, len(steps), places, lambda: rng.choice((0.1, 1.0, 7.0))
    )
    assert order == run_in_turns(steps.__getitem__, len(steps), len(steps))[1]
    assert sum(map(len, order.values())) == sum(map(len, steps))


def test_the_model_finds_an_order_that_needs_a_free_multiprocessor_for_each_tile():
    """A head of 64 tiles on 64 multiprocessors and on 63, on which the GPU hung."""
    wrong, right = SendersOfOneSum(8192, 8192, False), Senders(8192, 8192, False)
    run_in_turns(wrong.additions, 64, 64)
    with pytest.raises(AssertionError, match="hangs with 63 programs on 63 multiprocessors"):
        run_in_turns(wrong.additions, 64, 63)
    run_in_turns(right.additions, 64, 63)


@pytest.mark.parametrize(
    ("heads", "queries", "keys"),
    [
        (1, 2048, 2048),
        (4, 2048, 2048),
        (1, 8192, 8192),
        (3, 8192, 8192),
        (16, 4096, 4096),
        (2, 1024, 4096),
    ],
)
def test_turns_cost_no_more_than_where_programs_wait_for_later_ones(heads, queries, keys):
    """The time of all programs on 132 multiprocessors, in steps, where a sum is handed over in half
    of one.
    """
    wrong, right = (kind(queries, keys, False, heads=heads) for kind in (SendersOfOneSum, Senders))
    time, _ = run_in_turns(right.additions, right.num_programs, 132)
    assert time <= run_in_turns(wrong.additions, wrong.num_programs, 132)[0]


@EACH_MASK
def test_programs_that_start_together_come_to_their_turns_in_step(is_causal):
    """At the same pace no program waits for its turn: each ends as if it were alone."""
    call = Senders(2048, 2048, is_causal)
    steps = [call.additions(program) for program in range(16)]
    time, _ = run_in_turns(steps.__getitem__, 16, 16)
    assert time == max(map(len, steps)) + 0.5


# The launcher: what it hands to the main kernel. The light ones are interpreted.


def record_launches(monkeypatch, *modules) -> dict[str, tuple]:
    """The launches of these modules from now on: name -> (grid, tensors, numbers, options).

    What adds to dQ's accumulator adds 2, or stores it where additions have an order. One
    multiprocessor, on which no walk is divided.
    """
    calls: dict[str, tuple] = {}
    monkeypatch.setattr(backward, "num_multiprocessors", lambda device: 1)

    def launch(kernel, *call):
        name = kernel.fn.__name__.removeprefix("hopper_").removesuffix("_kernel")
        assert name not in calls
        calls[name] = call
        if name in ("backward", "packed_backward"):
            sums = call[1][4].base
            sums.fill_(2) if call[3]["PLAN"].ordered else sums.add_(2)

    for module in modules:
        monkeypatch.setattr(module, "launch", launch)
    return calls


@pytest.fixture
def launched(monkeypatch):
    return record_launches(monkeypatch, backward, wide)


def low(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def assert_rows(rows: Tensor, lse: Tensor, output: Tensor, do: Tensor, dl: Tensor) -> None:
    """`rows` (heads, 2, rows) are of L (heads, queries) in base 2, +inf past its end, and of delta
    less dL.
    """
    queries = lse.shape[-1]
    torch.testing.assert_close(rows[:, 0, :queries], lse * 1.4426950408889634)
    torch.testing.assert_close(rows[:, 1, :queries], (output.float() * do.float()).sum(-1) - dl)
    assert (rows[:, 0, queries:] == math.inf).all() and not rows[:, 1, queries:].any()


@pytest.mark.parametrize("ordered", [False, True], ids=["", "ordered"])
@pytest.mark.parametrize("head_dim", [59, 64, 96, 128])
@pytest.mark.parametrize(
    ("queries", "keys", "is_whole"), [(300, 200, False), (300, 300, True), (128, 384, True)]
)
def test_the_launcher_hands_over_the_call(launched, head_dim, queries, keys, is_whole, ordered):
    """Of any strides: what TMA cannot read is copied."""
    q, k, lse = low(2, 6, queries, head_dim), low(2, 3, keys, head_dim), torch.randn(2, 6, queries)
    output, grads = low(2, queries, 6, head_dim).transpose(1, 2), []
    do, dl = (
        low(2, 1, queries, head_dim).expand(q.shape),
        torch.randn(2, 1, queries).expand(lse.shape),
    )
    samples = time_stages(
        lambda: grads.extend(
            backward.hopper_backward(
                Saved(q, k, k, output, lse, do, dl), deterministic=ordered, is_causal=True, scale=0.5
            )
        ),
        device="cpu", num_samples=1, warmup=0,
    )  # fmt: skip
    assert list(samples) == ["preprocess", "dkv", "dq", TOTAL] and set(samples) - {TOTAL} < set(
        STAGES
    )
    for grad, x in zip(grads, (q, k, k), strict=True):
        assert grad.shape == x.shape and grad.dtype == x.dtype and grad.is_contiguous()

    width, padded = 64 if head_dim <= 64 else 128, -(-head_dim // 8) * 8
    query_tile, num_rows = backward.QUERY_TILES[width], -(-queries // 128) * 128
    key_tiles = -(-min(keys, queries) // 128)
    assert not any(grad[:, :, key_tiles * 128 :].any() for grad in grads[1:])
    grid, tensors, numbers, options = launched["backward"]
    assert grid == (key_tiles * 6,)
    *inputs, dq_tiles, dk_tiles, dv_tiles, rows, turns = tensors
    assert [x.block_shape for x in inputs] == [
        [1, 1, n, width] for n in (query_tile, 128, 128, query_tile)
    ]
    for tiles, x in zip(inputs, (q, k, k, do), strict=True):
        assert torch.equal(tiles.base[..., :head_dim], x) and tiles.shape == [*x.shape[:3], padded]
    assert dq_tiles.block_shape == [1, 1, 128, 32] and dq_tiles.shape == [
        1,
        1,
        12 * num_rows * width // 32,
        32,
    ]
    assert (grads[0] == 1).all(), "a zero, what was added, and the scale"
    for tiles, grad in zip((dk_tiles, dv_tiles), grads[1:]):
        assert tiles.block_shape == [1, 1, 64, width] and tiles.shape == [1, 6, keys, padded]
        assert (tiles.base.data_ptr() == grad.data_ptr()) == (padded == head_dim)
    assert rows.shape == (12, 2, num_rows)
    assert_rows(rows, *(x.flatten(0, 1) for x in (lse, output, do, dl)))
    kv_heads, together, _, num_queries, num_keys, scale_log2 = numbers
    assert (kv_heads, num_queries, num_keys) == (3, queries, keys) and 1 <= together <= 6
    assert scale_log2 == pytest.approx(0.5 * 1.4426950408889634)
    plan = options.pop("PLAN")
    assert plan[:6] == (width, 96 if head_dim == 96 else width, query_tile, 2, True, is_whole)
    assert plan.dq_way == (LATE if width == 64 or ordered else ALONE)
    assert (
        plan.ordered == ordered
        and not plan.packed
        and options == {"num_warps": 4, "launch_pdl": False}
    )
    if ordered:  # a counter for each consumer's part of each tile of dQ
        assert turns.dtype == torch.int32 and not turns.any()
        assert turns.numel() == 12 * num_rows * width // (64 * 64) * (128 // width)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_heads_take_turns_where_tiles_differ_in_length(launched, head_dim):
    """Twelve heads, of 384 rows each in dQ's accumulator; behind these are the rows of second laps,
    where there are.
    """
    q, mask = low(2, 6, 300, head_dim), BlockMask.sliding_window(300, window=9, block_size=128)

    def turns(
        is_causal: bool, ordered: bool = False, lists: TileLists | None = None
    ) -> tuple[int, int]:
        launched.clear()
        backward.hopper_backward(
            Saved(q, q, q, q, torch.randn(2, 6, 300), q, None),
            deterministic=ordered,
            is_causal=is_causal,
            scale=0.5,
            lists=lists,
        )
        (numbers,) = (call[2] for name, call in launched.items() if not name.endswith("_dq"))
        return tuple(numbers[1 : 3 if head_dim == 64 else 2])

    if head_dim == 256:
        assert (turns(True), turns(False)) == ((12,), (1,))
    else:
        rows = 12 * 384
        assert turns(False) == turns(False, ordered=True) == (1, rows)
        assert (
            turns(True) == turns(True, ordered=True) == turns(False, lists=mask.lists) == (12, rows)
        )


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("rows", [128, 256, 4096])
def test_a_masks_last_tile_has_rows_of_its_own_head(launched, rows, head_dim):
    """A walk along lists goes to the end of the mask's tile: past the padding it added to the next
    head's dQ.
    """
    q, mask = (
        low(2, 3, 300, head_dim),
        BlockMask.sliding_window(300, window=9, block_size=(rows, 128)),
    )
    backward.hopper_backward(
        Saved(q, q, q, q, torch.randn(2, 3, 300), q, None),
        deterministic=False,
        is_causal=False,
        scale=0.5,
        lists=mask.lists,
    )
    _, tensors, _, options = launched["listed_backward"]
    plan, scratch = (
        options["PLAN"],
        next(x for x in tensors if isinstance(x, Tensor) and x.ndim == 3),
    )
    padding = walk.query_padding(plan.query_block)
    kernels = plain(walk.query_tiles.fn(300, plan.query_tile, padding)) * plan.query_tile
    assert (
        kernels == scratch.shape[2]
        and -(-300 // rows) * rows <= kernels
        and kernels % KEY_TILE == 0
    )


def test_strides_of_any_size_fit_32_bits():
    """Counted in chunks of eight elements; a dimension of one element has whatever stride, and is
    not counted.
    """
    far = 2**31 + 64
    x = torch.empty_strided(
        (2, 1, 512, 64), (far, far * 64 * 8, 192, 1), dtype=torch.bfloat16, device="meta"
    )
    assert light._in_chunks(x) == (far // 8, 0, 24)


def test_every_list_of_a_mask_has_its_key_tile():
    """A mask of one batch entry or head serves all; a head of a group walks its own."""
    batches, kv_heads, group, num_keys, columns = 2, 3, 2, 700, 256
    for mask_batches, mask_heads in itertools.product((1, batches), (1, kv_heads * group)):
        numbers = torch.arange(mask_batches * mask_heads * 3).view(mask_batches, mask_heads, 3)
        numbers = numbers.expand(batches, kv_heads * group, 3).tolist()
        for batch, kv_head, member, tile in itertools.product(
            *map(range, (batches, kv_heads, group, 6))
        ):
            number = walk.list_of_keys.fn(
                tile, batch * kv_heads + kv_head, member, num_keys, kv_heads, mask_batches, mask_heads, group, columns
            )  # fmt: skip
            assert (
                plain(number)
                == numbers[batch][kv_head * group + member][tile * KEY_TILE // columns]
            )


@pytest.mark.parametrize("query_tile", backward.QUERY_TILES.values())
@pytest.mark.parametrize("block_size", [(128, 128), (256, 64), (128, 512)])
def test_bits_are_turned_to_keys(block_size, query_tile):
    """(tiles of queries, keys, words of their queries) from (queries, words of their keys), in the
    interpreter.
    """
    tokens = torch.rand(3, *block_size, generator=torch.Generator().manual_seed(0)) < 0.5
    turned = light.transposed_words(pack_tokens(tokens), query_tile)
    parts, keys = block_size[0] // query_tile, block_size[1]
    expected = pack_tokens(tokens.view(3 * parts, query_tile, keys).transpose(1, 2).contiguous())
    assert torch.equal(turned.view(3 * parts, keys, query_tile // 32), expected)


@pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) >= HOPPER_TRITON[1],
    reason="newer interpreters refuse one mask for a block, and hopper does not run there",
)
@pytest.mark.parametrize("second_rows", [0, 128, 256])
def test_sums_of_both_laps_make_one_gradient(second_rows):
    """`convert` reads of second laps the rows that have sums, and not the others, which nothing has
    written.
    """
    heads, queries, rows = 3, 300, 384
    sums = torch.randn(2, heads, rows, 64, generator=torch.Generator().manual_seed(0))
    results = [torch.empty(1, heads, queries, 40, dtype=torch.float16) for _ in range(2)]
    written = torch.arange(rows)[:, None] < second_rows
    light.convert(sums[0] + torch.where(written, sums[1], 0.0), results[0], rows, 0.5)
    sums[1] = torch.where(written, sums[1], torch.nan)
    light.convert(sums, results[1], rows, 0.5, second_rows=second_rows)
    assert torch.equal(*results)


def test_gradients_of_documents_come_from_their_slots_rows():
    """`convert` of packed documents is `convert` of each, whose rows of the accumulator start where
    its slot does.
    """
    ends, heads, width = [0, 70, 70, 198, 391], 2, 40
    slots = 400 // 128 + len(ends)
    sums = torch.randn(heads, slots * 128, 64, generator=torch.Generator().manual_seed(0))
    result = torch.full((400, heads, width), math.nan, dtype=torch.float16)
    cu_seqlens = torch.tensor(ends, dtype=torch.int32)
    light.convert(sums, result, slots * 128, 0.5, cu_seqlens)
    for document, (start, end) in enumerate(itertools.pairwise([*ends, 400])):
        if start == end:
            continue
        first = (start // 128 + document) * 128
        own = sums[:, first : first + -(-(end - start) // 128) * 128].contiguous()
        alone = torch.empty(1, heads, end - start, width, dtype=torch.float16)
        light.convert(own, alone, own.shape[1], 0.5)
        assert torch.equal(result[start:end], alone[0].transpose(0, 1)), document


def test_the_launcher_of_documents_hands_over_their_slots(launched):
    q, k, cu_seqlens = (
        low(300, 4, 64),
        low(300, 2, 64),
        torch.tensor([0, 100, 300], dtype=torch.int32),
    )
    lse = torch.randn(4, 300)
    grads = backward.hopper_packed_backward(
        Saved(q, k, k, q, lse, q, None),
        Documents(cu_seqlens, cu_seqlens, 200, 200),
        is_causal=True,
        scale=0.5,
    )
    assert [x.shape for x in grads] == [x.shape for x in (q, k, k)] and (grads[0] == 1).all()
    grid, tensors, numbers, options = launched["packed_backward"]
    assert grid == ((300 // 128 + 3) * 2,) and tensors[-2] is tensors[-1] is cu_seqlens
    assert numbers[:1] + numbers[2:5] + numbers[6:] == (2, 4 * 5 * 128, 300, 300, 2)
    assert options["PLAN"].packed and options["PLAN"].whole_key_tiles
    assert tensors[-3].shape == (4, 2, 5 * 128)
    assert_rows(tensors[-3][..., :300], lse, *[q.transpose(0, 1)] * 2, torch.zeros(4, 300))


def test_a_row_without_keys_has_no_delta():
    """Its P is 0, and 0 times the NaN that `logaddexp` of two such rows gives L would be a NaN in
    dK and dQ.
    """
    output, grad_output = (
        torch.ones(1, 2, 20, 64, dtype=torch.float16),
        torch.ones(1, 2, 20, 64, dtype=torch.float16),
    )
    lse, grad_lse, rows = torch.zeros(1, 2, 20), torch.ones(1, 2, 20), torch.empty(2, 2, 64)
    lse[0, 1, 3], grad_lse[0, 1, 3] = -math.inf, math.nan
    light.preprocess(output, lse, grad_output, grad_lse, rows, None, None)
    expected = torch.full((2, 20), 63.0)
    expected[1, 3] = 0
    assert torch.equal(rows[:, 1, :20], expected)


# Heads above 128 columns: one kernel for dK and dV, in which tiles of keys meet the queries that
# see them, one for dQ

WIDE_TILE = wide.ROWS.value  # rows of a tile of keys, and of one of queries
SINGLE = {"asked": 1, "p_": 1}  # barriers on which one partition arrives


@each_problem
def test_wide_tiles_add_up_to_the_gradients(queries, keys, is_causal, group, together, head_dim):
    """A key that does not exist has a P of inf in its own row, which is not written."""
    problem = wide.KeyProblem(2, together, queries, keys, 1.0)
    num_programs = 4 * -(-(min(queries, keys) if is_causal else keys) // WIDE_TILE)

    def steps_of(program: int) -> Program:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(walk, "tile_of_program", walk.tile_of_program.fn)
            tile = plain(wide.key_tile_of.fn(program, num_programs, problem, is_causal))
        number, head, query_tiles, first_tile, num_steps = tile
        steps = []
        for member, step in itertools.product(range(group), range(num_steps)):
            start = plain(
                walk.query_of_step.fn(step, first_tile, query_tiles, WIDE_TILE, is_causal)
            )
            mask = torch.ones(WIDE_TILE, WIDE_TILE, dtype=torch.bool)
            steps.append(
                (head * group + member, start, mask.triu() if is_causal and step == 0 else mask)
            )
        return head, number * WIDE_TILE, steps

    assert_gradients(
        map(steps_of, range(num_programs)),
        queries,
        keys,
        group,
        is_causal,
        WIDE_TILE,
        sums_dq=False,
    )


# Copies of K and V, or of Q and dO, may end in any order.


def of_keys(steps: int) -> list[Partition]:
    """`_copy_queries`, the copies, `_sum_dv` and `_sum_dk`; what matmuls read is there when they
    start and end.
    """
    producer: Partition = []
    for step in range(steps):
        slot, phase = ring(step)
        producer += [
            Wait(f"q_empty{slot}", phase ^ 1),
            Arrive(f"asked_q{step}"),
            Write(f"rows{slot}", step),
        ]
        producer += [
            Arrive(f"q_full{slot}"),
            Wait(f"do_empty{slot}", phase ^ 1),
            Arrive(f"asked_do{step}"),
        ]
        producer += [Arrive(f"do_full{slot}")]
    of_dv: Partition = [Wait("q_full0", 0), Use("q0", 0)]
    of_dk: Partition = [Wait("do_full0", 0), Use("do0", 0)]
    for step in range(steps):
        slot, phase = ring(step)
        following = min(step + 1, steps - 1)
        next_slot, next_phase = ring(following)
        scores, dP = Use(f"q{next_slot}", following), Use(f"do{next_slot}", following)
        do, q = Use(f"do{slot}", step), Use(f"q{slot}", step)
        of_dv += [
            Use(f"rows{slot}", step),
            Arrive(f"q_empty{slot}"),
            Wait(f"p_empty{slot}", phase ^ 1),
        ]
        of_dv += [
            Write(f"P{slot}", step),
            Arrive(f"p_full{slot}"),
            Wait(f"do_full{slot}", phase),
            do,
        ]
        of_dv += [
            Wait(f"q_full{next_slot}", next_phase),
            scores,
            do,
            Arrive(f"do_empty{slot}"),
            scores,
        ]
        of_dk += [Arrive(f"do_empty{slot}"), Use(f"rows{slot}", step), Wait(f"p_full{slot}", phase)]
        of_dk += [Use(f"P{slot}", step), Arrive(f"p_empty{slot}"), q]
        of_dk += [Wait(f"do_full{next_slot}", next_phase), dP, q, Arrive(f"q_empty{slot}"), dP]
    return [producer, copies("q", steps), copies("do", steps), of_dv, of_dk]


def of_queries(steps: int, skips: int) -> list[Partition]:
    """`_copy_keys`, the copies and two `_sum_dq`, of which the first `skips` do not see the first
    keys.
    """
    producer: Partition = []
    for step in range(steps):
        slot, phase = ring(step)
        producer += [
            Wait(f"k_empty{slot}", phase ^ 1),
            Arrive(f"asked_k{step}"),
            Arrive(f"k_full{slot}"),
        ]
        producer += [Wait("v_empty0", step & 1 ^ 1), Arrive(f"asked_v{step}"), Arrive("v_full0")]
    consumers: list[Partition] = [[], []]
    for number, consumer in enumerate(consumers):
        first = int(number < skips)
        if first:
            consumer += [
                Wait("k_full0", 0),
                Arrive("k_empty0"),
                Wait("v_full0", 0),
                Arrive("v_empty0"),
            ]
        consumer += [Wait(f"k_full{first}", 0), Use(f"k{first}", first)]
        for step in range(first, steps):
            slot, _ = ring(step)
            following = min(step + 1, steps - 1)
            next_slot, next_phase = ring(following)
            scores, k, v = Use(f"k{next_slot}", following), Use(f"k{slot}", step), Use("v0", step)
            consumer += [Wait("v_full0", step & 1), v, v, Arrive("v_empty0"), k]
            consumer += [
                Wait(f"k_full{next_slot}", next_phase),
                scores,
                k,
                Arrive(f"k_empty{slot}"),
                scores,
            ]
    return [producer, copies("k", steps), copies("v", steps, 1), *consumers]


@pytest.mark.parametrize("steps", range(1, 6))
def test_no_interleaving_of_dk_and_dv_hangs_or_reads_the_wrong_tile(steps):
    explore(of_keys(steps), SINGLE)


@pytest.mark.parametrize("skips", range(3))
@pytest.mark.parametrize("steps", range(2, 6))
def test_no_interleaving_of_dq_hangs_or_reads_the_wrong_tile(steps, skips):
    explore(of_queries(steps, skips), SINGLE)


def test_the_search_finds_queries_that_are_released_before_the_probabilities_are_read():
    *others, of_dk = of_keys(4)
    with pytest.raises(AssertionError, match="found"):
        explore([*others, early(of_dk, Arrive("q_empty0"), Use("P0", 0))], SINGLE)


def test_the_search_finds_a_consumer_that_skips_keys_without_waiting_for_them():
    """Its next wait for the slot would end with the first copy."""
    programs = of_queries(4, 1)
    programs[3].remove(Wait("v_full0", 0))
    programs[3].remove(Wait("k_full0", 0))
    with pytest.raises(AssertionError, match="found|hangs"):
        explore(programs, SINGLE)


@pytest.mark.parametrize("head_dim", [129, 192, 256])
@pytest.mark.parametrize(("queries", "keys"), [(300, 200), (128, 384), (70, 500)])
@EACH_MASK
def test_the_wide_launcher_hands_over_the_call(launched, head_dim, queries, keys, is_causal):
    q, k = low(2, 6, queries, head_dim), low(2, 3, keys, head_dim)
    lse = torch.randn(2, 6, queries)
    grads = backward.hopper_backward(Saved(q, k, k, q, lse, q), is_causal=is_causal, scale=0.5)
    for grad, x in zip(grads, (q, k, k), strict=True):
        assert grad.shape == x.shape and grad.dtype == x.dtype and grad.is_contiguous()
    assert list(launched) == ["wide_dkdv", "wide_dq"]
    num_rows, key_tiles = (
        -(-queries // 64) * 64,
        -(-(min(keys, queries) if is_causal else keys) // 64),
    )
    grid, tensors, numbers, options = launched["wide_dkdv"]
    rows = tensors[-1]
    assert grid == (key_tiles * 6,) and rows.shape == (12, 2, num_rows)
    assert_rows(rows, *(x.flatten(0, 1) for x in (lse, q, q)), torch.zeros(12, queries))
    assert [x.block_shape for x in tensors[:-1]] == [[1, 1, 64, 256]] * 6
    padded = -(-head_dim // 8) * 8
    assert [x.shape for x in tensors[4:6]] == [[1, 6, keys, padded]] * 2
    assert numbers[0] == 3 and 1 <= numbers[1] <= 6 and numbers[2:4] == (queries, keys)
    assert options == {"D_TILE": 256, "GROUP": 2, "IS_CAUSAL": is_causal, "num_warps": 4}
    for grad in grads[1:]:
        assert not grad[:, :, key_tiles * 64 :].any()

    grid, tensors, numbers, options = launched["wide_dq"]
    assert grid == (-(-queries // 128) * 12,) and tensors[4].shape == [2, 6, queries, padded]
    assert numbers[:5] == (queries, keys, 6, 2, 12) and numbers[6] == num_rows
    assert numbers[7] == pytest.approx(0.5 * 1.4426950408889634)
    large = SCHEDULES[256][0]
    assert options["PLAN"][:6] == (256, 256, 2, 64, large.slots, large.registers)
    assert options["PLAN"].masked_tiles == (2 if is_causal else 1)
