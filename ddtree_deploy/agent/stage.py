"""Build a new generation beside the live one: find what is already here, receive the rest, link or write each file."""

from __future__ import annotations

import os
import shutil

from ddtree_deploy.agent import durable, layout, objects, walk
from ddtree_deploy.agent.failure import Failure
from ddtree_deploy.agent.paths import HostilePath, Tree, parents, parse, parse_link

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ddtree_deploy.agent.main import Session
    from ddtree_deploy.agent.sources import Sources
    from ddtree_deploy.agent.walk import Entry

    #: path, kind, mode, size, digest (a link's: its target).
    Wanted = tuple[str, str, int, int, str]

MAX_FILES = 2_000_000
MODES = (0o644, 0o755)


def parse_result(rows: object) -> list[Wanted]:
    """Return the wanted files `[(path, kind, mode, size, digest)]` after checking every one; raise Failure(integrity) with all faults.

    The agent trusts no controller: paths stay below the generation, links resolve inside it, modes are 0644 or 0755.
    """
    if not isinstance(rows, list) or len(rows) > MAX_FILES:
        raise Failure("integrity", "the manifest is not a list of at most %d files" % MAX_FILES)
    faults: list[str] = []
    out: dict[str, Wanted] = {}
    for row in rows:
        try:
            path, kind, mode, size, digest = row
            parse(path)
            if path in out:
                raise HostilePath("a path that is named twice: %r" % path)
            if kind == "l":
                parse_link(path, digest)
            elif kind != "f":
                raise HostilePath("an entry that is neither a file nor a link: %r" % path)
            elif not objects.valid_digest(digest) or not isinstance(size, int) or not 0 <= size < 1 << 50 or mode not in MODES:
                raise HostilePath("a file with a malformed digest, size or mode: %r" % path)
            out[path] = (path, kind, mode, size, digest)
        except HostilePath as error:
            faults.append(str(error))
        except (TypeError, ValueError):
            faults.append("a malformed entry: %r" % (row,))
    faults += _shadows(out)
    if faults:
        raise Failure("integrity", "the manifest is malformed or hostile, %d faults" % len(faults), causes=faults[:20])
    return sorted(out.values())


def _shadows(wanted: dict[str, Wanted]) -> list[str]:
    """Return a fault for each file or link that lies where another entry needs a directory."""
    return [
        "a file behind a link: %r" % path if wanted[path][1] == "l" else "a path below a file: %r" % path
        for path in sorted(parents(wanted).intersection(wanted))
    ]


def apply_delta(index: layout.Index, changes: object, gone: list[str]) -> list[Wanted]:
    """Return the wanted files of a tree that is the indexed one but for `changes` (rows) and `gone` (paths), checked as above."""
    wanted = {path: (path, row[0], row[1], row[2], row[3]) for path, row in index.rows.items()}
    for path in gone:
        wanted.pop(path, None)
    known = len(wanted)
    wanted.update((row[0], row) for row in parse_result(changes))
    # Files in the place of files shadow nothing that they did not shadow before.
    faults = _shadows(wanted) if len(wanted) > known else []
    if faults:
        raise Failure("integrity", "the manifest is malformed or hostile, %d faults" % len(faults), causes=faults[:20])
    return sorted(wanted.values())


def missing(wanted: list[Wanted], sources: Sources, found: layout.Layout) -> dict[str, int]:
    """Return `{digest: size}` of the content that has to be sent; what a cut push left behind is hashed before it counts."""
    here = {path: known[0] for path, known in sources.by_path.items()}
    need = {
        digest: size
        for path, kind, _mode, size, digest in wanted
        if kind == "f" and here.get(path) != digest and sources.find(path, digest) is None
    }
    os.makedirs(found.incoming, mode=0o700, exist_ok=True)
    buffer = bytearray(1 << 20)
    for name in os.listdir(found.incoming):
        path = os.path.join(found.incoming, name)
        keep = False
        if name in need and os.path.isfile(path) and not os.path.islink(path):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                keep = walk.hash_fd(fd, buffer) == (name, need[name])
            except walk.Changed:
                keep = False
            finally:
                os.close(fd)
        if keep:
            del need[name]
        else:
            layout.remove(path)
    return need


def build(session: Session, found: layout.Layout, root: str, wanted: list[Wanted], sources: Sources) -> tuple[layout.Index, set[str]]:
    """Make the tree `root` hold exactly `wanted`; return its Index and the received digests that it uses.

    Unchanged files are hard-linked (tidy.py gives small ones copies of their own later); a file whose mode differs from its
    source's, and a second use of received content, is a copy. Stamps in the index have no ctime: that is the proof's to see.
    """
    os.makedirs(root, mode=0o755)
    os.chmod(root, 0o755)
    rows: dict[str, layout.Row] = {}
    used: set[str] = set()
    trees: dict[str, Tree] = {}
    directory, at, there = None, -1, -1  # where the loop is, its descriptor, and that of the live tree's namesake
    with Tree(root) as out:
        try:
            # A directory at a time, so that each is opened once.
            for count, (path, kind, mode, size, digest) in enumerate(sorted(wanted, key=lambda row: row[0].rpartition("/"))):
                if count % 512 == 0:
                    if session.aborted():
                        raise Failure("interrupted", "the push was cancelled while the new generation was built")
                    session.progress("stage", count, len(wanted), "files", path)
                parent, _, base = path.rpartition("/")
                if parent != directory:
                    directory, at, there = parent, out.parent(path, create=True)[0], -1
                same = sources.by_path.get(path)
                if same is not None and same[0] == digest and same[2][2] == mode and kind == "f":
                    entry = same[2]
                    if there < 0:
                        there = _tree(trees, same[1]).parent(path)[0]
                    if _link(there, base, at, base, path):
                        rows[path] = ("f", mode, size, digest, entry[4], entry[5], entry[6], None)
                        continue
                source = sources.find(path, digest) if kind == "f" else None
                there = -1  # what follows may look elsewhere in that tree
                if kind == "l":
                    os.symlink(digest, base, dir_fd=at)
                elif source is not None and source[1][2] == mode and _link(*_tree(trees, source[0]).parent(source[1][0]), at, base, path):
                    pass
                elif source is not None:
                    _copy_from(_tree(trees, source[0]), source[1], at, base, mode)
                else:
                    _take(found, digest, at, base, mode, digest in used)
                    used.add(digest)
                info = os.stat(base, dir_fd=at, follow_symlinks=False)
                rows[path] = (kind, mode, size, digest, info.st_dev, info.st_ino, info.st_mtime_ns, None)
        finally:
            for tree in trees.values():
                tree.close()
    return layout.Index(rows), used


