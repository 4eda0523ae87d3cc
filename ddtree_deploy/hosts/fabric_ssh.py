"""A host behind fabric (paramiko), for machines without an `ssh` program or by `transport = "fabric"`.

Fabric by itself lets a changed host key pass (its issue 1804): every connection here, jumps too, gets a `KeyPolicy`.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fabric
import paramiko

from ddtree_deploy.errors import DeployError
from ddtree_deploy.hosts.base import Channel, Host
from ddtree_deploy.hosts.fabric_channel import FabricChannel, close_all, connect_problem
from ddtree_deploy.hosts.fabric_keys import KeyPolicy
from ddtree_deploy.hosts.ssh_config import settings

CONNECT_SECONDS = 15
# Else its tracebacks reach stderr when nobody configured logging.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class FabricConnector:
    """Start processes over fabric. `start` raises HostKeyProblem or HostUnreachable when the login fails."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def start(self, argv: Sequence[str]) -> Channel:
        policies: list[KeyPolicy] = []
        chain = _chain(self.host, policies)
        try:
            chain[-1].open()
            chain[-1].transport.set_keepalive(15)
            session = chain[-1].create_session()
            session.exec_command(shlex.join(argv))
        except (OSError, EOFError, paramiko.SSHException, DeployError) as problem:
            close_all(chain)
            raise connect_problem(self.host.name, problem) from problem
        notices = tuple(policy.recorded for policy in policies if policy.recorded)
        return FabricChannel(self.host.name, argv, session, chain, notices)


def _chain(host: Host, policies: list[KeyPolicy], gateway: Any = None) -> list[Any]:
    """Build the connection and the jumps before it, outermost first; nothing is opened yet."""
    where = settings(host.address or host.name, ssh_config=host.ssh_config, options=host.ssh_options)
    chain: list[Any] = []
    for hop in where.proxy_jump if gateway is None else ():
        jump = replace(host, name=hop, address=hop, host_key="", ssh_options=())
        chain += _chain(jump, policies, chain[-1] if chain else None)
    policies.append(policy := KeyPolicy(host, where))
    connection = fabric.Connection(
        where.hostname,
        user=where.user,
        port=where.port,
        gateway=gateway or (chain[-1] if chain else where.proxy_command or False),
        connect_timeout=CONNECT_SECONDS,
        # An empty configuration: `settings` has read the real one, which paramiko would misread (no Include).
        config=fabric.Config(lazy=True, ssh_config=paramiko.SSHConfig()),
        connect_kwargs={
            "key_filename": [file for file in where.identity_files if Path(file).is_file()],
            "allow_agent": where.use_agent,
            "look_for_keys": False,
            "banner_timeout": CONNECT_SECONDS,
            "auth_timeout": CONNECT_SECONDS,
            "transport_factory": policy.transport,
        },
    )
    connection.client.set_missing_host_key_policy(policy)
    return [*chain, connection]
