"""A host behind fabric (paramiko), for machines without an `ssh` program or by `transport = "fabric"`.

Fabric by itself lets a changed host key pass (its issue 1804): every connection here, jumps too, gets a `KeyPolicy`.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fabric
import paramiko

from ddtree_deploy.hosts.base import Channel, Host
from ddtree_deploy.hosts.fabric_channel import CONNECT_ERRORS, FabricChannel, connect_problem
from ddtree_deploy.hosts.fabric_keys import KeyPolicy
from ddtree_deploy.hosts.fabric_proxy import Proxy
from ddtree_deploy.hosts.ssh_config import settings

CONNECT_SECONDS = 15
KEEPALIVE_SECONDS = 15
# Else its tracebacks reach stderr when nobody configured logging.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class FabricConnector:
    """Start processes over fabric. `start` raises HostKeyProblem or HostUnreachable when the login fails."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def start(self, argv: Sequence[str]) -> Channel:
        notices: list[str] = []
        undo = contextlib.ExitStack()
        try:
            session = _connect(self.host, undo, notices).transport.open_session(timeout=CONNECT_SECONDS)
            session.exec_command(shlex.join(argv))
            return FabricChannel(self.host.name, argv, session, tuple(notices), undo)
        except BaseException as problem:
            undo.close()
            if isinstance(problem, CONNECT_ERRORS):
                raise connect_problem(self.host.name, problem) from problem
            raise


def _connect(host: Host, undo: contextlib.ExitStack, notices: list[str], gateway: Any = None) -> Any:
    """Open the jumps before `host`, outermost first, then the host; `undo` closes what was opened."""
    where = settings(host.address or host.name, ssh_config=host.ssh_config, options=host.ssh_options)
    for hop in where.proxy_jump if gateway is None else ():
        jump = replace(host, name=hop, address=hop, host_key="", ssh_options=())
        gateway = _connect(jump, undo, notices, gateway)
    proxy = Proxy(where.proxy_command) if where.proxy_command and gateway is None else None
    if proxy:
        undo.callback(proxy.close)
    try:
        policy = KeyPolicy(host, where)
        connection = fabric.Connection(
            where.hostname,
            user=where.user,
            port=where.port,
            gateway=gateway or False,
            connect_timeout=CONNECT_SECONDS,
            # An empty configuration: `settings` has read the real one, which paramiko would misread (no Include).
            config=fabric.Config(lazy=True, ssh_config=paramiko.SSHConfig()),
            connect_kwargs={
                "sock": proxy.socket if proxy else None,
                "key_filename": [file for file in where.identity_files if Path(file).is_file()],
                "allow_agent": where.use_agent,
                "look_for_keys": False,
                "banner_timeout": CONNECT_SECONDS,
                "auth_timeout": CONNECT_SECONDS,
                "transport_factory": policy.transport,
            },
        )
        connection.client.set_missing_host_key_policy(policy)
        undo.callback(connection.client.close)
        connection.open()
    except CONNECT_ERRORS as problem:
        raise connect_problem(host.name, problem, proxy.words() if proxy else ()) from problem
    connection.transport.set_keepalive(KEEPALIVE_SECONDS)
    notices += policy.notices
    return connection
