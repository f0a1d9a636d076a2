"""Section 6: optimizers with sharded state equal the unsharded one, on gloo; their experiments."""

import gc
import io
import weakref
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adafactor

from cs336_systems.analysis.memory import fsdp_bytes
from cs336_systems.config import MODEL_SIZES, Precision, RunConfig
from cs336_systems.distributed.ddp_overlap import OverlapDDP
from cs336_systems.distributed.fsdp.wrapper import FSDP
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from cs336_systems.distributed.zero1 import Zero1Optimizer
from cs336_systems.experiments import parallel_step
from cs336_systems.experiments.harness import planned_cells
from cs336_systems.experiments.parallel_step import check_training
from cs336_systems.experiments.sharding import ShardingExperiment, sharding_case, sharding_cell
from cs336_systems.experiments.spec import Disagreement
from cs336_systems.model import AdamW
from tests.one_job import OneJob, run_alone
from tests.sharding_models import Awkward, part, seeded

COVERS = ("cs336_systems/distributed", "tests/sharding_models.py")


TWO_RANKS, THREE_RANKS = OneJob(2), OneJob(3)


class Toy(nn.Module):
    """Like the course's: a frozen vector, a frozen bias, no two layers alike; optionally tied."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.fc1 = nn.Linear(10, 10, bias=False)
        self.fc2 = nn.Linear(10, 50)
        self.fc2.bias.requires_grad_(False)
        self.fc3 = nn.Linear(50, 10, bias=False)
        self.fc4 = nn.Linear(10, 50, bias=False)
        self.fc5 = nn.Linear(50, 5, bias=False)
        self.fixed = nn.Parameter(torch.tensor([2.0, 2.0]), requires_grad=False)
        if tied:
            self.fc4.weight = self.fc2.weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.fc1, self.fc2, self.fc3, self.fc4):
            x = torch.relu(layer(x))
        return self.fc5(x)


def step_both(
    step: int, single: nn.Module, model: nn.Module, optimizers: tuple[Any, Any], *, own: tuple[int, int] | None = None
) -> None:
    """One step of both on the same data; `own` gives the model its (rank, number of ranks) part only."""
    x = torch.rand(24, 10, generator=torch.Generator().manual_seed(step))
    for optimizer in optimizers:
        optimizer.zero_grad()
    single(x).square().mean().backward()
    model(x if own is None else part(x, *own)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()


def equal_weights(single: nn.Module, model: nn.Module, rtol: float = 1e-7, atol: float = 0.0) -> None:
    torch.testing.assert_close(dict(model.named_parameters()), dict(single.named_parameters()), rtol=rtol, atol=atol)


@THREE_RANKS.call
def check_options(rank: int, num_ranks: int) -> None:
    """Groups, schedules, later groups, closures, names, duplicates, other optimizers, and both ways to save."""
    # Groups of their own settings, a changed learning rate, a group that is added later
    single = seeded(lambda: Toy(False))
    model = deepcopy(single)

    def groups(of: Any) -> list[dict[str, Any]]:
        return [{"params": of.fc1.parameters(), "lr": 0.05}, {"params": [of.fc2.weight, of.fc3.weight]}]

    optimizers = AdamW(groups(single), lr=0.01), ShardedOptimizer(groups(model), AdamW, lr=0.01)
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in optimizers]
    for step in range(6):
        step_both(step, single, model, optimizers)
        for schedule in schedules:
            schedule.step()
        if step == 2:
            for optimizer, of in zip(optimizers, (single, model)):
                optimizer.add_param_group({"params": [of.fc4.weight, of.fc5.weight], "lr": 0.002, "weight_decay": 0.3})
    equal_weights(single, model)
    assert sum(optimizers[1].bytes_owned.values()) == sum(parameter.nbytes for parameter in optimizers[1].parameters)

    # The state is the unsharded optimizer's, and loads again
    full, expected = optimizers[1].state_dict(), optimizers[0].state_dict()
    assert full["state"].keys() == expected["state"].keys()
    for place, state in expected["state"].items():
        assert full["state"][place]["step"] == state["step"]
        torch.testing.assert_close(full["state"][place]["exp_avg_sq"], state["exp_avg_sq"], rtol=1e-6, atol=0)
    assert full["param_groups"] == expected["param_groups"]
    again = ShardedOptimizer(groups(model), AdamW, lr=1.0)
    again.add_param_group({"params": [model.fc4.weight, model.fc5.weight]})
    again.load_state_dict(_through_file(full))
    assert again.param_groups[2]["weight_decay"] == 0.3
    for step in range(2):
        step_both(step, single, model, (optimizers[0], again))
    equal_weights(single, model, rtol=1e-6, atol=1e-9)

    # A closure, (name, tensor) pairs, a tensor given twice, SGD with momentum, frozen parameters
    single, model = seeded(Awkward), seeded(Awkward)
    pairs = [*model.named_parameters(), ("inner", model.inner.weight)]
    sharded = ShardedOptimizer(pairs, SGD, lr=0.1, momentum=0.9)
    reference = SGD(single.parameters(), lr=0.1, momentum=0.9)
    x = torch.ones(3, 5)

    def closure(of: nn.Module, optimizer: Any) -> Any:
        optimizer.zero_grad()
        loss = of(x).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        losses = [optimizer.step(lambda of=of, optimizer=optimizer: closure(of, optimizer))
                  for of, optimizer in ((single, reference), (model, sharded))]  # fmt: skip
        assert torch.equal(losses[0], losses[1])
    equal_weights(single, model)

    # Errors
    other = ShardedOptimizer([model.inner.weight], SGD, lr=0.1)
    refused(
        {
            "must have groups of .1. parameters, got": lambda: other.load_state_dict(sharded.state_dict()),
            "optimizer_cls must be a subclass": lambda: ShardedOptimizer(model.parameters(), AdamW(model.parameters())),
            "should be an iterable of Tensors": lambda: ShardedOptimizer(model.inner.weight, AdamW),
        }
    )


def refused(calls: dict[str, Callable[[], object]]) -> None:
    """Each call raises an error that says its key."""
    for message, call in calls.items():
        with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
            call()


def _through_file(state_dict: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(state_dict, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


@pytest.mark.parametrize("num_ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_D11_groups_schedules_state_and_errors_of_the_sharded_optimizer(num_ranks):
    if num_ranks == 1:
        run_alone(check_options)
    else:
        THREE_RANKS.results(check_options)


@TWO_RANKS.call
@THREE_RANKS.call
def check_zero1(rank: int, num_ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for bucket_size_mb in (1e-4, 1e-3, 100.0):
        single, model = seeded(lambda: Toy(True)), seeded(lambda: Toy(True), seed=rank)
        groups = [
            [{"params": [of.fc1.weight], "lr": 0.05}, {"params": [p for n, p in of.named_parameters() if n[2] != "1"]}]
            for of in (single, model)
        ]
        sharded = Zero1Optimizer(groups[1], AdamW, lr=0.01, bucket_size_mb=bucket_size_mb)
        optimizers = AdamW(groups[0], lr=0.01), sharded
        for step in range(4):
            step_both(step, single, model, optimizers, own=(rank, num_ranks))
            optimizers[1].param_groups[0]["lr"] = optimizers[0].param_groups[0]["lr"] = 0.04 / (step + 1)
        equal_weights(single, model, rtol=1e-4, atol=1e-5)
        assert torch.equal(model.fixed, single.fixed) and torch.equal(model.fc2.bias, single.fc2.bias)
    # Full state goes to an unsharded optimizer and back
    full = optimizers[1].state_dict()
    optimizers[0].load_state_dict(full)
    copy = Toy(True)
    copy.load_state_dict(model.state_dict())
    model = copy
    rest = [parameter for name, parameter in model.named_parameters() if name[2] != "1"]
    again = Zero1Optimizer([{"params": [model.fc1.weight]}, {"params": rest}], AdamW, lr=9.0)
    again.load_state_dict(_through_file(full))
    for step in range(2):
        step_both(step, single, model, (optimizers[0], again), own=(rank, num_ranks))
    equal_weights(single, model, rtol=1e-3, atol=1e-4)
    found["state_bytes"] = sum(v.nbytes for s in again.state.values() for v in s.values() if isinstance(v, Tensor))
    # Low precision with float32 masters: an update too small for bfloat16 is not lost
    low = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    torch.nn.init.ones_(low.weight)
    masters = Zero1Optimizer(low.parameters(), SGD, lr=1e-3)
    for _ in range(8):
        masters.zero_grad()
        low(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        masters.step()
    found["bfloat16"] = low.weight[0, 0].item(), low.weight.dtype
    # A checkpoint loaded after construction is what the next step starts from: masters once took it back
    for write in (lambda: low.load_state_dict({"weight": torch.full((4, 4), 3.0)}), lambda: low.weight.data.fill_(3)):
        write()
        masters.zero_grad()
        low(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        masters.step()
        assert (low.weight == 3).all()
    # Errors
    model = nn.Linear(2, 2)
    zero1, x = Zero1Optimizer(model.parameters(), SGD, lr=0.1), torch.ones(3, 2)
    with zero1.no_sync():
        refused({r"must be called outside of no_sync\(\)": zero1.finish_gradient_synchronization})
    model(x).sum().backward()
    moved = nn.Linear(2, 2)
    lost = Zero1Optimizer(moved.parameters(), AdamW)
    moved.to(torch.float64)
    refused(
        {
            r"a second backward before step\(\): run all but the last one": lambda: model(x).sum().backward(),
            r"a parameter of shape \(2.*\) was moved or cast after": lambda: moved(x.double()).sum().backward(),
            "bucket_size_mb must be positive, got 0": lambda: Zero1Optimizer(
                moved.parameters(), AdamW, bucket_size_mb=0
            ),
            "step takes no closure": lambda: masters.step(lambda: None),
            "Zero1Optimizer cannot add a group": lambda: masters.add_param_group({"params": []}),
            "max_norm must be positive, got -1": lambda: masters.clip_grad_norm_(-1),
            "Adafactor does not update a weight element by": lambda: Zero1Optimizer(moved.parameters(), Adafactor),
            "LBFGS cannot be sharded: it searches along all": lambda: Zero1Optimizer(moved.parameters(), LBFGS),
        }
    )
    del lost
    return found


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_D3_D5_D11_zero1_equals_the_unsharded_optimizer(num_ranks):
    model = Toy(True)
    whole = 2 * sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    for rank in (TWO_RANKS if num_ranks == 2 else THREE_RANKS).results(check_zero1):
        assert rank["state_bytes"] <= whole / num_ranks + 2 * 2 * 4 * 64 * 2  # the padding of two buckets
        assert rank["bfloat16"] == (pytest.approx(1 - 8e-3, abs=4e-3), torch.bfloat16)
        assert rank["bfloat16"][0] < 1


@TWO_RANKS.check
def test_D8_ranks_with_other_shapes_are_refused(rank: int, num_ranks: int) -> None:
    """D8: shapes (4,) and (5,) once trained on in silence, and left an element that no rank updated."""
    for build in (ShardedOptimizer, Zero1Optimizer):
        with pytest.raises(ValueError, match="rank"):
            build([nn.Parameter(torch.zeros(4 + rank))], AdamW)


@TWO_RANKS.check
def test_rows_of_FSDP_are_refused(rank: int, num_ranks: int) -> None:
    """ShardedOptimizer gave all ranks the rows of one, in silence."""
    wrapped = FSDP(nn.Sequential(nn.Linear(4, 2)))
    for build in (ShardedOptimizer, Zero1Optimizer):
        with pytest.raises(ValueError, match=f"FSDP has cut the parameters into rows: do without {build.__name__}"):
            build(wrapped.parameters(), AdamW)


def test_D9_no_process_group_is_said():
    for build in (ShardedOptimizer, Zero1Optimizer):
        with pytest.raises(RuntimeError, match="there is no process group"):
            build(nn.Linear(2, 2).parameters(), AdamW)


# Prediction


def test_the_predicted_bytes_of_10b_fit_two_h200_sharded_and_not_one():
    options: dict[str, Any] = {"attention": "sdpa", "compute_dtype": "bfloat16", "reduce_dtype": "float32"}
    two = fsdp_bytes(MODEL_SIZES["10b"], 4, num_ranks=2, checkpointing=True, **options)
    one = fsdp_bytes(MODEL_SIZES["10b"], 4, num_ranks=1, checkpointing=True, **options)
    assert two.fits(139 * 2**30) and not one.fits(139 * 2**30)
    assert two.parameters + two.gradients + two.optimizer < 0.51 * (one.parameters + one.gradients + one.optimizer)
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
    case = sharding_case(run, num_ranks, None)
    assert check_training("sharded", case, run, rank) <= 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_step, "ShardedOptimizer", NeverSent)
        with pytest.raises(Disagreement, match="changes of weights in 3 steps are off by .* times the bound"):
            check_training("sharded", case, run, rank)


def test_a_frozen_model_has_no_gradients_to_clip(alone_in_a_group):
    model = nn.Linear(3, 3).requires_grad_(False)
    optimizer = Zero1Optimizer(model.parameters(), AdamW, lr=0.1)
    assert optimizer.clip_grad_norm_(1.0) == 0
    optimizer.step()


def test_an_optimizer_that_is_dropped_is_gone_and_its_model_trains_on(alone_in_a_group):
    """Parameters held it through hooks, a cycle that no collector sees: after two trainings both models were there."""
    model = nn.Linear(3, 2)
    optimizer = Zero1Optimizer(model.parameters(), AdamW, lr=1e-3)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    gone = [weakref.ref(optimizer), weakref.ref(optimizer.buckets[0].flat)]
    del optimizer
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    model(torch.ones(2, 3)).sum().backward()
    assert model.bias.grad.tolist() == [2.0, 2.0]


@TWO_RANKS.check
def test_D1_zero1_takes_unused_parameters_for_having_zeros(rank: int, num_ranks: int) -> None:
    """As its docstring says: nobody waits, and weight decay goes on, also of a bucket without any gradient."""
    used, unused = nn.Linear(3, 3), nn.Linear(3, 3)
    parameters = [*used.parameters(), *unused.parameters()]
    optimizer = Zero1Optimizer(parameters, SGD, lr=0.5, weight_decay=0.5, bucket_size_mb=1e-6)
    before = unused.weight.detach().clone()
    used(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert len(optimizer.buckets) == 4 and torch.allclose(unused.weight, 0.75 * before)


@TWO_RANKS.check
def test_zero1_reduces_the_buckets_of_all_groups_as_they_become_full(rank: int, num_ranks: int) -> None:
    """Vectors of all layers in one bucket once kept every matrix waiting for the first layer's."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(4)))
    groups = [[one for one in model.parameters() if (one.ndim > 1) == is_matrix] for is_matrix in (False, True)]
    optimizer = Zero1Optimizer([{"params": group} for group in groups], SGD, lr=0.1, bucket_size_mb=384 / 2**20)
    reduced = []  # when the backward comes to the first layer
    for _ in range(2):
        optimizer.zero_grad()
        x = model[0](torch.ones(2, 8))
        x.register_hook(lambda _: reduced.append(len(optimizer.buckets) - len(optimizer._queue.waiting)))
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
    assert alone == {(problems[0], "unsharded"), *((problems[1], name) for name in ("unsharded", "fsdp", "torch_fsdp"))}


@pytest.mark.parametrize("implementation", ["fsdp", "torch_fsdp"])
def test_a_single_rank_shards_nothing_and_sends_nothing(implementation):
    run = RunConfig(scale="tiny", device="cpu")
    cell = sharding_cell(sharding_case(run, 1, None), implementation)
    found = {(one.row.mode, one.row.quantity): one for one in ShardingExperiment().measure(cell, run)}
    assert found["train_step", "time"].error <= 1 and found["train_step", "communication_time"].samples == [0]


def test_what_zero1_would_average_twice_or_not_see_is_refused(alone_in_a_group):
    """Both trained on wrongly in silence."""
    wrapped = OverlapDDP(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="OverlapDDP averages the gradients already: give Zero1Optimizer the plain mod"):
        Zero1Optimizer(wrapped.parameters(), SGD, lr=0.1)
    model = wrapped.module
    del wrapped
    optimizer = Zero1Optimizer(model.parameters(), SGD, lr=0.1)
    model(torch.ones(3, 2)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    with pytest.raises(RuntimeError, match="a gradient was changed after it was averaged.* clip_grad_norm_ of the opt"):
        optimizer.step()
