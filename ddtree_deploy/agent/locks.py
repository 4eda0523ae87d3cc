"""One push at a time: a kernel lock that dies with its holder, and a file beside it that says who that is."""

from __future__ import annotations

import fcntl
import os
import time

from ddtree_deploy.agent import durable
from ddtree_deploy.agent.failure import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ddtree_deploy.agent.layout import Layout


def holder(found: Layout) -> dict[str, Any] | None:
    """Return who holds the venv's lock (`who`, `host`, `pid`, `since`, `what`), or None when it is free."""
    try:
        fd = os.open(found.lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return durable.read_json(found.lock + ".json") or {"who": "unknown"}
    finally:
        os.close(fd)
    return None


def acquire(found: Layout, who: dict[str, Any], wait: float, aborted: Callable[[], bool]) -> int:
    """Take the venv's lock within `wait` seconds and return its descriptor; raise Failure(locked) naming the holder."""
    deadline = time.monotonic() + wait
    while True:
        fd = os.open(found.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is(fd, found.lock):
                break
            os.close(fd)  # the holder removed the file with its state directory: this is no longer the lock
            continue
        except BlockingIOError:
            os.close(fd)
            if time.monotonic() >= deadline or aborted():
                now = durable.read_json(found.lock + ".json") or {}
                raise Failure(
                    "locked",
                    "`%s` is locked by %s (%s, since %s)"
                    % (found.venv, now.get("who", "another run"), now.get("what", "busy"), now.get("since", "unknown")),
                ) from None
            time.sleep(0.1)
    durable.write_json(found.lock + ".json", {**who, "pid": os.getpid(), "since": utc()})
    return fd


def stamps(found: Layout) -> str:
    """Return the file that is locked while the tidying moves the stamps of the live tree's files, which is a second or two."""
    return found.lock + ".stamps"


def steady(found: Layout, seconds: float = 10.0) -> None:
    """Wait until nobody moves stamps, so that the index vouches for what is there; after `seconds` it is hashed instead."""
    try:
        fd = os.open(stamps(found), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(0.02)
    finally:
        os.close(fd)


def _is(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def utc(seconds: float | None = None) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def journal_state(found: Layout) -> str:
    """Return the state of unfinished work, or an empty string."""
    journal = durable.read_json(found.journal)
    return journal.get("state", "unknown") if journal else ""
