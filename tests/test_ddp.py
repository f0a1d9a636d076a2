"""The four data-parallel wrappers: what they send and when, their memory, and errors.

`test_equality.py` compares them with one process, `test_graded.py` has the course's checks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from copy import deepcopy
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cs336_systems.distributed import (
    FSDP,
    BucketedDDP,
    FlatDDP,
    NaiveDDP,
    OverlapDDP,
    Zero1Optimizer,
)
from cs336_systems.distributed.ddp import DataParallel
from cs336_systems.distributed.ddp_bucketed import plan_buckets
from cs336_systems.distributed.fsdp import unit
from cs336_systems.distributed.guards import dense_gradient
from cs336_systems.grading.counting import SENT, count_messages
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


# What is sent, and when


count_messages_once = cache(count_messages)


def record_sends(
    rank: int, ranks: int, order: tuple[int, ...]
) -> dict[str, list[tuple[list[int], list[int]]]]:
    """For each wrapper and each of two steps the elements of every all-reduce: during the backward,
    and after it.

    The layers run in `order`.
    """
    count_messages_once()
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
            SENT.clear()
            x.backward()
            during = len(sent_sizes())
            wrapped.finish_gradient_synchronization()
            sizes = sent_sizes()
            sent[name].append((sizes[:during], sizes[during:]))
    return sent


def sent_sizes() -> list[int]:
    """How many floats the messages have carried, but for broadcasts, which carry no gradients."""
    return [message.nbytes // 4 for message in SENT if message.kind != "broadcast"]


def skip_what_one_rank_raised_in(rank: int, ranks: int) -> dict[str, list[list[float]]]:
    """The gradients of three steps of which the second raises on rank 1, which has sent less then
    than rank 0.
    """
    found: dict[str, list[list[float]]] = {}
    for name, wrap in WRAPPERS.items():
        wrapped = wrap(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))))
        found[name] = []
        for step in range(3):
            hidden = wrapped.module[:2](torch.full((1, 2), 1.0 + rank))
            hidden = RaiseInBackward.apply(hidden) if step == 1 and rank == 1 else hidden
            with suppress(ArithmeticError):
                wrapped.module[2](hidden).sum().backward()
            if step == 1:
                wrapped.skip_step()
            else:
                wrapped.finish_gradient_synchronization()
                found[name].append([float(parameter.grad.sum()) for parameter in wrapped.trainable])
                wrapped.zero_grad()
    return found


TWO_RANKS = OneJob(
    2, (record_sends, (0, 1, 2)), (record_sends, (2, 1, 0)), (skip_what_one_rank_raised_in,)
)


def test_a_step_that_raised_on_one_rank_is_skipped_on_all():
    """Messages that one rank had sent, and the other not, met those of the next step."""
    first, second = TWO_RANKS.results(skip_what_one_rank_raised_in)
    assert first == second
    for name, (before, after) in first.items():
        assert before == after, name


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
    # At most 1048 bytes, 262 floats: the last layer with the bias before it, then what is too large
    # to share.
    assert first["bucketed, several"] == [([4 + 128 + 32, 16 * 32, 16 + 8 * 16], [])] * 2


def test_the_second_step_sends_in_the_order_of_the_first_ones_gradients():
    """Where layers do not run in the order of parameters, the first step can send little before its
    backward's end.
    """
    (first, second) = TWO_RANKS.results(record_sends, (2, 1, 0))
    assert first == second
    for name in ("overlap", "bucketed, one a parameter"):
        (early, late), (early_again, late_again) = first[name]
        assert early[:2] == [4, 128] and not late
        assert (
            {*early_again[:2]} == {16, 8 * 16}
            and {*early_again[-2:]} == {4, 128}
            and not late_again
        )


@TWO_RANKS.check
def test_a_module_that_is_cast_between_steps_is_averaged_or_refused_by_name(
    rank: int, ranks: int
) -> None:
    """Buckets trusted that a gradient is their view, which had memory of its own now: 0 and 2 in
    the place of 1.
    """
    for name, wrap in WRAPPERS.items():
        wrapped = wrap(nn.Linear(2, 2))
        # the second is added to the first
        for mean, dtype in ((1.0, torch.float32), (2.0, torch.float64)):
            wrapped.to(dtype)
            refused = "bucketed" in name and dtype == torch.float64
            message = (
                r"parameter '(weight|bias)' was moved or cast after it was wrapped: wrap again"
            )
            with pytest.raises(RuntimeError, match=message) if refused else nullcontext():
                wrapped(torch.full((1, 2), 2.0 * rank, dtype=dtype)).sum().backward()
                wrapped.finish_gradient_synchronization()
                assert wrapped.module.weight.grad.tolist() == [[mean, mean], [mean, mean]], name


@TWO_RANKS.check
def test_a_gradient_that_is_replaced_after_it_was_sent_is_refused_by_name(
    rank: int, ranks: int
) -> None:
    """The mean went to a tensor that nobody saw, and each rank stepped by its own."""

    def cast(module: nn.Module) -> None:
        module.double()

    def scale(module: nn.Module) -> None:
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad * 1.0

    for (name, wrap), change in product(WRAPPERS.items(), (cast, scale)):
        wrapped = wrap(nn.Linear(2, 2))
        wrapped(torch.full((1, 2), 2.0 * rank)).sum().backward()
        change(wrapped.module)
        message = r"gradient of parameter '(weight|bias)' was moved, cast or replaced between the backward"
        with (
            nullcontext()
            if name in ("naive", "flat")
            else pytest.raises(RuntimeError, match=message)
        ):
            wrapped.finish_gradient_synchronization()
            assert wrapped.module.weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]], name


@TWO_RANKS.check
def test_a_gradient_that_could_not_be_sent_is_not_forgotten(rank: int, ranks: int) -> None:
    """After a sparse gradient was refused, the end of the step passed without averaging it."""
    for name in ("overlap", "bucketed, one"):
        wrapped = WRAPPERS[name](nn.Embedding(4, 2, sparse=True))
        with pytest.raises(TypeError, match="gradients must be dense"):
            wrapped(torch.tensor([rank])).sum().backward()
        with pytest.raises(TypeError, match="gradients must be dense"):
            wrapped.finish_gradient_synchronization()
        wrapped.skip_step()
        assert wrapped.module.weight.grad is None


def test_buckets_go_backwards_fill_up_and_do_not_mix_dtypes():
    def parameter(size: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
        return nn.Parameter(torch.zeros(size, dtype=dtype))

    parameters = [
        parameter(8),
        parameter(8),
        parameter(100),
        parameter(3),
        parameter(8, torch.float16),
        parameter(8),
    ]
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
def test_a_wrapper_can_be_copied_between_steps(wrapper, alone_in_a_group):
    """Neither the group's transport nor its options can be, so that none may be held."""
    wrapped = WRAPPERS[wrapper](nn.Linear(3, 2))
    for _ in range(2):
        wrapped = deepcopy(wrapped)
        wrapped.zero_grad()
        wrapped(torch.ones(2, 3)).sum().backward()
        wrapped.finish_gradient_synchronization()
        assert wrapped.module.bias.grad.tolist() == [2.0, 2.0]


