"""Walk a tree by stat, hash its files, and remember digests by (dev, ino, size, mtime_ns, ctime_ns)."""

from __future__ import annotations

import errno
import hashlib
import marshal
import os
import queue
import stat
import threading
import time

from ddtree_deploy.agent.paths import HostilePath, Tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    #: What `walk` returns of a file or link: path, kind, mode, size, dev, ino, mtime_ns, ctime_ns, target, nlink.
    Entry = tuple[str, str, int, int, int, int, int, int, str, int]
    #: dev, ino, size, mtime_ns, ctime_ns.
    Stamp = tuple[int, int, int, int, int]

#: A digest is only remembered for a file that was last touched this long before it was looked at (git's racily-clean rule).
RACY_NS = 1_000_000_000
SKIPPED_DIRS = frozenset(["__pycache__"])
_LONG = 900  # characters, of at most four bytes: with a name they can not be more than the 4096 bytes that the kernel takes
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_KIND = 0o170000  # the bits that S_IFMT leaves; a call for each file would be felt


def walk(root: str, directories: dict[str, int] | None = None) -> list[Entry]:
    """Return the entries below `root`, sorted by path: `(path, kind, mode, size, dev, ino, mtime_ns, ctime_ns, target, nlink)`.

    `kind` is `f`, `l`, or `?` (neither a regular file, a directory nor a link, or a directory too deep for a path). `__pycache__`
    is left out, and so are empty directories. Paths are relative, with `/`. `directories`, a dict, receives `{path: mtime_ns}` of
    every directory, as it was before its entries were read.
    """
    out: list[Entry] = []
    stack = [""]
    top = os.open(root, _DIRECTORY)
    try:
        if directories is not None:
            directories[""] = os.fstat(top).st_mtime_ns
        while stack:
            prefix = stack.pop()
            try:
                fd = os.open(prefix or ".", _DIRECTORY, dir_fd=top)
                try:
                    long = len(root) + len(prefix) > _LONG
                    _list(fd, prefix, os.path.join(root, prefix) if long else "", out, stack, directories)
                finally:
                    os.close(fd)
            except OSError as error:
                if error.errno != errno.ENAMETOOLONG:
                    raise
                out.append((prefix.rstrip("/"), "?", 0, 0, 0, 0, 0, 0, "", 0))
    finally:
        os.close(top)
    out.sort()
    return out


def _list(fd: int, prefix: str, whole: str, out: list[Entry], stack: list[str], directories: dict[str, int] | None) -> None:
    """Add the entries of one directory to `out`, and its directories to `stack`.

    By descriptor: to find each file by its whole path again would take half as long once more. `whole`, if not empty, is the
    path of a directory so deep that this has to be tried all the same; raises OSError(ENAMETOOLONG).
    """
    with os.scandir(fd) as entries:
        for entry in entries:
            if whole:
                os.lstat(whole + entry.name)
            path = prefix + entry.name
            info = entry.stat(follow_symlinks=False)
            kind = info.st_mode & _KIND
            if kind == stat.S_IFREG:
                out.append(
                    (path, "f", info.st_mode & 0o777, info.st_size, info.st_dev, info.st_ino,
                     info.st_mtime_ns, info.st_ctime_ns, "", info.st_nlink)
                )
            elif kind == stat.S_IFDIR:
                if entry.name not in SKIPPED_DIRS:
                    stack.append(path + "/")
                    if directories is not None:
                        directories[path] = info.st_mtime_ns
            elif kind == stat.S_IFLNK:
                target = os.readlink(entry.name, dir_fd=fd)
                out.append(
                    (path, "l", 0o777, 0, info.st_dev, info.st_ino,
                     info.st_mtime_ns, info.st_ctime_ns, target, info.st_nlink)
                )
            else:
                out.append((path, "?", 0, 0, 0, 0, 0, 0, "", 0))


def same_directories(root: str, directories: dict[str, int]) -> bool:
    """Tell whether no entry was added, removed or renamed since a walk noted `directories`."""
    try:
        return all(os.stat(os.path.join(root, path)).st_mtime_ns == mtime for path, mtime in directories.items())
    except OSError:
        return False


def stamp(entry: Entry) -> Stamp:
    """Return what identifies an unchanged file without reading it: `(dev, ino, size, mtime_ns, ctime_ns)`."""
    return (entry[4], entry[5], entry[3], entry[6], entry[7])


def is_settled(entry: Entry, now_ns: int) -> bool:
    """Tell whether a stamp taken at `now_ns` may be trusted later: nobody touched the file within `RACY_NS` before."""
    return max(entry[6], entry[7]) < now_ns - RACY_NS


def fingerprint(entries: list[Entry]) -> str:
    """Return the sha256 over path, kind, mode, size, inode, mtime and target of a walk: equal means nobody changed the tree.

    ctime is left out, since linking a file into a new generation moves it.
    """
    return _digest([(e[0], e[1], e[2], e[3], e[5], e[6], e[8]) for e in entries])


def seal(entries: Sequence[tuple[object, ...]]) -> str:
    """Return the sha256 over everything that a walk sees of each entry but its link count; a touched file breaks it."""
    return _digest([e[:9] for e in entries])


def _digest(rows: Any) -> str:
    # Version 2 has no references to earlier values: equal rows give equal bytes, and names that are not UTF-8 stay distinct.
    return hashlib.sha256(marshal.dumps(rows, 2)).hexdigest()


class Changed(Exception):
    """A file changed, or went away, while it was read."""


def hash_fd(fd: int, buffer: bytearray) -> tuple[str, int]:
    """Return `(sha256 hex, size)` of a descriptor's content; raise Changed when its stat moved meanwhile."""
    before = os.fstat(fd)
    digest = hashlib.sha256()
    size = 0
    view = memoryview(buffer)
    while True:
        count = os.readv(fd, [buffer])
        if not count:
            break
        digest.update(view[:count])
        size += count
    after = os.fstat(fd)
    if (before.st_mtime_ns, before.st_ctime_ns, size) != (after.st_mtime_ns, after.st_ctime_ns, after.st_size):
        raise Changed()
    return digest.hexdigest(), size


def hash_paths(
    root: str, paths: Sequence[str], aborted: Callable[[], bool], moved: Callable[[int, str], None], threads: int = 2,
) -> dict[str, str | None]:
    """Return `{path: sha256 hex, or None when it changed or vanished twice}`; `moved(bytes, path)` reports progress.

    Two threads: hashlib releases the interpreter lock, and more than two only contend with the link.
    """
    out: dict[str, str | None] = {}
    todo: queue.SimpleQueue[str] = queue.SimpleQueue()
    for path in paths:
        todo.put(path)

    def work() -> None:
        buffer = bytearray(1 << 20)
        with Tree(root) as tree:
            while not aborted():
                try:
                    path = todo.get_nowait()
                except queue.Empty:
                    return
                out[path] = _hash_twice(tree, path, buffer, moved)

    workers = [threading.Thread(target=work) for _ in range(max(1, min(threads, len(paths))))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return out


def _hash_twice(tree: Tree, path: str, buffer: bytearray, moved: Callable[[int, str], None]) -> str | None:
    for pause in (0.0, 0.2):
        time.sleep(pause)
        try:
            fd = tree.open(path)
        except (OSError, HostilePath):
            continue
        try:
            digest, size = hash_fd(fd, buffer)
        except Changed:
            continue
        finally:
            os.close(fd)
        moved(size, path)
        return digest
    return None
