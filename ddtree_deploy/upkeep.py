"""Keep the store healthy: hash it, drop what no snapshot needs, give objects compressed twins (`ddtree-deploy cache ...`)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass

from ddtree_deploy.agent import durable
from ddtree_deploy.errors import IntegrityFailure
from ddtree_deploy.events import Emit, Progress, ignore
from ddtree_deploy.store import Store


@dataclass(frozen=True, slots=True)
class StoreReport:
    """What `cache verify` found: `bad` digests went to quarantine, `missing` are (snapshot, digest) pairs."""

    objects: int
    bytes: int
    bad: tuple[str, ...]
    missing: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Pruned:
    """What `cache prune` removed (or would remove)."""

    snapshots: tuple[str, ...]
    objects: int
    bytes: int


def verify(store: Store, emit: Emit = ignore) -> StoreReport:
    """Hash every object; quarantine bad ones; name what snapshots lack."""
    bad: list[str] = []
    digests = sorted(store.digests())
    total = sum(store.path(digest).stat().st_size for digest in digests)
    done = 0
    for digest in digests:
        size = store.path(digest).stat().st_size
        try:
            store.check(digest)
        except IntegrityFailure:
            bad.append(digest)
        done += size
        emit(Progress("store", "verify", done, total, "bytes", digest[:12]))
    missing: list[tuple[str, str]] = []
    stored = store.digests()
    for ref in store.refs():
        try:
            lacking = store.absent(store.manifest(ref.id), stored)
        except IntegrityFailure:
            lacking = ["manifest"]
        store.mark(ref.id, not lacking)
        missing += [(ref.id, what) for what in lacking]
    return StoreReport(len(digests), total, tuple(bad), tuple(missing))


def prune(store: Store, keep: int | None = None, dry_run: bool = False) -> Pruned:
    """Drop all but the newest `keep` unlabelled snapshots (None: keep all), then objects that no snapshot needs."""
    with store.lock("cache prune"):
        unlabelled = [ref for ref in store.refs() if not ref.label]
        gone = [] if keep is None else [ref.id for ref in unlabelled[keep:]]
        kept = [ref for ref in store.refs() if ref.id not in gone]
        needed = {entry.digest for ref in kept for entry in store.manifest(ref.id).files if entry.kind == "f"}
        spare = sorted(store.digests() - needed)
        size = sum(store.path(digest).stat().st_size for digest in spare)
        if not dry_run:
            for name in gone:
                store.forget(name)
            for digest in spare:
                store.path(digest).unlink(missing_ok=True)
                store.packed_path(digest).unlink(missing_ok=True)
            _clear(store, {ref.id for ref in kept})
        return Pruned(tuple(gone), len(spare), size)


def _clear(store: Store, kept: Collection[str]) -> None:
    """Remove what runs that died left behind: received objects, half-written files, manifests without a record."""
    for path in [*store.temporary.iterdir(), *store.quarantine.iterdir(), *store.root.rglob(".tmp-*")]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for path in store.snapshots.iterdir():
        if path.stem not in kept:
            path.unlink(missing_ok=True)


def compress(store: Store, emit: Emit = ignore, level: int = 3) -> tuple[int, int, int]:
    """Give every object that shrinks by a tenth or more a zstandard twin; return (twins made, their raw bytes, their bytes).

    Costs about 10 CPU seconds per GB, once. An object that does not shrink gets an empty twin, so that it is not tried again.
    """
    from concurrent.futures import ThreadPoolExecutor

    todo = sorted(digest for digest in store.digests() if not store.packed_path(digest).exists())
    sizes = {digest: store.path(digest).stat().st_size for digest in todo}
    total, done, made, raw, small = sum(sizes.values()), 0, 0, 0, 0
    with store.lock("cache compress", shared=True), ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for digest, size in zip(todo, pool.map(lambda name: _compress(store, name, level), todo), strict=True):
            done += sizes[digest]
            made, raw, small = made + bool(size), raw + (sizes[digest] if size else 0), small + size
            emit(Progress("store", "compress", done, total, "bytes", digest[:12]))
    durable.sync_file_system(os.fspath(store.root))
    return made, raw, small


def _compress(store: Store, digest: str, level: int) -> int:
    import zstandard

    target = store.packed_path(digest)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = store.temporary / f"zst-{os.getpid()}-{digest}"
    with store.path(digest).open("rb") as source, temporary.open("wb") as sink:
        whole, small = zstandard.ZstdCompressor(level=level).copy_stream(source, sink)
        if small > 0.9 * whole:
            sink.truncate(0)
            small = 0
    temporary.rename(target)
    return int(small)
