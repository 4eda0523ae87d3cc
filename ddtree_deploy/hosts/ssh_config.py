"""What the user's ssh configuration says of a host: asked of `ssh -G` if there is an `ssh`, else read by paramiko."""

from __future__ import annotations

import glob
import io
import os
import pwd
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddtree_deploy.errors import HostUnreachable, UsageProblem
from ddtree_deploy.hosts.known_hosts import lookup_names, matches

SYSTEM_CONFIG = Path("/etc/ssh/ssh_config")
MAX_INCLUDE_DEPTH = 16  # OpenSSH's own limit
_DEFAULT_KEYS = ("id_rsa", "id_ecdsa", "id_ed25519")


@dataclass(frozen=True, slots=True)
class SshSettings:
    """The part of a host's configuration that decides where a connection goes, as whom, and who may answer."""

    hostname: str
    user: str
    port: int
    host_key_alias: str
    user_known_hosts: tuple[str, ...]
    global_known_hosts: tuple[str, ...]
    identity_files: tuple[str, ...]
    use_agent: bool
    hash_known_hosts: bool
    proxy_jump: tuple[str, ...]
    proxy_command: str

    @property
    def known_names(self) -> tuple[str, ...]:
        return lookup_names(self.hostname, self.port, self.host_key_alias)

    @property
    def known_hosts_files(self) -> tuple[str, ...]:
        return self.user_known_hosts + self.global_known_hosts


def home() -> Path:
    """Return the home that ssh means: the password database's, not $HOME's."""
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return Path.home()


def _local_user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return os.environ.get("USER", "")


def settings(address: str, *, ssh_config: str = "", options: Sequence[str] = ()) -> SshSettings:
    """Return the settings of `address` (alias, user@name, name:port or ssh:// URI).

    Raises HostUnreachable when `ssh -G` rejects the configuration, and UsageProblem when there is no `ssh` and the file
    uses Include, which paramiko would silently ignore.
    """
    if shutil.which("ssh") is None:
        return _from_words(_by_paramiko(address, ssh_config, options))
    config = ["-F", ssh_config] if ssh_config else []
    command = ["ssh", *config, *(w for option in options for w in ("-o", option)), "-G", "--", destination(address)]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    if shown.returncode:
        raise HostUnreachable(f"`ssh` cannot read the configuration of `{address}`", causes=(shown.stderr.strip(),))
    words: dict[str, list[str]] = {}
    for line in shown.stdout.splitlines():
        key, _, value = line.partition(" ")
        words.setdefault(key.lower(), []).append(value)
    return _from_words(words)


def destination(address: str) -> str:
    """Return what `ssh` takes for `address`; it knows name:port only as a URI."""
    bare = address.rpartition("@")[2]
    return f"ssh://{address}" if bare.count(":") == 1 and "//" not in address else address


def _from_words(words: Mapping[str, list[str]]) -> SshSettings:
    def one(key: str, default: str = "") -> str:
        value = words.get(key, [default])[0]
        return "" if value == "none" else value

    own = home()
    user = one("user") or _local_user()
    tokens = {
        "%d": str(own),
        "%h": one("hostname"),
        "%r": user,
        "%p": one("port", "22"),
        "%u": _local_user(),
        "%%": "%",
    }

    def expand(value: str) -> str:
        return re.sub("%.", lambda token: tokens.get(token[0], token[0]), value)

    def paths(values: Sequence[str]) -> tuple[str, ...]:
        expanded = [expand(str(own / value[2:]) if value.startswith("~/") else value) for value in values]
        return tuple(path for path in expanded if path != "none")

    return SshSettings(
        hostname=one("hostname"),
        user=user,
        port=int(one("port", "22")),
        host_key_alias=one("hostkeyalias"),
        user_known_hosts=paths(shlex.split(one("userknownhostsfile", "~/.ssh/known_hosts ~/.ssh/known_hosts2"))),
        global_known_hosts=paths(shlex.split(one("globalknownhostsfile", "/etc/ssh/ssh_known_hosts"))),
        identity_files=paths(words.get("identityfile", [f"~/.ssh/{name}" for name in _DEFAULT_KEYS])),
        use_agent=one("identitiesonly", "no") == "no" and words.get("identityagent", [""])[0] != "none",
        hash_known_hosts=one("hashknownhosts", "no") == "yes",
        proxy_jump=tuple(hop for hop in one("proxyjump").split(",") if hop),
        proxy_command=expand(one("proxycommand")),
    )


