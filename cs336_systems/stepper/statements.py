"""Put a call behind each statement of a kernel's syntax tree, so that a recorder sees it run.

`sys.settrace` would do the same at ten times the cost, and fight with debuggers and coverage.
"""

from __future__ import annotations

import ast

CALLED = "__stepper__"  # the global that the kernel calls: (line, its local variables)
BEGINS = 0  # the line that stands for "the function begins"
SILENT = (ast.For, ast.While, ast.If, ast.Return, ast.FunctionDef, ast.Break, ast.Continue)


class Statements(ast.NodeTransformer):
    """Adds `__stepper__(line, locals())` behind statements, and at the head of functions and loops."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.body = self._with_calls(node.body, BEGINS)
        return node

    def visit_For(self, node: ast.For) -> ast.For:
        node.body = self._with_calls(node.body, node.lineno)
        node.orelse = self._with_calls(node.orelse)
        return node

    def visit_While(self, node: ast.While) -> ast.While:
        node.body = self._with_calls(node.body, node.lineno)
        return node

    def visit_If(self, node: ast.If) -> ast.If:
        node.body = self._with_calls(node.body)
        node.orelse = self._with_calls(node.orelse)
        return node

    def _with_calls(self, body: list[ast.stmt], head: int | None = None) -> list[ast.stmt]:
        """Return `body` with a call behind each statement, and one at its head for line `head`."""
        changed = [] if head is None else [_call(head, body[0])]
        for statement in body:
            changed.append(self.visit(statement))
            if not isinstance(statement, SILENT):
                changed.append(_call(statement.lineno, statement))
        return changed


def _call(line: int, place: ast.stmt) -> ast.stmt:
    """Return the statement that reports `line`, at the position of `place`."""
    statement = ast.parse(f"{CALLED}({line}, locals())").body[0]
    for node in ast.walk(statement):
        ast.copy_location(node, place)
    return statement
