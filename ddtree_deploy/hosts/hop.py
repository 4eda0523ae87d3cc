"""What hops share: a process behind another connector, and how the words of a hop become an error with a mend."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

from ddtree_deploy.errors import DeployError, HostUnreachable
from ddtree_deploy.hosts.base import Channel, Connector, Host


@dataclass(frozen=True, slots=True)
class Hint:
    """What a hop says on stderr when it can not get there (`seen`, a pattern), what that means, and the mend.

    `{host}`, `{inside}` (the container) and `{node}` (where the hop's command runs) are replaced in both.
    """

    seen: str
    means: str
    mend: str


class HopChannel:
    """Pass a channel through; explain its early end by the first hint whose pattern its stderr shows."""

    def __init__(self, host: Host, inner: Channel, hints: Sequence[Hint]) -> None:
        self._host, self._inner, self._hints = host, inner, hints
        self.stdin: BinaryIO = inner.stdin
        self.stdout: BinaryIO = inner.stdout
        self.stdin_fd: int | None = inner.stdin_fd
        self.stdout_fd: int | None = inner.stdout_fd

    def wait(self, timeout: float | None = None) -> int | None:
        return self._inner.wait(timeout)

    def stderr_tail(self) -> str:
        return self._inner.stderr_tail()

    def failure(self) -> DeployError:
        return explained(self._host, self._inner.failure(), self._inner.stderr_tail(), self._hints)

    def notices(self) -> tuple[str, ...]:
        return self._inner.notices()

    def close(self) -> None:
        self._inner.close()


def through(host: Host, node: Connector, argv: Sequence[str], hints: Sequence[Hint]) -> HopChannel:
    """Start `argv`, a hop's command with what it shall run, on `node`. Raises what `node` raises, in the hop's words."""
    try:
        return HopChannel(host, node.start(argv), hints)
    except DeployError as problem:
        raise explained(host, problem, problem.message, hints) from None


def explained(host: Host, problem: DeployError, stderr: str, hints: Sequence[Hint]) -> DeployError:
    """Return the HostUnreachable of the first hint that `stderr` shows, else `problem` as it is."""
    _, _, inside = host.via.partition(":")
    node = "this machine" if host.transport == "local" else f"`{host.address or host.name}`"
    for hint in hints:
        if re.search(hint.seen, stderr, re.IGNORECASE):
            words = {"host": host.name, "inside": inside, "node": node}
            causes = tuple(line for line in stderr.splitlines()[-6:] if line.strip())
            return HostUnreachable(hint.means.format(**words), mend=hint.mend.format(**words), causes=causes)
    return problem


def write_all(channel: Channel, data: bytes) -> None:
    """Write every byte; raises OSError when the other side is gone, ValueError when the channel was closed."""
    view = memoryview(data)
    while view:
        view = view[channel.stdin.write(view) or 0 :]