def _tree(trees: dict[str, Tree], root: str) -> Tree:
    if root not in trees:
        trees[root] = Tree(root)
    return trees[root]


def _link(source_at: int, source: str, at: int, base: str, path: str) -> bool:
    """Link a file into the new tree; tell whether that was possible."""
    try:
        os.link(source, base, src_dir_fd=source_at, dst_dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:
        raise Failure("stale-plan", "`%s` went away on the host while the push was prepared" % path) from None
    except OSError as error:
        if error.errno not in (1, 18, 31):  # EPERM (protected_hardlinks), EXDEV, EMLINK: a copy will do
            raise
        return False
    return True


def _copy_from(tree: Tree, entry: Entry, at: int, base: str, mode: int) -> None:
    fd = tree.open(entry[0])
    try:
        if walk.stamp(entry)[:4] != _stamp_of(fd):
            raise Failure("stale-plan", "`%s` changed on the host while the push was prepared" % entry[0])
        _copy(fd, at, base, mode, (entry[6], entry[6]))
    finally:
        os.close(fd)


def _stamp_of(fd: int) -> tuple[int, int, int, int]:
    info = os.fstat(fd)
    return (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)


def _take(found: layout.Layout, digest: str, at: int, base: str, mode: int, again: bool) -> None:
    path = os.path.join(found.incoming, digest)
    if not again:
        os.link(path, base, dst_dir_fd=at, follow_symlinks=False)
        if mode != 0o644:  # what `landing` gives
            os.chmod(base, mode, dir_fd=at)
        return
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        _copy(fd, at, base, mode)
    finally:
        os.close(fd)


def _copy(fd: int, at: int, base: str, mode: int, times: tuple[int, int] | None = None) -> None:
    out = os.open(base, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=at)
    try:
        offset, left = 0, os.fstat(fd).st_size
        while left:
            count = os.sendfile(out, fd, offset, left)
            if not count:
                break
            offset += count
            left -= count
        os.fchmod(out, mode)
        if times:
            os.utime(out, ns=times)
    finally:
        os.close(out)


def keep_bytecode(root: str, index: layout.Index, sources: Sources) -> None:
    """Link the bytecode of reused sources into the new tree, so that the first import does not compile everything again.

    Python replaces a .pyc by rename and checks it against the source's mtime and size, so sharing one is safe (PEP 3147).
    """
    kept: dict[str, set[str]] = {}
    live_root = ""
    for path, row in index.rows.items():
        if path.endswith(".py"):
            source = sources.by_path.get(path)
            if source is not None and source[2][5] == row[5] and row[0] == "f":
                directory, _, name = path.rpartition("/")
                kept.setdefault(directory, set()).add(name[:-3])
                live_root = source[1]
    for directory, stems in kept.items():
        cache = os.path.join(live_root, directory, "__pycache__")
        try:
            names = os.listdir(cache)
        except OSError:
            continue
        target = os.path.join(root, directory, "__pycache__")
        os.mkdir(target)
        for pyc in names:
            if pyc.endswith(".pyc") and pyc.split(".", 1)[0] in stems:
                try:
                    os.link(os.path.join(cache, pyc), os.path.join(target, pyc))
                except OSError:
                    continue


def consume(found: layout.Layout, root: str, index: layout.Index, used: set[str], proved: list[Entry]) -> list[Entry]:
    """Drop what was received, now that it is in its place; return the entries `proved` with the ctimes that this moved."""
    layout.remove(found.incoming)
    with Tree(root) as tree:
        return [
            (*entry[:7], tree.stat(entry[0]).st_ctime_ns, *entry[8:]) if entry[1] == "f" and index.rows[entry[0]][3] in used else entry
            for entry in proved
        ]


def discard(found: layout.Layout, everything: bool) -> None:
    """Remove partial trees; with `everything`, also the received content that a resumed push could have used."""
    for path in found.partials():
        layout.remove(path)
    if everything and os.path.isdir(found.incoming):
        shutil.rmtree(found.incoming)


def publish(found: layout.Layout, number: int, index: layout.Index, proved: list[Entry], info: dict[str, Any]) -> None:
    """Make the proved tree of `number` a generation, durably: everything on disk first, then the record that makes it count."""
    index.save(os.path.join(found.directory(number), "index"), proved)
    durable.sync_file_system(found.directory(number))
    durable.sync_directory(found.generations)
    found.write_info(number, info)
