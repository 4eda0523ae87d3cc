"""A host behind the system's `ssh`: its configuration, agents, jumps and known_hosts come for free."""

from __future__ import annotations

import contextlib
import os
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ddtree_deploy.errors import DeployError, HostUnreachable, UsageProblem
from ddtree_deploy.hosts.base import Channel, Host
from ddtree_deploy.hosts.pipes import PipeChannel, early_death
from ddtree_deploy.hosts.ssh_log import SshLog, any_problem

# ssh keeps the first value it obtains, so these can not be weakened by ssh_options or by the user's configuration.
# UpdateHostKeys would edit known_hosts behind the user's back; LogLevel and FingerprintHash feed ssh_log.
_FIXED = (
    "BatchMode=yes",
    "UpdateHostKeys=no",
    "NoHostAuthenticationForLocalhost=no",
    "FingerprintHash=sha256",
    "LogLevel=DEBUG1",
    "RemoteCommand=none",
    "ClearAllForwardings=yes",
)
# ssh gives up one interval after the last unanswered question: 15 * (2 + 1) = 45 s, well within the promised minute.
_DEFAULTS = ("ConnectTimeout=15", "ServerAliveInterval=15", "ServerAliveCountMax=2")
_OWNED = {option.split("=")[0].lower() for option in _FIXED} | {"stricthostkeychecking"}


def ssh_argv(host: Host, argv: Sequence[str], log: str) -> list[str]:
    """Build the command line. Raises UsageProblem when `ssh_options` touch what keeps impostors out."""
    for option in host.ssh_options:
        if (key := option.replace("=", " ").split(" ")[0]).lower() in _OWNED:
            raise UsageProblem(f"`ssh_options` of `{host.name}` may not set {key}", mend=f"remove `{option}`")
    strict = "accept-new" if host.accept_new_host_key else "yes"
    options = [f"StrictHostKeyChecking={strict}", *_FIXED, *host.ssh_options, *_DEFAULTS]
    config = ["-F", host.ssh_config] if host.ssh_config else []
    flags = [word for option in options for word in ("-o", option)]
    return ["ssh", "-T", "-x", "-a", "-E", log, *config, *flags, "--", host.address or host.name, shlex.join(argv)]


class _SshChannel(PipeChannel):
    def __init__(self, host: Host, argv: Sequence[str], log: Path) -> None:
        self._host, self._argv, self._log = host, argv, log
        super().__init__(ssh_argv(host, argv, str(log)), self._why)

    def _read_log(self) -> SshLog:
        return SshLog.parse(self._log.read_text("utf-8", "replace") if self._log.exists() else "")

    def _why(self, status: int | None, stderr: str) -> DeployError:
        log = self._read_log()
        if status == 255 and not log.exit_seen:
            return any_problem(self._host.name, log, stderr, self._host.host_key)
        return early_death(self._host.name, self._argv, status, stderr)

    def notices(self) -> tuple[str, ...]:
        log = self._read_log()
        return (f"recorded the host key of `{self._host.name}`: {log.server_key}",) if log.recorded else ()

    def close(self) -> None:
        super().close()
        with contextlib.suppress(OSError):
            self._log.unlink()


class OpenSshConnector:
    """Start processes over `ssh HOST`, without a terminal. Raises HostUnreachable when there is no `ssh` to run."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def start(self, argv: Sequence[str]) -> Channel:
        descriptor, log = tempfile.mkstemp(prefix="ddtree-ssh-", suffix=".log")
        try:
            os.close(descriptor)
            return _SshChannel(self.host, argv, Path(log))
        except (OSError, DeployError) as problem:
            Path(log).unlink()
            if isinstance(problem, DeployError):
                raise
            raise HostUnreachable(f"cannot start `ssh` for `{self.host.name}`: {problem}") from problem
