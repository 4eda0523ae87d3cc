"""Two machines and a controller from Linux namespaces: see the package's docstring."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddtree_deploy.demo.sshd import client_config, make_key, sshd_binary, sshd_config
from ddtree_deploy.hosts.base import Host

CLONE_NEWNET = 0x40000000
NETWORK = "10.77.0"
MAC = "02:00:00:00:00:0"
TOOLS = ("ip", "bridge", "tc", "unshare", "nsenter", "setpriv", "mkfs.ext4", "ssh", "ssh-keygen")
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


def lab_missing() -> str:
    """Return why the two machines can not be made here, or an empty string."""
    if os.geteuid() != 0:
        return "namespaces and mounts need root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if sshd_binary() is None:
        missing.append("sshd")
    return f"not installed: {', '.join(missing)}" if missing else ""


def _check(argv: Sequence[str], **options: Any) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: exit {done.returncode}: {done.stderr}{done.stdout}")
    return done.stdout


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
        _check(["nsenter", f"--target={self.controller}", "--net", "--", *words])

    def cut(self) -> None:
        self._bridge("ip", "link", "set", self.port, "down")

    def drop(self) -> None:
        self._bridge("bridge", "link", "set", "dev", self.port, "state", "0")

    def restore(self) -> None:
        self._bridge("ip", "link", "set", self.port, "up")
        self._bridge("bridge", "link", "set", "dev", self.port, "state", "3")

    def shape(self, mbit: int | None) -> None:
        limit = ("tbf", "rate", f"{mbit}mbit", "burst", "256k", "latency", "50ms")
        for target, device in ((self.controller, self.port), (self.first, "eth0")):
            tc = ["nsenter", f"--target={target}", "--net", "--", "tc", "qdisc"]
            subprocess.run([*tc, "del", "dev", device, "root"], capture_output=True, check=False)
            if mbit is not None:
                _check([*tc, "add", "dev", device, "root", *limit])

    def received_bytes(self) -> int:
        shown = _check(["nsenter", f"--target={self.first}", "--net", "--", "ip", "-j", "-s", "link", "show", "eth0"])
        return int(json.loads(shown)[0]["stats64"]["rx"]["bytes"])


@dataclass
class Lab:
    """Two machines and the controller's network."""

    controller: int
    root: Path
    hosts: tuple[Machine, ...] = ()
    env: dict[str, str] = field(default_factory=dict)

    @property
    def share(self) -> Path:
        return self.root / "share"

    @property
    def ssh_config(self) -> Path:
        return self.root / "ssh_config"

    @property
    def known_hosts(self) -> Path:
        return self.root / "known_hosts"

    def __getitem__(self, name: str) -> Machine:
        return next(machine for machine in self.hosts if machine.name == name)

    def host(self, name: str, **fields: Any) -> Host:
        return Host(name, address=name, ssh_config=str(self.ssh_config), **fields)

    def argv(self, argv: Sequence[str]) -> list[str]:
        return ["nsenter", f"--target={self.controller}", "--net", "--", *argv]

    def run(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command where the controller is; its exit status is not checked unless `check=True`."""
        options = {"capture_output": True, "text": True, **options}
        environment = {**os.environ, **self.env, **(env or {})}
        return subprocess.run(self.argv(argv), env=environment, check=options.pop("check", False), **options)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Bring this thread, the children and the threads that it starts, into the controller's network."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/proc/thread-self/ns/net") as home, open(f"/proc/{self.controller}/ns/net") as there:
            for place in (there, home):
                if libc.setns(place.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
                if place is there:
                    try:
                        yield
                    except BaseException:
                        libc.setns(home.fileno(), CLONE_NEWNET)
                        raise

    def shape(self, mbit: int | None) -> None:
        for machine in self.hosts:
            machine.shape(mbit)


@contextlib.contextmanager
def two_hosts(*names: str, disk_mib: int = 20_000, ram: bool = False) -> Iterator[Lab]:
    """Make the machines (by default `ct129` and `ct200`), each with an sshd that the controller knows and may enter.

    A machine's disk is an ext4 image of its own, or, with `ram`, a tmpfs.
    """
    names = names or ("ct129", "ct200")
    root = Path(tempfile.mkdtemp(prefix="ddtree-lab-"))
    holders: list[subprocess.Popen[bytes]] = []
    machines: list[Machine] = []
    try:
        # A holder is killed with its parent, and all that it holds with it.
        tether = ["setpriv", "--pdeathsig", "KILL"]
        holders.append(subprocess.Popen([*tether, "unshare", "--net", "sleep", "infinity"]))
        controller = holders[0].pid
        inside = ["nsenter", f"--target={controller}", "--net", "--"]
        _until(lambda: os.readlink(f"/proc/{controller}/ns/net") != os.readlink("/proc/self/ns/net"), "the controller")
        for words in (
            "link set lo up",
            f"link add br0 address {MAC}1 type bridge",
            "link set br0 up",
            f"address add {NETWORK}.1/24 dev br0",
        ):
            _check([*inside, "ip", *words.split()])
        lab = Lab(controller, root)
        lab.share.mkdir()
        identity = make_key(root / "identity")
        config = ""
        for number, name in enumerate(names, start=2):
            (root / name).mkdir()
            values = {"DIR": str(root / name), "MIB": str(disk_mib), "SHARE": str(lab.share), "NAME": name, "RAM": "1" if ram else ""}
            spaces = ["--mount", "--propagation=private", "--uts", "--ipc", "--net", "--pid", "--fork"]
            holders.append(
                subprocess.Popen(
                    [*tether, "unshare", *spaces, "--kill-child=KILL", "/bin/sh", "-c", FIRST_PROCESS],
                    env={**os.environ, **{f"LAB_{key}": value for key, value in values.items()}},
                )
            )
            first = _first_process(holders[-1], root / name / "ready")
            machine = Machine(name, f"{NETWORK}.{number}", f"port{number}", first, controller, lab.share)
            _wire(machine, inside, f"{MAC}{number}")
            _furnish(machine, identity)
            machines.append(machine)
            public = " ".join((lab.share / name / "host_ed25519.pub").read_text().split()[:2])
            with lab.known_hosts.open("a") as known:
                known.write(f"{machine.address} {public}\n")
            config += client_config(22, [name], identity, lab.known_hosts, host=machine.address)
        lab.ssh_config.write_text(config)
        lab.env["DDTREE_SSH_CONFIG"] = str(lab.ssh_config)
        lab.hosts = tuple(machines)
        for machine in machines:
            machine.start_sshd()
            probe = lab.argv(["ssh-keyscan", "-T", "1", machine.address])
            _until(lambda probe=probe: _check(probe) != "", f"sshd of {machine.name}")
        yield lab
    finally:
        for holder in reversed(holders):
            holder.kill()
            holder.wait()
        for machine in machines:
            if machine.sshd is not None:
                machine.sshd.wait()
        shutil.rmtree(root, ignore_errors=True)


def _until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, RuntimeError):
            if condition():
                return
        time.sleep(0.02)
    raise RuntimeError(f"not ready in 20 s: {what}")


def _first_process(holder: subprocess.Popen[bytes], ready: Path) -> int:
    def is_ready() -> bool:
        if holder.poll() is not None:
            raise AssertionError(f"the machine's set-up ended with {holder.returncode}: see stderr")
        return ready.exists()

    _until(is_ready, "a machine's root")
    first = int(Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()[0])
    root = Path(f"/proc/{first}/root")
    _until(lambda: (root / "mnt/lab").is_dir() and not (root / ".outside/proc").exists(), "a machine's first process")
    return first


def _wire(machine: Machine, inside: Sequence[str], mac: str) -> None:
    here, there = [*inside, "ip"], ["nsenter", f"--target={machine.first}", "--net", "--", "ip"]
    peer = ["type", "veth", "peer", "name", "eth0", "address", mac, "netns", str(machine.first)]
    _check([*here, "link", "add", machine.port, *peer])
    _check([*here, "link", "set", machine.port, "master", "br0", "up"])
    _check([*there, "address", "add", f"{machine.address}/24", "dev", "eth0"])
    for device in ("lo", "eth0"):
        _check([*there, "link", "set", device, "up"])
    # Neighbours that never expire: else a cut shows as "no route to host" or as silence, as the ARP cache pleases.
    _check([*here, "neigh", "add", machine.address, "lladdr", mac, "dev", "br0", "nud", "permanent"])
    _check([*there, "neigh", "add", f"{NETWORK}.1", "lladdr", f"{MAC}1", "dev", "eth0", "nud", "permanent"])


def _furnish(machine: Machine, identity: Path) -> None:
    own = machine.share / machine.name
    own.mkdir()
    make_key(own / "host_ed25519")
    shutil.copy(identity.with_suffix(".pub"), own / "authorized_keys")
    place = Path("/mnt/lab") / machine.name
    config = sshd_config(22, [place / "host_ed25519"], place / "authorized_keys", address="0.0.0.0")
    (own / "sshd_config").write_text(config + f"SetEnv PATH={machine.environment['PATH']}\n")
