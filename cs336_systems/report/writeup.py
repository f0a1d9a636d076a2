"""Generated blocks of a Markdown file, between two comments each on a line of its own:

    <!-- begin generated: flash_benchmarking.table -->
    ...
    <!-- end generated: flash_benchmarking.table -->

`fill` replaces what stands between them and touches nothing else. A document with a mistake in its markers is refused
whole, with the line of the mistake, so that prose never vanishes into a block.
"""

from __future__ import annotations

import re
from collections.abc import Callable

MARKER = re.compile(r"^\s*<!--\s*(begin|end) generated\b:?\s*(.*?)\s*-->\s*$")


def fill(text: str, content: Callable[[str], str], source: str) -> str:
    """`text` with each block's content replaced by `content(name)`.

    `source` is the document's name in errors. Raises ValueError with the line number for a name that `content` refuses
    (with KeyError), a block that is not closed, nested, closed by another name, or an end without a beginning.
    """
    kept: list[str] = []
    opened: tuple[str, int] | None = None  # name and line of the block that we are in

    def refuse(line_number: int, why: str) -> ValueError:
        return ValueError(f"{source}:{line_number}: {why}")

    for line_number, line in enumerate(text.split("\n"), start=1):
        marker = MARKER.match(line)
        if marker is None:
            if opened is None:
                kept.append(line)
            continue
        which, name = marker.groups()
        if not name:
            raise refuse(line_number, f"the {which} of a generated block needs a name")
        if which == "begin":
            if opened is not None:
                raise refuse(line_number, f"block {name!r} begins inside {opened[0]!r} of line {opened[1]}")
            opened = (name, line_number)
            try:
                kept += [line, "", *content(name).split("\n"), ""]
            except KeyError as error:
                raise refuse(line_number, f"unknown block {name!r}: {error.args[0]}") from error
        else:
            if opened is None:
                raise refuse(line_number, f"block {name!r} ends but never began")
            if opened[0] != name:
                raise refuse(line_number, f"block {opened[0]!r} of line {opened[1]} ends as {name!r}")
            opened = None
            kept.append(line)
    if opened is not None:
        raise refuse(opened[1], f"block {opened[0]!r} is never closed")
    return "\n".join(kept)
