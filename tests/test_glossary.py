"""docs/glossary.md: it has the terms that pages and notebooks use, each short and with a link."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GLOSSARY = ROOT / "docs" / "glossary.md"
ENTRY = re.compile(r"^### (.+?)\n\n(.*?)(?=\n\n#|\s*\Z)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\([^)]+\)")

# Terms that need an entry once a page or a notebook uses them: names in capitals as they are
# written, words in any case, either in the plural too.
WATCHED = (
    "activation", "activation checkpointing", "all-gather", "all-reduce", "allocator",
    "arithmetic intensity", "autocast", "bfloat16", "block mask", "bubble", "bucket",
    "bus bandwidth", "causal mask", "cell", "chunked loss", "collective", "constexpr",
    "context parallelism", "contract", "CUDA graph", "DDP", "dead tile", "delta",
    "dilated attention", "FlashAttention", "float16", "FLOP", "FSDP", "Gloo", "Gluon", "GQA",
    "grid", "grouped heads", "HBM", "head dim", "hook", "HSDP", "interpreter", "kernel", "L2 cache",
    "launch", "log-sum-exp", "loss scale", "LSE", "mask", "master weights", "mbarrier", "mesh",
    "MFU", "microbatch", "multiprocessor", "Muon", "NCCL", "NVLink", "NVTX range", "occupancy",
    "online softmax", "oracle", "overlap", "packed documents", "partial tile", "peak memory",
    "persistent kernel", "pipeline parallelism", "process group", "program", "proxy", "PTX", "rank",
    "record", "reduce-scatter", "register", "register spill", "replay", "ring attention",
    "roofline", "saved tensor", "sequence parallelism", "shard", "shared memory", "sink",
    "sliding window", "SM", "split keys", "stage", "staircase", "swizzle", "tensor core",
    "tensor descriptor", "tensor parallelism", "TF32", "tile", "TMA", "turns", "unit", "varlen",
    "warm-up", "warp", "warp group", "wgmma", "ZeRO",
)  # fmt: skip


def entries() -> dict[str, str]:
    """The text of each entry by its heading."""
    return dict(ENTRY.findall(GLOSSARY.read_text(encoding="utf-8")))


def names_of(heading: str) -> Iterator[str]:
    """The names that a heading gives its entry: "Log-sum-exp (LSE, L)" gives three."""
    name, _, others = heading.removesuffix(")").partition(" (")
    yield from (one.lower() for one in (name, *others.split(", ")) if one)


def uses(term: str, text: str) -> bool:
    """Whether a text has a term, in the plural too; one in capitals must be written so."""
    flags = 0 if any(letter.isupper() for letter in term[1:]) else re.IGNORECASE
    return re.search(rf"(?<![\w-]){re.escape(term)}s?(?![\w-])", text, flags) is not None


def missing(terms: tuple[str, ...], known: set[str], texts: dict[str, str]) -> dict[str, list[str]]:
    """The files that use a term without an entry, by term."""
    found = {
        term: [file for file, text in texts.items() if uses(term, text)]
        for term in terms
        if term.lower() not in known
    }
    return {term: files for term, files in found.items() if files}


def test_every_watched_term_that_is_used_has_an_entry():
    files = [*ROOT.glob("writeup/*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("notebooks/*.py")]
    texts = {
        file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8")
        for file in files
        if file != GLOSSARY
    }
    known = {name for heading in entries() for name in names_of(heading)}
    assert missing(WATCHED, known, texts) == {}


def test_a_term_without_an_entry_is_found():
    texts = {"page.md": "Warp groups and a TMA store; the strides."}
    assert missing(("warp group", "TMA", "stride", "ring"), {"stride"}, texts) == {
        "warp group": ["page.md"],
        "TMA": ["page.md"],
    }
    assert not uses("SM", "sm_90") and not uses("tile", "tiled") and uses("tile", "Tiles,")


@pytest.mark.parametrize("heading", entries())
def test_an_entry_is_two_sentences_and_a_link(heading):
    text = " ".join(entries()[heading].split())
    (link,) = LINK.findall(text)
    assert text.endswith(link)
    sentences = re.findall(r"[.!?](?= |$)", text.removesuffix(link).strip())
    assert len(sentences) == 2 and len(text.removesuffix(link)) < 260


def test_entries_are_many_and_in_order_and_once():
    text = GLOSSARY.read_text(encoding="utf-8")
    headings = re.findall(r"^### (.+)$", text, re.MULTILINE)
    assert len(headings) >= 80 and headings == list(entries())
    names = [name for heading in headings for name in names_of(heading)]
    assert len(names) == len(set(names))
    for section in text.split("\n## ")[1:]:
        own = re.findall(r"^### (.+)$", section, re.MULTILINE)
        assert own == sorted(own, key=str.lower)
