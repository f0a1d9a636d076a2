"""What an experiment is: one class under `@problem` in a file of its name, and the list of all of
them.

    @problem(title="Few queries: one head, or generated tokens", order=4)
    class FewQueries(Experiment):
        implementations = ("triton", "sdpa_cudnn")
        rows = (Row("forward", "time", "ms"),)

        def cases(self, run):                       # frozen dataclasses, by scale
            return [...]

        def measure(self, cell, run):               # in a process of its own, checked before it is timed
            yield Sample(row=self.rows[0], samples=[...], error=0.4)

        tables = {"times": Pivot(down=("shape",), across="implementation", where={"quantity":
        "time"})}
        figures = {"times": Bars(x="shape", y="median", color="implementation", where={"quantity":
        "time"})}

The file lies in `experiments/` where a handout has the problem, else in `experiments/beyond/`;
these folders hold nothing else. It and `writeup/few_queries.md` are all there is: `list`, `run`,
`report`, `compare` and the tests find both by themselves. A cell is what is attempted, isolated and
resumed: a case and an implementation, or all of these `by_turns`. Its `rows` are promised before it
runs, so that a cell that runs out of memory still leaves a record for each. docs/experiments.md is
the recipe; mixed_precision_accumulation.py is the shortest example, attention_shapes.py a typical
one.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from cs336_systems.bench.records import Status
from cs336_systems.config import RunConfig
from cs336_systems.handout import HANDOUT

if TYPE_CHECKING:
    import pandas as pd


PACKAGE = "cs336_systems.experiments"
# the problems of the handouts, one file each
FOLDER = Path(__file__).resolve().parents[1] / "experiments"
BEYOND = "beyond"  # its folder of what no handout asks for
# column -> a value, several in a tuple or list, or a function that says which
Where = Mapping[str, Any]
BY_TURNS = "by turns"  # a cell's implementation where it measures several


class Unsupported(Exception):  # noqa: N818 - a reason for a row, not an error
    """An implementation does not exist for a case; the message says why and becomes the `skipped`
    row's.
    """


class Disagreement(Exception):  # noqa: N818
    """An implementation's result is outside the numerical contract, so its time is not recorded."""


@dataclass(frozen=True)
class Row:
    """One quantity that a cell promises to report."""

    mode: str  # forward, backward, forward_backward, train_step or collective: what is timed
    # time, compile_time, peak_memory, ...; a series ends in _intervals or begins with timeline.
    quantity: str
    unit: str  # ms, s, MiB, "1" for a pure number, ...
    case: Any = None  # the config dataclass of this row, where it is not the cell's own
    implementation: str = ""  # whose it is, where the cell measures several by turns
    gpu_only: bool = False  # a CPU has none, such as what CUDA's allocator counts


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Samples of one promised row, or the reason why there are none."""

    row: Row
    samples: Sequence[float] = ()
    kernel: str = ""  # the kernel or configuration that really ran
    error: float | None = None  # largest error over its bound, where the row's results were checked
    # of a row without samples, where others of its cell could be measured
    status: Status = "skipped"
    message: str = ""  # why it has none


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One implementation on one case, or several of them by turns, each with rows of its own."""

    case: Any  # a frozen config dataclass; stored in the records
    implementation: str  # of several BY_TURNS; no record has it
    rows: tuple[Row, ...]
    problem: str = ""  # under which its records are kept; filled in by `planned_cells`
    # the experiment that measures it, where its records are kept under another name
    measured_by: str = ""
    # measure in a process that has done nothing before (warm-up effects)
    fresh_process: bool = False
    # of the peak, by which a CPU run skips what cannot fit; filled in where accounting knows
    predicted_bytes: int = 0

    @property
    def group(self) -> tuple[Any, ...]:
        """Cells of one group are measured on one GPU, in one shard: those that tables compare or
        that share inputs.
        """
        if hasattr(self.case, "head_dim"):
            return (self.problem, self.case.dtype, self.case.head_dim)
        if hasattr(self.case, "model"):
            return (self.problem, self.case.model.name)
        return (self.problem, self.case)

    @property
    def implementations(self) -> tuple[str, ...]:
        """Whose rows the cell promises."""
        return tuple(dict.fromkeys(row.implementation or self.implementation for row in self.rows))

    @property
    def alone(self) -> bool:
        """Whether nothing else may run on the machine meanwhile: it has ranks of its own, or times
        the host.
        """
        return hasattr(self.case, "num_ranks") or any(
            row.quantity == "host_time" for row in self.rows
        )


def turns_cell(case: Any, implementations: Iterable[str], rows: Iterable[Row]) -> Cell:
    """The cell in which `implementations` take turns on `case`, each with all of `rows`."""
    own = tuple(replace(row, implementation=name) for name, row in product(implementations, rows))
    return Cell(case=case, implementation=BY_TURNS, rows=own)


class DeclaredTable(Protocol):
    """A table as an experiment declares it: one of `book.tables`."""

    @property
    def where(self) -> Where:
        """Which rows of the frame it is of."""

    def build(self, frame: pd.DataFrame) -> Any:
        """The table of the experiment's frame."""


class DeclaredFigure(Protocol):
    """A figure as an experiment declares it: one of `book.figures`."""

    def chart(self, frame: pd.DataFrame) -> Any:
        """The Altair chart of the experiment's frame, or None where nothing is drawn."""


