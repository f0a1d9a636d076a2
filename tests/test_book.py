"""The book: its chapters and sliders, and the site that is built from them, in a browser, too."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from cs336_systems.analysis.hardware import HARDWARE
from cs336_systems.analysis.memory_plan import rank_bytes
from cs336_systems.analysis.predictor import predict
from cs336_systems.analysis.traffic import Plan
from cs336_systems.book import sliders
from cs336_systems.book.addresses import Addresses
from cs336_systems.book.chapters import (
    CHAPTERS,
    Term,
    read_chapters,
    read_glossary,
    title_of,
)
from cs336_systems.book.lookups import Page
from cs336_systems.book.pages import Book, check_template
from cs336_systems.book.reader import Reader, sections, syntax_css
from cs336_systems.book.site import PUBLISHED, Leaf, SiteWriter, build_site
from cs336_systems.book.step_terms import STAGES, step_terms
from cs336_systems.config import MODEL_SIZES
from tests.browser import CHROMIUM, Browser

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "cs336_systems" / "book"
TEXTS = sorted((ROOT / CHAPTERS).glob("*.md"))
NODE = shutil.which("node")
PROBLEMS = 3  # of a chapter
READABLE = 4.5  # WCAG's least contrast of text


@pytest.fixture(scope="module")
def book() -> Book:
    return Book(ROOT, ROOT / PUBLISHED)


@pytest.fixture(scope="module")
def chapters(book):
    return read_chapters(book)


# Chapters


def test_every_page_is_in_one_chapter(book, chapters, tmp_path):
    """`read_chapters` refuses a page that is in none, and one that is in two."""
    listed = [page for chapter in chapters for page in chapter.pages]
    assert sorted(listed) == sorted(path.stem for path in (ROOT / "writeup").glob("*.md"))
    shutil.copytree(ROOT / "writeup", tmp_path / "writeup")
    text = tmp_path / CHAPTERS / "6_theory.md"
    line = "- [tp_calcs](../tp_calcs.md): activations"
    assert line in text.read_text()
    other = Book(tmp_path, ROOT / PUBLISHED)
    for changed in ("- tp_calcs: activations", f"{line}\n{line}"):
        text.write_text((ROOT / CHAPTERS / text.name).read_text().replace(line, changed))
        times = changed.count("](")
        with pytest.raises(
            ValueError, match=f"tp_calcs must be listed by one chapter, not {times}"
        ):
            read_chapters(other)


def test_a_chapter_leads_asks_three_problems_and_ends_with_takeaways(chapters):
    assert [chapter.name for chapter in chapters] == [
        "notation", "one_gpu", "attention", "hopper", "many_gpus", "theory", "whole_step", "beyond",
    ]  # fmt: skip
    for chapter in chapters:
        assert 30 <= len(chapter.lead.split()) <= 90 and chapter.lead[0] not in "#-|>", chapter.name
        problems = re.findall(r"<details><summary>(\d)\. ", chapter.text)
        assert problems == [str(number + 1) for number in range(PROBLEMS)], chapter.name
        assert chapter.text.count("</details>") == PROBLEMS
        assert chapter.text.rstrip().rpartition("\n\n")[2].startswith("> **Takeaways.**")


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_a_chapter_has_no_number_typed_by_hand(path):
    found = check_template("> **Answer.**\n" + path.read_text(encoding="utf-8"))
    assert found == []


def test_a_placeholder_without_a_record_names_the_chapter(tmp_path):
    shutil.copytree(ROOT / "writeup", tmp_path / "writeup")
    text = tmp_path / CHAPTERS / "1_notation.md"
    text.write_text(text.read_text() + '\n{{ of("fsdp_accounting").time("nobody") }}\n')
    with pytest.raises(ValueError, match="1_notation.md: 0 records of fsdp_accounting"):
        read_chapters(Book(tmp_path, ROOT / PUBLISHED))


def test_a_heading_of_the_glossary_gives_its_entry_names():
    terms = read_glossary(ROOT)
    assert terms["grouped heads"] == terms["GQA"]
    assert "program" not in terms, "an everyday word"
    assert not terms["all-reduce"].meaning.endswith(")"), "the link is left out"
    assert len({term.heading for term in terms.values()}) > 70


# The step from naive DDP to FSDP


def test_the_terms_of_a_step_add_up_to_its_trace(book):
    rows = step_terms(book)
    for stage, (problem, implementation, _) in STAGES.items():
        where = {"model": "xl", "num_ranks": 2, "precision": "bfloat16 autocast"}
        if stage == "FSDP":
            where["reduce"] = "bfloat16"
        traced = Page(book, problem).number(
            "traced_time", implementation, mode="train_step", **where
        )
        terms = [row["ms"] for row in rows if row["stage"] == stage]
        assert sum(terms) == pytest.approx(traced, abs=0.5) and min(terms) > 0
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"]) for row in rows)


# Sliders


def test_the_parts_of_the_memory_slider_are_the_plans():
    data = sliders.memory_data()
    for name, batch in sliders.MODELS.items():
        for shown, scheme in sliders.SCHEMES.items():
            for case, again in (("keep", False), ("recompute", True)):
                peaks = [sum(parts) for parts in data["gib"][name][shown][case]]
                plans = [Plan(scheme=scheme, data_parallel=ranks) for ranks in data["ranks"]]
                model = MODEL_SIZES[name]
                planned = [
                    rank_bytes(model, plan, batch=batch, checkpointed=again).peak / 2**30
                    for plan in plans
                ]
                assert peaks == pytest.approx(planned, abs=0.03)


@pytest.fixture(scope="module")
def slider_data():
    return json.loads(json.dumps(sliders.slider_data()))


def test_the_cases_of_the_plan_slider_are_the_predictors(slider_data):
    data = slider_data["plans"]
    seen = set()
    for place, again, gib, fits, utilization in data["cases"]["10b"]["B200"]["4"][5]:
        scheme, tensor_parallel = sliders.PLANS[data["plans"][place]]
        plan = Plan(
            scheme=scheme,
            data_parallel=data["gpus"][5] // tensor_parallel,
            tensor_parallel=tensor_parallel,
        )
        held = rank_bytes(MODEL_SIZES["10b"], plan, batch=4, checkpointed=bool(again))
        predicted = predict(MODEL_SIZES["10b"], plan, HARDWARE["B200"], batch=4)
        assert gib == round(held.peak / 2**30, 2)
        assert bool(fits) == held.fits(HARDWARE["B200"].memory_bytes)
        if not again:
            assert utilization == pytest.approx(predicted.utilization, abs=1e-4)
        seen.add((place, again))
    assert len(seen) == 2 * len(sliders.PLANS)
    few = data["cases"]["large"]["H200"]["1"][0]  # on one GPU no plan splits matrices
    assert {data["plans"][row[0]] for row in few} == {"DDP", "ZeRO-1", "FSDP"}


def in_node(script: str, **data: object) -> object:
    """What `script`, which has the functions of site.js and `data`, makes of its `answer`."""
    names = "".join(f"const {name} = {json.dumps(value)};\n" for name, value in data.items())
    functions = "const { search, memoryOf, plansOf } = require(process.argv[1]);\n"
    said = subprocess.run(
        [str(NODE), "-", str(FOLDER / "site.js")],
        input=f"{functions.replace('argv[1]', 'argv[2]')}{names}{script}\n"
        "console.log(JSON.stringify(answer));",
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return json.loads(said.stdout)


@pytest.mark.skipif(NODE is None, reason="needs Node")
def test_the_script_looks_up_what_python_has_calculated(slider_data):
    memory, plans = in_node(
        """const answer = [memoryOf(DATA.memory, "xl", 4, true),
                           plansOf(DATA.plans, "10b", "H200", "4", 8)];""",
        DATA=slider_data,
    )
    place = slider_data["memory"]["ranks"].index(4)
    for row in memory:
        assert row["parts"] == slider_data["memory"]["gib"]["xl"][row["scheme"]]["recompute"][place]
        assert row["total"] == pytest.approx(sum(row["parts"]))
    fitting = [one for one in plans["plans"] if one["fits"]]
    assert plans["best"] == max(fitting, key=lambda one: one["utilization"])
    assert plans["best"]["plan"].startswith("FSDP")


@pytest.mark.skipif(NODE is None, reason="needs Node")
def test_the_search_finds_words_and_phrases():
    index = [
        ["a.html", "Attention", "", "The online softmax keeps a maximum."],
        ["b.html", "Online learning", "", "Nothing of softmax here; softmaxes online, though."],
        ["c.html", "Other", "16,384 tokens", "none"],
    ]
    found = in_node(
        """const answer = ["online softmax", "16384", "soft", "oft", "(", ""].map(
               query => search(INDEX, query).map(one => one.url));""",
        INDEX=index,
    )
    assert found == [["a.html", "b.html"], ["c.html"], ["b.html", "a.html"], [], [], []]


# Colours


def luminance(color: str) -> float:
    """WCAG's relative luminance of "#rrggbb"."""
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_letters_have_enough_contrast_on_white_and_on_black():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    style = (FOLDER / "site.css").read_text()
    pair = r"light-dark\((\S+), (\S+)\)"
    colors = {name: both for name, *both in re.findall(rf"--(\w+): {pair};", style)}
    pairs = [("text", back) for back in ("back", "code", "box", "mark")]
    pairs += [("quiet", "back"), ("quiet", "box")]
    pairs += [("link", back) for back in ("back", "box", "code")]
    for place in (0, 1):
        for front, back in pairs:
            reached = contrast(colors[front][place], colors[back][place])
            assert reached >= READABLE, (front, back, place)
        for name, *both in re.findall(rf"pre \.(\w+) {{ color: {pair}; }}", syntax_css()):
            color = both[place] if both[place].startswith("#") else colors["text"][place]
            assert contrast(color, colors["code"][place]) >= READABLE, (name, place)


