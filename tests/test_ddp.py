"""The four data-parallel wrappers against one process that has the whole batch.

Every rank computes the one-process result itself, in float64, and compares; so a scenario is a function of a wrapped
model and an identical unwrapped one.
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
from torch.utils.checkpoint import checkpoint

from cs336_systems.distributed.ddp import DataParallel, LaunchOrder, dense_gradient
from cs336_systems.distributed.ddp_bucketed import BucketedDDP, plan_buckets
from cs336_systems.distributed.ddp_flat import FlatDDP
from cs336_systems.distributed.ddp_naive import NaiveDDP
from cs336_systems.distributed.ddp_overlap import OverlapDDP
from cs336_systems.distributed.launch import RankError, run_ranks
from cs336_systems.model import AdamW, clip_gradients
from tests import adapters
from tests.one_job import OneJob

WRAPPERS: dict[str, Callable[[nn.Module], DataParallel]] = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlap": OverlapDDP,
    "bucketed, one": lambda module: BucketedDDP(module, None),
    "bucketed, one a parameter": lambda module: BucketedDDP(module, 0.0001),
    "bucketed, several": lambda module: BucketedDDP(module, 0.001),
}
STEPS = 4  # the first is a rehearsal without overlap
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
        self.never = nn.Parameter(torch.randn(3))
        self.scale = nn.Parameter(torch.randn(()) + 2)
        self.empty = nn.Parameter(torch.randn(0, 4))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.register_buffer("shift", torch.randn(WIDTH))
        self.double()
        self.single = nn.Parameter(torch.randn(WIDTH))  # float32 among float64

    def forward(self, x: Tensor, branch: bool = True, checkpointing: bool | None = None) -> Tensor:
        def run(layer: nn.Module, x: Tensor) -> Tensor:
            if checkpointing is None:
                return layer(x).tanh()
            return checkpoint(lambda x: layer(x).tanh(), x, use_reentrant=checkpointing)

        x = run(self.first, x + self.frozen + self.shift)
        x = run(self.third, run(self.second, x)) * self.scale + self.empty.sum()
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
            tolerance = (
                {"atol": 1e-6, "rtol": 1e-6} if expected.dtype == torch.float32 else {"atol": 1e-12, "rtol": 1e-9}
            )
            torch.testing.assert_close(
                parameter.grad, expected.grad, **tolerance, msg=lambda text, n=name: f"{n}: {text}"
            )


Pair = tuple[DataParallel, nn.Module]
Scenario = Callable[[DataParallel, nn.Module], None]


def train(wrapped: DataParallel, alone: nn.Module, *, set_to_none: bool = True, **options: Any) -> None:
    """AdamW with decay, clipped: equal parameters after several steps."""
    optimizers = [AdamW(model.parameters(), lr=0.05, weight_decay=0.1) for model in (wrapped, alone)]
    for step in range(STEPS):
        x, y = batch(step)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(alone, x, y, **options).backward()
        loss_of(wrapped, mine(x), mine(y), **options).backward()
        wrapped.finish_gradient_synchronization()
        assert_same_gradients(wrapped, alone)
        # Not the float32 one: by the common norm its roundings would reach all the others.
        norms = [
            clip_gradients([p for p in model.parameters() if p.dtype == torch.float64], 0.1)
            for model in (wrapped, alone)
        ]
        torch.testing.assert_close(*norms)
        for optimizer in optimizers:
            optimizer.step()
    for parameter, expected in zip(wrapped.parameters(), alone.parameters()):
        torch.testing.assert_close(parameter, expected, atol=1e-6, rtol=1e-6)


def keep_gradients(wrapped: DataParallel, alone: nn.Module) -> None:
    train(wrapped, alone, set_to_none=False)


def checkpoint_reentrantly(wrapped: DataParallel, alone: nn.Module) -> None:
    """The tied weight's hook runs twice in one backward; reduced after the first, half its gradient was lost."""
    train(wrapped, alone, checkpointing=True)


def checkpoint_without_reentry(wrapped: DataParallel, alone: nn.Module) -> None:
    train(wrapped, alone, checkpointing=False)


