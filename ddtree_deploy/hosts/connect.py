"""Choose the connector of a host."""

from __future__ import annotations

import shutil
from dataclasses import replace

from ddtree_deploy.errors import UsageProblem
from ddtree_deploy.hosts.base import TRANSPORTS, Connector, Host
from ddtree_deploy.hosts.ssh_argv import check_options


def connector(host: Host) -> Connector:
    """Return the connector of `host`: the system's `ssh` where it exists, unless the host asks for fabric.

    Raises UsageProblem for a transport or hop that this version does not know.
    """
    if host.via:
        return _behind(host)
    if host.transport == "local":
        from ddtree_deploy.hosts.local import LocalConnector

        return LocalConnector(host)
    if host.transport not in TRANSPORTS:
        raise UsageProblem(
            f"unknown transport of `{host.name}`: `{host.transport}`", mend=f"use one of {', '.join(TRANSPORTS)}"
        )
    check_options(host)
    if host.transport == "fabric" or shutil.which("ssh") is None:
        # Here and not above: paramiko takes 0.3 s to import.
        from ddtree_deploy.hosts.fabric_ssh import FabricConnector

        return FabricConnector(host)
    from ddtree_deploy.hosts.openssh import OpenSshConnector

    return OpenSshConnector(host)


def _behind(host: Host) -> Connector:
    """Return the connector of a host's last hop; the way to that hop is the host without it."""
    node = connector(replace(host, via=""))
    match host.via.partition(":")[0]:
        case "pct":
            from ddtree_deploy.hosts.pct import PctConnector

            return PctConnector(host, node)
        case "docker" | "podman":
            from ddtree_deploy.hosts.docker import DockerConnector

            return DockerConnector(host, node)
    mend = "use `pct:NUMBER`, `docker:NAME` or `podman:NAME`"
    raise UsageProblem(f"`{host.name}` is behind `{host.via}`: there is no such hop", mend=mend)
