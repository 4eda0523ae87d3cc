"""Layers as tar streams that depend on nothing but their content: same files, same bytes, on every machine and in every year."""

from __future__ import annotations

import hashlib
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from ddtree_deploy.errors import IntegrityFailure
from ddtree_deploy.export.groups import Group
from ddtree_deploy.models import FileEntry
from ddtree_deploy.store import Store

#: 1980-01-01, the first moment that a zip file can hold: what repacks these files as wheels or eggs must not fail.
MTIME = 315532800
CHUNK = 1 << 20
LAYER = "application/vnd.oci.image.layer.v1.tar"
MEDIA_TYPES = {"none": LAYER, "gzip": f"{LAYER}+gzip", "zstd": f"{LAYER}+zstd"}


@dataclass(frozen=True, slots=True)
class Written:
    """A layer on the disk: digest and size as stored, and the digest of the tar inside (image-spec "DiffID")."""

    digest: str
    diff_id: str
    size: int


class _Codec(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...
    def flush(self) -> bytes: ...


class _Plain:
    """What is not compressed has the same bytes wherever it is made; compressors promise that only within one version."""

    def compress(self, data: bytes, /) -> bytes:
        return data

    def flush(self) -> bytes:
        return b""


def _codec(compression: str) -> _Codec:
    if compression == "gzip":
        return zlib.compressobj(6, zlib.DEFLATED, 31)  # 31: a gzip header, without time and name
    if compression == "zstd":
        import zstandard

        codec: _Codec = zstandard.ZstdCompressor(level=3).compressobj()
        return codec
    return _Plain()


class _Sink:
    """Write a tar through a compressor, and know the digests on both sides of it."""

    def __init__(self, file: BinaryIO, compression: str) -> None:
        self._file = file
        self._codec = _codec(compression)
        self._inner, self._outer = hashlib.sha256(), hashlib.sha256()
        self._one = compression == "none"
        self._size = 0

    def write(self, data: bytes) -> None:
        self._inner.update(data)
        self._out(self._codec.compress(data))

    def _out(self, data: bytes) -> None:
        if not self._one:
            self._outer.update(data)
        self._size += len(data)
        self._file.write(data)

    def close(self) -> Written:
        self._out(self._codec.flush())
        inner = self._inner.hexdigest()
        return Written(inner if self._one else self._outer.hexdigest(), inner, self._size)


def header(name: str, kind: bytes, mode: int, size: int = 0, target: str = "") -> bytes:
    """Return the header blocks of a member (POSIX.1-2001 pax): owner 0, no names of users, one fixed time."""
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.size, info.linkname, info.mtime = kind, mode, size, target, MTIME
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _directories(paths: Iterator[str], seen: set[str]) -> Iterator[str]:
    """Yield the parents of paths that were not seen yet, outermost first."""
    for path in paths:
        at = path.find("/")
        while at != -1:
            if path[:at] not in seen:
                seen.add(path[:at])
                yield path[:at]
            at = path.find("/", at + 1)


def write_layer(file: BinaryIO, group: Group, prefix: str, store: Store, compression: str, moved: Callable[[int, str], None]) -> Written:
    """Write the layer of `group` below `prefix` (`opt/ddtree`), a chunk at a time; `moved(bytes, path)` reports progress.

    Every object is hashed on its way. Raises IntegrityFailure when one is not what its name says; it is in quarantine then.
    """
    sink, seen = _Sink(file, compression), set[str]()
    site = f"{prefix}/site-packages"
    for entry in group.files:
        path = f"{site}/{entry.path}"
        for directory in _directories(iter([path]), seen):
            sink.write(header(directory, tarfile.DIRTYPE, 0o755))
        if entry.kind == "l":
            sink.write(header(path, tarfile.SYMTYPE, 0o777, target=entry.digest))
            continue
        sink.write(header(path, tarfile.REGTYPE, entry.mode, entry.size))
        _copy(store, entry, sink, moved)
        sink.write(bytes(-entry.size % tarfile.BLOCKSIZE))
    for name, text in group.scripts:
        path = f"{prefix}/bin/{name}"
        for directory in _directories(iter([path]), seen):
            sink.write(header(directory, tarfile.DIRTYPE, 0o755))
        sink.write(header(path, tarfile.REGTYPE, 0o755, len(text)) + text + bytes(-len(text) % tarfile.BLOCKSIZE))
    sink.write(bytes(2 * tarfile.BLOCKSIZE))
    return sink.close()


def _copy(store: Store, entry: FileEntry, sink: _Sink, moved: Callable[[int, str], None]) -> None:
    digest, left = hashlib.sha256(), entry.size
    fd = store.open_object(entry.digest)
    try:
        while data := os.read(fd, CHUNK):
            left -= len(data)
            if left < 0:
                break
            digest.update(data)
            sink.write(data)
            moved(len(data), entry.path)
    finally:
        os.close(fd)
    if left or digest.hexdigest() != entry.digest:
        store.check(entry.digest)
        raise IntegrityFailure(f"the snapshot says that `{entry.path}` has {entry.size} bytes, its object says otherwise")
