"""Build a new generation beside the live one: find what is already here, receive the rest, link or write each file."""

from __future__ import annotations

import os
import shutil

from ddtree_deploy.agent import durable, layout, objects, walk
from ddtree_deploy.agent.failure import Failure
from ddtree_deploy.agent.paths import HostilePath, Tree, parse, parse_link

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ddtree_deploy.agent.main import Session
    from ddtree_deploy.agent.walk import Entry

    #: path, kind, mode, size, digest (a link's: its target).
    Wanted = tuple[str, str, int, int, str]
    #: The root of a tree, and its entry.
    Source = tuple[str, Entry]
    DigestOf = Callable[[Entry], str | None]

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
    parents: set[str] = set()
    for path in wanted:
        at = path.rpartition("/")[0]
        while at and at not in parents:
            parents.add(at)
            at = at.rpartition("/")[0]
    return [
        "a file behind a link: %r" % path if wanted[path][1] == "l" else "a path below a file: %r" % path
        for path in sorted(parents.intersection(wanted))
    ]


def apply_delta(index: layout.Index, changes: object, gone: list[str]) -> list[Wanted]:
    """Return the wanted files of a tree that is the indexed one but for `changes` (rows) and `gone` (paths), checked as above."""
    wanted = {path: (path, row[0], row[1], row[2], row[3]) for path, row in index.rows.items()}
    for path in gone:
        wanted.pop(path, None)
    for row in parse_result(changes):
        wanted[row[0]] = row
    faults = _shadows(wanted)
    if faults:
        raise Failure("integrity", "the manifest is malformed or hostile, %d faults" % len(faults), causes=faults[:20])
    return sorted(wanted.values())


class Sources:
    """Where wanted content already lies: `(tree root, entry of a walk)`; the live tree first, other generations when that lacks it."""

    def __init__(self, found: layout.Layout, live_root: str, live_entries: list[Entry], digest_of: DigestOf) -> None:
        self.found = found
        self.by_path: dict[str, tuple[str, str, Entry]] = {}
        self.by_digest: dict[str, Source] = {}
        self._others: dict[str, list[tuple[str, str, layout.Row]]] | None = None
        for entry in live_entries:
            digest = digest_of(entry) if entry[1] == "f" else None
            if digest:
                self.by_path[entry[0]] = (digest, live_root, entry)
                self.by_digest.setdefault(digest, (live_root, entry))

    def add_tree(self, root: str, entries: list[Entry], digest_of: DigestOf) -> None:
        for entry in entries:
            digest = digest_of(entry) if entry[1] == "f" else None
            if digest:
                self.by_digest.setdefault(digest, (root, entry))

    def find(self, path: str, digest: str) -> Source | None:
        """Return `(root, entry)` of a file with that content, or None."""
        same = self.by_path.get(path)
        if same is not None and same[0] == digest:
            return same[1], same[2]
        return self.by_digest.get(digest) or self._elsewhere(digest)

    def _elsewhere(self, digest: str) -> Source | None:
        if self._others is None:
            self._others = {}
            live = self.found.live()
            for number in sorted(self.found.numbers(), reverse=True):
                index = layout.Index.load(os.path.join(self.found.directory(number), "index")) if number != live else None
                for path, row in (index.rows if index else {}).items():
                    if row[0] == "f":
                        self._others.setdefault(row[3], []).append((self.found.tree(number), path, row))
        for root, path, row in self._others.get(digest, ()):
            try:
                info = os.lstat(os.path.join(root, path))
            except OSError:
                continue
            if (info.st_size, info.st_dev, info.st_ino, info.st_mtime_ns, info.st_ctime_ns) == (row[2], *row[4:]):
                entry = (path, "f", info.st_mode & 0o777, *row[2:3], *row[4:7], info.st_ctime_ns, "", info.st_nlink)
                return self.by_digest.setdefault(digest, (root, entry))
        return None


def gather(found: layout.Layout, live_entries: list[Entry], vouch: list[list[Any]]) -> Sources:
    """Return the Sources of a venv; `vouch` has stamps and digests that the controller knows for files without an index."""
    live = found.live()
    known = _by_stamps(vouch)
    index = None if live is None else layout.Index.load(os.path.join(found.directory(live), "index"))
    digest_of = (lambda entry: index.digest(entry) or known(entry)) if index else known
    return Sources(found, found.site if live is None else found.tree(live), live_entries, digest_of)


def _by_stamps(vouch: list[list[Any]]) -> DigestOf:
    stamps = {row[0]: (tuple(row[1:6]), row[6]) for row in vouch}

    def digest_of(entry: Entry) -> str | None:
        known = stamps.get(entry[0])
        return known[1] if known is not None and known[0] == walk.stamp(entry) else None

    return digest_of


