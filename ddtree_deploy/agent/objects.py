"""Objects on the way out: many small files share a frame, a large one has its own."""

from __future__ import annotations

import os

from ddtree_deploy.agent import frames

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


def is_row(item: list[Any]) -> bool:
    """Tell whether `item` is `[digest, size]` or `[digest, size, compressed size]`."""
    return len(item) in (2, 3) and valid_digest(item[0]) and all(type(number) is int and number >= 0 for number in item[1:])
