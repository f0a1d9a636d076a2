"""What the four data-parallel wrappers share: rank 0's model everywhere, accumulation, a gradient
for each parameter.

    model = OverlapDDP(model)                       # every rank now has rank 0's parameters and buffers
    with model.no_sync():                           # gradients pile up on each rank, nothing is sent
        loss(model(first_part)).backward()
    loss(model(second_part)).backward()
    model.finish_gradient_synchronization()         # .grad is now the mean over the ranks, on every rank
    clip_gradients(model.parameters(), 1.0)         # equal on all ranks, since the gradients are
    optimizer.step()

The loss is a mean over a rank's own batch, so that the mean of gradients is that of one process
with the whole batch. Ranks must issue the same collectives in the same order, or they hang: so they
agree on one, and each parameter takes part in each step. Buffers are made equal at construction
only.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import cache, partial
from itertools import accumulate
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from cs336_systems.distributed.collectives import (
    Group,
    Work,
    broadcast_from_first,
    broadcast_parameters,
    check_same_shapes,
    wait_for,
)
from cs336_systems.distributed.optimizer_shares import check_elementwise, check_no_search


class Accumulating(ABC):
    """What averages the gradients of a backward over the ranks, or leaves them on their rank while
    it is told to.
    """

    sends = True  # False within no_sync, and for good once a module was wrapped again
    # parameters that must stay trainable, or frozen, with their names
    fixed: Sequence[tuple[str, Tensor, bool]] = ()
    # the wrappers with gradients not yet averaged
    unfinished: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in here only accumulate; the first one outside is synchronised with all that
        they left.
        """
        before, self.sends = self.sends, False
        try:
            yield
        finally:
            self.sends = before

    def finish_gradient_synchronization(self) -> None:
        """Call after backward, before gradients are read: afterwards `.grad` is the mean over the
        ranks.

        FSDP's is that of this rank's rows, and of Zero1Optimizer `averaged_gradients` has the
        means. Waits on the device, not on the host. Raises RuntimeError within `no_sync`, for a
        parameter that was frozen or thawed since it was wrapped, and for one without a gradient
        where all must have one; TypeError for a sparse one.
        """
        if not self.sends:
            raise RuntimeError(
                "finish_gradient_synchronization() must be outside of no_sync(), of the latest wrapper"
            )
        for name, parameter, trainable in self.fixed:
            if parameter.requires_grad != trainable:
                change = "frozen" if trainable else "made trainable"
                raise RuntimeError(
                    f"parameter {name!r} was {change} after wrapping: wrap again, with a new optimizer"
                )
        self._finish()
        self.unfinished.discard(self)

    @abstractmethod
    def _finish(self) -> None:
        """Send what this step's backward has not sent, and wait for all."""

    def _arrive(self, index: int) -> None:
        """The backward has accumulated the gradient of a parameter, counted from the last one."""
        self.unfinished.add(self)

    def _waiting(self) -> set[Tensor]:
        """A wrapper's parameters that have gradients, here or put aside."""
        return set()


def check_unwrapped(module: nn.Module) -> None:
    """ValueError if a wrapper in `module` averages the gradients already, or FSDP has cut its
    parameters.

    And for a parameter without a shape, of a lazy module.
    """
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ValueError(
                f"parameter {name!r} has no shape yet: call the module once before it is wrapped"
            )
    for inner in module.modules():
        if isinstance(inner, Accumulating):
            raise ValueError(
                f"module must not be wrapped twice, and {type(inner).__name__} wraps it already"
            )
    if any(hasattr(parameter, "is_rows") for parameter in module.parameters()):
        raise ValueError(
            "module must be whole, and FSDP has cut its parameters into rows: build it anew"
        )


class Registrations:
    """Counts the parameters and modules that any module of this process has been given since
    `watch_steps`.

    Looking for new members of a model takes a walk over all its modules; while this number stays,
    there are none.
    """

    count: ClassVar[int] = 0

    @classmethod
    def add(cls, *_: Any) -> None:
        cls.count += 1


def check_members(module: nn.Module, members: Set[Tensor], registrations: int) -> int:
    """RuntimeError naming a parameter of `module` that is not among `members`, those when it was
    wrapped.

    `registrations` is what the check before returned, -1 for the first one: without new ones there
    is nothing to do.
    """
    if registrations != Registrations.count:
        for name, parameter in module.named_parameters():
            if parameter not in members:
                raise RuntimeError(
                    f"parameter {name!r} was added or replaced after wrapping, so its gradient is this rank's own: "
                    "wrap again, with a new optimizer"
                )
    return Registrations.count


