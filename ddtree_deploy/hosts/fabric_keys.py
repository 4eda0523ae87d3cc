"""Who may answer, for paramiko: it knows neither `@revoked` nor patterns, so our own reading of the files judges."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import paramiko

from ddtree_deploy.hosts import key_errors, known_hosts
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.hosts.known_hosts import Verdict
from ddtree_deploy.hosts.ssh_config import SshSettings

DEAD_MILLISECONDS = 30_000  # and up to 15 s before them until a keepalive goes unanswered


class KeyPolicy(paramiko.MissingHostKeyPolicy):  # type: ignore[misc]
    """Let a server in when known_hosts (and the pin) say so. paramiko asks it always, as its own table stays empty."""

    def __init__(self, host: Host, where: SshSettings) -> None:
        self.host, self.where = host, where
        self.notices: list[str] = []
        self.entries = known_hosts.load(where.known_hosts_files)

    def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:  # noqa: ARG002 - paramiko's signature
        name, kind, blob = self.host.name, key.get_name(), key.get_base64()
        fingerprint = known_hosts.fingerprint(blob)
        offered = f"{kind} {fingerprint}"
        found = known_hosts.judge(self.entries, self.where.known_names, kind, blob)
        if found.verdict is Verdict.REVOKED:
            raise key_errors.revoked(name, offered)
        if self.host.host_key:
            if fingerprint != self.host.host_key:
                raise key_errors.not_pinned(name, offered, self.host.host_key)
            if known_hosts.pin_admits(found, kind):
                return
        if found.verdict is Verdict.CHANGED:
            raise key_errors.changed(name, offered, self.where.known_names[0], found.entry.place if found.entry else "")
        if found.verdict is Verdict.UNKNOWN:
            if not self.host.accept_new_host_key:
                raise key_errors.unknown(name, offered)
            file = key_errors.recordable(name, self.where.user_known_hosts)
            known_hosts.record(file, self.where.known_names[0], kind, blob, hashed=self.where.hash_known_hosts)
            self.notices.append(f"recorded the host key of `{name}`: {offered}")

    def transport(self, sock: Any, **options: Any) -> Any:
        """Make the transport: recorded key types and AES-GCM first, an end to silence.

        The window stays paramiko's 2 MiB: 32 MiB made downloads several times slower, and uploads have the server's.
        """
        with contextlib.suppress(OSError, AttributeError):
            # paramiko's keepalive does not wait for an answer; unanswered, it ends the connection by this.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_MILLISECONDS)
        made = paramiko.Transport(sock, **options)
        kinds = {entry.kind for entry in known_hosts.recorded(self.entries, self.where.known_names)}
        kinds |= {"rsa-sha2-512", "rsa-sha2-256"} if "ssh-rsa" in kinds else set()
        security = made.get_security_options()
        security.key_types = sorted(security.key_types, key=lambda kind: kind not in kinds)
        # A third less CPU than paramiko's first choice, AES-CTR with a MAC in Python.
        security.ciphers = sorted(security.ciphers, key=lambda cipher: "gcm" not in cipher)
        return made
