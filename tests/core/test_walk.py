"""The walk, and when a remembered digest may be believed."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from ddtree_deploy.agent import walk
from ddtree_deploy.agent.layout import Index
from ddtree_deploy.survey import _remember


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "pkg" / "__pycache__").mkdir(parents=True)
    (tmp_path / "pkg" / "__pycache__" / "a.pyc").write_bytes(b"x")
    (tmp_path / "pkg" / "a.py").write_text("a")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("pkg/a.py")
    (tmp_path / "dirlink").symlink_to("pkg")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


def test_it_sees_files_links_and_what_is_neither(root: Path) -> None:
    seen = {entry[0]: (entry[1], entry[8]) for entry in walk.walk(str(root))}
    assert seen == {"pkg/a.py": ("f", ""), "link": ("l", "pkg/a.py"), "dirlink": ("l", "pkg"), "pipe": ("?", "")}


def test_a_root_that_is_a_link_is_walked(root: Path) -> None:
    alias = root.parent / "alias"
    alias.symlink_to(root)
    assert walk.walk(str(alias)) == walk.walk(str(root))


@pytest.mark.parametrize("change", ["content", "mtime", "mode", "added", "removed", "renamed", "retargeted", "replaced"])
def test_the_fingerprint_sees_every_change(root: Path, change: str) -> None:
    before = walk.fingerprint(walk.walk(str(root)))
    file = root / "pkg" / "a.py"
    if change == "content":
        file.write_text("bb")
    elif change == "mtime":
        os.utime(file, ns=(1, 1))
    elif change == "mode":
        file.chmod(0o755)
    elif change == "added":
        (root / "new").write_text("")
    elif change == "removed":
        file.unlink()
    elif change == "renamed":
        file.rename(root / "pkg" / "b.py")
    elif change == "retargeted":
        (root / "link").unlink()
        (root / "link").symlink_to("pkg")
    else:
        info = file.stat()
        (root / "copy").write_text("a")
        os.utime(root / "copy", ns=(info.st_atime_ns, info.st_mtime_ns))
        (root / "copy").rename(file)
    assert walk.fingerprint(walk.walk(str(root))) != before


def test_the_fingerprint_outlives_a_hard_link(root: Path) -> None:
    """Staging links files of the live tree, which moves their ctime; that is no change of the target."""
    before = walk.fingerprint(walk.walk(str(root)))
    os.link(root / "pkg" / "a.py", root.parent / "other")
    assert walk.fingerprint(walk.walk(str(root))) == before


def _entry(root: Path) -> tuple[object, ...]:
    return next(entry for entry in walk.walk(str(root)) if entry[0] == "pkg/a.py")


def test_a_file_that_was_just_touched_is_not_believed_later(root: Path) -> None:
    """git's racily-clean rule: within the clock tick of the look, the same stamp may hide another content."""
    entry = _entry(root)
    now = time.time_ns()
    assert not walk.is_settled(entry, now)
    assert walk.is_settled(entry, now + 5 * walk.RACY_NS)


def test_stamps_of_fresh_files_are_not_remembered(root: Path, tmp_path: Path) -> None:
    entry = [*_entry(root)[:9], None]
    now = time.time_ns()
    cache = tmp_path / "stamps"
    _remember(cache, [entry], {"pkg/a.py": "d" * 64}, now)
    assert cache.read_text() == "{}"
    _remember(cache, [entry], {"pkg/a.py": "d" * 64}, now + 5 * walk.RACY_NS)
    assert "d" * 64 in cache.read_text()


def test_an_index_vouches_only_for_the_very_same_stat(root: Path) -> None:
    entry = _entry(root)
    stamp = (entry[4], entry[5], entry[6], entry[7])
    index = Index({"pkg/a.py": ("f", entry[2], entry[3], "d" * 64, *stamp)})
    assert index.digest(entry) == "d" * 64
    for position in (3, 4, 5, 6, 7):
        other = list(entry)
        other[position] += 1
        assert index.digest(tuple(other)) is None
    assert Index({"pkg/a.py": ("f", entry[2], entry[3], "d" * 64, *stamp[:3], 0)}).digest(entry) is None


def test_hashes_are_right_and_missing_files_are_none(root: Path) -> None:
    found = walk.hash_paths(str(root), ["pkg/a.py", "pkg/gone.py", "link", "pipe"], lambda: False, lambda size, path: None)
    assert found == {"pkg/a.py": hashlib.sha256(b"a").hexdigest(), "pkg/gone.py": None, "link": None, "pipe": None}


def test_a_file_that_moves_while_it_is_read_is_noticed(root: Path) -> None:
    """A buffer of one byte, and a write between two reads."""
    path = root / "pkg" / "a.py"
    path.write_bytes(b"0123456789")

    class Buffer(bytearray):
        pass

    fd = os.open(path, os.O_RDONLY)
    real = os.readv
    reads = 0

    def readv(fd: int, buffers: list[bytearray]) -> int:
        nonlocal reads
        reads += 1
        if reads == 3:
            with open(path, "r+b") as file:
                file.write(b"X")
        return real(fd, buffers)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(walk.Changed):
        patch.setattr(os, "readv", readv)
        walk.hash_fd(fd, bytearray(1))
    os.close(fd)
