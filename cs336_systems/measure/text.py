"""Text that is safe to show on a terminal, and files that are written whole or not at all.

A terminal obeys control characters, and cannot encode half a surrogate pair.
"""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path` in one step: a killed process leaves the old file or the new one."""
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(text, encoding="utf-8", newline="\n")
    os.replace(aside, path)


def printable(text: str) -> str:
    r"""Return `text` with each character that is not printable as its escape.

    `\x1b`, which begins a terminal's command, is one of them.

    >>> printable("a\x1b[2Jb\n"), printable("\ud800"), printable("ä × 2")
    ('a\\x1b[2Jb\\n', '\\ud800', 'ä × 2')
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def in_one_line(message: object) -> str:
    """Return `message` as text without line breaks and control characters."""
    return printable(" ".join(str(message).split()))
