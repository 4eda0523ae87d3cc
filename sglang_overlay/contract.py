"""Check by syntax tree, without importing it, that an SGLang has every symbol we call, with the parameters we pass."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_overlay.manifest import Read, pinned, reader


@dataclass(frozen=True, slots=True)
class Symbol:
    """One thing we rely on: a function with parameters, a class with members, or a name in a module.

    `name` is its qualified name in `path`; `params` must all be accepted; `members` are attributes: fields, methods,
    enum members, or attributes that a method assigns to `self`.
    """

    path: str
    name: str
    params: tuple[str, ...] = ()
    members: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Broken:
    """One part of the contract that does not hold."""

    symbol: Symbol
    problem: str

    def __str__(self) -> str:
        return f"`{self.symbol.name}` of `{self.symbol.path}`: {self.problem}"


def contract(version: str) -> tuple[Symbol, ...]:
    """Return the contract of a supported version. Raises UnknownVersion."""
    name = pinned(version).version.replace(".", "_")
    symbols: tuple[Symbol, ...] = importlib.import_module(f"sglang_overlay.contracts.v{name}").SYMBOLS
    return symbols


def check_contract(site: Path | Read, version: str) -> tuple[Broken, ...]:
    """Return what does not hold in the tree at `site`, or that `site` reads; empty when all does."""
    read = reader(site) if isinstance(site, Path) else site
    trees: dict[str, ast.Module | None] = {}
    for symbol in contract(version):
        if symbol.path not in trees:
            source = read(symbol.path)
            trees[symbol.path] = None if source is None else ast.parse(source)
    return tuple(broken for symbol in contract(version) for broken in _check(symbol, trees))


def _check(symbol: Symbol, trees: Mapping[str, ast.Module | None]) -> Iterator[Broken]:
    tree = trees[symbol.path]
    if tree is None:
        yield Broken(symbol, "the file is missing")
        return
    node = _find(tree, symbol.name)
    if node is None:
        yield Broken(symbol, "it is missing")
        return
    if symbol.params:
        accepted = _params(node)
        missing = [name for name in symbol.params if accepted is not None and name not in accepted]
        if missing:
            yield Broken(symbol, f"it does not accept {', '.join(missing)}")
    if symbol.members:
        present = set(_members(node))
        missing = [name for name in symbol.members if name not in present]
        if missing:
            yield Broken(symbol, f"it lacks {', '.join(missing)}")


def _find(tree: ast.AST, dotted: str) -> ast.AST | None:
    node: ast.AST = tree
    for name in dotted.split("."):
        inner = [n for n in _statements(node) if name in _names(n)]
        if not inner:
            return None
        node = inner[-1]
    return node


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield a scope's statements, through `if`, `try` and `with`, which do not open one."""
    for field in ("body", "orelse", "finalbody", "handlers"):
        for inner in getattr(node, field, []):
            if isinstance(inner, ast.If | ast.Try | ast.With | ast.ExceptHandler):
                yield from _statements(inner)
            if isinstance(inner, ast.stmt):
                yield inner


def _names(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Assign(targets=targets):
            yield from (t.id for t in targets if isinstance(t, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            yield from (alias.asname or alias.name for alias in names)


def _params(node: ast.AST) -> set[str] | None:
    """Return the parameter names of a function, or of a class: its `__init__`, or its dataclass fields. None: any."""
    if isinstance(node, ast.ClassDef):
        init = _find(node, "__init__")
        if init is None:
            return {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
        node = init
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    if node.args.kwarg is not None:
        return None
    return {arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}


def _members(node: ast.AST) -> Iterator[str]:
    for statement in _statements(node):
        yield from _names(statement)
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and isinstance(inner.value, ast.Name):
            yield inner.attr
