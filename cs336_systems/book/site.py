"""Build the book: an offline site of chapters, pages, documents, notebooks and the code they link.

    build_site(Path(), Path("build/book"))    # then open build/book/index.html

Phases: the texts are collected, with numbers from the published records; each becomes a page with
its links, figures and place in the contents; then the code that pages link to; last the files that
pages share: style, scripts, search index, the sliders' numbers. A page opens from a file and loads
nothing from outside the folder.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import jinja2
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename

from cs336_systems.bench.spec import experiments
from cs336_systems.book.addresses import SHOWN, Addresses
from cs336_systems.book.chapters import (
    CHAPTERS,
    GLOSSARY,
    START,
    STEP_PICTURE,
    Chapter,
    read_chapters,
    read_glossary,
    render,
    title_of,
)
from cs336_systems.book.executed import notebook_markdown
from cs336_systems.book.figures import PAGE_INK, spec_of, write_png
from cs336_systems.book.pages import FIGURE, Book
from cs336_systems.book.reader import Reader, headings, sections, syntax_css
from cs336_systems.book.sliders import slider_data
from cs336_systems.book.step_terms import step_chart, step_terms

PUBLISHED = "results/nvidia-h200"  # whose records the pages show
REFERENCE, NOTEBOOKS, CODE = "Reference", "Notebooks", "Code"
# A figure as `reader` writes it: its picture and its title.
DRAWN = re.compile(r'<figure><img src="([^"]*)" alt="([^"]*)"[^>]*>.*?</figure>', re.DOTALL)
CLEAR = "transparent"


@dataclass(frozen=True)
class Leaf:
    """A page of the site before it is written."""

    name: str  # of its file, without .html
    title: str
    group: str  # under which it stands in the contents
    path: str  # of what it shows, relative to the repository
    folder: str  # to which its links are relative
    text: str  # Markdown


def build_site(root: Path, out: Path, only: Collection[str] = ()) -> list[Path]:
    """Write the book of the repository `root` into `out`, and return the files of its pages.

    `only` chooses pages of writeup/; the chapters that list others then lead to their templates.
    Raises ValueError for a link that leads nowhere and a number that no record has.
    """
    book = Book(root, root / PUBLISHED)
    (out / "assets").mkdir(parents=True, exist_ok=True)
    leaves = list(collect(book, only))
    names = [leaf.name for leaf in leaves]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two pages of the book have the name {', '.join(sorted(twice))}")
    addresses = Addresses(root, out, {leaf.path: f"{leaf.name}.html" for leaf in leaves})
    addresses.known["README.md"] = f"{START}.html"
    writer = SiteWriter(book, addresses, leaves)

    written = []
    for place, leaf in enumerate(leaves):
        before = leaves[place - 1] if place else None
        after = leaves[place + 1] if place + 1 < len(leaves) else None
        written.append(writer.write(leaf, before=before, after=after))
    while addresses.pending:
        written.append(writer.write_code(addresses.pending.pop()))
    writer.write_assets()
    return written


# The texts


def collect(book: Book, only: Collection[str] = ()) -> Iterator[Leaf]:
    """Yield all pages of the site in reading order, but those of code."""
    chapters = read_chapters(book)
    start = book.root / CHAPTERS / f"{START}.md"
    text = render(book, start, chapters=_contents(chapters))
    yield Leaf(START, title_of(text), "", f"{CHAPTERS}/{START}.md", CHAPTERS, text)
    for chapter in chapters:
        yield Leaf(chapter.name, chapter.title, chapter.title, chapter.path, CHAPTERS, chapter.text)
        for name in chapter.pages:
            if not only or name in only:
                _, _, rest = book.page(name).partition("\n")
                title = name.replace("_", " ")
                # `Book.page` has made its links relative to the repository.
                yield Leaf(
                    name, title, chapter.title, f"writeup/{name}.md", "", f"# {title}\n{rest}"
                )

    for path in sorted((book.root / "docs").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        yield Leaf(f"doc_{path.stem}", title_of(text), REFERENCE, f"docs/{path.name}", "docs", text)
    for path in sorted((book.root / "notebooks").glob("*.ipynb")):
        text = notebook_markdown(path)
        yield Leaf(
            path.stem, title_of(text), NOTEBOOKS, f"notebooks/{path.name}", "notebooks", text
        )


def _contents(chapters: list[Chapter]) -> str:
    """Return the chapters as a list with their first paragraphs."""
    return "\n\n".join(
        f"**[{chapter.title}]({Path(chapter.path).name}).** {chapter.lead}" for chapter in chapters
    )


# The pages


class SiteWriter:
    """Writes pages, and remembers what the files that they share must hold."""

    def __init__(self, book: Book, addresses: Addresses, leaves: list[Leaf]) -> None:
        self.book, self.addresses = book, addresses
        self.out = addresses.out
        self.groups: dict[str, list[Leaf]] = {}
        for leaf in leaves:
            if leaf.group:
                self.groups.setdefault(leaf.group, []).append(leaf)
        self.reader = Reader(read_glossary(book.root))
        self.index: list[tuple[str, str, str, str]] = []
        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(Path(__file__).parent),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self.template = environment.get_template("site.html")
        self.pictures = {  # path of a picture -> what draws it
            self._relative(self.book.figure_path(name, figure)): (name, figure)
            for name in book.names
            if name in experiments()
            for figure in FIGURE.findall(book.template(name))
        }

    def _relative(self, path: Path) -> str:
        """Return a path relative to the repository."""
        return path.relative_to(self.book.root).as_posix()

    def write(self, leaf: Leaf, *, before: Leaf | None, after: Leaf | None) -> Path:
        """Write a page with links to those before and after it, and index its sections."""
        specs: dict[str, Any] = {}
        html = self.reader.read(leaf.text, is_linking_terms=leaf.path != GLOSSARY)
        html = DRAWN.sub(lambda match: self._figure(match, specs), html)
        html = self.addresses.rewrite(html, leaf.folder)
        file = f"{leaf.name}.html"
        for mark, heading, text in sections(html):
            self.index.append((f"{file}#{mark}" if mark else file, leaf.title, heading, text))
        return self._write(leaf, html, specs=specs, before=before, after=after)

    def _write(
        self,
        leaf: Leaf,
        html: str,
        *,
        specs: dict[str, Any],
        before: Leaf | None = None,
        after: Leaf | None = None,
    ) -> Path:
        """Write the file of a page whose HTML is `html`."""
        text = json.dumps(specs, separators=(",", ":")).replace("</", "<\\/") if specs else ""
        path = self.out / f"{leaf.name}.html"
        groups = self.groups
        if leaf.group == CODE:  # several hundred pages: only the beginning of each group
            groups = {name: leaves[:1] for name, leaves in groups.items()}
        page = self.template.render(
            leaf=leaf,
            html=html,
            groups=groups,
            specs=text,
            headings=headings(html),
            has_sliders='class="slider"' in html,
            before=before,
            after=after,
        )
        path.write_text(page, encoding="utf-8")
        return path

    def _figure(self, match: re.Match[str], specs: dict[str, Any]) -> str:
        """Return the place of an interactive figure, whose specification is added to `specs`.

        Without JavaScript its picture is shown. A picture that no experiment draws stays one.
        """
        path = match[1].removeprefix("../").lstrip("/")
        if path == STEP_PICTURE:
            spec: Any = self._step_picture()
        elif path in self.pictures:
            spec = self.book.figure_spec(*self.pictures[path], background=CLEAR, ink=PAGE_INK)
        else:
            return match[0]
        if spec is None:
            return match[0]
        place = f"figure-{len(specs)}"
        specs[place] = spec
        figure = f'<figure class="vega" id="{place}" role="img" aria-label="{match[2]}"></figure>'
        return f"{figure}<noscript>{match[0]}</noscript>"

    def _step_picture(self) -> dict[str, Any]:
        """Return the specification of the step's terms, and write its picture once."""
        chart = step_chart(step_terms(self.book))
        if STEP_PICTURE not in self.addresses.known:
            self.addresses.known[STEP_PICTURE] = STEP_PICTURE
            write_png(spec_of(chart), self.out / STEP_PICTURE)
        return spec_of(chart, CLEAR, PAGE_INK)

    # Code

    def write_code(self, path: str) -> Path:
        """Write the page that shows the file or folder `path` of the repository."""
        there = self.book.root / path
        name = self.addresses.known[path].removesuffix(".html")
        folder = path if there.is_dir() else Path(path).parent.as_posix()
        heading = f"<h1>{escape(path).replace('/', '/<wbr>')}</h1>\n"
        if there.is_dir():
            html = heading + listing(there)
        elif there.suffix == ".md":
            html = self.reader.read(there.read_text(encoding="utf-8"), is_linking_terms=False)
        else:
            html = f'{heading}<p>In <a href=".">{escape(folder)}</a></p>\n{coloured_file(there)}'
        leaf = Leaf(name, path, CODE, path, folder, "")
        return self._write(leaf, self.addresses.rewrite(html, folder), specs={})

    # What pages share

    def write_assets(self) -> None:
        """Write style, scripts, search index and the sliders' numbers."""
        import vl_convert  # imported here, since machines that only measure may lack it

        here, assets = Path(__file__).parent, self.out / "assets"
        shutil.copyfile(here / "site.js", assets / "site.js")
        style = (here / "site.css").read_text(encoding="utf-8")
        (assets / "site.css").write_text(style + syntax_css(), encoding="utf-8")
        _write_data(assets / "index.js", "INDEX", self.index)
        _write_data(assets / "sliders.js", "SLIDERS", slider_data())
        # The bundle of Vega, Vega-Lite and Vega-Embed has global names of its own.
        bundle = vl_convert.javascript_bundle()  # type: ignore[call-arg]
        (assets / "vega.js").write_text(f"(() => {{{bundle}}})()", encoding="utf-8")


