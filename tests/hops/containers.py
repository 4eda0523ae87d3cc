"""Real containers on a machine of the lab: LXC as Proxmox has it, and podman; each with a root of its own over this machine's."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.harness.lab import Lab, Machine, lab_missing
from tests.hops.node import lxc_pct

ROOT = Path(__file__).parent.parent.parent

LXC_CONFIG = """
lxc.uts.name = ct{number}
lxc.rootfs.path = dir:/srv/{number}/root
lxc.init.cmd = /usr/sbin/container-init
lxc.net.0.type = none
lxc.mount.auto = proc:rw sys:ro
lxc.mount.entry = /srv/{number}/srv srv none bind 0 0
lxc.autodev = 1
lxc.pty.max = 8
lxc.apparmor.profile = unconfined
"""
# The overlay is the container's alone: writes of the node below / are not seen, nor the other way round.
ROOTFS = r"""
set -e
mkdir -p "/srv/$1/upper" "/srv/$1/work" "/srv/$1/root" "/srv/$1/srv/home"
mount -t overlay overlay -o "lowerdir=/,upperdir=/srv/$1/upper,workdir=/srv/$1/work" "/srv/$1/root"
printf '#!/bin/sh\nwhile :; do sleep 86400 & wait $!; done\n' >"/srv/$1/root/usr/sbin/container-init"
chmod 755 "/srv/$1/root/usr/sbin/container-init"
"""
# What a node has and a machine of the lab lacks: sysfs, and cgroups as systemd mounts them today (cgroups(7)).
SYSFS = "mountpoint -q /sys || { mount -t sysfs sysfs /sys && mount -t cgroup2 cgroup2 /sys/fs/cgroup; }"


def lxc_missing() -> str:
    return lab_missing() or ("" if shutil.which("lxc-start") else "not installed: lxc")


def podman_missing() -> str:
    lacking = [tool for tool in ("podman", "crun", "conmon") if shutil.which(tool) is None]
    return lab_missing() or (f"not installed: {', '.join(lacking)}" if lacking else "")


@dataclass(frozen=True)
class Container:
    """A running container; `enter` is how its node gets into it."""

    node: Machine
    name: str
    enter: tuple[str, ...]

    def run(self, argv: Sequence[str], *, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = self.node.run(["env", "-C", "/", *self.enter, *argv], check=False)
        assert not (check and done.returncode), done.stderr
        return done

    def python(self, code: str) -> str:
        """Run `code` in it, with the modules of these tests."""
        return self.run(["env", "-C", str(ROOT), sys.executable, "-c", code]).stdout

    def venv(self, *versions: tuple[str, str]) -> None:
        """Make /srv/venv with tiny packages."""
        dists = ", ".join(f"package({name!r}, {version!r}, data=300_000)" for name, version in versions)
        self.python(
            "from pathlib import Path\nfrom tests.fixtures.venvs import make_venv, package\n"
            f"make_venv(Path('/srv/venv'), {dists})"
        )

    def contents(self) -> dict[str, str]:
        """Return what its site-packages holds (`tests.fixtures.venvs.contents`)."""
        code = (
            "import json\nfrom pathlib import Path\nfrom tests.fixtures.venvs import contents, site\n"
            "print(json.dumps(contents(site(Path('/srv/venv')))))"
        )
        found: dict[str, str] = json.loads(self.python(code))
        return found

    def listing(self, folder: str) -> list[str]:
        return self.run(["ls", "-A", folder]).stdout.split()


@contextlib.contextmanager
def proxmox_node(machine: Machine, *numbers: int) -> Iterator[list[Container]]:
    """Make LXC containers on a machine, and the `pct` that leads into them."""
    machine.run(["sh", "-c", SYSFS])
    lxc_pct(machine.path("/usr/sbin/pct"))
    try:
        for number in numbers:
            machine.run(["sh", "-c", ROOTFS, "sh", str(number)])
            machine.run(["mkdir", "-p", f"/var/lib/lxc/{number}"])
            machine.path(f"/var/lib/lxc/{number}/config").write_text(LXC_CONFIG.format(number=number))
            machine.run(["lxc-start", "-n", str(number), "-d", "-l", "WARN", "-o", f"/srv/{number}/log"])
            machine.run(["lxc-wait", "-n", str(number), "-s", "RUNNING", "-t", "60"])
        yield [Container(machine, str(number), ("lxc-attach", "-n", str(number), "--")) for number in numbers]
    finally:
        for number in numbers:
            machine.run(["lxc-stop", "-k", "-n", str(number)], check=False)
        _forget_cgroups(machine, "lxc.*")


@contextlib.contextmanager
def podman_node(machine: Machine, name: str) -> Iterator[Container]:
    """Make a podman container. `runc` wants cgroup controllers, which v1 has here; `crun` does without."""
    machine.run(["sh", "-c", SYSFS])
    machine.run(["sh", "-c", ROOTFS, "sh", name])
    machine.path("/etc/containers").mkdir(exist_ok=True)
    machine.path("/etc/containers/storage.conf").write_text(
        '[storage]\ndriver = "vfs"\ngraphroot = "/srv/containers"\nrunroot = "/run/containers"\n'
    )
    machine.path("/etc/containers/containers.conf").write_text(
        '[engine]\nruntime = "crun"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
        '[containers]\ndefault_ulimits = ["nofile=4096:4096", "nproc=8192:8192"]\n'
    )
    run = ["env", "-C", "/", "podman", "run", "-d", "--name", name, "--cgroups=disabled", "--network=none", "--pull=never"]
    try:
        made = machine.run(
            [*run, "--volume", f"/srv/{name}/srv:/srv", "--rootfs", f"/srv/{name}/root", "/usr/sbin/container-init"], check=False
        )
        assert made.returncode == 0, made.stderr
        yield Container(machine, name, ("podman", "exec", name))
    finally:
        machine.run(["env", "-C", "/", "podman", "rm", "-f", "-t", "0", name], check=False)
        _forget_cgroups(machine, "libpod*")


def _forget_cgroups(machine: Machine, pattern: str) -> None:
    """Remove what an engine left in this machine's own hierarchy: groups that are empty, once their last process has gone."""
    gone = f"! find /sys/fs/cgroup -depth -type d -path '/sys/fs/cgroup/{pattern}' -exec rmdir {{}} \\; 2>&1 | grep -q ."
    machine.run(["sh", "-c", f"for _ in $(seq 100); do {gone} && exit; sleep 0.1; done"], check=False)


def ddtree(lab: Lab, *argv: str, expect: int = 0) -> str:
    """Run the command where the controller is; its configuration lies in `lab.root`."""
    done = lab.run([sys.executable, "-m", "ddtree_deploy", *argv], cwd=lab.root)
    assert done.returncode == expect, done.stderr + done.stdout
    return done.stdout + ("" if "--json" in argv or "-q" in argv else done.stderr)
