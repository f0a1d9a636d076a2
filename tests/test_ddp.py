"""The four data-parallel wrappers against one process that has the whole batch.

`test_equality.py` has the wide family of models and uses, `graded/` the course's checks; here are awkward parameters,
several numbers of ranks, what is sent and when, and errors. Every rank computes the one-process result itself, in
float64, and compares.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.distributed.ddp import DataParallel, dense_gradient
from cs336_systems.distributed.ddp_bucketed import BucketedDDP, plan_buckets
from cs336_systems.distributed.ddp_flat import FlatDDP
from cs336_systems.distributed.ddp_naive import NaiveDDP
from cs336_systems.distributed.ddp_overlap import OverlapDDP
from cs336_systems.distributed.launch import RankError, run_ranks
from cs336_systems.model import AdamW
from tests.one_job import OneJob
from tests.sharding_models import RaiseInBackward

WRAPPERS: dict[str, Callable[..., DataParallel]] = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlap": OverlapDDP,
    "bucketed, one": lambda module, **options: BucketedDDP(module, None, **options),
    "bucketed, one a parameter": lambda module, **options: BucketedDDP(module, 0.0001, **options),
    "bucketed, several": lambda module, **options: BucketedDDP(module, 0.001, **options),
}
STEPS = 4
SAMPLES = 12  # of the whole batch; divisible by every number of ranks tested
WIDTH = 6


class Model(nn.Module):
    """Tied, frozen, 0-d and empty parameters, a buffer, mixed dtypes, and a branch that may go unused."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.third = nn.Linear(WIDTH, WIDTH, bias=False)
        self.third.weight = self.second.weight
        self.branch = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(()) + 2)
        self.empty = nn.Parameter(torch.randn(0, 4))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.register_buffer("shift", torch.randn(WIDTH))
        self.double()
        self.single = nn.Parameter(torch.randn(WIDTH))  # float32 among float64

    def forward(self, x: Tensor, branch: bool = True) -> Tensor:
        x = self.first(x + self.frozen + self.shift).tanh()
        x = self.third(self.second(x).tanh()).tanh() * self.scale + self.empty.sum()
        rounded = self.single.double()
        x = x + (rounded - rounded.detach())  # gets a gradient; its float32 roundings do not reach the others
        return self.branch(x) if branch else x


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return tuple(torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def mine(tensor: Tensor) -> Tensor:
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def loss_of(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Tensor:
    return nn.functional.mse_loss(model(x, **options), y)


def assert_same_gradients(wrapped: DataParallel, alone: nn.Module) -> None:
    for (name, parameter), expected in zip(wrapped.module.named_parameters(), alone.parameters()):
        assert (parameter.grad is None) == (expected.grad is None), name
        if expected.grad is not None:
            bound = 1e-6 if expected.dtype == torch.float32 else 1e-9
            torch.testing.assert_close(
                parameter.grad, expected.grad, atol=bound / 1e3, rtol=bound, msg=lambda text, n=name: f"{n}: {text}"
            )


def leave_parameters_unused(wrapped: DataParallel, alone: nn.Module) -> None:
    """The branch is used by one rank, by none, by all, in turn; under `no_sync`, by a micro-batch of its own."""
    optimizers = [AdamW(model.parameters(), lr=0.05, weight_decay=0.1) for model in (wrapped, alone)]
    uses: list[tuple[int, ...]] = [(0,), (), (0, 1, 2, 3), (1,), (0,), ()]
    ranks = dist.get_world_size()
    for step, users in enumerate(uses):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for part in range(2):
            x, y = batch(10 * step + part)
            for rank in range(ranks):
                own = loss_of(alone, x.chunk(ranks)[rank], y.chunk(ranks)[rank], branch=rank in users and part == 0)
                (own / ranks).backward()
            with wrapped.no_sync() if part == 0 else nullcontext():
                used = dist.get_rank() in users and part == 0
                loss_of(wrapped, mine(x), mine(y), branch=used).backward()
        wrapped.finish_gradient_synchronization()
        assert_same_gradients(wrapped, alone)
        for optimizer in optimizers:
            optimizer.step()
    for parameter, expected in zip(wrapped.parameters(), alone.parameters()):
        torch.testing.assert_close(parameter, expected, atol=1e-6, rtol=1e-6)


def skip_a_step(wrapped: DataParallel, alone: nn.Module) -> None:
    """Gradients of a backward that all ranks throw away, some on their way; then two losses, as of adversaries: both
    forwards first, and each backward with its own synchronisation."""
    loss_of(wrapped, *batch(50)).backward()
    wrapped.skip_step()
    assert all(parameter.grad is None for parameter in wrapped.parameters())
    for step in range(STEPS):
        losses = [
            [loss_of(model, *map(cut, batch(place))) for place in (step, step + 50)]
            for model, cut in ((wrapped, mine), (alone, lambda whole: whole))
        ]
        for loss, expected in zip(*losses):
            wrapped.zero_grad()
            alone.zero_grad()
            loss.backward()
            expected.backward()
            wrapped.finish_gradient_synchronization()
            assert_same_gradients(wrapped, alone)


SCENARIOS = (leave_parameters_unused, skip_a_step)


def play(rank: int, ranks: int, wrapper: str) -> int:
    for scenario in SCENARIOS:
        options = {"find_unused_parameters": scenario is leave_parameters_unused}
        wrapped, alone = WRAPPERS[wrapper](Model(seed=rank), **options), Model(seed=0)
        try:
            scenario(wrapped, alone)
        except AssertionError as error:
            raise AssertionError(f"{scenario.__name__} on rank {rank}: {error}") from error
    return len(SCENARIOS)


def play_all(rank: int, ranks: int) -> None:
    for wrapper in WRAPPERS:
        play(rank, ranks, wrapper)


# What is sent, and when


@contextmanager
def recorded_sizes() -> Iterator[list[int]]:
    """The elements of each all-reduce that any process group is asked for."""
    sizes: list[int] = []
    original = dist.ProcessGroup.__dict__["allreduce"]  # the method; as an attribute of the class it is a function

    def allreduce(group: dist.ProcessGroup, tensors: list[Tensor], *options: Any) -> Any:
        sizes.append(sum(tensor.numel() for tensor in tensors))
        return original.__get__(group)(tensors, *options)

    dist.ProcessGroup.allreduce = allreduce  # type: ignore[assignment]
    try:
        yield sizes
    finally:
        dist.ProcessGroup.allreduce = original  # type: ignore[method-assign]


def record_sends(rank: int, ranks: int, order: tuple[int, ...]) -> dict[str, list[tuple[list[int], list[int]]]]:
    """For each wrapper and each of two steps the elements of every all-reduce: during the backward, and after it.

    The layers run in `order`.
    """
    sent: dict[str, list[tuple[list[int], list[int]]]] = {}
    for name, wrap in WRAPPERS.items():
        layers = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 32), nn.Linear(32, 4)])
        wrapped = wrap(layers)
        sent[name] = []
        for _ in range(2):
            wrapped.zero_grad()
            x: Any = 0.0
            for index in order:  # a chain that has no other order backwards
                x = layers[index](torch.ones(2, layers[index].in_features) + x).sum()
            with recorded_sizes() as sizes:
                x.backward()
                during = len(sizes)
                wrapped.finish_gradient_synchronization()
            sent[name].append((sizes[:during], sizes[during:]))
    return sent


