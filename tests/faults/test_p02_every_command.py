"""P2 below Python for the other commands: SIGKILL, EIO, ENOSPC at system calls of rollback, prune, release, create, snapshot, cache prune.

Each command is traced once, which tells how often it makes each call; then it runs again with a fault at the k-th. A few points by
default, all of them with DDTREE_SWEEP=all.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddtree_deploy import upkeep
from ddtree_deploy.errors import HostUnreachable, Incompatible, IoProblem, NoSpace, RestoreUnconfirmed, RevertedAfterFailure
from ddtree_deploy.generations import prune_generations, release
from ddtree_deploy.push.request import PushOptions
from ddtree_deploy.snapshot import take
from ddtree_deploy.store import Store
from tests.faults.harness import check_generations, check_objects, in_lanes, litter, live_generation, outcome, report, rest, thin
from tests.faults.test_p02_system_calls import strace_works, traced
from tests.fixtures.venvs import contents, make_venv, package, site
from tests.fixtures.world import BASE_PYTHON, BRIEF, QUICK, World, local, make_world, replace

pytestmark = [pytest.mark.faults, pytest.mark.skipif(not strace_works(), reason="strace can not trace here")]

CALLS = ("fsync", "syncfs", "write", "rename", "renameat2", "link", "linkat", "symlink", "symlinkat", "unlink", "unlinkat")
ACTIONS = ("signal=SIGKILL", "error=EIO", "error=ENOSPC")
HONEST = (HostUnreachable, IoProblem, NoSpace, RestoreUnconfirmed, RevertedAfterFailure)


def points(log: str, most: int) -> list[str]:
    """Return injections for the calls in a trace: each action at each call, the k-th that one thread makes."""
    counts: dict[str, int] = {}
    for (_pid, call), count in Counter(re.findall(r"^(\d+) +(\w+)\(", log, re.MULTILINE)).items():
        counts[call] = max(count, counts.get(call, 0))
    # The first of each call before the second of any, so that few points are different ones.
    rows = [(k, call, action) for call, count in counts.items() for k in range(1, count + 1) for action in ACTIONS]
    return [f"{call}:{action}:when={k}" for k, call, action in thin(sorted(rows), most)]


@dataclass
class Case:
    """A world, a copy of its target as it was before the command, and what the target holds then and afterwards."""

    world: World
    saved: Path
    before: dict[str, str]

    def again(self) -> None:
        shutil.rmtree(self.world.target, ignore_errors=True)
        subprocess.run(["cp", "-a", str(self.saved), str(self.world.target)], check=True)


def make_case(root: Path, pushes: int) -> Case:
    """Make a target that got `pushes` pushes, of two snapshots in turn."""
    world = make_world(root / uuid.uuid4().hex[:6], data=5000)
    first = world.snapshot
    shutil.rmtree(world.source)
    make_venv(world.source, package("alpha", "3.0", data=6000, modules=2), package("beta", "2.0"))
    other = world.take().ref.id
    for number in range(pushes):
        world.push((first, other)[number % 2], options=replace(QUICK, keep_generations=9))
        rest(world.target)
    saved = world.root / "saved"
    subprocess.run(["cp", "-a", str(world.target), str(saved)], check=True)
    return Case(world, saved, world.live())


def sweep(
    root: Path,
    name: str,
    make: Callable[[], Case],
    act: Callable[[World, str, PushOptions], object],
    check: Callable[[Case], None],
    most: int,
    also: tuple[type[Exception], ...] = (),
) -> None:
    """Trace `act(world, python, options)` once; run it with a fault at each point; then `act` again without one, and `check`."""
    first = make()
    python, log = traced(root / "trace", *(f"{call}:retval=0:when=65535" for call in CALLS))
    act(first.world, python, QUICK)
    rest(first.world.target)
    chosen = points(log.read_text(), most)
    results: Counter[str] = Counter()

    def one(case: Case, injection: str) -> bool:
        case.again()
        python, log = traced(case.world.root / "strace", injection)
        _done, error = outcome(lambda: act(case.world, python, BRIEF))
        hit = "INJECTED" in log.read_text() or "SIGKILL" in log.read_text()
        results[type(error).__name__ if error else "done" if hit else "not reached"] += 1
        assert error is None or isinstance(error, (*HONEST, *also)), f"{error!r} {error.causes}"
        rest(case.world.target)
        outcome(lambda: act(case.world, str(BASE_PYTHON), QUICK))  # refused when the first one was done already
        rest(case.world.target)
        check(case)
        return True

    in_lanes(make, chosen, one)
    report(f"P2 {name}, system calls", tried=len(chosen), **results)


def test_prune_survives_a_fault_at_any_system_call(tmp_path: Path) -> None:
    def check(case: Case) -> None:
        venv = case.world.target
        assert case.world.live() == case.before
        assert len(check_generations(venv)) == 2, "the live one, and the one before"
        assert litter(venv) == []

    sweep(
        tmp_path, "generations prune", lambda: make_case(tmp_path, 3),
        lambda world, python, _options: prune_generations(world.host(python=python), 1), check, 6,
    )  # fmt: skip


def test_rollback_survives_a_fault_at_any_system_call(tmp_path: Path) -> None:
    def act(world: World, python: str, options: PushOptions) -> object:
        if live_generation(world.target) == 1:
            return None
        return world.rollback(1, host=world.host(python=python), seconds=options.confirm_timeout)

    def check(case: Case) -> None:
        venv = case.world.target
        assert live_generation(venv) == 1 and 1 in check_generations(venv)
        case.world.rollback(2)  # whatever a cut may have left after the commit point goes with the next run
        rest(venv)
        assert case.world.live() == case.before and litter(venv) == []

    sweep(tmp_path, "rollback", lambda: make_case(tmp_path, 2), act, check, 6)


def test_release_survives_a_fault_at_any_system_call(tmp_path: Path) -> None:
    def check(case: Case) -> None:
        world = case.world
        assert world.live() == case.before and not world.site.is_symlink()
        # What was cut behind the commit point is cleared by the next push.
        world.push(options=replace(QUICK, keep_generations=9))
        rest(world.target)
        release(world.host())
        assert not world.site.is_symlink() and not world.state.exists() and litter(world.target) == []

    sweep(
        tmp_path, "release", lambda: make_case(tmp_path, 1),
        lambda world, python, _options: release(world.host(python=python)) if world.site.is_symlink() else None, check, 4,
    )  # fmt: skip


def test_create_survives_a_fault_at_any_system_call(tmp_path: Path) -> None:
    """The venv that `push --create` makes: half of one is not taken for a venv, and the next run makes it anew."""

    def make() -> Case:
        world = make_world(tmp_path / uuid.uuid4().hex[:6], data=5000)
        shutil.rmtree(world.target)
        world.target.parent.mkdir(exist_ok=True)
        (world.root / "saved").mkdir()
        return Case(world, world.root / "saved", {})

    def check(case: Case) -> None:
        venv = case.world.target
        assert case.world.live() == contents(site(case.world.source))
        assert litter(venv) == [] and not (venv / ".ddtree-unfinished").exists()
        assert subprocess.run([venv / "bin/python", "-c", "import alpha"], check=False).returncode == 0

    sweep(
        tmp_path, "push --create", make,
        lambda world, python, options: world.push(host=world.host(python=python), options=replace(options, create=True)),
        check, 6, (Incompatible,),
    )  # fmt: skip


@pytest.mark.parametrize("act", ["snapshot", "prune"])
def test_the_store_survives_a_fault_at_any_system_call(tmp_path: Path, act: str) -> None:
    """A controller under strace that takes a snapshot, or prunes the cache."""
    world = make_world(tmp_path / "world", data=5000)
    full = tmp_path / "full"
    if act == "prune":
        store = Store.open(full)
        for version in ("0.1", "0.2"):
            take(local(make_venv(tmp_path / version, package("alpha", version))), store, probe=False)
        take(local(world.source), store, probe=False)
    home = tmp_path / "home"
    config = tmp_path / "config.json"
    names = {"act": act, "venv": str(world.source), "home": str(home), "snapshot": "", "python": str(BASE_PYTHON), "killer": ""}
    config.write_text(json.dumps(names))

    def run(*injections: str, log: Path = tmp_path / "log") -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "tests.faults.controller", str(config)]
        if injections:
            inject = [word for injection in injections for word in ("-e", f"inject={injection}")]
            # The agent is a child, and no part of this test: only the controller is followed.
            argv = ["strace", "-qqq", "-f", "-A", "-o", str(log), "-e", f"trace={','.join(CALLS)}", *inject, *argv]
        return subprocess.run(argv, capture_output=True, text=True, check=False)

    def again() -> None:
        shutil.rmtree(home, ignore_errors=True)
        if act == "prune":
            shutil.copytree(full, home)

    again()
    done = run(*(f"{call}:retval=0:when=65535" for call in CALLS))
    assert done.returncode == 0, done.stderr
    chosen = points((tmp_path / "log").read_text(), 5)
    results: Counter[str] = Counter()
    for injection in chosen:
        again()
        (tmp_path / "log").unlink()
        done = run(injection)
        results["done" if done.returncode == 0 else "killed" if done.returncode < 0 else "error"] += 1
        assert "Traceback" not in done.stderr or "ddtree_deploy.errors." in done.stderr.splitlines()[-1] or "Error: [Errno" in done.stderr
        check_objects(home / "store" / "objects") if (home / "store" / "objects").is_dir() else None
        done = run()
        assert done.returncode == 0, f"{injection}: {done.stderr}"
        store = Store.open(home)
        for ref in store.refs():
            assert store.absent(store.manifest(ref.id)) == [], injection
        assert [ref.id for ref in store.refs()] == [world.snapshot]
        upkeep.prune(store)
        left = [path.name for path in (home / "store").rglob("*") if path.name.startswith((".tmp-", "in-"))]
        assert left == [], injection
    report(f"P2 {'cache prune' if act == 'prune' else act}, system calls of the controller", tried=len(chosen), **results)


def test_create_on_top_of_another_venv_takes_what_that_has(tmp_path: Path) -> None:
    """Two venvs are looked at through one connection: each answer belongs to the request that is open."""
    world = make_world(tmp_path / "world", data=5000)
    made = tmp_path / "made"
    world.push(host=local(made), options=replace(QUICK, create=True, base=str(world.target)))
    rest(made)
    assert contents(site(made)) == world.new
