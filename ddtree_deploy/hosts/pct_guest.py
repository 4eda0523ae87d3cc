"""The guest's side of `pct_push`: turn lines into the pipes of a process, and its output into lines.

Sent as text and run by `python -I -S -c`, with the process's argv; standard library only, Python 3.9 or newer.
"""
# ruff: noqa: PTH108, UP031

from __future__ import annotations

import base64
import hashlib
import os
import signal
import subprocess
import sys
import threading
from typing import BinaryIO


def staged(path: str, size: int, digest: str) -> bytes:
    """Read a pushed file, which is gone afterwards; raise ValueError when it is not what was sent."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.unlink(path)
        with os.fdopen(os.dup(fd), "rb") as file:
            data = file.read(size + 1)
    finally:
        os.close(fd)
    if len(data) != size or hashlib.sha256(data).hexdigest() != digest:
        raise ValueError("a pushed file is not what was sent: %d of %d bytes" % (len(data), size))
    return data


def feed(lines: BinaryIO, stdin: BinaryIO, promised: set[str]) -> None:
    """Write what the lines say to the process, until its end, theirs, or a line that is damaged (ValueError)."""
    for line in lines:
        tag, text = line[:1], line[1:].decode("ascii", "replace").strip()
        if tag == b"D":
            stdin.write(base64.b64decode(text, validate=True))
        elif tag == b"P":
            promised.add(text)
        elif tag == b"F":
            path, size, digest = text.split()
            stdin.write(staged(path, int(size), digest))
            promised.discard(path)
        elif tag == b"E":
            return
        else:
            raise ValueError("a line of the controller was damaged on its way: %r" % line[:40])
        stdin.flush()


def main(argv: list[str]) -> int:
    """Run `argv`; return its exit status (127: there is no such program; 74: what arrived was damaged)."""
    if os.isatty(0):
        import tty

        tty.setraw(0)  # no echo, no line discipline in the way of long lines
    lock = threading.Lock()
    promised: set[str] = set()
    damage: list[str] = []

    def say(tag: bytes, data: bytes) -> None:
        with lock:
            view = memoryview(b"ddtree-" + tag + b":" + base64.b64encode(data) + b"\n")
            while view:
                view = view[os.write(1, view) :]

    def drain(tag: bytes, fd: int) -> None:
        try:
            while data := os.read(fd, 30 << 10):
                say(tag, data)
        except OSError:
            pass

    def fed(stdin: BinaryIO) -> None:
        try:
            feed(sys.stdin.buffer, stdin, promised)
        except BrokenPipeError:
            pass  # the process takes no more input: its status says why
        except (OSError, ValueError) as problem:
            damage.append(str(problem))  # before the process sees the end of its input, and ends
            say(b"R", str(problem).encode())
        finally:
            try:
                stdin.close()
            except OSError:
                pass

    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: sys.exit(129))
    try:
        pipe = subprocess.PIPE
        try:
            child = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe)
        except OSError as problem:
            say(b"R", str(problem).encode())
            return 127
        assert child.stdin and child.stdout and child.stderr
        say(b"ready", b"")
        work = ((drain, (b"O", child.stdout.fileno())), (drain, (b"R", child.stderr.fileno())), (fed, (child.stdin,)))
        out, errors, _ = threads = [threading.Thread(target=target, args=words, daemon=True) for target, words in work]
        for thread in threads:
            thread.start()
        status = child.wait()
        out.join()
        errors.join(1.0)  # a daemon that the process left behind may hold it open
        return 74 if damage else status if status >= 0 else 128 - status
    finally:
        for path in promised:
            try:
                os.unlink(path)
            except OSError:
                pass


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # a thread may be reading the input still