def accumulate(wrapped: DataParallel, alone: nn.Module) -> None:
    """Three micro-batches, the last synchronised; one of them leaves the branch out, and the last one always does."""
    for step in range(STEPS):
        wrapped.zero_grad()
        alone.zero_grad()
        parts = [batch(10 * step + part) for part in range(3)]
        for part, (x, y) in enumerate(parts):
            loss_of(alone, x, y, branch=part == 1).backward()
        with wrapped.no_sync():
            for part, (x, y) in enumerate(parts[:2]):
                loss_of(wrapped, mine(x), mine(y), branch=part == 1).backward()
        x, y = parts[2]
        loss_of(wrapped, mine(x), mine(y), branch=False).backward()
        wrapped.finish_gradient_synchronization()
        assert_same_gradients(wrapped, alone)


def two_forwards_one_backward(wrapped: DataParallel, alone: nn.Module) -> None:
    for step in range(STEPS):
        wrapped.zero_grad()
        alone.zero_grad()
        (x, y), (other_x, other_y) = batch(step), batch(step + 50)
        (loss_of(alone, x, y) + loss_of(alone, other_x, other_y)).backward()
        (loss_of(wrapped, mine(x), mine(y)) + loss_of(wrapped, mine(other_x), mine(other_y))).backward()
        wrapped.finish_gradient_synchronization()
        assert_same_gradients(wrapped, alone)


