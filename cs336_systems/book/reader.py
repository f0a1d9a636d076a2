"""Turn the repository's Markdown into the HTML of the book.

    reader = Reader(glossary={"rank": Term("Rank", "A process of a job.")})
    reader.read("writeup/fsdp.md", text, is_linking_terms=True)

The dialect is the one that GitHub renders: tables, `$...$` formulas, `<details>`, links relative to
the file. A quotation that begins with a bold word of BOXES is a box. A picture alone in a paragraph
is a figure. Formulas become MathML and code is coloured here, so that a browser loads nothing.
"""

from __future__ import annotations

import re
from html import escape, unescape
from typing import Any

from latex2mathml.converter import convert as mathml
from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from markdown_it.token import Token
from mdit_py_plugins.anchors import anchors_plugin
from mdit_py_plugins.dollarmath import dollarmath_plugin
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.styles import get_style_by_name
from pygments.token import STANDARD_TYPES
from pygments.util import ClassNotFound

from cs336_systems.book.chapters import GLOSSARY, Term

BOXES = re.compile(r"\*\*(Answer|Takeaways|Predicted|Note)\b[.:]?\*\*")
STYLES = ("default", "github-dark")  # Pygments' styles on white and on black
# what a section of a page is, in its HTML
HEADING = re.compile(r'<h([23]) id="([^"]+)"[^>]*>(.*?)</h\1>', re.DOTALL)
HIDDEN = re.compile(r"<(math|svg|style|script)\b.*?</\1>", re.DOTALL)
PERMALINK = re.compile(r'<a class="header-anchor".*?</a>')
BLOCK_ENDS = re.compile(r"(</(?:p|li|td|th|pre|summary|h\d)>)")


class Reader:
    """Reads Markdown, and links the first use of each term of `glossary` to its meaning."""

    def __init__(self, glossary: dict[str, Term]) -> None:
        self.glossary = glossary
        # a name in lower case may begin a sentence; the longest name first
        names = [
            re.escape(name) if name != name.lower() else f"(?i:{re.escape(name)})"
            for name in sorted(glossary, key=len, reverse=True)
        ]
        self._term = re.compile(rf"(?<![\w-])({'|'.join(names)})(?![\w-])")
        options = {"html": True, "highlight": coloured}
        self._markdown = MarkdownIt("commonmark", options).enable(["table", "strikethrough"])
        self._markdown.use(
            dollarmath_plugin, renderer=formula, allow_space=False, double_inline=True
        )
        self._markdown.use(
            anchors_plugin,
            min_level=2,
            max_level=3,
            slug_func=slug,
            permalink=True,
            permalinkSymbol="#",
        )
        self._markdown.core.ruler.push("book", self._finish)
        self._markdown.add_render_rule("table_open", _table_open)
        self._markdown.add_render_rule("table_close", _table_close)

    def read(self, text: str, *, is_linking_terms: bool = True) -> str:
        """Return the HTML of the Markdown `text`; its links are as they were."""
        every = {term.heading for term in self.glossary.values()}
        linked: set[str] = set() if is_linking_terms else every
        return self._markdown.render(text, {"linked": linked})

    def _finish(self, state: StateCore) -> None:
        """Mark boxes, make figures of lone pictures, and link terms."""
        is_heading = False
        for place, token in enumerate(state.tokens):
            if token.type == "blockquote_open":
                inside = state.tokens[place + 2]
                if box := BOXES.match(inside.content):
                    token.attrSet("class", f"box {box[1].lower()}")
                    _keep_parts_apart(inside)
            elif token.type in ("heading_open", "heading_close"):
                is_heading = token.type == "heading_open"
            elif token.type == "inline" and token.children:
                if len(token.children) == 1 and token.children[0].type == "image":
                    _make_figure(state.tokens[place - 1 : place + 2])
                elif not is_heading:
                    token.children = self._with_terms(token.children, state.env["linked"])

    def _with_terms(self, tokens: list[Token], linked: set[str]) -> list[Token]:
        """Return `tokens` with a link at each term that is not in `linked`, and add it there."""
        made = []
        depth = 0  # of links, in which no other may stand
        for token in tokens:
            depth += token.nesting if token.type in ("link_open", "link_close") else 0
            if token.type != "text" or depth or not self.glossary:
                made.append(token)
                continue
            rest = 0
            for found in self._term.finditer(token.content):
                term = self.glossary.get(found[1]) or self.glossary[found[1].lower()]
                if term.heading in linked:
                    continue
                linked.add(term.heading)
                made.append(Token("text", "", 0, content=token.content[rest : found.start()]))
                made.append(Token("html_inline", "", 0, content=_term_link(found[1], term)))
                rest = found.end()
            made.append(Token("text", "", 0, content=token.content[rest:]))
        return made


