"""Two machines and a controller from Linux namespaces: see the package's docstring."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddtree_deploy.demo.sshd import client_config, make_key, sshd_binary
from ddtree_deploy.hosts.base import Host
from tests.harness.machine import FIRST_PROCESS, MAC, NETWORK, Machine, check, first_process, furnish, until, wire

CLONE_NEWNET = 0x40000000
TOOLS = ("ip", "bridge", "tc", "unshare", "nsenter", "setpriv", "mkfs.ext4", "ssh", "ssh-keygen")


def lab_missing() -> str:
    """Return why the two machines can not be made here, or an empty string."""
    if os.geteuid() != 0:
        return "namespaces and mounts need root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if sshd_binary() is None:
        missing.append("sshd")
    return f"not installed: {', '.join(missing)}" if missing else ""


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
        until(lambda: os.readlink(f"/proc/{controller}/ns/net") != os.readlink("/proc/self/ns/net"), "the controller")
        for words in (
            "link set lo up",
            f"link add br0 address {MAC}1 type bridge",
            "link set br0 up",
            f"address add {NETWORK}.1/24 dev br0",
        ):
            check([*inside, "ip", *words.split()])
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
            first = first_process(holders[-1], root / name / "ready")
            machine = Machine(name, f"{NETWORK}.{number}", f"port{number}", first, controller, lab.share)
            wire(machine, inside, f"{MAC}{number}")
            furnish(machine, identity)
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
            until(lambda probe=probe: check(probe) != "", f"sshd of {machine.name}")
        yield lab
    finally:
        for holder in reversed(holders):
            holder.kill()
            holder.wait()
        for machine in machines:
            if machine.sshd is not None:
                machine.sshd.wait()
        shutil.rmtree(root, ignore_errors=True)
