"""The wire: a 12-byte prefix, a JSON header, raw bytes. Both ends import this file."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

    ReadInto = Callable[[memoryview], int]

_PREFIX = struct.Struct(">IQ")
MAX_HEADER = 64 << 20
#: Structured payloads (file lists, manifests) are bounded; object payloads are streamed and need no bound.
MAX_STRUCTURED = 1 << 30
CHUNK = 1 << 20


class ProtocolError(Exception):
    """The peer sent something that is not a frame of ours."""


class Closed(Exception):
    """The pipe ended; `clean` is true when it ended between two frames."""

    def __init__(self, clean: bool) -> None:
        super().__init__("the other side closed the connection")
        self.clean = clean


def encode(header: Mapping[str, object], payload_size: int = 0) -> bytes:
    """Return the prefix and the header of a frame whose payload of `payload_size` bytes follows."""
    body = json.dumps(header, separators=(",", ":")).encode()
    return _PREFIX.pack(len(body), payload_size) + body


def pack(value: object) -> tuple[dict[str, str], bytes]:
    """Return `(header fields, payload)` for a structured value: JSON, deflated, with size and sha256."""
    payload = zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1)
    return {"sha256": hashlib.sha256(payload).hexdigest()}, payload


def unpack(header: Mapping[str, object], payload: bytes) -> Any:
    """Return the structured value of a payload; raise ProtocolError when its digest is wrong or it is not ours."""
    if hashlib.sha256(payload).hexdigest() != header.get("sha256"):
        raise ProtocolError("a payload does not have the digest that its header promises")
    try:
        inflater = zlib.decompressobj()
        text = inflater.decompress(payload, MAX_STRUCTURED)
        if inflater.unconsumed_tail:
            raise ProtocolError("a structured payload inflates beyond %d bytes" % MAX_STRUCTURED)
        return json.loads(text)
    except (zlib.error, ValueError, RecursionError) as error:
        raise ProtocolError("a structured payload is malformed: %s" % error) from None


class Reader:
    """Read frames: `header()` first, then exactly its payload by `take` or `chunks`. `readinto(view)` returns 0 at the end."""

    def __init__(self, readinto: ReadInto) -> None:
        self.readinto = readinto
        self.left = 0

    def _exactly(self, size: int, clean_at_start: bool = False) -> bytearray:
        out = bytearray(size)
        view = memoryview(out)
        got = 0
        while got < size:
            count = self.readinto(view[got:])
            if not count:
                raise Closed(clean_at_start and got == 0)
            got += count
        return out

    def header(self) -> tuple[dict[str, Any], int]:
        """Return `(header, payload size)` of the next frame; raise Closed at the end, ProtocolError on rubbish."""
        if self.left:
            raise ProtocolError("the payload of the previous frame was not read")
        size, payload = _PREFIX.unpack(self._exactly(_PREFIX.size, clean_at_start=True))
        if size > MAX_HEADER:
            raise ProtocolError("a frame header of %d bytes" % size)
        try:
            header = json.loads(bytes(self._exactly(size)))
        except (ValueError, RecursionError):
            raise ProtocolError("a frame header is not JSON") from None
        if not isinstance(header, dict):
            raise ProtocolError("a frame header is not an object")
        self.left = payload
        return header, payload

    def take(self, limit: int = MAX_STRUCTURED) -> bytes:
        """Return the whole payload of the current frame; raise ProtocolError when it is larger than `limit`."""
        if self.left > limit:
            raise ProtocolError("a payload of %d bytes where at most %d are expected" % (self.left, limit))
        data = bytes(self._exactly(self.left))
        self.left = 0
        return data

    def chunks(self, size: int, buffer: bytearray) -> Iterator[memoryview]:
        """Yield memoryviews of the next `size` payload bytes, read into `buffer` (a bytearray that is reused)."""
        if size > self.left:
            raise ProtocolError("an object reaches beyond its frame")
        view = memoryview(buffer)
        while size:
            count = self.readinto(view[: min(size, len(buffer))])
            if not count:
                raise Closed(False)
            size -= count
            self.left -= count
            yield view[:count]


def from_fd(fd: int) -> ReadInto:
    """Return a `readinto` for a descriptor."""
    return lambda view: os.readv(fd, [view])


def write_all(fd: int, *parts: bytes | memoryview) -> None:
    """Write every byte of `parts` to a pipe descriptor."""
    for part in parts:
        view = memoryview(part)
        while view:
            view = view[os.write(fd, view):]
