"""What OpenSSH's own log (`-E FILE`, LogLevel DEBUG1) says of a connection, apart from the remote's stderr."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ddtree_deploy.errors import HostKeyProblem, HostUnreachable
from ddtree_deploy.hosts import key_errors
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.hosts.known_hosts import Entry

_REFUSED = "Host key verification failed"
_DEBUG = re.compile(r"^debug\d: ")
_LOGGED_IN = re.compile(r"^(debug1: )?Authenticated to |^debug1: mux_client_request_session", re.MULTILINE)
_EXITED = re.compile(r"^debug1: Exit status \d", re.MULTILINE)
_SERVER_KEY = re.compile(r"^debug1: Server host key: (\S+) (\S+)", re.MULTILINE)
_OFFENDING = re.compile(r"^Offending \S+ key in (.+:\d+)", re.MULTILINE)
_NOISE = re.compile(
    r"^@|^$|^IT IS POSSIBLE|^Someone could|^It is also|^\s*remove with|^\s*ssh-keygen"
    r"|^Warning: Permanently|^Authenticated to|^Transferred: |^Bytes per second: "
)


@dataclass(frozen=True, slots=True)
class SshLog:
    """One connection: the key that the server showed (`ssh-ed25519 SHA256:...`), and how far it got."""

    server_key: str
    authenticated: bool
    recorded: bool
    exit_seen: bool
    words: tuple[str, ...]
    text: str

    @classmethod
    def parse(cls, text: str) -> SshLog:
        text = text.replace("\r", "")
        keys = _SERVER_KEY.findall(text)
        words = tuple(line for line in text.splitlines() if not _DEBUG.match(line) and not _NOISE.match(line))
        return cls(
            server_key=" ".join(keys[-1]) if keys else "",
            authenticated=bool(_LOGGED_IN.search(text)),
            recorded="Warning: Permanently added " in text,
            exit_seen=bool(_EXITED.search(text)),
            words=words,
            text=text,
        )


def host_key_problem(host: Host, log: SshLog, name: str, on_record: Sequence[Entry]) -> HostKeyProblem | None:
    """Return the error when the log shows that the connection failed over the host key, else None.

    `name` is the host's in known_hosts, `on_record` its entries there.
    """
    if log.authenticated or _REFUSED not in log.text:
        return None
    offered = log.server_key or "not shown"
    if host.host_key and host.host_key not in offered:
        return key_errors.not_pinned(host.name, offered, host.host_key)
    if "was revoked" in log.text:
        return key_errors.revoked(host.name, offered)
    if on_record:
        # ssh calls a key unknown when only keys of other kinds are on record.
        place = _OFFENDING.search(log.text)
        return key_errors.changed(host.name, offered, name, place[1] if place else on_record[0].place)
    return key_errors.unknown(host.name, offered)


def connection_problem(host: str, log: SshLog, stderr: str) -> HostUnreachable:
    """Explain a connection that was not made, was refused, or was lost, in ssh's own words."""
    causes = log.words + tuple(line for line in stderr.splitlines() if line.strip() and line not in log.words)
    said = "\n".join(causes)
    if log.authenticated:
        return HostUnreachable(f"lost the connection to `{host}`", mend="run the same command again", causes=causes)
    if "Permission denied" in said or "authentication failures" in said:
        mend = f"make `ssh -o BatchMode=yes {host} true` work: a key in the agent, or an `IdentityFile`"
        return HostUnreachable(f"`{host}` refuses the login", mend=mend, causes=causes)
    return HostUnreachable(f"cannot reach `{host}`", causes=causes)