def add_base(sources: Sources, root: str, vouch: list[list[Any]]) -> None:
    """Let another venv of the host (`push --create --base`) be a source too, by the stamps that the controller vouches for."""
    sources.add_tree(root, walk.walk(root), _by_stamps(vouch))


def missing(wanted: list[Wanted], sources: Sources, found: layout.Layout) -> dict[str, int]:
    """Return `{digest: size}` of the content that has to be sent; what a cut push left behind is hashed before it counts."""
    need = {digest: size for path, kind, _mode, size, digest in wanted if kind == "f" and sources.find(path, digest) is None}
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
    source's, and a second use of received content, is a copy. Stamps in the index have no ctime yet: `stamp` adds it.
    """
    os.makedirs(root, mode=0o755)
    os.chmod(root, 0o755)
    rows: dict[str, layout.Row] = {}
    used: set[str] = set()
    total = len(wanted)
    trees: dict[str, Tree] = {}
    with Tree(root) as out:
        try:
            for count, (path, kind, mode, size, digest) in enumerate(wanted):
                if count % 512 == 0:
                    if session.aborted():
                        raise Failure("interrupted", "the push was cancelled while the new generation was built")
                    session.progress("stage", count, total, "files", path)
                at, base = out.parent(path, create=True)
                source = sources.find(path, digest) if kind == "f" else None
                if kind == "l":
                    os.symlink(digest, base, dir_fd=at)
                elif source is not None and source[1][2] == mode and _link(trees, source, at, base):
                    entry = source[1]
                    rows[path] = ("f", mode, size, digest, entry[4], entry[5], entry[6], None)
                    continue
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


def stamp(index: layout.Index, entries: list[Entry]) -> None:
    """Complete the stamps of an index from a walk of its tree that was just proved."""
    for entry in entries:
        row = index.rows[entry[0]]
        index.rows[entry[0]] = (*row[:4], entry[4], entry[5], entry[6], entry[7])


def _tree(trees: dict[str, Tree], root: str) -> Tree:
    if root not in trees:
        trees[root] = Tree(root)
    return trees[root]


def _link(trees: dict[str, Tree], source: Source, at: int, base: str) -> bool:
    source_at, source_base = _tree(trees, source[0]).parent(source[1][0])
    try:
        os.link(source_base, base, src_dir_fd=source_at, dst_dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:
        raise Failure("stale-plan", "`%s` went away on the host while the push was prepared" % source[1][0]) from None
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
    made: set[str] = set()
    for path, row in index.rows.items():
        if not path.endswith(".py") or row[0] != "f":
            continue
        source = sources.by_path.get(path)
        if source is None or source[2][5] != row[5]:
            continue
        directory = path.rpartition("/")[0]
        cache = os.path.join(source[1], directory, "__pycache__")
        if cache not in made:
            made.add(cache)
            try:
                names = os.listdir(cache)
            except OSError:
                continue
            target = os.path.join(root, directory, "__pycache__")
            os.mkdir(target)
            for pyc in names:
                stem = pyc.split(".", 1)[0]
                peer = index.rows.get((directory + "/" if directory else "") + stem + ".py")
                theirs = sources.by_path.get((directory + "/" if directory else "") + stem + ".py")
                if pyc.endswith(".pyc") and peer and theirs and theirs[2][5] == peer[5]:
                    try:
                        os.link(os.path.join(cache, pyc), os.path.join(target, pyc))
                    except OSError:
                        continue


def consume(found: layout.Layout, root: str, index: layout.Index, used: set[str]) -> None:
    """Drop what was received, now that it is in its place; that moves the ctime of the files, so their stamps are renewed."""
    layout.remove(found.incoming)
    with Tree(root) as tree:
        for path, row in index.rows.items():
            if row[0] == "f" and row[3] in used:
                info = tree.stat(path)
                index.rows[path] = (*row[:4], info.st_dev, info.st_ino, info.st_mtime_ns, info.st_ctime_ns)


def discard(found: layout.Layout, everything: bool) -> None:
    """Remove partial trees; with `everything`, also the received content that a resumed push could have used."""
    for path in found.partials():
        layout.remove(path)
    if everything and os.path.isdir(found.incoming):
        shutil.rmtree(found.incoming)


def publish(found: layout.Layout, number: int, index: layout.Index, info: dict[str, Any]) -> None:
    """Make the proved tree of `number` a generation, durably: everything on disk first, then the record that makes it count."""
    index.save(os.path.join(found.directory(number), "index"))
    durable.sync_file_system(found.directory(number))
    durable.sync_directory(found.generations)
    found.write_info(number, info)
