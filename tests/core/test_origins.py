"""Where files come from, and what makes a snapshot something else than what ran."""

from __future__ import annotations

from typing import Any

from ddtree_deploy.models import PATCHED, STOCK, UNOWNED
from ddtree_deploy.origins import DRIFT, Classified, classify, import_packages
from tests.fixtures.trees import digest


def scan(files: dict[str, str], *dists: dict[str, Any], pth: list[Any] | None = None) -> Classified:
    rows = []
    for path, text in files.items():
        kind = "l" if text.startswith("->") else "?" if text == "?" else "f"
        rows.append([path, kind, 0o664, len(text), 1, 2, 3, 4, text[2:] if kind == "l" else "", None])
    digests = {path: None if text == "changing" else digest(text) for path, text in files.items()}
    return classify({"files": rows, "distributions": list(dists), "pth": pth or [], "torch": {}}, digests)


def dist(name: str, record: dict[str, str | None] | None, **fields: Any) -> dict[str, Any]:
    rows = None if record is None else [[path, text and digest(text)] for path, text in record.items()]
    plain = {"dir": f"{name}-1.dist-info", "name": name, "version": "1", "requires": [], "editable": None, "scripts": []}
    return {**plain, "record": rows, **fields}


def origins(found: Classified) -> dict[str, str]:
    return {entry.path: entry.origin for entry in found.files}


def kinds(found: Classified) -> list[str]:
    return [finding.kind for finding in found.findings]


def test_stock_patched_unowned() -> None:
    found = scan(
        {"a/__init__.py": "as published", "a/hot.py": "patched by hand", "a/mine.py": "added", "a-1.dist-info/RECORD": "r"},
        dist("a", {"a/__init__.py": "as published", "a/hot.py": "as published", "a-1.dist-info/RECORD": None}),
    )
    assert origins(found) == {"a/__init__.py": STOCK, "a/hot.py": PATCHED, "a/mine.py": UNOWNED, "a-1.dist-info/RECORD": STOCK}
    assert kinds(found) == []


def test_a_file_of_record_that_is_gone_is_drift() -> None:
    recorded = {"a/__init__.py": "x", "a/gone.py": "y", "a/__pycache__/x.pyc": None, "../../../bin/a": "s"}
    found = scan({"a/__init__.py": "x"}, dist("a", recorded))
    assert [(f.kind, f.where) for f in found.findings] == [("missing", "a/gone.py")]
    assert "missing" in DRIFT


def test_editable_installs_and_paths_that_are_not_carried_are_drift() -> None:
    found = scan(
        {"x.pth": "p", "__editable__.b.pth": "e"},
        dist("a", {}, editable="file:///src/a"),
        pth=[["x.pth", ["/opt/elsewhere"], []], ["__editable__.b.pth", ["../../src"], []], ["c.pth", [], ["import c"]]],
    )
    assert kinds(found) == ["editable", "editable", "pth-code", "pth-path", "pth-path"]
    assert all(kind in DRIFT for kind in ("editable", "pth-path"))
    assert "pth-code" not in DRIFT


def test_what_leaves_the_tree_changes_or_is_no_file_is_told_and_left_out() -> None:
    links = {"out": "->/etc/passwd", "up": "->../x", "in": "->a.py"}
    found = scan({**links, "a.py": "x", "pipe": "?", "moving.py": "changing", "bad\nname": "x"})
    assert sorted(origins(found)) == ["a.py", "in"]
    assert sorted(kinds(found)) == ["changed", "hostile-name", "outside-link", "outside-link", "special"]
    assert set(kinds(found)) <= DRIFT


def test_a_file_that_two_distributions_own_belongs_to_the_first_and_is_told() -> None:
    found = scan({"s/x.py": "x"}, dist("a", {"s/x.py": "x"}), dist("b", {"s/x.py": None}))
    (entry,) = found.files
    assert [(d.name, d.shares) for d in found.distributions] == [("a", ()), ("b", ("s/x.py",))] and entry.owner == 0
    assert entry.origin == STOCK  # the second one recorded no hash
    assert [(f.kind, f.where) for f in found.findings] == [("two-owners", "b")]


def test_a_left_over_dist_info_and_a_missing_record_are_told() -> None:
    found = scan({"a/x.py": "x"}, dist("a", {"a/x.py": "x"}), dist("A", None, dir="A-0.9.dist-info"))
    assert sorted(kinds(found)) == ["duplicate", "no-record"]


def test_modes_keep_only_whether_a_file_is_executable() -> None:
    rows = [["x", "f", mode, 0, 1, 2, 3, 4, "", None] for mode in (0o600, 0o4755, 0o710)]
    found = [classify({"files": [row], "distributions": [], "pth": [], "torch": {}}, {"x": digest("")}).files[0].mode for row in rows]
    assert found == [0o644, 0o755, 0o755]


def test_import_packages_are_what_can_be_imported_at_the_top() -> None:
    paths = ["a/__init__.py", "a/b/__init__.py", "one.py", "ext.cpython-312-x86_64-linux-gnu.so", "ns/x.py", "tests/__init__.py",
             "bad-name.py", "stub/__init__.pyi", "lib.so.1"]  # fmt: skip
    assert import_packages(paths) == ("a", "ext", "one")
