"""Simulated sums over ranks against hand-written orders, real ranks and exact arithmetic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cs336_systems.analysis.reductions import (
    halving_sum,
    message_sum,
    ring_sum,
    stochastic_add,
    stochastic_round,
)
from cs336_systems.analysis.rings import ring_all_reduce
from cs336_systems.config import RunConfig
from cs336_systems.distributed import FSDP
from cs336_systems.distributed.collectives import all_reduce_mean
from cs336_systems.distributed.spawn import run_ranks
from cs336_systems.experiments import Disagreement
from cs336_systems.experiments.beyond import reduction_precision, reduction_time
from cs336_systems.subjects import reduced_training

COVERS = (
    "cs336_systems/analysis/reductions.py",
    "cs336_systems/analysis/rings.py",
    "cs336_systems/subjects/reduced_training.py",
    "cs336_systems/experiments/beyond/reduction_precision.py",
    "cs336_systems/experiments/beyond/reduction_time.py",
)

ROUNDOFF = 2.0**-8  # bfloat16 has 8 bits: one rounding is off by at most this part of the value
TINY = RunConfig(scale="tiny", device="cpu")


def drawn(num_ranks: int, length: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Gradients of `num_ranks` ranks, the same for the same sizes."""
    generator = torch.Generator().manual_seed(num_ranks)
    return torch.randn(num_ranks, length, generator=generator).to(dtype)


# The orders


def test_ring_adds_down_from_the_rank_below_each_chunk() -> None:
    a, b, c = drawn(3, 6)
    first = (c[:2] + b[:2]) + a[:2]
    second = (a[2:4] + c[2:4]) + b[2:4]
    third = (b[4:] + a[4:]) + c[4:]
    assert torch.equal(ring_sum(torch.stack([a, b, c])), torch.cat([first, second, third]))


@pytest.mark.parametrize("length", [4, 64, 67, 3], ids=["tiny", "even", "uneven", "short"])
def test_ring_is_the_messages_of_analysis_rings_in_the_mirror(length: int) -> None:
    """The rings of `analysis.rings` travel up, gloo's down: rank r here is rank 3 - r there, and
    chunk c is chunk 3 - c. Both round each message.
    """
    gradients, expected, start = drawn(4, length), [], 0
    for chunk in range(4):
        size = length // 4 + (chunk < length % 4)
        own = gradients[:, start : start + size]
        # An element of that ring is a whole chunk of this one, and one of its four is looked at.
        results, _ = ring_all_reduce([[own[3 - rank]] * 4 for rank in range(4)])
        expected.append(results[0][3 - chunk])
        start += size
    assert torch.equal(ring_sum(gradients), torch.cat(expected))


def test_halving_adds_rank_i_and_rank_i_plus_half() -> None:
    a, b, c, d = drawn(4, 50)
    assert torch.equal(halving_sum(torch.stack([a, b, c, d])), (a + c) + (b + d))


def test_orders_differ_in_bfloat16() -> None:
    """Else the other tests would pass for any order."""
    gradients = drawn(4, 64)
    upwards = gradients[0] + gradients[1] + gradients[2] + gradients[3]
    sums = [ring_sum(gradients), halving_sum(gradients), upwards, ring_sum(gradients.flip(0))]
    assert not any(torch.equal(one, other) for i, one in enumerate(sums) for other in sums[:i])


# Real ranks


