"""A Proxmox container: `pct exec NUMBER -- ...` on its node, here or behind ssh (`via = "pct:200"`).

`pct exec` becomes `lxc-attach`, which hands on three pipes as they are, but puts a terminal between where one of them is one
(lxc-attach(1)), as with a wrapper around `pct`. So each start sends bytes that no terminal leaves alone through the very
pipe that is about to be used, and asks for their sha256. Where they do not come through whole, `pct_push` takes over.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence

from ddtree_deploy.errors import HostUnreachable
from ddtree_deploy.hosts.base import Channel, Connector, Host
from ddtree_deploy.hosts.hop import Hint, through, write_all

PROBE = bytes(range(256)) + b"\x03\x04\r\n\x1a\x11\x13\x7f~.\r" * 100 + hashlib.shake_128(b"ddtree").digest(1 << 16)
PROBE_SECONDS = 30.0
# The shell says hello, hashes what comes, and becomes the process. Since Proxmox VE 9 the environment may be empty.
_SHELL = (
    f"echo ddtree-hop; head -c {len(PROBE)} | sha256sum; "
    '[ "$HOME" ] || { HOME=$(getent passwd "$(id -u)" | cut -d: -f6); export HOME; }; exec "$@"'
)
HINTS = (
    Hint(r"container '?\d+'? not running|can only push files to a running", "container {inside} on {node} is not running",
         "`pct start {inside}` there"),
    Hint(r"configuration file '.*' does not exist", "there is no container {inside} on {node}",
         "see `pct list` there; in a cluster the container may live on another node"),
    Hint(r"please run as root", "`pct` wants root on {node}", "log in as root: `address = \"root@...\"` under [hosts.{host}]"),
    Hint(r"\bpct: (command )?not found|no such file or directory: 'pct'", "{node} has no `pct`: it is no Proxmox node",
         "`address` under [hosts.{host}] is the node, not the container"),
    Hint(r"lxc-attach: .*(failed to get (init pid|attach context)|connection refused)", "container {inside} on {node} can not be entered",
         "see `pct status {inside}` there"),
)  # fmt: skip


class PctConnector:
    """Start processes inside container NUMBER. `start` raises what the node's connector raises, and HostUnreachable."""

    def __init__(self, host: Host, node: Connector) -> None:
        self.host, self._node = host, node
        self._exec = ["pct", "exec", host.via.partition(":")[2], "--"]

    def start(self, argv: Sequence[str]) -> Channel:
        channel = through(self.host, self._node, [*self._exec, "sh", "-c", _SHELL, "sh", *argv], HINTS)
        deadline, watchdog = time.monotonic() + PROBE_SECONDS, threading.Timer(PROBE_SECONDS, channel.close)
        watchdog.start()
        try:
            why = probe(channel)
        except (OSError, ValueError):
            why = ""  # it ended: the channel knows why
        finally:
            watchdog.cancel()
        if not why and time.monotonic() > deadline:
            raise HostUnreachable(f"`{self.host.name}` does not answer: `pct exec` was silent for {PROBE_SECONDS:.0f} s")
        if not why:
            return channel
        threading.Thread(target=channel.close, daemon=True).start()  # it may not see its end at once
        from ddtree_deploy.hosts.pct_push import PushChannel

        return PushChannel(self.host, self._node, self._exec, argv, why)


def probe(channel: Channel) -> str:
    """Return in which way the pipe changes bytes, or an empty string: it does not, or there is nobody behind it."""
    if (hello := _line(channel)) != b"ddtree-hop\n":
        return f"a greeting arrived as {hello!r}" if hello else ""
    write_all(channel, PROBE)
    answer = _line(channel).split(b" ")[0].decode("ascii", "replace")
    return "" if answer == hashlib.sha256(PROBE).hexdigest() else f"a probe of {len(PROBE)} bytes arrived changed"


def _line(channel: Channel) -> bytes:
    """Read up to a line's end and not a byte more: what follows is the process's own."""
    line = b""
    while not line.endswith(b"\n") and len(line) < 200 and (byte := channel.stdout.read(1)):
        line += byte
    return line
