"""Section 7: FSDP against one process, on gloo.

`test_equality.py` has the wide family of models and uses, `test_graded.py` the course's checks;
here are its settings, what it refuses, memory, precision, and errors.
"""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.utils.parametrizations import weight_norm

from cs336_systems.attention import flash_attention
from cs336_systems.attention.checks import has_hooks
from cs336_systems.device import has_cxx_compiler
from cs336_systems.distributed import FSDP, RankError, Zero1Optimizer, run_ranks, wrap_blocks
from cs336_systems.distributed.fsdp.life import watch
from cs336_systems.distributed.fsdp.plan import plan_units
from cs336_systems.distributed.fsdp.weight import chunk_rows, own_rows, whole_of
from cs336_systems.grading.counting import LiveBytes
from cs336_systems.model import AdamW, TransformerLM
from tests.module_kinds import Net
from tests.one_job import OneJob
from tests.sharding_models import (
    TINY,
    awkward,
    batch,
    finish,
    part,
    seeded,
    token_loss,
    transformer,
)

COVERS = ("cs336_systems/distributed", "tests/sharding_models.py")

FP32_BOUND = 1e-6
TWO_RANKS, THREE_RANKS = OneJob(2), OneJob(3)


def backward(model: nn.Module, step: int, *tensors: Tensor) -> None:
    token_loss(model, *tensors).backward()


def train_both(
    rank: int,
    num_ranks: int,
    single: nn.Module,
    fsdp: Any,
    run: Callable[..., None] = backward,
    *,
    steps: int = 3,
) -> float:
    """Train one process's model on whole batches and FSDP's on parts; the largest difference
    between the weights.

    `run(model, step, *tensors)` makes forward and backward.
    """
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (single, fsdp)]
    for step in range(steps):
        for model, optimizer in zip((single, fsdp), optimizers):
            optimizer.zero_grad()
            tensors = (
                batch(step)
                if model is single
                else tuple(part(one, rank, num_ranks) for one in batch(step))
            )
            run(model, step, *tensors)
        fsdp.finish_gradient_synchronization()
        assert fsdp.gathered_units() == []
        for optimizer in optimizers:
            optimizer.step()
    return largest_difference(fsdp, single)


def largest_difference(fsdp: Any, single: nn.Module) -> float:
    full = fsdp.gather_full_params()
    assert list(full) == [name for name, _ in single.named_parameters()]
    whole = [
        (full[name].cpu(), parameter.detach().cpu())
        for name, parameter in single.named_parameters()
    ]
    # The maximum of a tensor is NaN where one is, Python's need not be.
    return (
        torch.stack([(ours - expected).abs().max() for ours, expected in whole if expected.numel()])
        .max()
        .item()
    )


# Equal to one process, whatever the model and the schedule (D2, D3, D4, D5)


SETTINGS = [
    (how, granularity)
    for how in ("none", "reentrant", "non_reentrant")
    for granularity in ("block", "layer")
]


@TWO_RANKS.check
def test_D4_D9_in_float32_it_is_bit_equal_to_the_mean_of_the_ranks_gradients(
    rank: int, num_ranks: int
) -> None:
    """One process averages the gradients of the parts itself: of the whole batch they are another
    sum.
    """

    def run(model: nn.Module, step: int, tokens: Tensor, targets: Tensor) -> None:
        num_parts = 1 if isinstance(model, FSDP) else num_ranks
        for own, wanted in zip(tokens.chunk(num_parts), targets.chunk(num_parts)):
            (token_loss(model, own, wanted) / num_parts).backward()

    for how, granularity in SETTINGS:
        blocks = wrap_blocks(seeded(transformer, seed=rank), checkpointing=how)
        assert (
            train_both(
                rank, num_ranks, seeded(transformer), FSDP(blocks, granularity=granularity), run
            )
            == 0
        )


def test_D9_a_single_rank_is_one_process(alone_in_a_group):
    test_D4_D9_in_float32_it_is_bit_equal_to_the_mean_of_the_ranks_gradients(0, 1)


# Refusals


def in_one_block(block: nn.Module) -> nn.Module:
    return Net(lambda model, x: model.layers[0](x), layers=nn.ModuleList([block]))


