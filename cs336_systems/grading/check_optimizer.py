"""Checks of section 6: `get_sharded_optimizer(params, optimizer_cls, **kwargs)`.

The sharded optimizer keeps a share of the state on each rank. The checks run two ranks on gloo and
the CPU, with the same gradients on both. State is counted on the instances of `optimizer_cls` that
the code under test makes. So wrappers that hold an optimizer and wrappers that inherit from one are
treated alike.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cs336_systems.grading.counting import recording, state_elements
from cs336_systems.grading.reference_training import (
    STEPS,
    Stack,
    Toy,
    equal_on_all_ranks,
    largest_difference,
    regression_batch,
    seeded,
    squared_error,
)
from cs336_systems.grading.registry import Adapters, check

PROBLEM = "optimizer_state_sharding"
SHARDED = "shards_the_state"  # the check that must pass before the others earn points
SETTINGS: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}
BOUND = 1e-6  # largest error of a parameter after training


def train(
    model: nn.Module,
    optimizer: Any,
    first: int = 0,
    steps: int = STEPS,
    width: tuple[int, int] = (10, 5),
) -> None:
    """Train `model` for `steps` steps on the batches from number `first` on.

    `width` is the number of a batch's inputs and outputs.
    """
    for step in range(first, first + steps):
        optimizer.zero_grad()
        squared_error(model, regression_batch(step, *width)).backward()
        optimizer.step()


def assert_equal_training(ours: nn.Module, single: nn.Module, when: str) -> None:
    """Assert that `ours` has the parameters of `single` within BOUND, and the same on all ranks."""
    error, name = largest_difference(dict(ours.named_parameters()), dict(single.named_parameters()))
    assert error <= BOUND, f"{name} differs by {error:.2g} from the unsharded optimizer's {when}"
    for name, parameter in ours.named_parameters():
        assert equal_on_all_ranks(parameter.detach()), f"{name} differs between the ranks {when}"


def groups(model: Any) -> list[dict[str, Any]]:
    """Return two parameter groups with different settings; each parameter is in one of them."""
    return [
        {"params": [model.first.weight, model.first.bias, model.fixed], "lr": 0.05},
        {
            "params": [model.shared.weight, *model.norm.parameters(), *model.last.parameters()],
            "weight_decay": 0.0,
        },
    ]


@check(PROBLEM, num_ranks=2)
def shards_the_state(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """Each of two ranks keeps about half of AdamW's state, together they keep it once."""
    model = seeded(Stack)
    recorded, instances = recording(torch.optim.AdamW)
    optimizer = adapters.call("get_sharded_optimizer", model.parameters(), recorded, **SETTINGS)
    train(model, optimizer, width=(100, 100))
    assert instances, "optimizer_cls was never constructed"
    whole = 2 * sum(parameter.numel() for parameter in model.parameters())
    kept = torch.tensor([state_elements(instances)])
    shares = [torch.empty_like(kept) for _ in range(num_ranks)]
    dist.all_gather(shares, kept)
    held = [share.item() for share in shares]
    text = ", ".join(f"{elements / whole:.0%}" for elements in held)
    assert sum(held) >= 0.99 * whole, f"the ranks keep {text} of AdamW's state: less than all of it"
    assert max(held) <= 0.75 * whole, f"the ranks keep {text} of AdamW's state: it is not sharded"
    assert sum(held) <= 1.1 * whole, f"the ranks keep {text} of AdamW's state: more than once"


