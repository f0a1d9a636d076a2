"""The Hopper backward as far as a CPU can judge it: which tiles are visited and masked, and whether barriers can hang.

The kernel's own integer functions run here as Python; around them stands a model of what a program does with each tile
and of the order in which its partitions wait. The kernel itself is checked on a GPU, in `test_hopper.py`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from cs336_systems.attention.masks.tiles import pack_tokens
from cs336_systems.attention.reference import attention_reference
from cs336_systems.measure.stages import STAGES, TOTAL, time_stages
from tests.hopper_protocol import ANYTHING, Arrive, Await, Meet, Operation, Partition, Signal, Use, Wait, Write, explore

backward = pytest.importorskip("cs336_systems.attention.hopper.backward", reason="this triton has no Gluon for Hopper")
light = pytest.importorskip("cs336_systems.attention.hopper.light")
walk = pytest.importorskip("cs336_systems.attention.hopper.backward_walk")

QUERY_TILES = tuple(backward.QUERY_TILES.values())
KEY_TILE, SLOTS = backward.KEY_TILE.value, backward.SLOTS.value
LENGTHS = (*range(1, 301, 13), 63, 64, 65, 127, 128, 129, 192, 193, 255, 256, 257, 300, 640)


def plain(result: Any) -> Any:
    """What a kernel's function returned, without Triton's wrapper around constants."""
    if isinstance(result, tuple):
        return tuple(plain(x) for x in result)
    return getattr(result, "value", result)


@dataclass(frozen=True, kw_only=True)
class Problem:
    batch: int = 1
    kv_heads: int = 1
    group: int = 1
    queries: int
    keys: int
    is_causal: bool
    query_tile: int
    heads_together: int = 3

    @property
    def key_tiles(self) -> int:
        return plain(walk.key_tiles.fn(self.queries, self.keys, self.is_causal))

    @property
    def whole(self) -> bool:
        """No query sees keys that do not exist: only the steps that the diagonal cuts are masked. As in the launcher,
        which `test_the_launcher_knows_where_keys_are_missing` compares."""
        return self.key_tiles * KEY_TILE <= self.keys or (self.is_causal and self.queries <= self.keys)

    @property
    def programs(self) -> int:
        return self.key_tiles * self.batch * self.kv_heads

    @property
    def tiles(self) -> int:
        return plain(walk.query_tiles.fn(self.queries, self.query_tile))

    @property
    def masked_steps(self) -> int:
        """The steps of the masked loop, which a causal program runs without asking whether it has as many."""
        return KEY_TILE // self.query_tile if self.is_causal else 0

    def place(self, program: int) -> tuple[int, int]:
        """(key tile, batch and key head) of a program."""
        return plain(
            walk.tile_of_program.fn(program, self.programs, self.key_tiles, min(self.heads_together, self.programs))
        )

    def walk(self, key_tile: int) -> list[int]:
        """The first query of each of a program's steps in one head."""
        first_tile, steps = plain(walk.walk_of_tile.fn(key_tile, self.tiles, self.query_tile, self.is_causal))
        return [
            plain(walk.query_of_step.fn(j, first_tile, self.tiles, self.query_tile, self.is_causal))
            for j in range(steps)
        ]


def problems(**change) -> list[Problem]:
    return [
        Problem(queries=queries, keys=keys, is_causal=is_causal, query_tile=query_tile, **change)
        for query_tile in QUERY_TILES
        for is_causal in (True, False)
        for queries in LENGTHS
        for keys in LENGTHS
    ]


def test_programs_cover_every_key_tile_of_every_head_once():
    for heads_together in (1, 2, 3, 8, 100):
        for kv_heads in (1, 2, 5, 8):
            problem = Problem(
                batch=2, kv_heads=kv_heads, queries=64, keys=700, is_causal=True, query_tile=64,
                heads_together=heads_together,
            )  # fmt: skip
            places = [problem.place(program) for program in range(problem.programs)]
            assert sorted(places) == [
                (tile, head) for tile in range(problem.key_tiles) for head in range(2 * kv_heads)
            ], heads_together


