"""The chapters of the book: which pages each has, and their texts with numbers from records.

    chapters = read_chapters(book)
    chapters[1].name, chapters[1].pages     # "one_gpu", ["benchmarking_script", ...]

A chapter is `writeup/chapters/<number>_<name>.md`: a first paragraph that leads, a list of its pages
in reading order, worked problems with folded answers, and takeaways. A page belongs to the chapter
that lists it with a link. Numbers are placeholders, as on pages: `{{ of("fsdp_accounting").time(...) }}`
takes a record, `{{ rank_bytes(...) }}` and the other names of `chapter_names` calculate.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jinja2

from cs336_systems import accounting
from cs336_systems.analysis import ffn, pipeline, rings
from cs336_systems.analysis.hardware import HARDWARE
from cs336_systems.analysis.memory_plan import fsdp_bytes, rank_bytes
from cs336_systems.analysis.predictor import predict
from cs336_systems.analysis.traffic import Plan
from cs336_systems.bench.placing import UNREADABLE
from cs336_systems.book.addresses import IMAGES
from cs336_systems.book.lookups import PAGES, Page
from cs336_systems.book.pages import Book
from cs336_systems.config import MODEL_SIZES, AttentionShape

CHAPTERS = f"{PAGES}/chapters"  # the folder of the chapters' texts
START = "index"  # a text there that is no chapter
GLOSSARY = "docs/glossary.md"
STEP_PICTURE = f"{IMAGES}/step_terms.png"  # of the site; `step_terms` draws it
SLIDER = '<div class="slider" id="slider-{}">This needs JavaScript.</div>'
LISTED = re.compile(r"^- \[\w+\]\(\.\./(\w+)\.md\)", re.MULTILINE)
ENTRY = re.compile(r"^### (.+?)\n\n(.*?)(?=\n\n#|\s*\Z)", re.MULTILINE | re.DOTALL)
ENTRYS_LINK = re.compile(r"\s*\[[^\]]+\]\([^)]+\)$")
# Entries whose names are everyday words, too: their uses are not linked.
EVERYDAY = {"cell", "contract", "d", "delta", "grid", "hook", "l", "launch", "mask", "overlap"}
EVERYDAY |= {"program", "record", "register", "stage", "turns", "unit"}


@dataclass(frozen=True)
class Chapter:
    """A chapter with the names of its pages in reading order."""

    name: str
    title: str
    path: str  # of its text, relative to the repository
    pages: tuple[str, ...]
    text: str  # Markdown, with its numbers

    @property
    def lead(self) -> str:
        """Return the first paragraph."""
        return self.text.split("\n\n")[1]


def read_chapters(book: Book) -> list[Chapter]:
    """Return all chapters in their order.

    Raises ValueError if a page is in no chapter or in several, or if a placeholder has no value.
    """
    found = []
    for path in sorted((book.root / CHAPTERS).glob("[0-9]*_*.md")):
        text = render(book, path)
        found.append(
            Chapter(
                name=path.stem.partition("_")[2],
                title=title_of(text),
                path=path.relative_to(book.root).as_posix(),
                pages=tuple(LISTED.findall(text)),
                text=text,
            )
        )
    times = Counter(page for chapter in found for page in chapter.pages)
    for page in dict.fromkeys((*book.names, *times)):
        if page not in book.names or times[page] != 1:
            raise ValueError(f"{CHAPTERS}: {page} must be listed by one chapter, not {times[page]}")
    return found


def render(book: Book, path: Path, **more: Any) -> str:
    """Return the text of a chapter with its numbers; ValueError with its name if one is missing.

    `more` are names that this text alone may use.
    """
    try:
        template = book.environment.from_string(path.read_text(encoding="utf-8"))
        return template.render(chapter_names(book) | more)
    except (jinja2.TemplateError, *UNREADABLE) as error:
        raise ValueError(f"{CHAPTERS}/{path.name}: {error}") from error


def chapter_names(book: Book) -> dict[str, Any]:
    """Return what a chapter's placeholders may use: records by `of`, and what `analysis` has."""
    return {
        "of": partial(Page, book),
        "given": Page(book, "").given,
        "step_picture": f"![One training step, by what its time goes to](/{STEP_PICTURE})",
        "memory_slider": SLIDER.format("memory"),
        "plan_slider": SLIDER.format("plans"),
        "accounting": accounting,
        "sizes": MODEL_SIZES,
        "hardware": HARDWARE,
        "AttentionShape": AttentionShape,
        "Plan": Plan,
        "ffn": ffn,
        "fsdp_bytes": fsdp_bytes,
        "math": math,
        "pipeline": pipeline,
        "predict": predict,
        "rank_bytes": rank_bytes,
        "rings": rings,
    }


@dataclass(frozen=True)
class Term:
    """An entry of the glossary."""

    heading: str
    meaning: str


def read_glossary(root: Path) -> dict[str, Term]:
    """Return the entries by the names in their headings: "Grouped heads (GQA)" has two.

    Names are in lower case but for those with capitals behind the first letter.
    """
    entries: dict[str, Term] = {}
    for heading, text in ENTRY.findall((root / GLOSSARY).read_text(encoding="utf-8")):
        meaning = ENTRYS_LINK.sub("", text).replace("\n", " ")
        name, _, others = heading.removesuffix(")").partition(" (")
        for one in filter(None, (name, *others.split(", "))):
            key = one if any(letter.isupper() for letter in one[1:]) else one.lower()
            if key.lower() not in EVERYDAY:
                entries[key] = Term(heading, meaning)
    return entries


def title_of(text: str) -> str:
    """Return the heading with which a Markdown text begins; ValueError without one."""
    match = re.search(r"^# (.+)$", text, re.MULTILINE)
    if match is None:
        raise ValueError(f"no heading in {text[:60]!r}")
    return match[1]
