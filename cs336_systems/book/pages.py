"""Render `writeup.md` and `beyond.md` from the templates `writeup/<problem>.md`, whose numbers come from records.

    The forward takes {{ time("hopper", mode="forward", shape="1 × 16 × 16,384 × 64 causal") }},
    {{ speed("hopper", "sdpa_cudnn", mode="forward", shape=...) }} of cuDNN's speed.

    {{ table("forward") }}

    {{ figure("forward") }}

A template may call the public methods of `lookups.Page` and the names that the experiment's `numbers`
returns. An unknown name, a lookup that finds no record or several, and a table of too many lines
are errors with the page's name: the document says in the page's place that it cannot be made, and
has all others. A measured number typed by hand fails `report --check`. A page quotes a derivation,
a handout or another's measurement with its source: `{{ given("3.35 TB/s", "data sheet") }}`.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from cs336_systems.bench.placing import UNREADABLE, attempt
from cs336_systems.bench.sources import older_hashes, reached, sources_hash
from cs336_systems.bench.spec import Calculation, experiments
from cs336_systems.bench.worker import MOST_HELD_BYTES
from cs336_systems.book.figures import BLACK, digest, spec_of, write_png
from cs336_systems.book.frames import calculated_frame, dicts, digits, flat_case, read_frame
from cs336_systems.book.lookups import PAGES, Page
from cs336_systems.book.tables import ABSENT
from cs336_systems.handout import CHAPTERS, COMMANDS, HANDOUT
from cs336_systems.measure.text import write_whole

DOCUMENT, BEYOND = "writeup.md", "beyond.md"  # the handouts' problems; what no handout asks for
TITLES = {DOCUMENT: "Writeup", BEYOND: "Beyond the handouts"}
README = "README.md"  # written by hand, with blocks made from records
BLOCK = re.compile(r"(<!-- begin made: (.+?) -->\n).*?(<!-- end made -->)", re.DOTALL)
# a template's link to another template, which is a section of a document
LINK = re.compile(r"\]\((\w+)\.md\)")
CODE = re.compile(r"\]\(\.\./(cs336_systems/[^)#]+)\)")  # a template's link to code
FIGURE = re.compile(r'{{ figure\("(\w+)"\) }}')
DEFAULT_BUCKET_MB = 25.0  # `quantity_of` omits this value of a case
DIGESTS = "digests.json"  # file with digests of the figures beside it
CANNOT_BE_MADE = (
    "*The records do not have what this says: `cs336-systems report --check` names it.*"
)
MOST_WORDS = 15_000  # most words of a document
ANSWER_WITHIN = 10  # a page's answer stands within so many lines
# `Book.age`: its words on the code, and a pattern of the line.
UNCHANGED, CHANGED = "kernels unchanged since", "older than the code that they measure"
AGE = re.compile(r"^\*.+, records of \d{4}-", re.MULTILINE)
ANSWER = "> **Answer.**"
# A number with a unit in which something is measured. Digits in code, formulas, links and
# placeholders do not count.
TYPED = re.compile(
    r"(?<![\w.])[−-]?\d[\d,.]*\s?(?:ms|µs|us|s|MiB|GiB|MB/s|GB/s|TB/s|TFLOP/s|%|×|times)(?![\w/])"
)
NOT_PROSE = re.compile(
    r"{{.*?}}|{%.*?%}|{#.*?#}|```.*?```|`[^`\n]*`|\$[^$\n]*\$|\]\([^)]*\)", re.DOTALL
)


class Book:
    """The pages of `root` with the published records of `folder`, `results/<device>`."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder
        self._frames: dict[str, pd.DataFrame] = {}
        self._shown: dict[str, dict[str, set[str]]] = {}  # quantity -> value -> pages that show it
        self._rendering = ""  # name of the page that is being rendered
        self.environment = jinja2.Environment(
            undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False
        )
        self.environment.filters["digits"] = digits

    @property
    def names(self) -> list[str]:
        """The names of all pages: the handouts' problems in their order, then the others."""
        there = {path.stem for path in (self.root / PAGES).glob("*.md")}
        return [
            name
            for name in dict.fromkeys((*HANDOUT, *experiments(), *sorted(there)))
            if name in there
        ]

    def frame(self, name: str) -> pd.DataFrame:
        """Return the frame of the experiment `name`, which is read or calculated once."""
        if name not in self._frames:
            one = experiments()[name]
            if isinstance(one, Calculation):
                self._frames[name] = calculated_frame(one)
            else:
                self._frames[name] = read_frame(one, self.folder_of(name))
        return self._frames[name]

    def template(self, name: str) -> str:
        """Return the text of the template `writeup/<name>.md`."""
        return (self.root / PAGES / f"{name}.md").read_text(encoding="utf-8")

    def page(self, name: str) -> str:
        """Return the page `name` as it stands in the document.

        Raises ValueError with the page's name if it cannot be rendered or lacks its heading. A page
        without a table gets the line of age above its last paragraph.
        """
        page = Page(self, name)
        self._rendering = name
        try:
            text = self.environment.from_string(self.template(name)).render(page.names())
        except (jinja2.TemplateError, *UNREADABLE) as error:
            raise ValueError(f"{PAGES}/{name}.md: {error}") from error
        heading, _, rest = text.partition("\n")
        if heading != f"# {name}":
            raise ValueError(f"{PAGES}/{name}.md: must begin with '# {name}', has {heading[:80]!r}")
        if name in experiments() and not AGE.search(text):
            # No table has shown the age yet: insert it above the links that end a page.
            before, _, last = rest.rstrip().rpartition("\n\n")
            rest = "\n\n".join(filter(None, (before, self.age(name), last)))
        here = document_of(name)

        def link(match: re.Match[str]) -> str:
            """Return the link to a template as one to its section."""
            there = document_of(match[1])
            return f"]({'' if there == here else there}#{match[1]})"

        rest = LINK.sub(link, rest.rstrip()).replace("](../", "](")
        return f"## {name}\n{rest}\n"

    def age(self, name: str, rows: pd.DataFrame | None = None) -> str:
        """Return the line below a table: the device and dates of `rows`, and whether code is newer.

        `rows` are of the experiment `name`; None means all of its records. The line is "" for a
        calculation or without rows. It also names GPU memory that the measuring process held before
        a case, if it is above MOST_HELD_BYTES.
        """
        rows = self.frame(name) if rows is None else rows
        if isinstance(experiments()[name], Calculation) or rows.empty:
            return ""
        older = older_hashes(self.folder_of(name) / "records").get(name, {})
        known = dicts(rows[["sources", "run"]].drop_duplicates())
        hashes = {row["sources"] or older.get(row["run"], "") for row in known}
        days = sorted({f"{run[:4]}-{run[4:6]}-{run[6:8]}" for run in rows["run"]})
        dates = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        held = pd.to_numeric(rows["held_mib"]).max()
        more = (
            f"; up to {held / 1024:.1f} GiB were held before"
            if held * 2**20 > MOST_HELD_BYTES
            else ""
        )
        age = UNCHANGED if hashes == {sources_hash(name)} else CHANGED
        # An experiment that reaches no operation of ours measures PyTorch's own.
        age = f", {age}" if reached(name) else ""
        return f"*{rows['device'].iloc[0]}, records of {dates}{age}{more}.*"

    def show(self, row: dict[str, Any]) -> None:
        """Remember that the page being rendered prints the median of `row`, for `contradictions`.

        Rows of calculations have no median and are ignored.
        """
        if "median" not in row:
            return
        value = f"{float(row['median']):.3g} {row['unit']}"  # as most numbers are printed
        self._shown.setdefault(quantity_of(row), {}).setdefault(value, set()).add(self._rendering)

    def contradictions(self) -> list[str]:
        """Return a line for each quantity that pages show with several values.

        Such a quantity is measured by two experiments, and pages cite both. Numbers in the text and
        in tables that a page shows whole are compared, of the pages rendered so far; if there are
        none, all pages are rendered first.
        """
        for name in () if self._shown else self.names:
            self.page(name)
        return [
            f"{quantity}: "
            + ", ".join(
                f"{value} on {' and '.join(sorted(pages))}" for value, pages in values.items()
            )
            for quantity, values in self._shown.items()
            if len(values) > 1
        ]

    def document(self, which: str = DOCUMENT) -> str:
        """Return the text of DOCUMENT or BEYOND: a table of its pages, then the pages."""
        names = [name for name in self.names if document_of(name) == which]
        sources = f"`{PAGES}/` and the records in `{self.folder.parent.name}/`"
        made = f"`cs336-systems {self._report()}` makes this from {sources}."
        if which == DOCUMENT:
            made += f" What no handout asks for is in [{BEYOND}]({BEYOND})."
            facts = ["section", "editions", "points"]
        else:
            made += f" The handouts' problems are in [{DOCUMENT}]({DOCUMENT})."
            facts = ["what"]
        made += " A command follows `cs336-systems`; where there is none, the page is the answer."

        columns = ["problem", *facts, "code", "figure", "command"]
        lines = [f"# {TITLES[which]}", "", made, "", _line(columns), _line([":--"] * len(columns))]
        for name in names:
            known = HANDOUT.get(name) or experiments().get(name)
            if known is None:
                raise ValueError(f"{PAGES}/{name}.md: no problem of that name")
            editions = " and ".join(map(str, known.editions)) or ABSENT
            of_it = {
                "problem": f"[{name}](#{name})",
                "section": known.section,
                "editions": editions,
                "points": str(known.points or ABSENT),
                "what": known.title,
            }
            cells = [of_it[column] for column in ("problem", *facts)]
            lines.append(_line([*cells, *self._where(name)]))
        pages = [self._page_or_why(name) for name in names]
        return "\n".join([*lines, ""]) + "\n" + "\n".join(pages)

    def _where(self, name: str) -> list[str]:
        """Return links to the code and to the first figure of the page `name`, and its command.

        The code is the first link in the last line of the page's template.
        """
        text = self.template(name)
        code = CODE.findall(text.rstrip().rpartition("\n")[2])
        linked = f"[{code[0].removeprefix('cs336_systems/')}]({code[0]})" if code else ABSENT
        figure = FIGURE.search(text)
        drawn = ABSENT
        if figure:
            path = self.figure_path(name, figure[1]).relative_to(self.root).as_posix()
            drawn = f"[figure]({path})"
        command = f"`{COMMANDS.get(name, f'grade tests/adapters.py --problem {name}')}`"
        if name in experiments():
            is_measured = not isinstance(experiments()[name], Calculation)
            command = f"`run {name}`" if is_measured else ABSENT
        return [linked, drawn, command]

    def _page_or_why(self, name: str) -> str:
        """Return the page `name`, or a section that says it cannot be made, with a warning why."""
        page = attempt(f"the section {name} of {document_of(name)}", partial(self.page, name))
        return page if page is not None else f"## {name}\n\n{CANNOT_BE_MADE}\n"

    def readme(self) -> str:
        """Return the README with the current values in its blocks.

        A block is `<!-- begin made: EXPRESSION -->`, the value of EXPRESSION, `<!-- end made -->`.
        """

        def made(block: re.Match[str]) -> str:
            """Return the block with its value, or with CANNOT_BE_MADE and a warning."""
            self._rendering = README
            value = attempt(f"the block {block[2]} of {README}", partial(self._value, block[2]))
            return f"{block[1]}\n{CANNOT_BE_MADE if value is None else value}\n\n{block[3]}"

        return BLOCK.sub(made, (self.root / README).read_text(encoding="utf-8"))

    def _value(self, expression: str) -> str:
        """Return the value of an expression of the README as text; ValueError if it has none."""
        names = {"of": lambda name: Page(self, name), "sections": self.sections}
        try:
            return self.environment.from_string(f"{{{{ {expression} }}}}").render(names)
        except jinja2.TemplateError as error:
            raise ValueError(str(error)) from error

    def sections(self) -> str:
        """Return a Markdown table with a line per chapter of the handouts: links to its pages."""
        chapters: dict[str, list[str]] = {}
        for name in self.names:
            chapter = HANDOUT[name].section.partition(".")[0] if name in HANDOUT else ""
            chapters.setdefault(chapter, []).append(f"[{name}]({document_of(name)}#{name})")
        lines = [_line(["section", "pages"]), _line([":--"] * 2)]
        for chapter, links in chapters.items():
            title = f"{chapter} {CHAPTERS[chapter]}" if chapter else "Beyond the handouts"
            lines.append(_line([title, ", ".join(links)]))
        return "\n".join(lines)

    def figures(self) -> dict[Path, dict[str, Any]]:
        """Return the specification of every figure that a page shows, by the path of its PNG."""
        specs = {}
        for name in (name for name in self.names if name in experiments()):
            text = self.template(name)
            for figure in (one for one in experiments()[name].figures if f'figure("{one}"' in text):
                spec = attempt(
                    f"the figure {figure} of {name}", partial(self.figure_spec, name, figure)
                )
                if spec is not None:
                    specs[self.figure_path(name, figure)] = spec
        return specs

    def figure_spec(
        self, name: str, figure: str, background: str = "white", ink: str = BLACK
    ) -> dict[str, Any] | None:
        """Return the specification of the problem's figure; None if nothing is drawn.

        Its letters have the colour `ink` on `background`.
        """
        frame = self.frame(name)
        chart = None if frame.empty else experiments()[name].figures[figure].chart(frame)
        return None if chart is None else spec_of(chart, background, ink)

    def figure_path(self, problem: str, figure: str) -> Path:
        """Return the path of the PNG of a problem's figure."""
        return self.folder_of(problem) / "figures" / f"{problem}_{figure}.png"

    def folder_of(self, problem: str) -> Path:
        """Return the results folder whose records and figures are shown for `problem`.

        It is the folder "calculated" for a calculation, this book's folder if it has records of the
        problem, else that of another GPU that has.
        """
        if isinstance(experiments()[problem], Calculation):
            return self.folder.parent / "calculated"
        return next((one.folder for one in self._books() if one.has(problem)), self.folder)

    def on(self, device: str) -> Book:
        """Return a book of the same pages with the records of another GPU, `results/<device>`."""
        return Book(self.root, self.folder.parent / device)

    def has(self, problem: str) -> bool:
        """Return whether this book's folder has records of `problem`."""
        return (self.folder / "records" / f"{problem}.jsonl").exists()

    def _books(self) -> list[Book]:
        """Return this book, then one for each other GPU's results folder."""
        folders = sorted(self.folder.parent.glob("nvidia-*"))
        return [self, *(self.on(folder.name) for folder in folders if folder != self.folder)]

    def write(self) -> list[Path]:
        """Write changed files: documents, README, full tables, figures; return the written paths."""
        digests = self._digests()
        written = []
        for path, made in self._stale():
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(made, str):
                write_whole(path, made)
            else:
                write_png(made, path)
                digests[path.name] = digest(made)
            written.append(path)
        if digests != self._digests():
            text = json.dumps(dict(sorted(digests.items())), indent=1) + "\n"
            (self.folder / "figures").mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / "figures" / DIGESTS, text)
        return written

    def check(self) -> list[str]:
        """Return a line for each fault of the pages and of the files made from them.

        Faults are: a stale file, a record that is left out, a measured number typed by hand, a
        quantity with two values, a document that is too long, a page without its answer at the top.
        """
        cure = f"run `cs336-systems {self._report()}`"
        # Warnings are faults, too: a record that is left out must not be published.
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", UserWarning)
            found = [
                f"{path}: differs from the records and pages; {cure}" for path, _ in self._stale()
            ]
            words = {which: count_words(self.document(which)) for which in TITLES}
        found += dict.fromkeys(
            str(one.message) for one in told if issubclass(one.category, UserWarning)
        )
        found += (f"one quantity, two values: {line}" for line in self.contradictions())
        for name in self.names:
            found += [
                f"{PAGES}/{name}.md:{line}: {what}"
                for line, what in check_template(self.template(name))
            ]
            if not CODE.search(self.template(name).rstrip().rpartition("\n")[2]):
                found.append(f"{PAGES}/{name}.md: the last line must link ../cs336_systems")
        found += [
            f"{which}: {number:,} words, at most {MOST_WORDS:,}"
            for which, number in words.items()
            if number > MOST_WORDS
        ]
        return found

    def _stale(self) -> Iterator[tuple[Path, str | dict[str, Any]]]:
        """Yield each outdated file of `_made` with the text or figure that it should hold."""
        digests = self._digests()
        for path, made in self._made():
            if isinstance(made, str):
                is_fresh = path.exists() and path.read_text(encoding="utf-8") == made
            else:
                is_fresh = path.exists() and digests.get(path.name) == digest(made)
            if not is_fresh:
                yield path, made

    def _made(self) -> Iterator[tuple[Path, str | dict[str, Any]]]:
        """Yield each file made from records and pages, with its text or figure specification.

        The files are the documents, the README, one file per problem with all its tables, and the
        figures.
        """
        for which in TITLES:
            yield self.root / which, self.document(which)
        if (self.root / README).exists():
            yield self.root / README, self.readme()

        # the full tables, of every GPU
        for book in self._books():
            for name, experiment in experiments().items():
                is_here = book.has(name) or (book is self and isinstance(experiment, Calculation))
                if not is_here or not experiment.tables:
                    continue
                frame = attempt(f"the tables of {name}", partial(book.frame, name))
                if frame is None or frame.empty:
                    continue
                parts = [f"# {name}", experiment.title + "."]
                for which, declared in experiment.tables.items():
                    table = attempt(f"the table {which} of {name}", partial(declared.build, frame))
                    if table is not None and table.lines:
                        parts += (
                            [f"**{table.title}**", table.markdown()]
                            if table.title
                            else [table.markdown()]
                        )
                yield book.folder_of(name) / "tables" / f"{name}.md", "\n\n".join(parts) + "\n"
        yield from self.figures().items()

    def _report(self) -> str:
        """Return the command that writes the pages on any machine.

        It names the folder, since without one `report` takes the machine's own records.
        """
        return f"report --folder {self.folder.name}"

    def _digests(self) -> dict[str, str]:
        """Return the digests of the figures as last written, by file name."""
        path = self.folder / "figures" / DIGESTS
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def count_words(text: str) -> int:
    """Return the number of words in a document; bars and rules of tables are none."""
    return sum(any(letter.isalnum() for letter in word) for word in text.split())


