"""Where a server's files lie, and what they say: `<venv>/.ddtree/servers/NAME/{launch,state,proved}.json`, its log, its lock.

`launch.json` holds the whole command line and environment, secrets included, and is readable by its owner alone. What leaves
the host goes through `shown`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time

from ddtree_deploy.agent import durable, layout, procs
from ddtree_deploy.agent.failure import Failure
from ddtree_deploy.agent.serving.supervisor import members

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    Json = dict[str, Any]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def root(found: layout.Layout) -> str:
    return os.path.join(found.state, "servers")


def directory(found: layout.Layout, name: str) -> str:
    """Return a server's directory; raise Failure for a name that is none."""
    if not _NAME.fullmatch(name):
        raise Failure("usage", "`%s` is no name for a server" % name)
    return os.path.join(root(found), name)


def names(found: layout.Layout) -> list[str]:
    """Return the names of the servers that were ever launched from this venv."""
    try:
        return sorted(name for name in os.listdir(root(found)) if _NAME.fullmatch(name) and os.path.isdir(os.path.join(root(found), name)))
    except OSError:
        return []


def lock(path: str, wait: bool = False) -> int | None:
    """Take the lock file `path`; return its descriptor, or None when somebody holds it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


@contextlib.contextmanager
def turn(found: layout.Layout) -> Iterator[None]:
    """Hold the right to write records of this venv's servers: who comes second waits. The kernel frees it with its holder."""
    fd = lock(os.path.join(root(found), "start.lock"), wait=True)
    assert fd is not None
    try:
        yield
    finally:
        os.close(fd)


def claim(where: str) -> int | None:
    """Take the supervisor's lock, so that none begins; None when one lives. Whoever looks whether one does holds it for a moment."""
    end = time.monotonic() + 1
    while True:
        fd = lock(os.path.join(where, "lock"))
        if fd is not None or time.monotonic() > end:
            return fd
        time.sleep(0.02)


def clear(where: str) -> None:
    """Remove what a killed writer left half written in a server's directory; only in one's `turn`."""
    for name in os.listdir(where):
        if name.startswith(".tmp-"):
            layout.remove(os.path.join(where, name))


def supervisors(where: str) -> list[int]:
    """Return the pids of a server's supervisors, by their command line: a full disk may have kept them from telling."""
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdigit():
                with open("/proc/%s/cmdline" % name, "rb") as file:
                    argv = file.read().split(b"\0")[:-1]
                if argv[-2:] and argv[-2].endswith(b"/supervisor.py") and os.path.samefile(argv[-1], where):
                    found.append(int(name))
        except (OSError, ValueError, IndexError):
            continue
    return found


def supervised(where: str) -> bool:
    """Tell whether a supervisor holds this server's lock; the kernel frees it when that process dies."""
    try:
        fd = os.open(os.path.join(where, "lock"), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def read(where: str, name: str) -> Json:
    return durable.read_json(os.path.join(where, name)) or {}


def processes_of(where: str) -> list[int]:
    """Return the pids of the processes that belong to the launch of a server's directory."""
    launch, state = read(where, "launch.json"), read(where, "state.json")
    if not launch.get("id"):
        return []
    session = state.get("session") if state.get("launch") == launch["id"] else None
    return members(launch["id"], session, os.path.realpath(launch["argv"][0]))


def describe(found: layout.Layout, name: str) -> Json | None:
    """Return what is known of a server: what was launched, how it is, and the processes that are its; None when there is none.

    `phase` is the supervisor's word, as long as there is a supervisor; without one it is `orphaned` while processes of the
    launch live, and `dead` when they should and do not.
    """
    where = directory(found, name)
    launch = read(where, "launch.json")
    if not launch.get("id"):
        return None
    state = read(where, "state.json")
    state = state if state.get("launch") == launch["id"] else {}
    alive = supervised(where)
    phase = state.get("phase", "starting" if alive else "dead")
    processes = [] if phase in ("failed", "stopped") and not alive else processes_of(where)
    processes = [pid for pid in processes if pid != state.get("supervisor")]
    if not alive and phase not in ("failed", "stopped"):
        phase = "orphaned" if processes else "dead"
    proved = read(where, "proved.json")
    live = found.live()
    return {
        "name": name,
        "phase": phase,
        "supervised": alive,
        "pid": state.get("pid"),
        "processes": len(processes),
        "since": state.get("since"),
        "restarts": state.get("restarts", 0),
        "last": state.get("last"),
        "generation": launch.get("generation"),
        "stale": launch.get("generation") != live,
        "unit": launch.get("unit", ""),
        "launch": shown(launch),
        "proved": proved if proved.get("launch") == launch["id"] else None,
    }


def shown(launch: Json) -> Json:
    """Return what may leave the host: the command line without secrets, and the wish."""
    wish = dict(launch.get("wish") or {})
    wish["tail"] = procs.redact(list(wish.get("tail") or []))
    wish["env"] = {name: "***" if procs.is_secret(name, value) else procs.scrub(value) for name, value in (wish.get("env") or {}).items()}
    out = {key: launch.get(key) for key in ("id", "url", "started", "who", "tree", "gpus", "user", "restart")}
    return {**out, "argv": procs.redact(list(launch.get("argv") or [])), "wish": wish}


def only(found: layout.Layout, name: str) -> str:
    """Return the server that is meant: the one of that name, or the only one that is there. Raise Failure otherwise."""
    known = [one for one in names(found) if describe(found, one)]
    if name:
        if name not in known:
            raise Failure(
                "usage", "there is no server `%s` in `%s`" % (name, found.venv), "servers there: %s" % (", ".join(known) or "none")
            )
        return name
    if len(known) > 1:
        running = [one for one in known if (describe(found, one) or {}).get("phase") not in ("failed", "stopped", "dead")]
        if len(running) == 1:
            return running[0]
    if len(known) != 1:
        raise Failure(
            "usage",
            "there is %s server in `%s`" % ("more than one" if known else "no", found.venv),
            "name one with `--port`: %s" % ", ".join(known) if known else "start one with `ddtree-deploy launch`",
        )
    return known[0]