def _term_link(written: str, term: Term) -> str:
    """Return the HTML of a link to the glossary, with the meaning as its tooltip."""
    tip = escape(term.meaning, quote=True)
    place = f"{GLOSSARY}#{slug(term.heading)}"
    return f'<a class="term" href="/{place}" data-tip="{tip}">{escape(written)}</a>'


def _keep_parts_apart(inline: Token) -> None:
    """Begin a line at each lettered part of an answer, as "(b)", that begins one in the source."""
    children = inline.children or []
    for token, following in zip(children, children[1:]):
        if token.type == "softbreak" and re.match(r"\([a-z]\)", following.content):
            token.type = "hardbreak"


def _make_figure(tokens: list[Token]) -> None:
    """Make a figure of a paragraph of one picture: tokens of its start, content and end."""
    opening, inline, closing = tokens
    if opening.type != "paragraph_open":
        return
    opening.tag = closing.tag = "figure"
    (picture,) = inline.children or []
    caption = f"<figcaption>{escape(picture.content)}</figcaption>"
    inline.children = [picture, Token("html_inline", "", 0, content=caption)]


def _table_open(renderer: Any, tokens: Any, index: int, options: Any, env: Any) -> str:
    """Return the start of a table that scrolls by itself on a narrow page."""
    return '<div class="scroll" tabindex="0"><table>'


def _table_close(renderer: Any, tokens: Any, index: int, options: Any, env: Any) -> str:
    """Return the end of such a table."""
    return "</table></div>"


def slug(title: str) -> str:
    """Return the fragment that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


def coloured(text: str, language: str, _attributes: str = "") -> str:
    """Return the HTML of code in `language`, plain if Pygments does not know it."""
    try:
        lexer = get_lexer_by_name(language or "text")
    except ClassNotFound:
        return escape(text)
    return highlight(text, lexer, HtmlFormatter(nowrap=True))


def syntax_css() -> str:
    """Return the CSS of coloured code, for white and for black in one rule each."""
    light, dark = map(get_style_by_name, STYLES)
    rules = []
    for kind, name in STANDARD_TYPES.items():
        colors = [style.style_for_token(kind)["color"] for style in (light, dark)]
        if name not in ("", "w") and any(colors):  # w: white space
            white, black = (f"#{color}" if color else "var(--text)" for color in colors)
            rules.append(f"pre .{name} {{ color: light-dark({white}, {black}); }}")
    return "\n".join(rules) + "\n"


def formula(text: str, options: dict[str, Any]) -> str:
    """Return the MathML of a formula in LaTeX."""
    return mathml(text.strip(), display="block" if options["display_mode"] else "inline")


def plain(html: str) -> str:
    """Return the words of `html` in one line."""
    html = BLOCK_ENDS.sub(r"\1 ", HIDDEN.sub(" ", PERMALINK.sub("", html)))
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", "", html))).strip()


def headings(html: str) -> list[tuple[str, str]]:
    """Return the fragment and the text of each heading of the second level."""
    return [(mark, plain(text)) for level, mark, text in HEADING.findall(html) if level == "2"]


def sections(html: str) -> list[tuple[str, str, str]]:
    """Return (fragment, heading, text) of a page's parts, the first of which has no heading."""
    parts = HEADING.split(html)
    found = [("", "", plain(parts[0]))]
    for mark, heading, text in zip(parts[2::4], parts[3::4], parts[4::4]):
        found.append((mark, plain(heading), plain(text)))
    return found
