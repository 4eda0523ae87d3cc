"""The wire: a 12-byte prefix, a JSON header, raw bytes. Both ends import this file."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import struct
import time
import zlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    ReadInto = Callable[[memoryview], int]

_F_SETPIPE_SZ = 1031  # Python 3.9 has no name for it
_PREFIX = struct.Struct(">IQ")
MAX_HEADER = 1 << 20
#: Structured payloads (file lists, manifests) are bounded, in bytes of JSON and in values, of which a million files have eleven
#: million; object payloads are streamed and need no bound.
MAX_STRUCTURED = 1 << 29
MAX_VALUES = 1 << 24
CHUNK = 1 << 20
#: So many bytes of an unfinished frame are a sign of life; fewer are not, or a peer could hold a connection with a byte a minute.
STEP = 1 << 16


class ProtocolError(Exception):
    """The peer sent something that is not a frame of ours."""


class Closed(Exception):
    """The pipe ended; `clean` is true when it ended between two frames."""

    def __init__(self, clean: bool) -> None:
        super().__init__("the other side closed the connection")
        self.clean = clean


class Pulse:
    """When the other side last finished a frame, or got `STEP` bytes further with one (`at`, in monotonic seconds)."""

    def __init__(self) -> None:
        self.beat()

    def beat(self) -> None:
        self.at = time.monotonic()
        self._bytes = 0

    def moved(self, count: int) -> None:
        self._bytes += count
        if self._bytes >= STEP:
            self.beat()


def _number(text: str) -> float:
    value = float(text)
    if value - value:
        raise ValueError("a number that is not finite: %s" % text)
    return value


def loads(text: bytes) -> Any:
    """Return the value of a JSON text of a peer; raise ProtocolError when it is malformed, not finite, or absurdly large or deep."""
    if sum(map(text.count, (b",", b"[", b"{", b":"))) > MAX_VALUES:
        raise ProtocolError("a text of more than %d values" % MAX_VALUES)
    try:
        return json.loads(text, parse_float=_number, parse_constant=_number)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("a malformed text: %s" % error) from None


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
    except zlib.error as error:
        raise ProtocolError("a structured payload is malformed: %s" % error) from None
    return loads(text)


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
        header = loads(bytes(self._exactly(size)))
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

    def fill(self, view: memoryview) -> None:
        """Read exactly the next `len(view)` payload bytes."""
        if len(view) > self.left:
            raise ProtocolError("an object reaches beyond its frame")
        self.left -= len(view)
        while view:
            count = self.readinto(view)
            if not count:
                raise Closed(False)
            view = view[count:]

    def skip(self, size: int) -> None:
        """Read and drop the next `size` payload bytes."""
        scratch = memoryview(bytearray(min(size, CHUNK)))
        while size:
            self.fill(scratch[: min(size, CHUNK)])
            size -= min(size, CHUNK)


def widen(fd: int) -> None:
    """Let a pipe hold a megabyte, so that its two ends wake each other less often (F_SETPIPE_SZ, fcntl(2)); best effort."""
    try:
        fcntl.fcntl(fd, _F_SETPIPE_SZ, 1 << 20)
    except OSError:
        pass  # not a pipe, or the user's share of pipe memory is used up


def from_fd(fd: int) -> ReadInto:
    """Return a `readinto` for a descriptor."""
    return lambda view: os.readv(fd, [view])


def write_all(fd: int, *parts: bytes | memoryview) -> None:
    """Write every byte of `parts` to a pipe descriptor."""
    for part in parts:
        view = memoryview(part)
        while view:
            view = view[os.write(fd, view):]