class Experiment:
    """Base of every experiment. `cases` and `measure` are needed, or `cells` instead of `cases`;
    the rest has defaults.

    `tables` and `figures` are declared by name: the page shows them with `{{ table("times") }}`,
    files carry it.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    section: ClassVar[str] = "beyond"  # of the handout, or what none asks for
    editions: ClassVar[tuple[int, ...]] = ()
    points: ClassVar[int] = 0
    order: ClassVar[float]  # among the chapters beyond the handout

    implementations: tuple[str, ...] = ("eager",)
    rows: tuple[Row, ...] = ()  # of each cell, unless `cells` gives others
    # what `run --implementation package.module:Name` may be here: attention, ddp, fsdp; "": nothing
    takes: str = ""
    # one cell measures all implementations of a case, round by round: ratios are within rounds
    by_turns: bool = False
    # column -> of which rows a row is how many times as fast, in the same case
    speeds: Mapping[str, Where] = {}
    tables: Mapping[str, DeclaredTable] = {}
    figures: Mapping[str, DeclaredFigure] = {}

    def cases(self, run: RunConfig) -> Sequence[Any]:
        """The config dataclasses that are measured at `run.scale`."""
        return ()

    def names(self, run: RunConfig) -> Sequence[str]:
        """Those of `implementations` that are measured at the run's scale."""
        return self.implementations

    def cells(self, run: RunConfig) -> list[Cell]:
        """All of `names` on every case, each with those of `rows` that the device has; override
        where they differ.
        """
        rows = tuple(row for row in self.rows if run.device == "cuda" or not row.gpu_only)
        names = self.names(run)
        if self.by_turns:
            return [turns_cell(case, names, rows) for case in self.cases(run)]
        return [
            Cell(case=case, implementation=name, rows=rows)
            for case in self.cases(run)
            for name in names
        ]

    def measure(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        """Measure `cell`, checking before timing; raises Unsupported or Disagreement, passes
        OutOfMemoryError.
        """
        raise NotImplementedError(f"{type(self).__name__} measures nothing")

    def columns(self, row: dict[str, Any]) -> dict[str, Any]:
        """Columns of its own for the frame, from a row that has the case's fields:
        `{"shape": "1 x 16 x 64"}`.

        A record for which it raises KeyError, ValueError or TypeError is left out with a warning.
        """
        return {}

    def compared(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The frame with further columns that need other rows than their own."""
        return frame

    def numbers(self, frame: pd.DataFrame) -> dict[str, Any]:
        """What its page needs and no lookup gives: names for the template, numbers or functions."""
        return {}


class Calculation(Experiment):
    """A problem of closed forms: `calculate` gives its frame, and nothing is run or recorded."""

    def calculate(self) -> list[dict[str, Any]]:
        """The frame's rows: column -> value."""
        raise NotImplementedError(f"{type(self).__name__} calculates nothing")


@dataclass(frozen=True, kw_only=True)
class Outline:
    """What a list shows of an experiment."""

    title: str
    order: float  # among the chapters beyond the handout
    is_measured: bool  # by `run`; a calculation is not


E = TypeVar("E", bound=type[Experiment])
_loaded: dict[str, Experiment] = {}  # by name, of the files imported so far


def problem(*, title: str = "", order: float = 0) -> Callable[[E], E]:
    """Make a class the experiment of its file. Of a handout's problem the handout says title,
    section and points.
    """

    def mark(cls: E) -> E:
        cls.name, cls.title, cls.order = cls.__module__.rpartition(".")[2], title, order
        if known := HANDOUT.get(cls.name):
            cls.title, cls.section, cls.editions, cls.points = (
                known.title,
                known.section,
                known.editions,
                known.points,
            )
        elif not title:
            raise ValueError(f"{cls.name} is no handout's problem: @problem needs its title")
        _loaded[cls.name] = cls()
        return cls

    return mark


@cache
def experiments() -> dict[str, Experiment]:
    """Every file with a class under `@problem` by name, the handouts' in their order, then those
    beyond.
    """
    return {name: load(name) for name in outlines()}


@cache
def outlines() -> dict[str, Outline]:
    """`experiments`, as far as their files say it without being imported: a list need not wait for
    PyTorch.
    """
    found = {
        file.stem: _outline(file)
        for folder in (FOLDER, FOLDER / BEYOND)
        for file in folder.glob("[!_]*.py")
    }
    places = list(HANDOUT)

    def place(name: str) -> tuple[float, float, str]:
        return (0, places.index(name), "") if name in HANDOUT else (1, found[name].order, name)

    return {name: found[name] for name in sorted(found, key=place)}


def _outline(file: Path) -> Outline:
    """What `@problem(title=..., order=...)` and the class below it say; ValueError where they are
    no constants.
    """
    name = file.stem
    if file != file_of(name):
        raise ValueError(
            f"{file.name} belongs into {file_of(name).parent.name}/: HANDOUT says whose problem it is"
        )
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for mark in node.decorator_list:
            if (
                isinstance(mark, ast.Call)
                and isinstance(mark.func, ast.Name)
                and mark.func.id == "problem"
            ):
                given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in mark.keywords}
                title = HANDOUT[name].title if name in HANDOUT else given.get("title", "")
                bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
                return Outline(
                    title=title,
                    order=given.get("order", 0),
                    is_measured=Calculation.__name__ not in bases,
                )
    raise ValueError(f"{name}.py has no class under @problem")


def measured_problems() -> dict[str, Experiment]:
    """Those that `run` measures: all but the calculations."""
    return {name: one for name, one in experiments().items() if not isinstance(one, Calculation)}


def file_of(name: str) -> Path:
    """The file of the experiment `name`, there or not."""
    return (FOLDER if name in HANDOUT else FOLDER / BEYOND) / f"{name}.py"


def load(name: str) -> Experiment:
    """The experiment of the file `<name>.py`; ValueError if that has none."""
    folder = file_of(name).relative_to(FOLDER).parent.parts
    importlib.import_module(".".join((PACKAGE, *folder, name)))
    if name not in _loaded:
        raise ValueError(f"{name}.py has no class under @problem")
    return _loaded[name]