# Reading Markdown


def test_markdown_becomes_boxes_tables_figures_formulas_and_terms():
    reader = Reader({"rank": Term("Rank", "A <process>.")})
    html = reader.read(
        "# T\n\n> **Answer.** (a) One rank.\n> (b) A rank and\n> more.\n\n"
        "| a |\n|--:|\n| 1 |\n\n![A claim](x.png)\n\n## The *second*\n\n$N \\le 2$ `rank`\n"
    )
    assert '<blockquote class="box answer">' in html
    assert html.count('class="term"') == 1 and 'data-tip="A &lt;process&gt;."' in html
    assert "<br" in html.partition("(b)")[0] and html.count("<br") == 1
    assert '<div class="scroll" tabindex="0"><table>' in html
    assert '<figure><img src="x.png" alt="A claim"' in html
    assert "<figcaption>A claim</figcaption></figure>" in html
    assert "<math" in html and "$" not in html
    assert [part[:2] for part in sections(html)] == [("", ""), ("the-second", "The second")]
    assert sections(html)[1][2] == "rank"


def test_links_lead_to_pages_pictures_code_and_records(tmp_path):
    known = {"writeup/fsdp.md": "fsdp.html", "docs/api.md": "doc_api.html"}
    addresses = Addresses(ROOT, tmp_path, known)
    assert addresses.address("../fsdp.md#a", "writeup/chapters") == "fsdp.html#a"
    assert addresses.address("beyond.md#fsdp", "docs") == "fsdp.html"
    assert addresses.address("#fsdp", "") == "fsdp.html" and addresses.address("#b", "") == "#b"
    assert addresses.address("/docs/api.md", "x") == "doc_api.html"
    assert addresses.address("https://arxiv.org", "docs") == "https://arxiv.org"
    picture = addresses.address("images/parse_mask.svg", "docs")
    assert picture == "images/parse_mask.svg" and (tmp_path / picture).is_file()
    assert addresses.address("../cs336_systems/cli.py", "docs") == "code_cs336_systems.cli.py.html"
    assert addresses.pending == ["cs336_systems/cli.py"]
    records = addresses.address("../results/nvidia-h200/tests.jsonl", "docs")
    assert (tmp_path / records).resolve() == ROOT / "results/nvidia-h200/tests.jsonl"
    with pytest.raises(ValueError, match="a link in docs leads nowhere: nobody.md"):
        addresses.address("nobody.md", "docs")
    html = '<p>href="nobody.md"</p><a href="api.md">'
    assert addresses.rewrite(html, "docs") == '<p>href="nobody.md"</p><a href="doc_api.html">'


