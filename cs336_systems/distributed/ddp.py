"""The base class of the four data-parallel wrappers, its hooks and its checks.

    model = OverlapDDP(model)                # every rank now has rank 0's parameters and buffers
    with model.no_sync():                    # gradients add up on each rank, nothing is sent
        loss(model(first_part)).backward()
    loss(model(second_part)).backward()
    model.finish_gradient_synchronization()  # .grad is now the mean over the ranks, on every rank
    clip_gradients(model.parameters(), 1.0)  # equal on all ranks, since the gradients are
    optimizer.step()

The loss is a mean over a rank's own batch, so the mean of the gradients is that of one process with
the whole batch. Ranks must issue the same collectives in the same order, or they hang. So all ranks
use one order, and each parameter takes part in each step. Buffers are made equal at construction
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
    """Base of all that averages a backward's gradients over the ranks, except within `no_sync`.

    The DDP wrappers, FSDP and Zero1Optimizer derive from it.
    """

    sends = True  # False within no_sync, and for good once a module was wrapped again

    # (name, parameter, requires_grad when it was wrapped) of those that must stay as they were
    fixed: Sequence[tuple[str, Tensor, bool]] = ()

    # objects of this class with gradients that are not averaged yet
    unfinished: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backwards inside this block only accumulate gradients on their rank.

        The first backward outside of the block is averaged together with what they accumulated.
        """
        before, self.sends = self.sends, False
        try:
            yield
        finally:
            self.sends = before

    def finish_gradient_synchronization(self) -> None:
        """Finish averaging: afterwards each `.grad` is the mean over the ranks.

        Call it after the backward, before gradients are read. With FSDP `.grad` is the mean for
        this rank's rows; with Zero1Optimizer `averaged_gradients` returns the means. On NCCL the
        device waits, not the host. Raises RuntimeError within `no_sync`, for a wrapper whose module
        was wrapped again, for a parameter that was frozen or made trainable after wrapping, and for
        a parameter without a gradient where all must have one; TypeError for a sparse gradient.
        """
        if not self.sends:
            raise RuntimeError(
                "finish_gradient_synchronization() must be outside of no_sync(), "
                "of the latest wrapper"
            )

        for name, parameter, trainable in self.fixed:
            if parameter.requires_grad != trainable:
                change = "frozen" if trainable else "made trainable"
                raise RuntimeError(
                    f"parameter {name!r} was {change} after wrapping: "
                    "wrap again, with a new optimizer"
                )

        self._finish()
        self.unfinished.discard(self)

    @abstractmethod
    def _finish(self) -> None:
        """Send the gradients that this step's backward has not sent, and wait for all messages."""

    def _arrive(self, index: int) -> None:
        """Note that a backward has accumulated a gradient; hooks on the gradients call this.

        `index` is the parameter's place among those given to `call_at_each_gradient`.
        """
        self.unfinished.add(self)

    def _waiting(self) -> set[Tensor]:
        """Return the wrapper's parameters that have gradients, in `.grad` or put aside."""
        return set()


def check_unwrapped(module: nn.Module) -> None:
    """Raise ValueError if `module` holds a wrapper, rows that FSDP has cut, or lazy parameters.

    A wrapper inside already averages the gradients; a lazy parameter has no shape yet.
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
    """Counts the parameters and modules registered in this process since `watch_steps` was called.

    To find new members of a model takes a walk over all its modules. While the count stays the
    same, there are none.
    """

    count: ClassVar[int] = 0

    @classmethod
    def add(cls, *_: Any) -> None:
        """Count one registration; torch's registration hooks call this."""
        cls.count += 1


def check_members(module: nn.Module, members: Set[Tensor], registrations: int) -> int:
    """Raise RuntimeError naming a parameter of `module` that is not in `members`; return a count.

    `members` are the parameters at wrapping. `registrations` is what the previous check returned,
    -1 for the first check. The check does nothing unless the count has changed since.
    """
    if registrations != Registrations.count:
        for name, parameter in module.named_parameters():
            if parameter not in members:
                raise RuntimeError(
                    f"parameter {name!r} was added or replaced after wrapping, "
                    "so its gradient is this rank's own: "
                    "wrap again, with a new optimizer"
                )
    return Registrations.count


