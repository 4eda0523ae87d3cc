"""What a command costs between two machines of the lab: wall seconds, CPU seconds of all its processes, peak memory."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.harness.lab import Lab

DDTREE = [sys.executable, "-m", "ddtree_deploy"]


@dataclass(frozen=True)
class Cost:
    """What one run cost: seconds, of which those of the import probes and of the other proofs; peak memory in MiB."""

    wall: float
    cpu: float
    controller_mib: float = 0.0
    agent_mib: float = 0.0
    proofs: float = 0.0
    syntax: float = 0.0


class Account:
    """Count the CPU seconds of this process and of all that it starts, dead or alive (a cgroup of its own, cgroups(7))."""

    def __init__(self) -> None:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
        root = next((Path(words[1]) for words in mounts if words[2] == "cgroup2"), None)
        if root is None:
            raise SystemExit("no cgroup2 is mounted: mount -t cgroup2 none /sys/fs/cgroup/unified")
        self.group = root / f"ddtree-bench-{os.getpid()}"
        self.home = root / Path("/proc/self/cgroup").read_text().split("\n0::")[-1].splitlines()[0].lstrip("/")

    def __enter__(self) -> Account:
        for left in self.group.parent.glob("ddtree-bench-*"):  # of an earlier run; one that is in use stays
            with suppress(OSError):
                left.rmdir()
        self.group.mkdir()
        (self.group / "cgroup.procs").write_text(str(os.getpid()))
        return self

    def __exit__(self, *_exc: object) -> None:
        (self.home / "cgroup.procs").write_text(str(os.getpid()))
        with suppress(OSError):  # what a run left in the background is still ending; the next run removes it
            self.group.rmdir()

    def seconds(self) -> float:
        """Return the CPU seconds so far."""
        return int((self.group / "cpu.stat").read_text().split()[1]) / 1e6


class Watch:
    """Sample the peak resident memory of the controller and of the agent while a command runs."""

    def __init__(self) -> None:
        self.peak = {"controller": 0.0, "agent": 0.0}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def _loop(self) -> None:
        while not self._stop.wait(0.25):
            for status in Path("/proc").glob("[0-9]*/status"):
                try:
                    command = (status.parent / "cmdline").read_bytes()
                    if role := self._role(command):
                        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
                        self.peak[role] = max(self.peak[role], int(line.split()[1]) / 1024)
                except (OSError, StopIteration):
                    continue

    @staticmethod
    def _role(command: bytes) -> str:
        if b"ddtree-agent" in command and b"ssh" not in command[:40]:
            return "agent"
        return "controller" if b"ddtree_deploy" in command and b"-m" in command else ""

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stop.set()
        self._thread.join()


def timed(account: Account, lab: Lab, command: list[str] | str, env: dict[str, str] | None = None, *, may_fail: bool = False) -> Cost:
    """Run a command in the controller's network and return what it cost."""
    argv = ["sh", "-c", command] if isinstance(command, str) else command
    os.sync()
    with Watch() as watch:
        before, begun = account.seconds(), time.monotonic()
        done = lab.run(argv, env=env)
        wall, cpu = time.monotonic() - begun, account.seconds() - before
    if done.returncode and not may_fail:
        raise SystemExit(f"{argv} failed with {done.returncode}:\n{done.stderr[-3000:]}{done.stdout[-2000:]}")
    proofs = syntax = 0.0
    if "--json" in argv:
        result = json.loads(done.stdout.splitlines()[-1])
        phases = _find(result, "phases") or {}
        proofs, syntax = phases.get("imports", 0.0), phases.get("prove", 0.0)
        print(f"      phases { ({k: round(v, 2) for k, v in phases.items()}) }", file=sys.stderr)
    return Cost(wall, cpu, watch.peak["controller"], watch.peak["agent"], proofs, syntax)


def _find(value: object, key: str) -> dict[str, float] | None:
    if isinstance(value, dict):
        if key in value:
            return value[key]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            found = _find(item, key)
            if found is not None:
                return found
    return None
