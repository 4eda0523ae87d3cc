"""The command line of `ssh`, and with it what a user's configuration can not weaken."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from ddtree_deploy.errors import UsageProblem
from ddtree_deploy.hosts import key_errors, known_hosts
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.hosts.ssh_config import destination, settings

# ssh keeps the first value it obtains, so these can not be weakened by ssh_options or by the user's configuration.
# UpdateHostKeys would edit known_hosts behind the user's back, DNS could overrule it; LogLevel and FingerprintHash feed
# ssh_log.
_FIXED = (
    "BatchMode=yes",
    "UpdateHostKeys=no",
    "VerifyHostKeyDNS=no",
    "NoHostAuthenticationForLocalhost=no",
    "FingerprintHash=sha256",
    "LogLevel=DEBUG1",
    "RemoteCommand=none",
    "ClearAllForwardings=yes",
)
# ssh gives up one interval after the last unanswered question: 15 * (2 + 1) = 45 s, well within the promised minute.
_DEFAULTS = ("ConnectTimeout=15", "ServerAliveInterval=15", "ServerAliveCountMax=2")
_OWNED = {option.split("=")[0].lower() for option in _FIXED} | {"stricthostkeychecking"}


def ssh_argv(host: Host, argv: Sequence[str], log: str) -> list[str]:
    """Build the command line; ssh's own log goes to the file `log`. For a first contact, make known_hosts ready."""
    options = [*_key_options(host), *_FIXED, *host.ssh_options, *_DEFAULTS]
    flags = ["-T", "-x", "-a", "-E", log, *(word for option in options for word in ("-o", option))]
    config = ["-F", host.ssh_config] if host.ssh_config else []
    return ["ssh", *config, *flags, "--", destination(host.address or host.name), shlex.join(argv)]


def check_options(host: Host) -> None:
    """Raise UsageProblem when `ssh_options` touch what keeps impostors out."""
    for option in host.ssh_options:
        if (key := option.replace("=", " ").split(" ")[0]).lower() in _OWNED:
            raise UsageProblem(f"`ssh_options` of `{host.name}` may not set {key}", mend=f"remove `{option}`")


def _key_options(host: Host) -> list[str]:
    """Say which host keys pass: recorded ones, the pinned one, or (asked for, and none on record yet) a new one."""
    if not (host.host_key or host.accept_new_host_key):
        return ["StrictHostKeyChecking=yes"]
    where = settings(host.address or host.name, ssh_config=host.ssh_config, options=host.ssh_options)
    if host.host_key:
        # ssh asks the command for the keys of a host, and it answers for the pinned one alone. No shared connection:
        # its key was somebody else's decision.
        judge = (sys.executable, "-I", "-S", known_hosts.__file__, host.host_key, "%H", "%t", "%K")
        command = " ".join(f'"{word}"' for word in (*judge, *(f.replace("%", "%%") for f in where.known_hosts_files)))
        return ["StrictHostKeyChecking=yes", f"KnownHostsCommand={command}", "ControlPath=none"]
    if known_hosts.recorded(known_hosts.load(where.known_hosts_files), where.known_names):
        # accept-new would let in a key of another kind than those on record.
        return ["StrictHostKeyChecking=yes"]
    known_hosts.end_last_line(key_errors.recordable(host.name, where.user_known_hosts))
    return ["StrictHostKeyChecking=accept-new"]
