"""Section 6: optimizers with sharded state equal the unsharded one, on gloo; their experiments."""

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adafactor

from cs336_systems.analysis.memory_plan import fsdp_bytes
from cs336_systems.bench.harness import planned_cells
from cs336_systems.bench.spec import Disagreement
from cs336_systems.config import MODEL_SIZES, Precision, RunConfig
from cs336_systems.distributed import FSDP, LossScaler, OverlapDDP, ShardedOptimizer, Zero1Optimizer
from cs336_systems.model import AdamW
from cs336_systems.subjects import parallel_step
from cs336_systems.subjects.parallel_step import ShardingCase, check_training
from cs336_systems.subjects.ranks import ranks_case
from cs336_systems.subjects.sharding import ShardingExperiment, sharding_cell
from tests.one_job import OneJob, run_alone
from tests.sharding_models import awkward, part, seeded

COVERS = ("cs336_systems/distributed", "tests/sharding_models.py")


TWO_RANKS, THREE_RANKS = OneJob(2), OneJob(3)


# As the unsharded optimizer


def some_groups(of: Any) -> list[dict[str, Any]]:
    """Of their own settings."""
    rest = [parameter for name, parameter in of.named_parameters() if not name.startswith("inner")]
    return [{"params": of.inner.parameters(), "lr": 0.05}, {"params": rest, "weight_decay": 0.3}]