TWO_RANKS = OneJob(2, (record_sends, (0, 1, 2)), (record_sends, (2, 1, 0)), *((play, wrapper) for wrapper in WRAPPERS))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_D2_two_ranks_train_like_one_process(wrapper):
    assert TWO_RANKS.results(play, wrapper) == [len(SCENARIOS)] * 2


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_D3_D9_any_number_of_ranks(ranks):
    run_ranks(play_all, ranks, timeout_s=60)


def test_one_collective_a_tensor_a_dtype_or_a_bucket_and_as_early_as_possible():
    (first, second) = TWO_RANKS.results(record_sends, (0, 1, 2))
    assert first == second, "another order on another rank hangs"
    sizes = [8 * 16, 16, 16 * 32, 32, 32 * 4, 4]
    assert first["naive"] == [([], sizes)] * 2
    assert first["flat"] == [([], [sum(sizes)])] * 2
    for name in ("overlap", "bucketed, one a parameter"):
        assert first[name][0] == (sizes[::-1], []), "the last layer's come first"
        assert {*first[name][1][0][:2]} == {4, 128} and not first[name][1][1]
    assert first["bucketed, one"] == [([sum(sizes)], [])] * 2
    # At most 1048 bytes, 262 floats: the last layer with the bias before it, then what is too large to share.
    assert first["bucketed, several"] == [([4 + 128 + 32, 16 * 32, 16 + 8 * 16], [])] * 2


def test_the_second_step_sends_in_the_order_of_the_first_ones_gradients():
    """Where layers do not run in the order of parameters, the first step can send little before its backward's end."""
    (first, second) = TWO_RANKS.results(record_sends, (2, 1, 0))
    assert first == second
    for name in ("overlap", "bucketed, one a parameter"):
        (early, late), (early_again, late_again) = first[name]
        assert early[:2] == [4, 128] and not late
        assert {*early_again[:2]} == {16, 8 * 16} and {*early_again[-2:]} == {4, 128} and not late_again


