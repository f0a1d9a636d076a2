"""Every kind of module × wrapper × use either trains as one process does, or is refused by a named
reason.

    pytest tests/test_equality.py                        # ALWAYS, and a sixtieth of all others, drawn by their names
    pytest tests/test_equality.py -m slow                # all of them
    python -m tests.test_equality fsdp "tied*" "*"       # some, with what went wrong

One process trains on the whole batch, ranks train on parts of it, in float64: losses of each step
and parameters after three steps of SGD with momentum must agree within 1e-9. A refusal is a
ValueError, TypeError or RuntimeError that this package raises, and stands in REFUSED: any other one
fails, and so does an entry that nothing needs.
"""

from __future__ import annotations

import gc
import sys
import traceback
import weakref
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from re import search
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import cs336_systems
from cs336_systems.distributed.ddp import DataParallel
from cs336_systems.distributed.ddp_bucketed import BucketedDDP
from cs336_systems.distributed.ddp_flat import FlatDDP
from cs336_systems.distributed.ddp_naive import NaiveDDP
from cs336_systems.distributed.ddp_overlap import OverlapDDP
from cs336_systems.distributed.fsdp import FSDP
from cs336_systems.distributed.loss_scale import LossScaler
from cs336_systems.distributed.sharded_optimizer import ShardedOptimizer
from cs336_systems.distributed.spawn import is_from_gloo, run_ranks
from cs336_systems.distributed.zero1 import Zero1Optimizer
from tests.module_kinds import KINDS, Kind, Net, double
from tests.sharding_models import RaiseInBackward, whole

# in a step
UNUSED_PARAMETERS = [
    KINDS[name] for name in ("unused layer", "alternating branches", "routed samples")
]
COVERS = ("cs336_systems/distributed", "tests/module_kinds.py")
SAMPLES, STEPS = 6, 3
SAMPLED = 60  # one case in so many is no slow test
OURS = str(Path(cs336_systems.__file__).parent)

DDP = "naive|flat|overlap|bucketed|sharded-optimizer"
TWICE = "arrived twice in a step"
# (wrappers, kinds, uses, what the refusal says): patterns of names, of which the first that fits
# counts; "" is served.
REFUSED: list[tuple[str, str, str, str]] = [
    ("*", "sparse embedding", "frozen parameter", ""),
    ("*", "sparse embedding", "*", "gradients must be dense, got torch.sparse_coo"),
    (DDP, "max norm", "*", r"module '(inner\.)?0' has max_norm"),
    (
        "fsdp, *",
        "max norm",
        "*",
        r"parameter '(inner\.)?0\.weight' must not be changed in a forward, as max_norm does",
    ),
    (
        "fsdp, *",
        "gradient hook",
        "*",
        r"parameter '(inner\.)?0\.weight' must have no gradient hooks",
    ),
    # A weight that reentrant checkpoints reach more than once has its gradient more than once.
    ("overlap|bucketed|zero1", "reentrantly checkpointed shared block", "input gradients", ""),
    ("overlap|bucketed|zero1", "reentrantly checkpointed shared block", "*", TWICE),
    ("overlap|bucketed|zero1", "*checkpointed reentrantly*", "two forwards, one backward", TWICE),
    ("overlap|bucketed|zero1", "reentrantly checkpointed*", "two forwards, one backward", TWICE),
    # These have one parameter, and so no later group.
    (
        "zero1",
        "parameter dict|linear without bias|own matrix|complex|weight returned",
        "parameters in a later group",
        "",
    ),
    ("zero1", "function that keeps its weight", "parameters in a later group", ""),
    ("zero1", "*", "parameters in a later group", r"Zero1Optimizer cannot add a group"),
    ("zero1", "*", "gradient scaler", "Zero1Optimizer needs LossScaler"),
    ("zero1", "*", "synchronized twice", TWICE),
]
# Not compared: (wrappers, kinds, uses).
LEFT_OUT: list[tuple[str, str, str]] = [
    # it sees parameters, not the modules that rescale them by their batch
    ("zero1", "max norm", "*"),
    # its momentum goes on in steps that do not use a parameter, as it says
    ("zero1", "alternating branches", "*"),
    ("*", "routed samples", "thrown away"),  # a rank would raise alone
    # refuses steps in which ranks run other modules: test_s7_fsdp.py
    ("fsdp, *", "routed samples", "*"),
]
# What once went wrong, in silence or by a crash, is tried in every run: (wrappers, kinds, uses).
ALWAYS: list[tuple[str, str, str]] = [
    ("fsdp, blocks", "tied*|head by*|*nested units|owns and calls|shared*|list*|multihead attention|attention in a list"
     "|encoder|parameter*|*weight norm|complex|dataclass output|*in place|losses kept*|in-place relu|max norm|*hook|"
     "channels last|transposed weight|*weight returned|generator|function*",
     "plain"),
    ("overlap|zero1", "sparse embedding", "plain"),
    ("zero1", "complex", "clipping"),
    ("zero1", "mlp|tied embedding and head", "gradient scaler|load_state_dict"),
    ("*", "transformer", "loss scaler"),
]  # fmt: skip


