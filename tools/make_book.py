"""Build the book, an offline site of all chapters, pages, documents and notebooks: `make book`.

    python tools/make_book.py                             # into build/book
    python tools/make_book.py --page fsdp --out /tmp/book # one page and the chapters

It takes a minute or two: all records are read, and all calculations made again.
"""

import argparse
import shutil
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cs336_systems.book.site import build_site  # noqa: E402


def main() -> None:
    """Read the arguments, build the site in place of an older one, and say where it is."""
    parser = argparse.ArgumentParser(description="Build the book.")
    parser.add_argument("--out", type=Path, default=ROOT / "build/book", help="folder of the site")
    parser.add_argument("--page", action="append", default=[], help="only this page of writeup/")
    given = parser.parse_args()
    is_book = (given.out / "assets").is_dir()
    if given.out.exists() and not is_book and any(given.out.iterdir()):
        sys.exit(f"error: {given.out} holds something else than a book")

    began = time.monotonic()
    shutil.rmtree(given.out, ignore_errors=True)
    pages = build_site(ROOT, given.out, given.page)
    print(f"{len(pages)} pages in {time.monotonic() - began:.0f} s: {given.out / 'index.html'}")


if __name__ == "__main__":
    main()
