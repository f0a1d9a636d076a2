"""The places in Triton's interpreter where a launch is recorded, patched and put back.

All patches are of classes: some versions make a new builder for descriptors. `Hooks` holds what
they share. The number of the argument that a pointer comes from rides in `TensorHandle.attr`, from
the argument's base pointer through every operation that makes a pointer of another.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from cs336_systems.stepper.argument import Argument
from cs336_systems.stepper.recording import ARGUMENT, Recording, Trace, decoded
from cs336_systems.stepper.statements import CALLED, Statements

TRITON_FOLDER = str(Path(triton.__file__).parent)
# operations whose result points where their operand does
POINTER_OPERATIONS = (
    "addptr", "splat", "unsplat", "broadcast", "expand_dims", "reshape", "trans", "bitcast",
)  # fmt: skip

Patched = Callable[..., Any]


@contextmanager
def recording_launches(
    recorded: Trace, *, most_launches: int, most_statements: int, undefined_is_nan: bool
) -> Iterator[Trace]:
    """Add a recording to `recorded` for each launch in the block; the options are those of `trace`."""
    hooks = Hooks(recorded, most_launches, most_statements)
    hooks.undefined_is_nan = undefined_is_nan
    hooks.patch_accesses()
    hooks.patch_launches()
    try:
        yield recorded
    finally:
        hooks.undo()


class Hooks:
    """The patches, and the launch that is being recorded: `now`, or None between launches."""

    def __init__(self, recorded: Trace, most_launches: int, most_statements: int) -> None:
        self.recorded = recorded
        self.most_launches = most_launches
        self.most_statements = most_statements
        self.undefined_is_nan = False
        self.now: Recording | None = None
        # By function as written: itself and the one with calls in it. The interpreter's own cache
        # would serve the latter after the trace.
        self.functions: dict[Any, tuple[Any, Any]] = {}
        self._originals: list[tuple[Any, str, Any]] = []

    def patch(self, place: Any, name: str, make: Callable[[Patched], Patched]) -> None:
        """Replace a member of a class or module by what `make` makes of it."""
        original = vars(place)[name]
        self._originals.append((place, name, original))
        setattr(place, name, make(original))

    def undo(self) -> None:
        """Put everything back."""
        for place, name, original in reversed(self._originals):
            setattr(place, name, original)
        for function in self.functions:
            function.__globals__.pop(CALLED, None)

    def patch_accesses(self) -> None:
        """Record loads, stores, atomics and products, and follow pointers to them."""
        builder = interpreter.InterpreterBuilder
        for name in POINTER_OPERATIONS:
            self.patch(builder, f"create_{name}", self._passing_the_argument_on)
        self.patch(builder, "create_select", self._select)
        self.patch(builder, "create_masked_load", self._load)
        self.patch(builder, "create_masked_store", self._store)
        self.patch(builder, "create_atomic_rmw", self._atomic)
        self.patch(builder, "create_dot", self._dot)
        for handle in (interpreter.BlockPointerHandle, interpreter.TensorDescHandle):
            self.patch(handle, "materialize_pointers", self._materialize)
        self.patch(interpreter, "_implicit_cvt", self._convert)

    def patch_launches(self) -> None:
        """Record where a launch begins, its arguments, its programs and its statements."""
        self.patch(interpreter.GridExecutor, "__call__", self._launch)
        self.patch(interpreter.GridExecutor, "_init_args_hst", self._arguments)
        self.patch(interpreter.InterpreterBuilder, "set_grid_idx", self._program)
        self.patch(interpreter.InterpretedFunction, "rewrite", self._rewrite)
        self.patch(JITFunction, "run", self._refuse)

    # Pointers

    def _passing_the_argument_on(self, old: Patched) -> Patched:
        """The result of an operation points into the argument of its operand."""

        def operation(builder: Any, *operands: Any) -> Any:
            result = old(builder, *operands)
            for operand in operands[:2]:  # (type, pointer) or (pointer, ...)
                if isinstance(operand, interpreter.TensorHandle) and ARGUMENT in operand.attr:
                    result.attr[ARGUMENT] = operand.attr[ARGUMENT]
            return result

        return operation

    def _select(self, old: Patched) -> Patched:
        """A choice between pointers into one argument points into it."""

        def select(builder: Any, condition: Any, a: Any, b: Any) -> Any:
            result = old(builder, condition, a, b)
            if ARGUMENT in a.attr and a.attr[ARGUMENT] == b.attr.get(ARGUMENT):
                result.attr[ARGUMENT] = a.attr[ARGUMENT]
            return result

        return select

    def _materialize(self, old: Patched) -> Patched:
        """The pointers of a block pointer or descriptor point into the argument of its base."""

        def materialize(handle: Any, offsets: Any) -> Any:
            pointers, mask = old(handle, offsets)
            if ARGUMENT in handle.base.attr:
                pointers.attr[ARGUMENT] = handle.base.attr[ARGUMENT]
            return pointers, mask

        return materialize

    def _convert(self, old: Patched) -> Patched:
        """The base pointer of a tensor learns which argument it is."""

        def convert(value: Any) -> Any:
            converted = old(value)
            tensor = getattr(value, "base", value)
            if self.now is None or not hasattr(tensor, "data_ptr"):
                return converted
            for argument in self.now.arguments:
                same_view = argument.shape == list(tensor.shape)
                if argument.tensor is tensor or (
                    argument.address == tensor.data_ptr() and same_view
                ):
                    handle = converted.handle
                    getattr(handle, "base", handle).attr[ARGUMENT] = argument.number
                    break
            return converted

        return convert

    # Accesses

    def _load(self, old: Patched) -> Patched:
        """Record a load, and run the lanes in bounds alone."""

        def load(
            builder: Any,
            ptrs: Any,
            mask: Any,
            other: Any,
            cache_modifier: Any,
            eviction_policy: Any,
            is_volatile: Any,
        ) -> Any:
            if self.now is None:
                return old(builder, ptrs, mask, other, cache_modifier, eviction_policy, is_volatile)
            # Block pointers and descriptors hand in bare arrays, the others handles.
            asked = np.asarray(mask.data).astype(bool)
            runnable = self.now.access("load", ptrs, asked)
            unread = asked & ~runnable
            if self.undefined_is_nan and other is None:
                unread = ~runnable
            if unread.any():
                other = _poisoned(ptrs.get_element_ty(), unread, other)
            return old(
                builder,
                ptrs,
                _as_mask(runnable),
                other,
                cache_modifier,
                eviction_policy,
                is_volatile,
            )

        return load

    def _store(self, old: Patched) -> Patched:
        """Record a store with its values, and run the lanes in bounds alone."""

        def store(
            builder: Any,
            ptrs: Any,
            value: Any,
            mask: Any,
            cache_modifier: Any,
            eviction_policy: Any,
        ) -> Any:
            if self.now is None:
                return old(builder, ptrs, value, mask, cache_modifier, eviction_policy)
            stored = decoded(value.data, value.dtype)
            runnable = self.now.access("store", ptrs, np.asarray(mask.data), stored)
            return old(builder, ptrs, value, _as_mask(runnable), cache_modifier, eviction_policy)

        return store

    def _atomic(self, old: Patched) -> Patched:
        """Record an atomic operation, and run the lanes in bounds alone."""

        def atomic(builder: Any, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any):
            if self.now is not None:
                mask = _as_mask(self.now.access("atomic", ptr, np.asarray(mask.data)))
            return old(builder, op, ptr, val, mask, sem, scope)

        return atomic

    def _dot(self, old: Patched) -> Patched:
        """Record the shapes of a product."""

        def dot(builder: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
            if self.now is not None and a.data.ndim == 2:
                rows, inner = a.data.shape
                self.now.product(rows, inner, b.data.shape[1])
            return old(builder, a, b, d, precision, imprecise)

        return dot

    # Launches

    def _launch(self, old: Patched) -> Patched:
        """Begin a recording with a launch, and end it with the launch or its error."""

        def launch(executor: Any, *arguments: Any, **keywords: Any) -> None:
            if self.now is not None or len(self.recorded.launches) >= self.most_launches:
                return old(executor, *arguments, **keywords)
            self.now = Recording(executor.fn.__name__, self.most_statements)
            for source, running in self.functions.values():
                self.now.follow(source, running)
            self.recorded.launches.append(self.now)
            try:
                return old(executor, *arguments, **keywords)
            except Exception as error:
                self.now.error = str(error)
                raise
            finally:
                self.now.flush()
                self.now = None

        return launch

    def _arguments(self, old: Patched) -> Patched:
        """Note a launch's tensors and numbers by the names of the kernel's parameters."""

        def arguments(executor: Any, on_device: Any, keywords: Any) -> Any:
            values, by_name = old(executor, on_device, keywords)
            if self.now is None or self.now.arguments:
                return values, by_name
            for name, value in inspect.getcallargs(executor.fn, *values, **by_name).items():
                tensor = getattr(value, "base", value)  # of a descriptor
                if isinstance(tensor, torch.Tensor):
                    self.now.arguments.append(Argument(len(self.now.arguments), name, tensor))
                elif isinstance(value, int | float | bool):
                    self.now.scalars[name] = value
            return values, by_name

        return arguments

    def _program(self, old: Patched) -> Patched:
        """Note which program runs now."""

        def program(builder: Any, x: int, y: int, z: int) -> None:
            old(builder, x, y, z)
            if self.now is not None:
                self.now.flush()
                self.now.grid = tuple(builder.grid_dim)
                _, height, depth = self.now.grid
                self.now.program = (x * height + y) * depth + z  # the interpreter's order

        return program

    def _rewrite(self, old: Patched) -> Patched:
        """Put calls into kernels and device functions, but not into Triton's own."""

        def rewrite(function: Any) -> Any:
            source = function.fn
            if source.__code__.co_filename.startswith(TRITON_FOLDER):
                return old(function)
            if source not in self.functions:
                self.functions[source] = source, self._with_calls(function)
                if self.now is not None:
                    self.now.follow(*self.functions[source])
            return self.functions[source][1]

        return rewrite

    def _refuse(self, old: Patched) -> Patched:
        """A kernel that does not run in the interpreter raises ValueError: it leaves no trace."""

        def run(kernel: Any, *arguments: Any, **keywords: Any) -> Any:
            raise ValueError(
                f"{kernel.fn.__name__} does not run in the interpreter: it is Gluon, or was defined "
                "before TRITON_INTERPRET=1 was set"
            )

        return run

    def _with_calls(self, function: Any) -> Any:
        """Return the interpreter's rewriting of a function with a call behind each statement."""
        transform = interpreter.FunctionRewriter._transform_ast

        def with_calls(rewriter: Any, source: str) -> ast.AST:
            tree = Statements().visit(transform(rewriter, source))
            return ast.fix_missing_locations(tree)

        function.fn.__globals__[CALLED] = self._statement
        interpreter.FunctionRewriter._transform_ast = with_calls
        try:
            return function.rewriter.rewrite_ast()
        finally:
            interpreter.FunctionRewriter._transform_ast = transform

    def _statement(self, line: int, variables: dict[str, Any]) -> None:
        if self.now is not None:
            self.now.statement(sys._getframe(1), line, variables)


def _as_mask(lanes: np.ndarray[Any, Any]) -> Any:
    return interpreter.TensorHandle(np.ascontiguousarray(lanes), tl.int1)


def _poisoned(dtype: Any, unread: np.ndarray[Any, Any], other: Any) -> Any:
    """Return what a load reads in lanes that do not run: NaN where `unread`, else `other`."""
    numbers = interpreter._get_np_dtype(dtype)
    poison: Any = True
    if numbers.kind == "f":
        poison = np.nan
    elif numbers.kind in "iu":  # of bfloat16 too: all bits but the sign, a NaN
        poison = np.iinfo(numbers).max if dtype != tl.bfloat16 else 0x7FFF
    usual = other.data if other is not None else np.zeros(unread.shape, numbers)
    filled = np.where(unread, np.array(poison).astype(numbers), usual).astype(numbers)
    return interpreter.TensorHandle(np.ascontiguousarray(filled), dtype)