@TWO_RANKS.check
def test_D8_D14_D16_what_cannot_be_served_is_refused_by_name(rank: int, num_ranks: int) -> None:
    def use(model: Any) -> None:
        model(torch.ones(2, 4)).sum().backward()

    def refused(message: str, build: Any, run: Any = use, dtype: torch.dtype | None = None) -> None:
        with pytest.raises((RuntimeError, ValueError), match=f"^{message}"):
            run(FSDP(seeded(build), dtype))

    def in_a_sequence() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 4))

    def hooked() -> nn.Module:
        model = in_a_sequence()
        model[0].weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
        return model

    def hook_later(model: FSDP) -> None:
        next(model.parameters()).register_hook(lambda gradient: gradient.clamp(-1, 1))
        use(model)
        model.finish_gradient_synchronization()

    def differ(model: FSDP) -> None:
        chooser: Any = next(one for one in model.modules() if hasattr(one, "use_left"))
        chooser.use_right, chooser.use_left = rank == 0, rank == 1
        use(model)

    def differentiate_twice(model: FSDP) -> None:
        x = torch.ones(2, 4, requires_grad=True)
        torch.autograd.grad(model(x).sum(), x, create_graph=True)

    refused("parameter '0.weight' must have no gradient hooks: FSDP would drop them", hooked)
    refused(
        "parameter '0.weight' must have no gradient hooks: FSDP never calls them",
        in_a_sequence,
        hook_later,
    )
    message = "parameter 'weight' must not be changed in a forward, as max_norm does"
    refused(
        message,
        lambda: nn.Embedding(5, 4, max_norm=0.5),
        lambda model: model(torch.tensor([[1, 2]])).sum(),
    )
    message = f"all ranks must run the same modules in the same order: rank {rank}"
    runs, other = ("right", "left") if rank == 0 else ("left", "right")
    refused(f"{message} gathers {runs!r}, rank {1 - rank} gathers {other!r};", branches, differ)
    refused(
        f"{message} reduces 'layers.0', rank {1 - rank} reduces",
        lambda: in_one_block(branches()),
        differ,
    )
    refused(
        "create_graph=True is not supported: '0' is freed before",
        in_a_sequence,
        differentiate_twice,
    )
    message = "'layers.0' must not write into its arguments unless they are torch.bfloat16"
    writes = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
    refused(message, lambda: in_one_block(writes), dtype=torch.bfloat16)


@TWO_RANKS.check
def test_D5_a_step_that_overflows_on_one_rank_is_skipped_by_all(rank: int, num_ranks: int) -> None:
    """torch's GradScaler decides for each rank."""
    for where in ("compute_dtype", "autocast"):
        model = FSDP(nn.Linear(4, 4), torch.float16 if where == "compute_dtype" else None)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
        before = model.gather_full_params()["weight"]
        with torch.autocast("cpu", torch.float16, enabled=where == "autocast"):
            scaler.scale(model(torch.ones(2, 4)).float().sum()).backward()
        model.finish_gradient_synchronization()
        if rank == 0:  # an overflow in a row that is its own
            model.units[0].weights[0].shard.grad[0, 0] = torch.inf
        model.finish_gradient_synchronization()
        scaler.step(optimizer)
        scaler.update()
        assert (
            torch.equal(model.gather_full_params()["weight"], before)
            and scaler.get_scale() == 2.0**15
        )


# After wrapping: weights that are replaced, cast, copied, changed between a forward and its
# backward (D17)


def in_a_block(**parts: Any) -> nn.Module:
    """A block of one linear layer, and a linear head."""
    block = Net(lambda model, x: model.inner(x).tanh(), inner=nn.Linear(4, 4), **parts)
    return Net(
        lambda model, x: model.head(model.layers[0](x)),
        layers=nn.ModuleList([block]),
        head=nn.Linear(4, 4),
    )


def replace_weight(model: FSDP) -> None:
    model.module.head.weight = nn.Parameter(torch.ones(4, 4))  # type: ignore[union-attr]


def tie_weights(model: FSDP) -> None:
    model.module.head.weight = model.module.layers[0].inner.weight  # type: ignore[union-attr, index]


def add_a_parameter(model: FSDP) -> None:
    model.module.head.scale = nn.Parameter(torch.ones(4))  # type: ignore[union-attr]


def call_with_others(model: FSDP) -> None:
    others = {name: parameter * 2 for name, parameter in model.named_parameters()}
    torch.func.functional_call(model, others, (torch.ones(2, 4),))


def replace_in_the_forward(model: FSDP) -> None:
    def replace(head: nn.Module, *_: Any) -> None:
        head.weight = nn.Parameter(torch.ones(4, 4))

    model.module.head.register_forward_pre_hook(replace)  # type: ignore[union-attr]


