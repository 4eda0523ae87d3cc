"""Find places in stock Python files by their syntax tree, never by text or line number."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from sglang_overlay.errors import AnchorMismatch

Scope = ast.Module | ast.ClassDef | ast.FunctionDef
Node = ast.stmt | ast.expr
Select = Callable[[Scope], list[Node]]


class Where(StrEnum):
    """Where our text goes, seen from the anchored node."""

    BEFORE = "before"  # on lines of its own, above the statement
    AFTER = "after"  # on lines of its own, below the statement
    AT = "at"  # inside the line, at the node's first character


@dataclass(frozen=True, slots=True)
class Anchor:
    """Name `count` nodes: those that `select` finds in `scope` (a dotted qualified name, "" for the module)."""

    scope: str
    what: str
    select: Select
    count: int = 1


def assignment(name: str) -> Select:
    """Select plain or annotated assignments to the variable `name`."""

    def accept(node: Node) -> bool:
        if isinstance(node, ast.AnnAssign):
            return isinstance(node.target, ast.Name) and node.target.id == name
        return isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets)

    return lambda scope: [node for node in _nodes(scope) if accept(node)]


def definition(name: str) -> Select:
    """Select the definition of the function `name`."""
    return lambda scope: [node for node in _nodes(scope) if isinstance(node, ast.FunctionDef) and node.name == name]


def return_statement(scope: Scope) -> list[Node]:
    """Select the return statements of a function."""
    return [node for node in _nodes(scope) if isinstance(node, ast.Return)]


def last_statement(scope: Scope) -> list[Node]:
    """Select the last statement of a function's body."""
    return [scope.body[-1]]


def attribute(owner: str, name: str) -> Select:
    """Select the expressions `owner.name`."""
    return lambda scope: [node for node in _nodes(scope) if _is_attribute(node, owner, name)]


def equality_test(owner: str, name: str, value: str) -> Select:
    """Select the statements `if owner.name == "value":`."""

    def accept(node: Node) -> bool:
        if not (isinstance(node, ast.If) and isinstance(node.test, ast.Compare) and len(node.test.ops) == 1):
            return False
        right = node.test.comparators[0]
        is_value = isinstance(right, ast.Constant) and right.value == value
        return isinstance(node.test.ops[0], ast.Eq) and is_value and _is_attribute(node.test.left, owner, name)

    return lambda scope: [node for node in _nodes(scope) if accept(node)]


def call_with(first: str) -> Select:
    """Select the call statements whose first argument is the string `first`."""

    def accept(node: Node) -> bool:
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and node.value.args):
            return False
        argument = node.value.args[0]
        return isinstance(argument, ast.Constant) and argument.value == first

    return lambda scope: [node for node in _nodes(scope) if accept(node)]


def list_item(first: str, keyword: str) -> Select:
    """Select the first item of the list `keyword=[...]` in the call whose first argument is the string `first`."""
    calls = call_with(first)

    def select(scope: Scope) -> list[Node]:
        words = [
            word for node in calls(scope) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) for word in node.value.keywords
        ]
        return [w.value.elts[0] for w in words if w.arg == keyword and isinstance(w.value, ast.List) and w.value.elts]

    return select


def locate(tree: ast.Module, anchor: Anchor, path: str) -> list[Node]:
    """Return the anchored nodes in source order. Raises AnchorMismatch unless there are exactly `anchor.count`."""
    scope = find_scope(tree, anchor.scope)
    found = anchor.select(scope) if scope is not None else []
    if len(found) != anchor.count:
        where = f"`{anchor.scope}` of `{path}`" if anchor.scope else f"`{path}`"
        raise AnchorMismatch(f"{where} has {len(found)} places for {anchor.what}, expected {anchor.count}")
    return sorted(found, key=lambda node: (node.lineno, node.col_offset))


def find_scope(tree: ast.Module, dotted: str) -> Scope | None:
    """Return the class or function with this qualified name, or None unless there is exactly one."""
    scope: Scope = tree
    for name in filter(None, dotted.split(".")):
        named = [n for n in scope.body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == name]
        if len(named) != 1:
            return None
        scope = named[0]
    return scope


def offset(source: bytes, node: Node, where: Where) -> int:
    """Return the byte offset in `source` at which text inserted `where` of `node` begins."""
    lines = source.splitlines(keepends=True)
    assert node.end_lineno is not None
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    line = {Where.BEFORE: first - 1, Where.AFTER: node.end_lineno, Where.AT: node.lineno - 1}[where]
    return sum(len(text) for text in lines[:line]) + (node.col_offset if where is Where.AT else 0)


def _is_attribute(node: ast.AST, owner: str, name: str) -> bool:
    is_attribute = isinstance(node, ast.Attribute) and node.attr == name
    return is_attribute and isinstance(node.value, ast.Name) and node.value.id == owner  # type: ignore[attr-defined]


def _nodes(scope: Scope) -> list[Node]:
    """List a function's nodes at any depth; of a class or a module, only the statements directly in it."""
    if not isinstance(scope, ast.FunctionDef):
        return list(scope.body)
    return [node for node in ast.walk(scope) if node is not scope and isinstance(node, ast.stmt | ast.expr)]
