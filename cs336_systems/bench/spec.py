"""Define experiments, each a class under `@problem` in a file of its name, and list all of them.

    @problem(title="Few queries: one head, or generated tokens", order=4)
    class FewQueries(Experiment):
        implementations = ("triton", "sdpa_cudnn")
        rows = (Row("forward", "time", "ms"),)

        def cases(self, run):                       # frozen dataclasses, by scale
            return [...]

        def measure(self, cell, run):               # in its own process; checks before it times
            yield Sample(row=self.rows[0], samples=[...], error=0.4)

        tables = {
            "times": Pivot(
                down=("shape",), across="implementation", where={"quantity": "time"}
            )
        }
        figures = {
            "times": Bars(
                x="shape", y="median", color="implementation", where={"quantity": "time"}
            )
        }

The file lies in `experiments/` if a handout has the problem, else in `experiments/beyond/`; these
folders hold nothing else. An experiment consists of this file and `writeup/few_queries.md`: `list`,
`run`, `report`, `compare` and the tests find both by themselves. A cell is the unit that is
attempted, isolated and resumed: one case with one implementation, or with all of them if the
experiment measures `by_turns`. Its `rows` are promised before it runs, so that a cell that runs out
of memory still leaves a record for each row. docs/experiments.md is the recipe;
mixed_precision_accumulation.py is the shortest example, attention_shapes.py a typical one.
"""

from __future__ import annotations

import ast
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from cs336_systems.bench.records import Status, case_key, case_to_dict
from cs336_systems.bench.sources import BEYOND, EXPERIMENTS, ROOT, file_of
from cs336_systems.config import RunConfig
from cs336_systems.handout import HANDOUT

if TYPE_CHECKING:
    import pandas as pd


PACKAGE = "cs336_systems.experiments"
FOLDER = ROOT / "cs336_systems" / EXPERIMENTS
# A choice of rows: column -> the value, a tuple or list of values, or a predicate of the value.
Where = Mapping[str, Any]
BY_TURNS = "by turns"  # the implementation of a cell that measures several


class Unsupported(Exception):  # noqa: N818 - a reason for a row, not an error
    """Raised if an implementation does not support a case.

    The message says why; the rows become records of status "skipped" with it.
    """


class Disagreement(Exception):  # noqa: N818
    """Raised if an implementation's result is wrong, so that its time is not recorded."""


