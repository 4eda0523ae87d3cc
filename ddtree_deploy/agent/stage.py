"""Build a new generation beside the live one: find what is already here, receive the rest, link or write each file."""

import os
import shutil

from ddtree_deploy.agent import durable, layout, objects, walk
from ddtree_deploy.agent.failure import Failure
from ddtree_deploy.agent.paths import HostilePath, Tree, below, parse, parse_link

MAX_FILES = 2_000_000
MODES = (0o644, 0o755)


def parse_result(rows):
    """Return the wanted files `[(path, kind, mode, size, digest)]` after checking every one; raise Failure(integrity) with all faults.

    The agent trusts no controller: paths stay below the generation, links resolve inside it, modes are 0644 or 0755.
    """
    if not isinstance(rows, list) or len(rows) > MAX_FILES:
        raise Failure("integrity", "the manifest is not a list of at most %d files" % MAX_FILES)
    faults, out, seen, links = [], [], set(), set()
    for row in rows:
        try:
            path, kind, mode, size, digest = row
            parse(path)
            if path in seen:
                raise HostilePath("a path that is named twice: %r" % path)
            seen.add(path)
            if kind == "l":
                parse_link(path, digest)
                links.add(path)
            elif kind != "f":
                raise HostilePath("an entry that is neither a file nor a link: %r" % path)
            elif not objects.valid_digest(digest) or not isinstance(size, int) or not 0 <= size < 1 << 50 or mode not in MODES:
                raise HostilePath("a file with a malformed digest, size or mode: %r" % path)
            out.append((path, kind, mode, size, digest))
        except HostilePath as error:
            faults.append(str(error))
        except (TypeError, ValueError):
            faults.append("a malformed entry: %r" % (row,))
    for path, *_rest in out:
        try:
            below(links, path)
            at = path.rfind("/")
            if at != -1 and path[:at] in seen and path[:at] not in links:
                raise HostilePath("a path below a file: %r" % path)
        except HostilePath as error:
            faults.append(str(error))
    if faults:
        raise Failure("integrity", "the manifest is malformed or hostile, %d faults" % len(faults), causes=faults[:20])
    return sorted(out)


class Sources:
    """Where wanted content already lies: `{digest: (tree root, path, size, mode)}`, from the indexes and what was vouched for."""

    def __init__(self):
        self.by_digest = {}
        self.by_path = {}

    def add_tree(self, root, entries, digest_of, live=False):
        for entry in entries:
            if entry[1] != "f":
                continue
            digest = digest_of(entry)
            if digest:
                self.by_digest.setdefault(digest, (root, entry))
                if live:
                    self.by_path[entry[0]] = (digest, root, entry)

    def find(self, path, digest):
        same = self.by_path.get(path)
        if same is not None and same[0] == digest:
            return same[1], same[2]
        return self.by_digest.get(digest)


def gather(found, live_entries, vouch):
    """Return the Sources of a venv: the live tree first, then the other generations, whose files are found by stat alone."""
    sources = Sources()
    live = found.live()
    stamps = {row[0]: (tuple(row[1:6]), row[6]) for row in vouch}

    def vouched(entry):
        known = stamps.get(entry[0])
        return known[1] if known is not None and known[0] == walk.stamp(entry) else None

    root = found.site if live is None else found.tree(live)
    index = None if live is None else layout.Index.load(os.path.join(found.directory(live), "index"))
    known = index.digest if index else lambda entry: None
    sources.add_tree(root, live_entries, lambda entry: known(entry) or vouched(entry), live=True)
    for number in sorted(found.numbers(), reverse=True):
        index = None if number == live else layout.Index.load(os.path.join(found.directory(number), "index"))
        if index is not None:
            sources.add_tree(found.tree(number), walk.walk(found.tree(number)), index.digest)
    return sources


def add_base(sources, root, vouch):
    """Let another venv of the host (`push --create --base`) be a source too, by the stamps that the controller vouches for."""
    stamps = {row[0]: (tuple(row[1:6]), row[6]) for row in vouch}
    entries = walk.walk(root)
    sources.add_tree(root, entries, lambda e: stamps[e[0]][1] if e[0] in stamps and stamps[e[0]][0] == walk.stamp(e) else None)


def missing(wanted, sources, found):
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


