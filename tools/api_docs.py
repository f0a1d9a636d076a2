"""Write docs/api.md and its pictures from docstrings, `api_examples.md` and the package's own
rules.

    .venv/bin/python tools/api_docs.py            # write what changed; `--check` exits 1 where something would

`api_examples.md` has a chapter for each import point and a section for each public name, with
doctests. A section's text stands before the docstring's; where its examples leave a `mask`, that
mask is drawn.
"""

import doctest
import inspect
import re
import sys
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from cs336_systems.attention.choose import (
    BACKENDS,
    HOPPER_CAPABILITY,
    MIN_COMPILE_CAPABILITY,
    MIN_TRITON_CAPABILITY,
    select_backend,
)
from cs336_systems.attention.masks import BlockMask
from cs336_systems.attention.masks.tiles import DEAD
from cs336_systems.config import DTYPES
from cs336_systems.device import dotted

ROOT = Path(__file__).parent.parent
PAGE, IMAGES = ROOT / "docs" / "api.md", ROOT / "docs" / "images"
EXAMPLES = Path(__file__).parent / "api_examples.md"
# of an example that needs Triton and a GPU or the interpreter
TRITON_FLAG = doctest.register_optionflag("TRITON")
MANY_TOKENS = 4096  # of a call for which `auto` is asked
LARGEST_HEAD_DIM = 512  # up to which the matrix looks
SHORT_NAMES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}
WITHOUT_SIGNATURE = (BlockMask,)  # is made by its constructors, not from its fields


@dataclass
class Section:
    """One public name: its text and doctests as they stand in `api_examples.md`."""

    name: str
    text: str = ""
    examples: str = ""


@dataclass
class Chapter:
    """One import point; `setup` runs before the examples of its sections, which share names, in
    order.
    """

    title: str
    text: str = ""
    setup: str = ""
    sections: list[Section] = field(default_factory=list)