@cache
def watch_steps() -> None:
    """Make every optimizer's step in this process raise an error where it would silently be wrong.

    Raises:
        RuntimeError: gradients were not averaged; also after the step, for those of a closure's
            backward. Within `no_sync` a step is its rank's own and passes.
        TypeError: the optimizer searches along all of FSDP's parameters at once.
        ValueError: before an optimizer's first step, if it was built before FSDP cut its
            parameters, or does not update rows one by one.

    The hooks stay for the life of the process: one that is removed with its model would be removed
    in the middle of a step if the model is collected there.
    """
    checked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    @torch.compiler.disable  # else the check would run once only, when the step is compiled
    def check_averaged(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Raise RuntimeError if `optimizer` has parameters whose gradients were not averaged."""
        for wrapper in [one for one in Accumulating.unfinished if one.sends]:
            waiting = wrapper._waiting()
            if any(not waiting.isdisjoint(group["params"]) for group in optimizer.param_groups):
                raise RuntimeError(
                    "call finish_gradient_synchronization() after the backward, before step()"
                )

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Run `check_averaged`, and before the first step check that FSDP's rows can be updated."""
        check_averaged(optimizer)
        if optimizer not in checked:
            parameters = [
                parameter for group in optimizer.param_groups for parameter in group["params"]
            ]
            # marks that FSDP sets: on whole parameters that it has cut, and on this rank's rows
            if any(hasattr(parameter, "is_cut") for parameter in parameters):
                raise ValueError(
                    "the optimizer has parameters from before FSDP cut them: "
                    "build it after wrapping"
                )
            if any(hasattr(parameter, "is_rows") for parameter in parameters):
                check_no_search(type(optimizer))
                check_elementwise(type(optimizer), optimizer.defaults, rows=True)
            checked.add(optimizer)

    register_module_parameter_registration_hook(Registrations.add)
    register_module_module_registration_hook(Registrations.add)
    register_optimizer_step_pre_hook(check)
    register_optimizer_step_post_hook(check_averaged)  # a closure runs its backward in the step


class DataParallel(nn.Module, Accumulating):
    """Base of the data-parallel wrappers: one replica of `module` on each rank of `group`.

    The constructor gives every rank rank 0's parameters and buffers; names, shapes and dtypes must
    be equal before. Parameters that are trainable at construction are synchronised. A parameter
    that is frozen, made trainable, added or replaced later raises an error.

    With `find_unused_parameters` a step may leave parameters without a gradient, among them such as
    were frozen after wrapping. Ranks then vote at the end of the step, which costs a message and
    makes the host wait. A parameter that no rank has used keeps no gradient, as in one process.
    Without the option such a step raises RuntimeError.

    A module that is wrapped again belongs to its latest wrapper; earlier wrappers send nothing.
    Raises ValueError on all ranks if their modules differ, on a rank that is not in `group`, and
    for a module with `max_norm` or a wrapper in it; RuntimeError without a process group, and
    before an optimizer's step with gradients that were not averaged.
    """

    # all wrappers of this process: a later wrapper and Zero1Optimizer look here for one that
    # averages the same gradients
    alive: ClassVar[weakref.WeakSet[DataParallel]] = weakref.WeakSet()

    def __init__(
        self, module: nn.Module, group: Group = None, *, find_unused_parameters: bool = False
    ) -> None:
        super().__init__()

        # check that ranks can work alike, then broadcast rank 0's values
        check_unwrapped(module)
        for name, inner in module.named_modules():
            if getattr(inner, "max_norm", None) is not None:
                raise ValueError(
                    f"module {name!r} has max_norm: "
                    "each rank would rescale the rows that its batch uses"
                )
        check_same_shapes([*module.named_parameters(), *module.named_buffers()], group)
        broadcast_parameters(module, group)

        # remember the parameters, to notice later changes
        self.module, self.group = module, group
        self.find_unused_parameters = find_unused_parameters
        self.names: dict[Tensor, str] = {
            one: name for name, one in module.named_parameters() if one.requires_grad
        }
        self.trainable = [*self.names]
        # With find_unused_parameters a parameter that is frozen later counts as unused.
        self.fixed = [
            (name, one, one.requires_grad)
            for name, one in module.named_parameters()
            if not (one.requires_grad and find_unused_parameters)
        ]
        self._members = set(module.parameters())

        # register hooks, after silencing earlier wrappers of the same parameters
        for older in self.alive:
            if not set(older.trainable).isdisjoint(self.trainable):
                older.sends = False
        self._hear_of_gradients()

    def _hear_of_gradients(self) -> None:
        """Register the hooks on gradients and optimizer steps for this wrapper."""
        self.alive.add(self)
        self._registrations = -1  # value of Registrations.count at the last check of members
        call_at_each_gradient(self, self.trainable[::-1], type(self)._arrive)
        watch_steps()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or unpickled wrapper, and register hooks: its parameters have none."""
        super().__setstate__(state)
        self._hear_of_gradients()

    def _waiting(self) -> set[Tensor]:
        """Return the module's parameters that have gradients."""
        return {one for one in self.module.parameters() if one.grad is not None}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients; none then waits to be averaged."""
        self.unfinished.discard(self)
        super().zero_grad(set_to_none)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the wrapped module's output."""
        return self.module(*args, **kwargs)

    def _finish(self) -> None:
        """Average the gradients of this step, and vote on unused parameters if that is allowed."""
        self._registrations = check_members(self.module, self._members, self._registrations)
        self._check_sent()

        # every parameter takes part: an unused one sends zeros
        unused = [index for index, parameter in enumerate(self.trainable) if parameter.grad is None]
        if unused and not self.find_unused_parameters:
            name = self.names[self.trainable[unused[0]]]
            raise RuntimeError(
                f"parameter {name!r} has no gradient on this rank, as {len(unused)} of "
                f"{len(self.trainable)}: use it in every step, freeze it, "
                "or pass find_unused_parameters=True"
            )
        for index in unused:
            self.trainable[index].grad = torch.zeros_like(self.trainable[index])
        self._synchronize()

        # vote: a parameter that no rank has used gets its None back
        if self.find_unused_parameters and self.trainable:
            votes = torch.ones(len(self.trainable), dtype=torch.uint8)
            votes[unused] = 0
            votes = votes.to(self.trainable[0].device)
            dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.group)
            for index in (votes == 0).nonzero().flatten().tolist():
                self.trainable[index].grad = None

    def _check_sent(self) -> None:
        """Raise RuntimeError naming a gradient that was replaced after it was sent.

        The base class sends nothing during the backward, so there is nothing to check.
        """

    @abstractmethod
    def _synchronize(self) -> None:
        """Replace the gradient of each trainable parameter by its mean; none may be missing."""

    def skip_step(self) -> None:
        """Drop this step's gradients on all ranks, for example after one rank's backward raised.

        Every rank must call it. Each sends all messages of the step, zeros for missing gradients,
        since other ranks may have sent theirs and wait for this one.
        """
        for parameter in self.trainable:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._synchronize()
        self.unfinished.discard(self)
        self.zero_grad(set_to_none=True)


