"""A real systemd in namespaces of its own, with nothing but our transient units to run."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

BINARY = "/lib/systemd/systemd"
TARGETS = ("sysinit", "basic", "shutdown", "umount", "ddtree-test")
#: Runs as the first process of the namespaces: mounts of its own, unit files of its own (the host's are not seen).
INIT = """#!/bin/sh
set -e
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs tmpfs /run
mkdir -p /run/systemd /run/units
for name in {targets}; do printf '[Unit]\\nDefaultDependencies=no\\n' > /run/units/$name.target; done
umount -l /sys/fs/cgroup
if [ "{kind}" = v2 ]; then
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
else
    mount -t tmpfs tmpfs /sys/fs/cgroup
    mkdir -p /sys/fs/cgroup/systemd /sys/fs/cgroup/unified
    mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd
    mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified || true
fi
export container=ddtree SYSTEMD_UNIT_PATH=/run/units
exec {binary} --system --unit=ddtree-test.target --show-status=0 --log-target=console --log-level=warning
"""


def missing() -> str:
    """Say why there can be no systemd here, or nothing."""
    tools = [name for name in ("unshare", "nsenter", "systemctl", "systemd-run") if shutil.which(name) is None]
    if os.getuid() or tools or not os.access(BINARY, os.X_OK):
        return "needs systemd: root, systemd and util-linux"
    return ""


@contextlib.contextmanager
def running(root: Path) -> Iterator[list[str]]:
    """Run systemd until the block ends; yields the words that put a command in front of it (nsenter)."""
    unified = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    script = root / "init"
    script.write_text(INIT.format(targets=" ".join(TARGETS), kind="v2" if unified else "v1", binary=BINARY))
    script.chmod(0o755)
    groups = [Path("/sys/fs/cgroup")] if unified else [Path("/sys/fs/cgroup/systemd"), Path("/sys/fs/cgroup/unified")]
    own = [group / f"ddtree-test-{os.getpid()}" for group in groups if group.is_dir()]
    for group in own:
        group.mkdir(exist_ok=True)
    enter = "".join(f"echo $$ > {group}/cgroup.procs && " for group in own)
    unshare = "unshare --fork --pid --mount --uts --ipc --cgroup --kill-child"
    log = (root / "systemd.log").open("wb")
    outer = subprocess.Popen(["sh", "-c", f"{enter}exec {unshare} {script}"], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        prefix = ["nsenter", "-t", str(_child(outer)), "-a"]
        end = time.monotonic() + 60
        while True:
            asked = [*prefix, "systemctl", "is-system-running"]
            state = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=60).stdout.strip()
            if state in ("running", "degraded"):
                break
            assert time.monotonic() < end and outer.poll() is None, (state, (root / "systemd.log").read_text("utf-8", "replace"))
            time.sleep(0.2)
        yield prefix
    finally:
        outer.kill()
        outer.wait()
        log.close()
        for group in own:
            _remove(group)


def _child(process: subprocess.Popen[bytes]) -> int:
    """Return the pid of unshare's child: the first process of the namespaces."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    end = time.monotonic() + 30
    while not (found := children.read_text().split() if process.poll() is None else []):
        assert time.monotonic() < end and process.poll() is None, "unshare made no namespaces"
        time.sleep(0.05)
    return int(found[0])


def _remove(group: Path) -> None:
    """Remove a control group and those below it; its last processes may take a moment to go."""
    end = time.monotonic() + 20
    while group.is_dir() and time.monotonic() < end:
        for directory in sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True):
            with contextlib.suppress(OSError):
                directory.rmdir()
        with contextlib.suppress(OSError):
            group.rmdir()
        time.sleep(0.1)
