"""A store that reads what a push needs once: for all hosts of a fleet, and while a connection is being made."""

from __future__ import annotations

import threading
from collections.abc import Collection

from ddtree_deploy.models import Manifest
from ddtree_deploy.store import Store


class ReadOnce(Store):
    """A store whose manifests and trees are decoded, and their objects looked for, once for all threads that ask."""

    def __init__(self, store: Store) -> None:
        super().__init__(store.root)
        self.remembers = store.remembers
        self._reading = threading.Lock()
        self._manifests: dict[str, Manifest] = {}
        self._absent: dict[int, list[str]] = {}
        self._trees: dict[str, Manifest] = {}

    def manifest(self, name: str) -> Manifest:
        """Return a snapshot's manifest (see Store); all threads get the same one."""
        with self._reading:
            if name not in self._manifests:
                self._manifests[name] = super().manifest(name)
            return self._manifests[name]

    def absent(self, manifest: Manifest, stored: Collection[str] | None = None) -> list[str]:
        """Return the digests of a snapshot that the store does not have, as they were when it was asked first."""
        with self._reading:
            if id(manifest) not in self._absent:
                self._absent[id(manifest)] = super().absent(manifest, stored)
            return self._absent[id(manifest)]

    def tree(self, result: str) -> Manifest:
        """Return the tree that a push resulted in (see Store)."""
        with self._reading:
            if result not in self._trees:
                self._trees[result] = super().tree(result)
            return self._trees[result]

    def read_ahead(self, snapshot_id: str) -> bool:
        """Read what a push of that snapshot will need, unless there has been a push since it was taken: then it may need nothing.

        Of the trees that hosts have, the one of the newest push is the best guess. A wrong guess costs time, and nothing else.
        Tells whether anything was read.
        """
        trees = [(path.stat().st_mtime, path.name) for path in (self.root / "trees").glob("*")]
        newest = max(trees, default=(0.0, ""))
        if newest[0] > (self.references / f"{snapshot_id}.json").stat().st_mtime:
            return False
        self.absent(self.manifest(snapshot_id))
        if newest[1]:
            self.tree(newest[1])
        return True