def test_long_causal_programs_start_first():
    """Within the heads that run together work never grows from one program to the next."""
    problem = Problem(kv_heads=6, queries=1024, keys=1024, is_causal=True, query_tile=64)
    work = [len(problem.walk(problem.place(program)[0])) for program in range(problem.programs)]
    together = 3 * problem.key_tiles
    for start in range(0, problem.programs, together):
        assert work[start : start + together] == sorted(work[start : start + together], reverse=True)


def test_key_tiles_are_those_that_a_query_sees():
    for problem in problems():
        last_seen = min(problem.keys, problem.queries) if problem.is_causal else problem.keys
        assert (problem.key_tiles - 1) * KEY_TILE < last_seen <= problem.key_tiles * KEY_TILE, problem
        exist = problem.key_tiles * KEY_TILE <= problem.keys
        assert problem.whole == (exist or (problem.is_causal and last_seen == problem.queries)), problem


def test_every_walk_visits_what_its_keys_are_seen_by():
    """Each query tile at most once, within the padded rows, and each that sees a key of the tile."""
    for problem in problems():
        rows = problem.tiles * problem.query_tile
        assert rows % KEY_TILE == 0 and 0 <= rows - problem.queries < KEY_TILE
        for key_tile in range(problem.key_tiles):
            starts = problem.walk(key_tile)
            assert len(set(starts)) == len(starts), problem
            assert all(start % problem.query_tile == 0 and 0 <= start < rows for start in starts), problem
            first_seen = key_tile * KEY_TILE if problem.is_causal else 0
            needed = {
                start
                for start in range(0, rows, problem.query_tile)
                if start < problem.queries and start + problem.query_tile > first_seen
            }
            assert needed <= set(starts), problem


def test_the_masked_steps_are_those_that_the_diagonal_cuts():
    """A causal program has the steps that it runs without a bound, and the diagonal cuts none of the later ones.

    Nor does one of those have a key that does not exist with a query that does, unless every step is masked.
    """
    for problem in problems():
        for key_tile in range(problem.key_tiles):
            starts = problem.walk(key_tile)
            assert len(starts) >= max(1, problem.masked_steps), problem
            last_key = key_tile * KEY_TILE + KEY_TILE - 1
            if problem.is_causal:
                assert all(start >= last_key for start in starts[problem.masked_steps :]), problem
            if problem.whole and last_key >= problem.keys:
                assert problem.is_causal and problem.queries <= problem.keys, problem
                assert all(start >= problem.queries for start in starts[problem.masked_steps :]), problem


LENGTH_PAIRS = pytest.mark.parametrize(
    "lengths",
    [(1, 1), (1, 300), (300, 1), (63, 65), (64, 128), (127, 129), (128, 128), (129, 127), (130, 640), (256, 300)],
    ids=lambda lengths: "x".join(map(str, lengths)),
)


def exact_gradients(lengths: tuple[int, int], group: int, is_causal: bool):
    """(q, k, v, dO, O, L) of four key heads, and dQ, dK and dV, in float64.

    Scores are near -1e3, where a key that does not exist and scores 0 would have a P of exp(1e3) = inf.
    """
    queries, keys = lengths
    generator = torch.Generator().manual_seed(queries * 1000 + keys)
    q, do, k, v = (
        torch.randn(heads, rows, 8, generator=generator, dtype=torch.float64)
        for heads, rows in [(4 * group, queries)] * 2 + [(4, keys)] * 2
    )
    q[..., 0], k[..., 0] = 100.0, -10.0
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    repeated = [leaves[0], *(x.repeat_interleave(group, dim=0) for x in leaves[1:])]
    output, lse = attention_reference(*repeated, is_causal=is_causal, scale=1.0, return_lse=True)
    return (q, k, v, do, output.detach(), lse.detach()), torch.autograd.grad(output, leaves, do)


def padded(x: torch.Tensor, rows: int, value: float = 0.0) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, 0) * (x.ndim - 2) + (0, rows - x.shape[1]), value=value)


