"""The content-addressed store on this machine: objects named by their sha256, snapshots that reference only stored objects.

Write order: bytes to a temporary file, hash, flush of the file system, rename to the digest, and the manifest last. A store is
therefore right at every instant; `verify` finds what a disk did to it since.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddtree_deploy import manifest as codec
from ddtree_deploy.agent import durable
from ddtree_deploy.agent.walk import hash_fd
from ddtree_deploy.errors import IntegrityFailure, IoProblem, Locked, NoSpace, UsageProblem
from ddtree_deploy.models import Manifest, SnapshotRef

if TYPE_CHECKING:
    from ddtree_deploy.ingest import Ingest


def _now() -> str:
    """Return the time in UTC (ISO 8601) with microseconds, so that of two snapshots within one second one is the newest."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def home() -> Path:
    """Return the directory that holds store and state: `DDTREE_HOME`, else the platform's data directory."""
    configured = os.environ.get("DDTREE_HOME")
    if configured:
        return Path(configured).expanduser().absolute()
    from platformdirs import user_data_path

    return user_data_path("ddtree-deploy")


class Store:
    """Objects and snapshots below one directory; safe for several processes at once.

    With `remembers` unset (a dry run), looks at hosts leave no stamps here.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.remembers = True
        self.objects = root / "objects"
        self.snapshots = root / "snapshots"
        self.references = root / "refs"
        self.quarantine = root / "quarantine"
        self.temporary = root / "tmp"

    @classmethod
    def open(cls, at: Path | None = None) -> Store:
        """Open the store, making it when it is not there. Raises IoProblem when it can not be written."""
        store = cls((at or home()) / "store")
        with store._told():
            for directory in (store.objects, store.snapshots, store.references, store.quarantine, store.temporary):
                directory.mkdir(parents=True, exist_ok=True)
            if not (store.root / "store.json").exists():
                durable.write_json(os.fspath(store.root / "store.json"), {"format": 1, "id": uuid.uuid4().hex})
        form = (durable.read_json(os.fspath(store.root / "store.json")) or {}).get("format")
        if form != 1:
            raise IntegrityFailure(f"the store `{store.root}` has format {form!r}, this version reads 1")
        return store

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Turn what a disk refuses into NoSpace or IoProblem."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise NoSpace(
                    f"no space left in the store `{self.root}`", mend="`ddtree-deploy cache prune`, or set DDTREE_HOME to a larger disk"
                ) from error
            raise IoProblem(
                f"the store `{self.root}` can not be written: {error.strerror}", mend="set DDTREE_HOME to a writable directory"
            ) from error

    # objects

    def path(self, digest: str) -> Path:
        return self.objects / digest[:2] / digest

    def digests(self) -> set[str]:
        """Return the digests of all objects."""
        found: set[str] = set()
        for shard in os.scandir(self.objects):
            if len(shard.name) == 2:
                found.update(entry.name for entry in os.scandir(shard.path) if len(entry.name) == 64)
        return found

    def size(self) -> tuple[int, int]:
        """Return the number of objects and their bytes."""
        sizes = [entry.stat().st_size for shard in os.scandir(self.objects) for entry in os.scandir(shard.path)]
        return len(sizes), sum(sizes)

    def open_object(self, digest: str) -> int:
        """Return a descriptor of an object. Raises IntegrityFailure when the store does not have it."""
        try:
            return os.open(self.path(digest), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise IntegrityFailure(
                f"object `{digest[:12]}` is missing from the store", mend="take the snapshot again while its host is reachable"
            ) from None

    def read(self, digest: str) -> bytes:
        """Return an object's bytes after checking them; a bad one goes to quarantine and raises IntegrityFailure."""
        import hashlib

        with os.fdopen(self.open_object(digest), "rb") as file:
            data = file.read()
        if hashlib.sha256(data).hexdigest() != digest:
            self._quarantine(digest)
        return data

    def check(self, digest: str) -> None:
        """Hash one object; a bad one goes to quarantine and raises IntegrityFailure."""
        fd = self.open_object(digest)
        try:
            actual, _size = hash_fd(fd, bytearray(1 << 20))
        finally:
            os.close(fd)
        if actual != digest:
            self._quarantine(digest)

    def _quarantine(self, digest: str) -> None:
        self.path(digest).rename(self.quarantine / f"{digest}.{time.time_ns()}")
        raise IntegrityFailure(
            f"object `{digest[:12]}` in the store was damaged and is in quarantine",
            mend="take the snapshot again while its host is reachable: only what is missing is read",
        )

    @contextmanager
    def ingest(self, expected: Mapping[str, int]) -> Iterator[Ingest]:
        """Receive objects; they count from the end of the block on. When it raises, what arrived whole is kept all the same."""
        from ddtree_deploy.ingest import Ingest  # a push receives nothing

        with self._told():
            batch = Ingest(self.temporary, self.objects, expected)
        try:
            yield batch
        finally:
            with self._told():
                try:
                    batch.commit()
                finally:
                    batch.discard()

    # compressed twins of objects, for slow links (`upkeep.compress` makes them)

    def packed_path(self, digest: str) -> Path:
        return self.root / "packed" / digest[:2] / digest

    def packed(self, items: Iterable[tuple[str, int]]) -> dict[str, int]:
        """Return the sizes of the compressed twins of those objects that have one."""
        found: dict[str, int] = {}
        if (self.root / "packed").is_dir():
            for digest, _size in items:
                try:
                    size = self.packed_path(digest).stat().st_size
                except FileNotFoundError:
                    continue
                if size:
                    found[digest] = size
        return found

    def open_packed(self, digest: str) -> int:
        return os.open(self.packed_path(digest), os.O_RDONLY | os.O_CLOEXEC)

    # snapshots

    def add(self, manifest: Manifest, label: str, *, proof: Mapping[str, Any] | None = None) -> SnapshotRef:
        """Record a snapshot whose objects are all stored; an equal one is found again, and gets the label."""
        data = codec.encode(manifest)
        name = codec.identity(data)
        stored = self.digests()
        missing = [entry.digest for entry in manifest.files if entry.kind == "f" and entry.digest not in stored]
        if missing:
            raise IntegrityFailure(f"{len(missing)} objects of the snapshot were not stored")
        target = self.snapshots / f"{name}.json"
        with self._told():
            if not target.exists():
                durable.write_file(os.fspath(target), data, 0o444)
        ref = SnapshotRef(
            id=name,
            label=label,
            host=manifest.host,
            venv=manifest.venv,
            created=_now(),
            files=len(manifest.files),
            bytes=manifest.bytes,
            patched=sum(entry.origin == "patched" for entry in manifest.files),
        )
        old = durable.read_json(os.fspath(self.references / f"{name}.json")) or {}
        document = {**asdict(ref), "label": label or old.get("label", ""), "proof": dict(proof or old.get("proof", {}))}
        with self._told():
            durable.write_json(os.fspath(self.references / f"{name}.json"), document)
        if label:
            self._take_label_from_others(label, name)
        return self.ref(name)

    def _take_label_from_others(self, label: str, name: str) -> None:
        for path in self.references.glob("*.json"):
            document = durable.read_json(os.fspath(path))
            if document and document.get("label") == label and path.stem != name:
                durable.write_json(os.fspath(path), {**document, "label": ""})

    def refs(self) -> list[SnapshotRef]:
        """Return all snapshots, newest first."""
        found = [self.ref(path.stem) for path in self.references.glob("*.json") if (self.snapshots / path.name).exists()]
        return sorted(found, key=lambda ref: (ref.created, ref.id), reverse=True)

    def ref(self, name: str) -> SnapshotRef:
        document = durable.read_json(os.fspath(self.references / f"{name}.json"))
        if document is None:
            raise IntegrityFailure(f"snapshot `{name[:12]}` has no record in the store")
        return SnapshotRef(**{field: document[field] for field in SnapshotRef.__dataclass_fields__ if field in document})

    def mark(self, name: str, complete: bool) -> None:
        """Note in a snapshot's record whether the store has all of it, as it was just seen."""
        path = os.fspath(self.references / f"{name}.json")
        document = durable.read_json(path)
        if self.remembers and document and document.get("complete", True) != complete:
            with self._told():
                durable.write_json(path, {**document, "complete": complete})

    def proof(self, name: str) -> Mapping[str, Any]:
        """Return what was proved on the source when the snapshot was taken (import results by module)."""
        return dict((durable.read_json(os.fspath(self.references / f"{name}.json")) or {}).get("proof", {}))

    def resolve(self, text: str | None) -> str:
        """Return the id that a label, an id or a prefix of one means; None means the newest. Raises UsageProblem."""
        refs = self.refs()
        if not refs:
            raise UsageProblem("the store has no snapshots", mend="take one: `ddtree-deploy snapshot HOST`")
        if not text:
            return refs[0].id
        for ref in refs:
            if text in (ref.label, ref.id):
                return ref.id
        matches = [ref.id for ref in refs if len(text) >= 4 and ref.id.startswith(text.lower())]
        if len(matches) == 1:
            return matches[0]
        if matches:
            some = ", ".join(m[:16] for m in matches[:5])
            raise UsageProblem(f"`{text}` means {len(matches)} snapshots", mend=f"give more characters: {some}")
        import difflib

        names = [ref.label for ref in refs if ref.label] + [ref.id[:12] for ref in refs]
        near = difflib.get_close_matches(text, names, n=3, cutoff=0.5) or [ref.label or ref.id[:12] for ref in refs[:3]]
        raise UsageProblem(f"there is no snapshot `{text}`", mend="snapshots here: " + ", ".join(f"`{name}`" for name in near))

    def manifest(self, name: str) -> Manifest:
        """Return a snapshot's manifest; raise IntegrityFailure when it is missing or is not what its name says."""
        try:
            data = (self.snapshots / f"{name}.json").read_bytes()
        except FileNotFoundError:
            raise IntegrityFailure(f"manifest `{name[:12]}` is missing from the store") from None
        return codec.decode(data, expect=name)

    def absent(self, manifest: Manifest, stored: Collection[str] | None = None) -> list[str]:
        """Return the digests of a snapshot that the store does not have; `stored` are those that it has, when they are known."""
        stored = self.digests() if stored is None else stored
        return sorted({entry.digest for entry in manifest.files if entry.kind == "f" and entry.digest not in stored})

    def forget(self, name: str) -> None:
        """Drop a snapshot; its objects go with the next prune."""
        (self.references / f"{name}.json").unlink(missing_ok=True)
        (self.snapshots / f"{name}.json").unlink(missing_ok=True)

    @contextmanager
    def lock(self, what: str, *, shared: bool = False, wait: float = 30.0) -> Iterator[None]:
        """Hold the store: snapshots and pushes share it, pruning excludes them. Raises Locked after `wait` seconds."""
        with self._told():
            fd = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + wait
        try:
            while True:
                try:
                    fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        message = f"the store `{self.root}` is in use by another run, {what} waits for it"
                        raise Locked(message, mend="run it again later") from None
                    time.sleep(0.1)
            yield
        finally:
            os.close(fd)

    # what we know of hosts; may be lost at any time

    def trees(self) -> list[str]:
        """Return the results of pushes whose whole tree is remembered."""
        directory = self.root / "trees"
        return sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []

    def tree(self, result: str) -> Manifest:
        """Return the tree that a push resulted in. Raises IntegrityFailure when it is not remembered."""
        try:
            return codec.decode((self.root / "trees" / result).read_bytes())
        except FileNotFoundError:
            raise IntegrityFailure(f"the tree `{result[:12]}` is not remembered here") from None

    def remember_tree(self, result: str, tree: Manifest, keep: int = 64) -> None:
        """Remember the result of a push; the oldest beyond `keep` go. A full disk only costs a longer look next time."""
        directory = self.root / "trees"
        try:
            directory.mkdir(exist_ok=True)
            durable.write_file(os.fspath(directory / result), codec.encode(tree))
            for old in sorted(directory.iterdir(), key=lambda path: path.stat().st_mtime)[:-keep]:
                old.unlink(missing_ok=True)
        except OSError:
            pass

    def stat_cache(self, key: str) -> Path:
        """Return the file that remembers stat stamps of a host's venv."""
        import hashlib

        return self.root / "stamps" / hashlib.sha256(key.encode()).hexdigest()[:32]
