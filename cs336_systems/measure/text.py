"""Text from files, made safe to show: a terminal obeys control characters, and cannot encode half a surrogate pair."""


def printable(text: str) -> str:
    r"""`text` with each character that is not printable as its escape: `\x1b` for the one that begins a command.

    >>> printable("a\x1b[2Jb\n"), printable("\ud800"), printable("ä × 2")
    ('a\\x1b[2Jb\\n', '\\ud800', 'ä × 2')
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def in_one_line(message: object) -> str:
    """`message` without line breaks and control characters."""
    return printable(" ".join(str(message).split()))
