"""Serve requests on stdin/stdout until the pipe ends; the end of the pipe, or silence past the lease, aborts the work."""

from __future__ import annotations

import gc
import importlib
import os
import queue
import signal
import sys
import threading
import time

from ddtree_deploy.agent import frames, reads
from ddtree_deploy.agent.failure import Failure
from ddtree_deploy.agent.paths import HostilePath

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from ddtree_deploy.agent.push import Push
    from ddtree_deploy.agent.sources import Sources
    from ddtree_deploy.agent.venvs import Making
    from ddtree_deploy.agent.walk import Entry

    Requests = queue.SimpleQueue[tuple[dict[str, Any], bytes] | None]

LEASE = 60.0
SIGN_OF_LIFE = 5.0


class Session:
    """One connection: what the handlers share (how to answer, whether to stop, what this process has open)."""

    def __init__(self, fd_in: int, fd_out: int, read_only: bool, zip_fd: int) -> None:
        self.reader = frames.Reader(self._read)
        self.fd_in = fd_in
        frames.widen(fd_in)
        self.fd_out = fd_out
        self.read_only = read_only
        self.zip_fd = zip_fd
        self.push: Push | None = None  # the open push of this connection
        self.made: Making | None = None  # the venv that was made for the push which has not begun
        #: The newest scan: root, entries, directories, fingerprint.
        self.walked: tuple[str, list[Entry], dict[str, int], str] | None = None
        self.sources: Sources | None = None  # of that scan (`writes.get_ready`)
        self.current: int | None = None
        self.pulse = frames.Pulse()
        self._aborted = threading.Event()
        self._out = threading.Lock()
        self._last_progress = 0.0
        self._last_sign = time.monotonic()

    def _read(self, view: memoryview) -> int:
        count = os.readv(self.fd_in, [view])
        if self._aborted.is_set():
            return 0  # the lease ran out in the middle of a frame: the rest is not waited for
        self.pulse.moved(count)
        if self.pulse.at - self._last_sign > SIGN_OF_LIFE:
            # A large object may take minutes to arrive; the controller must not take that for silence.
            self._last_sign = self.pulse.at
            self.send({"pong": True})
        return count

    def aborted(self) -> bool:
        return self._aborted.is_set()

    def abort(self) -> None:
        self._aborted.set()

    def wait_aborted(self, seconds: float) -> bool:
        return self._aborted.wait(seconds)

    def send(self, header: dict[str, Any], *payload: bytes) -> None:
        """Write one frame; a dead peer aborts the session instead of raising."""
        size = sum(len(part) for part in payload)
        with self._out:
            try:
                frames.write_all(self.fd_out, frames.encode(header, size), *payload)
            except OSError:
                self.abort()

    def write(self, data: bytes) -> None:
        """Write raw bytes of a frame; the caller holds `out_lock()`."""
        frames.write_all(self.fd_out, data)

    def out_lock(self) -> threading.Lock:
        return self._out

    def progress(self, what: str, done: int, total: int, unit: str = "bytes", item: str = "") -> None:
        """Tell how far the current request is, at most ten times a second."""
        now = time.monotonic()
        if now - self._last_progress >= 0.1 or done >= total:
            self._last_progress = now
            self.send({"re": self.current, "progress": [what, done, total, unit, os.fsencode(item).decode("utf-8", "replace")]})


HANDLERS: dict[str, reads.Handler] = dict(reads.HANDLERS)
WRITING: set[str] = set()


def take_parts(names: list[str]) -> None:
    """Add the handlers of the packages that the controller sent beside the agent's own modules (`boot.agent_zip`)."""
    for name in names:
        part = importlib.import_module("ddtree_deploy.agent." + name)
        HANDLERS.update(part.READS)
        HANDLERS.update(part.WRITES)
        WRITING.update(part.WRITES)


def _handler(name: str) -> reads.Handler | None:
    if name not in HANDLERS:
        # Late, as in reads.py: most sessions only look, and are short.
        part = importlib.import_module("ddtree_deploy.agent." + ("confirming" if name == "confirm" else "writes"))
        HANDLERS.update(part.HANDLERS)
        WRITING.update(part.HANDLERS)
    return HANDLERS.get(name)


def _failure(error: BaseException) -> dict[str, Any]:
    if isinstance(error, Failure):
        return {"kind": error.kind, "message": error.message, "mend": error.mend, "causes": error.causes}
    if isinstance(error, HostilePath):
        return {"kind": "integrity", "message": str(error)}
    if isinstance(error, OSError) and error.errno in (28, 122):  # ENOSPC, EDQUOT
        return {"kind": "no-space", "message": "no space left on the host: %s" % error}
    if isinstance(error, OSError) and error.errno in (5, 30):  # EIO, EROFS
        return {"kind": "io", "message": "an I/O error on the host: %s" % error}
    if isinstance(error, PermissionError):
        return {"kind": "io", "message": "no permission on the host: %s" % error,
                "mend": "connect as the owner of the venv, or as root"}
    if isinstance(error, frames.ProtocolError):
        return {"kind": "integrity", "message": str(error)}
    import traceback

    return {"kind": "internal", "message": "%s: %s" % (type(error).__name__, error),
            "causes": traceback.format_exc().splitlines()[-8:]}