def test_buckets_go_backwards_fill_up_and_do_not_mix_dtypes():
    def parameter(size: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
        return nn.Parameter(torch.zeros(size, dtype=dtype))

    parameters = [parameter(8), parameter(8), parameter(100), parameter(3), parameter(8, torch.float16), parameter(8)]
    assert plan_buckets(parameters, limit_bytes=64) == [[5], [4], [3], [2], [1, 0]]
    assert plan_buckets(parameters, limit_bytes=63) == [[5], [4], [3], [2], [1], [0]]
    assert plan_buckets(parameters, float("inf")) == [[5], [4], [3, 2, 1, 0]]
    assert plan_buckets([], 64) == []


# In one process


def test_a_gradient_with_a_graph_is_sent_without_it():
    parameter = nn.Parameter(torch.ones(2))
    parameter.pow(3).sum().backward(create_graph=True)
    gradient = dense_gradient(parameter)
    assert parameter.grad.requires_grad and not gradient.requires_grad
    assert gradient.data_ptr() == parameter.grad.data_ptr()


def test_gradients_are_aligned_views_of_their_buckets(alone_in_a_group):
    wrapped = BucketedDDP(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)), None)
    flat = wrapped.buckets[0].flat
    for _ in range(2):
        wrapped.zero_grad(set_to_none=True)
        wrapped(torch.ones(3, 3)).sum().backward()
        wrapped.finish_gradient_synchronization()
        for parameter in wrapped.parameters():
            assert parameter.grad.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
            assert parameter.grad.data_ptr() % 16 == 0


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_is_freed_and_its_model_may_be_wrapped_and_copied_again(wrapper, alone_in_a_group):
    """Neither the group's transport nor its options can be copied, so that none may be held between steps."""
    model = nn.Linear(3, 2)
    wrapped = WRAPPERS[wrapper](model)
    gone = weakref.ref(wrapped)
    del wrapped
    gc.collect()
    assert gone() is None
    again = WRAPPERS[wrapper](model)
    for _ in range(2):
        again(torch.ones(2, 3)).sum().backward()
        again.finish_gradient_synchronization()
        assert model.bias.grad.tolist() == [2.0, 2.0]
        again.zero_grad()
    copied = deepcopy(again)
    copied(torch.ones(2, 3)).sum().backward()
    copied.finish_gradient_synchronization()
    assert copied.module.bias.grad.tolist() == [2.0, 2.0] and model.bias.grad is None


# Errors


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_D9_wrapping_needs_a_module_and_a_process_group(wrapper):
    with pytest.raises(TypeError, match="module must be a torch.nn.Module, got list"):
        WRAPPERS[wrapper]([])
    with pytest.raises(RuntimeError, match="there is no process group: start the ranks with run_ranks"):
        WRAPPERS[wrapper](nn.Linear(2, 2))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_D1_an_unused_parameter_is_named(wrapper, alone_in_a_group):
    """By default there is no vote, and a rank that went on without the gradient would leave the others waiting."""
    wrapped = WRAPPERS[wrapper](nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)}))
    message = r"'unused.weight' has no gradient on this rank, as 2 of 4: use .* or pass find_unused_parameters=True"
    wrapped.module["used"](torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=message):
        wrapped.finish_gradient_synchronization()


@pytest.mark.parametrize("size", [0, -1.0, float("nan"), float("inf")])
def test_a_bucket_needs_a_positive_finite_size(size, alone_in_a_group):
    with pytest.raises(ValueError, match=f"bucket_size_mb must be positive and finite, or None, got {size}"):
        BucketedDDP(nn.Linear(2, 2), size)


@pytest.mark.parametrize("wrapper", ["overlap", "bucketed, one"])
def test_a_second_backward_is_refused_and_the_way_out_is_told(wrapper, alone_in_a_group):
    """Ranks that never synchronise would otherwise part without a word."""
    wrapped = WRAPPERS[wrapper](nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    first, last = wrapped.module
    with pytest.raises(ArithmeticError, match="planted"):
        last(RaiseInBackward.apply(first(torch.ones(1, 2)))).sum().backward()
    wrapped.zero_grad()
    for message in (r"call skip_step\(\) after one that raised", r"gradient of parameter '1\.\w+' arrived twice in a"):
        with pytest.raises(RuntimeError, match=message):
            wrapped(torch.ones(1, 2)).sum().backward()
        wrapped.skip_step()
        wrapped(torch.ones(1, 2)).sum().backward()
    wrapped.finish_gradient_synchronization()
    assert torch.equal(last.bias.grad, torch.ones(2))


def fail_in_a_step(rank: int, ranks: int) -> None:
    wrapped = OverlapDDP(Model(seed=0))
    for step in range(3):
        if rank == 1 and step == 2:
            raise ArithmeticError("planted in the third step")
        loss_of(wrapped, *batch(step)).backward()
        wrapped.finish_gradient_synchronization()
        wrapped.zero_grad()


def test_D6_a_rank_that_fails_in_a_step_ends_the_training_with_its_reason():
    with pytest.raises(RankError, match="(?s)rank 1 of 2 failed:.*planted in the third step"):
        run_ranks(fail_in_a_step, 2)
