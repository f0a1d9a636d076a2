"""Writes a folder's tables, figures and report, fills documents, and checks that nothing differs from the records.

    build_report(Path("results/nvidia-h200"), published=True, documents=[Path("README.md"), Path("writeup.md")])
    update_documents([Path("README.md"), Path("writeup.md")], Path("results/nvidia-h200"))    # documents alone
    check_documents([Path("README.md"), Path("writeup.md")], Path("results/nvidia-h200"))    # [] if all is well

The same records give the same bytes, whenever and in whatever order they are read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from cs336_systems.experiments.spec import experiment_names
from cs336_systems.report.blocks import Blocks
from cs336_systems.report.figures import draw, save_figure
from cs336_systems.report.writeup import fill

MOVED = tuple(experiment_names())  # problems whose tables and figures their own experiments make
PAGE = "report.md"  # of a folder that no document is filled from
IMAGE_LINK = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")


def build_report(folder: Path, *, published: bool = False, documents: Sequence[Path] = ()) -> list[Path]:
    """Write `folder`/tables and figures from `folder`/records, and report.md with all of it on one page.

    A `published` folder gets no page: the `documents` filled from it (see `update_documents`) say more.
    Returns the files written, changed documents last. Before anything is written ValueError is raised if there are no
    records, if they mix devices or scales, if a file would lie outside of `folder`, or if a document is missing or has
    a mistake in its markers.
    """
    blocks = Blocks.load(folder)
    texts = _texts(blocks, page=not published)
    figures = {
        blocks.figure_path(problem, plot): (problem, plot)
        for problem in blocks.frames
        if problem not in MOVED
        for plot in blocks.plots(problem)
    }
    for path in (*texts, *figures):
        _refuse_outside(path, folder)
    changed = _changed(documents, blocks)
    for path, text in texts.items():
        _write(path, text)
    for path, (problem, plot) in figures.items():
        save_figure(draw(plot), path, blocks.digests[problem])
    for path, text in changed.items():
        _write(path, text)
    return [*texts, *figures, *changed]


def update_documents(documents: Sequence[Path], folder: Path) -> list[Path]:
    """Fill the generated blocks of `documents` from the records of `folder`; returns the files that changed.

    All documents are checked before one is written: ValueError with file and line leaves every one as it was.
    """
    changed = _changed(documents, Blocks.load(folder))
    for document, text in changed.items():
        _write(document, text)
    return list(changed)


def check_documents(documents: Sequence[Path], folder: Path) -> list[str]:
    """Where tables, figures, report and `documents` differ from `folder`/records, a line each; writes nothing."""
    blocks = Blocks.load(folder)
    page = (folder / PAGE).exists()
    expected = _texts(blocks, page=page) | {document: _filled(document, blocks) for document in documents}
    found = [line for path, text in expected.items() for line in _difference(path, text)]
    tables = sorted((folder / "tables").glob("*.md"))
    moved = {folder / "tables" / f"{name}.md" for name in MOVED}
    found += [f"{path}: no records give this table" for path in tables if path not in expected.keys() | moved]
    found += _figure_differences(blocks)
    for path in expected:
        for link in IMAGE_LINK.findall(_read(path) or ""):
            if "://" not in link and not (path.parent / link).exists():
                found.append(f"{path}: image {link} does not exist")
    return found


def _texts(blocks: Blocks, page: bool) -> dict[Path, str]:
    """Content of every Markdown file of the folder, by path."""
    texts = {}
    for problem in blocks.frames:
        if problem in MOVED:
            continue
        path = blocks.folder / "tables" / f"{problem}.md"
        texts[path] = f"# {problem}\n\n{blocks.text(f'{problem}.table', path)}\n"
    if page:
        texts[blocks.folder / PAGE] = blocks.page(blocks.folder / PAGE)
    return texts


def _refuse_outside(path: Path, folder: Path) -> None:
    """Names in `path` come from records, which anybody may have written; links may lead out, too."""
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{path}: not inside of {folder}, so nothing is written")


def _changed(documents: Sequence[Path], blocks: Blocks) -> dict[Path, str]:
    """New texts of those `documents` whose generated blocks differ."""
    filled = {document: _filled(document, blocks) for document in documents}
    return {document: text for document, text in filled.items() if text != _read(document)}


def _filled(document: Path, blocks: Blocks) -> str:
    text = _read(document)
    if text is None:
        raise ValueError(f"{document}: no such document; it is looked for from the current folder")
    return fill(text, lambda name: blocks.text(name, document), document.name)


def _difference(path: Path, expected: str) -> list[str]:
    """Nothing, or the first line of `path` that is not as expected."""
    text = _read(path)
    if text is None:
        return [f"{path}: missing"]
    if text == expected:
        return []
    old, new = text.splitlines(), expected.splitlines()
    number = next((i for i, (a, b) in enumerate(zip(old, new)) if a != b), min(len(old), len(new)))
    has, gives = (lines[number] if number < len(lines) else "nothing" for lines in (old, new))
    return [f"{path}:{number + 1}: has {has[:120]!r}, the records give {gives[:120]!r}"]


def _figure_differences(blocks: Blocks) -> list[str]:
    found: list[str] = []
    expected: set[Path] = set()
    present: set[Path] = set()
    for problem in blocks.frames:
        if problem in MOVED:
            continue
        for plot in blocks.plots(problem):
            path = blocks.figure_path(problem, plot)
            expected.add(path)
            if not path.exists():
                found.append(f"{path}: missing")
            elif _source(path) != blocks.digests[problem]:
                found.append(f"{path}: shows other records than those of {problem}")
        if blocks.plots(problem):  # other problems' images, such as memory timelines, are not ours to judge
            present |= set((blocks.folder / "figures").glob(f"{problem}_*.png"))
    return found + [f"{path}: no records give this figure" for path in sorted(present - expected)]


def _source(path: Path) -> str:
    """The digest that `save_figure` wrote into the PNG; empty if there is none."""
    try:
        with Image.open(path) as image:
            return str(image.info.get("Source", ""))
    except UnidentifiedImageError:
        return ""


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")