def through_file(state_dict: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(state_dict, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


@TWO_RANKS.call
@THREE_RANKS.call
def train_with_and_without_shards(rank: int, num_ranks: int) -> None:
    for build in (ShardedOptimizer, partial(Zero1Optimizer, bucket_size_mb=1e-4), Zero1Optimizer):
        compare(build, rank, num_ranks)


def compare(build: Any, rank: int, num_ranks: int) -> None:
    """Groups and a schedule, then state dicts: in both directions, through a file, and on from
    there.
    """
    # of parts of the batch; the other gets whole batches on all ranks
    averages = build is not ShardedOptimizer
    single, model = seeded(awkward).double(), seeded(awkward, seed=rank if averages else 0).double()
    optimizers = AdamW(some_groups(single), lr=0.01), build(some_groups(model), AdamW, lr=0.01)

    def step(number: int) -> None:
        x = torch.rand(12, 5, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        single(x).square().mean().backward()
        model(part(x, rank, num_ranks) if averages else x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(dict(model.named_parameters()), dict(single.named_parameters()))

    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in optimizers]
    for number in range(5):
        step(number)
        for schedule in schedules:
            schedule.step()
    expected, found = (optimizer.state_dict() for optimizer in optimizers)
    assert found["param_groups"] == expected["param_groups"]
    torch.testing.assert_close(found["state"], expected["state"])
    if averages:
        own, whole = (
            sum(state["exp_avg"].nbytes for state in states.values())
            for states in (optimizers[1].state, expected["state"])
        )
        assert own <= whole / num_ranks + 8 * 64 * len(optimizers[1].buckets)  # a slice is padded
    weights, model = model.state_dict(), awkward().double()
    model.load_state_dict(weights)
    optimizers = AdamW(some_groups(single), lr=1.0), build(some_groups(model), AdamW, lr=9.0)
    for optimizer, state in zip(optimizers, (found, through_file(expected))):
        optimizer.load_state_dict(state)
    for number in range(5, 7):
        step(number)


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_D3_D11_groups_schedules_and_state_are_those_of_the_unsharded_optimizer(num_ranks):
    if num_ranks == 1:
        run_alone(train_with_and_without_shards)
    else:
        (TWO_RANKS if num_ranks == 2 else THREE_RANKS).results(train_with_and_without_shards)


def test_the_sharded_optimizer_takes_closures_names_and_a_tensor_twice(alone_in_a_group):
    single, model = seeded(awkward), seeded(awkward)
    pairs = [*model.named_parameters(), ("inner", model.inner.weight)]
    optimizers = SGD(single.parameters(), lr=0.1), ShardedOptimizer(pairs, SGD, lr=0.1)

    def closure(of: nn.Module, optimizer: Any) -> Any:
        optimizer.zero_grad()
        loss = of(torch.ones(3, 5)).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        losses = [
            one.step(partial(closure, of, one)) for one, of in zip(optimizers, (single, model))
        ]
        assert torch.equal(*losses)


def test_zero1_keeps_low_precision_in_float32(alone_in_a_group):
    """An update too small for bfloat16 is not lost; what is written into weights is what the next
    step starts from.
    """
    low = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    optimizer = Zero1Optimizer(low.parameters(), SGD, lr=1e-3)

    def step_from(value: float | None) -> None:
        if value is not None:
            low.load_state_dict({"weight": torch.full((4, 4), value)})
        low(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for value in (1.0, *[None] * 7):
        step_from(value)
    assert (
        low.weight.dtype == torch.bfloat16
        and low.weight[0, 0].item() == pytest.approx(1 - 8e-3, abs=4e-3) != 1
    )
    step_from(3.0)
    assert (low.weight == 3).all()


# Refusals


def test_what_optimizers_refuse(alone_in_a_group):
    model, moved, low = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    sharded = ShardedOptimizer([model.weight], SGD, lr=0.1)
    zero1, lost = (
        Zero1Optimizer(low.parameters(), SGD, lr=0.1),
        Zero1Optimizer(moved.parameters(), AdamW),
    )
    x = torch.ones(3, 2)
    low(x).sum().backward()
    moved.to(torch.float64)
    # of which ShardedOptimizer gave all ranks those of one, in silence
    rows = [*FSDP(nn.Linear(2, 2)).parameters()]
    refused: dict[str, Callable[[], object]] = {
        "must have groups of .1. parameters, got .2.": lambda: sharded.load_state_dict(
            lost.state_dict()
        ),
        "should be an iterable of Tensors": lambda: ShardedOptimizer(model.weight, AdamW),
        "gradient of parameter '.' arrived twice in a step": lambda: low(x).sum().backward(),
        r"a parameter of shape \(2.*\) was moved or cast after": lambda: (
            moved(x.double()).sum().backward()
        ),
        "takes no closure: run backward before it": lambda: zero1.step(lambda: None),
        "Zero1Optimizer cannot add a group": lambda: zero1.add_param_group({"params": []}),
        "max_norm must be positive, got -1": lambda: zero1.clip_grad_norm_(-1),
        "Adafactor does not update a weight element by": lambda: Zero1Optimizer(
            model.parameters(), Adafactor
        ),
        "LBFGS cannot be sharded: it searches along all": lambda: Zero1Optimizer(
            model.parameters(), LBFGS
        ),
        "FSDP has cut .* into rows: do without ShardedOptimizer": lambda: ShardedOptimizer(
            rows, AdamW
        ),
        "FSDP has cut .* into rows: do without Zero1Optimizer": lambda: Zero1Optimizer(rows, AdamW),
    }
    for message, call in refused.items():
        with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
            call()
    with zero1.no_sync(), pytest.raises(RuntimeError, match=r"must be outside of no_sync\(\)"):
        zero1.finish_gradient_synchronization()


# Prediction


def test_the_predicted_bytes_of_10b_fit_two_h200_sharded_and_not_one():
    options: dict[str, Any] = {
        "attention": "sdpa",
        "compute_dtype": "bfloat16",
        "reduce_dtype": "float32",
    }
    two = fsdp_bytes(MODEL_SIZES["10b"], 4, num_ranks=2, checkpointing=True, **options)
    one = fsdp_bytes(MODEL_SIZES["10b"], 4, num_ranks=1, checkpointing=True, **options)
    assert two.fits(139 * 2**30) and not one.fits(139 * 2**30)
    assert two.parameters + two.gradients + two.optimizer < 0.51 * (
        one.parameters + one.gradients + one.optimizer
    )
    plain = fsdp_bytes(MODEL_SIZES["10b"], 4, num_ranks=2, **options)
    assert plain.activations > 5 * two.activations and plain.parameters == two.parameters


# Experiments and report


class NeverSent(ShardedOptimizer):
    """Known wrong: each rank updates its share and tells nobody."""

    def _broadcast_updates(self) -> None:
        pass


@TWO_RANKS.check
def test_an_optimizer_that_does_not_exchange_is_not_timed(rank: int, num_ranks: int) -> None:
    run = RunConfig(scale="tiny", device="cpu")
    case = ranks_case(ShardingCase, run, num_ranks, Precision())
    assert check_training("sharded", case, run, rank) <= 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_step, "ShardedOptimizer", NeverSent)
        with pytest.raises(
            Disagreement, match="changes of weights in 3 steps are off by .* times the bound"
        ):
            check_training("sharded", case, run, rank)


def test_a_frozen_model_has_no_gradients_to_clip(alone_in_a_group):
    model = nn.Linear(3, 3).requires_grad_(False)
    optimizer = Zero1Optimizer(model.parameters(), AdamW, lr=0.1)
    assert optimizer.clip_grad_norm_(1.0) == 0
    optimizer.step(closure=None)  # as trainers pass it on


@TWO_RANKS.check
def test_D1_zero1_takes_unused_parameters_for_having_zeros(rank: int, num_ranks: int) -> None:
    """As its docstring says: nobody waits, and weight decay goes on, also of a bucket without any
    gradient.
    """
    used, unused = nn.Linear(3, 3), nn.Linear(3, 3)
    parameters = [*used.parameters(), *unused.parameters()]
    optimizer = Zero1Optimizer(parameters, SGD, lr=0.5, weight_decay=0.5, bucket_size_mb=1e-6)
    before = unused.weight.detach().clone()
    used(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert len(optimizer.buckets) == 4 and torch.allclose(unused.weight, 0.75 * before)


@TWO_RANKS.check
def test_zero1_reduces_the_buckets_of_all_groups_as_they_become_full(
    rank: int, num_ranks: int
) -> None:
    """Vectors of all layers in one bucket once kept every matrix waiting for the first layer's."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(4)))
    groups = [
        [one for one in model.parameters() if (one.ndim > 1) == is_matrix]
        for is_matrix in (False, True)
    ]
    optimizer = Zero1Optimizer(
        [{"params": group} for group in groups], SGD, lr=0.1, bucket_size_mb=384 / 2**20
    )
    reduced = []  # when the backward comes to the first layer
    for _ in range(2):
        optimizer.zero_grad()
        x = model[0](torch.ones(2, 8))
        x.register_hook(lambda _: reduced.append(optimizer._queue.num_sent))
        model[1:](x).sum().backward()
        optimizer.step()
    assert [*reduced, len(optimizer.buckets)] == [0, 3, 5]


def test_the_handouts_cells_cover_both_precisions_and_both_peers():
    run = RunConfig(scale="handout", device="cuda")
    problems = "optimizer_state_sharding_accounting", "fsdp_accounting"
    cells = [cell for name in problems for cell in planned_cells(name, run)]
    expected = {"torch_zero", "torch_fsdp", "sharded", "zero1", "fsdp", "unsharded"}
    assert {cell.implementation for cell in cells} >= expected
    assert {cell.case.precision for cell in cells} == {Precision(), Precision(autocast="bfloat16")}
    alone = {(cell.problem, cell.implementation) for cell in cells if cell.case.num_ranks == 1}
    assert alone == {
        (problems[0], "unsharded"),
        *((problems[1], name) for name in ("unsharded", "fsdp", "torch_fsdp")),
    }


@pytest.mark.parametrize("implementation", ["fsdp", "torch_fsdp"])
def test_a_single_rank_shards_nothing_and_sends_nothing(implementation):
    run = RunConfig(scale="tiny", device="cpu")
    cell = sharding_cell(ranks_case(ShardingCase, run, 1, Precision()), implementation)
    found = {
        (one.row.mode, one.row.quantity): one for one in ShardingExperiment().measure(cell, run)
    }
    assert found["train_step", "time"].error <= 1 and found[
        "train_step", "communication_time"
    ].samples == [0]


def test_what_zero1_would_average_twice_or_not_see_is_refused(alone_in_a_group):
    """Both trained on wrongly in silence."""
    wrapped = OverlapDDP(nn.Linear(2, 2))
    with pytest.raises(
        ValueError, match="OverlapDDP averages the gradients already: give Zero1Optimizer the"
    ):
        Zero1Optimizer(wrapped.parameters(), SGD, lr=0.1)
    model = wrapped.module
    del wrapped
    optimizer = Zero1Optimizer(model.parameters(), SGD, lr=0.1)
    model(torch.ones(3, 2)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    with pytest.raises(
        RuntimeError, match="a gradient was changed after it was averaged.* use clip_grad_norm_ and"
    ):
        optimizer.step()
    optimizer.zero_grad()
    model(torch.ones(3, 2)).sum().backward()
    model.bias.grad = model.bias.grad + 1
    message = "a gradient was replaced after the backward, which the update does not see"
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    optimizer.zero_grad()
    model(torch.ones(3, 2)).sum().backward()
    model.zero_grad()  # the optimizer's would have been right
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()


@pytest.mark.parametrize("bucket_size_mb", [1e-6, 1.0])
def test_a_backward_that_is_thrown_away_leaves_nothing(bucket_size_mb, alone_in_a_group):
    """With a parameter that it had not used, `step` took its gradients, and the next backward was
    called the second.
    """
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = Zero1Optimizer(model.parameters(), SGD, lr=0.1, bucket_size_mb=bucket_size_mb)
    model[1](torch.ones(1, 2)).sum().backward()
    optimizer.zero_grad()
    before = model[1].bias.clone()
    optimizer.step()
    assert torch.equal(model[1].bias, before)
    for thrown_away in (True, False):
        model[1](torch.ones(1, 2)).sum().backward()
        optimizer.zero_grad() if thrown_away else optimizer.step()
    assert torch.equal(model[1].bias, before - 0.1)


def test_a_loss_scaler_needs_no_group_and_no_gradients():
    weight = nn.Parameter(torch.ones(3))
    optimizer = SGD([weight], lr=1.0)
    scaler = LossScaler("cpu", init_scale=8.0)
    scaler.scale(weight.sum())
    scaler.step(optimizer)
    scaler.update()
    scaler.scale(weight.sum()).backward()
    assert weight.grad is not None and weight.grad.tolist() == [8.0] * 3
    scaler.step(optimizer)
    assert weight.tolist() == [0.0] * 3