def dense_gradient(parameter: Tensor) -> Tensor:
    """Return the gradient of `parameter`, detached from any graph.

    Raises TypeError if the gradient is sparse, RuntimeError if there is none.
    """
    gradient = parameter.grad
    if gradient is None:  # zero_grad has dropped it after it arrived
        raise RuntimeError(
            f"a gradient of shape {tuple(parameter.shape)} has gone before its all-reduce: call "
            "finish_gradient_synchronization() after each backward, "
            "or skip_step() after one that raised"
        )
    if gradient.layout != torch.strided:
        raise TypeError(
            f"gradients must be dense, got {gradient.layout} of shape {tuple(parameter.shape)}"
        )
    return gradient.detach() if gradient.requires_grad else gradient


def call_at_each_gradient(
    owner: Any, parameters: list[Any], react: Callable[[Any, int], None]
) -> None:
    """Call `react(owner, index)` whenever a backward has accumulated `parameters[index].grad`.

    The hooks hold the owner weakly, since a cycle through autograd's hooks would keep owner and
    model alive for good. They are removed when the owner is collected.
    """
    itself = weakref.ref(owner)

    def hook(index: int, _: Tensor) -> None:
        """Call `react` unless the owner is gone; torch passes the parameter, not the gradient."""
        if (alive := itself()) is not None:
            react(alive, index)

    for index, parameter in enumerate(parameters):
        handle = parameter.register_post_accumulate_grad_hook(partial(hook, index))
        weakref.finalize(owner, handle.remove).atexit = False