# One side of the comparison


@dataclass
class Side:
    """A model in training: alone with whole batches, or wrapped with this rank's part of each."""

    kind: Kind
    module: nn.Module  # the raw one, for modes and for what the uses set
    model: Any  # what the inputs go into
    make_optimizer: Callable[[list[nn.Parameter]], Any] = partial(
        torch.optim.SGD, lr=0.1, momentum=0.9
    )
    rank: int | None = None  # None: alone
    optimizer: Any = None
    losses: list[Tensor] = field(default_factory=list)
    scaler: LossScaler = field(
        default_factory=lambda: LossScaler("cpu", init_scale=8.0, growth_interval=1)
    )

    @property
    def averages(self) -> Any:
        """What averages the gradients, if anything does: the wrapper or the optimizer."""
        both = (self.model, self.optimizer)
        return next((one for one in both if hasattr(one, "finish_gradient_synchronization")), None)

    def finish(self) -> None:
        if self.averages is not None:
            self.averages.finish_gradient_synchronization()

    def no_sync(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.averages is None else self.averages.no_sync()

    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def load(self, state: dict[str, Tensor]) -> None:
        if isinstance(self.model, FSDP):
            self.model.load_full_params(state)
        else:
            # without buffers, and a tied weight by one of its names
            self.module.load_state_dict(state, strict=False)

    def inputs(self, batch: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(100 + batch)
        whole = self.kind.inputs(generator, SAMPLES)
        return (
            whole
            if self.rank is None
            else tuple(one.chunk(dist.get_world_size())[self.rank] for one in whole)
        )

    def loss(self, batch: int, *more: Any) -> Tensor:
        return mean_loss(self.model(*self.inputs(batch), *more))

    def backward(self, loss: Tensor, **options: Any) -> None:
        self.losses.append(loss.detach())
        loss.backward(**options)

    def skip(self) -> None:
        """Throw this step's gradients away, some on their way."""
        if isinstance(self.model, DataParallel):
            self.model.skip_step()
        if isinstance(self.optimizer, Zero1Optimizer):
            self.finish()
        self.optimizer.zero_grad()

    def update(self) -> None:
        self.finish()
        self.optimizer.step()


def mean_loss(output: Any) -> Tensor:
    """A mean over samples, of every tensor that a model returns."""
    return sum((one.square() + one.sin()).mean() for one in tree_leaves(output))  # type: ignore[return-value]


# Uses: what scripts do with a model in a step. Some change it before it is wrapped.


@dataclass(frozen=True)
class Use:
    step: Callable[[Side, int], object]
    prepare: Callable[[nn.Module], nn.Module] = lambda module: module
    updates: bool = True  # parameters after the step; otherwise the step does
    first_group: Callable[[list[nn.Parameter]], list[nn.Parameter]] = lambda parameters: parameters
    tolerance: float = 1e-9  # relative

    def train(self, side: Side) -> None:
        for step in range(STEPS):
            for inner in side.module.modules():
                if hasattr(inner, "step"):
                    inner.step = step  # type: ignore[assignment]
            side.optimizer.zero_grad()
            self.step(side, step)
            if self.updates:
                side.update()


def plain(side: Side, step: int) -> None:
    side.backward(side.loss(step))


def accumulate(side: Side, step: int) -> None:
    with side.no_sync():
        side.backward(side.loss(10 * step))
        side.backward(side.loss(10 * step + 1))
    side.backward(side.loss(10 * step + 2))


def forward_without_backward(side: Side, step: int) -> None:
    """In training mode, with gradients on: a metric, or a bad batch that is skipped."""
    side.losses.append(side.loss(step + 20).detach())
    side.backward(side.loss(step))
    side.losses.append(side.loss(step + 30).detach())  # what it gathers is old after the update
    side.update()
    side.losses.append(side.loss(step + 10).detach())


def evaluate_between(side: Side, step: int) -> None:
    side.backward(side.loss(step))
    side.update()
    side.module.eval()
    with torch.no_grad():
        side.losses.append(side.loss(step + 10))
    with torch.inference_mode():
        side.losses.append(side.loss(step + 10).clone())
    side.module.train()


def evaluate_before_finishing(side: Side, step: int) -> None:
    side.backward(side.loss(step))
    with torch.no_grad():
        side.losses.append(side.loss(step + 10))


def clip(side: Side, step: int) -> None:
    side.backward(side.loss(step))
    side.finish()
    if isinstance(side.averages, FSDP | Zero1Optimizer):
        side.losses.append(side.averages.clip_grad_norm_(0.01))
    else:
        side.losses.append(nn.utils.clip_grad_norm_(side.parameters(), 0.01, foreach=False))
    side.optimizer.step()


def scale(side: Side, step: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    side.backward(scaler.scale(side.loss(step)))
    side.finish()
    scaler.step(side.optimizer)


def scale_for_all(side: Side, step: int) -> None:
    """The second step overflows on the last rank, and all skip it; every other one unscales early,
    as for clipping.
    """
    loss = side.loss(step)
    if step == 1 and side.rank in (None, dist.get_world_size() - 1):
        loss = loss * torch.inf
    side.scaler.scale(loss).backward()
    side.finish()
    if step % 2:
        side.scaler.unscale_(side.optimizer)
    side.scaler.step(side.optimizer)
    side.scaler.update()
    side.losses.append(torch.tensor(side.scaler.get_scale()))


def load(side: Side, step: int) -> None:
    """Other weights, after the optimizer was made and after a step."""
    if step < 2:
        side.load({name: value * (0.5 + step) for name, value in INITIAL[side.kind].items()})
    side.backward(side.loss(step))


def throw_away(side: Side, step: int) -> None:
    """Of a micro-batch, of a backward, and of one that raises."""
    with side.no_sync():
        side.backward(side.loss(step + 10))
    side.model.zero_grad()
    side.backward(side.loss(step + 20))
    side.skip()
    inner = [*side.module.modules()]
    handle = inner[len(inner) // 2].register_forward_hook(_raise_in_backward)
    with suppress(ArithmeticError):
        side.loss(step + 30).backward()
    handle.remove()
    side.skip()
    side.backward(side.loss(step))


def _raise_in_backward(module: nn.Module, inputs: Any, output: Any) -> Any:
    return RaiseInBackward.apply(output) if isinstance(output, Tensor) else output


def synchronize_twice(side: Side, step: int) -> None:
    """As of adversaries: both forwards first, and each backward with its own synchronization."""
    losses = side.loss(step), side.loss(step + 10)
    side.backward(losses[0])
    side.finish()
    side.backward(losses[1])


def add_group(side: Side, step: int) -> None:
    if step == 1 and len(parameters := side.parameters()) > 1:
        side.optimizer.add_param_group({"params": parameters[1:], "lr": 0.05})
    side.backward(side.loss(step))


def keep_zeros(side: Side, step: int) -> None:
    side.optimizer.zero_grad(set_to_none=False)
    side.backward(side.loss(step))


def backward_twice(side: Side, step: int) -> None:
    loss = side.loss(step)
    with side.no_sync():
        side.backward(loss, retain_graph=True)
    side.backward(loss)


def change_output_in_place(side: Side, step: int) -> None:
    output = side.model(*side.inputs(step))
    for one in tree_leaves(output):
        one /= 2
    side.backward(mean_loss(output))


def fill_a_list(side: Side, step: int) -> None:
    losses: list[Tensor] = []
    loss = side.loss(step, losses)
    side.backward(loss + sum(losses))


def take_input_gradients(side: Side, step: int) -> None:
    """Of a forward between steps: no parameter's gradient is wanted."""
    inputs = [one.requires_grad_(one.is_floating_point()) for one in side.inputs(step + 10)]
    if wanted := [one for one in inputs if one.requires_grad]:
        torch.autograd.grad(mean_loss(side.model(*inputs)), wanted)
    side.backward(side.loss(step))


def raise_in_a_forward(side: Side, step: int) -> None:
    handle = list(side.module.modules())[-1].register_forward_hook(_raise)
    with suppress(ArithmeticError):
        side.loss(step + 10)
    handle.remove()
    side.backward(side.loss(step))


def _raise(*_: Any) -> None:
    raise ArithmeticError("planted")


def interrupt_a_forward(side: Side, step: int) -> None:
    """By Ctrl-C, for which modules call no hooks."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = list(side.module.modules())[-1].register_forward_hook(interrupt)
    with suppress(KeyboardInterrupt):
        side.loss(step + 10)
    handle.remove()
    side.backward(side.loss(step))


def freeze_for_a_backward(side: Side, step: int) -> None:
    """As a discriminator in its generator's step: only the input's gradient is wanted."""
    trained = [parameter for parameter in side.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    inputs = [one.requires_grad_(one.is_floating_point()) for one in side.inputs(step + 10)]
    if any(one.requires_grad for one in inputs):
        mean_loss(side.model(*inputs)).backward()
    for parameter in trained:
        parameter.requires_grad_(True)
    side.backward(side.loss(step))


def behind_a_checkpoint(inner: nn.Module, use_reentrant: bool) -> nn.Module:
    """The whole model behind one checkpoint, with an input that makes a reentrant one
    differentiable.
    """

    def run(model: Any, *inputs: Tensor) -> Any:
        handle = torch.zeros((), requires_grad=True)
        return checkpoint(
            lambda _, *args: model.inner(*args), handle, *inputs, use_reentrant=use_reentrant
        )

    return Net(run, inner=inner)


def with_auxiliary_loss(inner: nn.Module) -> nn.Module:
    """Adds a loss of its own to the list that it is given."""

    def run(model: Any, *inputs: Any) -> Any:
        output = model.inner(*inputs[:-1])
        inputs[-1].append(sum(one.square().mean() for one in tree_leaves(output)))
        return output

    return Net(run, inner=inner)


def freeze_first(module: nn.Module) -> nn.Module:
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in trainable[:-1][:1]:
        parameter.requires_grad_(False)
    return module


USES: dict[str, Use] = {
    "plain": Use(plain),
    "accumulation": Use(accumulate),
    "two forwards, one backward": Use(
        lambda side, step: side.backward(side.loss(step) + side.loss(step + 10))
    ),
    "forward without backward": Use(forward_without_backward, updates=False),
    "evaluation between": Use(evaluate_between, updates=False),
    "evaluation before finishing": Use(evaluate_before_finishing),
    "checkpointed": Use(plain, partial(behind_a_checkpoint, use_reentrant=False)),
    "checkpointed reentrantly": Use(plain, partial(behind_a_checkpoint, use_reentrant=True)),
    "clipping": Use(clip, updates=False, tolerance=1e-6),  # sharded norms are float32
    "gradient scaler": Use(scale, updates=False),
    "loss scaler": Use(scale_for_all, updates=False),
    "load_state_dict": Use(load),
    "thrown away": Use(throw_away),
    "synchronized twice": Use(synchronize_twice),
    "parameters in a later group": Use(add_group, first_group=lambda parameters: parameters[:1]),
    "zeros kept": Use(keep_zeros),
    "frozen parameter": Use(plain, freeze_first),
    "backward twice": Use(backward_twice),
    "output in place": Use(change_output_in_place),
    "list argument": Use(fill_a_list, with_auxiliary_loss),
    "input gradients": Use(take_input_gradients),
    "forward that raises": Use(raise_in_a_forward),
    "interrupted forward": Use(interrupt_a_forward),
    "frozen for a backward": Use(freeze_for_a_backward),
}
INITIAL: dict[Kind, dict[str, Tensor]] = {}  # the parameters that `load` starts from


# Wrappers


def data_parallel(kind: Kind, module: nn.Module, wrap: Any, **options: Any) -> Side:
    return Side(
        kind, module, wrap(module, find_unused_parameters=kind in UNUSED_PARAMETERS), **options
    )


SGD: dict[str, Any] = {"optimizer_cls": torch.optim.SGD, "lr": 0.1, "momentum": 0.9}


def zero1(kind: Kind, module: nn.Module) -> Side:
    for buffer in module.buffers():
        dist.broadcast(buffer, 0)  # the optimizer sees parameters only
    return Side(kind, module, module, partial(Zero1Optimizer, bucket_size_mb=2e-4, **SGD))


WRAPPERS: dict[str, Callable[[Kind, nn.Module], Side]] = {
    "naive": partial(data_parallel, wrap=NaiveDDP),
    "flat": partial(data_parallel, wrap=FlatDDP),
    "overlap": partial(data_parallel, wrap=OverlapDDP),
    "bucketed": partial(data_parallel, wrap=partial(BucketedDDP, bucket_size_mb=2e-4)),
    "sharded-optimizer": partial(
        data_parallel, wrap=NaiveDDP, make_optimizer=partial(ShardedOptimizer, **SGD)
    ),
    "zero1": zero1,
    "fsdp, blocks": lambda kind, module: Side(kind, module, FSDP(module, granularity="block")),
    "fsdp, layers": lambda kind, module: Side(kind, module, FSDP(module, granularity="layer")),
}


# A case: what all ranks agree on


@dataclass(frozen=True)
class Outcome:
    wrapper: str
    kind: str
    use: str
    refusal: str = ""
    failure: str = ""

    def __str__(self) -> str:
        return f"{self.wrapper} × {self.kind} × {self.use}"


def train(name: str, use: Use, wrapper: str | None) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The parameters, whole, after training, and the losses (of this rank's part)."""
    kind = KINDS[name]
    torch.manual_seed(0 if wrapper is None else dist.get_rank())  # rank 0's values are to reach all
    module = use.prepare(double(kind.build()))
    if wrapper is None and use.step is load:
        INITIAL[kind] = {key: value.detach().clone() for key, value in module.named_parameters()}
    side = Side(kind, module, module) if wrapper is None else WRAPPERS[wrapper](kind, module)
    side.rank = None if wrapper is None else dist.get_rank()
    side.optimizer = side.make_optimizer(use.first_group(side.parameters()))
    use.train(side)
    return whole(side.model), side.losses


@cache
def expected(name: str, use: str) -> tuple[dict[str, Tensor], list[Tensor]] | str:
    """What one process makes of a case, or why it cannot."""
    try:
        return train(name, USES[use], None)
    except (RuntimeError, TypeError) as error:
        return str(error)


def attempt(wrapper: str, name: str, use: str) -> Outcome:
    one_process = expected(name, use)
    assert not isinstance(one_process, str)
    try:
        found, losses = train(name, USES[use], wrapper)
    except (
        ValueError,
        TypeError,
        RuntimeError,
        LookupError,
        AttributeError,
        AssertionError,
    ) as error:
        frames = traceback.extract_tb(error.__traceback__)
        if frames[-1].filename.startswith(OURS) and isinstance(
            error, ValueError | TypeError | RuntimeError
        ):
            return Outcome(wrapper, name, use, refusal=str(error))
        return Outcome(wrapper, name, use, failure="".join(traceback.format_exception(error)))
    parameters, whole_losses = one_process
    tolerance = {"rtol": USES[use].tolerance, "atol": USES[use].tolerance / 10}
    coarse = {"rtol": 1e-6, "atol": 1e-7}
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    try:
        assert found.keys() == parameters.keys()
        for key, value in parameters.items():
            bound = coarse if value.dtype == torch.float32 else tolerance
            torch.testing.assert_close(
                found[key], value, **bound, msg=lambda text, key=key: f"{key}: {text}"
            )
        torch.testing.assert_close(
            mean / dist.get_world_size(), torch.stack(whole_losses), **tolerance
        )
    except AssertionError as error:
        return Outcome(wrapper, name, use, failure=str(error))
    return Outcome(wrapper, name, use)


Case = tuple[str, str, str]


def make(rank: int, num_ranks: int, cases: list[Case]) -> list[Outcome]:
    torch.set_num_threads(1)
    outcomes = []
    for wrapper, name, use in cases:
        if isinstance(expected(name, use), str):  # one process cannot do it
            continue
        outcome = attempt(wrapper, name, use)
        everyone: list[Any] = [None] * num_ranks
        try:
            dist.all_gather_object(everyone, outcome)
        except RuntimeError as error:
            if is_from_gloo(said := outcome.refusal or outcome.failure):
                raise  # it waited for the other rank, whose own account is to be told
            raise AssertionError(f"{outcome}: ranks parted; this one: {said}") from error
        failures = [
            f"rank {place}: {one.failure}" for place, one in enumerate(everyone) if one.failure
        ]
        if not failures and len({bool(one.refusal) for one in everyone}) > 1:
            failures = [f"refused by a rank alone: {everyone}"]
        outcomes.append(replace(outcome, failure="\n".join(failures)))
    return outcomes


# Judgement


def expected_refusal(outcome: Outcome) -> str:
    """What REFUSED says of a case; "" if it is to be served."""
    names = (outcome.wrapper, outcome.kind, outcome.use)
    return next((message for *patterns, message in REFUSED if all(map(fits, names, patterns))), "")


def fits(name: str, patterns: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns.split("|"))


def judge(outcomes: list[Outcome]) -> list[str]:
    """What is wrong, a text a case."""
    wrong = []
    for outcome in outcomes:
        message = expected_refusal(outcome)
        if outcome.failure:
            wrong.append(f"{outcome}: {outcome.failure}")
        elif outcome.refusal and not (message and search(message, outcome.refusal)):
            wrong.append(f"{outcome}: refused: {outcome.refusal}")
        elif message and not outcome.refusal:
            wrong.append(f"{outcome}: equals one process, though REFUSED has it")
    return wrong


def all_cases(wrapper: str) -> list[Case]:
    cases = [(wrapper, kind, use) for kind in KINDS for use in USES]
    return [
        case for case in cases if not any(all(map(fits, case, patterns)) for patterns in LEFT_OUT)
    ]


def sampled(cases: list[Case]) -> list[Case]:
    """The cases of ALWAYS, and a sample of the rest."""
    return [
        case
        for case in cases
        if zlib.crc32("/".join(case).encode()) % SAMPLED == 0
        or any(all(map(fits, case, one)) for one in ALWAYS)
    ]


def check(outcomes: list[Outcome], at_least: int) -> None:
    assert len(outcomes) >= at_least, "cases that one process can make"
    wrong = judge(outcomes)
    assert not wrong, f"{len(wrong)} of {len(outcomes)} cases:\n" + "\n\n".join(wrong)


@cache
def sampled_outcomes() -> list[Outcome]:
    """Of all wrappers in one job: starting ranks, and one process to compare with, take most of the
    time.
    """
    cases = [case for wrapper in WRAPPERS for case in sampled(all_cases(wrapper))]
    return run_ranks(make, 2, cases, timeout_s=60)[0]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_D2_D4_D14_a_wrapper_trains_as_one_process(wrapper):
    check([outcome for outcome in sampled_outcomes() if outcome.wrapper == wrapper], at_least=15)


@pytest.mark.parametrize("num_ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_D3_D9_any_number_of_ranks(num_ranks):
    kinds = (
        "mlp|tied and deep|only the head trained|scalar|empty|buffer|routed samples|mixed dtypes"
    )
    cases = [
        case
        for wrapper in WRAPPERS
        for case in all_cases(wrapper)
        if all(map(fits, case[1:], (kinds, "acc*")))
    ]
    check(run_ranks(make, num_ranks, cases)[0], at_least=60)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_D2_D4_D14_every_kind_in_every_use(wrapper, part):
    check(run_ranks(make, 2, all_cases(wrapper)[part::8], timeout_s=60)[0], at_least=125)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_what_is_dropped_is_gone_and_its_model_trains_on(wrapper, alone_in_a_group):
    """Parameters once held it through hooks, a cycle that no collector sees: both of two trainings
    stayed.
    """
    for name in ("mlp", "checkpointed", "checkpointed reentrantly"):
        kind = KINDS[name]
        module = double(kind.build())
        side = WRAPPERS[wrapper](kind, module)
        side.optimizer = side.make_optimizer(side.parameters())
        USES["accumulation"].train(side)
        inputs = side.inputs(0)
        gone = [weakref.ref(one) for one in (side.model, side.optimizer) if one is not module]
        gone += [weakref.ref(parameter) for parameter in side.parameters()]
        del side
        if "fsdp" not in wrapper:
            gc.collect()
            fresh = double(kind.build())
            fresh.load_state_dict(module.state_dict())
            for one in (module, fresh):
                one.zero_grad()
                mean_loss(one(*inputs)).backward()
            gradients, expected = (
                [parameter.grad for parameter in one.parameters()] for one in (module, fresh)
            )
            torch.testing.assert_close(gradients, expected, rtol=0, atol=0)
            del one
        del module
        gc.collect()
        assert [reference() for reference in gone] == [None] * len(gone)


def test_wrong_outcomes_are_told():
    """So that the comparison can fail: differences, refusals that nobody expects, expected ones
    that do not come.
    """
    assert judge([Outcome("naive", "mlp", "plain")]) == []
    assert judge([Outcome("naive", "mlp", "plain", failure="differs")]) == [
        "naive × mlp × plain: differs"
    ]
    assert judge([Outcome("naive", "mlp", "plain", refusal="no")]) == [
        "naive × mlp × plain: refused: no"
    ]
    differs = Outcome("naive", "mlp", "plain", failure="differs")
    refused = Outcome("naive", "mlp", "plain", refusal="no")
    assert [verdict(one) for one in (differs, refused)] == ["wrong", "refused"]
    assert "REFUSED has it" in judge([Outcome("zero1", "mlp", "parameters in a later group")])[0]


def verdict(outcome: Outcome) -> str:
    return "refused" if outcome.refusal else "wrong" if outcome.failure else "equal"


def main() -> None:
    patterns = (sys.argv[1:] + ["*"] * 3)[:3]
    cases = [
        case
        for wrapper in WRAPPERS
        for case in all_cases(wrapper)
        if all(map(fits, case, patterns))
    ]
    outcomes = run_ranks(make, 2, cases, timeout_s=120)[0]
    print("\n\n".join(judge(outcomes)))
    print(len(outcomes), "cases,", Counter(map(verdict, outcomes)))


if __name__ == "__main__":
    main()
