"""Which flags the deployed SGLang knows: read from its sources by syntax tree, never by importing it."""

from __future__ import annotations

import ast
import os
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

#: Where flags are declared: calls of `add_argument` (also the overlay's), and since 0.5.2x annotated fields.
FILES = ("sglang/srt/server_args.py", "sglang/srt/speculative/ddtree_utils.py")
FIELDS = "sglang/srt/arg_groups/fields"


def known(site: str) -> list[str]:
    """Return the flags that `python -m sglang.launch_server` of this tree takes, sorted; empty when there is none."""
    paths = [os.path.join(site, name) for name in FILES]
    fields = os.path.join(site, FIELDS)
    if os.path.isdir(fields):
        paths += [os.path.join(fields, name) for name in sorted(os.listdir(fields)) if name.endswith(".py")]
    out: set[str] = set()
    for path in paths:
        try:
            with open(path, encoding="utf-8") as file:
                tree = ast.parse(file.read())
        except (OSError, SyntaxError, ValueError):
            continue
        out.update(_added(tree))
        if os.path.dirname(path) == fields:
            out.update(_declared(tree))
    return sorted(out)


def _strings(nodes: list[ast.expr]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("-"):
            yield node.value


def _added(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            yield from _strings(node.args)


def _declared(tree: ast.AST) -> Iterator[str]:
    """Yield the flags of `name: A[type, "help" or Arg(...)]` fields: `--name`, or `cli_name`, and the aliases."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        note = node.annotation
        if not (isinstance(note, ast.Subscript) and getattr(note.value, "id", "") in ("A", "Annotated")):
            continue
        names = ["--" + node.target.id.replace("_", "-")]
        hidden = False
        for call in ast.walk(note):
            if not (isinstance(call, ast.Call) and getattr(call.func, "id", "") == "Arg"):
                continue
            for word in call.keywords:
                if word.arg == "cli_name" and isinstance(word.value, ast.Constant):
                    names[0] = str(word.value.value)
                elif word.arg == "aliases" and isinstance(word.value, ast.List):
                    names += _strings(word.value.elts)
                elif word.arg == "no_cli" and isinstance(word.value, ast.Constant):
                    hidden = bool(word.value.value)
        if not hidden:
            yield from (name for name in names if name.startswith("-"))


def version(site: str) -> str:
    """Return the version of the SGLang in this tree, or an empty string."""
    try:
        names = os.listdir(site)
    except OSError:
        return ""
    found = [match.group(1) for name in names for match in [re.fullmatch(r"sglang-(.+)\.dist-info", name)] if match]
    return found[0] if len(found) == 1 else ""