# Errors


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_D1_an_unused_parameter_is_named(wrapper, alone_in_a_group):
    """By default there is no vote, and a rank that went on without the gradient would leave the
    others waiting.
    """
    wrapped = WRAPPERS[wrapper](nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)}))
    message = r"'unused.weight' has no gradient on this rank, as 2 of 4: use .* or pass find_unused_parameters=True"
    wrapped.module["used"](torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=message):
        wrapped.finish_gradient_synchronization()


@pytest.mark.parametrize("change", ["frozen", "made trainable"])
@pytest.mark.parametrize("scheme", [*WRAPPERS, "fsdp", "zero1"])
def test_what_is_frozen_or_thawed_after_wrapping_is_refused(scheme, change, alone_in_a_group):
    """A thawed parameter was trained on each rank's own gradients, or not at all; a frozen one went
    on.
    """
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    plain[0].weight.requires_grad_(change == "frozen")
    wrap = FSDP if scheme == "fsdp" else WRAPPERS.get(scheme, nn.Sequential)
    model = wrap(plain)
    optimizer: Any = (
        Zero1Optimizer(model.parameters(), torch.optim.SGD, lr=0.1) if scheme == "zero1" else None
    )
    plain[0].weight.requires_grad_(change != "frozen")
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=f"parameter '(0.weight|0)' was {change} after wrapping"):
        optimizer.step() if optimizer else model.finish_gradient_synchronization()


