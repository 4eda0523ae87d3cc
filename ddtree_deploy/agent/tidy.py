"""What may happen after the answer: give kept generations their own small files, drop old ones, keep the stamps true.

A new generation starts as a farm of hard links, which is quick; but people edit `.py` files in place, and a rollback must not
change with them. So once the switch is confirmed, every kept generation that is not live gets private copies of its small
files. Links also move ctime, so the stamps of the survivors are renewed for inodes whose content is vouched for; who looks in between
waits for that.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil

from ddtree_deploy.agent import durable, frames, layout, locks, procs, walk
from ddtree_deploy.agent.paths import HostilePath, Tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container

    #: Size, mtime_ns and digest of an inode, by dev and ino.
    Known = dict[tuple[int, int], tuple[int, int, str]]

#: Shared objects of this size stay shared between generations: nobody edits them in place, and they hold most of the bytes.
SHARED_FROM = 1 << 20
_SCRATCH = ".tmp-own"


def _tidy_lock(found: layout.Layout) -> int:
    return os.open(found.lock + ".tidy", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def wait_until_still(found: layout.Layout) -> int:
    """Wait for a tidying guardian to stop (it stops by itself once a push holds the lock); return a descriptor to close."""
    fd = _tidy_lock(found)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def after_confirmation(found: layout.Layout, keep: int) -> None:
    """Prune and separate, unless a push wants the venv; quiet on errors, since the next push tries again."""
    fd = _tidy_lock(found)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return
    os.nice(10)

    def wanted() -> bool:
        return locks.holder(found) is not None

    try:
        if not wanted():
            layout.remove(found.incoming)
            prune(found, keep, found.live())
        if not wanted():
            separate(found, wanted)
    finally:
        os.close(fd)


def in_use(found: layout.Layout) -> dict[int, list[int]]:
    """Return `{generation: [pids]}` of the processes that use a generation's files."""
    out: dict[int, set[int]] = {}
    for use in procs.users_of([found.generations])["users"]:
        number = os.path.relpath(use["path"], os.path.realpath(found.generations)).split(os.sep)[0]
        if number.isdigit():
            out.setdefault(int(number), set()).add(use["pid"])
    return {number: sorted(pids) for number, pids in out.items()}


def prunable(found: layout.Layout, keep: int, live: int | None) -> list[int]:
    """Return the generations that may go: not live, not the one before, not used by a process, not among the newest `keep`."""
    numbers = found.numbers()
    spared = {live, found.previous_of(live) if live is not None else None, *in_use(found)}
    others = [number for number in numbers if number not in spared]
    room = max(0, keep - len([number for number in numbers if number in spared]))
    return others[: len(others) - room] if room else others


def prune(found: layout.Layout, keep: int, live: int | None) -> list[int]:
    """Remove the generations that may go; return their numbers."""
    gone = prunable(found, keep, live)
    if gone:
        with _Vouched(found, skip=gone) as vouched:
            vouched.moving()
            for number in gone:
                # The record goes first: a directory without one is rubbish that the next push clears.
                layout.remove(os.path.join(found.directory(number), "generation.json"))
                shutil.rmtree(found.directory(number))
    return gone


class _Vouched:
    """Keep the stamps of all generations true across work that changes only link counts."""

    def __init__(self, found: layout.Layout, skip: Container[int] = ()) -> None:
        self.found = found
        self.indexes = {n: layout.Index.load(os.path.join(found.directory(n), "index")) for n in found.numbers() if n not in skip}
        self.known: Known = {}
        self.fd = -1
        for number, index in self.indexes.items():
            if index is None:
                continue
            for entry in walk.walk(found.tree(number)):
                digest = index.digest(entry)
                if digest:
                    self.known[(entry[4], entry[5])] = (entry[3], entry[6], digest)

    def __enter__(self) -> _Vouched:
        return self

    def moving(self) -> None:
        """Tell whoever looks (`locks.steady`) that stamps move from now on, until the indexes know the new ones."""
        if self.fd < 0:
            self.fd = os.open(locks.stamps(self.found), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self.fd, fcntl.LOCK_EX)

    def __exit__(self, *_exc: object) -> None:
        try:
            self._renew()
        finally:
            if self.fd >= 0:
                os.close(self.fd)

    def _renew(self) -> None:
        for number, index in self.indexes.items():
            if index is None:
                continue
            changed = False
            for entry in walk.walk(self.found.tree(number)):
                row = index.rows.get(entry[0])
                if row is None or row[0] != "f" or index.digest(entry):
                    continue
                if self.known.get((entry[4], entry[5])) == (entry[3], entry[6], row[3]) and row[2] == entry[3]:
                    index.rows[entry[0]] = (*row[:4], entry[4], entry[5], entry[6], entry[7])
                    changed = True
            if changed:
                index.save(os.path.join(self.found.directory(number), "index"))


def separate(found: layout.Layout, wanted: Callable[[], bool]) -> None:
    """Give every kept generation that is not live its own copies of the small files it shares; `wanted()` stops it early."""
    with _Vouched(found) as vouched:
        for number, index in vouched.indexes.items():
            if index is None or number == found.live():
                continue
            # Beside the tree and not in it: what a death leaves here is no part of the generation.
            scratch = os.path.join(found.directory(number), _SCRATCH)
            layout.remove(scratch)
            os.mkdir(scratch)
            try:
                _separate(found.tree(number), index, scratch, vouched, wanted)
            except (OSError, HostilePath):
                return  # no room, or somebody is at work in there: the next push tries again
            finally:
                layout.remove(scratch)


def _separate(root: str, index: layout.Index, scratch: str, vouched: _Vouched, wanted: Callable[[], bool]) -> None:
    copies = []
    with Tree(root) as tree:
        for count, entry in enumerate(walk.walk(root)):
            if count % 256 == 0 and wanted():
                return
            row = index.rows.get(entry[0])
            if row is not None and entry[1] == "f" and entry[9] > 1 and entry[3] < SHARED_FROM:
                temporary = os.path.join(scratch, str(count))
                fresh = _copy(tree, entry, temporary, row[3])
                if fresh is not None:
                    copies.append((temporary, entry, fresh, row[3]))
        if copies:
            durable.sync_file_system(scratch)  # a rename must not be on the disk before what it names
            vouched.moving()
        for temporary, entry, fresh, digest in copies:
            at, base = tree.parent(entry[0])
            now = os.stat(base, dir_fd=at, follow_symlinks=False)
            if (now.st_ino, now.st_size, now.st_mtime_ns) == (entry[5], entry[3], entry[6]):
                os.rename(temporary, base, dst_dir_fd=at)
                vouched.known[(fresh.st_dev, fresh.st_ino)] = (fresh.st_size, fresh.st_mtime_ns, digest)


def _copy(tree: Tree, entry: walk.Entry, temporary: str, digest: str) -> os.stat_result | None:
    """Copy a file with its mode and mtime; return the copy's stat, None when the content is not what the index says."""
    fd = tree.open(entry[0])
    try:
        data = os.read(fd, SHARED_FROM)
        info = os.fstat(fd)
    finally:
        os.close(fd)
    if hashlib.sha256(data).hexdigest() != digest:
        return None  # edited by hand: which generation was meant is not ours to guess, `status` names it
    out = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        frames.write_all(out, data)
        os.fchmod(out, info.st_mode & 0o777)
        os.utime(out, ns=(info.st_atime_ns, info.st_mtime_ns))
        return os.fstat(out)
    finally:
        os.close(out)