def leave_parameters_unused(wrapped: DataParallel, alone: nn.Module) -> None:
    """The branch is used by all ranks, by one, by none, in turn: in the rehearsal, too."""
    optimizers = [AdamW(model.parameters(), lr=0.05, weight_decay=0.1) for model in (wrapped, alone)]
    uses: list[tuple[int, ...]] = [(0,), (), (0, 1, 2, 3), (1,), (0,), ()]
    ranks = dist.get_world_size()
    for step, users in enumerate(uses):
        x, y = batch(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        for rank in range(ranks):
            part = loss_of(alone, x.chunk(ranks)[rank], y.chunk(ranks)[rank], branch=rank in users)
            (part / ranks).backward()
        loss_of(wrapped, mine(x), mine(y), branch=dist.get_rank() in users).backward()
        wrapped.finish_gradient_synchronization()
        assert_same_gradients(wrapped, alone)
        for optimizer in optimizers:
            optimizer.step()
    for parameter, expected in zip(wrapped.parameters(), alone.parameters()):
        torch.testing.assert_close(parameter, expected, atol=1e-6, rtol=1e-6)


def overflow_on_one_rank(wrapped: DataParallel, alone: nn.Module) -> None:
    """A loss-scaled gradient that overflows on the last rank makes every rank skip the step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    before = deepcopy(wrapped.module.state_dict())
    for step, overflows in enumerate((False, True, False)):
        optimizer.zero_grad()
        x, y = batch(step)
        loss = loss_of(wrapped, mine(x), mine(y))
        if overflows and dist.get_rank() == dist.get_world_size() - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        wrapped.finish_gradient_synchronization()
        scaler.step(optimizer)
        scaler.update()
        after = wrapped.module.state_dict()
        assert torch.equal(after["first.weight"], before["first.weight"]) == overflows
        before = deepcopy(after)
    assert scaler.get_scale() == 1.0


def keep_names_and_state(wrapped: DataParallel, alone: nn.Module) -> None:
    names = [name for name, _ in alone.named_parameters()]
    assert [name.removeprefix("module.") for name, _ in wrapped.named_parameters()] == names
    state = wrapped.module.state_dict()
    assert state.keys() == alone.state_dict().keys()
    for name, expected in alone.state_dict().items():
        assert torch.equal(state[name], expected), name
    assert wrapped.module.third.weight is wrapped.module.second.weight


def evaluate_without_gradients(wrapped: DataParallel, alone: nn.Module) -> None:
    with torch.no_grad():
        assert torch.equal(wrapped(batch(0)[0]), alone(batch(0)[0]))
    train(wrapped, alone)


def evaluate_before_finishing(wrapped: DataParallel, alone: nn.Module) -> None:
    """A forward between backward and finish, with a graph or without one, is none of the next backward's."""
    for step in range(STEPS):
        x, y = batch(step)
        for model in (wrapped, alone):
            model.zero_grad()
        loss_of(alone, x, y).backward()
        loss_of(wrapped, mine(x), mine(y)).backward()
        loss_of(wrapped, x, y)
        with torch.no_grad():
            loss_of(wrapped, x, y)
        wrapped.finish_gradient_synchronization()
        assert_same_gradients(wrapped, alone)


def checkpoint_the_wrapper(wrapped: DataParallel, alone: nn.Module) -> None:
    """Its forward runs again in the backward, the second time when gradients of the first have arrived."""

    def loss(model: nn.Module, x: Tensor, y: Tensor, use_reentrant: bool) -> Tensor:
        parts = [checkpoint(model, part, use_reentrant=use_reentrant) for part in x.detach().requires_grad_().chunk(2)]
        return nn.functional.mse_loss(torch.cat(parts), y)

    for step, use_reentrant in enumerate((True, False) * 2):
        x, y = batch(step)
        for model in (wrapped, alone):
            model.zero_grad()
        loss(alone, x, y, use_reentrant).backward()
        loss(wrapped, mine(x), mine(y), use_reentrant).backward()
        wrapped.finish_gradient_synchronization()
        assert_same_gradients(wrapped, alone)


def one_backward_for_each_of_two_losses(wrapped: DataParallel, alone: nn.Module) -> None:
    """As a pair of adversaries has them: both forwards first, and each backward with its own synchronisation."""
    for step in range(STEPS):
        (x, y), (other_x, other_y) = batch(step), batch(step + 50)
        losses = [
            (loss_of(model, cut(x), cut(y)), loss_of(model, cut(other_x), cut(other_y)))
            for model, cut in ((wrapped, mine), (alone, lambda whole: whole))
        ]
        for loss, expected in zip(*losses):
            wrapped.zero_grad()
            alone.zero_grad()
            loss.backward()
            expected.backward()
            wrapped.finish_gradient_synchronization()
            assert_same_gradients(wrapped, alone)


def two_backwards_one_finish(wrapped: DataParallel, alone: nn.Module) -> None:
    """Outside of no_sync: the first step has counted two arrivals a gradient, and nothing is sent before both."""
    for step in range(STEPS):
        (x, y), (other_x, other_y) = batch(step), batch(step + 50)
        for model, cut in ((wrapped, mine), (alone, lambda whole: whole)):
            model.zero_grad()
            loss_of(model, cut(x), cut(y)).backward()
            loss_of(model, cut(other_x), cut(other_y)).backward()
        wrapped.finish_gradient_synchronization()
        assert_same_gradients(wrapped, alone)


def step_without_a_backward(wrapped: DataParallel, alone: nn.Module) -> None:
    """No rank has a gradient: they stay None, and the rehearsal of the next step is not spoiled for long."""
    wrapped.finish_gradient_synchronization()
    assert all(parameter.grad is None for parameter in wrapped.parameters())
    train(wrapped, alone)


SCENARIOS: tuple[Scenario, ...] = (
    keep_names_and_state, train, keep_gradients, checkpoint_reentrantly, checkpoint_without_reentry, accumulate,
    two_forwards_one_backward, leave_parameters_unused, overflow_on_one_rank, evaluate_without_gradients,
    evaluate_before_finishing, checkpoint_the_wrapper, one_backward_for_each_of_two_losses, two_backwards_one_finish,
    step_without_a_backward,
)  # fmt: skip


def play(rank: int, ranks: int, wrapper: str, scenarios: tuple[Scenario, ...]) -> int:
    for scenario in scenarios:
        wrapped, alone = WRAPPERS[wrapper](Model(seed=rank)), Model(seed=0)
        try:
            scenario(wrapped, alone)
        except AssertionError as error:
            raise AssertionError(f"{scenario.__name__} on rank {rank}: {error}") from error
    return len(scenarios)


@pytest.mark.parametrize(
    "wrapper",
    [
        pytest.param("naive", marks=pytest.mark.problem("naive_ddp", 5)),
        "flat",
        pytest.param("overlap", marks=pytest.mark.problem("ddp_overlap_individual_parameters", 5)),
        pytest.param("bucketed, one", marks=pytest.mark.problem("ddp_overlap_bucketed", 8)),
        pytest.param("bucketed, one a parameter", marks=pytest.mark.problem("ddp_overlap_bucketed", 8)),
        pytest.param("bucketed, several", marks=pytest.mark.problem("ddp_overlap_bucketed", 8)),
    ],
)
def test_two_ranks_train_like_one_process(wrapper):
    assert TWO_RANKS.results(play, wrapper, SCENARIOS) == [len(SCENARIOS)] * 2


def play_all(rank: int, ranks: int) -> None:
    for wrapper in WRAPPERS:
        play(rank, ranks, wrapper, (train, leave_parameters_unused))


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_any_number_of_ranks(ranks):
    run_ranks(play_all, ranks, timeout_s=60)


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


def record_sends(rank: int, ranks: int) -> dict[str, tuple[list[int], list[int]]]:
    """For each wrapper the elements of every all-reduce of one step: those sent during the backward, those after it."""
    sent = {}
    for name, wrap in WRAPPERS.items():
        wrapped = wrap(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 32), nn.Linear(32, 4)))
        for _ in range(2):  # the second is not a rehearsal
            wrapped.zero_grad()
            with recorded_sizes() as sizes:
                wrapped(torch.ones(2, 8)).sum().backward()
                during = len(sizes)
                wrapped.finish_gradient_synchronization()
        sent[name] = (sizes[:during], sizes[during:])
    return sent