@pytest.mark.parametrize("wrapper", [*WRAPPERS, "fsdp"])
def test_a_step_on_gradients_that_were_never_averaged_is_refused(wrapper, alone_in_a_group):
    """The ranks of naive and flat trained apart in silence, and FSDP's replicated parameters.

    A backward may be forgotten, one that warms up: a load of parameters was then taken for a step
    without averages.
    """
    wrapped: Any = WRAPPERS.get(wrapper, FSDP)(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))
    state, optimizer = deepcopy(wrapped.state_dict()), torch.optim.AdamW(wrapped.parameters())

    def backward() -> None:
        wrapped(torch.ones(1, 2)).sum().backward()

    backward()
    # which send it
    if wrapper in ("overlap", "bucketed, one", "bucketed, one a parameter", "bucketed, several"):
        wrapped.skip_step()
    else:
        wrapped.zero_grad()
    wrapped.load_state_dict(state)
    optimizer.step()  # of nothing
    backward()
    wrapped.finish_gradient_synchronization()
    optimizer.step()
    with wrapped.no_sync():
        backward()
        with pytest.raises(RuntimeError, match=r"must be outside of no_sync\(\)"):
            wrapped.finish_gradient_synchronization()
    if isinstance(wrapped, FSDP):
        with pytest.raises(
            RuntimeError, match=r"gradients wait that no_sync put aside: call finish_gradient_sync"
        ):
            wrapped.clip_grad_norm_(1.0)
    backward()
    torch.optim.SGD(nn.Linear(2, 2).parameters()).step()  # of another model
    with pytest.raises(
        RuntimeError,
        match=r"call finish_gradient_synchronization\(\) after the backward, before step",
    ):
        optimizer.step()
    wrapped.finish_gradient_synchronization()
    optimizer.step()


class LastTwo(nn.Module):
    """Uses all but its first parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(2, 2), nn.Linear(2, 2), nn.LayerNorm(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.last(x))


@pytest.mark.parametrize("case", ["the first unused", "in no_sync alone", "all but norms frozen"])
@pytest.mark.parametrize("wrapper", [*WRAPPERS, "fsdp"])
def test_whichever_gradients_wait_a_step_is_refused(wrapper, case, alone_in_a_group):
    model = LastTwo()
    if case == "all but norms frozen":
        for linear in (model.first, model.last):
            linear.requires_grad_(False)
    wrapped: Any = WRAPPERS.get(wrapper, FSDP)(model)
    linears = torch.optim.SGD([*wrapped.module.last.parameters()], lr=0.1)
    norms = torch.optim.SGD(wrapped.module.norm.parameters(), lr=0.1)
    with wrapped.no_sync() if case == "in no_sync alone" else nullcontext():
        wrapped(torch.tensor([[1.0, 2.0]])).sum().backward()
        if not wrapped.sends:
            norms.step()  # of this rank alone, as it says
    for optimizer in (norms,) if case == "all but norms frozen" else (norms, linears):
        with pytest.raises(
            RuntimeError,
            match=r"call finish_gradient_synchronization\(\) after the backward, before",
        ):
            optimizer.step()


def test_what_fsdp_has_cut_is_not_wrapped_again(alone_in_a_group):
    """The second wrapper trained nothing, in silence, and exported a rank's rows for whole weights."""
    for wrap in (*WRAPPERS.values(), FSDP):
        plain = nn.Sequential(nn.Linear(2, 2))
        FSDP(plain)
        with pytest.raises(ValueError, match="FSDP has cut its parameters into rows"):
            wrap(plain)


