"""A local child process as a Channel: what the connectors that start a program (itself, or `ssh`) share."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import BinaryIO, cast

from ddtree_deploy.agent.frames import widen
from ddtree_deploy.errors import DeployError, HostUnreachable, Incompatible

TAIL_BYTES = 16 * 1024
GRACE_SECONDS = 2.0


class Tail:
    """Drain a stream in a thread so that its writer never blocks, and keep the last 16 KiB.

    `read` returns at most its argument and b"" at the end; an OSError from it counts as the end.
    """

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self._kept = bytearray()
        self._thread = threading.Thread(target=self._drain, name="stderr", daemon=True)
        self._thread.start()

    def _drain(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while chunk := self._read(8192):
                self._kept += chunk
                del self._kept[:-TAIL_BYTES]

    @property
    def draining(self) -> bool:
        return self._thread.is_alive()

    def text(self, *, ended: bool) -> str:
        """Return what came last; when the writer has `ended`, wait up to a second for the rest of it."""
        if ended:
            self._thread.join(1.0)
        return bytes(self._kept).decode("utf-8", "replace").strip()


def early_death(host: str, argv: Sequence[str], status: int | None, stderr: str) -> DeployError:
    """Explain a process that ended on `host` before it said anything (Incompatible when the program is not there)."""
    causes = tuple(line for line in stderr.splitlines()[-12:] if line.strip())
    if status == 127:
        why = causes[-1] if causes else f"`{argv[0]}` not found"
        mend = f'name an interpreter that is there: `python = "/path/to/python3"` under `[hosts.{host}]`'
        return Incompatible(f"cannot start the process on `{host}`: {why}", mend=mend, causes=causes[:-1])
    how = "is silent" if status is None else f"exit status {status}" if status >= 0 else f"killed by signal {-status}"
    message = f"`{argv[0]}` on `{host}` ended before it answered: {how}"
    return HostUnreachable(message, mend=f"see what `ddtree-deploy doctor {host}` says", causes=causes)


class PipeChannel:
    """Hold a child process in a session of its own, so that a Ctrl-C reaches us and not the pipe under us."""

    def __init__(self, command: Sequence[str], explain: Callable[[int | None, str], DeployError]) -> None:
        pipe = subprocess.PIPE
        self._explain = explain
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True
        )
        self.stdin = cast(BinaryIO, self._process.stdin)
        self.stdout = cast(BinaryIO, self._process.stdout)
        for end in (self.stdin, self.stdout):
            widen(end.fileno())
        self.stdin_fd: int | None = self.stdin.fileno()
        self.stdout_fd: int | None = self.stdout.fileno()
        self._stderr = cast(BinaryIO, self._process.stderr)
        self._tail = Tail(self._stderr.read)

    def wait(self, timeout: float | None = None) -> int | None:
        begun = time.monotonic()
        if timeout is not None:
            self._wake_at_the_end(timeout)
        try:
            return self._process.wait(None if timeout is None else max(0.0, begun + timeout - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None

    def _wake_at_the_end(self, timeout: float) -> None:
        """Sleep until the process ends; subprocess alone would look twenty times a second (pidfd_open(2); best effort)."""
        try:
            fd = os.pidfd_open(self._process.pid)
        except (AttributeError, OSError):
            return  # not here, or ended already
        try:
            end = select.poll()
            end.register(fd, select.POLLIN)
            end.poll(timeout * 1000)
        finally:
            os.close(fd)

    def stderr_tail(self) -> str:
        return self._tail.text(ended=self._process.poll() is not None)

    def failure(self) -> DeployError:
        return self._explain(self.wait(GRACE_SECONDS), self.stderr_tail())

    def notices(self) -> tuple[str, ...]:
        return ()

    def close(self) -> None:
        """Show the process the end of its input, give it two seconds, then end its process group.

        `stdout` is closed last: another thread may be reading its descriptor, whose number must not be reused under it.
        """
        with contextlib.suppress(OSError):
            self.stdin.close()
        for sign in (None, signal.SIGTERM, signal.SIGKILL):
            if sign is not None:
                with contextlib.suppress(OSError):
                    os.killpg(self._process.pid, sign)
            if self.wait(GRACE_SECONDS) is not None:
                break
        with contextlib.suppress(OSError):
            self.stdout.close()
        self._tail.text(ended=True)
        # A daemon that the process left behind may hold the other end; the drain thread then keeps the descriptor.
        if not self._tail.draining:
            with contextlib.suppress(OSError):
                self._stderr.close()
