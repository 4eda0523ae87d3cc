"""A chaos soak: controllers push, roll back, prune and snapshot at random against hosts whose processes die and whose disks fill up.

An observer imports from each venv all the time, and must always see one whole generation. At the end everything must come to
rest, a push must go through everywhere, and nothing may be left over. `python -m tests.faults.soak SECONDS [SEED]` prints the counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from ddtree_deploy import upkeep
from ddtree_deploy.errors import DeployError
from ddtree_deploy.generations import prune_generations, rollback
from ddtree_deploy.snapshot import take
from ddtree_deploy.store import Store
from ddtree_deploy.transfer import push
from tests.faults.harness import check_generations, check_objects, ledger, litter, live_generation, rest
from tests.faults.mounts import fill, tmpfs
from tests.fixtures.venvs import BASE_PYTHON, make_venv, package, site
from tests.fixtures.world import BRIEF, QUICK, local, replace, yes

DISK = 160 << 20
DATA = 300_000
VERSIONS = ("1.0", "2.0", "3.0", "4.0")
#: What an operation may end with when processes die, disks fill up and others are at it. No internal error, and no bad bytes.
HONEST = {"HostUnreachable", "Locked", "NoSpace", "RevertedAfterFailure", "RestoreUnconfirmed", "StalePlan", "IoProblem", "UsageProblem"}

# The observer resolves the live link once, by entering the directory, as a server that is started from its resolved path.
LOOK = """
import json, os, sys
os.chdir(sys.argv[1])
where = os.getcwd()
sys.path.insert(0, where)
sys.dont_write_bytecode = True
try:
    import alpha, beta, keep
    import alpha.m0, alpha.m1, beta.m0, beta.m2
    seen = [alpha.VERSION, alpha.m0.OWN, alpha.m1.OWN, beta.VERSION, beta.m0.OWN, beta.m2.OWN]
    seen = seen if keep.VERSION == "1.0" and os.path.getsize(where + "/alpha/payload.bin") == 300000 else ["damaged"]
except Exception as error:
    seen = ["%s: %s" % (type(error).__name__, error)]
print(json.dumps([where, seen]))
"""


@dataclass
class Counts:
    """What happened: operations by outcome, faults by kind, looks of the observers, and what should not have been."""

    operations: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    looks: int = 0
    taken_back: int = 0
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def as_dict(self) -> dict[str, object]:
        return {
            "operations": sum(self.operations.values()), **dict(self.operations), "outcomes": dict(self.outcomes),
            "faults": dict(self.faults), "looks": self.looks, "looks_at_a_generation_taken_back": self.taken_back, "wrong": len(self.wrong),
        }  # fmt: skip


def observe(venv: Path, stop: threading.Event, counts: Counts) -> None:
    """Look until `stop`; a look is wrong when it finds anything but one whole generation."""
    whole = [[version] * 6 for version in VERSIONS]
    while not stop.is_set():
        done = subprocess.run([str(BASE_PYTHON), "-I", "-S", "-c", LOOK, str(site(venv))], capture_output=True, text=True, check=False)
        where, seen = json.loads(done.stdout) if done.returncode == 0 else ["", [done.stderr[-300:]]]
        with counts.lock:
            counts.looks += 1
            if seen not in whole:
                number = where.split("/")[-2] if where else ""
                back = any(e.get("event") == "reverted" and str(e.get("generation")) == number for e in ledger(venv))
                if back:
                    counts.taken_back += 1  # entered within the seconds of its trial, which failed: such a tree is removed
                else:
                    counts.wrong.append(f"{venv.name}: {where}: {seen}")
        stop.wait(0.1)


def operate(config: dict[str, str]) -> str:
    """Do one operation of a controller; return `done` or the name of its error. Anything but a DeployError passes through."""
    store, host = Store.open(Path(config["home"])), local(config["venv"])
    options = replace(BRIEF, confirm_timeout=6.0, lock_wait=2.0)
    try:
        if config["act"] == "push":
            push(host, store, config["snapshot"], options, approve=yes)
        elif config["act"] == "rollback":
            rollback(host, None, approve=yes, verify=False, confirm_timeout=6.0, probe_timeout=60.0)
        elif config["act"] == "snapshot":
            take(host, store, probe=False, allow_drift=True, label=f"t{random.randrange(4)}")
        elif config["act"] == "prune":
            prune_generations(host, 2)
        else:
            upkeep.prune(store, 3)
    except DeployError as error:
        if error.exit_code == 1:
            raise
        return type(error).__name__
    return "done"


def _children(pid: int) -> list[int]:
    """Return the child processes of all threads of a process (proc(5))."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread may have ended
            found += map(int, path.read_text().split())
    return found


def _disturb(what: str, process: subprocess.Popen[str], disk: Path, dice: random.Random) -> bool:
    """Do one thing to a running operation; tell whether there was something to do it to."""
    if what == "kill controller":
        process.kill()
    elif what == "fill disk":
        filler = fill(disk)
        time.sleep(dice.uniform(0.2, 1.5))
        filler.unlink(missing_ok=True)
    else:
        while not (agents := _children(process.pid)) and process.poll() is None:
            time.sleep(0.02)  # it has not come so far
        time.sleep(dice.uniform(0.0, 0.5))
        for pid in agents:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGSTOP if what == "stall agent" else signal.SIGKILL)
        if what == "stall agent":
            time.sleep(dice.uniform(0.2, 1.5))
            for pid in agents:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGCONT)
        return bool(agents)
    return True


