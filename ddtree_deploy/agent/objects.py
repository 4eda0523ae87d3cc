"""Objects on the move: many small files share a frame, a large one has its own; each is renamed only after its hash is right."""

from __future__ import annotations

import hashlib
import os

from ddtree_deploy.agent import frames, zstd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import Any, TypeVar

    #: A tuple that starts with digest and size.
    Item = TypeVar("Item", bound=tuple[Any, ...])

#: Files below this travel together, and are read and written in one call each.
SMALL = 128 << 10
BATCH = 1 << 20
_NONE: Mapping[str, int] = {}


def batches(items: Iterable[Item], packed: Mapping[str, int] = _NONE) -> Iterator[list[Item]]:
    """Group `(digest, size, ...)` items into frames: runs of small ones up to `BATCH` bytes, large ones alone.

    `packed` maps the digest of an object that travels compressed to its size on the wire.
    """
    group: list[Item] = []
    total = 0
    for item in items:
        size = packed.get(item[0], item[1])
        if size >= SMALL:
            yield [item]
            continue
        if group and (total + size > BATCH or len(group) >= 512):
            yield group
            group, total = [], 0
        group.append(item)
        total += size
    if group:
        yield group


def send_batch(
    batch: list[Item],
    header: dict[str, Any],
    open_item: Callable[[Item], int],
    write: Callable[[bytes], object],
    pipe_fd: int | None = None,
    packed: Mapping[str, int] = _NONE,
) -> list[str]:
    """Send one frame of objects; return the digests whose file did not have the promised size (zeros were sent instead).

    `open_item(item)` returns a descriptor; `write(bytes)` writes all of them; with `pipe_fd`, large files go by sendfile(2).
    An object in `packed` is announced with a third number, its compressed size, and its descriptor gives compressed bytes.
    """
    short: list[str] = []
    sizes = [packed.get(item[0], item[1]) for item in batch]
    rows = [[*item[:2], packed[item[0]]] if item[0] in packed else list(item[:2]) for item in batch]
    head = frames.encode({**header, "objects": rows}, sum(sizes))
    if len(batch) > 1 or sizes[0] < SMALL:
        parts = [head]
        for item, size in zip(batch, sizes):
            data = _read_small(open_item, item, size)
            if len(data) != size:
                short.append(item[0])
                data = data[:size].ljust(size, b"\0")
            parts.append(data)
        write(b"".join(parts))
        return short
    item = batch[0]
    write(head)
    left = sizes[0]
    fd = None
    try:
        fd = open_item(item)
    except OSError:
        pass
    try:
        offset = 0
        while fd is not None and left:
            if pipe_fd is not None:
                count = os.sendfile(pipe_fd, fd, offset, min(left, 4 << 20))
                if not count:
                    break
                write(b"")  # a sign that the line takes something
            else:
                data = os.pread(fd, min(left, frames.CHUNK), offset)
                if not data:
                    break
                write(data)
                count = len(data)
            offset += count
            left -= count
    finally:
        if fd is not None:
            os.close(fd)
    if left:
        short.append(item[0])
        zeros = bytes(frames.CHUNK)
        while left:
            write(zeros[: min(left, len(zeros))])
            left -= min(left, len(zeros))
    return short


def _read_small(open_item: Callable[[Item], int], item: Item, size: int) -> bytes:
    try:
        fd = open_item(item)
    except OSError:
        return b""
    try:
        return os.pread(fd, size + 1, 0)
    finally:
        os.close(fd)


def valid_digest(text: object) -> bool:
    return isinstance(text, str) and len(text) == 64 and all(c in "0123456789abcdef" for c in text)


def _is_row(item: list[Any]) -> bool:
    """Tell whether `item` is `[digest, size]` or `[digest, size, compressed size]`."""
    return len(item) in (2, 3) and valid_digest(item[0]) and all(type(number) is int and number >= 0 for number in item[1:])


class Landing:
    """Receive objects into a directory; `place(digest, temporary)` publishes one whose hash is right.

    `bad` collects the digests whose bytes were something else; nothing of those is kept. After `fail()` the rest of the
    stream is read and dropped, so that the connection stays in step.
    """

    def __init__(self, directory: str, place: Callable[[str, str], object], expected: dict[str, int] | None = None) -> None:
        self.directory = directory
        self.place = place
        self.expected = expected
        self.bad: list[str] = []
        self.received = 0
        self.bytes = 0
        self.error: OSError | None = None
        self._buffer = bytearray(frames.CHUNK)
        self._count = 0

    def receive(self, reader: frames.Reader, header: dict[str, Any]) -> None:
        """Take one frame of objects. Raises ProtocolError when it is malformed; file-system errors end up in `error`."""
        items = header.get("objects")
        if not isinstance(items, list) or not all(isinstance(item, list) and _is_row(item) for item in items):
            raise frames.ProtocolError("a frame of objects whose list is malformed")
        if sum(item[-1] for item in items) != reader.left:
            raise frames.ProtocolError("a frame of objects whose sizes do not add up")
        for digest, size, *packed in items:
            if self.expected is not None and self.expected.get(digest) != size:
                raise frames.ProtocolError("an object that nobody asked for: %s" % digest)
            self._one(reader, digest, size, packed[0] if packed else None)

    def _one(self, reader: frames.Reader, digest: str, size: int, packed: int | None) -> None:
        hasher = hashlib.sha256()
        self._count += 1
        temporary = os.path.join(self.directory, ".tmp-%d-%d-%d" % (os.getpid(), id(self) & 0xFFFFFF, self._count))
        fd = None
        try:
            if self.error is None:
                try:
                    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                except OSError as error:
                    self.error = error
            views = reader.chunks(size, self._buffer) if packed is None else self._unpacked(reader, size, packed)
            for view in views:
                if fd is None or self.error is not None:
                    continue
                hasher.update(view)
                try:
                    frames.write_all(fd, view)
                except OSError as error:
                    self.error = error
            if self.error is None:
                self._publish(digest, size, hasher.hexdigest(), temporary)
        finally:
            if fd is not None:
                os.close(fd)
                try:
                    os.unlink(temporary)
                except FileNotFoundError:
                    pass

    def _unpacked(self, reader: frames.Reader, size: int, packed: int) -> Iterator[memoryview]:
        """Yield an object's own bytes out of `packed` compressed ones, at most `size`; a damaged stream ends early."""
        stream = zstd.Stream()
        good = True
        try:
            for view in reader.chunks(packed, self._buffer):
                try:
                    for piece in stream.feed(view) if good else ():
                        size -= len(piece)
                        if size < 0:
                            raise zstd.Damaged("more bytes than were promised")
                        yield piece
                except zstd.Damaged:
                    good = False
        finally:
            stream.close()

    def _publish(self, digest: str, size: int, actual: str, temporary: str) -> None:
        if actual != digest:
            self.bad.append(digest)
            return
        try:
            self.place(digest, temporary)
        except OSError as error:
            self.error = error
            return
        if self.expected is not None:
            del self.expected[digest]  # once is enough: whoever sends it for ever would be received for ever
        self.received += 1
        self.bytes += size
