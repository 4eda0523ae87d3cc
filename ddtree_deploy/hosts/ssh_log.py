"""What OpenSSH's own log (`-E FILE`, LogLevel DEBUG1) says of a connection, apart from the remote's stderr."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ddtree_deploy.errors import DeployError, HostKeyProblem, HostUnreachable

_DEBUG = re.compile(r"^debug\d: ")
_LOGGED_IN = re.compile(r"^(debug1: )?Authenticated to |^debug1: mux_client_request_session", re.MULTILINE)
_EXITED = re.compile(r"^debug1: Exit status \d", re.MULTILINE)
_SERVER_KEY = re.compile(r"^debug1: Server host key: (\S+) (\S+)", re.MULTILINE)
_CHANGED_NAME = re.compile(r"^Host key for (\S+) has changed", re.MULTILINE)
_OFFENDING = re.compile(r"^Offending \S+ key in (.+):(\d+)", re.MULTILINE)
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


def host_key_problem(host: str, log: SshLog, pin: str = "") -> HostKeyProblem | None:
    """Return the error when the log shows that the connection failed over the host key, else None."""
    offered = log.server_key or "unknown"
    if log.authenticated:
        return None
    if pin and "Host key verification failed" in log.text:
        return HostKeyProblem(
            f"`{host}` does not show the pinned host key: {offered}, pinned {pin}",
            mend=f"if the host was reinstalled, compare on its console and correct `host_key` of `[hosts.{host}]`",
        )
    if "REVOKED HOST KEY" in log.text or "was revoked" in log.text:
        return HostKeyProblem(f"the host key of `{host}` is revoked: {offered}", mend=_REVOKED_MEND, causes=log.words)
    if "HAS CHANGED" in log.text:
        name, place = _CHANGED_NAME.search(log.text), _OFFENDING.search(log.text)
        return HostKeyProblem(
            f"the host key of `{host}` is not the recorded one: {offered}",
            mend=changed_mend(name[1] if name else host, place[1] if place else ""),
            causes=(f"recorded in {place[1]}:{place[2]}",) if place else (),
        )
    if "Host key verification failed" in log.text:
        return HostKeyProblem(f"the host key of `{host}` is unknown: {offered}", mend=unknown_mend())
    return None


_REVOKED_MEND = "do not connect: the key was withdrawn; ask who runs the host for its new key"


def changed_mend(name: str, file: str) -> str:
    """Say what to do about a changed key; no flag of ours accepts one."""
    where = f"-f {file} " if file else ""
    return f"if the host was reinstalled, compare the fingerprint on its console, then `ssh-keygen {where}-R '{name}'`"


def unknown_mend() -> str:
    return "compare the fingerprint with the host's own (`ssh-keygen -lf`), then run again with `--accept-new-host-key`"


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


def any_problem(host: str, log: SshLog, stderr: str, pin: str = "") -> DeployError:
    return host_key_problem(host, log, pin) or connection_problem(host, log, stderr)