HANDLED: list[tuple[Callable[[FSDP], object], str]] = [
    (replace_weight, "parameter 'head.weight' cannot be replaced once FSDP has wrapped its module"),
    (tie_weights, "parameter 'head.weight' cannot be replaced"),
    (add_a_parameter, "parameter 'head.scale' cannot be added"),
    (
        lambda model: weight_norm(model.module.layers[0].inner),
        "parameter 'layers.0.inner.weight' cannot be removed",
    ),  # type: ignore[union-attr, index]
    (call_with_others, "parameter 'layers.0.inner.weight' cannot be replaced"),
    (replace_in_the_forward, "parameter 'head.weight' must not be replaced in a forward"),
    (
        lambda model: model.half(),
        r"parameter 'layers.0.inner.weight' must not be cast.* rows were torch.float32 \(4, 4\)",
    ),
    (lambda model: model.module.head.double(), "parameter 'head.weight' must not be cast"),  # type: ignore[union-attr]
    (lambda model: model.to("meta"), "parameter 'layers.0.inner.weight' cannot be replaced"),
    (copy.deepcopy, "FSDP cannot be copied or pickled: keep copies of its parameters"),
    (lambda model: copy.deepcopy(model.module), "FSDP cannot be copied or pickled"),
    (torch.optim.swa_utils.AveragedModel, "FSDP cannot be copied or pickled"),
]


def test_attention_in_a_unit_is_remembered_as_anywhere(alone_in_a_group):
    """FSDP's hooks on saved tensors kept its launches from being replayed, which cost the host a
    millisecond a call.
    """
    seen = []

    def run(model: Any, x: Tensor) -> Tensor:
        q = model.q(x).view(1, 1, 8, 16)
        seen.append(not has_hooks())
        return flash_attention(q, q, q, backend="tiled")

    model = FSDP(Net(run, q=nn.Linear(16, 16)))
    x = torch.ones(8, 16)
    model(x).sum().backward()
    with torch.autograd.graph.save_on_cpu():  # which gives back other tensors
        model(x).sum().backward()
    assert seen == [True, False]


def test_D17_handling_weights_after_wrapping_is_refused_by_name(alone_in_a_group):
    """A replaced weight, or functional_call's, was ignored; a cast or a copy ended in an error of
    torch or pickle.
    """
    for handle, message in HANDLED:
        model = FSDP(in_a_block())
        with pytest.raises((RuntimeError, TypeError), match=message):
            handle(model)
            model(torch.ones(2, 4))
            model(torch.ones(2, 4))


def test_D17_handling_that_changes_nothing_is_served(alone_in_a_group):
    model, x = FSDP(in_a_block()), torch.ones(2, 4)
    expected = model(x)
    model.to("cpu", torch.float32).to(memory_format=torch.channels_last)
    model.half().float()  # rounded, and back in time
    own = dict(model.named_parameters())
    torch.testing.assert_close(
        torch.func.functional_call(model, own, (x,)), expected, rtol=1e-2, atol=1e-2
    )
    copies = copy.deepcopy(list(model.parameters()))  # an average of this rank's rows
    assert [one.shape for one in copies] == [one.shape for one in model.parameters()]


def test_D17_rows_of_a_model_that_is_gone_count_as_no_whole_weight(alone_in_a_group):
    model = FSDP(in_a_block())
    rows = next(model.parameters())
    assert whole_of(rows) is model.weights["layers.0.inner.weight"]
    assert whole_of(nn.Parameter(torch.ones(2))) is None
    del model
    gc.collect()
    with pytest.raises(
        RuntimeError, match=r"shape \(4, 4\) is a rank's rows of a weight whose FSDP module is gone"
    ):
        whole_of(rows)


def step_between(model: Any, optimizer: Any, finish: Callable[[], None]) -> None:
    model(torch.ones(2, 4)).sum().backward()
    finish()
    loss = model(torch.ones(2, 4)).square().sum()
    optimizer.step()
    loss.backward()


