"""What one launch of a kernel did: its steps, the values in them, and what is wrong with them.

A step is one statement that has run: the accesses that it made and the variables that it changed.
`hooks.py` calls `Recording` as the interpreter runs; `html_page.py` writes the page.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import numpy as np

from cs336_systems.stepper.argument import BESIDE, OUTSIDE, WITHIN, Argument, runs
from cs336_systems.stepper.statements import BEGINS

ARGUMENT = "stepper.argument"  # in a handle's `attr`: the number of the argument it points into
VECTOR = 128  # elements up to which values are kept as they are
TILE = 4096  # and up to which they are kept in 8 bits
MOST_BYTES = 1_500_000  # of values of one launch, before compression; then extremes alone
CODES = 252  # levels of a value of 8 bits; codes 0 to 2 are NaN, -inf and inf


class Endless(RuntimeError):
    """A launch has run more statements than are recorded."""


@dataclass(kw_only=True)
class Finding:
    """Something wrong in a launch.

    `what` is "outside" (past the memory of the argument), "beside" (past the argument, in the
    storage that it shares), "twice" (stored by two programs) or "unwritten" (never stored, in a
    tensor that is stored to). Elements are numbered in row-major order.
    """

    what: str
    argument: str
    access: str  # load, store or atomic
    line: int
    elements: list[int] = field(default_factory=list)  # as they were found, some several times
    programs: list[int] = field(default_factory=list)


@dataclass
class Trace:
    """The recordings of some launches, in order."""

    launches: list[Recording] = field(default_factory=list)


class Recording:
    """One launch: `steps` of [program, function, line, loop variables, accesses, variables]."""

    def __init__(self, name: str, most_statements: int) -> None:
        self.name = name
        self.most_statements = most_statements
        self.grid = (1, 1, 1)
        self.arguments: list[Argument] = []
        self.scalars: dict[str, int | float | bool] = {}
        self.steps: list[list[Any]] = []
        self.values = bytearray()
        self.sources: dict[str, tuple[int, list[str]]] = {}  # first line, lines, by function
        self.error = ""  # the message of what the launch raised
        self.program = 0

        self._found: dict[tuple[str, str, int], Finding] = {}
        self._accesses: list[dict[str, Any]] = []  # since the last step
        self._codes: dict[int, tuple[CodeType, str]] = {}  # a code object's own hash is slow
        self._loops: dict[int, list[tuple[int, int, str]]] = {}
        self._last: dict[int, dict[str, Any]] = {}  # variables of a frame, by its id
        self._num_statements = 0

    # Findings

    @property
    def findings(self) -> list[Finding]:
        """What is wrong, in the order in which it was found; elements never stored come last."""
        found = list(self._found.values())
        for argument in self.arguments:
            written = argument.stored_by >= 0
            if written.any() and not written.all():
                elements = np.flatnonzero(~written).tolist()
                found.append(
                    Finding(
                        what="unwritten",
                        argument=argument.name,
                        access="store",
                        line=0,
                        elements=elements,
                    )
                )
        return found

    def _find(
        self, what: str, argument: Argument, access: str, line: int, elements: np.ndarray[Any, Any]
    ) -> None:
        """Add elements to the finding of this kind, argument and line."""
        if not elements.size:
            return
        key = (what, argument.name, line)
        if key not in self._found:
            self._found[key] = Finding(what=what, argument=argument.name, access=access, line=line)
        finding = self._found[key]
        finding.elements += elements.ravel().tolist()
        if self.program not in finding.programs:
            finding.programs.append(self.program)

    # Accesses

    def access(
        self, kind: str, pointers: Any, mask: Any, stored: np.ndarray[Any, Any] | None = None
    ) -> np.ndarray[Any, Any]:
        """Record a load, store or atomic, and return which of its lanes may run.

        The lanes of the `mask` that lie outside the memory of the argument may not.
        """
        addresses = np.asarray(pointers.data)
        on = np.broadcast_to(np.asarray(mask).astype(bool), addresses.shape)
        argument = self._argument_of(pointers, addresses, on)
        line = self._line()
        if argument is None:  # a pointer that was loaded, or made from a number
            self._accesses.append(
                {"kind": kind, "argument": -1, "line": line, "lanes": int(on.sum())}
            )
            return on

        elements, place = argument.elements_at(addresses)
        hit = elements[on & (place == WITHIN)]
        seen = {
            "kind": kind,
            "argument": argument.number,
            "line": line,
            "shape": list(addresses.shape),
            "lanes": int(on.sum()),
            "on": runs(hit),
        }
        if not on.all():
            seen |= {"off": runs(elements[~on & (place == WITHIN)]), "masked": int((~on).sum())}
        for what, where in (("beside", BESIDE), ("outside", OUTSIDE)):
            wrong = elements[on & (place == where)]
            if wrong.size:
                seen[what] = runs(wrong)
                self._find(what, argument, kind, line, wrong)

        if kind != "store":
            np.add.at(argument.num_loads, hit, 1)
        if kind != "load":
            self._note_stores(argument, kind, line, hit)
        if stored is not None and hit.size <= TILE:
            order = np.argsort(hit, kind="stable")
            lanes = np.broadcast_to(stored, addresses.shape)[on & (place == WITHIN)]
            seen["values"] = self.keep(lanes[order], exactly=True)
        self._accesses.append(seen)
        return on & (place != OUTSIDE)

    def product(self, rows: int, inner: int, columns: int) -> None:
        """Record a `tl.dot` of (rows, inner) and (inner, columns)."""
        self._accesses.append(
            {"kind": "dot", "argument": -1, "line": self._line(), "shape": [rows, inner, columns]}
        )

    def _note_stores(
        self, argument: Argument, kind: str, line: int, elements: np.ndarray[Any, Any]
    ) -> None:
        """Mark `elements` as stored by this program; find those that another has stored."""
        before = argument.stored_by[elements]
        if kind == "store":
            others = (before >= 0) & (before != self.program)
            self._find("twice", argument, kind, line, elements[others])
        argument.stored_by[elements] = self.program

    def _argument_of(
        self, pointers: Any, addresses: np.ndarray[Any, Any], on: np.ndarray[Any, Any]
    ) -> Argument | None:
        """Return the argument that pointers were made from, else one that holds all addresses.

        Addresses alone do not tell: a lane past the end of x may lie in y.
        """
        number = pointers.attr.get(ARGUMENT)
        if number is not None:
            return self.arguments[number]
        lanes = addresses[on].astype(np.int64)
        holding = (one for one in self.arguments if lanes.size and one.holds(lanes))
        return next(holding, None)

    # Statements and variables

    def follow(self, source: Callable[..., Any], running: Callable[..., Any]) -> None:
        """Record the statements of `running`, a kernel or device function with calls in it.

        `source` is the function as written.
        """
        try:
            lines, start = inspect.getsourcelines(source)
        except (OSError, TypeError):  # made at run time: its accesses are recorded without a line
            return
        code, name = running.__code__, running.__name__
        self._codes[id(code)] = (code, name)
        self._loops[id(code)] = [
            (node.lineno + start - 1, (node.end_lineno or node.lineno) + start - 1, node.target.id)
            for node in ast.walk(ast.parse(textwrap.dedent("".join(lines))))
            if isinstance(node, ast.For) and isinstance(node.target, ast.Name)
        ]
        self.sources[name] = (start, "".join(lines).rstrip("\n").split("\n"))

    def statement(self, frame: FrameType, line: int, variables: dict[str, Any]) -> None:
        """Record that the statement at `line` has run: a step, if it did anything.

        Endless if too many have.
        """
        self._num_statements += 1
        if self._num_statements > self.most_statements:
            raise Endless(f"the kernel does not end: {self.most_statements:,} statements have run")
        if line == BEGINS:
            self.flush(frame.f_back)
            self._last[id(frame)] = {name: _identity(x) for name, x in variables.items()}
            return

        last = self._last.setdefault(id(frame), {})
        changed = {}
        for name, variable in variables.items():
            identity = _identity(variable)
            if name not in last or last[name] is not identity:
                last[name] = identity
                shown = self._show(variable)
                if shown is not None:
                    changed[name] = shown
        self._step(frame, line, changed, variables)

    def flush(self, frame: FrameType | None = None) -> None:
        """Make a step of accesses that no statement has taken yet."""
        frame = self._followed(frame)
        if self._accesses:
            variables = frame.f_locals if frame is not None else {}
            self._step(frame, self._accesses[-1]["line"], {}, variables)

    def _step(
        self, frame: FrameType | None, line: int, changed: dict[str, Any], variables: dict[str, Any]
    ) -> None:
        """Add a step of this frame, None if it is not known, unless nothing happened."""
        if not changed and not self._accesses:
            return

        loops: dict[str, int] = {}
        name = ""
        if frame is not None:
            name = self._codes[id(frame.f_code)][1]
            for first, last, variable in self._loops[id(frame.f_code)]:
                if first <= line <= last and variable in variables:
                    value = variables[variable]
                    loops[variable] = int(getattr(value, "value", value))
        self.steps.append([self.program, name, line, loops, self._accesses, changed])
        self._accesses = []

    def _followed(self, frame: FrameType | None) -> FrameType | None:
        """Return `frame`, or the nearest one that called it, of a function that is followed."""
        while frame is not None and id(frame.f_code) not in self._codes:
            frame = frame.f_back
        return frame

    def _line(self) -> int:
        """Return the line of the kernel that runs now, 0 if its source is not known."""
        frame = self._followed(sys._getframe(2))
        return frame.f_lineno if frame is not None else 0

    # Values

    def _show(self, variable: Any) -> dict[str, Any] | None:
        """Return what the page shows of a variable: a number, a tile, or where pointers point."""
        variable = getattr(variable, "value", variable)  # of a tl.constexpr
        if isinstance(variable, bool | int | float):
            return {"shape": [], "number": variable}
        handle: Any = getattr(variable, "handle", None)
        if not hasattr(handle, "data"):
            return None
        if not handle.dtype.is_ptr():
            data = decoded(handle.data, handle.dtype)
            return self.keep(data if variable.type.is_block() else data.reshape(-1)[:1])
        if ARGUMENT not in handle.attr:
            return None
        argument = self.arguments[handle.attr[ARGUMENT]]
        elements, place = argument.elements_at(np.asarray(handle.data))
        return {
            "shape": list(elements.shape),
            "points": argument.number,
            "on": runs(elements[place == WITHIN]),
            "astray": int((place != WITHIN).sum()),
        }

    def keep(self, data: Any, *, exactly: bool = False) -> dict[str, Any]:
        """Keep an array's values, and return how the page finds them: shape, extremes, offset.

        Small arrays, and others if `exactly`, are kept in float32 ("floats"), tiles in 8 bits
        ("codes"), and large ones not at all.
        """
        x = np.asarray(data).astype(np.float32)
        finite = x[np.isfinite(x)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
        kept: dict[str, Any] = {
            "shape": list(x.shape),
            "low": float(f"{low:.5g}"),
            "high": float(f"{high:.5g}"),
        }
        odd = [int(np.isnan(x).sum()), int(np.isposinf(x).sum()), int(np.isneginf(x).sum())]
        if any(odd):
            kept["odd"] = odd

        if x.size > VECTOR and len(self.values) > MOST_BYTES:
            return kept
        if x.size <= VECTOR or exactly:
            kept["floats"] = len(self.values)
            self.values += np.ascontiguousarray(x, "<f4").tobytes()
        elif x.size <= TILE:
            kept["codes"] = len(self.values)
            self.values += _in_8_bits(x, kept["low"], kept["high"]).tobytes()
        return kept


def decoded(data: Any, dtype: Any) -> np.ndarray[Any, Any]:
    """Return an interpreted tile's numbers: the interpreter holds bfloat16 as its bits."""
    data = np.asarray(data)
    if dtype.scalar.is_bf16():
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data


def _in_8_bits(x: np.ndarray[Any, Any], low: float, high: float) -> np.ndarray[Any, Any]:
    """Return codes from 3 on for the numbers between `low` and `high`, 0 to 2 for the others."""
    codes = np.zeros(x.shape, np.uint8)  # NaN
    codes[np.isneginf(x)], codes[np.isposinf(x)] = 1, 2
    finite = np.isfinite(x)
    share = (x[finite] - low) / ((high - low) or 1.0)
    codes[finite] = 3 + np.round(np.clip(share, 0, 1) * CODES).astype(np.uint8)
    return codes


def _identity(variable: Any) -> Any:
    """Return what is another object once a variable has changed.

    The handle of a tile is kept, so that its id cannot be used again.
    """
    return getattr(variable, "handle", variable)