@dataclass(frozen=True)
class Row:
    """One quantity that a cell promises to report."""

    mode: str  # forward, backward, forward_backward, train_step or collective: what is timed
    # time, compile_time, peak_memory, ...; names of series: "loss", "..._intervals", "timeline...."
    quantity: str
    unit: str  # ms, s, MiB, "1" for a pure number, ...
    case: Any = None  # the config dataclass of this row, if it differs from the cell's
    implementation: str = ""  # the measured implementation, if the cell measures several
    gpu_only: bool = False  # not measured on a CPU, e.g. counts of CUDA's allocator


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Samples of one promised row, or the reason why there are none."""

    row: Row
    samples: Sequence[float] = ()
    kernel: str = ""  # the kernel or configuration that really ran
    error: float | None = None  # largest error over its bound, if the row's results were checked
    # status of a row without samples in a cell whose other rows could be measured
    status: Status = "skipped"
    message: str = ""  # why the row has no samples


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The unit of measurement: one case with one implementation, or with several by turns."""

    case: Any  # a frozen config dataclass; stored in the records
    implementation: str  # BY_TURNS if there are several; their rows then name them
    rows: tuple[Row, ...]  # the promised quantities
    problem: str = ""  # the problem in its records; filled in by `planned_cells`
    # the experiment that measures the cell, if not `problem`
    measured_by: str = ""
    # measure in a process that has done nothing before (warm-up effects)
    fresh_process: bool = False
    # Predicted peak memory, by which a CPU run skips cells that cannot fit. `planned_cells` fills
    # it in if it is 0.
    predicted_bytes: int = 0

    @property
    def group(self) -> tuple[Any, ...]:
        """The key of the cell's group, all of whose cells belong to the same shard (one GPU).

        Tables compare the cells of a group, or these share inputs.
        """
        if hasattr(self.case, "head_dim"):
            return (self.problem, self.case.dtype, self.case.head_dim)
        if hasattr(self.case, "model"):
            return (self.problem, self.case.model.name)
        return (self.problem, self.case)

    @property
    def implementations(self) -> tuple[str, ...]:
        """The implementations whose rows the cell promises, each once."""
        return tuple(dict.fromkeys(row.implementation or self.implementation for row in self.rows))

    def name_in_records(self, row: Row, run: RunConfig) -> str:
        """Return the implementation that records of `row` name; the user's own model is part of it."""
        if row.implementation:
            return row.implementation
        own = f" {run.model}" if run.model is not None and hasattr(self.case, "model") else ""
        return self.implementation + own

    def keys(self, run: RunConfig) -> list[tuple[str, ...]]:
        """Return the `Record.key` of each row, in the order of `rows`, as `run` measures them."""
        cases = [case_key(case_to_dict(row.case or self.case)) for row in self.rows]
        return [
            (
                self.problem,
                run.scale,
                self.name_in_records(row, run),
                case,
                row.mode,
                row.quantity,
            )
            for row, case in zip(self.rows, cases)
        ]

    @property
    def alone(self) -> bool:
        """Whether nothing else may run on the machine meanwhile.

        That holds for cells that start several ranks and for cells that time the host.
        """
        return hasattr(self.case, "num_ranks") or any(
            row.quantity == "host_time" for row in self.rows
        )


def turns_cell(case: Any, implementations: Iterable[str], rows: Iterable[Row]) -> Cell:
    """Return the cell that measures `implementations` by turns on `case`, each with all `rows`."""
    own = tuple(replace(row, implementation=name) for name, row in product(implementations, rows))
    return Cell(case=case, implementation=BY_TURNS, rows=own)


class DeclaredTable(Protocol):
    """The interface of a table that an experiment declares; `book.tables` has implementations."""

    @property
    def where(self) -> Where:
        """The choice of rows of the frame that the table shows."""

    def build(self, frame: pd.DataFrame) -> Any:
        """Return the finished table of the experiment's frame."""


class DeclaredFigure(Protocol):
    """The interface of a figure that an experiment declares; `book.figures` has implementations."""

    def chart(self, frame: pd.DataFrame) -> Any:
        """Return the Altair chart of the experiment's frame; None if there is nothing to draw."""


