"""A paramiko exec channel as a Channel: file objects over its windows, its end, and its failures in our words."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any, BinaryIO, cast

import paramiko

from ddtree_deploy.errors import DeployError, HostUnreachable
from ddtree_deploy.hosts.pipes import GRACE_SECONDS, Tail, early_death

CONNECT_ERRORS = (OSError, EOFError, paramiko.SSHException)


class _Writer(io.RawIOBase):
    def __init__(self, session: Any) -> None:
        self._session = session

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._session.sendall(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            with contextlib.suppress(OSError, EOFError):
                self._session.shutdown_write()
        super().close()


class _Reader(io.RawIOBase):
    def __init__(self, session: Any) -> None:
        self._session = session

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._session.recv(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class FabricChannel:
    """Hold an exec session; `undo` closes the connections that it runs through."""

    stdin_fd: int | None = None
    stdout_fd: int | None = None

    def __init__(
        self, host: str, argv: Sequence[str], session: Any, notices: tuple[str, ...], undo: contextlib.ExitStack
    ) -> None:
        self._host, self._argv, self._session, self._notices, self._undo = host, argv, session, notices, undo
        self.stdin = cast(BinaryIO, _Writer(session))
        self.stdout = cast(BinaryIO, _Reader(session))
        self._tail = Tail(session.recv_stderr)

    def wait(self, timeout: float | None = None) -> int | None:
        """Return the exit status; 255, as `ssh` does, when the connection ended without one."""
        if not self._session.status_event.wait(timeout):
            return None
        status = int(self._session.exit_status)
        return status if status >= 0 else 255

    def stderr_tail(self) -> str:
        return self._tail.text(ended=self._session.status_event.is_set())

    def failure(self) -> DeployError:
        status, stderr = self.wait(GRACE_SECONDS), self.stderr_tail()
        if status is not None and self._session.exit_status < 0:
            said = self._session.get_transport().get_exception()
            return HostUnreachable(
                f"lost the connection to `{self._host}`",
                mend="run the same command again",
                causes=tuple(str(word) for word in (said, *stderr.splitlines()) if word),
            )
        return early_death(self._host, self._argv, status, stderr)

    def notices(self) -> tuple[str, ...]:
        return self._notices

    def close(self) -> None:
        """Show the process the end of its input, give it two seconds, then close the connection."""
        self.stdin.close()
        self.stdout.close()
        self.wait(GRACE_SECONDS)
        with contextlib.suppress(OSError, EOFError):
            self._session.close()
        with contextlib.suppress(OSError, EOFError):
            self._undo.close()
        self._tail.text(ended=True)


def connect_problem(host: str, problem: Exception, said: tuple[str, ...] = ()) -> HostUnreachable:
    """Put what paramiko raised while it connected into our words; `said` is what a proxy command said."""
    causes = (str(problem) or type(problem).__name__, *said)
    # paramiko has no class of its own for "No authentication methods available".
    if isinstance(problem, paramiko.AuthenticationException) or "authentication" in causes[0].lower():
        mend = f"make `ssh -o BatchMode=yes {host} true` work: a key in the agent, or an open `IdentityFile`"
        return HostUnreachable(f"`{host}` refuses the login", mend=mend, causes=causes)
    return HostUnreachable(f"cannot reach `{host}`", causes=causes)