def _by_paramiko(address: str, ssh_config: str, options: Sequence[str]) -> dict[str, list[str]]:
    import paramiko

    text = "".join(f"{option.replace('=', ' ', 1)}\n" for option in options)
    for file in [Path(ssh_config)] if ssh_config else [home() / ".ssh/config", SYSTEM_CONFIG]:
        if file.is_file():
            text += f"Host *\n{file.read_text('utf-8', 'replace')}\n"
            if any(words[0] == "include" for words in _lines(file)):
                raise UsageProblem(
                    f"{file} uses Include, which only the `ssh` program can read",
                    mend="install the OpenSSH client, or name a file without Include: `ssh_config` in ddtree.toml",
                )
    user, _, rest = destination(address).removeprefix("ssh://").rpartition("@")
    name, _, port = rest.partition(":") if rest.count(":") == 1 else (rest, "", "")
    config = paramiko.SSHConfig()
    try:
        config.parse(io.StringIO(text))
        found = config.lookup(name)
    except paramiko.SSHException as problem:
        raise HostUnreachable(f"cannot read the ssh configuration of `{address}`: {problem}") from problem
    words = {key: value if isinstance(value, list) else [value] for key, value in found.items()}
    given = {"user": user, "port": port}
    return words | {key: [value] for key, value in given.items() if value}


def _lines(file: Path) -> Iterator[list[str]]:
    """Yield each directive as words, the first in lower case. Unbalanced quotes and unreadable files yield nothing."""
    try:
        text = file.read_text("utf-8", "replace")
    except OSError:
        return
    for line in text.splitlines():
        try:
            words = shlex.split(line.replace("=", " ", 1) if " " not in line.strip().partition("=")[0] else line, True)
        except ValueError:
            continue
        if words:
            yield [words[0].lower(), *words[1:]]


def declared_hosts(ssh_config: str = "") -> list[list[str]]:
    """Return the pattern list of each `Host` line in the user's and the system's files, Includes followed."""
    roots = [Path(ssh_config)] if ssh_config else [home() / ".ssh/config", SYSTEM_CONFIG]
    return [
        patterns
        for root in roots
        for patterns in _declared(root, SYSTEM_CONFIG.parent if root == SYSTEM_CONFIG else home() / ".ssh", 0)
    ]


def _declared(file: Path, base: Path, depth: int) -> Iterator[list[str]]:
    for keyword, *values in _lines(file):
        if keyword == "host":
            yield values
        elif keyword == "include" and depth < MAX_INCLUDE_DEPTH:
            for value in values:
                pattern = str(home() / value[2:]) if value.startswith("~/") else str(base / value)
                for found in sorted(glob.glob(pattern)):  # noqa: PTH207 - the pattern may be absolute
                    yield from _declared(Path(found), base, depth + 1)


def is_declared(name: str, ssh_config: str = "") -> bool:
    """Tell whether a `Host` line means this name; `Host *` means nobody in particular."""
    return any(matches([p for p in patterns if p != "*"], name) for patterns in declared_hosts(ssh_config))


def aliases(ssh_config: str = "") -> list[str]:
    """List the aliases that are spelled out, without wildcards."""
    names = {name for patterns in declared_hosts(ssh_config) for name in patterns if not set(name) & set("*?!")}
    return sorted(names)


def is_address(name: str) -> bool:
    """Tell whether `name` is user@host, an ssh:// URI, an IP address, or a name that resolves."""
    if not name or name.startswith("-") or (set(name) & set(" \t\n/") and not name.startswith("ssh://")):
        return False
    if "@" in name or name.startswith("ssh://"):
        return True
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError):
        return False
    return True
