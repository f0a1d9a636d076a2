"""docs/robustness.md names a test for every row, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IDS = [
    f"{kind}{number}"
    for kind, count in (("K", 11), ("D", 16), ("B", 7), ("S", 3))
    for number in range(1, count + 1)
]
ROW = re.compile(r"^\| ([A-Z]\d+) \|.*$", re.MULTILINE)
NODE = re.compile(r"`(tests/\w+\.py)::(\w+)`")


def test_every_row_has_a_test_and_every_test_exists():
    page = (ROOT / "docs/robustness.md").read_text()
    rows = {match[1]: NODE.findall(match[0]) for match in ROW.finditer(page)}
    assert list(rows) == IDS
    assert all(rows.values()), [name for name, nodes in rows.items() if not nodes]
    defined = {
        file: {
            node.name
            for node in ast.parse((ROOT / file).read_text()).body
            if isinstance(node, ast.FunctionDef)
        }
        for file in {file for nodes in rows.values() for file, _ in nodes}
    }
    missing = [
        f"{file}::{name}"
        for nodes in rows.values()
        for file, name in nodes
        if name not in defined[file]
    ]
    assert not missing
