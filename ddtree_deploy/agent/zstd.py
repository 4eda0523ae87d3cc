"""Decompress zstandard with what a host has: `compression.zstd` (Python 3.14 and later), or libzstd.so.1 through ctypes (RFC 8878)."""

from __future__ import annotations

import ctypes
import functools

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Protocol

    class Memory(Protocol):
        """Memory to work in: `view` for Python, its address `at` for C."""

        view: memoryview
        at: int


class Damaged(Exception):
    """The stream is not zstandard, or is damaged."""


class _Buffer(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("size", ctypes.c_size_t), ("at", ctypes.c_size_t)]


@functools.lru_cache(maxsize=None)
def _library() -> Any:
    try:
        library = ctypes.CDLL("libzstd.so.1")
        library.ZSTD_createDStream.restype = ctypes.c_void_p
        library.ZSTD_initDStream.argtypes = library.ZSTD_freeDStream.argtypes = [ctypes.c_void_p]
        library.ZSTD_decompressStream.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Buffer), ctypes.POINTER(_Buffer)]
        library.ZSTD_initDStream.restype = library.ZSTD_decompressStream.restype = ctypes.c_size_t
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
    """Decompress one object after another: `begin`, then `feed` it bytes, and `step` until there is nothing more of them."""

    def __init__(self) -> None:
        self._library = _library()
        self._python: Any = None
        self._data = b""
        if self._library is not None:
            self._state = self._library.ZSTD_createDStream()

    def begin(self) -> None:
        """Forget the object before."""
        if self._library is not None:
            self._library.ZSTD_initDStream(self._state)
        else:
            from compression.zstd import ZstdDecompressor  # type: ignore[import-not-found,unused-ignore]

            self._python = ZstdDecompressor()

    def feed(self, source: Memory, size: int) -> None:
        """Take the next `size` compressed bytes from `source`, which stays as it is until they are used up."""
        if self._library is not None:
            self._source = _Buffer(source.at, size, 0)
        else:
            self._data = bytes(source.view[:size])

    def step(self, out: Memory) -> int:
        """Put the next decompressed bytes into `out` and return how many; 0 means: feed more. Raises Damaged."""
        if self._library is None:
            return self._step_python(out)
        target = _Buffer(out.at, len(out.view), 0)
        if self._library.ZSTD_isError(self._library.ZSTD_decompressStream(self._state, ctypes.byref(target), ctypes.byref(self._source))):
            raise Damaged("a damaged zstandard stream")
        return int(target.at)

    def _step_python(self, out: Memory) -> int:
        if self._python.eof or (self._python.needs_input and not self._data):
            return 0
        try:
            piece = self._python.decompress(self._data, len(out.view))
        except Exception as error:
            raise Damaged(str(error)) from None
        self._data = b""
        out.view[: len(piece)] = piece
        return len(piece)

    def __del__(self) -> None:
        if self._library is not None:
            self._library.ZSTD_freeDStream(self._state)