def read_chapters(source: str) -> list[Chapter]:
    """The chapters of `api_examples.md`."""
    chapters: list[Chapter] = []
    for part in re.split(r"^(?=#)", source, flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        text, mark, examples = body.partition(">>>")
        text, examples = text.strip(), (mark + examples).strip()
        if heading.startswith("## "):
            chapters[-1].sections.append(Section(heading[3:], text, examples))
        else:
            chapters.append(Chapter(heading[2:], text, examples))
    return chapters


def run_examples(chapter: Chapter, *, has_triton: bool = True) -> tuple[dict[str, Any], list[str]]:
    """The names after the chapter's examples, with the masks by section, and what went wrong."""
    names: dict[str, Any] = {}
    masks: dict[str, BlockMask] = {}
    failures: list[str] = []
    for section in (Section("setup", examples=chapter.setup), *chapter.sections):
        test = doctest.DocTestParser().get_doctest(
            section.examples + "\n", names, section.name, None, 0
        )
        for example in test.examples:
            if example.options.pop(TRITON_FLAG, False) and not has_triton:
                example.options[doctest.SKIP] = True
        names.pop("mask", None)
        test.globs = names  # not the copy: sections go on from one another
        runner = doctest.DocTestRunner(verbose=False)
        runner.run(test, out=failures.append, clear_globs=False)
        if isinstance(names.get("mask"), BlockMask):
            masks[section.name] = names["mask"]
    return {**names, "masks": masks}, failures


# The page


def build() -> dict[Path, str]:
    """The text of each file."""
    lines = [
        "# API",
        "",
        "`tools/api_docs.py` makes this page from docstrings and from examples that the tests run.",
        "",
    ]
    chapters = read_chapters(EXAMPLES.read_text(encoding="utf-8"))
    contents = ("Support matrix", "Causal alignment", *(chapter.title for chapter in chapters))
    lines += [f"- [{title}](#{anchor(title)})" for title in contents]
    lines += ["", *support_matrix(), "", *causal_alignment()]
    files = {}
    described = {section.name for chapter in chapters for section in chapter.sections}
    for chapter in chapters:
        names, failures = run_examples(chapter, has_triton=False)
        if failures:
            raise ValueError(f"an example of {chapter.title} fails:\n{''.join(failures)}")
        lines += ["", f"## {chapter.title}", "", chapter.text, "", *code(chapter.setup)]
        for section in chapter.sections:
            lines += ["", f"### {section.name}", ""]
            if section.name in names["masks"] and section.name != "BlockMask":
                path = IMAGES / f"{section.name.lower().replace('.', '_')}.svg"
                files[path] = draw(names["masks"][section.name])
                lines += [f"![{section.name}](images/{path.name})", ""]
            thing = attrgetter(section.name)(SimpleNamespace(**names))
            lines += describe(thing)
            if isinstance(thing, type):
                lines += methods(thing, described)
            lines += [section.text, ""] if section.text else []
            lines += code(section.examples)
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"
    return {PAGE: text, **files}


def describe(thing: Any) -> list[str]:
    """Signature, first paragraph of the docstring, and the rest folded."""
    if not callable(thing):
        return [f"One of {', '.join(f'`{name}`' for name in thing)}.", ""]
    lines = []
    is_function = isinstance(thing, type) and issubclass(thing, torch.autograd.Function)
    if not is_function and thing not in WITHOUT_SIGNATURE:
        lines += ["```python", signature(thing), "```", ""]
    first, _, rest = (inspect.getdoc(thing) or "").partition("\n\n")
    lines += [" ".join(first.split()), ""]
    if rest.strip():
        lines += [
            "<details><summary>more</summary>",
            "",
            "```text",
            rest.strip(),
            "```",
            "</details>",
            "",
        ]
    return lines


def methods(thing: type, described: set[str]) -> list[str]:
    """A line for each public method and property that the package gives `thing` and no section has
    `described`.
    """
    own = [base for base in thing.__mro__ if base.__module__.startswith("cs336_systems.")]
    members = {name: member for base in reversed(own) for name, member in vars(base).items()}
    lines = []
    for name, member in members.items():
        function = (
            member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        )
        if (
            name[0] == "_"
            or not inspect.isfunction(function)
            or f"{thing.__name__}.{name}" in described
        ):
            continue
        if doc := inspect.cleandoc(function.__doc__ or "").partition("\n\n")[0]:
            parameters = [
                str(one).partition(":")[0]
                for one in inspect.signature(function).parameters.values()
            ]
            shown = parameters[not isinstance(member, staticmethod) :]  # without self
            call = name if isinstance(member, property) else f"{name}({', '.join(shown)})"
            lines.append(f"- `{call}`: {' '.join(doc.split())}")
    return [*lines, ""]


def signature(thing: Any) -> str:
    """`name(...)` as it stands in the source, a parameter a line where it is long."""
    shown, star = [], False
    for parameter in inspect.signature(thing).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            shown.append("*")
            star = True
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(
            parameter.kind, ""
        )
        star = star or prefix == "*"
        annotation = f": {parameter.annotation}" if isinstance(parameter.annotation, str) else ""
        default = (
            "" if parameter.default is parameter.empty else f" = {default_text(parameter.default)}"
        )
        shown.append(f"{prefix}{parameter.name}{annotation}{default}")
    name = thing.__qualname__
    result = inspect.signature(thing).return_annotation if not isinstance(thing, type) else None
    arrow = f" -> {result}" if isinstance(result, str) else ""
    line = f"{name}({', '.join(shown)}){arrow}"
    return line if len(line) <= 110 else f"{name}(\n    " + ",\n    ".join(shown) + f",\n){arrow}"


def default_text(value: Any) -> str:
    text = repr(value)
    return "..." if text.startswith("<") else text


def code(examples: str) -> list[str]:
    examples = re.sub(r"  # doctest: \+\w+", "", examples)
    return ["```pycon", examples, "```", ""] if examples else []


def anchor(title: str) -> str:
    """GitHub's fragment of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


# What runs where, asked of `select_backend`


def takes(
    name: str,
    capability: tuple[int, int] | None,
    dtype: str,
    head_dim: int = 64,
    layout: Any = "dense",
) -> bool:
    """Whether back end `name` takes such inputs on that GPU, or a CPU where None, if all that it
    needs is installed.
    """
    try:
        choose(name, capability, dtype, head_dim, layout)
    except ValueError:
        return False
    return True


def choose(
    name: str,
    capability: tuple[int, int] | None,
    dtype: str,
    head_dim: int,
    layout: Any = "dense",
    heads: int = 16,
) -> tuple[str, str]:
    available = dict.fromkeys(BACKENDS, "ok")
    if capability != HOPPER_CAPABILITY:
        available["hopper"] = "no Hopper GPU"
    if capability is not None and capability < MIN_COMPILE_CAPABILITY:
        available["compiled"] = "an old GPU"
    if capability is not None and capability < MIN_TRITON_CAPABILITY:
        available |= dict.fromkeys(("triton_first", "triton"), "an old GPU")
    return select_backend(
        device_kind="cpu" if capability is None else "cuda", dtype=dtype, head_dim=head_dim,
        batch_heads=heads, seqlen_q=MANY_TOKENS, seqlen_k=MANY_TOKENS, requested=name,
        layout=layout, block_size=(128, 128) if layout == "block_mask" else None, available=available,
    )  # fmt: skip


def support_matrix() -> list[str]:
    """Back end × GPU with dtypes, head dim and masks; then what `auto` takes."""
    from cs336_systems.attention.triton.first import HEAD_DIMS

    gpus = {
        "CPU": None, "older GPUs": (MIN_COMPILE_CAPABILITY[0], 5),
        f"{dotted(MIN_TRITON_CAPABILITY)} (A100)": MIN_TRITON_CAPABILITY,
        f"{dotted(HOPPER_CAPABILITY)} (H100, H200)": HOPPER_CAPABILITY, "10.0 (B200)": (10, 0),
    }  # fmt: skip
    lines = [
        "## Support matrix",
        "",
        "What a back end takes when asked for by name, by the GPU's compute capability. All take `is_causal`, any",
        "strides and grouped-query heads, and all but `triton_first`, the handout's kernel, any lengths: it takes",
        "whole tiles of 64 tokens. On a CPU, Triton's kernels run in its interpreter.",
        "",
        f"| back end | {' | '.join(gpus)} | head dim | block mask | packed |",
        f"|:--|{':--|' * (len(gpus) + 3)}",
    ]
    for name in BACKENDS:
        dtypes = {
            gpu: [one for one in DTYPES if takes(name, capability, one)]
            for gpu, capability in gpus.items()
        }
        where = [capability for gpu, capability in gpus.items() if dtypes[gpu]]
        dtype = next(dtypes[gpu][0] for gpu in gpus if dtypes[gpu])
        fits = [
            size for size in range(1, LARGEST_HEAD_DIM + 1) if takes(name, where[0], dtype, size)
        ]
        head_dim = "any" if max(fits) == LARGEST_HEAD_DIM else f"up to {max(fits)}"
        if name == "triton_first":  # the kernel itself refuses the others
            head_dim = ", ".join(map(str, HEAD_DIMS))
        layouts = []
        for layout in ("block_mask", "packed"):
            largest = max(
                (size for size in fits if takes(name, where[0], dtype, size, layout)), default=0
            )
            layouts.append(
                "–" if not largest else "yes" if largest == max(fits) else f"up to {largest}"
            )
        cells = [", ".join(SHORT_NAMES[dtype] for dtype in dtypes[gpu]) or "–" for gpu in gpus]
        lines.append(f"| `{name}` | {' | '.join([*cells, head_dim, *layouts])} |")
    lines += [
        "",
        f"What `auto` takes for {MANY_TOKENS:,} tokens; `explain_backend` says it for your inputs:",
        "",
        "| where | inputs | back end | why |",
        "|:--|:--|:--|:--|",
    ]
    for gpu, dtype, head_dim, heads, layout in (
        ("CPU", "float32", 64, 16, "dense"), (list(gpus)[2], "bfloat16", 64, 16, "dense"),
        (list(gpus)[3], "bfloat16", 64, 16, "dense"), (list(gpus)[3], "bfloat16", 128, 1, "dense"),
        (list(gpus)[3], "bfloat16", 128, 16, "block_mask"), (list(gpus)[3], "float32", 64, 16, "dense"),
        (list(gpus)[3], "float64", 64, 16, "dense"),
    ):  # fmt: skip
        name, reason = choose("auto", gpus[gpu], dtype, head_dim, layout, heads)
        mask = ", block mask" if layout == "block_mask" else ""
        inputs = f"{dtype}, {heads} head{'s' if heads > 1 else ''}, head dim {head_dim}{mask}"
        lines.append(f"| {gpu} | {inputs} | `{name}` | {reason} |")
    return lines


# Pictures


def causal_alignment() -> list[str]:
    """Both alignments, drawn from the masks."""
    lines = [
        "## Causal alignment",
        "",
        "`is_causal` is aligned at the top left, as in SDPA and the handout, also where lengths differ. Decoding",
        "with a cache needs the bottom right: `BlockMask.causal(..., bottom_right=True)`. Four queries, seven keys:",
        "",
        "```text",
    ]
    pictures = []
    for heading, bottom_right in (("is_causal=True", False), ("bottom_right=True", True)):
        mask = BlockMask.causal(4, 7, bottom_right=bottom_right, block_size=16).to_dense()[0, 0]
        pictures.append(
            [heading, *(" ".join("■" if seen else "·" for seen in row) for row in mask.tolist())]
        )
    lines += [f"{left:24}{right}".rstrip() for left, right in zip(*pictures)]
    return [*lines, "```"]


def draw(mask: BlockMask) -> str:
    """The first head of a mask as SVG: tiles that its lists name, and the attended tokens in them."""
    queries, keys = mask.seq_lengths
    rows, columns = mask.block_size
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="192" viewBox="-1 -1 {keys + 2} {queries + 2}">'
    ]
    parts.append(f'<rect x="-1" y="-1" width="{keys + 2}" height="{queries + 2}" fill="#fff"/>')
    live = (mask.lists.tile_map().tiles[0, 0] != DEAD).nonzero().tolist()
    corners = [(column * columns, line * rows) for line, column in live]
    tiles = "".join(f"M{x} {y}h{columns}v{rows}h-{columns}z" for x, y in corners)
    parts.append(f'<path d="{tiles}" fill="#ddd"/>')
    tokens = "".join(
        f"M{run.start()} {row}h{run.end() - run.start()}v1h-{run.end() - run.start()}z"
        for row, seen in enumerate(mask.to_dense()[0, 0].tolist())
        for run in re.finditer("1+", "".join("1" if one else "0" for one in seen))
    )
    parts.append(f'<path d="{tokens}" fill="#3b75af"/>')
    lines = "".join(f"M0 {y}h{keys}" for y in range(0, queries + 1, rows))
    lines += "".join(f"M{x} 0v{queries}" for x in range(0, keys + 1, columns))
    parts.append(f'<path d="{lines}" stroke="#888" stroke-width="0.3"/></svg>')
    return "\n".join(parts) + "\n"


def stale(files: dict[Path, str]) -> list[Path]:
    """Which of `files` differ on disk, and pictures that are none of them."""
    left_over = [path for path in IMAGES.glob("*.svg") if path not in files]
    return [
        path for path, text in files.items() if not path.exists() or path.read_text("utf-8") != text
    ] + left_over


def main(check: bool) -> int:
    """Write what changed, or name it; the exit code."""
    files = build()
    changed = stale(files)
    for path in changed:
        print(path.relative_to(ROOT))
        if check:
            continue
        if path in files:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path], encoding="utf-8", newline="\n")
        else:
            path.unlink()
    return 1 if check and changed else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv))