@check(PROBLEM, num_ranks=2, needs=SHARDED)
def equals_the_unsharded_optimizer(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """AdamW on an iterator of parameters, a frozen and a shared one among them: the unsharded one's
    weights.
    """
    single, ours = seeded(Toy), seeded(Toy)
    reference = torch.optim.AdamW(single.parameters(), **SETTINGS)
    sharded = adapters.call(
        "get_sharded_optimizer", ours.parameters(), torch.optim.AdamW, **SETTINGS
    )
    for first in (0, STEPS):
        train(single, reference, first)
        train(ours, sharded, first)
        assert_equal_training(ours, single, f"after {first + STEPS} steps")


@check(PROBLEM, num_ranks=2, needs=SHARDED)
def takes_parameter_groups(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """Groups with settings of their own, as dictionaries."""
    single, ours = seeded(Toy), seeded(Toy)
    reference = torch.optim.AdamW(groups(single), **SETTINGS)
    train(single, reference)
    train(ours, adapters.call("get_sharded_optimizer", groups(ours), torch.optim.AdamW, **SETTINGS))
    assert_equal_training(ours, single, "with two parameter groups")


@check(PROBLEM, num_ranks=2, needs=SHARDED)
def wraps_any_optimizer(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """SGD with momentum, given as the class and its keyword arguments."""
    single, ours = seeded(Toy), seeded(Toy)
    settings: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}
    train(single, torch.optim.SGD(single.parameters(), **settings))
    sharded = adapters.call("get_sharded_optimizer", ours.parameters(), torch.optim.SGD, **settings)
    train(ours, sharded)
    assert_equal_training(ours, single, "with SGD")


@check(PROBLEM, num_ranks=2, needs=SHARDED)
def adds_parameter_groups(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """`add_param_group` during training: the new parameters are trained, and assigned among the
    ranks.
    """
    single, ours = seeded(Toy), seeded(Toy)
    (first, second), (our_first, our_second) = groups(single), groups(ours)
    recorded, instances = recording(torch.optim.AdamW)
    reference = torch.optim.AdamW([first], **SETTINGS)
    sharded = adapters.call("get_sharded_optimizer", [our_first], recorded, **SETTINGS)

    for model, optimizer, later in ((single, reference, second), (ours, sharded, our_second)):
        train(model, optimizer)
        optimizer.add_param_group(later)
        train(model, optimizer, STEPS)
    assert_equal_training(ours, single, "after add_param_group")

    kept = torch.tensor([state_elements(instances)])
    dist.all_reduce(kept)
    whole = 2 * sum(p.numel() for p in ours.parameters() if p.requires_grad)
    assert kept.item() <= 1.1 * whole, (
        "after add_param_group the ranks together keep AdamW's state "
        f"{kept.item() / whole:.1f} times"
    )


@check(PROBLEM, num_ranks=2, needs=SHARDED)
def passes_the_closure_on(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """`step(closure)` gives the closure to the wrapped optimizer, which computes the gradients by
    it.
    """
    single, ours = seeded(Toy), seeded(Toy)
    reference = torch.optim.SGD(single.parameters(), lr=0.05)
    sharded = adapters.call("get_sharded_optimizer", ours.parameters(), torch.optim.SGD, lr=0.05)
    for model, optimizer in ((single, reference), (ours, sharded)):

        def closure(model: nn.Module = model, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = squared_error(model, regression_batch(0))
            loss.backward()
            return loss

        optimizer.step(closure)
    assert_equal_training(ours, single, "after a step whose gradients its closure computes")


class Scaled(torch.optim.SGD):
    """SGD whose `step` takes a factor for the learning rate of that step as a keyword argument."""

    def step(self, closure: Any = None, *, factor: float = 1.0) -> Any:
        for group in self.param_groups:
            group["lr"] = 0.05 * factor
        return super().step(closure)


@check(PROBLEM, num_ranks=2, needs=SHARDED)
def passes_keywords_of_a_step_on(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """`step(**kwargs)` gives its keyword arguments to the wrapped optimizer."""
    single, ours = seeded(Toy), seeded(Toy)
    reference = Scaled(single.parameters(), lr=0.05)
    sharded = adapters.call("get_sharded_optimizer", ours.parameters(), Scaled, lr=0.05)
    for model, optimizer in ((single, reference), (ours, sharded)):
        squared_error(model, regression_batch(0)).backward()
        optimizer.step(factor=0.5)
    assert_equal_training(ours, single, "after step(factor=0.5)")


@check(PROBLEM, num_ranks=2, beyond=True)
def follows_the_learning_rate(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """A learning rate set in `param_groups` between steps is used."""
    single, ours = seeded(Toy), seeded(Toy)
    reference = torch.optim.AdamW(single.parameters(), **SETTINGS)
    sharded = adapters.call(
        "get_sharded_optimizer", ours.parameters(), torch.optim.AdamW, **SETTINGS
    )
    for step in range(3):
        for model, optimizer in ((single, reference), (ours, sharded)):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (step + 1)
            train(model, optimizer, step, 1)
    assert_equal_training(ours, single, "with a schedule")


@check(PROBLEM, num_ranks=2, beyond=True)
def balances_unequal_parameters(adapters: Adapters, rank: int, num_ranks: int) -> None:
    """Parameters of very different sizes are spread by size: no rank has more than 60 % of the
    state.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(100, width) for width in (90, 10, 90, 10, 10, 90, 10, 90)))
    recorded, instances = recording(torch.optim.AdamW)
    optimizer = adapters.call("get_sharded_optimizer", model.parameters(), recorded, **SETTINGS)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    share = state_elements(instances) / (
        2 * sum(parameter.numel() for parameter in model.parameters())
    )
    assert share <= 0.6, f"rank {rank} keeps {share:.0%} of the state"
