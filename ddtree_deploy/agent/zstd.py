"""Decompress zstandard with what a host has: `compression.zstd` (Python 3.14 and later), or libzstd.so.1 through ctypes (RFC 8878)."""

from __future__ import annotations

import ctypes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

_OUT = 1 << 20


class Damaged(Exception):
    """The stream is not zstandard, or is damaged."""


class _Buffer(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("size", ctypes.c_size_t), ("at", ctypes.c_size_t)]


def _library() -> Any:
    try:
        library = ctypes.CDLL("libzstd.so.1")
        library.ZSTD_createDStream.restype = ctypes.c_void_p
        library.ZSTD_freeDStream.argtypes = [ctypes.c_void_p]
        library.ZSTD_decompressStream.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Buffer), ctypes.POINTER(_Buffer)]
        library.ZSTD_decompressStream.restype = ctypes.c_size_t
        library.ZSTD_isError.argtypes = [ctypes.c_size_t]
    except (OSError, AttributeError):
        return None
    return library


def available() -> bool:
    """Tell whether this host can decompress."""
    try:
        import compression.zstd  # type: ignore[import-not-found,unused-ignore]  # noqa: F401

        return True
    except ImportError:
        return _library() is not None


class Stream:
    """Decompress one object: `feed` yields pieces of at most 1 MiB; raises Damaged. Call `close` in the end."""

    def __init__(self) -> None:
        self._library = _library()
        self._state = self._library.ZSTD_createDStream() if self._library else None
        self._python: Any = None
        if self._library is None:
            from compression.zstd import ZstdDecompressor  # type: ignore[import-not-found,unused-ignore]

            self._python = ZstdDecompressor()
        else:
            self._out = ctypes.create_string_buffer(_OUT)

    def feed(self, view: memoryview) -> Iterator[memoryview]:
        if self._python is not None:
            yield from self._feed_python(view)
            return
        data = bytes(view)
        source = _Buffer(ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p), len(data), 0)
        whole = memoryview(self._out)
        while True:
            target = _Buffer(ctypes.addressof(self._out), _OUT, 0)
            left = self._library.ZSTD_decompressStream(self._state, ctypes.byref(target), ctypes.byref(source))
            if self._library.ZSTD_isError(left):
                raise Damaged("a damaged zstandard stream")
            if target.at:
                yield whole[: target.at]
            if source.at >= source.size and target.at < _OUT:
                return

    def _feed_python(self, view: memoryview) -> Iterator[memoryview]:
        data = bytes(view)
        try:
            while True:
                piece = self._python.decompress(data, _OUT)
                data = b""
                if piece:
                    yield memoryview(piece)
                if self._python.eof or self._python.needs_input:
                    return
        except Exception as error:
            raise Damaged(str(error)) from None

    def close(self) -> None:
        if self._state:
            self._library.ZSTD_freeDStream(self._state)
            self._state = None