def build(session, found, root, wanted, sources):
    """Make the tree `root` hold exactly `wanted`; return its Index and the received digests that it uses.

    Raises Failure when content is missing or moved.

    Unchanged files are hard-linked (tidy.py gives small ones copies of their own later); a file whose mode differs from its
    source's, and a second use of received content, is a copy.
    """
    os.makedirs(root, mode=0o755)
    os.chmod(root, 0o755)
    rows, used = {}, set()
    total = len(wanted)
    trees = {}
    with Tree(root) as out:
        try:
            for count, (path, kind, mode, size, digest) in enumerate(wanted):
                if count % 512 == 0:
                    if session.aborted():
                        raise Failure("interrupted", "the push was cancelled while the new generation was built")
                    session.progress("stage", count, total, "files", path)
                at, base = out.parent(path, create=True)
                if kind == "l":
                    os.symlink(digest, base, dir_fd=at)
                    info = os.stat(base, dir_fd=at, follow_symlinks=False)
                    rows[path] = ("l", mode, 0, digest, info.st_dev, info.st_ino, info.st_mtime_ns, info.st_ctime_ns)
                    continue
                source = sources.find(path, digest)
                if source is not None:
                    tree = trees.get(source[0]) or trees.setdefault(source[0], Tree(source[0]))
                    _reuse(tree, source[1], at, base, mode)
                else:
                    _take(found, digest, size, at, base, mode, digest in used)
                    used.add(digest)
                info = os.stat(base, dir_fd=at, follow_symlinks=False)
                rows[path] = ("f", mode, info.st_size, digest, info.st_dev, info.st_ino, info.st_mtime_ns, info.st_ctime_ns)
                if info.st_size != size:
                    raise Failure("stale-plan", "`%s` changed on the host while the push was prepared" % path)
        finally:
            for tree in trees.values():
                tree.close()
    return layout.Index(rows), used


def _reuse(tree, entry, at, base, mode):
    source_at, source_base = tree.parent(entry[0])
    info = os.stat(source_base, dir_fd=source_at, follow_symlinks=False)
    if (info.st_ino, info.st_size, info.st_mtime_ns) != (entry[5], entry[3], entry[6]):
        raise Failure("stale-plan", "`%s` changed on the host while the push was prepared" % entry[0])
    if info.st_mode & 0o777 == mode and entry[9] < 60000:
        try:
            os.link(source_base, base, src_dir_fd=source_at, dst_dir_fd=at, follow_symlinks=False)
            return
        except OSError as error:
            if error.errno not in (1, 18, 31):  # EPERM (protected_hardlinks), EXDEV, EMLINK: copy instead
                raise
    fd = tree.open(entry[0])
    try:
        _copy(fd, at, base, mode, (entry[6], entry[6]))
    finally:
        os.close(fd)


def _take(found, digest, size, at, base, mode, again):
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


def _copy(fd, at, base, mode, times=None):
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


def keep_bytecode(root, index, sources):
    """Link the bytecode of reused sources into the new tree, so that the first import does not compile everything again.

    Python replaces a .pyc by rename and checks it against the source's mtime and size, so sharing one is safe (PEP 3147).
    """
    made = set()
    for path, row in index.rows.items():
        if not path.endswith(".py") or row[0] != "f":
            continue
        source = sources.by_path.get(path)
        if source is None or source[2][5] != row[5]:
            continue
        directory, _, name = path.rpartition("/")
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


def consume(found, root, index, used):
    """Drop what was received, now that it is in its place; that moves the ctime of the files, so their stamps are renewed."""
    layout.remove(found.incoming)
    with Tree(root) as tree:
        for path, row in index.rows.items():
            if row[0] == "f" and row[3] in used:
                info = tree.stat(path)
                index.rows[path] = (*row[:4], info.st_dev, info.st_ino, info.st_mtime_ns, info.st_ctime_ns)


def discard(found, everything):
    """Remove partial trees; with `everything`, also the received content that a resumed push could have used."""
    for path in found.partials():
        layout.remove(path)
    if everything and os.path.isdir(found.incoming):
        shutil.rmtree(found.incoming)


def publish(found, number, index, info):
    """Make the proved tree of `number` a generation, durably: everything on disk first, then the record that makes it count."""
    index.save(os.path.join(found.directory(number), "index"))
    durable.sync_file_system(found.directory(number))
    durable.sync_directory(found.generations)
    found.write_info(number, info)
