"""Checks of the data-parallel wrappers and optimizers: what would go wrong in silence raises.

    check_before_wrapping(module, group)   # can all ranks work alike?
    wrapper.watch = Watch(parameters)      # what must stay as it is from now on
    with wrapper.guarded_step():           # checks before gradients are averaged, and after
        ...
    watch_steps()                          # an optimizer's step on gradients not averaged raises

The files of the wrappers tell how gradients are averaged, and can be read without this one.
"""

from __future__ import annotations

import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import zip_longest
from typing import Any, ClassVar, NoReturn

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

# Before wrapping


def as_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return `group`, or the default process group if it is None.

    Raises RuntimeError if there is no default group, ValueError if this process is not a member of
    `group`, TypeError if `group` is not a process group.
    """
    found = dist.group.WORLD if group is None else group
    if found is None:
        raise RuntimeError(
            "there is no process group: start the ranks with run_ranks, or by launch under torchrun"
        )
    if not isinstance(found, dist.ProcessGroup):
        if found != dist.GroupMember.NON_GROUP_MEMBER:
            raise TypeError(f"group must be a process group or None, got {found!r}")
        raise ValueError(
            "this process must be a member of the process group, "
            f"and rank {dist.get_rank()} is none"
        )
    return found


def check_same_shapes(
    named_tensors: Iterable[tuple[str, Tensor]],
    group: dist.ProcessGroup | None = None,
    *,
    what: str = "parameters",
) -> None:
    """Raise ValueError on every rank unless all ranks of `group` have the same tensors.

    Names, shapes, dtypes, order and whether a parameter is frozen must agree. The message names the
    first difference and calls the tensors `what`. Ranks that differ would issue different
    collectives, and hang or, worse, add up tensors that do not belong together.
    """
    own = []
    for name, tensor in named_tensors:
        frozen = ", frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
        if hasattr(tensor, "is_part"):  # tensor parallelism has cut it
            frozen += ", part {} of {}".format(*tensor.is_part)
        own.append(
            f"{name!r} of shape {tuple(tensor.shape)}, "
            f"{str(tensor.dtype).removeprefix('torch.')}{frozen}"
        )

    everyone: list[Any] = [own] * as_group(group).size()
    if len(everyone) > 1:
        dist.all_gather_object(everyone, own, group=group)
    for rank, others in enumerate(everyone):
        for first, other in zip_longest(everyone[0], others, fillvalue="no more"):
            if first != other:
                raise ValueError(
                    f"{what} must be the same on all ranks: rank 0 has {first}, rank {rank} {other}"
                )


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
        if isinstance(inner, Guarded):
            raise ValueError(
                f"module must not be wrapped twice, and {type(inner).__name__} wraps it already"
            )
    if any(hasattr(parameter, "is_rows") for parameter in module.parameters()):
        raise ValueError(
            "module must be whole, and FSDP has cut its parameters into rows: build it anew"
        )


def check_before_wrapping(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Raise ValueError unless every rank of `group` can train its replica of `module` alike.

    Raises as `check_unwrapped` and `check_same_shapes` do, and for a module with `max_norm`.
    """
    check_unwrapped(module)
    for name, inner in module.named_modules():
        if getattr(inner, "max_norm", None) is not None:
            raise ValueError(
                f"module {name!r} has max_norm: "
                "each rank would rescale the rows that its batch uses"
            )
    check_same_shapes([*module.named_parameters(), *module.named_buffers()], group)


def check_not_averaged(parameters: Iterable[Tensor]) -> None:
    """Raise ValueError if a DDP wrapper averages the gradient of one of `parameters` already."""
    for wrapper in GuardedReplica.alive:
        if not set(wrapper.trainable).isdisjoint(parameters):
            kind = type(wrapper).__name__
            raise ValueError(
                f"{kind} averages the gradients already: "
                "give Zero1Optimizer the plain module's parameters"
            )


# From wrapping to the optimizer's step

# wrappers with gradients that are not averaged yet; hooks on gradients add their wrapper
unaveraged: weakref.WeakSet[Guarded] = weakref.WeakSet()