def emulate(problem: Problem, q, k, v, do, output, lse, scale):
    """dQ, dK and dV as the kernel forms them, tile by tile, in float64; rows of dQ keep their padding.

    Reads past the end are zeros, writes past it are dropped, and L past the end is +inf.
    """
    rows = problem.tiles * problem.query_tile
    key_rows = max(problem.key_tiles * KEY_TILE, problem.keys)
    q, do = padded(q, rows), padded(do, rows)
    delta = padded((do[:, : problem.queries] * output).sum(-1), rows)
    lse = padded(lse, rows, math.inf)
    k, v = padded(k, key_rows), padded(v, key_rows)
    dq, dk, dv = torch.zeros_like(q), torch.full_like(k, math.nan), torch.full_like(v, math.nan)
    dk[:, problem.key_tiles * KEY_TILE :] = dv[:, problem.key_tiles * KEY_TILE :] = 0
    whole = problem.whole
    for program in range(problem.programs):
        key_tile, kv_head = problem.place(program)
        keys = slice(key_tile * KEY_TILE, (key_tile + 1) * KEY_TILE)
        key_index = torch.arange(keys.start, keys.stop)
        starts = problem.walk(key_tile)
        sum_k, sum_v = torch.zeros(2, KEY_TILE, q.shape[-1], dtype=torch.float64).unbind()
        for member in range(problem.group):
            head = kv_head * problem.group + member
            for step, start in enumerate(starts):
                queries = slice(start, start + problem.query_tile)
                p = (k[kv_head, keys] @ q[head, queries].T * scale - lse[head, queries]).exp()
                if step < problem.masked_steps:
                    p = torch.where(torch.arange(queries.start, queries.stop) >= key_index[:, None], p, 0.0)
                if not whole:
                    p = torch.where((key_index < problem.keys)[:, None], p, 0.0)
                ds = p * (v[kv_head, keys] @ do[head, queries].T - delta[head, queries])
                sum_v += p @ do[head, queries]
                sum_k += ds @ q[head, queries]
                dq[head, queries] += ds.T @ k[kv_head, keys]
        dk[kv_head, keys], dv[kv_head, keys] = sum_k * scale, sum_v
    return dq * scale, dk[:, : problem.keys], dv[:, : problem.keys]


@pytest.mark.parametrize("query_tile", QUERY_TILES)
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("group", [1, 3])
@LENGTH_PAIRS
def test_the_tiles_add_up_to_the_gradients(query_tile, is_causal, group, lengths):
    queries, keys = lengths
    problem = Problem(
        batch=2, kv_heads=2, group=group, queries=queries, keys=keys, is_causal=is_causal, query_tile=query_tile
    )
    inputs, expected = exact_gradients(lengths, group, is_causal)
    dq, dk, dv = emulate(problem, *inputs, 1.0)
    torch.testing.assert_close(dq[:, :queries], expected[0])
    assert not dq[:, queries:].any()
    torch.testing.assert_close(dk, expected[1])
    torch.testing.assert_close(dv, expected[2])


def test_keys_that_no_query_sees_are_not_read():
    """A NaN among them would be 0 · NaN in dQ: their programs once visited the last queries, and masked them."""
    problem = Problem(queries=130, keys=640, is_causal=True, query_tile=64)
    q, do, output = torch.randn(3, 1, 130, 8, dtype=torch.float64).unbind()
    k, v = torch.randn(2, 1, 640, 8, dtype=torch.float64).unbind()
    k[:, 256:] = v[:, 256:] = math.nan
    dq, dk, dv = emulate(problem, q, k, v, do, output, torch.zeros(1, 130, dtype=torch.float64), 1.0)
    assert dq.isfinite().all() and not dk[:, 256:].any() and not dv[:, 256:].any()


# Barriers: what each partition waits for and signals, in order. Every interleaving is tried.


ALONE, BY_SENDERS, LATE = (way.value for way in (backward.ALONE, backward.BY_SENDERS, backward.LATE))
ASKED = {"asked": 1}  # one partition asks for a copy