def _line(cells: list[str]) -> str:
    """Return a line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def document_of(name: str) -> str:
    """Return the document that the page `name` is a section of."""
    return DOCUMENT if name in HANDOUT else BEYOND


def quantity_of(row: Mapping[str, Any]) -> str:
    """Return a description of what a frame's row measures, the same for every experiment."""
    case = flat_case(json.loads(row["case"]))
    unsaid = {
        "case_type": row["case_type"],
        "bucket_size_mb": DEFAULT_BUCKET_MB,
        "checkpointing": "none",
    }
    facts = {
        name: value
        for name, value in case.items()
        if value is not None and unsaid.get(name) != value
    }
    words = [f"{name}={value}" for name, value in sorted(facts.items())]
    return " ".join([row["device"], row["implementation"], row["mode"], row["quantity"], *words])


def check_template(text: str) -> list[tuple[int, str]]:
    """Return the faults of a page's template as (line number, message).

    Faults are a missing answer at the top and measured numbers typed by hand.
    """
    found = []
    if not any(line.startswith(ANSWER) for line in text.splitlines()[:ANSWER_WITHIN]):
        found.append((1, f"the answer, {ANSWER!r}, must stand in the first {ANSWER_WITHIN} lines"))
    # Blank out code, formulas and placeholders, so that lines keep their numbers.
    prose = NOT_PROSE.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)
    for number, line in enumerate(prose.splitlines(), start=1):
        found += [
            (
                number,
                f"{typed.strip()!r} is typed by hand: take it from a record, "
                "or quote it with given()",
            )
            for typed in TYPED.findall(line)
        ]
    return found
