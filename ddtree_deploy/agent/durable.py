"""File-system calls that the standard library lacks, and writes that survive a crash (fsync(2), rename(2), renameat2(2))."""

from __future__ import annotations

import errno
import json
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ctypes
    from typing import Any

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def _libc() -> ctypes.CDLL:
    import ctypes  # slow to import, and who only looks needs none of it

    return ctypes.CDLL(None, use_errno=True)


def _refused(path: str) -> OSError:
    import ctypes

    code = ctypes.get_errno()
    return OSError(code, os.strerror(code), path)


def exchange(one: str, other: str) -> None:
    """Swap two names in one step (renameat2 RENAME_EXCHANGE); raise OSError where the file system can not."""
    try:
        call = _libc().renameat2
    except AttributeError:
        raise OSError(errno.ENOSYS, "this libc has no renameat2") from None
    if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        raise _refused(one)


def sync_file_system(path: str) -> None:
    """Flush everything that was written to the file system of `path` (syncfs(2)): one call for tens of thousands of files."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc().syncfs(fd):
            raise _refused(path)
    finally:
        os.close(fd)


def begin_flush(fd: int) -> None:
    """Ask the kernel to start writing a file's pages out now (sync_file_range(2)), without waiting; only a hint."""
    call = getattr(_libc(), "sync_file_range", None)
    if call is not None:
        import ctypes

        call(fd, ctypes.c_int64(0), ctypes.c_int64(0), ctypes.c_uint(2))


def sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_file(path: str, data: bytes, mode: int = 0o644) -> None:
    """Replace `path` by a file with `data`, durably: temporary file beside it, fsync, rename, fsync of the directory."""
    directory = os.path.dirname(path)
    temporary = os.path.join(directory, ".tmp-" + os.urandom(6).hex())
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(fd, mode)
            os.fsync(fd)
        os.rename(temporary, path)
    except BaseException:
        try:
            os.unlink(temporary)
        except OSError:
            pass
        raise
    sync_directory(directory)


def write_json(path: str, value: object) -> None:
    write_file(path, (json.dumps(value, sort_keys=True) + "\n").encode())


def read_json(path: str) -> dict[str, Any] | None:
    """Return the JSON object in `path`, or None when there is no such file or it is not one."""
    try:
        with open(path, "rb") as file:
            value = json.loads(file.read())
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def append_line(path: str, text: str) -> None:
    """Append one line durably (O_APPEND, fsync); what a full disk cut off before it stays a line of its own."""
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(fd).st_size
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        data = (b"\n" if torn else b"") + text.encode() + b"\n"
        while data:
            data = data[os.write(fd, data) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_link(path: str, target: str) -> None:
    """Make `path` a link to `target` in one step: the only commit point of a switch."""
    directory = os.path.dirname(path)
    temporary = os.path.join(directory, ".tmp-link-%d" % os.getpid())
    try:
        os.unlink(temporary)
    except FileNotFoundError:
        pass
    os.symlink(target, temporary)
    os.rename(temporary, path)
    sync_directory(directory)