TWO_RANKS = OneJob(2, (record_sends,), *((play, wrapper, SCENARIOS) for wrapper in WRAPPERS))


def test_one_collective_a_tensor_a_dtype_or_a_bucket_and_as_early_as_possible():
    (first, second) = TWO_RANKS.results(record_sends)
    assert first == second, "another order on another rank hangs"
    sizes = [8 * 16, 16, 16 * 32, 32, 32 * 4, 4]
    vote = [len(sizes)]
    assert first["naive"] == ([], sizes + vote)
    assert first["flat"] == ([], [sum(sizes)] + vote)
    during, after = first["overlap"]
    assert sorted(during) == sorted(sizes) and after == vote
    assert {*during[:2]} == {32 * 4, 4} and {*during[-2:]} == {8 * 16, 16}, "the last layer's come first"
    assert first["bucketed, one"] == ([sum(sizes)], vote)
    during, after = first["bucketed, one a parameter"]
    assert sorted(during) == sorted(sizes) and after == vote
    # At most 1048 bytes, 262 floats: the last layer with the bias before it, then what is too large to share.
    assert first["bucketed, several"] == ([4 + 128 + 32, 16 * 32, 16 + 8 * 16], vote)


def test_buckets_go_backwards_fill_up_and_do_not_mix_dtypes():
    def parameter(size: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
        return nn.Parameter(torch.zeros(size, dtype=dtype))

    parameters = [parameter(8), parameter(8), parameter(100), parameter(3), parameter(8, torch.float16), parameter(8)]
    buckets = plan_buckets(parameters, limit_bytes=64)
    assert [bucket.parameters for bucket in buckets] == [[5], [4], [3], [2], [1, 0]]
    assert [bucket.num_elements for bucket in buckets] == [8, 8, 4, 100, 16], "3 elements are padded to 16 bytes"
    assert buckets[-1].offsets == [0, 8]
    assert [bucket.parameters for bucket in plan_buckets(parameters, float("inf"))] == [[5], [4], [3, 2, 1, 0]]
    assert plan_buckets([], 64) == []


def test_an_order_is_rehearsed_and_then_kept(alone_in_a_group):
    order = LaunchOrder([0, 0, 1, 2], None, torch.device("cpu"))
    assert [order.arrive(parameter) for parameter in (2, 3, 1, 2, 0)] == [[]] * 5
    assert order.finish() == [2, 1, 0], "2 was complete first; 1 when its parameter came for the second time"
    assert order.arrive(2) == [] and order.arrive(2) == [], "all its arrivals, but another item goes first"
    assert order.arrive(3) == [2, 1]
    with pytest.raises(RuntimeError, match="a gradient arrived after its all-reduce had begun: call finish_grad"):
        order.arrive(2)
    assert order.finish() == [0]
    assert order.arrive(3) == [2], "a new backward"


def test_a_step_without_a_gradient_is_no_rehearsal(alone_in_a_group):
    """It taught that each gradient arrives once, and the first that came twice was then refused."""
    order = LaunchOrder([0, 1], None, torch.device("cpu"))
    assert order.finish() == [0, 1]
    assert [order.arrive(parameter) for parameter in (1, 1, 0)] == [[]] * 3
    assert order.finish() == [1, 0]
    assert [order.arrive(parameter) for parameter in (1, 1)] == [[], [1]]


def test_what_a_rehearsal_did_not_complete_goes_last(alone_in_a_group):
    order = LaunchOrder([0, 0, 1, 2, 3], None, torch.device("cpu"))
    assert [order.arrive(parameter) for parameter in (0, 4, 2)] == [[]] * 3
    assert order.finish() == [3, 1, 0, 2], "half of 0 came first, and nothing of 2"


def test_a_gradient_with_a_graph_is_sent_without_it():
    parameter = nn.Parameter(torch.ones(2))
    parameter.pow(3).sum().backward(create_graph=True)
    gradient = dense_gradient(parameter)
    assert parameter.grad.requires_grad and not gradient.requires_grad
    assert gradient.data_ptr() == parameter.grad.data_ptr()


@pytest.fixture
def alone_in_a_group():
    """This process as the only rank of a default group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_gradients_are_views_of_their_buckets(alone_in_a_group):
    wrapped = BucketedDDP(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), None)
    (flat,) = wrapped._flat
    for _ in range(2):
        wrapped.zero_grad(set_to_none=True)
        wrapped(torch.ones(3, 4)).sum().backward()
        wrapped.finish_gradient_synchronization()
        for parameter in wrapped.parameters():
            assert parameter.grad.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_is_freed_and_its_model_may_be_wrapped_again(wrapper, alone_in_a_group):
    model = nn.Linear(3, 2)
    wrapped = WRAPPERS[wrapper](model)
    gone = weakref.ref(wrapped)
    del wrapped
    gc.collect()
    assert gone() is None
    again = WRAPPERS[wrapper](model)
    again(torch.ones(2, 3)).sum().backward()
    again.finish_gradient_synchronization()
    assert model.bias.grad.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_can_be_copied_between_steps(wrapper, alone_in_a_group):
    """Neither the group's transport nor its options can be copied, so that none may be held then."""
    wrapped = WRAPPERS[wrapper](nn.Linear(3, 2))
    for _ in range(2):
        wrapped(torch.ones(2, 3)).sum().backward()
        wrapped.finish_gradient_synchronization()
        wrapped.zero_grad()
    again = deepcopy(wrapped)
    again(torch.ones(2, 3)).sum().backward()
    again.finish_gradient_synchronization()
    assert again.module.bias.grad.tolist() == [2.0, 2.0] and wrapped.module.bias.grad is None


# Errors


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapping_needs_a_module_and_a_process_group(wrapper):
    with pytest.raises(TypeError, match="module must be a torch.nn.Module, got list"):
        WRAPPERS[wrapper]([])  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="there is no process group: start the ranks with run_ranks"):
        WRAPPERS[wrapper](nn.Linear(2, 2))