@cache
def watch_steps() -> None:
    """From now on raise an error before an optimizer's step that would go wrong in silence.

    RuntimeError with gradients that were not averaged, of a closure's backward after the step, but
    within `no_sync`, where a step is its rank's own. TypeError for an optimizer that searches along
    all of FSDP's parameters, ValueError before the first step of an optimizer that was built before
    FSDP cut its parameters, or that does not update rows one by one. Once and for good: a hook that
    goes with its model would go in the middle of a step, where that is collected.
    """
    checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    @torch.compiler.disable  # else it would be looked at once, where the step is compiled
    def check_averaged(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for wrapper in [one for one in Accumulating.unfinished if one.sends]:
            waiting = wrapper._waiting()
            if any(not waiting.isdisjoint(group["params"]) for group in optimizer.param_groups):
                raise RuntimeError(
                    "call finish_gradient_synchronization() after the backward, before step()"
                )

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        check_averaged(optimizer)
        if optimizer not in checked:
            parameters = [
                parameter for group in optimizer.param_groups for parameter in group["params"]
            ]
            if any(hasattr(parameter, "is_cut") for parameter in parameters):
                raise ValueError(
                    "the optimizer has parameters from before FSDP cut them: build it after wrapping"
                )
            if any(hasattr(parameter, "is_rows") for parameter in parameters):
                check_no_search(type(optimizer))
                check_elementwise(type(optimizer), optimizer.defaults, rows=True)
            checked.add(optimizer)

    register_module_parameter_registration_hook(Registrations.add)
    register_module_module_registration_hook(Registrations.add)
    register_optimizer_step_pre_hook(check)
    register_optimizer_step_post_hook(check_averaged)  # of a closure's backward


class DataParallel(nn.Module, Accumulating):
    """Base of the wrappers around `module`, the same on every rank of `group` but for its values.

    Parameters that are trainable at construction are synchronised; one that is frozen, thawed,
    added or replaced later is refused. With `find_unused_parameters` a step may leave some without
    a gradient, frozen ones
    among them: ranks then vote at its end, which costs a message and a wait of the host, and a
    parameter that no rank has used keeps no gradient, as in one process. Without it such a step
    raises.

    A module that is wrapped again belongs to its latest wrapper, and those before are out of use.
    Raises ValueError on all ranks if their modules differ, on a rank that is not of `group`, and
    for a module with `max_norm` or a wrapper in it; RuntimeError without a process group, and
    before an optimizer's step with gradients that were not averaged.
    """

    # for what averages gradients as well
    alive: ClassVar[weakref.WeakSet[DataParallel]] = weakref.WeakSet()

    def __init__(
        self, module: nn.Module, group: Group = None, *, find_unused_parameters: bool = False
    ) -> None:
        super().__init__()
        check_unwrapped(module)
        for name, inner in module.named_modules():
            if getattr(inner, "max_norm", None) is not None:
                raise ValueError(
                    f"module {name!r} has max_norm: each rank would rescale the rows that its batch uses"
                )
        check_same_shapes([*module.named_parameters(), *module.named_buffers()], group)
        broadcast_parameters(module, group)
        self.module, self.group = module, group
        self.find_unused_parameters = find_unused_parameters
        self.names: dict[Tensor, str] = {
            one: name for name, one in module.named_parameters() if one.requires_grad
        }
        self.trainable = [*self.names]
        # with find_unused_parameters one that is frozen is one that no rank has used
        self.fixed = [
            (name, one, one.requires_grad)
            for name, one in module.named_parameters()
            if not (one.requires_grad and find_unused_parameters)
        ]
        self._members = set(module.parameters())
        for older in self.alive:
            if not set(older.trainable).isdisjoint(self.trainable):
                older.sends = False
        self._hear_of_gradients()

    def _hear_of_gradients(self) -> None:
        """Have what watches gradients and steps know this wrapper and its parameters."""
        self.alive.add(self)
        self._registrations = -1  # that were counted when all members were known
        call_at_each_gradient(self, self.trainable[::-1], type(self)._arrive)
        watch_steps()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy, whose parameters have no hooks."""
        super().__setstate__(state)
        self._hear_of_gradients()

    def _waiting(self) -> set[Tensor]:
        return {one for one in self.module.parameters() if one.grad is not None}

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.unfinished.discard(self)
        super().zero_grad(set_to_none)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def _finish(self) -> None:
        self._registrations = check_members(self.module, self._members, self._registrations)
        self._check_sent()
        unused = [index for index, parameter in enumerate(self.trainable) if parameter.grad is None]
        if unused and not self.find_unused_parameters:
            name = self.names[self.trainable[unused[0]]]
            raise RuntimeError(
                f"parameter {name!r} has no gradient on this rank, as {len(unused)} of "
                f"{len(self.trainable)}: use it in every step, freeze it, or pass find_unused_parameters=True"
            )
        for index in unused:
            self.trainable[index].grad = torch.zeros_like(self.trainable[index])
        self._synchronize()
        if self.find_unused_parameters and self.trainable:
            votes = torch.ones(len(self.trainable), dtype=torch.uint8)
            votes[unused] = 0
            votes = votes.to(self.trainable[0].device)
            dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.group)
            for index in (votes == 0).nonzero().flatten().tolist():  # that no rank has used
                self.trainable[index].grad = None

    def _check_sent(self) -> None:
        """RuntimeError naming a gradient that has been replaced since it was sent; here none is
        sent early.
        """

    @abstractmethod
    def _synchronize(self) -> None:
        """Make every gradient of `trainable` the mean over the ranks; all of them are there."""

    def skip_step(self) -> None:
        """Forget a step's gradients; to be called on all ranks, also where only one's backward has
        raised: each sends the step's messages to their end, since the others may have sent them.
        """
        for parameter in self.trainable:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._synchronize()
        self.unfinished.discard(self)
        self.zero_grad(set_to_none=True)


def dense_gradient(parameter: Tensor) -> Tensor:
    """The gradient of `parameter`, without a graph; TypeError if it is sparse, RuntimeError if
    there is none.
    """
    gradient = parameter.grad
    if gradient is None:  # dropped by zero_grad when it had arrived
        raise RuntimeError(
            f"a gradient of shape {tuple(parameter.shape)} has gone before its all-reduce: call "
            "finish_gradient_synchronization() after each backward, or skip_step() after one that raised"
        )
    if gradient.layout != torch.strided:
        raise TypeError(
            f"gradients must be dense, got {gradient.layout} of shape {tuple(parameter.shape)}"
        )
    return gradient.detach() if gradient.requires_grad else gradient


def call_at_each_gradient(
    owner: Any, parameters: list[Any], react: Callable[[Any, int], None]
) -> None:
    """Have `react(owner, index)` called in a backward when the gradient of `parameters[index]` is
    there.

    The owner is held weakly: a cycle through autograd's hooks would keep owner and model alive for
    good. Once it is gone, so are the hooks.
    """
    itself = weakref.ref(owner)

    def hook(index: int, _: Tensor) -> None:
        if (alive := itself()) is not None:
            react(alive, index)

    for index, parameter in enumerate(parameters):
        handle = parameter.register_post_accumulate_grad_hook(partial(hook, index))
        weakref.finalize(owner, handle.remove).atexit = False


class SendQueue:
    """Sends messages in one order on every rank, each when its gradients and the messages before it
    are there.

    `messages` are the parameters of each. The first step sends in their order, the later ones in
    that in which rank 0's messages were complete in the first.
    """

    def __init__(
        self, messages: Sequence[Sequence[Tensor]], names: dict[Tensor, str], group: Group
    ) -> None:
        self.parameters = [parameter for message in messages for parameter in message]
        self.places = [
            (number, place)
            for number, message in enumerate(messages)
            for place in range(len(message))
        ]
        self.sizes = [len(message) for message in messages]
        self.names, self.group = names, group
        self.order, self.is_learned = [*range(len(messages))], False
        self.under_way: list[Work] = []
        self.starts = [0, *accumulate(self.sizes)]  # of each message among `parameters`
        self.begin()

    def begin(self) -> None:
        """Wait for what is under way; the next gradients belong to another step."""
        wait_for(self.under_way)
        self.arrived: set[int] = set()
        self.missing = self.sizes.copy()  # gradients of each message, still
        self.complete: list[int] = []
        self.waiting = deque(self.order)
        # place of a parameter, and the address of its gradient
        self.sent: list[tuple[int, int]] = []

    def arrive(self, index: int, send: Callable[[int], Work]) -> None:
        """The gradient of `parameters[index]` is there, for the first time: `send` what is next and
        complete.
        """
        if index in self.arrived:  # it would be added to a sum that may be under way
            raise RuntimeError(
                f"the gradient of parameter {self.names[self.parameters[index]]!r} arrived twice in a step: call "
                "finish_gradient_synchronization() (step() of a Zero1Optimizer) after each backward, run all but the "
                "last of several under no_sync(), call skip_step() (or its zero_grad()) after one that raised; for a "
                "weight in several reentrant checkpoints take use_reentrant=False, or NaiveDDP or FlatDDP"
            )
        message, _ = self.places[index]
        self.arrived.add(index)
        self.missing[message] -= 1
        if not self.missing[message]:
            self.complete.append(message)
        while self.waiting and not self.missing[self.waiting[0]]:
            number = self.waiting.popleft()
            self.under_way.append(send(number))
            places = range(self.starts[number], self.starts[number + 1])
            self.sent += [(place, self.parameters[place].grad.data_ptr()) for place in places]  # type: ignore[union-attr]

    def check_sent(self) -> None:
        """RuntimeError naming a parameter whose gradient is not the one that was sent while the
        backward ran.

        `Module.to` and an assignment to `.grad` leave this rank's own there, and the mean goes to a
        tensor that nobody sees.
        """
        for place, address in self.sent:
            gradient = self.parameters[place].grad
            if gradient is None or gradient.data_ptr() != address:
                raise RuntimeError(
                    f"the gradient of parameter {self.names[self.parameters[place]]!r} was moved, cast or replaced "
                    "between the backward, which has sent it, and finish_gradient_synchronization()"
                )

    def finish(self, send: Callable[[int], Work]) -> None:
        """Send the messages that this step's backward has not completed, and those behind them;
        wait for all.
        """
        while self.waiting:
            self.under_way.append(send(self.waiting.popleft()))
        wait_for(self.under_way)
        if not self.is_learned:
            device = self.parameters[0].device if self.parameters else "cpu"
            order = torch.tensor([*dict.fromkeys([*self.complete, *self.order])], device=device)
            broadcast_from_first(order, self.group)
            self.order, self.is_learned = order.tolist(), True
