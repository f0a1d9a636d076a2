"""An executed notebook as Markdown: its cells, and below each its outputs.

    notebook_markdown(Path("notebooks/s7_fsdp.ipynb"))

Pictures stay inside the page, so that it needs no file beside it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

STYLE = re.compile(r"<(style|script)\b.*?</\1>", re.DOTALL)
# links to pages that the notebook writes beside itself when it runs, in Markdown and in HTML
WRITTEN = re.compile(r"\[([^\]]+)\]\(\w+\.html\)")
WRITTEN_LINK = re.compile(r"<a [^>]*href=['\"]\w+\.html['\"][^>]*>(.*?)</a>", re.DOTALL)


def notebook_markdown(path: Path) -> str:
    """Return the cells of a notebook; outputs are HTML blocks, in which no line is blank."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        else:
            parts.append(f"```python\n{source}\n```")
            parts += [_output(output) for output in cell.get("outputs", ())]
    return "\n\n".join(parts) + "\n"


def _output(output: dict[str, Any]) -> str:
    """Return one output of a cell: a picture, Markdown, HTML, or what was printed."""
    data = output.get("data", {})
    if "image/png" in data:
        picture = "".join(data["image/png"]).replace("\n", "")
        source = f"data:image/png;base64,{picture}"
        return f'<div class="output"><img alt="output of the cell" src="{source}"></div>'
    if "text/markdown" in data:
        return WRITTEN.sub(r"\1", "".join(data["text/markdown"]))
    if "text/html" in data:
        html = WRITTEN_LINK.sub(r"\1", STYLE.sub("", "".join(data["text/html"])))
        lines = [line for line in html.splitlines() if line.strip()]
        return "\n".join(['<div class="output">', *lines, "</div>"])
    text = "".join(output.get("text") or data.get("text/plain", ""))
    return f"```text\n{text.rstrip()}\n```"
