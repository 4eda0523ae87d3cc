"""The four ways in which a host's key stops a connection, in the same words for both transports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ddtree_deploy.errors import HostKeyProblem


def unknown(host: str, offered: str) -> HostKeyProblem:
    mend = (
        "compare it with the host's own (`ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` on its console), "
        "then run again with `--accept-new-host-key`"
    )
    return HostKeyProblem(f"the host key of `{host}` is unknown: {offered}", mend=mend)


def changed(host: str, offered: str, name: str, place: str = "") -> HostKeyProblem:
    """Refuse a key that is not the recorded one; no flag of ours accepts it. `place` is `file:line`."""
    file = f"-f {place.rpartition(':')[0]} " if place else ""
    return HostKeyProblem(
        f"the host key of `{host}` is not the recorded one: {offered}",
        mend=f"if the host was reinstalled, compare on its console, then `ssh-keygen {file}-R '{name}'`",
        causes=(f"recorded in {place}",) if place else (),
    )


def revoked(host: str, offered: str) -> HostKeyProblem:
    mend = "do not connect: the key was withdrawn, ask who runs the host for its new one"
    return HostKeyProblem(f"the host key of `{host}` is revoked: {offered}", mend=mend)


def not_pinned(host: str, offered: str, pin: str) -> HostKeyProblem:
    mend = f"if the host was reinstalled, compare on its console, then correct `host_key` of `[hosts.{host}]`"
    return HostKeyProblem(f"`{host}` does not show the pinned host key: {offered}, pinned {pin}", mend=mend)


def recordable(host: str, files: Sequence[str]) -> Path:
    """Return the file in which a new key of `host` is recorded. Raises HostKeyProblem when the user's is no file.

    With /dev/null each contact would be a first one, and a changed key would pass.
    """
    if files and not files[0].startswith("/dev/"):
        return Path(files[0])
    mend = "give this host a real UserKnownHostsFile, or pin the key with `host_key`"
    raise HostKeyProblem(f"the host key of `{host}` has nowhere to be recorded: {' '.join(files) or 'none'}", mend=mend)
