"""Anchors, insertions, vendoring and the contract checker, on small sources made here."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_overlay import vendor
from sglang_overlay.anchors import (
    Anchor,
    Where,
    assignment,
    attribute,
    call_with,
    definition,
    equality_test,
    last_statement,
    list_item,
    locate,
    return_statement,
)
from sglang_overlay.build import cut, insert
from sglang_overlay.contract import Symbol, check_contract
from sglang_overlay.edits import Edit
from sglang_overlay.errors import AnchorMismatch, BuildMismatch

SOURCE = b'''"""Text with a caf\xc3\xa9 before the anchors."""
import os


class Mode:
    A = 1
    B: int = 2

    @staticmethod
    def is_a(x):
        return x == 1

    def setup(self, parser, args):
        parser.add_argument("--mode", choices=["a", "\xc3\xa9", "b"])
        if self.mode == "a":
            copy = args.size + args.size
        return copy
'''
ANCHORS = {
    "after the last member": (Anchor("Mode", "B", assignment("B")), Where.AFTER, "    C = 3\n"),
    "above a decorated method": (Anchor("Mode", "is_a", definition("is_a")), Where.BEFORE, "    D = 4\n"),
    "before a return": (Anchor("Mode.is_a", "return", return_statement), Where.BEFORE, "        x = +x\n"),
    "after a flag": (Anchor("Mode.setup", "--mode", call_with("--mode")), Where.AFTER, "        more(parser)\n"),
    "in a list": (Anchor("Mode.setup", "choices", list_item("--mode", "choices")), Where.AT, '"z", '),
    "before a test": (
        Anchor("Mode.setup", "if", equality_test("self", "mode", "a")),
        Where.BEFORE,
        "        ready(self)\n",
    ),
    "twice in a line": (Anchor("Mode.setup", "size", attribute("args", "size"), count=2), Where.AT, "draft_"),
    "at the end": (Anchor("Mode.is_a", "end", last_statement), Where.AFTER, "        y = x\n"),
}


def edit(name: str) -> Edit:
    anchor, where, text = ANCHORS[name]
    return Edit("mode.py", anchor, where, text, "test")


@given(st.lists(st.sampled_from(sorted(ANCHORS)), unique=True))
def test_any_set_of_insertions_parses_and_can_be_cut_out_again(names: list[str]) -> None:
    built = insert("mode.py", SOURCE, [edit(name) for name in names])
    assert cut(built.data, built.spans) == SOURCE
    assert [built.data[at : at + size].decode() for at, size in built.spans].count("draft_") == 2 * ("twice in a line" in names)
    lines = set(built.data.decode().splitlines())
    for name in names:
        if ANCHORS[name][1] is not Where.AT:
            assert set(ANCHORS[name][2].splitlines()) <= lines


def test_insertions_land_where_they_should() -> None:
    tree = ast.parse(insert("mode.py", SOURCE, [edit(name) for name in ANCHORS]).data)
    mode = tree.body[2]
    assert isinstance(mode, ast.ClassDef)
    assert [ast.unparse(n).splitlines()[0] for n in mode.body] == [
        *("A = 1", "B: int = 2", "C = 3", "D = 4", "@staticmethod", "def setup(self, parser, args):")
    ]
    is_a, setup = mode.body[4:]
    assert ast.unparse(is_a).splitlines()[2:] == ["    x = +x", "    return x == 1", "    y = x"]
    assert ast.unparse(setup).splitlines()[1:5] == [
        "    parser.add_argument('--mode', choices=['z', 'a', 'é', 'b'])",
        "    more(parser)",
        "    ready(self)",
        "    if self.mode == 'a':",
    ]
    assert "copy = draft_args.size + draft_args.size" in ast.unparse(setup)


@pytest.mark.parametrize("old, new", [(b"A = 1", b"A = 1\n    B = 5"), (b"B: int", b"E: int")])
def test_an_anchor_with_no_place_or_two_is_refused(old: bytes, new: bytes) -> None:
    with pytest.raises(AnchorMismatch, match="expected 1"):
        insert("mode.py", SOURCE.replace(old, new), [edit("after the last member")])


def test_a_missing_scope_is_refused() -> None:
    with pytest.raises(AnchorMismatch, match=r"`Gone` of `mode\.py` has 0 places for B"):
        locate(ast.parse(SOURCE), Anchor("Gone", "B", assignment("B")), "mode.py")


def test_an_edit_that_breaks_the_file_is_refused() -> None:
    anchor, where, _ = ANCHORS["at the end"]
    with pytest.raises(BuildMismatch, match="unparsable"):
        insert("mode.py", SOURCE, [Edit("mode.py", anchor, where, "return (\n", "test")])


@pytest.fixture(scope="module")
def vendored(tmp_path_factory: pytest.TempPathFactory) -> object:
    path = tmp_path_factory.mktemp("vendored") / "ddtree_utils.py"
    path.write_bytes(vendor.ddtree_utils("0.5.11", {"a.py": "1" * 64}, {"b.py": "2" * 64}))
    spec = importlib.util.spec_from_file_location("vendored_ddtree_utils", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[spec.name]


def test_the_new_file_needs_no_other_package_of_ours(vendored: object) -> None:
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name) or ""
        for node in ast.walk(ast.parse(Path(vendored.__file__).read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert not [name for name in imported if name.startswith(("ddtree", "sglang_overlay"))]
    assert vendored.SGLANG_VERSION == "0.5.11" and vendored.EDITED_FILES == {"a.py": "1" * 64}


def test_the_new_file_builds_the_same_trees_as_the_library(vendored: object) -> None:
    from ddtree.tree import build_tree_batch

    scores = torch.randn(3, 7, 50, generator=torch.Generator().manual_seed(0)).log_softmax(dim=2)
    best = scores.topk(20, dim=2)
    mine, theirs = (f(best.values, best.indices, 20) for f in (vendored.build_tree_batch, build_tree_batch))
    for name in ("tokens", "parents", "depths", "n_valid"):
        assert torch.equal(getattr(mine, name), getattr(theirs, name))


def test_two_modules_with_one_name_are_refused() -> None:
    with pytest.raises(BuildMismatch, match="`f` is defined in both `a` and `b`"):
        vendor._refuse_collisions({"a": "def f(): ...", "b": "if True:\n    f = 1"})


def test_an_import_that_was_a_blocks_only_statement_leaves_a_pass() -> None:
    body = vendor._body("def f():\n    from ddtree.tree import Tree\n\n\ndef g():\n    from ddtree.tree import Tree\n    return Tree\n")
    assert body == "def f():\n    pass\n\n\ndef g():\n    return Tree\n"


def test_the_contract_checker_sees_through_if_and_try_and_into_init(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        "try:\n    from x import helper\nexcept ImportError:\n    helper = None\n"
        "class C:\n    field: int = 0\n    def __init__(self, a, *, b):\n        self.made = a\n"
        "    def anything(self, **kwargs): ...\n"
        "class D:\n    one: int\n    two: int = 2\n"
    )
    from sglang_overlay import contract as module

    def problems(*symbols: Symbol) -> list[str]:
        trees = {"m.py": ast.parse((tmp_path / "m.py").read_text()), "gone.py": None}
        return [broken.problem for symbol in symbols for broken in module._check(symbol, trees)]

    assert not problems(
        Symbol("m.py", "helper"),
        Symbol("m.py", "C", params=("a", "b"), members=("field", "made", "anything")),
        Symbol("m.py", "C.anything", params=("whatever",)),
        Symbol("m.py", "D", params=("one", "two")),
    )
    assert problems(
        Symbol("m.py", "C", params=("c",)),
        Symbol("m.py", "C", members=("lost",)),
        Symbol("m.py", "E"),
        Symbol("gone.py", "x"),
    ) == ["it does not accept c", "it lacks lost", "it is missing", "the file is missing"]
    assert check_contract.__doc__
