"""This machine as a host: the process is an ordinary child."""

from __future__ import annotations

from collections.abc import Sequence

from ddtree_deploy.hosts.base import Channel, Host
from ddtree_deploy.hosts.pipes import PipeChannel, early_death


class LocalConnector:
    """Start processes on this machine, as this user. Raises Incompatible when the program cannot be started."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def start(self, argv: Sequence[str]) -> Channel:
        name = self.host.name
        try:
            return PipeChannel(argv, lambda status, stderr: early_death(name, argv, status, stderr))
        except OSError as problem:
            # What a shell answers over ssh, so that all connectors tell a missing program alike.
            raise early_death(name, argv, 127, str(problem)) from problem
