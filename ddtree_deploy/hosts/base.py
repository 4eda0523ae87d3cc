"""The one thing a connector does: start `argv` on a host with stdin, stdout and stderr as pipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol

from ddtree_deploy.errors import DeployError

TRANSPORTS = ("openssh", "fabric", "local")


@dataclass(frozen=True, slots=True)
class Host:
    """A place that commands can name: an address, a hop, a venv.

    `transport` is `local`, `openssh` or `fabric`; `address` is what `ssh` takes (alias or user@name); `via` is a hop
    behind it (`pct:200`, `docker:NAME`) or empty; `venv` is absolute or starts with `~/`. `service_user` and
    `service_env` are whom and what environment the import probe imitates. `host_key` is a pinned fingerprint
    (`SHA256:...`), `ssh_config` a client configuration read in place of the user's (`ssh -F`). `origin` says where the
    definition came from.
    """

    name: str
    transport: str = "openssh"
    address: str = ""
    via: str = ""
    venv: str = ""
    python: str = ""
    service_user: str = ""
    service_env: Mapping[str, str] = field(default_factory=dict)
    host_key: str = ""
    ssh_options: tuple[str, ...] = ()
    ssh_config: str = ""
    accept_new_host_key: bool = False
    origin: str = ""


class Channel(Protocol):
    """A process on the other side: raw byte pipes and its end.

    `stdin` and `stdout` are unbuffered binary files. `stdin_fd`/`stdout_fd` are real descriptors where the transport
    has them (then bulk data may go by `sendfile`), else None. `close()` ends the process if it still runs and frees
    everything; it never raises. `wait()` gives the exit status, or None when the time-out (seconds) passed first.
    `failure()` explains, once the process ended without having spoken, why: the transport's own words plus the
    connector's hint, as a DeployError (HostUnreachable, HostKeyProblem, ...). `notices()` is what the user should be
    told about the connection itself, once the process has spoken (the fingerprint that `accept_new_host_key` recorded).
    """

    stdin: BinaryIO
    stdout: BinaryIO
    stdin_fd: int | None
    stdout_fd: int | None

    def wait(self, timeout: float | None = None) -> int | None: ...

    def stderr_tail(self) -> str: ...

    def failure(self) -> DeployError: ...

    def notices(self) -> tuple[str, ...]: ...

    def close(self) -> None: ...


class Connector(Protocol):
    """Start a process on one host. Raises a DeployError when it can not even be tried."""

    host: Host

    def start(self, argv: Sequence[str]) -> Channel: ...
