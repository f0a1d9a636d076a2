"""The Hopper backward of heads above 128 columns as far as a CPU can judge it, as `test_hopper_backward` does."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("cs336_systems.attention.hopper.wide_backward", reason="this triton has no Gluon for Hopper")

from cs336_systems.attention.hopper import backward, backward_walk, light, schedule
from cs336_systems.attention.hopper import wide_backward as wide
from tests.hopper_protocol import Arrive, Partition, Use, Wait, Write, explore
from tests.test_hopper_backward import LENGTH_PAIRS, early, exact_gradients, low, padded, plain, record_launches

TILE = wide.ROWS.value  # rows of a tile of keys, and of one of queries
SINGLE = {"asked": 1, "p_": 1}  # barriers on which one partition arrives


# dK and dV: each tile of keys meets the queries that see it


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("group", [1, 3])
@LENGTH_PAIRS
def test_the_tiles_add_up_to_the_gradients(lengths, group, is_causal, monkeypatch):
    """A key that does not exist has a P of inf in its own row, which is not written."""
    monkeypatch.setattr(backward_walk, "tile_of_program", backward_walk.tile_of_program.fn)
    queries, keys = lengths
    batch_heads, rows = 4, -(-queries // TILE) * TILE
    key_tiles = -(-(min(queries, keys) if is_causal else keys) // TILE)
    (q, k, v, do, output, lse), (_, expected_k, expected_v) = exact_gradients(lengths, group, is_causal)
    delta, lse = padded((do * output).sum(-1), rows), padded(lse, rows, math.inf)
    q, do = padded(q, rows), padded(do, rows)
    k, v = (padded(x, max(keys, key_tiles * TILE)) for x in (k, v))
    dk, dv = torch.full_like(k, math.nan), torch.full_like(v, math.nan)
    dk[:, key_tiles * TILE :] = dv[:, key_tiles * TILE :] = 0
    problem = wide.KeyProblem(2, 3, queries, keys, 1.0)
    for program in range(key_tiles * batch_heads):
        tile = plain(wide.key_tile_of.fn(program, key_tiles * batch_heads, problem, is_causal))
        number, head, query_tiles, first_tile, steps = tile
        own = slice(number * TILE, (number + 1) * TILE)
        sum_k, sum_v = torch.zeros(2, TILE, 8, dtype=torch.float64)
        for member in range(head * group, (head + 1) * group):
            for j in range(steps):
                first = plain(backward_walk.query_of_step.fn(j, first_tile, query_tiles, TILE, is_causal))
                streamed = slice(first, first + TILE)
                p = (k[head, own] @ q[member, streamed].T - lse[member, streamed]).exp()
                if is_causal and j == 0:
                    assert first == number * TILE
                    p = p.triu()
                ds = p * (v[head, own] @ do[member, streamed].T - delta[member, streamed])
                sum_v += p @ do[member, streamed]
                sum_k += ds @ q[member, streamed]
        assert dk[head, own].isnan().all(), "a program writes its tile alone"
        dk[head, own], dv[head, own] = sum_k, sum_v
    torch.testing.assert_close(dk[:, :keys], expected_k)
    torch.testing.assert_close(dv[:, :keys], expected_v)


# Barriers: every interleaving is tried. Copies of K and V, or of Q and dO, may end in any order.


def ring(step: int, slots: int = 2) -> tuple[int, int]:
    return step % slots, step // slots & 1


def copies(name: str, steps: int, slots: int = 2) -> Partition:
    """The copy engine, which may deliver a tile any time after it was asked."""
    operations: Partition = []
    for step in range(steps):
        slot, _ = ring(step, slots)
        operations += [Wait(f"asked_{name}{step}", 0), Write(f"{name}{slot}", step), Arrive(f"{name}_full{slot}")]
    return operations


def of_keys(steps: int) -> list[Partition]:
    """`_copy_queries`, the copies, `_sum_dv` and `_sum_dk`; what matmuls read is there when they start and end."""
    producer: Partition = []
    for step in range(steps):
        slot, phase = ring(step)
        producer += [Wait(f"q_empty{slot}", phase ^ 1), Arrive(f"asked_q{step}"), Write(f"rows{slot}", step)]
        producer += [Arrive(f"q_full{slot}"), Wait(f"do_empty{slot}", phase ^ 1), Arrive(f"asked_do{step}")]
        producer += [Arrive(f"do_full{slot}")]
    of_dv: Partition = [Wait("q_full0", 0), Use("q0", 0)]
    of_dk: Partition = [Wait("do_full0", 0), Use("do0", 0)]
    for step in range(steps):
        slot, phase = ring(step)
        following = min(step + 1, steps - 1)
        next_slot, next_phase = ring(following)
        scores, dP = Use(f"q{next_slot}", following), Use(f"do{next_slot}", following)
        do, q = Use(f"do{slot}", step), Use(f"q{slot}", step)
        of_dv += [Use(f"rows{slot}", step), Arrive(f"q_empty{slot}"), Wait(f"p_empty{slot}", phase ^ 1)]
        of_dv += [Write(f"P{slot}", step), Arrive(f"p_full{slot}"), Wait(f"do_full{slot}", phase), do]
        of_dv += [Wait(f"q_full{next_slot}", next_phase), scores, do, Arrive(f"do_empty{slot}"), scores]
        of_dk += [Arrive(f"do_empty{slot}"), Use(f"rows{slot}", step), Wait(f"p_full{slot}", phase)]
        of_dk += [Use(f"P{slot}", step), Arrive(f"p_empty{slot}"), q]
        of_dk += [Wait(f"do_full{next_slot}", next_phase), dP, q, Arrive(f"q_empty{slot}"), dP]
    return [producer, copies("q", steps), copies("do", steps), of_dv, of_dk]


def of_queries(steps: int, skips: int) -> list[Partition]:
    """`_copy_keys`, the copies and two `_sum_dq`, of which the first `skips` do not see the first keys."""
    producer: Partition = []
    for step in range(steps):
        slot, phase = ring(step)
        producer += [Wait(f"k_empty{slot}", phase ^ 1), Arrive(f"asked_k{step}"), Arrive(f"k_full{slot}")]
        producer += [Wait("v_empty0", step & 1 ^ 1), Arrive(f"asked_v{step}"), Arrive("v_full0")]
    consumers: list[Partition] = [[], []]
    for number, consumer in enumerate(consumers):
        first = int(number < skips)
        if first:
            consumer += [Wait("k_full0", 0), Arrive("k_empty0"), Wait("v_full0", 0), Arrive("v_empty0")]
        consumer += [Wait(f"k_full{first}", 0), Use(f"k{first}", first)]
        for step in range(first, steps):
            slot, _ = ring(step)
            following = min(step + 1, steps - 1)
            next_slot, next_phase = ring(following)
            scores, k, v = Use(f"k{next_slot}", following), Use(f"k{slot}", step), Use("v0", step)
            consumer += [Wait("v_full0", step & 1), v, v, Arrive("v_empty0"), k]
            consumer += [Wait(f"k_full{next_slot}", next_phase), scores, k, Arrive(f"k_empty{slot}"), scores]
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


# The launcher


@pytest.fixture
def launched(monkeypatch):
    return record_launches(monkeypatch, wide, light)


@pytest.mark.parametrize("head_dim", [129, 192, 256])
@pytest.mark.parametrize(("queries", "keys"), [(300, 200), (128, 384), (70, 500)])
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
def test_the_launcher_hands_over_the_call(launched, head_dim, queries, keys, is_causal):
    q, k = low(2, 6, queries, head_dim), low(2, 3, keys, head_dim)
    grads = backward.hopper_backward(q, k, k, q, torch.randn(2, 6, queries), q, None, False, is_causal, 0.5)
    for grad, x in zip(grads, (q, k, k), strict=True):
        assert grad.shape == x.shape and grad.dtype == x.dtype and grad.is_contiguous()
    assert list(launched) == ["backward_preprocess", "wide_dkdv", "wide_dq"]
    num_rows, key_tiles = -(-queries // 64) * 64, -(-(min(keys, queries) if is_causal else keys) // 64)
    _, (*_, rows, sums, turns), _, options = launched["backward_preprocess"]
    assert sums is turns is rows and rows.shape == (12, 2, num_rows)
    assert not options["HAS_SUMS"] and not options["ORDERED"] and options["D_TILE"] == 256

    grid, tensors, numbers, options = launched["wide_dkdv"]
    assert grid == (key_tiles * 6,) and tensors[-1] is rows
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
    large = schedule.SCHEDULES[256][0]
    assert options["PLAN"][:6] == (256, 256, 2, 64, large.slots, large.registers)
    assert options["PLAN"].masked_tiles == (2 if is_causal else 1)