class Guarded(ABC):
    """Base of all that averages gradients, with the checks around a step's averaging."""

    sends = True  # False within no_sync, and for good once a module was wrapped again
    noted_as = 0  # id of the object that is in `unaveraged`; a copy has another
    watch: Watch

    def note_unaveraged(self) -> None:
        """Note that there are gradients to be averaged; called at each gradient."""
        if self.noted_as != id(self):
            self.noted_as = id(self)
            unaveraged.add(self)

    def forget_unaveraged(self) -> None:
        """Note that no gradient waits to be averaged."""
        self.noted_as = 0
        unaveraged.discard(self)

    @contextmanager
    def guarded_step(self) -> Iterator[None]:
        """Check that gradients may be averaged; after the block they count as averaged.

        Raises RuntimeError within `no_sync`, for a wrapper whose module was wrapped again, and as
        `Watch.check` does.
        """
        if not self.sends:
            raise RuntimeError(
                "finish_gradient_synchronization() must be outside of no_sync(), "
                "of the latest wrapper"
            )
        self.watch.check()
        yield
        self.forget_unaveraged()

    def _waiting(self) -> set[Tensor]:
        """Return the wrapper's parameters that have gradients, in `.grad` or put aside."""
        return set()


class GuardedReplica(nn.Module, Guarded):
    """Base of the DDP wrappers: checks of their parameters and gradients, and ways out of errors.

    `watch_over` begins the checks.
    """

    # all wrappers of this process: a later wrapper and Zero1Optimizer look here for one that
    # averages the same gradients
    alive: ClassVar[weakref.WeakSet[GuardedReplica]] = weakref.WeakSet()

    names: dict[Tensor, str]
    trainable: list[Tensor]
    find_unused_parameters: bool
    module: nn.Module
    group: dist.ProcessGroup | None

    def watch_over(self, module: nn.Module) -> None:
        """Remember the parameters of `module`, to notice changes, and silence earlier wrappers."""
        # With find_unused_parameters a parameter that is frozen later counts as unused.
        fixed = [
            (name, one)
            for name, one in module.named_parameters()
            if not (one.requires_grad and self.find_unused_parameters)
        ]
        self.watch = Watch(fixed, module, module.parameters())
        for older in self.alive:
            if not set(older.trainable).isdisjoint(self.trainable):
                older.sends = False
        self.alive.add(self)
        watch_steps()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or unpickled wrapper, and register hooks: its parameters have none."""
        super().__setstate__(state)
        self.watch.registrations = -1
        self.alive.add(self)
        self._register_hooks()
        watch_steps()

    @contextmanager
    def guarded_step(self) -> Iterator[None]:
        """Check the gradients, and let parameters without one take part with zeros.

        After the block ranks vote if `find_unused_parameters`: a parameter that no rank has used
        gets its None back. Raises RuntimeError naming a gradient that was replaced after it was
        sent, and a parameter without a gradient if all must have one.
        """
        with super().guarded_step():
            self._check_sent()
            unused = [place for place, one in enumerate(self.trainable) if one.grad is None]
            if unused and not self.find_unused_parameters:
                name = self.names[self.trainable[unused[0]]]
                raise RuntimeError(
                    f"parameter {name!r} has no gradient on this rank, as {len(unused)} of "
                    f"{len(self.trainable)}: use it in every step, freeze it, "
                    "or pass find_unused_parameters=True"
                )
            self._fill_unused()

            yield

            if self.find_unused_parameters and self.trainable:
                votes = torch.ones(len(self.trainable), dtype=torch.uint8)
                votes[unused] = 0
                votes = votes.to(self.trainable[0].device)
                dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.group)
                for index in (votes == 0).nonzero().flatten().tolist():
                    self.trainable[index].grad = None

    def _fill_unused(self) -> None:
        """Give parameters without a gradient one of zeros."""
        for parameter in self.trainable:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _check_sent(self) -> None:
        """Raise RuntimeError naming a parameter whose `.grad` is not the tensor that was sent.

        `Module.to` and an assignment to `.grad` replace the tensor: the mean would go to the old
        one, and `.grad` would hold this rank's own gradient.
        """
        if (parameter := self._moved()) is not None:
            raise RuntimeError(
                f"the gradient of parameter {self.names[parameter]!r} was moved, cast or replaced "
                "between the backward, which has sent it, and finish_gradient_synchronization()"
            )

    def _moved(self) -> Tensor | None:
        """Return a parameter whose gradient is not the tensor that was sent; None if all are."""
        return None

    def _waiting(self) -> set[Tensor]:
        """Return the module's parameters that have gradients."""
        return {one for one in self.module.parameters() if one.grad is not None}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients; none then waits to be averaged."""
        self.forget_unaveraged()
        super().zero_grad(set_to_none)

    def skip_step(self) -> None:
        """Drop this step's gradients on all ranks, for example after one rank's backward raised.

        Every rank must call it. Each sends all messages of the step, zeros for missing gradients,
        since other ranks may have sent theirs and wait for this one.
        """
        for parameter in self.trainable:
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                parameter.grad = None
        self._fill_unused()
        self._synchronize()
        self.zero_grad(set_to_none=True)

    @abstractmethod
    def _register_hooks(self) -> None:
        """Call `_arrive` at each gradient of a trainable parameter."""

    @abstractmethod
    def _synchronize(self) -> None:
        """Replace the gradient of each trainable parameter by its mean; none may be missing."""


class Watch:
    """What must stay as it was at wrapping: a module's parameters, and which of them are trained.

    Args:
        fixed: names and parameters that may be neither frozen nor made trainable.
        module: the wrapped module. None: nothing is known of it.
        members: the tensors that it may show as parameters.
    """

    def __init__(
        self,
        fixed: Iterable[tuple[str, Tensor]],
        module: nn.Module | None = None,
        members: Iterable[Tensor] = (),
    ) -> None:
        self.fixed = [(name, parameter, parameter.requires_grad) for name, parameter in fixed]
        self.module, self.members = module, {*members}
        self.registrations = -1  # value of Registrations.count at the last check of members

    def check(self) -> None:
        """Raise RuntimeError naming a parameter that was frozen, made trainable, added or replaced.

        New members are looked for only if a module or parameter was registered in this process.
        """
        for name, parameter, trainable in self.fixed:
            if parameter.requires_grad != trainable:
                change = "frozen" if trainable else "made trainable"
                raise RuntimeError(
                    f"parameter {name!r} was {change} after wrapping: "
                    "wrap again, with a new optimizer"
                )
        if self.module is None or self.registrations == Registrations.count:
            return
        for name, parameter in self.module.named_parameters():
            if parameter not in self.members:
                raise RuntimeError(
                    f"parameter {name!r} was added or replaced after wrapping, "
                    "so its gradient is this rank's own: "
                    "wrap again, with a new optimizer"
                )
        self.registrations = Registrations.count


class Registrations:
    """Counts the parameters and modules registered in this process since `watch_steps` was called.

    To find new members of a model takes a walk over all its modules. While the count stays the
    same, there are none.
    """

    count: ClassVar[int] = 0

    @classmethod
    def add(cls, module: nn.Module, name: str, member: Any) -> None:
        """Count one registration; torch's registration hooks call this."""
        cls.count += 1


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
    def check_averaged(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Raise RuntimeError if `optimizer` has parameters whose gradients were not averaged."""
        for wrapper in [one for one in unaveraged if one.sends]:
            waiting = wrapper._waiting()
            if any(not waiting.isdisjoint(group["params"]) for group in optimizer.param_groups):
                raise RuntimeError(
                    "call finish_gradient_synchronization() after the backward, before step()"
                )

    def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Run `check_averaged`, and before the first step check that FSDP's rows can be updated."""
        check_averaged(optimizer, args, kwargs)
        if optimizer not in checked:
            parameters = [
                parameter for group in optimizer.param_groups for parameter in group["params"]
            ]
            # Marks that FSDP and tensor parallelism set: on whole parameters that they have cut, on
            # this rank's rows, and on this rank's part.
            if any(hasattr(parameter, "is_cut") for parameter in parameters):
                raise ValueError(
                    "the optimizer has parameters from before FSDP or apply_tensor_parallel "
                    "cut them: build it after wrapping"
                )
            for group in optimizer.param_groups:
                check_cut_parameters(optimizer, group)
            checked.add(optimizer)

    register_module_parameter_registration_hook(Registrations.add)
    register_module_module_registration_hook(Registrations.add)
    register_optimizer_step_pre_hook(check)
    register_optimizer_step_post_hook(check_averaged)  # a closure runs its backward in the step


# One gradient


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


def refuse_second_gradient(name: str) -> NoReturn:
    """Raise RuntimeError: the gradient of parameter `name` arrived a second time in a step.

    It would be added to a sum that may be under way.
    """
    raise RuntimeError(
        f"the gradient of parameter {name!r} "
        "arrived twice in a step: call "
        "finish_gradient_synchronization() (step() of a Zero1Optimizer) "
        "after each backward, run all but the "
        "last of several under no_sync(), "
        "call skip_step() (or its zero_grad()) after one that raised; for a "
        "weight in several reentrant checkpoints take use_reentrant=False, "
        "or NaiveDDP or FlatDDP"
    )


def refuse_moved(name: str) -> NoReturn:
    """Raise RuntimeError: parameter `name` or its gradient has other memory than at wrapping."""
    raise RuntimeError(
        f"parameter {name!r} was moved or cast after it was wrapped: wrap again, at the end"
    )


# Optimizers that see a part of a weight

# Errors of an optimizer that needs other arguments, a closure, a sparse gradient or a parameter of
# another shape than `check_elementwise` gives it.
CANNOT_STEP = (
    ValueError,
    TypeError,
    AssertionError,
    ArithmeticError,
    RuntimeError,
    AttributeError,
    LookupError,
)


def check_no_search(optimizer_cls: type[torch.optim.Optimizer]) -> None:
    """Raise TypeError if the optimizer's step needs a closure, as LBFGS does.

    Such an optimizer evaluates the loss along all parameters at once, so it cannot be sharded.
    """
    closure = inspect.signature(optimizer_cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{optimizer_cls.__name__} cannot be sharded: it searches along all parameters at once"
        )


def check_cut_parameters(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Raise ValueError or TypeError unless a step updates cut parameters of `group` as whole ones.

    Parameters are cut by FSDP, into rows, or by tensor parallelism.
    """
    settings = {name: value for name, value in group.items() if name != "params"}
    is_part, is_rows = (
        any(hasattr(parameter, mark) for parameter in group["params"])
        for mark in ("is_part", "is_rows")
    )
    knows_rows = hasattr(optimizer, "knows_rows")
    if is_part and knows_rows and settings.get("use_muon", True):
        raise ValueError(
            f"{type(optimizer).__name__} must have whole matrices or FSDP's rows, "
            "and tensor parallelism has split these"
        )
    if (is_part or is_rows) and not knows_rows:
        check_no_search(type(optimizer))
        check_elementwise(type(optimizer), settings, rows=True)
    if is_part and not knows_rows:
        check_elementwise(type(optimizer), settings, rows=False)


def check_replicas(shards: dist.ProcessGroup, replicas: dist.ProcessGroup) -> None:
    """Raise ValueError unless `replicas` are the ranks of one place in disjoint groups `shards`."""
    own = (shards.rank(), shards.size())
    places: list[Any] = [own] * replicas.size()
    if len(places) > 1:
        dist.all_gather_object(places, own, group=replicas)
    members, others = (dist.get_process_group_ranks(group) for group in (shards, replicas))
    if len(set(places)) > 1 or len({*members} & {*others}) > 1:
        raise ValueError(
            "replicate_group must hold the ranks of one place in each of several groups of ranks, "
            f"got ranks {others} for the group of ranks {members}"
        )


def check_elementwise(
    optimizer_cls: type[torch.optim.Optimizer], settings: dict[str, Any], *, rows: bool
) -> None:
    """Raise ValueError if `optimizer_cls` updates a cut matrix in another way than a whole one.

    The matrix is cut into rows if `rows`, else into flat pieces. Adafactor fails. The check makes
    two steps on a 4 x 4 matrix. An optimizer that needs more than a gradient, or arguments that are
    not in `settings`, cannot be checked and passes.
    """
    # a matrix, two gradients, and the arguments that the optimizer accepts
    generator = torch.Generator().manual_seed(0)
    weight, *gradients = (torch.randn(4, 4, generator=generator) for _ in range(3))
    accepted = inspect.signature(optimizer_cls).parameters
    options = {name: value for name, value in settings.items() if name in accepted}
    options |= {"lr": 0.1} if "lr" in accepted else {}  # a warm-up may begin at 0

    def stepped(cut: Callable[[Tensor], Any]) -> Tensor:
        """Return the matrix, flat, after two steps on the parts that `cut` makes of it."""
        parts = [nn.Parameter(part.clone()) for part in cut(weight)]
        optimizer = optimizer_cls(parts, **options)
        for gradient in gradients:
            for part, piece in zip(parts, cut(gradient)):
                part.grad = piece.clone()
            optimizer.step()
        return torch.cat([part.detach().flatten() for part in parts])

    # compare: the matrix as one parameter, and cut in two
    try:
        whole = stepped(lambda matrix: [matrix])
        apart = stepped(
            lambda matrix: (matrix if rows else matrix.flatten()).tensor_split([1 if rows else 7])
        )
    except CANNOT_STEP:
        return
    if not torch.allclose(whole, apart, rtol=1e-3, atol=1e-5):
        raise ValueError(
            f"{optimizer_cls.__name__} does not update a weight element by element, "
            "so it and its state cannot be cut: "
            "use ShardedOptimizer, which keeps weights whole"
        )
