"""Measures how easy the package is to read, and fails where it has become harder: part of
`make lint`.

    python tools/house.py             # a line a statement: today, the most that is allowed, the goal
    python tools/house.py --which     # and the files and functions behind each

Lines say little of what a reader pays: code that is cut by lines becomes denser. So tokens of a
line are counted, long lines, arguments whose names and types a signature hides, modules that share
a name, and circles of imports. `ALLOWED` falls with each step towards `GOALS`, and is never raised.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "cs336_systems"
WIDE = 100  # characters
MANY = 8  # positional parameters of a function on the host
SHARED_NAMES = ("__init__", "__main__", "forward", "backward")
# decorators: Triton passes a kernel's arguments by position
COMPILED = ("jit", "constexpr_function", "builtin")
AUTOGRAD = ("forward", "backward", "__init__")  # autograd passes arguments by position
COUNTED = (tokenize.NAME, tokenize.OP, tokenize.NUMBER)

ALLOWED = {
    "tokens a line": 6.95,
    "percent of lines over 100 characters": 0.2,
    "functions with *args": 30,
    "functions with more than 8 positional parameters": 0,
    "modules that share a name": 0,
    "modules in circles of imports": 0,
}
GOALS = {
    "tokens a line": 7,
    "percent of lines over 100 characters": 4,
    "functions with *args": 4,
    "functions with more than 8 positional parameters": 0,
    "modules that share a name": 0,
    "modules in circles of imports": 0,
}


@dataclass
class House:
    """What is counted in the package at `root`, and where."""

    root: Path
    tokens: int = 0
    lines: int = 0
    full_lines: int = 0  # not blank
    wide: list[str] = field(default_factory=list)
    starred: list[str] = field(default_factory=list)
    crowded: list[str] = field(default_factory=list)
    imports: dict[str, set[str]] = field(default_factory=dict)  # of modules, when they are imported

    def __post_init__(self) -> None:
        self.modules = {
            module_name(path, self.root): path
            for path in sorted((self.root / PACKAGE).rglob("*.py"))
        }
        for name, path in self.modules.items():
            self._read(
                name, path.read_text(encoding="utf-8"), path.relative_to(self.root).as_posix()
            )

    def _read(self, name: str, source: str, place: str) -> None:
        lines = source.splitlines()
        self.tokens += count_tokens(source)
        self.lines += len(lines)
        self.full_lines += sum(bool(line.strip()) for line in lines)
        self.wide += [
            f"{place}:{number}" for number, line in enumerate(lines, start=1) if len(line) > WIDE
        ]
        tree = ast.parse(source)
        self.imports[name] = set(self._imported_at_once(tree.body))
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            where = f"{place}:{node.lineno} {node.name}"
            if node.args.vararg is not None:
                self.starred.append(where)
            if node.name in AUTOGRAD:
                continue
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            if len(node.args.posonlyargs + node.args.args) > MANY and not any(
                one in decorators for one in COMPILED
            ):
                self.crowded.append(where)

    def _imported_at_once(self, body: list[ast.stmt]) -> Iterator[str]:
        """Modules of the package that a module imports when it is imported, not within functions or
        for types alone.
        """
        for node in body:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self.modules)
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = (f"{node.module}.{alias.name}" for alias in node.names)
                yield from (name if name in self.modules else node.module for name in names)
            elif isinstance(node, ast.Try | ast.With):
                yield from self._imported_at_once(node.body)

    def shared_names(self) -> list[str]:
        """Names of files that several folders have: a reader who is told one does not know which is
        meant.
        """
        counts = Counter(path.stem for path in self.modules.values())
        return sorted(
            name for name, count in counts.items() if count > 1 and name not in SHARED_NAMES
        )

    def circles(self) -> list[str]:
        """Modules that import each other, directly or through others, whichever is imported first."""
        reached: dict[str, set[str]] = defaultdict(set)
        for start in self.modules:
            waiting = list(self.imports[start])
            while waiting:
                name = waiting.pop()
                if name not in reached[start]:
                    reached[start].add(name)
                    waiting += self.imports.get(name, ())
        return sorted(name for name in self.modules if name in reached[name])

    def statements(self) -> dict[str, tuple[float, list[str]]]:
        """Each statement's value today, and the places behind it."""
        found = {
            "functions with *args": self.starred,
            "functions with more than 8 positional parameters": self.crowded,
            "modules that share a name": self.shared_names(),
            "modules in circles of imports": self.circles(),
        }
        return {
            "tokens a line": (self.tokens / self.full_lines, []),
            "percent of lines over 100 characters": (100 * len(self.wide) / self.lines, self.wide),
        } | {name: (len(places), places) for name, places in found.items()}


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def count_tokens(source: str) -> int:
    """Names, operators, numbers and strings; comments and texts in triple quotes are read and not
    worked out.
    """
    count = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_text = token.type == tokenize.STRING and token.string.lstrip("rRbBuUfF")[:3] not in (
            '"""',
            "'''",
        )
        count += token.type in COUNTED or is_text
    return count


def main(arguments: list[str]) -> int:
    worse = []
    for name, (value, places) in House(ROOT).statements().items():
        print(f"{name}: {value:.4g}, at most {ALLOWED[name]}, goal {GOALS[name]}")
        if "--which" in arguments:
            print("".join(f"    {place}\n" for place in places), end="")
        if value > ALLOWED[name]:
            worse.append(name)
    for name in worse:
        print(
            f"error: harder to read than before: {name} (--which names the places)", file=sys.stderr
        )
    return bool(worse)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
