"""One machine of the lab: its first process and root, its wires, its sshd, and the ways to cut it off."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree_deploy.demo.sshd import make_key, sshd_binary, sshd_config

NETWORK = "10.77.0"
MAC = "02:00:00:00:00:0"
# The first process of a machine: make its root, then only reap.
FIRST_PROCESS = r"""
set -e
cd "$LAB_DIR"
mkdir disk root
if [ -z "$LAB_RAM" ]; then
    truncate -s "${LAB_MIB}M" image
    mkfs.ext4 -q -E lazy_itable_init=1,lazy_journal_init=1,nodiscard image
    mount -o loop image disk 2>/dev/null || LAB_RAM=1
fi
[ -z "$LAB_RAM" ] || mount -t tmpfs -o "size=${LAB_MIB}M" lab disk
mkdir -p disk/upper disk/work disk/srv/home
mount -t overlay overlay -o lowerdir=/,upperdir=disk/upper,workdir=disk/work root
mkdir -p root/srv root/mnt/lab
mount --bind disk/srv root/srv
mount --bind "$LAB_SHARE" root/mnt/lab
mount -t proc proc root/proc
mount --rbind /dev root/dev
mount -t tmpfs tmpfs root/run
mkdir root/run/sshd
sed -i 's|^\(root:[^:]*:[^:]*:[^:]*:[^:]*\):[^:]*:|\1:/srv/home:|' root/etc/passwd
hostname "$LAB_NAME"
touch ready
# A machine that makes namespaces of its own needs a root that is its mount namespace's root, too.
cd root
mkdir -p .outside
pivot_root . .outside
umount -l .outside
exec chroot . /bin/sh -c 'while :; do sleep 86400 & wait $!; done'
"""


def check(argv: Sequence[str], **options: Any) -> str:
    """Run a command and return what it prints. Raises RuntimeError with its words when it fails."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: exit {done.returncode}: {done.stderr}{done.stdout}")
    return done.stdout


def until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, RuntimeError):
            if condition():
                return
        time.sleep(0.02)
    raise RuntimeError(f"not ready in 20 s: {what}")


