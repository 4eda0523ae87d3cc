"""A host behind the system's `ssh`: its configuration, agents, jumps and known_hosts come for free."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from ddtree_deploy.errors import DeployError, HostUnreachable
from ddtree_deploy.hosts import known_hosts
from ddtree_deploy.hosts.base import Channel, Host
from ddtree_deploy.hosts.pipes import PipeChannel, early_death
from ddtree_deploy.hosts.ssh_argv import ssh_argv
from ddtree_deploy.hosts.ssh_config import settings
from ddtree_deploy.hosts.ssh_log import SshLog, connection_problem, host_key_problem

LOG_BYTES = 1 << 20


class _SshChannel(PipeChannel):
    def __init__(self, host: Host, argv: Sequence[str]) -> None:
        self._host, self._argv, self._text = host, argv, ""
        # In memory, with a name that only lives as long as we do: however this process ends, no file is left.
        self._log = os.fdopen(os.memfd_create("ssh-log"), "rb")
        try:
            super().__init__(ssh_argv(host, argv, f"/proc/{os.getpid()}/fd/{self._log.fileno()}"), self._why)
        except BaseException:
            self._log.close()
            raise

    def _read_log(self) -> SshLog:
        with contextlib.suppress(ValueError):  # closed, perhaps by another thread: what was read before stands
            self._text = os.pread(self._log.fileno(), LOG_BYTES, 0).decode("utf-8", "replace")
        return SshLog.parse(self._text)

    def _why(self, status: int | None, stderr: str) -> DeployError:
        log = self._read_log()
        if status != 255 or log.exit_seen:
            return early_death(self._host.name, self._argv, status, stderr)
        host = self._host
        try:
            where = settings(host.address or host.name, ssh_config=host.ssh_config, options=host.ssh_options)
        except DeployError as problem:
            return problem  # ssh could not read its configuration, and says so there
        on_record = known_hosts.recorded(known_hosts.load(where.known_hosts_files), where.known_names)
        wrong_key = host_key_problem(host, log, where.known_names[0], on_record)
        return wrong_key or connection_problem(host.name, log, stderr)

    def notices(self) -> tuple[str, ...]:
        log = self._read_log()
        return (f"recorded the host key of `{self._host.name}`: {log.server_key}",) if log.recorded else ()

    def close(self) -> None:
        super().close()
        self._read_log()
        self._log.close()


class OpenSshConnector:
    """Start processes over `ssh HOST`, without a terminal. Raises HostUnreachable when there is no `ssh` to run."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def start(self, argv: Sequence[str]) -> Channel:
        try:
            return _SshChannel(self.host, argv)
        except OSError as problem:
            raise HostUnreachable(f"cannot start `ssh` for `{self.host.name}`: {problem}") from problem
