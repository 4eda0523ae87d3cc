"""A ProxyCommand on a real socket: paramiko's own spins when the command dies, and fabric's loses the port."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from typing import BinaryIO, cast

from ddtree_deploy.hosts.pipes import GRACE_SECONDS, Tail


class Proxy:
    """Run a command whose stdin and stdout are the other end of `socket`."""

    def __init__(self, command: str) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", f"exec {command}"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        self._stderr = cast(BinaryIO, self._process.stderr)
        self._tail = Tail(lambda size: os.read(self._stderr.fileno(), size))

    def words(self) -> tuple[str, ...]:
        """Return what the command said on stderr, for the causes of a failure."""
        return tuple(self._tail.text(ended=self._process.poll() is not None).splitlines()[-5:])

    def close(self) -> None:
        self.socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._tail.text(ended=True)
        if not self._tail.draining:
            self._stderr.close()
