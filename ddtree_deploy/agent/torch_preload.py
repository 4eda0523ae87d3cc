"""Read from `torch/__init__.py` which CUDA libraries `import torch` loads beforehand, in which order, from which
directories.

The list and the order belong to a torch release and decide which of two CUDA majors wins in a merged tree, so they are
parsed from the tree at hand (by its syntax tree; nothing is run).
"""

from __future__ import annotations

import ast
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Item = list[Any]
    Functions = dict[str, ast.FunctionDef]
    Tables = dict[str, list[list[str]]]


def read(root: str) -> dict[str, Any] | None:
    """Return what `import torch` preloads, read from this tree's `torch/__init__.py`; None when it can not be
    recognised.

    `layouts` are the directories tried in order, with `{folder}` and `{major}`; `always` is loaded after
    `libtorch_global_deps.so` was, if a CUDA runtime came with it; `on_error` when it could not be. Items are
    `[folder, glob, required]`.
    """
    try:
        with open(os.path.join(root, "torch", "__init__.py"), "rb") as file:
            module = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    loader = functions.get("_load_global_deps")
    paths = functions.get("_get_cuda_dep_paths")
    if loader is None or paths is None:
        return None
    layouts = [_layout(call) for call in _calls(paths) if getattr(call.func, "attr", "") == "join"]
    always: list[Item] = []
    on_error: list[Item] = []
    for node in ast.walk(loader):
        if isinstance(node, ast.Try) and node.handlers and any(_name(call) == "CDLL" for call in _calls(node)):
            always = _loads(node.body, functions, {}, True)
            on_error = [item for handler in node.handlers for item in _loads(handler.body, functions, {}, True)]
            break
    if not layouts or not on_error:
        return None
    return {"layouts": layouts, "always": always, "on_error": on_error}


def _calls(node: ast.AST) -> list[ast.Call]:
    found = [item for item in ast.walk(node) if isinstance(item, ast.Call)]
    return sorted(found, key=lambda call: (call.lineno, call.col_offset))


def _name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def _layout(call: ast.Call) -> str:
    """Turn `os.path.join(path, "nvidia", f"cu{major}", "lib", lib_name)` into `nvidia/cu{major}/lib`."""
    parts = []
    for arg in call.args[1:-1]:
        if isinstance(arg, ast.Constant):
            parts.append(str(arg.value))
        elif isinstance(arg, ast.JoinedStr):
            parts.append("".join(str(v.value) if isinstance(v, ast.Constant) else "{major}" for v in arg.values))
        else:
            parts.append("{folder}")
    return "/".join(parts)


def _strings(node: ast.AST | None) -> list[list[str]] | None:
    """Return [[folder, glob]] of a literal dict or list of pairs of strings, else None."""
    pairs: list[list[ast.expr | None]] = []
    if isinstance(node, ast.Dict):
        pairs = [[key, value] for key, value in zip(node.keys, node.values)]
    elif isinstance(node, (ast.List, ast.Tuple)):
        pairs = [list(item.elts) if isinstance(item, ast.Tuple) else [item] for item in node.elts]
    texts = [[str(part.value) for part in pair if isinstance(part, ast.Constant)] for pair in pairs]
    return texts if texts and all(len(text) == 2 for text in texts) else None


def _required(call: ast.Call, inherited: bool) -> bool:
    for keyword in call.keywords:
        if keyword.arg == "required":
            if isinstance(keyword.value, ast.Constant):
                return bool(keyword.value.value)
            return inherited  # `required=required`: as the caller said
    return True


def _loads(body: list[ast.stmt], functions: Functions, tables: Tables, inherited: bool, depth: int = 0) -> list[Item]:
    """Return the preloads that statements perform, in order; follows calls into functions of the same module."""
    out: list[Item] = []
    if depth > 4:
        return out
    for node in body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            pairs = _strings(node.value)
            if pairs is not None and isinstance(target, ast.Name):
                tables[target.id] = pairs
        elif isinstance(node, ast.For):
            inner = [call for call in _calls(node) if "preload" in _name(call)]
            names = [item.id for item in ast.walk(node.iter) if isinstance(item, ast.Name) and item.id in tables]
            if inner and names:
                out += [[*pair, _required(inner[0], inherited)] for pair in tables[names[0]]]
        elif isinstance(node, (ast.Try, ast.With)):
            out += _loads(node.body, functions, tables, inherited, depth)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and "preload" in _name(node.value):
            call = node.value
            literal = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            if len(literal) == 2:
                out.append([*literal, _required(call, inherited)])
            elif _name(call) in functions:
                out += _loads(functions[_name(call)].body, functions, {}, _required(call, inherited), depth + 1)
    return out