def test_a_page_has_its_figure_and_is_found(book, tmp_path):
    text = book.page("tp_calcs").replace("## tp_calcs", "# tp calcs")
    leaf = Leaf("tp_calcs", "tp calcs", "Theory", "writeup/tp_calcs.md", "", text)
    writer = SiteWriter(book, Addresses(ROOT, tmp_path, {}), [leaf])
    html = writer.write(leaf, before=None, after=None).read_text()
    assert '<figure class="vega" id="figure-0" role="img" aria-label="' in html
    assert '<noscript><figure><img src="images/tp_calcs_ratio.png"' in html
    (specs,) = re.findall(r"const SPECS = (.+);</script>", html)
    config = json.loads(specs)["figure-0"]["config"]
    assert config["background"] == "transparent" and config["axis"]["labelColor"] == "currentColor"
    assert writer.index[0][0] == "tp_calcs.html" and "all-reduce" in writer.index[0][3]


# The site


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The whole book; a minute or two."""
    out = tmp_path_factory.mktemp("book")
    build_site(ROOT, out)
    return out


class Elements(HTMLParser):
    """The ids of a page, the links of its <a>, and what it loads."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        facts = dict(attrs)
        self.ids.add(facts.get("id", ""))
        if tag == "a" and "href" in facts:
            self.links.append(facts["href"])
        elif "href" in facts and tag == "link":
            self.loaded.append(facts["href"])
        if "src" in facts:
            self.loaded.append(facts["src"])