def on_a_rank(rank: int, num_ranks: int, length: int) -> dict[str, Tensor]:
    """This rank's mean by all-reduce, and its rows' gradient under FSDP in bfloat16."""
    gradients = drawn(num_ranks, length)
    mean = gradients[rank].clone()
    all_reduce_mean(mean)

    layer = nn.Linear(length // num_ranks, num_ranks, bias=False)
    model = FSDP(nn.Sequential(layer), reduce_dtype=torch.bfloat16)
    # the gradient of the weight is this rank's line; bfloat16 values go through float32 unchanged
    upstream = gradients[rank].float().view(num_ranks, -1)
    model(torch.eye(length // num_ranks)).backward(upstream.T.contiguous())
    model.finish_gradient_synchronization()
    (shard,) = model.parameters()
    assert shard.grad is not None

    received = gradients[rank].clone()
    reduction_time.mean_of_messages(received)
    return {"mean": mean, "rows": shard.grad.flatten(), "messages": received}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ring_is_gloo_and_fsdp_bit_for_bit(num_ranks: int) -> None:
    length = num_ranks * 256
    found = run_ranks(on_a_rank, num_ranks, length, start_method="forkserver")
    expected = ring_sum(drawn(num_ranks, length)) / num_ranks
    messages = (message_sum(drawn(num_ranks, length)) / num_ranks).bfloat16()
    for one in found:
        assert torch.equal(one["mean"], expected)
        # The transport adds its float32 sum in another order, so it may round to the neighbour.
        assert torch.allclose(one["messages"].float(), messages.float(), rtol=2 * ROUNDOFF, atol=0)
        assert (one["messages"] != messages).float().mean() < 0.01
    rows = torch.cat([one["rows"] for one in found])
    assert torch.equal(rows, expected.float())


def test_a_mean_that_is_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean that forgets to divide must not be timed."""
    monkeypatch.setitem(reduction_time.MEANS, "messages", lambda gradients: gradients.mul_(2))
    with pytest.raises(Disagreement, match="the mean by messages is off"):
        reduction_time.check_mean("messages", 0, 1, TINY)


def uneven(rank: int, num_ranks: int) -> None:
    reduction_time.mean_of_messages(torch.ones(3, dtype=torch.bfloat16))


def test_messages_of_uneven_chunks_are_refused() -> None:
    with pytest.raises(Exception, match="must have a multiple of 2 elements, got 3"):
        run_ranks(uneven, 2, start_method="forkserver")


# Roundings


@pytest.mark.parametrize("num_ranks", [2, 8, 512])
def test_float32_sum_of_messages_rounds_once(num_ranks: int) -> None:
    """Rounded to bfloat16, it is within one rounding of the messages' exact sum; a ring is not."""
    gradients = drawn(num_ranks, 1024, torch.float32)
    exact = gradients.bfloat16().double().sum(0)
    # additions in float32, each off by 2⁻²⁴ of a partial sum
    slack = num_ranks * 2.0**-24 * gradients.double().abs().sum(0)
    bound = ROUNDOFF * exact.abs() + slack

    def off(total: Tensor) -> Tensor:
        return (total.double() - exact).abs()

    total = message_sum(gradients)
    assert (off(total) <= slack).all()
    assert (off(total.bfloat16()) <= bound).all()
    if num_ranks > 2:
        assert (off(ring_sum(gradients.bfloat16())) > bound).any()


def test_stochastic_rounding_is_unbiased_and_goes_to_a_neighbour() -> None:
    generator = torch.Generator().manual_seed(0)
    # between 1 and its neighbour 1 + 2⁻⁷: at a fifth of the way, and the same below zero
    value = 1 + 0.2 * 2.0**-7
    values = torch.tensor([value, -value, 3.0, 0.0]).repeat(20_000, 1)
    rounded = stochastic_round(values, generator).double()
    assert set(rounded[:, 0].tolist()) == {1.0, 1 + 2.0**-7}
    assert set(rounded[:, 1].tolist()) == {-1.0, -1 - 2.0**-7}
    assert (rounded[:, 2] == 3).all() and (rounded[:, 3] == 0).all()
    # five standard errors of the mean; rounding to nearest would be off by 70
    error = 5 * 2.0**-7 * (0.2 * 0.8 / len(values)) ** 0.5
    assert (rounded.mean(0)[:2] - torch.tensor([value, -value]).double()).abs().max() < error


def test_stochastic_rounding_keeps_what_is_not_finite() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor([torch.inf, -torch.inf, torch.nan]).repeat(1000, 1)
    rounded = stochastic_round(values, generator)
    assert torch.equal(rounded.float()[:, :2], values[:, :2]) and rounded[:, 2].isnan().all()


def test_equal_gradients_vanish_in_a_ring_and_survive_a_tree() -> None:
    """512 times 1: a sum in bfloat16 stops at 256, whose spacing of 2 is twice the addend."""
    ones = torch.ones(512, 8, dtype=torch.bfloat16)
    assert (ring_sum(ones) == 256).all()
    assert (halving_sum(ones) == 512).all() and (message_sum(ones) == 512).all()
    unbiased = ring_sum(torch.ones(512, 4096).bfloat16(), stochastic_add(torch.Generator()))
    assert abs(float(unbiased.double().mean()) - 512) < 2


def test_no_element_and_one_rank() -> None:
    assert ring_sum(drawn(3, 0)).shape == halving_sum(drawn(2, 0)).shape == (0,)
    (alone,) = gradients = drawn(1, 5)
    assert torch.equal(ring_sum(gradients), alone) and torch.equal(halving_sum(gradients), alone)


@pytest.mark.parametrize("sum_of", [ring_sum, halving_sum, message_sum])
@pytest.mark.parametrize(
    ("gradients", "error", "message"),
    [
        (torch.ones(3), ValueError, r"have shape \(ranks, n\) .* got \(3,\)"),
        (torch.ones(0, 3), ValueError, r"have shape .* ranks >= 1, got \(0, 3\)"),
        (torch.ones(2, 3, dtype=torch.int64), TypeError, "be floating point, got torch.int64"),
    ],
    ids=["vector", "no ranks", "integers"],
)
def test_bad_gradients_are_refused(
    sum_of: Any, gradients: Tensor, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match="gradients must " + message):
        sum_of(gradients)


def test_other_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="gradients must be of a power of two of ranks, got 6"):
        halving_sum(drawn(6, 4))
    with pytest.raises(TypeError, match="values must be float32, got torch.float64"):
        stochastic_round(torch.ones(1).double(), torch.Generator())
    for num_ranks in (1, 3, 256):
        with pytest.raises(ValueError, match=f"num_ranks must .* divide 128, got {num_ranks}"):
            reduced_training.train(ring_sum, num_ranks=num_ranks, steps=1)


# The training and the page's errors


def test_rank_gradients_are_those_of_one_rank_after_the_other() -> None:
    generator = torch.Generator().manual_seed(0)
    length = sum(rows * columns for rows, columns in reduced_training.SHAPES)
    weights = torch.randn(length, generator=generator, dtype=torch.float64)
    windows = torch.randint(256, (3, 4, reduced_training.WINDOW + 1), generator=generator)
    loss, gradients = reduced_training.rank_gradients(weights, windows)
    alone = [reduced_training.rank_gradients(weights, one[None]) for one in windows]
    assert loss == pytest.approx(sum(one for one, _ in alone) / 3, rel=1e-12)
    torch.testing.assert_close(gradients, torch.cat([own for _, own in alone]))
    # a finite difference along the mean gradient
    mean, step = gradients.mean(0), 1e-6
    ahead, _ = reduced_training.rank_gradients(weights + step * mean, windows)
    assert (ahead - loss) / step == pytest.approx(float(mean @ mean), rel=1e-3)


def test_training_learns_and_sees_only_the_reduction() -> None:
    def exact(gradients: Tensor) -> Tensor:
        return gradients.sum(0)

    with reduced_training.one_thread():
        runs = {
            name: reduced_training.train(sum_of, num_ranks=8, steps=20)
            for name, sum_of in {
                "exact": exact,
                "again": exact,
                "float32": lambda gradients: ring_sum(gradients.float()),
                "bfloat16": lambda gradients: ring_sum(gradients.bfloat16()),
            }.items()
        }
    exact_run = runs.pop("exact")
    assert exact_run.losses[-1] < exact_run.losses[0] - 0.5
    off = {
        name: float((run.weights - exact_run.weights).norm() / exact_run.weights.norm())
        for name, run in runs.items()
    }
    assert off["again"] == 0 < off["float32"] < 1e-6 < off["bfloat16"] < 1e-2


def test_agreement_of_known_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(64, 20_000, generator=generator, dtype=torch.float64)
    for mean in (0.1, 1.0, 10.0):
        assert reduced_training.agreement(mean + noise) == pytest.approx(mean, rel=0.1)
    assert reduced_training.agreement(torch.ones(2, 3)) == float("inf")


def test_threads_are_restored_after_an_error() -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyError), reduced_training.one_thread():
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == before


def test_errors_tell_bias_from_noise() -> None:
    """A mean that is 1 % too short is bias: it shrinks, and steps do not average it out."""

    def short(gradients: Tensor) -> Tensor:
        return 0.99 * gradients.double().sum(0)

    found = reduction_precision.errors("agree", 4, short)
    assert found["error"] == pytest.approx(1, rel=1e-2) == found["shrinkage"]
    assert found["of steps"] == pytest.approx(found["error"], rel=1e-2)
    ring = reduction_precision.errors("differ", 4, ring_sum_in_bfloat16)
    assert ring["of steps"] == pytest.approx(ring["error"] / 4, rel=0.2)


def ring_sum_in_bfloat16(gradients: Tensor) -> Tensor:
    return ring_sum(gradients.bfloat16())


def test_cases_of_a_run() -> None:
    experiment = reduction_time.ReductionTime()
    assert [case.num_ranks for case in experiment.cases(TINY)] == [2]
    smoke = experiment.cases(replace(TINY, scale="smoke"))
    assert [(case.num_ranks, case.backend) for case in smoke] == [(2, "gloo"), (4, "gloo")]