@pytest.mark.parametrize("size", [0, -1.0, float("nan"), float("inf")])
def test_a_bucket_needs_a_positive_finite_size(size, alone_in_a_group):
    with pytest.raises(ValueError, match=f"bucket_size_mb must be positive and finite, or None, got {size}"):
        BucketedDDP(nn.Linear(2, 2), size)


class Interrupting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("planted")


def test_after_a_backward_that_raised_the_way_out_is_told(alone_in_a_group):
    """Once an AssertionError without a word, where the next backward came in another order."""
    first, last = nn.Linear(2, 2), nn.Linear(2, 2)
    wrapped = OverlapDDP(nn.ModuleList([first, last]))

    def backward(interrupted: bool = False, order: tuple[nn.Linear, nn.Linear] = (first, last)) -> None:
        x = order[0](torch.ones(1, 2))
        order[1](Interrupting.apply(x) if interrupted else x).sum().backward()

    backward()  # rehearsed
    wrapped.finish_gradient_synchronization()
    wrapped.zero_grad()
    with pytest.raises(ArithmeticError, match="planted"):
        backward(interrupted=True, order=(last, first))  # the ones that are to be sent last have arrived
    wrapped.zero_grad()
    with pytest.raises(RuntimeError, match="has gone before its all-reduce: call finish_gradient_sync"):
        backward()
    wrapped.finish_gradient_synchronization()
    wrapped.zero_grad()
    backward()
    wrapped.finish_gradient_synchronization()
    assert torch.equal(last.bias.grad, torch.ones(2))


