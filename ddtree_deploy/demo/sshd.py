"""A real sshd on 127.0.0.1 for the demo and the tests: own keys, own client configuration, no privileges needed."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddtree_deploy.errors import HostUnreachable

START_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class LoopbackSshd:
    """A running sshd. `client_config` is for `ssh -F`: it defines each alias; `log` is the server's own log."""

    port: int
    client_config: Path
    known_hosts: Path
    identity: Path
    host_keys: tuple[Path, ...]
    log: Path
    pid: int


def sshd_binary() -> str | None:
    """Return the path of sshd, which is rarely on the PATH of an ordinary user, or None."""
    return shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/sbin:/usr/local/libexec")


def make_key(path: Path, kind: str = "ed25519") -> Path:
    """Make a key pair without a passphrase at `path` unless it is there. `kind` is what `ssh-keygen -t` takes."""
    if not path.exists():
        subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", "ddtree-demo", "-f", path], check=True)
    return path


def _user() -> str:
    # Not $USER, which `su` and containers leave stale.
    return pwd.getpwuid(os.getuid()).pw_name


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def sshd_config(port: int, keys: Sequence[Path], authorized: Path, address: str = "127.0.0.1") -> str:
    """Return a server configuration that lets only the current user in, only by key."""
    lines = [
        f"ListenAddress {address}",
        f"Port {port}",
        *(f"HostKey {key}" for key in keys),
        f"AuthorizedKeysFile {authorized}",
        "AuthenticationMethods publickey",
        f"AllowUsers {_user()}",
        "PermitRootLogin prohibit-password",
        # The keys lie in a directory of ours, whose parents may be writable by a group.
        "StrictModes no",
        "UsePAM no",
        "PidFile none",
        "LogLevel VERBOSE",
    ]
    return "\n".join(lines) + "\n"


def client_config(port: int, aliases: Sequence[str], identity: Path, known_hosts: Path, host: str = "127.0.0.1") -> str:
    """Return a client configuration in which each alias means this server."""
    return f"""Host {" ".join(aliases)}
    HostName {host}
    Port {port}
    User {_user()}
    IdentityFile {identity}
    IdentitiesOnly yes
    IdentityAgent none
    UserKnownHostsFile {known_hosts}
    GlobalKnownHostsFile /dev/null
"""


@contextlib.contextmanager
def loopback_sshd(
    root: Path,
    *,
    aliases: Sequence[str] = ("demo",),
    key_kinds: Sequence[str] = ("ed25519",),
    trusted: bool = True,
    environment: Mapping[str, str] | None = None,
) -> Iterator[LoopbackSshd]:
    """Run an sshd whose files lie in `root` until the block ends.

    Its host keys are known when `trusted`; `environment` is set for what it starts (a HOME without a slow `.bashrc`).
    Raises HostUnreachable when there is no sshd on this machine or it does not start, with its own words.
    """
    binary = sshd_binary()
    if binary is None or shutil.which("ssh-keygen") is None:
        raise HostUnreachable("there is no `sshd` on this machine", mend="install openssh-server")
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    keys = tuple(make_key(root / f"host_{kind}", kind) for kind in key_kinds)
    identity, known_hosts, log = make_key(root / "identity"), root / "known_hosts", root / "sshd.log"
    port = free_port()
    setenv = " ".join(f'"{name}={value}"' for name, value in (environment or {}).items())
    config = sshd_config(port, keys, identity.with_suffix(".pub"))
    (root / "sshd_config").write_text(config + (f"SetEnv {setenv}\n" if setenv else ""))
    (root / "ssh_config").write_text(client_config(port, aliases, identity, known_hosts))
    publics = (" ".join(key.with_suffix(".pub").read_text().split()[:2]) for key in keys)
    known_hosts.write_text("".join(f"[127.0.0.1]:{port} {public}\n" for public in publics) if trusted else "")
    with contextlib.suppress(OSError):
        # The privilege separation directory of a root sshd, which a container often lacks.
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    with log.open("ab") as sink:
        server = subprocess.Popen(
            [binary, "-D", "-e", "-f", str(root / "sshd_config")],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
    try:
        _wait_for_banner(port, server, log)
        yield LoopbackSshd(port, root / "ssh_config", known_hosts, identity, keys, log, server.pid)
    finally:
        server.terminate()
        server.wait()


def _wait_for_banner(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as probe:
            if probe.recv(4) == b"SSH-":
                return
        time.sleep(0.02)
    words = tuple(log.read_text("utf-8", "replace").splitlines()[-5:])
    raise HostUnreachable("`sshd` did not start on 127.0.0.1", mend=f"see {log}", causes=words)