def test_D17_a_step_between_a_forward_and_its_backward_raises_as_in_one_process(alone_in_a_group):
    """FSDP and Zero1Optimizer went on, with gradients of neither the old weights nor the new ones."""
    plain, wrapped, sharded = in_a_block(), FSDP(in_a_block()), in_a_block()
    one_process = torch.optim.SGD(plain.parameters(), lr=0.1)
    zero1 = Zero1Optimizer(sharded.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step_between(plain, one_process, lambda: None)
    with pytest.raises(
        RuntimeError,
        match=r"parameter 'head.weight' was changed between a forward and its backward",
    ):
        step_between(
            wrapped,
            torch.optim.SGD(wrapped.parameters(), lr=0.1),
            wrapped.finish_gradient_synchronization,
        )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step_between(sharded, zero1, lambda: None)


def test_D17_a_step_between_of_what_the_backward_does_not_need_is_no_error(alone_in_a_group):
    gradients = []
    for model in (seeded(in_a_block), FSDP(seeded(in_a_block))):
        bias = [
            parameter for name, parameter in model.named_parameters() if name.endswith("inner.bias")
        ]
        optimizer = torch.optim.SGD(bias, lr=0.1)
        step_between(model, optimizer, partial(finish, model))
        finish(model)
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_D17_a_recomputation_after_a_step_sees_the_new_weights(alone_in_a_group):
    """As in one process; the last blocks stay gathered for the backward, with the weights of before
    the step.
    """
    weights = []
    for wrap in (lambda module: module, FSDP):
        model = wrap(wrap_blocks(seeded(transformer), checkpointing="non_reentrant"))
        blocks = [parameter for name, parameter in model.named_parameters() if ".ffn." in name]
        optimizer = torch.optim.SGD(blocks, lr=0.1)
        for step in range(3):
            token_loss(model, *batch(step)).backward()
            loss = token_loss(model, *batch(step + 10))
            finish(model)
            optimizer.step()
            loss.backward()
            finish(model)
            optimizer.step()
            optimizer.zero_grad()
        weights.append([parameter.detach() for parameter in model.parameters()])
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_D17_what_a_block_changes_in_place_after_saving_it_raises_as_in_one_process(
    alone_in_a_group,
):
    """Saved-tensor hooks switch off autograd's own check."""

    def run(model: Any, x: Tensor) -> Tensor:
        y = model.inner(x).tanh()
        loss = y.square()
        y.add_(1)
        return loss

    for wrap in (lambda block: block, FSDP):
        model = wrap(in_one_block(Net(run, inner=nn.Linear(4, 4))))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(torch.ones(2, 4)).sum().backward()


class Counted(dict[str, int]):
    """Counts how often it is looked through."""

    walks = 0

    def items(self) -> Any:
        type(self).walks += 1
        return super().items()

    def values(self) -> Any:
        type(self).walks += 1
        return super().values()

    def __iter__(self) -> Any:
        type(self).walks += 1
        return super().__iter__()


def test_D18_a_block_may_refer_to_large_and_foreign_objects(alone_in_a_group):
    """A vocabulary of 200,000 cost 340 ms in each forward; modules of Python in an attribute were a
    crash.
    """
    vocabulary = Counted({str(index): index for index in range(200_000)})
    parts = {
        "vocabulary": vocabulary,
        "tokens": list(range(200_000)),
        "F": nn.functional,
        "torch": torch,
        "pytest": pytest,
    }
    calls = []
    for model in (FSDP(in_a_block()), FSDP(in_a_block(**parts))):
        Counted.walks, num_calls = 0, 0

        def count(*_: Any) -> None:
            nonlocal num_calls
            num_calls += 1

        model(torch.ones(2, 4)).sum().backward()
        sys.setprofile(count)
        try:
            model(torch.ones(2, 4)).sum().backward()
        finally:
            sys.setprofile(None)
        calls.append(num_calls)
        assert Counted.walks == 0
    assert calls[0] == calls[1] > 0


def test_D14_an_output_that_is_computed_later_is_refused(alone_in_a_group):
    model = FSDP(Net(lambda model, x: map(model.inner, x), inner=nn.Linear(4, 4)))
    with pytest.raises(
        TypeError, match="forward must return what it has computed, got a map, which computes later"
    ):
        model(torch.ones(2, 4))
    hidden = in_one_block(
        Net(lambda model, x: SimpleOutput(model.weight), weight=nn.Parameter(torch.ones(4, 4)))
    )
    with pytest.raises(
        RuntimeError,
        match="'layers.0' must not return its weights, which are freed, in a SimpleOutput",
    ):
        FSDP(hidden)(torch.ones(2, 4))


@dataclass
class SimpleOutput:
    weight: Tensor


def test_D14_errors_of_torch_say_what_fsdp_has_to_do_with_them(alone_in_a_group):
    def differentiate(model: Any, x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: model.inner(y).sum())(x)

    model = FSDP(in_one_block(Net(differentiate, inner=nn.Linear(4, 4))))
    with pytest.raises(
        RuntimeError, match="saved tensor hooks(.|\n)*FSDP has such hooks while 'layers.0' runs"
    ):
        model(torch.ones(2, 4))
    blur = Net(
        lambda model, x: nn.functional.conv1d(model.inner(x)[:, None], model.kernel),
        inner=nn.Linear(4, 4), kernel=nn.Buffer(torch.ones(1, 1, 3)),
    )  # fmt: skip
    with pytest.raises(
        RuntimeError, match=r"casts no buffers: cast 'layers.0.kernel' in the forward, or before"
    ):
        FSDP(in_one_block(blur), torch.bfloat16)(torch.ones(2, 4))


# Ranks that part (D6)


def stack(*widths: int) -> Any:
    """Layers of these widths, in a list, that run in the order of `order`."""

    def run(model: Any, x: Tensor) -> Tensor:
        for place in model.order:
            layer = model.layers[place]
            x = layer(x[:, :1].expand(-1, layer.in_features)).tanh()
        return x

    return Net(
        run,
        layers=nn.ModuleList(nn.Linear(width, width) for width in widths),
        order=range(len(widths)),
    )


def part_in_the_fifth_step(
    rank: int, num_ranks: int, widths: tuple[int, ...], order: list[int]
) -> None:
    model = FSDP(stack(*widths))
    for step in range(6):
        if step == 4 and rank == 1:
            model.module.order = order
        model(torch.ones(2, 1)).sum().backward()
        model.finish_gradient_synchronization()


@pytest.mark.parametrize(
    ("widths", "order"),
    [((4, 4, 4), [1, 0, 2]), ((4, 32, 64), [0, 1])],
    ids=["another order of the same shapes", "the last of other shapes left out"],
)
def test_D6_ranks_that_part_after_the_first_steps_are_told_where(widths, order):
    """With the same shapes they mixed weights in silence, with others they hung until the time-out
    or were killed.
    """
    with pytest.raises(
        RankError, match="all ranks must run the same modules in the same order: rank .* 'layers."
    ) as caught:
        run_ranks(part_in_the_fifth_step, 2, widths, order, timeout_s=10)
    assert caught.value.error_type == "RuntimeError"


# Memory: the window (D12), meta construction, shapes (D3)


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


@TWO_RANKS.check
def test_D12_no_more_than_the_current_and_two_gathered_units_have_memory(
    rank: int, num_ranks: int
) -> None:
    """Whenever a block computes, in forward and backward of the second step."""
    fsdp = FSDP(seeded(transformer))
    seen: list[list[str]] = []
    tokens, targets = batch(0)
    token_loss(fsdp, tokens, targets).backward()
    for block in fsdp.module.layers:
        block.ffn.w2.register_forward_hook(lambda *_: seen.append(fsdp.gathered_units()))
        block.ffn.w1.register_full_backward_hook(lambda *_: seen.append(fsdp.gathered_units()))
    loss = token_loss(fsdp, tokens, targets)
    assert fsdp.gathered_units() == ["layers.3", "lm_head"]
    loss.backward()
    assert seen[:4] == [[f"layers.{i}", f"layers.{i + 1}"] for i in range(3)] + [
        ["layers.3", "lm_head"]
    ]
    assert len(seen) == 8 and max(map(len, seen)) == 2
    assert fsdp.gathered_units() == [] and {unit._memory.nbytes() for unit in fsdp.units} == {0}


WIDE = replace(TINY, d_model=64, d_ff=256, num_layers=6)
WIDE_BLOCK = 4 * 64 * 64 + 3 * 64 * 256  # elements of a block's matrices
# Beside the shards and all their gradients, by (compute, reduce dtype): a gathered block, the whole
# gradients of two, the float32 copy of one that is averaged so, its result; less the shard's
# gradients of the one not reduced yet.
BACKWARD_BLOCKS: dict[tuple[torch.dtype | None, torch.dtype | None], float] = {
    (None, None): 3.0,
    (torch.bfloat16, None): 1.25,
    (torch.bfloat16, torch.float32): 2.25,
}
LITTLE = 0.2  # of a block's float32 bytes: activations, norms, rotary tables, embedding and head


def without_transport() -> ExitStack:
    """Every rank for itself: gloo's threads hold what they sent longer than FSDP does, on a busy
    host much longer.
    """

    def gather(outputs: list[Tensor], inputs: list[Tensor], group: Any) -> list[Any]:
        for output, own in zip(outputs, inputs):
            output[: own.shape[0]].copy_(own)
        return []

    def reduce(outputs: list[Tensor], inputs: list[Tensor], group: Any) -> None:
        for output, own in zip(outputs, inputs):
            output.copy_(own[: output.shape[0]])

    patches = ExitStack()
    patches.enter_context(
        patch("cs336_systems.distributed.fsdp.wrapper.broadcast_from_first", lambda *_: None)
    )
    patches.enter_context(patch("cs336_systems.distributed.fsdp.unit.gather_rows", gather))
    patches.enter_context(patch("cs336_systems.distributed.fsdp.reduce.reduce_rows_mean", reduce))
    return patches


def count_live_block(
    compute_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
) -> tuple[float, ...]:
    """Peaks of construction, forward and backward above what stays, in a block's float32 bytes."""
    gc.collect()
    model = on_meta(lambda: TransformerLM.from_config(WIDE))
    live = LiveBytes()
    with live:
        fsdp = FSDP(model, compute_dtype, reduce_dtype=reduce_dtype, device="cpu")
    shards = sum(parameter.nbytes for parameter in fsdp.parameters())
    peaks = [live.peak - shards]
    tokens, targets = (one[:, :1] for one in batch(0, num_sequences=1))  # hardly any activations
    token_loss(fsdp, tokens, targets).backward()  # teaches the order
    fsdp.finish_gradient_synchronization()
    fsdp.zero_grad()
    live.peak = 0
    with live:
        loss = token_loss(fsdp, tokens, targets)
    peaks.append(live.peak - shards)
    live.peak = 0
    with live:
        loss.backward()
    peaks.append(live.peak - 2 * shards)  # the shards' gradients have come to stay
    return tuple(peak / (4 * WIDE_BLOCK) for peak in peaks)


@TWO_RANKS.check
def test_D12_memory_beyond_the_shards_is_bounded_in_blocks(rank: int, num_ranks: int) -> None:
    for dtypes, backward_blocks in BACKWARD_BLOCKS.items():
        with without_transport():
            construction, forward, backward = count_live_block(*dtypes)
        gathered = 1.0 if dtypes[0] is None else 0.5  # a whole block in the compute dtype
        # Matrices of a quarter block: one whole, with its draw and its rows, and the one before
        # until it is freed.
        # A block at a time would be two: whole, its rows, and the place for the gather.
        assert construction <= 1.25
        # the one that runs and the next one; their gather needs no copy
        assert forward <= 2 * gathered + LITTLE
        assert backward <= backward_blocks + LITTLE


@TWO_RANKS.check
def test_a_model_built_on_the_meta_device_draws_what_the_constructor_draws(
    rank: int, num_ranks: int
) -> None:
    model = on_meta(transformer)
    torch.manual_seed(0)
    fsdp = FSDP(model, device="cpu")
    cos = fsdp.module.layers[0].attn.rope.cos
    expected = seeded(transformer)
    assert torch.equal(cos, expected.layers[0].attn.rope.cos)
    assert largest_difference(fsdp, expected) == 0
    assert train_both(rank, num_ranks, expected, fsdp) <= FP32_BOUND


@THREE_RANKS.check
def test_D2_D3_rows_are_split_exactly_and_replicated_parameters_are_not(
    rank: int, num_ranks: int
) -> None:
    """Tied, frozen, 0-d and empty parameters, a buffer, and ranks without a row."""
    fsdp = FSDP(seeded(awkward, seed=rank))
    shapes = {name: tuple(parameter.shape) for name, parameter in fsdp.module.named_parameters()}
    assert shapes["inner.weight"] == [(3, 5), (3, 5), (1, 5)][rank]
    assert shapes["out.weight"] == [(1, 7), (0, 7), (0, 7)][rank]
    assert shapes["inner.bias"] == [(3,), (3,), (1,)][rank]
    assert shapes["scale"] == () and shapes["nothing"][1] == 3
    assert largest_difference(fsdp, seeded(awkward)) == 0
    full = fsdp.gather_full_params()
    doubled = {name: 2 * value for name, value in full.items()}
    fsdp.load_full_params(doubled)
    torch.testing.assert_close(fsdp.gather_full_params(), doubled, rtol=0, atol=0)
    with pytest.raises(
        ValueError, match=r"full must hold 'inner.weight' of shape \(7, 5\), it is missing"
    ):
        fsdp.load_full_params(
            {name: value for name, value in full.items() if name != "inner.weight"}
        )
    with pytest.raises(
        ValueError, match=r"full must hold 'inner.weight' of shape \(7, 5\), got \(3, 5\)"
    ):
        fsdp.load_full_params({**full, "inner.weight": torch.zeros(3, 5)})


def test_D3_chunks_cover_every_row_once():
    for rows, num_ranks in product((0, 1, 2, 3, 7, 8, 100), (1, 2, 3, 4)):
        owned = [
            row for rank in range(num_ranks) for row in range(rows)[own_rows(rows, rank, num_ranks)]
        ]
        assert owned == list(range(rows))
        assert num_ranks * chunk_rows(rows, num_ranks) - rows < num_ranks


# Mixed precision, compile, loss scale


@TWO_RANKS.check
def test_D5_masters_stay_float32_and_a_norm_that_overflows_is_known_to_all(
    rank: int, num_ranks: int
) -> None:
    dtypes = set()
    for reduce_dtype in (None, torch.float32):
        fsdp = FSDP(seeded(transformer), torch.bfloat16, reduce_dtype=reduce_dtype)
        fsdp.module.layers[1].register_forward_hook(
            lambda _module, _args, output: dtypes.add(output.dtype)
        )
        optimizer = AdamW(fsdp.parameters(), lr=1e-3)
        losses = []
        for _ in range(8):
            optimizer.zero_grad()
            losses.append(token_loss(fsdp, *(part(one, rank, num_ranks) for one in batch(0))))
            losses[-1].backward()
            fsdp.finish_gradient_synchronization()
            optimizer.step()
        assert losses[-1] < losses[0]
        assert {parameter.dtype for parameter in fsdp.parameters()} == {torch.float32}
        rows = [
            parameter.grad
            for unit in fsdp.units
            for parameter in (weight.shard for weight in unit.weights)
        ]
        rounded = all(torch.equal(row, row.bfloat16().float()) for row in rows)
        # means of float32 are not rounded to the compute dtype
        assert rounded == (reduce_dtype is None)
    assert dtypes == {torch.bfloat16}
    if rank == 0:
        fsdp.units[1].weights[0].shard.grad[0, 0] = float("inf")
    assert not fsdp.clip_grad_norm_(1.0).isfinite()
    assert all(parameter.grad.isnan().all() for parameter in fsdp.parameters())


def train_compiled(rank: int, num_ranks: int) -> float:
    model = FSDP(wrap_blocks(seeded(transformer), checkpointing="non_reentrant", compiled=True))
    return train_both(rank, num_ranks, seeded(transformer), model)


@pytest.mark.slow
@pytest.mark.skipif(not has_cxx_compiler(), reason="no C++ compiler")
def test_compiled_blocks_train_like_one_process():
    assert max(run_ranks(train_compiled, 2)) <= FP32_BOUND


@TWO_RANKS.check
def test_D17_a_compiled_wrapper_trains_as_one_process_and_compiles_once(
    rank: int, num_ranks: int
) -> None:
    """Its hooks were traced: ranks told each other falsely that they had parted, or compiled anew
    in each step.
    """
    single, fsdp = seeded(transformer), FSDP(seeded(transformer))
    counter = CompileCounter()
    compiled = torch.compile(fsdp, backend=counter)
    counts = []

    def run(model: nn.Module, step: int, *tensors: Tensor) -> None:
        token_loss(compiled if model is fsdp else model, *tensors).backward()
        counts.append(counter.frame_count)

    assert train_both(rank, num_ranks, single, fsdp, run, steps=6) <= FP32_BOUND
    assert 0 < counts[-1] == counts[4]


# Unused weights (D1), errors (D8, D9)


def branches() -> Any:
    """Uses `left` and `right` only when asked."""

    def run(model: Any, x: Tensor) -> Tensor:
        x = model.left(x) if model.use_left else x
        x = model.right(x) if model.use_right else x
        return model.out(x * model.gain if model.use_gain else x)

    layers = {"left": nn.Linear(4, 4), "right": nn.Linear(4, 4), "out": nn.Linear(4, 1)}
    return Net(
        run,
        **layers,
        gain=nn.Parameter(torch.ones(4)),
        use_left=True,
        use_right=False,
        use_gain=True,
    )


@TWO_RANKS.check
def test_D1_unused_weights_keep_no_gradient_and_hang_nobody(rank: int, num_ranks: int) -> None:
    fsdp = FSDP(seeded(branches))
    fsdp.module.use_gain = rank == 0  # a replicated parameter that one rank does not use
    fsdp(torch.ones(2, 4)).sum().backward()
    fsdp.finish_gradient_synchronization()
    assert fsdp.module.right.weight.grad is None
    assert fsdp.module.gain.grad is not None and fsdp.module.gain.grad.abs().max() > 0


def take_every_form(
    model: Any, x: Tensor, pair: Any, *, factor: Tensor, seen: list[torch.dtype]
) -> Tensor:
    seen += [x.dtype, pair[0].dtype, factor.dtype]
    return (x * factor + pair[0]) @ model.weight


def test_arguments_of_every_form_are_cast(alone_in_a_group):
    wrapped = FSDP(Net(take_every_form, weight=nn.Parameter(torch.ones(3, 3))), torch.bfloat16)
    x, seen = torch.ones(4, 3), []
    wrapped(x, (x, x), factor=x, seen=seen).sum().backward()
    assert seen == [torch.bfloat16] * 3  # the caller's list, no copy
    assert wrapped.module.weight.grad.tolist() == [[8.0] * 3] * 3


def test_D16_optimizers_that_would_move_no_rows_or_move_them_wrongly_are_refused(alone_in_a_group):
    """Only a checkpoint refused the second kind, after steps that were wrong in silence."""
    plain = nn.Sequential(nn.Linear(4, 4))
    before = torch.optim.AdamW(plain.parameters())
    wrapped = FSDP(plain)
    wrapped(torch.ones(2, 4)).sum().backward()
    wrapped.finish_gradient_synchronization()
    with pytest.raises(
        ValueError, match="parameters from before FSDP or apply_tensor_parallel cut them"
    ):
        before.step()
    optimizer = torch.optim.Adafactor(wrapped.parameters())
    for step in (
        optimizer.step,
        optimizer.step,
        torch.compile(lambda: optimizer.step(), backend="eager"),
    ):
        with pytest.raises(
            ValueError, match="Adafactor does not update a weight element by element, so it and its"
        ):
            step()


# Errors in a step, and orders that are not the expected ones (D4, D12)


@TWO_RANKS.check
def test_D12_surprises_do_not_widen_the_window(rank: int, num_ranks: int) -> None:
    """After an early exit six units were once gathered at a time: those of the wrong guesses
    stayed.
    """
    for how in ("early exit", "another order", "two forwards"):
        single, inner = seeded(transformer), seeded(transformer)
        fsdp = FSDP(inner, granularity="layer")
        events = watch(fsdp)

        def run(
            model: nn.Module, step: int, *tensors: Tensor, how: str = how, inner: Any = inner
        ) -> None:
            transformer: Any = inner if isinstance(model, FSDP) else model
            layers = transformer.layers
            if how == "early exit" and step == 2:
                transformer.layers = layers[:2]
            elif how == "another order" and step >= 1:
                transformer.layers = layers[::-1]
            loss = token_loss(model, *tensors)
            if how == "two forwards":
                loss = loss + token_loss(model, *tensors)
            loss.backward()
            transformer.layers = layers

        assert train_both(rank, num_ranks, single, fsdp, run, steps=4) <= FP32_BOUND
        assert max(len(event.gathered) for event in events) <= 3


# Construction, and forms of arguments


BAD: list[tuple[Callable[[], object], str]] = [
    (
        lambda: FSDP(nn.Linear(3, 3), torch.int8),
        "compute_dtype must be a floating-point dtype, got torch.int8",
    ),
    (
        lambda: FSDP(nn.Linear(3, 3), reduce_dtype="float16"),
        "reduce_dtype must be a floating-point dtype",
    ),  # type: ignore[arg-type]
    (
        lambda: FSDP(nn.Linear(3, 3), granularity="row"),
        "granularity must be one of block, layer, got 'row'",
    ),  # type: ignore[arg-type]
    (
        lambda: wrap_blocks(transformer(), checkpointing="full"),
        "checkpointing must be one of none, reentrant, non_re",
    ),  # type: ignore[arg-type]
    (lambda: wrap_blocks(nn.Linear(3, 3)), "model must hold its blocks in an nn.ModuleList"),
    (lambda: FSDP(nn.Linear(3, 3)).clip_grad_norm_(0), "max_norm must be positive, got 0"),
    (
        lambda: FSDP(
            on_meta(lambda: nn.Sequential(Net(None, weight=nn.Parameter(torch.ones(2, 2)))))
        ),  # type: ignore[arg-type]
        "module '0' was built on the meta device and has no reset_parameters",
    ),
    (
        lambda: FSDP(nn.Embedding(5, 3, sparse=True))(torch.tensor([1, 2])).sum().backward(),
        r"gradients must be dense, got torch.sparse_coo of shape \(5, 3\)",
    ),
]


def test_bad_arguments_are_refused(alone_in_a_group):
    for call, message in BAD:
        with pytest.raises((TypeError, ValueError), match=message):
            call()


# The plan and the order


def test_units_by_granularity():
    model = on_meta(transformer)
    assert [plan.name for plan in plan_units(model, "block")] == [
        "token_embeddings", *(f"layers.{index}" for index in range(TINY.num_layers)), "lm_head",
    ]  # fmt: skip
    layers = [plan.name for plan in plan_units(model, "layer")]
    assert layers[:3] == ["token_embeddings", "layers.0.attn.q_proj", "layers.0.attn.k_proj"]
    assert len(layers) == 2 + 7 * TINY.num_layers