def control(home: Path, venvs: list[Path], snapshots: list[str], end: float, counts: Counts, seed: int) -> None:
    """Be one controller: operations on random hosts, most of them disturbed, until `end`."""
    dice = random.Random(seed)
    acts = ["push"] * 8 + ["rollback"] * 3 + ["prune"] * 2 + ["snapshot", "cache prune"]
    faults = ["kill controller", "cut (kill agent)", "stall agent", *(["fill disk"] if os.geteuid() == 0 else [])]
    while time.monotonic() < end:
        venv, act = dice.choice(venvs), dice.choice(acts)
        config = json.dumps({"act": act, "home": str(home), "venv": str(venv), "snapshot": dice.choice(snapshots)})
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.soak", "--operate", config], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        disturbed = ""
        if dice.random() < 0.6:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(dice.uniform(0.3, 6.0))
            what = dice.choice(faults)
            if process.poll() is None and _disturb(what, process, venv.parent, dice):
                disturbed = what
        out, err = process.communicate()
        result = out.strip() if process.returncode == 0 else "killed" if process.returncode < 0 else "failed"
        with counts.lock:
            counts.operations[act] += 1
            counts.outcomes[result] += 1
            if disturbed:
                counts.faults[disturbed] += 1
            if result not in HONEST | {"done", "killed"} or (result == "killed" and disturbed != "kill controller"):
                counts.wrong.append(f"{act}, {disturbed or 'undisturbed'}: {result}: {err[-1500:]}")


def soak(root: Path, seconds: float, *, hosts: int = 2, controllers: int = 2, seed: int = 8) -> Counts:
    """Run the soak below `root` and return what happened; `wrong` is empty when every promise was kept."""
    counts = Counts()
    with contextlib.ExitStack() as stack:
        venvs = []
        for number in range(hosts):
            disk = root / f"host{number}"
            if os.geteuid() == 0:
                stack.enter_context(tmpfs(disk, DISK))
            dists = [package(name, VERSIONS[0], data=DATA if name == "alpha" else 0) for name in ("alpha", "beta")]
            venvs.append(make_venv(disk / "venv", *dists, package("keep", "1.0", modules=1)))
        homes, snapshots = [root / f"home{number}" for number in range(controllers)], []
        for version in VERSIONS:
            source = make_venv(root / version, package("alpha", version, data=DATA), package("beta", version))
            taken = [take(local(source), Store.open(home), probe=False, label=f"v{version}") for home in homes]
            snapshots.append(taken[0].ref.id)
        stop = threading.Event()
        stack.callback(stop.set)
        observers = [threading.Thread(target=observe, args=(venv, stop, counts)) for venv in venvs]
        end = time.monotonic() + seconds
        workers = [
            threading.Thread(target=control, args=(home, venvs, snapshots, end, counts, seed + number)) for number, home in enumerate(homes)
        ]
        for thread in (*observers, *workers):
            thread.start()
        for worker in workers:
            worker.join()
        _at_rest(venvs, homes, snapshots, counts)
        stop.set()
        for observer in observers:
            observer.join()
    return counts


def _at_rest(venvs: list[Path], homes: list[Path], snapshots: list[str], counts: Counts) -> None:
    """Bring everything to rest, push everywhere once more, and look for what is lost or left over."""
    for venv in venvs:
        try:
            rest(venv, 60.0)
            for snapshot in snapshots[:2]:  # at least one of them is not live already
                push(local(venv), Store.open(homes[0]), snapshot, QUICK, approve=yes)
                rest(venv, 60.0)
            assert litter(venv) == [], f"left over: {litter(venv)}"
            assert live_generation(venv) in check_generations(venv)
        except Exception as error:
            counts.wrong.append(f"{venv.parent.name} at rest: {type(error).__name__}: {error}")
    for home in homes:
        store = Store.open(home)
        check_objects(store.objects)
        report = upkeep.verify(store)
        if report.bad or report.missing:
            counts.wrong.append(f"{home.name}: {report}")
        upkeep.prune(store)
        left = [path.name for path in (home / "store").rglob("*") if path.name.startswith((".tmp-", "in-"))]
        if left:
            counts.wrong.append(f"{home.name}: left over: {left}")


def main() -> None:
    if sys.argv[1] == "--operate":
        print(operate(json.loads(sys.argv[2])))
        return
    seconds, seed = float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 8
    with tempfile.TemporaryDirectory(prefix="ddtree-soak-") as root:
        counts = soak(Path(root), seconds, hosts=3, controllers=3, seed=seed)
    print(json.dumps({"seconds": seconds, "seed": seed, **counts.as_dict()}, indent=1))
    for line in counts.wrong:
        print(line, file=sys.stderr)
    sys.exit(bool(counts.wrong))


if __name__ == "__main__":
    main()