def test_finishing_belongs_outside_of_no_sync(alone_in_a_group):
    wrapped = NaiveDDP(nn.Linear(2, 2))
    with wrapped.no_sync(), pytest.raises(RuntimeError, match=r"must be called outside of no_sync\(\)"):
        wrapped.finish_gradient_synchronization()
    wrapped.finish_gradient_synchronization()


@pytest.mark.parametrize("wrapper", [NaiveDDP, OverlapDDP])
def test_sparse_gradients_are_refused(wrapper, alone_in_a_group):
    wrapped = wrapper(nn.Embedding(5, 3, sparse=True))
    with pytest.raises(TypeError, match=r"gradients must be dense, got torch.sparse_coo of shape \(5, 3\)"):
        wrapped(torch.tensor([1, 2])).sum().backward()
        wrapped.finish_gradient_synchronization()


@pytest.mark.parametrize("wrapper", ["overlap", "bucketed, one"])
def test_a_second_backward_without_no_sync_is_refused(wrapper, alone_in_a_group):
    wrapped = WRAPPERS[wrapper](nn.Linear(2, 2))
    wrapped(torch.ones(1, 2)).sum().backward()
    wrapped.finish_gradient_synchronization()
    wrapped(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"or run all but the last of them under no_sync\(\)"):
        wrapped(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("is_rehearsed", [False, True])
@pytest.mark.parametrize("then_accumulates", [False, True])
@pytest.mark.parametrize("wrapper", ["overlap", "bucketed, one"])
def test_a_step_by_gradients_that_were_never_synchronised_is_told_in_the_next_backward(
    wrapper, then_accumulates, is_rehearsed, alone_in_a_group
):
    """Without a single finish_gradient_synchronization there was no order to break, and ranks parted without a word."""
    wrapped = WRAPPERS[wrapper](nn.Linear(2, 2))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)

    def backward() -> None:
        wrapped(torch.ones(1, 2)).sum().backward()

    if is_rehearsed:
        backward()
        wrapped.finish_gradient_synchronization()
        wrapped.zero_grad()
    backward()
    optimizer.step()
    told = r"finish_gradient_synchronization\(\) was not called between the last backward and the optimizer's step"
    with wrapped.no_sync() if then_accumulates else nullcontext(), pytest.raises(RuntimeError, match=told):
        backward()
    wrapped.finish_gradient_synchronization()  # the way out
    wrapped.zero_grad()
    backward()
    wrapped.finish_gradient_synchronization()
    assert wrapped.module.bias.grad.tolist() == [1.0, 1.0]


def part_without_a_word(rank: int, ranks: int, wrapper: str) -> None:
    """A newcomer's loop: all steps, and no synchronisation."""
    wrapped = WRAPPERS[wrapper](Model(seed=rank))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step)
        loss_of(wrapped, mine(x), mine(y), checkpointing=True).backward()
        optimizer.step()


@pytest.mark.parametrize("wrapper", ["overlap", "bucketed, several"])
def test_ranks_that_never_synchronise_are_stopped(wrapper):
    with pytest.raises(RankError, match=r"finish_gradient_synchronization\(\) was not called between the last"):
        run_ranks(part_without_a_word, 2, wrapper)


def wrap_different_models(rank: int, ranks: int) -> None:
    OverlapDDP(nn.Linear(3, 4 + rank))


def test_ranks_with_different_models_are_refused_at_construction():
    with pytest.raises(RankError, match=r"(?s)ValueError: parameter 'weight' must be the same on all ranks"):
        run_ranks(wrap_different_models, 2)


