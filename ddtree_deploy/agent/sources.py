"""Where content that a new generation wants already lies on this host: in the live tree, else in another generation."""

from __future__ import annotations

import os

from ddtree_deploy.agent import layout, walk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ddtree_deploy.agent.walk import Entry

    #: The root of a tree, and its entry.
    Source = tuple[str, Entry]
    DigestOf = Callable[[Entry], str | None]

#: So many digests are looked for in the text of the other generations' indexes before those are read for good.
FEW = 64


class Sources:
    """Where wanted content already lies: `(tree root, entry of a walk)`; the live tree first, other generations when that lacks it.

    `index` is what the live generation remembers, None for a tree that is not ours.
    """

    def __init__(
        self, found: layout.Layout, live_root: str, live_entries: list[Entry], index: layout.Index | None, digest_of: DigestOf
    ) -> None:
        self.found = found
        self.entries = live_entries
        self.index = index
        self.by_path: dict[str, tuple[str, str, Entry]] = {}
        self.by_digest: dict[str, Source] = {}
        self._others: dict[str, list[tuple[str, str, layout.Row]]] | None = None
        self._texts: list[bytes] | None = None
        self._asked = 0
        rows = index.rows if index else {}
        for entry in live_entries:
            path, kind, _mode, size, dev, ino, mtime, ctime, _target, _links = entry
            if kind == "f":
                row = rows.get(path)
                # As Index.digest has it, without a call for each file.
                vouched = row is not None and row[2:3] + row[4:] == (size, dev, ino, mtime, ctime) and row[0] == "f"
                digest = row[3] if row is not None and vouched else digest_of(entry)
                if digest:
                    self.by_path[path] = (digest, live_root, entry)
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
            live = self.found.live()
            others = [number for number in reversed(self.found.numbers()) if number != live]
            indexes = {number: os.path.join(self.found.directory(number), "index") for number in others}
            if self._texts is None:
                self._texts = [layout.Index.text(file) for file in indexes.values()]
            # A few new files are nowhere: to know that, no index has to be parsed.
            self._asked += 1
            if self._asked <= FEW and not any(digest.encode() in text for text in self._texts):
                return None
            self._others = {}
            for number, file in indexes.items():
                index, root = layout.Index.load(file), self.found.tree(number)
                for path, row in (index.rows if index else {}).items():
                    if row[0] == "f":
                        self._others.setdefault(row[3], []).append((root, path, row))
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
    index = None if live is None else layout.Index.load(os.path.join(found.directory(live), "index"))
    return Sources(found, found.site if live is None else found.tree(live), live_entries, index, _by_stamps(vouch))


def _by_stamps(vouch: list[list[Any]]) -> DigestOf:
    stamps = {row[0]: (tuple(row[1:6]), row[6]) for row in vouch}

    def digest_of(entry: Entry) -> str | None:
        known = stamps.get(entry[0])
        return known[1] if known is not None and known[0] == walk.stamp(entry) else None

    return digest_of


def add_base(sources: Sources, root: str, vouch: list[list[Any]]) -> None:
    """Let another venv of the host (`push --create --base`) be a source too, by the stamps that the controller vouches for."""
    sources.add_tree(root, walk.walk(root), _by_stamps(vouch))
