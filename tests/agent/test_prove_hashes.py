"""Every file of a tree against what its index says: by its stamp, and by its content."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from ddtree_deploy.agent import prove, walk
from ddtree_deploy.agent.main import Session


def rows(root: Path) -> dict[str, Any]:
    """Return what an index would have: kind, mode, size, digest, and the stamp (dev, ino, mtime_ns, ctime_ns)."""
    out = {}
    for path, kind, mode, size, *stamp, target, _links in walk.walk(str(root)):
        digest = target if kind == "l" else hashlib.sha256((root / path).read_bytes()).hexdigest()
        out[path] = (kind, mode, size, digest, *stamp)
    return out


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "pkg" / "__pycache__").mkdir(parents=True)
    for name in ("a.py", "b.py", "c.bin"):
        (root / "pkg" / name).write_bytes(name.encode() * 100)
    (root / "pkg" / "__pycache__" / "a.pyc").write_bytes(b"not part of it")
    (root / "link").symlink_to("pkg/a.py")
    return root


def test_an_untouched_tree_is_vouched_for_by_its_stamps(session: Session, tree: Path) -> None:
    expected = rows(tree)
    assert prove.hashes(session, str(tree), expected, stamps=False) == (3, 1, [])
    assert prove.hashes(session, str(tree), expected) == (0, 4, [])


def test_each_difference_is_named(session: Session, tree: Path) -> None:
    expected = rows(tree)
    same_size = bytearray((tree / "pkg" / "a.py").read_bytes())
    same_size[17] ^= 1
    (tree / "pkg" / "a.py").write_bytes(same_size)
    (tree / "pkg" / "b.py").chmod(0o755)
    (tree / "pkg" / "c.bin").unlink()
    (tree / "pkg" / "c.bin").symlink_to("a.py")
    (tree / "link").unlink()
    (tree / "link").symlink_to("pkg/b.py")
    (tree / "extra").write_text("new")
    expected["pkg/gone.py"] = ("f", 0o644, 1, "0" * 64, 0, 0, 0, 0)
    _hashed, _vouched, bad = prove.hashes(session, str(tree), expected)
    assert [line.partition(": ")[0] for line in bad] == [
        "extra",
        "link",
        "pkg/a.py",
        "pkg/b.py",
        "pkg/c.bin",
        "pkg/gone.py",
    ]
    assert bad[2].startswith("pkg/a.py: sha256 ")
    assert bad[3] == "pkg/b.py: mode 755 where 644 is expected"
    assert bad[4] == "pkg/c.bin: a link where a file is expected"


def test_a_stamp_that_lies_is_found_by_a_deep_look(session: Session, tree: Path) -> None:
    """A flipped bit below an unchanged stamp (a bad disk) is what `--deep` is for."""
    before = rows(tree)
    (tree / "pkg" / "c.bin").write_bytes(b"c.biN" * 100)
    expected = {path: (*before[path][:4], *row[4:]) for path, row in rows(tree).items()}
    assert prove.hashes(session, str(tree), expected)[2] == []
    assert len(prove.hashes(session, str(tree), expected, stamps=False)[2]) == 1