def _work(session: Session, requests: Requests) -> None:
    while True:
        request = requests.get()
        if request is None:
            return
        header, payload = request
        session.current = header.get("id")
        try:
            name: str = header.get("op", "")
            handler = _handler(name)
            if handler is None:
                raise Failure("internal", "the agent does not know the request %r" % (name,))
            if session.read_only and name in WRITING:
                raise Failure("usage", "the agent was started read-only and refuses `%s`" % name)
            value = frames.unpack(header, payload) if "sha256" in header else None
            result = handler(session, header, value)
            fields, body = frames.pack(result.pop("_big")) if "_big" in result else ({}, b"")
            then = result.pop("_then", None)
            session.send({"re": session.current, "ok": True, **result, **fields}, body)
        except BaseException as error:  # the connection must answer every request, also a failed one
            hopeless = (isinstance(error, OSError) and error.errno in (28, 122)) or getattr(error, "kind", "") == "stale-plan"
            if hopeless and session.push is not None:
                session.push.keep_incoming = False  # a resumed push would meet the same full disk, or another plan
            session.send({"re": session.current, "ok": False, "error": _failure(error)})
            continue
        if then is not None:
            try:
                then()
            except Exception:  # it was work done early: the request that needs it does it again, and says what is wrong
                pass


def _watch(session: Session, lease: float) -> None:
    while not session.wait_aborted(1.0):
        if time.monotonic() - session.pulse.at > lease:
            session.abort()
    # The worker gets the time to undo its step; a step that hangs does not keep the host's lock for ever.
    time.sleep(20)
    os._exit(3)


def serve(fd_in: int, fd_out: int, read_only: bool = False, zip_fd: int = -1, lease: float = LEASE) -> int:
    """Answer requests until end of input; returns the exit status."""
    session = Session(fd_in, fd_out, read_only, zip_fd)
    requests: Requests = queue.SimpleQueue()
    worker = threading.Thread(target=_work, args=(session, requests), daemon=True)
    worker.start()
    threading.Thread(target=_watch, args=(session, lease), daemon=True).start()
    status = 0
    try:
        while not session.aborted():
            session.pulse.beat()
            header, _size = session.reader.header()
            session.pulse.beat()
            op = header.get("op")
            if op == "objects":
                if session.push is None or session.push.landing is None:
                    raise frames.ProtocolError("objects before a push was staged")
                # On this thread, so that the wire is never waited for twice.
                session.push.landing.receive(session.reader, header)
            elif op == "ping":
                session.reader.take(0)
                session.send({"pong": True})
            elif op == "cancel":
                session.reader.take(0)
                session.abort()
            else:
                requests.put((header, session.reader.take()))
    except frames.Closed:
        pass
    except (frames.ProtocolError, HostilePath, Failure) as error:
        session.send({"re": None, "ok": False, "error": _failure(error)})
        status = 2
    except OSError as error:
        session.send({"re": None, "ok": False, "error": _failure(error)})
        status = 2
    # No more requests will come. What is queued is still done, unless the work was cancelled or the line went dead.
    session.abort()
    requests.put(None)
    worker.join(timeout=15)
    if session.made is not None:
        session.made.remove()
    if session.push is not None:
        from ddtree_deploy.agent.push import close

        close(session)
    return status


def main(zip_fd: int = -1) -> NoReturn:
    """Run the agent on this process's stdin and stdout (argv: `rw` or `ro`, with the packages sent along: `rw,serving`)."""
    mode, *parts = (sys.argv[1:] or ["ro"])[-1].split(",")
    read_only = mode != "rw"
    gc.set_threshold(100_000, 50, 1000)  # a walk has as many records as the tree has files, and they all live
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    # stdin and stdout are the wire: a stray print of a child must not reach it.
    fd_in, fd_out = os.dup(0), os.dup(1)
    os.set_inheritable(fd_in, False)
    os.set_inheritable(fd_out, False)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    os.umask(0o022)
    take_parts(parts)
    frames.write_all(fd_out, frames.encode({"hello": reads.hello()}))
    status = serve(fd_in, fd_out, read_only, zip_fd)
    gc.freeze()  # else the interpreter looks for cycles among all those records once more before it ends
    sys.exit(status)
