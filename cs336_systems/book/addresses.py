"""Where the book's links lead: from paths of the repository to files of the site.

    addresses = Addresses(root, out, {"writeup/fsdp.md": "fsdp.html"})
    addresses.rewrite('<a href="../fsdp.md">', "writeup/chapters")    # '<a href="fsdp.html">'

A link to a page, a document or a notebook leads to its file in the site. A link to code, or to a
folder, leads to a page that shows it, which `pending` names until the site has it. A picture is
copied. Records and other large files stay in the repository, and the link leads there.
"""

from __future__ import annotations

import os
import posixpath
import re
import shutil
from html import escape, unescape
from pathlib import Path

TAG = re.compile(r"<(?:a|img)\b[^<>]*>")  # code in a page has no tags
ATTRIBUTE = re.compile(r'\b(href|src)="([^"]*)"')
OUTSIDE = re.compile(r"(?:[a-z]+:|//)")
SHOWN = {".py", ".md", ".cpp", ".toml", ".slurm", ".html", ".css", ".js", ".txt"}
PICTURES = {".png", ".svg"}
DOCUMENTS = ("writeup.md", "beyond.md")  # whose sections are pages of the book
IMAGES = "images"  # the site's folder of copied pictures


class Addresses:
    """Rewrites links. `known` has the site's file of each path of the repository that has one."""

    def __init__(self, root: Path, out: Path, known: dict[str, str]) -> None:
        self.root, self.out = root, out
        self.known = dict(known)
        self.pending: list[str] = []  # paths of code and folders that a link has led to

    def rewrite(self, html: str, folder: str) -> str:
        """Return `html` with its links rewritten; they are relative to `folder`.

        A link that begins with / is relative to the repository. Raises ValueError for a link that
        leads nowhere.
        """

        def rewritten(match: re.Match[str]) -> str:
            return f'{match[1]}="{escape(self.address(unescape(match[2]), folder))}"'

        return TAG.sub(lambda tag: ATTRIBUTE.sub(rewritten, tag[0]), html)

    def address(self, link: str, folder: str) -> str:
        """Return where `link`, which stands in a file of `folder`, leads to from within the site."""
        if OUTSIDE.match(link):
            return link
        target, _, fragment = link.partition("#")
        mark = f"#{fragment}" if fragment else ""
        # A section of a document is a page here.
        if target in ("", *DOCUMENTS) and (self.root / f"writeup/{fragment}.md").is_file():
            return self.address(f"/writeup/{fragment}.md", folder)
        if not target:
            return link

        path = posixpath.normpath(
            target.lstrip("/") if target.startswith("/") else posixpath.join(folder, target)
        )
        if path in self.known:
            return self.known[path] + mark
        there = self.root / path
        if not there.exists():
            raise ValueError(f"a link in {folder or 'the root'} leads nowhere: {link}")
        if there.suffix in PICTURES:
            return self._picture(there)
        if there.is_dir() or there.suffix in SHOWN:
            self.known[path] = f"code_{path.replace('/', '.')}.html"
            self.pending.append(path)
            return self.known[path] + mark
        return Path(os.path.relpath(there.resolve(), self.out.resolve())).as_posix()

    def _picture(self, path: Path) -> str:
        """Copy a picture into the site and return its address."""
        (self.out / IMAGES).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, self.out / IMAGES / path.name)
        return f"{IMAGES}/{path.name}"