def fail_in_a_step(rank: int, ranks: int) -> None:
    wrapped = OverlapDDP(Model(seed=0))
    for step in range(3):
        if rank == 1 and step == 2:
            raise ArithmeticError("planted in the third step")
        loss_of(wrapped, *batch(step)).backward()
        wrapped.finish_gradient_synchronization()
        wrapped.zero_grad()


def test_a_rank_that_fails_in_a_step_ends_the_training():
    with pytest.raises(RankError, match="(?s)rank 1 of 2 failed:.*planted in the third step"):
        run_ranks(fail_in_a_step, 2)


# The course's own check, through the adapters


class ToyModel(nn.Module):
    """Three layers, one frozen bias and one frozen parameter that starts equal on all ranks; or tied layers."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        middle = [(10, 50), (50, 10), (10, 50)] if tied else [(10, 50)]
        sizes = [(10, 10), *middle, (50, 5)]
        self.layers = nn.ModuleList(nn.Linear(*size, bias=size == (10, 50) and not tied) for size in sizes)
        if tied:
            self.layers[3].weight = self.layers[1].weight
        else:
            self.layers[1].bias.requires_grad = False
        self.no_grad_fixed_param = nn.Parameter(torch.tensor([2.0, 2.0]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)


ADAPTERS: dict[str, list[dict[str, Any]]] = {  # the getter's arguments to try
    "ddp": [{}],
    "ddp_individual_parameters": [{}],
    "ddp_bucketed": [{"bucket_size_mb": size} for size in (0.0016, 0.0001, 0.01, None)],
}


def course_check(rank: int, ranks: int, adapter: str) -> None:
    """Rank 0's model everywhere, then five steps of SGD equal to one process with both halves of the batch."""
    for options in ADAPTERS[adapter]:
        for tied in (False, True):
            torch.manual_seed(rank)
            alone = ToyModel(tied)
            wrapped = getattr(adapters, f"get_{adapter}")(deepcopy(alone), **options)
            assert wrapped.module.state_dict().keys() == alone.state_dict().keys()
            for (name, own), (wrapped_name, got) in zip(alone.named_parameters(), wrapped.named_parameters()):
                assert name in wrapped_name
                assert torch.equal(own, got) == (rank == 0 or "no_grad_fixed_param" in name), name
            for tensor in wrapped.module.state_dict().values():
                everyone = [torch.zeros_like(tensor) for _ in range(ranks)]
                dist.all_gather(everyone, tensor)
                assert all(torch.equal(other, tensor) for other in everyone)
            generator = torch.Generator().manual_seed(5)
            x, y = torch.randn(20, 10, generator=generator), torch.randn(20, 5, generator=generator)
            optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (wrapped, alone)]
            for _ in range(5):
                if adapter == "ddp_bucketed":
                    adapters.ddp_bucketed_on_train_batch_start(ddp_model=wrapped, optimizer=optimizers[0])
                for optimizer in optimizers:
                    optimizer.zero_grad()
                nn.functional.mse_loss(alone(x), y).backward()
                optimizers[1].step()
                nn.functional.mse_loss(wrapped(x.chunk(ranks)[rank]), y.chunk(ranks)[rank]).backward()
                getattr(adapters, f"{adapter}_on_after_backward")(ddp_model=wrapped, optimizer=optimizers[0])
                optimizers[0].step()
                if rank == 0:
                    for expected, got in zip(alone.parameters(), wrapped.parameters()):
                        torch.testing.assert_close(got, expected)
                order = torch.randperm(20, generator=generator)
                x, y = x[order], y[order]


@pytest.mark.parametrize(
    "adapter",
    [
        pytest.param("ddp", marks=pytest.mark.problem("ddp_overlap_individual_parameters", 5)),
        pytest.param("ddp_individual_parameters", marks=pytest.mark.problem("ddp_overlap_individual_parameters", 5)),
        pytest.param("ddp_bucketed", marks=pytest.mark.problem("ddp_overlap_bucketed", 8)),
    ],
)
def test_the_courses_check(adapter):
    run_ranks(course_check, 2, adapter)