def _write_data(path: Path, name: str, value: Any) -> None:
    """Write a script that sets the constant `name`: a page of a file may not read JSON."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    path.write_text(f"const {name} = {text};\n", encoding="utf-8")


def listing(folder: Path) -> str:
    """Return an HTML list of the files and folders in `folder`, with what each says of itself."""
    lines = []
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_file(), path.name)):
        is_shown = path.is_dir() or path.suffix in SHOWN
        if is_shown and not path.name.startswith((".", "__pycache__")):
            name = path.name + ("/" if path.is_dir() else "")
            link = f'<a href="{escape(path.name)}">{escape(name)}</a>'
            lines.append(f"<li>{link} {escape(first_line(path))}</li>")
    return '<ul class="listing">\n' + "\n".join(lines) + "\n</ul>"


def first_line(path: Path) -> str:
    """Return the first line of a Python file's or package's docstring, "" without one."""
    path = path / "__init__.py" if path.is_dir() else path
    if path.suffix != ".py" or not path.exists():
        return ""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    return (docstring or "").partition("\n")[0]


def coloured_file(path: Path) -> str:
    """Return the HTML of a file of code."""
    text = path.read_text(encoding="utf-8")
    lexer = get_lexer_for_filename(path.name if path.suffix != ".slurm" else "job.sh")
    return f"<pre><code>{highlight(text, lexer, HtmlFormatter(nowrap=True))}</code></pre>"
