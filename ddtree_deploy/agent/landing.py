"""Objects on the way in: none gets its name before its hash is right."""

from __future__ import annotations

import ctypes
import hashlib
import os
import queue
import threading

from ddtree_deploy.agent import durable, frames, objects, zstd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PIECE = 1 << 20


class Buffer:
    """Memory for a piece of an object: `view` for Python, `at` for C."""

    def __init__(self) -> None:
        self._raw = ctypes.create_string_buffer(PIECE)
        self.view = memoryview(self._raw).cast("B")
        self.at = ctypes.addressof(self._raw)


class _Behind:
    """Hash and write the pieces of one object while the caller reads the next: hashlib, read(2) and write(2) leave the GIL."""

    def __init__(self, fd: int, buffers: tuple[Buffer, ...]) -> None:
        self.fd = fd
        self.error: Exception | None = None
        self._hasher = hashlib.sha256()
        self._full: queue.SimpleQueue[tuple[Buffer, int] | None] = queue.SimpleQueue()
        self._free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        for buffer in buffers:
            self._free.put(buffer)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def free(self) -> Buffer:
        return self._free.get()

    def write(self, buffer: Buffer, size: int) -> None:
        self._full.put((buffer, size))

    def _run(self) -> None:
        for buffer, size in iter(self._full.get, None):
            if self.error is None:
                try:
                    self._hasher.update(buffer.view[:size])
                    frames.write_all(self.fd, buffer.view[:size])
                except Exception as error:  # whatever it is, the other thread must not wait for a buffer for ever
                    self.error = error
            self._free.put(buffer)

    def finish(self) -> str:
        """Wait for the last piece; return the digest."""
        self._full.put(None)
        self._thread.join()
        # The flush that comes before a generation counts then finds little left to do.
        durable.begin_flush(self.fd)
        return self._hasher.hexdigest()


class Landing:
    """Receive objects into a directory, under their digests.

    A kill can leave a part of a small one under its name: who resumes hashes what is there (`stage.missing`).

    `bad` collects the digests whose bytes were something else; nothing of those is kept. After the first file-system error, which
    ends up in `error`, the rest of the stream is read and dropped, so that the connection stays in step.
    """

    def __init__(self, directory: str, expected: dict[str, int] | None = None, mode: int = 0o644) -> None:
        self.directory = directory
        self.expected = expected
        self.mode = mode
        self.bad: list[str] = []
        self.received = 0
        self.bytes = 0
        self.error: OSError | None = None
        self._buffers = (Buffer(), Buffer())
        self._packed = Buffer()
        self._stream: zstd.Stream | None = None

    def receive(self, reader: frames.Reader, header: dict[str, Any]) -> None:
        """Take one frame of objects. Raises ProtocolError when it is malformed; file-system errors end up in `error`."""
        items = header.get("objects")
        if not isinstance(items, list) or not all(isinstance(item, list) and objects.is_row(item) for item in items):
            raise frames.ProtocolError("a frame of objects whose list is malformed")
        if sum(item[-1] for item in items) != reader.left:
            raise frames.ProtocolError("a frame of objects whose sizes do not add up")
        for digest, size, *packed in items:
            if self.expected is not None and self.expected.get(digest) != size:
                raise frames.ProtocolError("an object that nobody asked for: %s" % digest)
            take = self._small if size <= PIECE and (packed or [size])[0] <= PIECE else self._large
            if take(reader, digest, size, packed[0] if packed else None):
                self.received += 1
                self.bytes += size
                if self.expected is not None:
                    del self.expected[digest]  # once is enough: whoever sends it for ever would be received for ever

    def _small(self, reader: frames.Reader, digest: str, size: int, packed: int | None) -> bool:
        """Take an object that is hashed whole before there is a file; tell whether it is there now."""
        first, second = self._buffers
        if packed is None:
            view = first.view[:size]
            reader.fill(view)
        else:
            reader.fill(self._packed.view[:packed])
            try:
                stream = self._begin(packed)
                count = stream.step(first)
                view = first.view[: count + stream.step(second)]
            except zstd.Damaged:
                view = first.view[:0]
        if self.error is not None:
            return False
        if len(view) != size or hashlib.sha256(view).hexdigest() != digest:
            self.bad.append(digest)
            return False
        return self._write(digest, view)

    def _write(self, digest: str, view: memoryview) -> bool:
        path = os.path.join(self.directory, digest)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, self.mode)
            try:
                frames.write_all(fd, view)
            except BaseException:
                os.unlink(path)
                raise
            finally:
                os.close(fd)
        except OSError as error:
            self.error = error
        return self.error is None

    def _large(self, reader: frames.Reader, digest: str, size: int, packed: int | None) -> bool:
        """Take an object piece by piece into a temporary file; tell whether it is there now."""
        temporary = os.path.join(self.directory, ".tmp-%s" % digest)
        fd = sink = None
        try:
            if self.error is None:
                fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, self.mode)
                sink = _Behind(fd, self._buffers)
        except OSError as error:
            self.error = error
        try:
            if sink is None:
                reader.skip(size if packed is None else packed)
                return False
            try:
                if packed is None:
                    _raw(reader, size, sink)
                else:
                    self._unpack(reader, size, packed, sink)
            finally:
                actual = sink.finish()
            if sink.error is not None:
                raise sink.error
            if actual != digest:
                self.bad.append(digest)
                return False
            os.rename(temporary, os.path.join(self.directory, digest))
            return True
        except OSError as error:
            self.error = error
            return False
        finally:
            if fd is not None:
                os.close(fd)
                if os.path.lexists(temporary):
                    os.unlink(temporary)

    def _begin(self, size: int) -> zstd.Stream:
        """Return the decompressor, at the start of a stream whose first `size` bytes are in the buffer for packed ones."""
        if self._stream is None:
            self._stream = zstd.Stream()
        self._stream.begin()
        self._stream.feed(self._packed, size)
        return self._stream

    def _unpack(self, reader: frames.Reader, size: int, packed: int, sink: _Behind) -> None:
        """Decompress an object, at most `size` bytes of it; a damaged stream ends early."""
        stream = self._begin(0)
        while packed:
            part = min(packed, PIECE)
            reader.fill(self._packed.view[:part])
            packed -= part
            if size < 0:
                continue  # damaged: the rest is only read
            stream.feed(self._packed, part)
            count = 1
            while count:
                buffer = sink.free()
                try:
                    count = stream.step(buffer)
                except zstd.Damaged:
                    count, size = 0, -1
                size -= count
                sink.write(buffer, count if size >= 0 else 0)


def _raw(reader: frames.Reader, size: int, sink: _Behind) -> None:
    while size:
        buffer = sink.free()
        view = buffer.view[: min(size, PIECE)]
        try:
            reader.fill(view)
        except BaseException:
            sink.write(buffer, 0)
            raise
        sink.write(buffer, len(view))
        size -= len(view)
