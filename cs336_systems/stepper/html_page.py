"""Write the page of a recording: one offline HTML file, the template `stepper.html` with the data.

Steps are JSON, values a row of bytes; both are compressed and in base64, so that the page needs
nothing else.
"""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from cs336_systems.measure.text import write_whole
from cs336_systems.stepper.argument import Argument, runs
from cs336_systems.stepper.recording import Finding, Recording

TEMPLATE = Path(__file__).parent / "stepper.html"
EXACT_START = 1 << 16  # elements of a tensor up to which its values are kept in float32


def write_page(recording: Recording, path: Path, title: str = "") -> None:
    """Write the page of `recording` to the file `path`; its title is the kernel's name by default."""
    write_whole(path, page_of(recording, title))


def page_of(recording: Recording, title: str = "") -> str:
    """Return the page of `recording` as HTML.

    The same launch of the same numbers gives the same text.
    """
    arguments = [_argument(recording, argument) for argument in recording.arguments]
    data = {
        "title": title or recording.name,
        "kernel": recording.name,
        "grid": recording.grid,
        "scalars": recording.scalars,
        "error": recording.error,
        "sources": recording.sources,
        "steps": recording.steps,
        "findings": [_finding(recording, finding) for finding in recording.findings],
        "arguments": arguments,
    }
    page = TEMPLATE.read_text(encoding="utf-8")
    page = page.replace("/*STEPS*/", _packed(json.dumps(data, separators=(",", ":")).encode()))
    return page.replace("/*VALUES*/", _packed(bytes(recording.values)))


def _argument(recording: Recording, argument: Argument) -> dict[str, Any]:
    start = argument.start
    if start is not None and not argument.num_loads.any():
        # only stored to: what `torch.empty` found there would make every page differ
        start = np.zeros_like(start)
    kept = None
    if start is not None:
        kept = recording.keep(start, exactly=start.size <= EXACT_START)
    return {
        "name": argument.name,
        "shape": argument.shape,
        "dtype": str(argument.tensor.dtype).removeprefix("torch."),
        "start": kept,
        "stored": bool((argument.stored_by >= 0).any()),
    }


def _finding(recording: Recording, finding: Finding) -> dict[str, Any]:
    number = next(one.number for one in recording.arguments if one.name == finding.argument)
    return {
        "what": finding.what,
        "argument": number,
        "access": finding.access,
        "line": finding.line,
        "count": len(finding.elements),
        "on": runs(np.array(finding.elements)),
        "programs": finding.programs,
        "text": finding_text(recording, finding),
    }


def finding_text(recording: Recording, finding: Finding) -> str:
    """Return a finding in words: "line 7: load of 24 elements outside x (1000 to 1023 of 1000)"."""
    argument = next(one for one in recording.arguments if one.name == finding.argument)
    name, size = finding.argument, argument.num_elements
    count = f"{len(finding.elements)} element{'s' if len(finding.elements) > 1 else ''}"
    if finding.what == "unwritten":
        return f"{len(finding.elements)} of {size} elements of {name} are never stored"
    if finding.what == "twice":
        return f"line {finding.line}: {count} of {name} stored by two programs"

    first, last = min(finding.elements), max(finding.elements)
    elements = f"elements {first} to {last}" if first < last else f"element {first}"
    where = f"outside {name} ({elements} of {size})"
    if finding.what == "beside":
        where += ", inside its storage"
    return f"line {finding.line}: {finding.access} of {count} {where}"


def _packed(raw: bytes) -> str:
    return base64.b64encode(zlib.compress(raw, 9)).decode()
