"""Text made safe to show and written whole: a terminal obeys control characters, and cannot encode
half a pair.
"""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path` in one step: whoever ends this process leaves the old file or the new
    one.
    """
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(text, encoding="utf-8", newline="\n")
    os.replace(aside, path)


def printable(text: str) -> str:
    r"""`text` with each character that is not printable as its escape: `\x1b` for the one that
    begins a command.

    >>> printable("a\x1b[2Jb\n"), printable("\ud800"), printable("ä × 2")
    ('a\\x1b[2Jb\\n', '\\ud800', 'ä × 2')
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def in_one_line(message: object) -> str:
    """`message` without line breaks and control characters."""
    return printable(" ".join(str(message).split()))