@pytest.mark.parametrize("thawed", ["before the backward", "after it"])
@pytest.mark.parametrize("wrapper", [*WRAPPERS, "fsdp"])
def test_what_is_frozen_for_one_backward_gets_no_gradient(wrapper, thawed, alone_in_a_group):
    """As a discriminator in the step of its generator."""
    wrapped: Any = WRAPPERS.get(wrapper, FSDP)(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))
    wrapped.requires_grad_(False)
    loss = wrapped(torch.ones(1, 2, requires_grad=True)).sum()
    wrapped.requires_grad_(thawed == "before the backward")
    loss.backward()
    assert all(parameter.grad is None for parameter in wrapped.parameters())


def test_an_optimizer_that_searches_is_refused_over_rows(alone_in_a_group):
    wrapped = FSDP(nn.Linear(2, 2))
    with pytest.raises(
        TypeError, match="LBFGS cannot be sharded: it searches along all parameters at once"
    ):
        torch.optim.LBFGS(wrapped.parameters()).step(lambda: torch.zeros(()))


@pytest.mark.parametrize(
    ("wrapper", "case"),
    # FSDP's cannot be copied
    [*product([*WRAPPERS, "fsdp"], ["closure", "compiled"]), *product(WRAPPERS, ["copy"])],
)
def test_every_kind_of_step_is_refused(wrapper, case, alone_in_a_group):
    wrapped: Any = WRAPPERS.get(wrapper, FSDP)(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))
    wrapped = deepcopy(wrapped) if case == "copy" else wrapped
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)

    def closure() -> Tensor:
        loss = wrapped(torch.tensor([[1.0, 2.0]])).sum()
        loss.backward()
        return loss

    with pytest.raises(
        RuntimeError,
        match=r"call finish_gradient_synchronization\(\) after the backward, before step",
    ):
        if case == "closure":
            optimizer.step(closure)
        else:
            closure()
            (
                torch.compile(optimizer.step, backend="eager")
                if case == "compiled"
                else optimizer.step
            )()


@pytest.mark.parametrize("wrapper", [*WRAPPERS, "fsdp"])
def test_a_step_after_zero_grad_of_the_wrapper_is_made(wrapper, alone_in_a_group):
    wrapped: Any = WRAPPERS.get(wrapper, FSDP)(nn.Linear(2, 2))
    wrapped(torch.ones(1, 2)).sum().backward()
    wrapped.zero_grad()
    for parameter in wrapped.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.optim.AdamW(wrapped.parameters()).step()


def test_a_step_within_a_backward_gathers_nothing(alone_in_a_group, monkeypatch):
    wrapped = FSDP(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))))
    outside = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(outside.parameters(), lr=0.1)
    outside.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    loss = wrapped(outside(torch.ones(1, 2))).sum()
    monkeypatch.setattr(unit, "gather_copy", lambda *_: pytest.fail("gathered"))
    loss.backward()
    wrapped.finish_gradient_synchronization()