def slots(steps: int, producer_steps: int | None = None) -> list[Partition]:
    """The ring of Q and dO in a program of so many steps in all, as `_produce` and `_consume` have it.

    A step waits for the next one's slot and reads it before it releases its own. The copy engine is a partition here:
    it may deliver a tile any time after it was asked.
    """
    producer: Partition = []
    engine: Partition = []
    consumer: Partition = []
    for step in range(steps if producer_steps is None else producer_steps):
        slot, round_ = step % SLOTS, step // SLOTS
        producer += [Wait(f"empty{slot}", (round_ & 1) ^ 1), Arrive(f"asked{step}"), Arrive(f"full{slot}")]
        engine += [Wait(f"asked{step}", 0), Write(f"slot{slot}", step), Arrive(f"full{slot}")]
    for step in range(steps):
        slot, following = step % SLOTS, min(step + 1, steps - 1)
        scores = Use(f"slot{following % SLOTS}", following)
        if step == 0:
            consumer += [Wait("full0", 0), Use("slot0", 0)]
        consumer += [Use(f"slot{slot}", step), Wait(f"full{following % SLOTS}", (following // SLOTS) & 1), scores]
        consumer += [Use(f"slot{slot}", step), Arrive(f"empty{slot}"), scores]
    return [producer, engine, consumer, [*consumer]]


def gradients(steps: int, way: int, tiles: int | None = None) -> list[Partition]:
    """The way of dS and dQ through shared memory, as `_step`, `_consume` and `_send` have it.

    What matmuls and the copy engine read they may read until they are waited for: such reads are there twice.
    """
    tiles = tiles or (3 if way == LATE else 2)
    programs: list[Partition] = []
    for own in (0, 1):
        part = f"dQ{own}"
        copied: Partition = []

        def read(step: int) -> Partition:
            return [Use(f"dS{half}{step % tiles}", step if step >= 0 else ANYTHING) for half in (0, 1)]

        def hand_over(step: int) -> Partition:
            return [Await(f"sent{own}"), Write(part, step), Signal(f"written{own}")]  # noqa: B023

        consumer: Partition = [Signal(f"ready{own}1")] if way == LATE else []
        for step in range(steps):
            write = Write(f"dS{own}{step % tiles}", step)
            if way == LATE:
                consumer += [Await(f"ready{1 - own}{(step + 1) & 1}"), write, Signal(f"ready{own}{step & 1}")]
                consumer += [*read(step - 1), *read(step - 1), *hand_over(step - 1)]
            else:
                consumer += [write, *copied, Meet("dS"), *read(step), *read(step)]
                if way == ALONE:
                    copied = [Use(part, step)]
                    consumer += [Write(part, step), *copied]
                else:
                    consumer += hand_over(step)
        if way == LATE:
            consumer += [Await(f"ready{1 - own}{(steps - 1) & 1}"), *read(steps - 1), *read(steps - 1)]
            consumer += hand_over(steps - 1)
        if way != ALONE:
            consumer.append(Await(f"sent{own}"))
        sender: Partition = []
        if way != ALONE:
            sender.append(Signal(f"sent{own}"))
            if way == LATE:
                sender += [Await(f"written{own}"), Signal(f"sent{own}")]
            for step in range(steps):
                sender += [Await(f"written{own}"), Use(part, step), Use(part, step), Signal(f"sent{own}")]
        programs += [[*consumer, Meet("read")], sender]
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
        pytest.param([*slots(5)[:3], early(slots(5)[3], Arrive("empty0"), Use("slot0", 0))], "found|hangs",
                     id="a slot that is released too early"),
        pytest.param(overwritten(BY_SENDERS), "found|twice", id="a part that is overwritten before it is sent"),
        pytest.param(overwritten(LATE), "found|twice", id="a late part that is overwritten before it is sent"),
        pytest.param(gradients(4, LATE, tiles=2), "found", id="two tiles where late gradients need three"),
    ],
)  # fmt: skip
def test_the_search_finds_mistakes(partitions, complaint):
    with pytest.raises(AssertionError, match=complaint):
        explore(partitions, ASKED)


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("together", [1, 3, 8])
def test_turns_count_the_programs_that_add_to_a_block(is_causal, together):
    """Each block of queries has every key tile that sees it once, and none waits for one that may not have started."""
    for queries, keys in itertools.product((1, 128, 129, 500, 900, 1500), repeat=2):
        problem = Problem(queries=queries, keys=keys, is_causal=is_causal, query_tile=64)
        blocks = problem.tiles // 2
        width = min(together, blocks)
        for block in range(blocks):
            tiles = [
                tile
                for tile in range(problem.key_tiles)
                if block * KEY_TILE in problem.walk(tile)
            ]  # fmt: skip
            turns = {
                plain(walk.turn_of_tile.fn(block, blocks, tile, problem.key_tiles, width, is_causal)): tile
                for tile in tiles
            }
            assert sorted(turns) == list(range(len(tiles))), (problem, block)
            for turn, tile in turns.items():
                ahead = [turns[x] for x in range(turn)]
                if is_causal:  # programs of a head start from its last key tile on
                    assert all(other > tile for other in ahead)
                else:
                    assert all(other < tile - tile % width + width for other in ahead)


def test_programs_that_start_together_come_to_their_turns_in_step():
    """At the same pace no program waits: its turn at a block is after those that came there in earlier steps."""
    for is_causal in (True, False):
        problem = Problem(queries=1024, keys=1024, is_causal=is_causal, query_tile=128)
        arrivals: dict[int, list[tuple[int, int]]] = {}
        for tile in range(problem.key_tiles):
            for step, start in enumerate(problem.walk(tile)):
                block = start // KEY_TILE
                turn = plain(walk.turn_of_tile.fn(block, problem.tiles, tile, problem.key_tiles, 8, is_causal))
                arrivals.setdefault(block, []).append((turn, step))
        for block, found in arrivals.items():
            assert [step for _, step in sorted(found)] == sorted(step for _, step in found), (is_causal, block)


# The launcher: what it hands to the three kernels


def record_launches(monkeypatch, *modules) -> dict[str, tuple]:
    """The launches of these modules from now on: name -> (grid, tensors, numbers, options)."""
    calls: dict[str, tuple] = {}

    def launch(kernel, *call):
        name = kernel.fn.__name__.removeprefix("hopper_").removesuffix("_kernel")
        assert name not in calls
        calls[name] = call

    for module in modules:
        monkeypatch.setattr(module, "launch", launch)
    return calls


@pytest.fixture
def launched(monkeypatch):
    return record_launches(monkeypatch, backward, light)


def low(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


@pytest.mark.parametrize("head_dim", [59, 64, 96, 128])
@pytest.mark.parametrize(("queries", "keys", "is_whole"), [(300, 200, False), (300, 300, True), (128, 384, True)])
def test_the_launcher_hands_over_the_call(launched, head_dim, queries, keys, is_whole):
    q, k = low(2, 6, queries, head_dim), low(2, 3, keys, head_dim)
    output, lse, do = low(*q.shape), torch.randn(2, 6, queries), low(*q.shape)
    dq, dk, dv = backward.hopper_backward(q, k, k, output, lse, do, None, False, True, 0.5)
    for grad, x in ((dq, q), (dk, k), (dv, k)):
        assert grad.shape == x.shape and grad.dtype == x.dtype and grad.is_contiguous()

    width = 64 if head_dim <= 64 else 128
    query_tile, num_rows = backward.QUERY_TILES[width], -(-queries // 128) * 128
    key_tiles = -(-min(keys, queries) // 128)
    grid, tensors, numbers, options = launched["backward"]
    q_tiles, k_tiles, v_tiles, do_tiles, dq_tiles, dk_tiles, dv_tiles, rows, turns = tensors
    assert grid == (key_tiles * 6,)
    inputs = (q_tiles, k_tiles, v_tiles, do_tiles)
    assert [x.block_shape for x in inputs] == [[1, 1, n, width] for n in (query_tile, 128, 128, query_tile)]
    assert [x.shape[:3] for x in inputs] == [list(x.shape[:3]) for x in (q, k, k, q)]
    assert dq_tiles.block_shape == [1, 1, 128, 32] and dq_tiles.shape == [1, 1, 12 * num_rows * width // 32, 32]
    padded = -(-head_dim // 8) * 8
    for tiles, grad in ((dk_tiles, dk), (dv_tiles, dv)):
        assert tiles.block_shape == [1, 1, 64, width] and tiles.shape == [1, 6, keys, padded]
        assert (tiles.base.data_ptr() == grad.data_ptr()) == (padded == head_dim)
    assert rows.shape == (12, 2, num_rows)
    kv_heads, together, _, num_queries, num_keys, scale_log2 = numbers
    assert (kv_heads, num_queries, num_keys) == (3, queries, keys) and 1 <= together <= 6
    assert scale_log2 == pytest.approx(0.5 * 1.4426950408889634)
    way = LATE if width == 64 else ALONE
    plan = walk.BackwardPlan(
        width, 96 if head_dim == 96 else width, query_tile, group=2, is_causal=True, whole_key_tiles=is_whole,
        dq_way=way, ordered=False,
    )
    assert options == {"PLAN": plan, "num_warps": 4, "launch_pdl": False}
    assert turns is rows
    assert not dk[:, :, key_tiles * 128 :].any() and not dv[:, :, key_tiles * 128 :].any()

    grid, tensors, numbers, options = launched["backward_preprocess"]
    columns = {"D": padded, "D_TILE": width, "ROWS": 64, "OVERLAP": False}
    assert grid == (num_rows // 64 * 12,) and options == {"HAS_DL": False, "HAS_SUMS": True, "ORDERED": False} | columns
    assert tensors[4] is rows
    row = padded // 8
    assert numbers == ((6 * queries * row, queries * row, row) * 2 + (6, queries, num_rows))  # strides of O and dO
    grid, (sums, result, _), numbers, options = launched["backward_convert"]
    assert grid == (-(-queries // 64) * 12,) and options == {"PACKED": False} | columns
    assert (result is dq) == (padded == head_dim) and result.shape[-1] == padded
    assert numbers == (queries, num_rows, 0, 0.5)
    assert sums.data_ptr() == dq_tiles.base.data_ptr() == tensors[5].data_ptr()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
def test_the_launcher_makes_room_for_turns(launched, head_dim, is_causal):
    """A counter for each consumer's part of each tile of dQ, by senders; without a mask one head after the other."""
    q, lse = low(2, 6, 300, head_dim), torch.randn(2, 6, 300)
    backward.hopper_backward(q, q, q, q, lse, q, None, True, is_causal, 0.5)
    _, (*_, turns), (_, heads_together, tiles_together, *_), options = launched["backward"]
    assert turns.dtype == torch.int32 and turns.numel() == 12 * 384 * head_dim // (64 * 64) * (128 // head_dim)
    assert options["PLAN"].ordered and options["PLAN"].dq_way != ALONE
    assert (heads_together, tiles_together) == (1, 1) or is_causal
    assert launched["backward_preprocess"][1][-1] is turns and launched["backward_preprocess"][-1]["ORDERED"]


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
def test_the_launcher_knows_where_keys_are_missing(launched, is_causal):
    lengths = (1, 100, 127, 128, 129, 256, 300)
    for queries, keys in itertools.product(lengths, lengths):
        problem = Problem(queries=queries, keys=keys, is_causal=is_causal, query_tile=backward.QUERY_TILES[64])
        q, k = (torch.empty(1, 1, rows, 64, dtype=torch.bfloat16) for rows in (queries, keys))
        launched.clear()
        backward.hopper_backward(q, k, k, q, torch.empty(1, 1, queries), q, None, False, is_causal, 0.5)
        grid, _, _, options = launched["backward"]
        assert (grid, options["PLAN"].whole_key_tiles) == ((problem.programs,), problem.whole), problem


def test_the_launcher_copies_what_tma_cannot_read(launched):
    q = low(1, 2, 100, 64)
    do = torch.ones((), dtype=torch.bfloat16).expand(q.shape)
    dl = torch.ones(()).expand(1, 2, 100)
    backward.hopper_backward(q, q, q, q, torch.randn(1, 2, 100), do, dl, False, False, 0.5)
    _, (q_tiles, _, _, do_tiles, *_), *_ = launched["backward"]
    assert q_tiles.base.data_ptr() == q.data_ptr()
    assert do_tiles.strides[1:] == [100 * 64, 64, 1]
    _, (_, copied, _, grad_lse, *_), _, options = launched["backward_preprocess"]
    assert torch.equal(copied, do) and copied.is_contiguous()
    assert torch.equal(grad_lse, dl) and grad_lse.is_contiguous() and options["HAS_DL"] is True


def test_the_launches_are_stages(launched):
    q, lse = low(1, 2, 100, 64), torch.randn(1, 2, 100)

    def differentiate():
        launched.clear()
        backward.hopper_backward(q, q, q, q, lse, q, None, False, True, 0.5)

    samples = time_stages(differentiate, device="cpu", num_samples=2, warmup=0)
    assert list(samples) == ["preprocess", "dkv", "dq", TOTAL] and set(samples) - {TOTAL} < set(STAGES)
    assert list(launched) == ["backward_preprocess", "backward", "backward_convert"]


def test_strides_of_any_size_fit_32_bits():
    """Counted in chunks of eight elements; a dimension of one element has whatever stride, and is not counted."""
    far = 2**31 + 64
    x = torch.empty_strided((2, 1, 512, 64), (far, far * 64 * 8, 192, 1), dtype=torch.bfloat16, device="meta")
    assert light._in_chunks(x) == (far // 8, 0, 24)


def test_every_list_of_a_mask_has_its_key_tile():
    """A mask of one batch entry or head serves all; a head of a group walks its own."""
    batches, kv_heads, group, num_keys, columns = 2, 3, 2, 700, 256
    for mask_batches, mask_heads in itertools.product((1, batches), (1, kv_heads * group)):
        numbers = torch.arange(mask_batches * mask_heads * 3).view(mask_batches, mask_heads, 3)
        numbers = numbers.expand(batches, kv_heads * group, 3).tolist()
        for batch, kv_head, member, tile in itertools.product(*map(range, (batches, kv_heads, group, 6))):
            number = walk.list_of_keys.fn(
                tile, batch * kv_heads + kv_head, member, num_keys, kv_heads, mask_batches, mask_heads, group, columns
            )  # fmt: skip
            assert plain(number) == numbers[batch][kv_head * group + member][tile * KEY_TILE // columns]


@pytest.mark.parametrize("query_tile", QUERY_TILES)
@pytest.mark.parametrize("block_size", [(128, 128), (256, 64), (128, 512)])
def test_bits_are_turned_to_keys(block_size, query_tile):
    """(tiles of queries, keys, words of their queries) from (queries, words of their keys), in the interpreter."""
    tokens = torch.rand(3, *block_size, generator=torch.Generator().manual_seed(0)) < 0.5
    turned = light.transposed_words(pack_tokens(tokens), query_tile)
    parts, keys = block_size[0] // query_tile, block_size[1]
    expected = pack_tokens(tokens.view(3 * parts, query_tile, keys).transpose(1, 2).contiguous())
    assert torch.equal(turned.view(3 * parts, keys, query_tile // 32), expected)


def test_gradients_of_documents_come_from_their_slots_rows():
    """`convert` of packed documents is `convert` of each, whose rows of the accumulator start where its slot does."""
    ends, behind, heads, width = [0, 70, 70, 198, 391], 9, 2, 40
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
        assert torch.equal(result[start:end], alone[0].transpose(0, 1)), (document, behind)


def test_the_launcher_of_documents_hands_over_their_slots(launched):
    q, k, cu_seqlens = low(300, 4, 64), low(300, 2, 64), torch.tensor([0, 100, 300], dtype=torch.int32)
    lse = torch.randn(4, 300)
    grads = backward.hopper_packed_backward(q, k, k, q, lse, q, None, cu_seqlens, cu_seqlens, 200, True, 0.5)
    assert [x.shape for x in grads] == [x.shape for x in (q, k, k)]
    grid, tensors, numbers, options = launched["packed_backward"]
    assert grid == ((300 // 128 + 3) * 2,) and tensors[-2] is tensors[-1] is cu_seqlens
    assert numbers[:1] + numbers[2:5] + numbers[6:] == (2, 1, 300, 300, 2)
    assert options["PLAN"].packed and options["PLAN"].whole_key_tiles
    grid, tensors, numbers, options = launched["backward_preprocess"]
    assert grid == (5 * 2 * 4,) and numbers == ((0, 8, 32) * 2 + (4, 300, 5 * 128))
    assert launched["backward_convert"][2] == (300, 5 * 128, 2, 0.5) and launched["backward_convert"][3]["PACKED"]


def test_a_row_without_keys_has_no_delta():
    """Its P is 0, and 0 times the NaN that `logaddexp` of two such rows gives L would be a NaN in dK and dQ."""
    output, grad_output = torch.ones(1, 2, 20, 64, dtype=torch.float16), torch.ones(1, 2, 20, 64, dtype=torch.float16)
    lse, grad_lse, rows = torch.zeros(1, 2, 20), torch.ones(1, 2, 20), torch.empty(2, 2, 64)
    lse[0, 1, 3], grad_lse[0, 1, 3] = -math.inf, math.nan
    light.preprocess(output, lse, grad_output, grad_lse, rows, None, None)
    expected = torch.full((2, 20), 63.0)
    expected[1, 3] = 0
    assert torch.equal(rows[:, 1, :20], expected)