@dataclass
class Machine:
    """One machine of the lab; `first` is its process 1 as seen from here."""

    name: str
    address: str
    port: str  # its interface at the controller's bridge
    first: int
    controller: int
    share: Path
    sshd: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}:/usr/sbin"
        return {"HOME": "/srv/home", "PATH": path, "LANG": "C.UTF-8"}

    def argv(self, argv: Sequence[str]) -> list[str]:
        spaces = ["--mount", "--uts", "--ipc", "--net", "--pid", "--root", "--wd=/srv"]
        return ["nsenter", f"--target={self.first}", *spaces, "--", *argv]

    def run(self, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on the machine, without ssh; `check=False` allows it to fail."""
        environment = {**self.environment, **options.pop("env", {})}
        options = {"capture_output": True, "text": True, **options}
        return subprocess.run(self.argv(argv), env=environment, check=options.pop("check", True), **options)

    def path(self, path: str) -> Path:
        """Return the way to a file of the machine from here; an absolute link in it would lead out."""
        return Path(f"/proc/{self.first}/root") / path.lstrip("/")

    def start_sshd(self) -> None:
        with (self.share / f"{self.name}.sshd.log").open("ab") as log:
            self.sshd = subprocess.Popen(
                self.argv([str(sshd_binary()), "-D", "-e", "-f", f"/mnt/lab/{self.name}/sshd_config"]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
            )

    def stop_sshd(self) -> None:
        """End the listener and every connection."""
        self._kill_sshd(lambda argv: True)
        if self.sshd is not None:
            self.sshd.wait()

    def reset(self) -> None:
        """Kill the processes that serve connections; new connections are welcome."""
        self._kill_sshd(lambda argv: "[listener]" not in argv)

    def _kill_sshd(self, doomed: Any) -> None:
        for pid, argv in self._outer_processes():
            if argv.startswith(("sshd", "/usr/sbin/sshd")) and doomed(argv):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _outer_processes(self) -> list[tuple[int, str]]:
        here = os.readlink(f"/proc/{self.first}/ns/pid")
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and os.readlink(entry / "ns/pid") == here:
                    argv = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    found.append((int(entry.name), argv))
        return sorted(found)

    def processes(self) -> list[tuple[int, str]]:
        """List (pid as seen from here, command line) of what runs there, without the machine's own furniture."""
        furniture = ("/bin/sh -c while :", "sleep 86400")
        listener = lambda argv: "[listener]" in argv  # noqa: E731
        return [p for p in self._outer_processes() if not p[1].startswith(furniture) and not listener(p[1])]

    def _bridge(self, *words: str) -> None:
        check(["nsenter", f"--target={self.controller}", "--net", "--", *words])

    def cut(self) -> None:
        """Pull the cable: frames vanish."""
        self._bridge("ip", "link", "set", self.port, "down")

    def drop(self) -> None:
        """Discard every frame, with the link up."""
        self._bridge("bridge", "link", "set", "dev", self.port, "state", "0")

    def restore(self) -> None:
        """End `cut` and `drop`."""
        self._bridge("ip", "link", "set", self.port, "up")
        self._bridge("bridge", "link", "set", "dev", self.port, "state", "3")

    def shape(self, mbit: int | None) -> None:
        """Limit both ways to so many Mbit/s; None ends it."""
        limit = ("tbf", "rate", f"{mbit}mbit", "burst", "256k", "latency", "50ms")
        for target, device in ((self.controller, self.port), (self.first, "eth0")):
            tc = ["nsenter", f"--target={target}", "--net", "--", "tc", "qdisc"]
            subprocess.run([*tc, "del", "dev", device, "root"], capture_output=True, check=False)
            if mbit is not None:
                check([*tc, "add", "dev", device, "root", *limit])

    def received_bytes(self) -> int:
        """Return how many bytes came in over the wire."""
        shown = check(["nsenter", f"--target={self.first}", "--net", "--", "ip", "-j", "-s", "link", "show", "eth0"])
        return int(json.loads(shown)[0]["stats64"]["rx"]["bytes"])


def first_process(holder: subprocess.Popen[bytes], ready: Path) -> int:
    """Wait for a machine's root, and return the process there that has the number 1."""
    def is_ready() -> bool:
        if holder.poll() is not None:
            raise AssertionError(f"the machine's set-up ended with {holder.returncode}: see stderr")
        return ready.exists()

    until(is_ready, "a machine's root")
    first = int(Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()[0])
    root = Path(f"/proc/{first}/root")
    until(lambda: (root / "mnt/lab").is_dir() and not (root / ".outside/proc").exists(), "a machine's first process")
    return first


def wire(machine: Machine, inside: Sequence[str], mac: str) -> None:
    """Plug a machine into the controller's bridge; `inside` is what enters the controller's network."""
    here, there = [*inside, "ip"], ["nsenter", f"--target={machine.first}", "--net", "--", "ip"]
    peer = ["type", "veth", "peer", "name", "eth0", "address", mac, "netns", str(machine.first)]
    check([*here, "link", "add", machine.port, *peer])
    check([*here, "link", "set", machine.port, "master", "br0", "up"])
    check([*there, "address", "add", f"{machine.address}/24", "dev", "eth0"])
    for device in ("lo", "eth0"):
        check([*there, "link", "set", device, "up"])
    # Neighbours that never expire: else a cut shows as "no route to host" or as silence, as the ARP cache pleases.
    check([*here, "neigh", "add", machine.address, "lladdr", mac, "dev", "br0", "nud", "permanent"])
    check([*there, "neigh", "add", f"{NETWORK}.1", "lladdr", f"{MAC}1", "dev", "eth0", "nud", "permanent"])


def furnish(machine: Machine, identity: Path) -> None:
    """Give a machine its host key, who may enter, and the configuration of its sshd."""
    own = machine.share / machine.name
    own.mkdir()
    make_key(own / "host_ed25519")
    shutil.copy(identity.with_suffix(".pub"), own / "authorized_keys")
    place = Path("/mnt/lab") / machine.name
    config = sshd_config(22, [place / "host_ed25519"], place / "authorized_keys", address="0.0.0.0")
    (own / "sshd_config").write_text(config + f"SetEnv PATH={machine.environment['PATH']}\n")