def test_a_compiled_wrapper_is_compiled_once(alone_in_a_group):
    """Checks in its forward once made later steps compile the whole model again, also of those that
    accumulate.
    """
    frames: list[Any] = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        frames.append(graph)
        return graph

    wrapped = NaiveDDP(nn.Linear(2, 2))
    compiled, optimizer = (
        torch.compile(wrapped, backend=count),
        torch.optim.SGD(wrapped.parameters(), lr=0.1),
    )
    for _ in range(3):
        for _ in range(2):
            compiled(torch.ones(1, 2)).sum().backward()
        wrapped.finish_gradient_synchronization()
        optimizer.step()
    assert len(frames) == 1


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_module_has_one_wrapper(wrapper, alone_in_a_group):
    """Two sent every gradient twice, in place and at once; a wrapper around another as well."""
    plain = nn.Linear(2, 2)
    first, second = WRAPPERS[wrapper](plain), WRAPPERS[wrapper](plain)
    for around in (WRAPPERS[wrapper], FSDP):
        for wrapped in (first, FSDP(nn.Linear(2, 2))):
            message = f"module must not be wrapped twice, and {type(wrapped).__name__} wraps it"
            with pytest.raises(ValueError, match=message):
                around(nn.Sequential(wrapped))
    second(torch.ones(1, 2)).sum().backward()
    second.finish_gradient_synchronization()
    assert plain.bias.grad.tolist() == [1.0, 1.0]
    with pytest.raises(
        RuntimeError, match=r"must be outside of no_sync\(\), of the latest wrapper"
    ):
        first.finish_gradient_synchronization()
    del first, second, wrapped
    assert not plain.weight._post_accumulate_grad_hooks  # which FSDP would refuse
    FSDP(plain)


@pytest.mark.parametrize("wrapper", [*WRAPPERS, "fsdp"])
@pytest.mark.parametrize("change", ["added", "replaced", "a module of its own"])
def test_a_parameter_that_comes_after_wrapping_is_refused_by_name(
    wrapper, change, alone_in_a_group
):
    """It had gradients of its own on each rank, and the ranks parted without a word."""
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    wrapped: Any = WRAPPERS.get(wrapper, FSDP)(plain)
    wrapped(torch.ones(1, 2)).sum().backward()
    wrapped.finish_gradient_synchronization()
    wrapped.zero_grad()
    message = r"(?s)'(1\.scale|1\.bias|2\.weight)'.*(after wrapping|once FSDP has wrapped)"
    with pytest.raises(RuntimeError, match=message):
        if change == "added":  # FSDP says so at once
            plain[1].scale = nn.Parameter(torch.ones(2))
        elif change == "replaced":
            plain[1].bias = nn.Parameter(torch.ones(2))
        else:
            plain.append(nn.Linear(2, 2))
        wrapped(torch.ones(1, 2)).sum().backward()
        wrapped.finish_gradient_synchronization()


@pytest.mark.parametrize("wrapper", [*WRAPPERS, "fsdp"])
def test_a_lazy_module_is_refused_with_what_to_do(wrapper, alone_in_a_group):
    with pytest.raises(
        ValueError, match="parameter '0.weight' has no shape yet: call the module once before it is"
    ):
        WRAPPERS.get(wrapper, FSDP)(nn.Sequential(nn.LazyLinear(2)))


@pytest.mark.parametrize("wrapper", ["overlap", "bucketed, one"])
def test_a_second_backward_is_refused_and_the_way_out_is_told(wrapper, alone_in_a_group):
    """Ranks that never synchronise would otherwise part without a word."""
    wrapped = WRAPPERS[wrapper](nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    first, last = wrapped.module
    with pytest.raises(ArithmeticError, match="planted"):
        last(RaiseInBackward.apply(first(torch.ones(1, 2)))).sum().backward()
    wrapped.zero_grad()
    for message in (
        r"call skip_step\(\) .* after one that",
        r"gradient of parameter '1\.\w+' arrived twice in a",
    ):
        with pytest.raises(RuntimeError, match=message):
            wrapped(torch.ones(1, 2)).sum().backward()
        wrapped.skip_step()
        wrapped(torch.ones(1, 2)).sum().backward()
    wrapped.finish_gradient_synchronization()
    assert torch.equal(last.bias.grad, torch.ones(2))
