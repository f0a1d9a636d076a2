"""Judge the kernel that somebody wrote for a puzzle: right, or a hint that names what is wrong.

    verdict = judge(PUZZLES["add"], kernel)
    verdict.hint        # "" if it is right
    verdict.recording   # of the launch that decided, for its picture

A puzzle has cases. A case is one launch with its inputs, what must come out, and what comes out of
mistakes that beginners make. Every kernel runs in the interpreter under the stepper, so that
accesses out of bounds are refused and named, and a loop without an end is stopped.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cs336_systems.measure.text import in_one_line
from cs336_systems.stepper import Endless, Finding, Recording, finding_text, trace

MOST_STATEMENTS = 1_000  # of a launch; right kernels have at most 200
TOLERANCE = 1e-3  # absolute up to 1, relative above
OVERRUN = "the mask must switch off the lanes behind the end"
HINTS = {
    "outside load": OVERRUN,
    "beside load": OVERRUN,
    "outside store": OVERRUN,
    "beside store": OVERRUN,
    "twice store": "each program needs a tile of its own",
}


@dataclass(frozen=True)
class Mistake:
    """What some outputs of a case hold if a kernel makes one mistake, and the hint that names it."""

    hint: str
    results: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One launch.

    The kernel gets the inputs, the outputs, which are full of NaN, and the scalars by position, and
    the options by name.
    """

    about: str  # "50 elements in blocks of 16"
    grid: tuple[int, ...]
    inputs: dict[str, Tensor]
    expected: dict[str, Tensor]
    scalars: tuple[int | float, ...] = ()
    options: dict[str, int | bool] = field(default_factory=dict)
    mistakes: tuple[Mistake, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Puzzle:
    """The cases of a puzzle and its hints.

    `hints` are what to say of findings of the stepper, in place of those in HINTS, by "what access".
    `inspect` looks at the recording of a launch with right results: its hint, or "".
    """

    cases: Callable[[], Iterator[Case]]
    hints: dict[str, str] = field(default_factory=dict)
    inspect: Callable[[Case, Recording], str] = lambda case, recording: ""


@dataclass(frozen=True)
class Verdict:
    """The hint, "" for a right kernel, and the last launch, None if there was none."""

    hint: str
    recording: Recording | None = None


def judge(puzzle: Puzzle, kernel: Any) -> Verdict:
    """Return the verdict on `kernel` after its first wrong case, or after all of them."""
    hint = blank_hint(kernel)
    if hint:
        return Verdict(hint)
    recording = None
    for case in puzzle.cases():
        hint, recording = judge_case(puzzle, case, kernel)
        if hint:
            return Verdict(f"{hint} [{case.about}]", recording)
    return Verdict("", recording)


def blank_hint(kernel: Any) -> str:
    """Return what keeps `kernel` from being launched at all, or ""."""
    if not hasattr(kernel, "fn"):
        return "the kernel needs @triton.jit above its def"
    try:
        source = textwrap.dedent(inspect.getsource(kernel.fn))
    except OSError:
        return "the source of the kernel is not known: define it in a cell or a file"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and node.value is Ellipsis:
            return "the blank is still there: write your lines in place of `...`"
    return ""


def judge_case(puzzle: Puzzle, case: Case, kernel: Any) -> tuple[str, Recording | None]:
    """Return the hint on one launch, "" if it is right, and its recording."""
    inputs = [with_storage(tensor) for tensor in case.inputs.values()]
    outputs = {name: torch.full_like(tensor, torch.nan) for name, tensor in case.expected.items()}
    hint = ""
    with (
        warnings.catch_warnings(),
        trace(most_statements=MOST_STATEMENTS, undefined_is_nan=True) as recorded,
    ):
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, of what overflows
        try:
            kernel[case.grid](*inputs, *outputs.values(), *case.scalars, **case.options)
        except Exception as error:  # noqa: BLE001 - the reader's kernel raises anything
            hint = error_hint(error, kernel.fn.__name__)
    recording = recorded.launches[0] if recorded.launches else None
    if hint or recording is None:
        return hint or "the kernel was not launched", recording

    # A known mistake says more than the accesses; these say more than a difference.
    wrong = {name: not agrees(outputs[name], case.expected[name]) for name in outputs}
    if any(wrong.values()):
        for mistake in case.mistakes:
            if all(
                wrong[name] and agrees(outputs[name], values)
                for name, values in mistake.results.items()
            ):
                return mistake.hint, recording
    for finding in recording.findings:
        return finding_hint(puzzle, recording, finding), recording
    for name in outputs:
        if wrong[name]:
            return difference(name, outputs[name], case.expected[name]), recording
    return puzzle.inspect(case, recording), recording


def with_storage(tensor: Tensor) -> Tensor:
    """Return a copy of `tensor` with its strides, and with what lies around it in its storage."""
    storage = tensor.untyped_storage().clone()
    offset = tensor.storage_offset()
    return tensor.new_empty(0).set_(storage, offset, tensor.shape, tensor.stride())


def agrees(found: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors hold the same numbers up to TOLERANCE; NaN and inf are themselves."""
    return torch.allclose(
        found.double(), expected.double(), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True
    )


def difference(name: str, found: Tensor, expected: Tensor) -> str:
    """Return where an output first differs from what is expected, in words."""
    same = torch.isclose(found.double(), expected.double(), rtol=TOLERANCE, atol=TOLERANCE)
    place = (~same).nonzero()[0].tolist()
    numbers = (found[tuple(place)].item(), expected[tuple(place)].item())
    where = ", ".join(map(str, place))
    return f"{name}[{where}] is {numbers[0]:.4g}, but expected {numbers[1]:.4g}"


def finding_hint(puzzle: Puzzle, recording: Recording, finding: Finding) -> str:
    """Return a finding of the stepper with the puzzle's hint on it."""
    text = finding_text(recording, finding)
    if finding.what == "unwritten":
        argument = next(one for one in recording.arguments if one.name == finding.argument)
        first = min(finding.elements)
        is_tail = finding.elements == list(range(first, argument.num_elements))
        return f"your last tile is dropped: {text}" if is_tail else text
    key = f"{finding.what} {finding.access}"
    hint = {**HINTS, **puzzle.hints}.get(key, "")
    return f"{text}: {hint}" if hint else text


def error_hint(error: BaseException, name: str) -> str:
    """Return what a launch raised, with the line of the kernel `name`, its `def` is line 1."""
    while error.__cause__ is not None:  # the interpreter's errors quote the first
        error = error.__cause__
    if isinstance(error, Endless):
        return f"{error}: does the loop's variable come nearer to its end?"
    lines = []
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_name == name:
            lines.append(step.tb_lineno - step.tb_frame.f_code.co_firstlineno + 1)
        step = step.tb_next
    where = f"line {lines[-1]} of the kernel: " if lines else ""
    return f"{where}{type(error).__name__}: {in_one_line(error)}"
