"""Receive one file: what is at its place now, its bytes under another name, and the rename when everything about it holds."""

from __future__ import annotations

import atexit
import base64
import hashlib
import os
import re
import secrets
import stat
import subprocess
import sys

from ddtree_deploy.agent.failure import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ddtree_deploy.agent.main import Session

_GENERATION = re.compile(r"(.*)/\.ddtree/generations/(\d+)/")
_COMPILE = "import sys; compile(open(sys.argv[1], 'rb').read(), sys.argv[2], 'exec', dont_inherit=True)"


class _Incoming:
    """The file that is being received by this process."""

    def __init__(self, path: str, size: int) -> None:
        self.path, self.size = path, size
        folder, name = os.path.split(path)
        self.partial = os.path.join(folder, ".%s.ddtree-%s" % (name[:100], secrets.token_hex(6)))
        self.fd = os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def discard(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            try:
                os.unlink(self.partial)
            except OSError:
                pass


_incoming: list[_Incoming] = []


def _discard() -> None:
    while _incoming:
        _incoming.pop().discard()


atexit.register(_discard)


def _resolve(path: str) -> tuple[str, os.stat_result | None]:
    """Return where a file of that name really is, and what is there; raise Failure when no file can be put there."""
    asked = os.path.expanduser(path)
    real = os.path.realpath(asked)
    try:
        found = os.lstat(real)
    except FileNotFoundError:
        found = None
    if asked.endswith("/") or (found and stat.S_ISDIR(found.st_mode)):
        raise Failure("usage", "`%s` is a directory, and only a file can be put" % path, mend="name the file: `%s/NAME`" % path.rstrip("/"))
    if found and not stat.S_ISREG(found.st_mode):
        raise Failure("usage", "`%s` is not an ordinary file" % path)
    folder = os.path.dirname(real)
    if not os.path.isdir(folder):
        raise Failure("usage", "there is no directory `%s` on the host" % folder, mend="make it there first, or give another path")
    return real, found


def _sha256(fd: int) -> tuple[str, int]:
    digest, at = hashlib.sha256(), 0
    while True:
        block = os.pread(fd, 1 << 20, at)
        if not block:
            return digest.hexdigest(), at
        digest.update(block)
        at += len(block)


def look(_session: Session, header: dict[str, Any], _value: object) -> dict[str, Any]:
    """Return what is at `path`: where it really is, and of a file its digest and mode (an empty digest: nothing)."""
    real, found = _resolve(header["path"])
    sha256 = ""
    if found:
        fd = os.open(real, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            sha256, _size = _sha256(fd)
        finally:
            os.close(fd)
    inside = _GENERATION.match(real)
    return {
        "path": real,
        "digest": sha256,
        "mode": stat.S_IMODE(found.st_mode) if found else 0,
        "generation": int(inside.group(2)) if inside else None,
        "writable": os.access(os.path.dirname(real), os.W_OK),
    }


def open_file(_session: Session, header: dict[str, Any], _value: object) -> dict[str, Any]:
    """Make an empty file beside `path` for the `size` bytes that `put-data` will bring."""
    _discard()
    real, _found = _resolve(header["path"])
    _incoming.append(_Incoming(real, int(header["size"])))
    return {}


def data(_session: Session, _header: dict[str, Any], value: str) -> dict[str, Any]:
    """Append bytes (base64)."""
    if not _incoming:
        raise Failure("usage", "no file is open")
    file = _incoming[-1]
    block = memoryview(base64.b64decode(value, validate=True))
    if os.fstat(file.fd).st_size + len(block) > file.size:
        raise Failure("integrity", "more bytes than the file has")
    while block:
        block = block[os.write(file.fd, block) :]
    return {}


def commit(_session: Session, header: dict[str, Any], _value: object) -> dict[str, Any]:
    """Check what lies on the disk, compile it when `compile` is set, give it owner and mode, and rename it to its place.

    A replaced file's owner stays, where this user may set it. Raises Failure, and leaves everything as it was, when the bytes are
    not those of `digest`, or the source does not compile by `python` (by this interpreter when that is empty).
    """
    if not _incoming:
        raise Failure("usage", "no file is open")
    file = _incoming[-1]
    try:
        sha256, size = _sha256(file.fd)
        if (sha256, size) != (header["digest"], file.size):
            raise Failure("integrity", "what arrived is not what was sent: %d of %d bytes" % (size, file.size))
        python = ""
        if header["compile"]:
            python = os.path.expanduser(header["python"]) or sys.executable
            _compile(python, file.partial, file.path)
        real, found = _resolve(file.path)
        owner = ""
        if found and (found.st_uid, found.st_gid) != (os.geteuid(), os.getegid()):
            try:
                os.fchown(file.fd, found.st_uid, found.st_gid)
            except PermissionError:
                owner = "%d:%d" % (found.st_uid, found.st_gid)
        os.fchmod(file.fd, int(header["mode"]))
        os.fsync(file.fd)
        os.rename(file.partial, real)
        os.close(file.fd)
        file.fd = -1
    finally:
        _discard()
    folder = os.open(os.path.dirname(real), os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return {"python": python, "lost_owner": owner}


def _compile(python: str, partial: str, path: str) -> None:
    try:
        done = subprocess.run(
            [python, "-I", "-S", "-W", "ignore", "-X", "utf8", "-c", _COMPILE, partial, "<%s>" % os.path.basename(path)],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False, cwd="/",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Failure("incompatible", "the interpreter `%s` does not run: %s" % (python, error)) from None
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise Failure(
            "proof-failed", "`%s` does not compile by %s; what is there stays" % (path, python),
            mend="mend the source and put it again", causes=said[-4:],
        )