@pytest.mark.slow
def test_links_resolve_and_nothing_is_loaded_from_outside(site):
    pages = {page.name: Elements(page) for page in site.glob("*.html")}
    assert len(pages) > 300 and {"index.html", "fsdp.html", "doc_api.html"} <= pages.keys()
    broken = []
    for name, page in pages.items():
        for link in page.links:
            path, _, fragment = link.partition("#")
            if re.match(r"[a-z]+:", link):
                assert link.startswith(("https://", "http://", "mailto:")), link
            elif path in pages or not path:
                if fragment and fragment not in pages[path or name].ids:
                    broken.append((name, link))
            elif not (site / path).exists():
                broken.append((name, link))
        for source in page.loaded:
            is_inside = source.startswith("data:") or (site / source).is_file()
            assert is_inside, (name, source)
    assert broken == []
    for asset in (site / "assets").glob("*.css"):
        assert not re.search(r"url\(|@import", asset.read_text())


@pytest.mark.slow
def test_every_page_document_and_notebook_is_in_the_site(site):
    names = {path.stem for path in (ROOT / "writeup").glob("*.md")}
    names |= {f"doc_{path.stem}" for path in (ROOT / "docs").glob("*.md")}
    names |= {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert {name for name in names if not (site / f"{name}.html").is_file()} == set()
    assert "data:image/png;base64," in (site / "s7_fsdp.html").read_text()
    start = (site / "index.html").read_text()
    for path in TEXTS:
        if path.stem[0].isdigit():
            assert title_of(path.read_text()) in start


@pytest.mark.slow
def test_the_index_has_what_a_reader_looks_for(site):
    text = (site / "assets" / "index.js").read_text()
    index = json.loads(text.removeprefix("const INDEX = ").removesuffix(";\n"))
    assert len(index) > 250 and any("online softmax" in part[3].lower() for part in index)
    if NODE is not None:
        found = in_node(
            "const answer = search(INDEX, 'online softmax').map(one => one.url);", INDEX=index
        )
        assert all(url.startswith(("s4_attention.html", "doc_glossary.html")) for url in found[:2])


# What is wider than the window and does not scroll within something.
TOO_WIDE = """[...document.querySelectorAll("main *, header *")].filter(one =>
    one.getBoundingClientRect().right > innerWidth + 1 &&
    !one.closest(".scroll, .output, pre, figure, .math, math, [hidden]")
).slice(0, 3).map(one => one.outerHTML.slice(0, 100))"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_site_in_a_browser(site, tmp_path):
    """From files, as a reader opens it: no error, nothing from outside, nothing cut at 400 pixels;
    figures are drawn, the search finds, sliders and the theme answer.
    """
    pytest.importorskip("websocket")
    with Browser(tmp_path) as browser:
        browser.resize(400)
        for page in sorted(site.glob("[!c]*.html")):
            browser.open(page)
            has_figures = browser.value("typeof SPECS !== 'undefined'")
            if has_figures:
                browser.wait_for(
                    "Object.keys(SPECS).every(id => document.querySelector(`#${id} svg`))"
                )
            assert browser.errors == [], page.name
            assert [one for one in browser.requests if not one.startswith(("file:", "data:"))] == []
            assert browser.value(TOO_WIDE) == [], page.name
            assert browser.value("document.documentElement.scrollWidth") <= 400, page.name

        browser.resize(1280)
        browser.open(site / "index.html")
        browser.value("document.getElementById('query').focus()")
        browser.type("online softmax")
        browser.wait_for("document.querySelector('#found a mark')")
        browser.value("document.querySelector('#found a').click()")
        browser.wait_for("!location.href.includes('index.html')")

        browser.open(site / "many_gpus.html")
        bars = "[...document.querySelectorAll('#slider-memory .bar')].map(one => one.textContent)"
        before = browser.value(bars)
        browser.value(
            """(() => { const range = document.querySelector('#slider-memory input[type=range]');
            range.value = 5; range.dispatchEvent(new Event('input', { bubbles: true })); })()"""
        )
        after = browser.value(bars)
        assert before[0] == after[0] and before[3] != after[3], "only sharding divides"
        assert browser.value("document.querySelectorAll('#slider-memory .track i').length") > 8

        ink = "getComputedStyle(document.body).color"
        light = browser.value(ink)
        browser.value("document.getElementById('theme').click()")
        dark = browser.value(ink)
        browser.open(site / "theory.html")
        assert browser.value(ink) == dark != light, "the choice is kept"
        assert browser.value("document.querySelectorAll('#slider-plans tr.best').length") == 1
        assert browser.errors == []