class Experiment(ABC):
    """Base class of every experiment.

    A subclass defines `measure` and either `cases` or `cells`; the rest has defaults. `tables` and
    `figures` are declared by name: a page shows them with `{{ table("times") }}`, and names of
    files contain it.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    section: ClassVar[str] = "beyond"  # of the handout; "beyond" if no handout has the problem
    editions: ClassVar[tuple[int, ...]] = ()  # years of the handouts that have the problem
    points: ClassVar[int] = 0
    order: ClassVar[float]  # among the chapters beyond the handout

    implementations: tuple[str, ...] = ("eager",)
    rows: tuple[Row, ...] = ()  # of each cell, unless `cells` gives others
    # kind that `run --implementation package.module:Name` accepts: attention, ddp, fsdp; "": none
    takes: str = ""
    # one cell measures all implementations of a case, round by round: ratios are within rounds
    by_turns: bool = False
    # new column -> the baseline rows: how many times as fast a row is as the baseline of its case
    speeds: Mapping[str, Where] = {}
    tables: Mapping[str, DeclaredTable] = {}
    figures: Mapping[str, DeclaredFigure] = {}

    def cases(self, run: RunConfig) -> Sequence[Any]:
        """Return the config dataclasses that are measured at `run.scale`."""
        return ()

    def names(self, run: RunConfig) -> Sequence[str]:
        """Return the names among `implementations` that are measured at the run's scale."""
        return self.implementations

    def cells(self, run: RunConfig) -> list[Cell]:
        """Return a cell for each case and implementation, or one for each case if `by_turns`.

        Each has `self.rows`, on a CPU without those that are `gpu_only`. Override this if cells
        differ in their rows.
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

    @abstractmethod
    def measure(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        """Check and time `cell`, yielding the sample of each row as it is measured.

        Raises Unsupported if the implementation does not exist for the case, and Disagreement if
        its result is wrong. Does not catch OutOfMemoryError.
        """

    def columns(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return further columns for a row of the frame, e.g. `{"shape": "1 x 16 x 64"}`.

        `row` has the fields of the record and of its case.

        A record is left out with a warning if it raises KeyError (a mode, a mask or a quantity that
        is unknown here), ValueError (a malformed value), or ZeroDivisionError (a measured 0).
        """
        return {}

    def compared(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return the frame with further columns whose values depend on several rows."""
        return frame

    def numbers(self, frame: pd.DataFrame) -> dict[str, Any]:
        """Return further names for the page's template: numbers or functions no lookup gives."""
        return {}


class Calculation(Experiment):
    """Base class of problems that are calculated: nothing is run or recorded."""

    @abstractmethod
    def calculate(self) -> list[dict[str, Any]]:
        """Return the rows of the frame, each as {column: value}."""

    def measure(self, cell: Cell, run: RunConfig) -> Iterator[Sample]:
        """Return no sample: a calculation has no cells."""
        return iter(())


@dataclass(frozen=True, kw_only=True)
class Outline:
    """What `list` shows of an experiment without importing its file."""

    title: str
    order: float  # among the chapters beyond the handout
    is_measured: bool  # whether `run` measures it; False for a calculation


E = TypeVar("E", bound=type[Experiment])
_loaded: dict[str, Experiment] = {}  # by name, of the files imported so far


def problem(*, title: str = "", order: float = 0) -> Callable[[E], E]:
    """Return a decorator that registers a class as the experiment of its file.

    A handout's problem takes its title, section, editions and points from HANDOUT. Other problems
    need a `title`, else ValueError is raised; `order` sorts them among the chapters beyond.
    """

    def mark(cls: E) -> E:
        """Register `cls` under the name of its file and return it."""
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
    """Import and return all experiments by name: handouts' problems in their order, then others."""
    return {name: load(name) for name in outlines()}


@cache
def outlines() -> dict[str, Outline]:
    """Return the outlines of all experiments by name, in the order of `experiments`.

    The files are parsed, not imported, so that a list need not wait for PyTorch.
    """
    found = {
        file.stem: _outline(file)
        for folder in (FOLDER, FOLDER / BEYOND)
        for file in folder.glob("[!_]*.py")
    }
    places = list(HANDOUT)

    def place(name: str) -> tuple[float, float, str]:
        """Return the sort key of an experiment: handouts' order, then `order`, then name."""
        return (0, places.index(name), "") if name in HANDOUT else (1, found[name].order, name)

    return {name: found[name] for name in sorted(found, key=place)}


def _outline(file: Path) -> Outline:
    """Return the outline of the class under `@problem(title=..., order=...)` in `file`.

    Raises ValueError if the file has no such class, lies in the wrong folder, or gives the
    decorator anything but constants.
    """
    name = file.stem
    if file != file_of(name):
        raise ValueError(
            f"{file.name} belongs into {file_of(name).parent.name}/: "
            "HANDOUT says whose problem it is"
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
    """Return the experiments that `run` measures, by name: all but the calculations."""
    return {name: one for name, one in experiments().items() if not isinstance(one, Calculation)}


def load(name: str) -> Experiment:
    """Import the file `<name>.py` and return its experiment; ValueError if it has none."""
    folder = file_of(name).relative_to(FOLDER).parent.parts
    importlib.import_module(".".join((PACKAGE, *folder, name)))
    if name not in _loaded:
        raise ValueError(f"{name}.py has no class under @problem")
    return _loaded[name]