class SendQueue:
    """Sends messages in the same order on every rank, each as soon as it is complete and its turn.

    Args:
        messages: the parameters whose gradients each message carries.
        names: the parameters' names, for errors.
        group: the process group.

    A message is complete when all its gradients have arrived. The first step sends the messages in
    the given order; later steps use the order in which rank 0's messages were complete in the
    first step.
    """

    def __init__(
        self, messages: Sequence[Sequence[Tensor]], names: dict[Tensor, str], group: Group
    ) -> None:
        self.parameters = [parameter for message in messages for parameter in message]
        # (message, place in the message) of each of `parameters`
        self.places = [
            (number, place)
            for number, message in enumerate(messages)
            for place in range(len(message))
        ]
        self.sizes = [len(message) for message in messages]
        self.names, self.group = names, group
        self.order, self.is_learned = [*range(len(messages))], False
        self.under_way: list[Work] = []
        self.starts = [0, *accumulate(self.sizes)]  # where each message begins in `parameters`
        self.begin()

    def begin(self) -> None:
        """Begin a new step: wait for all messages under way, and expect every gradient anew."""
        wait_for(self.under_way)
        self.arrived: set[int] = set()  # indices into `parameters`
        self.missing = self.sizes.copy()  # how many gradients each message still waits for
        self.complete: list[int] = []  # messages, in the order in which they became complete
        self.waiting = deque(self.order)  # messages not sent yet
        # (index into `parameters`, address of its gradient) of what was sent
        self.sent: list[tuple[int, int]] = []

    def arrive(self, index: int, send: Callable[[int], Work]) -> None:
        """Note that the gradient of `parameters[index]` is there, and send the messages now due.

        `send(message)` starts a message and returns its handle. Raises RuntimeError naming the
        parameter if its gradient arrives a second time in a step: it would be added to a sum that
        may be under way.
        """
        if index in self.arrived:
            raise RuntimeError(
                f"the gradient of parameter {self.names[self.parameters[index]]!r} "
                "arrived twice in a step: call "
                "finish_gradient_synchronization() (step() of a Zero1Optimizer) "
                "after each backward, run all but the "
                "last of several under no_sync(), "
                "call skip_step() (or its zero_grad()) after one that raised; for a "
                "weight in several reentrant checkpoints take use_reentrant=False, "
                "or NaiveDDP or FlatDDP"
            )

        # the message is complete with its last gradient
        message, _ = self.places[index]
        self.arrived.add(index)
        self.missing[message] -= 1
        if not self.missing[message]:
            self.complete.append(message)

        # send in the order that all ranks share, up to the first message that is not complete
        while self.waiting and not self.missing[self.waiting[0]]:
            number = self.waiting.popleft()
            self.under_way.append(send(number))
            places = range(self.starts[number], self.starts[number + 1])
            self.sent += [
                (place, self.parameters[place].grad.data_ptr())  # type: ignore[union-attr]
                for place in places
            ]

    def check_sent(self) -> None:
        """Raise RuntimeError naming a parameter whose `.grad` is not the tensor that was sent.

        `Module.to` and an assignment to `.grad` replace the tensor: the mean would go to the old
        one, and `.grad` would hold this rank's own gradient.
        """
        for place, address in self.sent:
            gradient = self.parameters[place].grad
            if gradient is None or gradient.data_ptr() != address:
                raise RuntimeError(
                    f"the gradient of parameter {self.names[self.parameters[place]]!r} "
                    "was moved, cast or replaced "
                    "between the backward, which has sent it, and finish_gradient_synchronization()"
                )

    def finish(self, send: Callable[[int], Work]) -> None:
        """Send all messages not sent yet, complete or not, and wait for all of this step.

        The first step also broadcasts the order of rank 0, which all later steps use.
        """
        while self.waiting:
            self.under_way.append(send(self.waiting.popleft()))
        wait_for(self.under_way)

        # learn the order, once
        if not self.is_learned:
            device = self.parameters[0].device if self.parameters else "cpu"
            order = torch.tensor([*dict.fromkeys([*self.complete, *self.order])], device=device)
            broadcast_from_first(order, self.group)
            self.order, self.is_learned = order.tolist(), True
