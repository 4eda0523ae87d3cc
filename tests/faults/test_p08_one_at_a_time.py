"""P8: two pushes at once: one wins, the others say who; the lock dies with its holder; two snapshots share a store."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddtree_deploy import upkeep
from ddtree_deploy.agent import durable
from ddtree_deploy.errors import HostUnreachable, Locked, StalePlan
from ddtree_deploy.events import Event, Step
from ddtree_deploy.generations import lock_status
from ddtree_deploy.models import Pushed
from ddtree_deploy.snapshot import take
from ddtree_deploy.store import Store
from tests.faults.harness import check_generations, check_objects, ledger, outcome, report, rest
from tests.fixtures.venvs import contents, make_venv, package, site
from tests.fixtures.world import QUICK, World, local, make_world

NOW = replace(QUICK, lock_wait=0.0)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path / "world", data=20_000)


def holding(world: World, meanwhile: Any) -> tuple[Pushed | None, Any]:
    """Run a push and, while it holds the lock, `meanwhile()` once."""
    results: list[Any] = []

    def emit(event: Event) -> None:
        if isinstance(event, Step) and event.what.startswith("build") and not results:
            results.append(meanwhile())

    done, error = outcome(lambda: world.push(emit=emit))
    return done, (results[0], error)


def test_the_others_are_told_who_holds_the_lock(world: World) -> None:
    def others() -> list[Any]:
        with ThreadPoolExecutor(3) as pool:
            tries = [pool.submit(outcome, lambda: world.push(options=NOW)) for _ in range(3)]
            return [lock_status(world.host()), *(done.result() for done in tries)]

    done, (answers, error) = holding(world, others)
    assert done is not None and error is None
    held, *tries = answers
    assert held["what"] == "push" and held["who"] and held["since"].endswith("Z") and held["pid"]
    for _result, refused in tries:
        assert isinstance(refused, Locked) and refused.exit_code == 12
        assert held["who"] in refused.message and held["since"] in refused.message and "--lock-wait" in refused.mend
    assert world.live() == world.new
    rest(world.target)
    assert lock_status(world.host()) is None


@pytest.mark.faults
def test_eight_pushes_of_two_snapshots_at_once(world: World) -> None:
    make_venv(world.root / "other", package("alpha", "3.0", data=20_000), package("beta", "3.0"))
    other = take(local(world.root / "other"), world.store, probe=False).ref.id
    kept = {path: digest for path, digest in world.old.items() if path.startswith("keep")}
    trees = {world.snapshot: world.new, other: {**contents(site(world.root / "other")), **kept}}
    active: set[int] = set()
    most = 0
    guard = threading.Lock()

    def one(number: int) -> tuple[Any, Any]:
        nonlocal most

        def emit(event: Event) -> None:
            nonlocal most
            if isinstance(event, Step) and event.what.startswith("build"):
                with guard:
                    active.add(number)
                    most = max(most, len(active))
            if isinstance(event, Step) and event.what.startswith("confirm"):
                with guard:
                    active.discard(number)

        return outcome(lambda: world.push([world.snapshot, other][number % 2], options=NOW, emit=emit))

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(one, range(8)))
    rest(world.target)
    won = [done for done, _error in results if done is not None]
    lost = [error for _done, error in results if error is not None]
    assert won and most == 1, f"{most} were at work at once"
    assert all(isinstance(error, (Locked, StalePlan)) for error in lost), lost
    last = [entry for entry in ledger(world.target) if entry["event"] == "confirmed"][-1]
    assert world.live() == trees[last["snapshot"]]
    check_generations(world.target)
    locked, stale = (sum(isinstance(error, kind) for error in lost) for kind in (Locked, StalePlan))
    report("P8 eight pushes at once", won=len(won), locked=locked, stale=stale)


def test_a_killed_holder_frees_the_lock_at_once(world: World) -> None:
    def kill() -> Any:
        held = durable.read_json(str(world.state / "lock.json"))
        assert held is not None
        os.kill(held["pid"], signal.SIGKILL)
        deadline = time.monotonic() + 20
        while Path(f"/proc/{held['pid']}").exists() and time.monotonic() < deadline:
            if Path(f"/proc/{held['pid']}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                break
            time.sleep(0.01)
        return outcome(lambda: world.push(options=NOW))

    _done, ((next_one, refused), error) = holding(world, kill)
    assert isinstance(error, HostUnreachable)
    assert refused is None and next_one.generation == 1, repr(refused)
    assert world.live() == world.new


@pytest.mark.faults
def test_lock_wait_waits(world: World) -> None:
    waiter: list[threading.Thread] = []
    result: list[Any] = []

    def start() -> None:
        thread = threading.Thread(target=lambda: result.append(outcome(lambda: world.push(options=replace(QUICK, lock_wait=60)))))
        thread.start()
        waiter.append(thread)

    done, _rest = holding(world, start)
    waiter[0].join()
    assert done is not None
    ((_second, error),) = result
    # It had planned while the first was still at work: it says so, or its plan led to the same tree.
    assert error is None or isinstance(error, StalePlan), repr(error)
    rest(world.target)
    assert world.live() == world.new
    ends = [entry["event"] for entry in ledger(world.target)]
    assert ends in (["confirmed"], ["confirmed", "confirmed"])


def test_two_snapshots_into_one_store_at_once(world: World, tmp_path: Path) -> None:
    make_venv(world.root / "other", package("alpha", "2.0", data=20_000), package("gamma", "1.0", data=30_000))
    home = tmp_path / "shared"

    def one(venv: Path) -> str:
        return take(local(venv), Store.open(home), probe=False).ref.id

    with ThreadPoolExecutor(4) as pool:
        ids = list(pool.map(one, [world.source, world.root / "other"] * 2))
    store = Store.open(home)
    assert ids[0] == ids[2] == world.snapshot and ids[1] == ids[3]
    assert {ref.id for ref in store.refs()} == set(ids)
    report_ = upkeep.verify(store)
    assert report_.bad == () and report_.missing == () and list(store.temporary.iterdir()) == []
    alone = Store.open(tmp_path / "alone")
    for venv in (world.source, world.root / "other"):
        take(local(venv), alone, probe=False)
    assert alone.digests() == store.digests() and check_objects(store.objects) == len(store.digests())
