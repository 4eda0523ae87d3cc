"""Paths from the wire: what passes stays below its root, and no link on the way is followed."""

from __future__ import annotations

import os
import posixpath
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_deploy.agent.paths import HostilePath, Tree, below, parse, parse_link

NASTY = st.text("./\\ab\0\n\r\t\x7f ~C:é\u2028", max_size=14)


@given(NASTY | st.text(max_size=20))
def test_what_parses_stays_below_the_root(text: str) -> None:
    try:
        parse(text)
    except (HostilePath, UnicodeEncodeError):
        return
    resolved = posixpath.normpath(posixpath.join("/root/tree", text))
    assert resolved.startswith("/root/tree/") and resolved == f"/root/tree/{text}"
    assert not any(ord(c) < 32 for c in text)


@pytest.mark.parametrize(
    "text",
    ["", "/", "/etc/passwd", "..", "../x", "a/../b", "a/..", ".", "./a", "a/.", "a//b", "a/",
     "a\0b", "a\nb", "a\rb", "a\x7f", "C:\\x", "a\\..\\b", None, 3, b"a", ["a"], "x" * 256, "/".join(["d" * 200] * 21)],
)  # fmt: skip
def test_these_never_parse(text: object) -> None:
    with pytest.raises(HostilePath):
        parse(text)


@pytest.mark.parametrize("text", ["a", "a/b.py", "a-1.0.dist-info/RECORD", "é/ü.py", "a b", ".hidden", "..a", "a..", "...", "x" * 255])
def test_these_are_honest(text: str) -> None:
    assert parse(text) == text


@given(NASTY)
def test_a_link_that_parses_stays_in_the_tree(target: str) -> None:
    for path in ("l", "a/l", "a/b/l"):
        try:
            parse_link(path, target)
        except HostilePath:
            continue
        joined = posixpath.normpath(posixpath.join("/tree", posixpath.dirname(path), target))
        assert joined == "/tree" or joined.startswith("/tree/")


@pytest.mark.parametrize("target", ["", "/etc", "..", "../../x", "a/../../..", "x/../y", "a\0", "a\n", None])
def test_these_links_leave_or_might(target: object) -> None:
    with pytest.raises(HostilePath):
        parse_link("l", target)


def test_a_file_behind_a_link_of_the_same_manifest_is_refused() -> None:
    below({"a/l"}, "a/x")
    for path in ("a/l/x", "a/l/b/x"):
        with pytest.raises(HostilePath):
            below({"a/l"}, path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    tree = tmp_path / "tree"
    (tree / "real").mkdir(parents=True)
    (tree / "real" / "file").write_text("here")
    (tree / "link").symlink_to(tmp_path / "outside")
    (tree / "inner").symlink_to("real")
    (tree / "file-link").symlink_to(tmp_path / "outside" / "secret")
    os.mkfifo(tree / "fifo")
    return tree


@pytest.mark.parametrize("path", ["link/secret", "inner/file", "file-link", "fifo", "real/file/x", "real"])
def test_no_link_no_pipe_and_no_directory_is_opened(root: Path, path: str) -> None:
    with Tree(str(root)) as tree, pytest.raises((HostilePath, IsADirectoryError)):
        os.close(tree.open(path))


@pytest.mark.parametrize("path", ["link/new", "inner/new", "file-link"])
def test_nothing_is_written_through_a_link(root: Path, path: str) -> None:
    with Tree(str(root)) as tree, pytest.raises(HostilePath):
        os.close(tree.open(path, os.O_WRONLY | os.O_CREAT, create_parents=True))
    assert sorted(p.name for p in (root.parent / "outside").iterdir()) == ["secret"]


def test_parents_are_made_plain_and_neighbours_share_descriptors(root: Path) -> None:
    with Tree(str(root)) as tree:
        for path in ("new/a/one", "new/a/two", "new/b/three", "four"):
            os.close(tree.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, create_parents=True))
    assert stat.S_IMODE((root / "new" / "a").stat().st_mode) == 0o755
    assert sorted(p.name for p in (root / "new" / "a").iterdir()) == ["one", "two"]
