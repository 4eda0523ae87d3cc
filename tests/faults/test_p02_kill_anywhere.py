"""P2: kill us anywhere. Agent, controller and guardian, at every step of push, first push, rollback, snapshot and prune."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ddtree_deploy.errors import HostUnreachable, RestoreUnconfirmed, RevertedAfterFailure
from ddtree_deploy.generations import release
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.snapshot import take
from ddtree_deploy.store import Store
from tests.faults.harness import (
    Killer,
    check_generations,
    check_objects,
    in_lanes,
    kill_points,
    ledger,
    litter,
    live_generation,
    outcome,
    report,
    rest,
    thin,
)
from tests.fixtures.venvs import contents, make_venv, package, site
from tests.fixtures.world import BASE_PYTHON, BRIEF, World, local, make_world

pytestmark = pytest.mark.faults

#: How a push may end whose agent or line died: not known yet, gone back, or look at the host. Never an internal error.
HONEST = (HostUnreachable, RestoreUnconfirmed, RevertedAfterFailure)


@dataclass
class Lane:
    """A world that two snapshots are pushed to in turn, so that each killed push starts from a real generation."""

    world: World
    snapshots: list[str] = field(default_factory=list)
    wanted: dict[str, dict[str, str]] = field(default_factory=dict)
    turn: int = 0

    @property
    def next(self) -> str:
        return self.snapshots[self.turn % len(self.snapshots)]

    def advance(self) -> None:
        self.turn += 1


def fresh(root: Path) -> Path:
    return root / f"lane{uuid.uuid4().hex[:6]}"


def make_lane(root: Path) -> Lane:
    world = make_world(root, data=20_000)
    lane = Lane(world, [world.snapshot], {world.snapshot: world.new})
    shutil.rmtree(world.source)
    make_venv(world.source, package("alpha", "3.0", data=30_000, modules=2), package("beta", "2.0"))
    other = world.take().ref.id
    kept = {path: digest for path, digest in world.old.items() if path.startswith("keep")}
    lane.snapshots.append(other)
    lane.wanted[other] = {**contents(site(world.source)), **kept}
    return lane


def settled(world: World, wanted: dict[str, str]) -> None:
    """Assert that a host is at rest, holds `wanted`, and has no litter."""
    rest(world.target)
    assert world.live() == wanted
    assert litter(world.target) == []
    assert live_generation(world.target) in check_generations(world.target)
    ends = [entry for entry in ledger(world.target) if entry["event"] in ("confirmed", "reverted")]
    last = ends[-1]
    assert live_generation(world.target) == last["generation" if last["event"] == "confirmed" else "previous"]


def killed(lane: Lane, act: Callable[[Host], Any], killer: Killer, before: dict[str, str], after: dict[str, str]) -> list[Any] | None:
    """Run an act whose process is killed; assert that the host is old or new all the while, and that the word given is true."""
    world = lane.world
    done, error = outcome(lambda: act(world.host(python=killer.python)))
    assert error is None or isinstance(error, HONEST), f"{killer.hit}: {error!r}"
    now = world.live()
    assert now in (before, after), f"{killer.hit}: a mixture"
    if done is not None:
        assert now == after, f"{killer.hit}: said to be done, but it is not"
    if isinstance(error, RevertedAfterFailure):
        assert now == before, f"{killer.hit}: said to be back, but it is not"
    rest(world.target)
    assert world.live() in (before, after), f"{killer.hit}: a mixture at rest"
    return killer.hit


@pytest.mark.parametrize("role", ["agent0", "agent1", "guardian"])
def test_push_killed_at_every_step(tmp_path: Path, role: str) -> None:
    def lane() -> Lane:
        made = make_lane(fresh(tmp_path))
        made.world.push(made.next)
        made.advance()
        rest(made.world.target)
        return made

    first = lane()
    trace = Killer(tmp_path / "trace", role, None, trace=True)
    first.world.push(first.next, host=first.world.host(python=trace.python))
    first.advance()
    rest(first.world.target)

    def one(lane: Lane, kill: dict[str, Any]) -> list[Any] | None:
        world, snapshot = lane.world, lane.next
        before = world.live()
        killer = Killer(world.root / "killer", role, kill)
        hit = killed(lane, lambda host: world.push(snapshot, host=host, options=BRIEF), killer, before, lane.wanted[snapshot])
        if world.push(snapshot).already:
            # Nothing to do, and nothing is touched; what is left (after the commit point) goes with the next push.
            rest(world.target)
            assert world.live() == lane.wanted[snapshot]
            lane.advance()
            world.push(lane.next)
        settled(world, lane.wanted[lane.next])
        lane.advance()
        return hit

    points = kill_points(trace.steps(), 10 if role == "agent0" else 4)
    hits = in_lanes(lane, points, one)
    report(f"P2 push, {role} killed", steps=len(trace.steps()), tried=len(points), hit=sum(hit is not None for hit in hits))
    assert any(hits)


@pytest.mark.parametrize("role", ["agent0", "guardian"])
def test_first_push_killed_at_every_step(tmp_path: Path, role: str) -> None:
    def lane() -> Lane:
        return make_lane(fresh(tmp_path))

    first = lane()
    trace = Killer(tmp_path / "trace", role, None, trace=True)
    first.world.push(host=first.world.host(python=trace.python))
    rest(first.world.target)

    def one(lane: Lane, kill: dict[str, Any]) -> list[Any] | None:
        world = lane.world
        shutil.rmtree(world.target)
        make_venv(world.target, package("alpha", "1.0", data=20_000), package("beta", "1.0"), package("keep", "1.0", modules=1))
        killer = Killer(world.root / "killer", role, kill)
        hit = killed(lane, lambda host: world.push(host=host, options=BRIEF), killer, world.old, world.new)
        world.push()
        rest(world.target)
        assert world.live() == world.new
        world.rollback(0)
        settled(world, world.old)
        return hit

    points = kill_points(trace.steps(), 12 if role == "agent0" else 4)
    hits = in_lanes(lane, points, one)
    report(f"P2 first push, {role} killed", steps=len(trace.steps()), tried=len(points), hit=sum(hit is not None for hit in hits))
    assert any(hits)


@pytest.mark.parametrize("role", ["agent0", "agent1", "guardian"])
def test_rollback_killed_at_every_step(tmp_path: Path, role: str) -> None:
    def lane() -> Lane:
        made = make_lane(fresh(tmp_path))
        for snapshot in made.snapshots:
            made.world.push(snapshot)
            rest(made.world.target)
        return made

    first = lane()
    trace = Killer(tmp_path / "trace", role, None, trace=True)
    first.world.rollback(host=first.world.host(python=trace.python))
    rest(first.world.target)

    def one(lane: Lane, kill: dict[str, Any]) -> list[Any] | None:
        world = lane.world
        live = live_generation(world.target)
        aim = 1 if live == 2 else 2
        before, after = world.live(), lane.wanted[lane.snapshots[aim - 1]]
        killer = Killer(world.root / "killer", role, kill)
        hit = killed(lane, lambda host: world.rollback(aim, host=host, seconds=BRIEF.confirm_timeout), killer, before, after)
        if live_generation(world.target) != aim:
            world.rollback(aim)
            settled(world, after)
        else:
            # It had been done when it was killed; what is left goes with the next one.
            world.rollback(live)
            settled(world, before)
        return hit

    points = kill_points(trace.steps(), 8 if role == "agent0" else 4)
    hits = in_lanes(lane, points, one)
    report(f"P2 rollback, {role} killed", steps=len(trace.steps()), tried=len(points), hit=sum(hit is not None for hit in hits))
    assert any(hits)


def test_release_killed_at_every_step(tmp_path: Path) -> None:
    """Turning a venv back into an ordinary one: killed anywhere, what is live stays, and the next push goes."""
    world = make_world(tmp_path / "world", data=20_000)
    world.push()
    rest(world.target)
    trace = Killer(tmp_path / "trace", "agent0", None, trace=True)
    # The first session only looks at what a release would do; what it writes begins at the lock.
    release(world.host(python=trace.python))
    assert world.live() == world.new and not world.site.is_symlink() and not world.state.exists()
    steps = trace.steps()
    hits = []
    for kill in kill_points(steps, 6):
        world.push()
        rest(world.target)
        killer = Killer(tmp_path / "killer", "agent0", kill)
        _done, error = outcome(lambda killer=killer: release(world.host(python=killer.python)))
        hits.append(killer.hit)
        assert isinstance(error, HostUnreachable) or killer.hit is None
        assert world.live() == world.new, f"{killer.hit}: not what was live"
        if world.site.is_symlink():
            release(world.host())
        shutil.rmtree(world.site)
        shutil.copytree(world.source / world.site.relative_to(world.target), world.site)
        (world.site / "extra.py").write_text("")  # so that there is something to push
        (world.site / "alpha" / "m0.py").unlink()
        world.push()
        rest(world.target)
        assert world.live() == {**contents(site(world.source)), "extra.py": contents(world.site)["extra.py"]}
        world.rollback(0)
        release(world.host())
        shutil.rmtree(world.target)
        make_venv(world.target, package("alpha", "1.0", data=20_000), package("beta", "1.0"), package("keep", "1.0", modules=1))
    report("P2 release, agent killed", steps=len(steps), tried=len(hits), hit=sum(hit is not None for hit in hits))
    assert any(hits)


def _controller(world: World, act: str, killer: Killer | None, snapshot: str, home: Path, venv: Path) -> subprocess.CompletedProcess[str]:
    config = world.root / "controller.json"
    config.write_text(
        json.dumps(
            {
                "act": act, "venv": str(venv), "home": str(home), "snapshot": snapshot, "python": str(BASE_PYTHON),
                "killer": str(killer.config) if killer else "",
            }
        )
    )  # fmt: skip
    return subprocess.run([sys.executable, "-m", "tests.faults.controller", str(config)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("act", ["push", "rollback"])
def test_controller_killed_at_every_step(tmp_path: Path, act: str) -> None:
    def lane() -> Lane:
        made = make_lane(fresh(tmp_path))
        for snapshot in made.snapshots:
            made.world.push(snapshot)
            rest(made.world.target)
        return made

    def run(lane: Lane, killer: Killer, snapshot: str) -> subprocess.CompletedProcess[str]:
        return _controller(lane.world, act, killer, snapshot, lane.world.store.root.parent, lane.world.target)

    def aim(lane: Lane) -> str:
        live = lane.world.live()
        return next(snapshot for snapshot, wanted in lane.wanted.items() if wanted != live)

    first = lane()
    trace = Killer(tmp_path / "trace", "controller", None, trace=True)
    done = run(first, trace, aim(first))
    assert done.returncode == 0, done.stderr
    rest(first.world.target)

    def one(lane: Lane, kill: dict[str, Any]) -> list[Any] | None:
        world, snapshot = lane.world, aim(lane)
        before, after = world.live(), lane.wanted[snapshot]
        killer = Killer(world.root / "killer", "controller", kill)
        run(lane, killer, snapshot)
        hit = killer.hit
        assert world.live() in (before, after), f"{killer.hit}: a mixture"
        rest(world.target)
        assert world.live() in (before, after), f"{killer.hit}: a mixture at rest"
        if world.push(snapshot).already:
            rest(world.target)
            assert world.live() == after
            world.push(aim(lane))
            after = before
        settled(world, after)
        return hit

    steps = [step for step in trace.steps() if step[1] == "tests.emit" or "/store/" in step[4]]
    points = [{"at": step[0]} for step in thin(steps, 6)]
    hits = in_lanes(lane, points, one)
    report(f"P2 {act}, controller killed", steps=len(steps), tried=len(points), hit=sum(hit is not None for hit in hits))
    assert any(hits)


def check_store(world: World, home: Path) -> int:
    """Assert that a store is right: objects have their digests, listed snapshots are whole. Returns the number of objects."""
    store = Store.open(home)
    count = check_objects(store.objects)
    for ref in store.refs():
        assert store.absent(store.manifest(ref.id)) == []
    return count


def test_snapshot_killed_at_every_step(tmp_path: Path) -> None:
    world = make_world(tmp_path / "world", data=20_000)
    trace = Killer(tmp_path / "trace", "controller", None, trace=True)
    home = tmp_path / "store"
    done = _controller(world, "snapshot", trace, "", home, world.source)
    assert done.returncode == 0, done.stderr
    identity = done.stdout.strip()
    whole = check_store(world, home)
    points = kill_points(trace.steps(), 8)
    hits = []
    for kill in points:
        shutil.rmtree(home)
        killer = Killer(tmp_path / "killer", "controller", kill)
        _controller(world, "snapshot", killer, "", home, world.source)
        hits.append(killer.hit)
        check_store(world, home)
        again = _controller(world, "snapshot", None, "", home, world.source)
        assert again.stdout.strip() == identity, again.stderr
        assert check_store(world, home) == whole
        pruned = _controller(world, "prune", None, "", home, world.source)
        assert pruned.returncode == 0, pruned.stderr
        assert [path for path in (home / "store").rglob("*") if path.name.startswith((".tmp-", "in-"))] == []
        assert check_store(world, home) == whole
    report("P2 snapshot, controller killed", steps=len(trace.steps()), tried=len(points), hit=sum(hit is not None for hit in hits))
    assert any(hits)


def test_snapshot_survives_the_death_of_its_agent(tmp_path: Path) -> None:
    world = make_world(tmp_path / "world", data=20_000)
    host_home = tmp_path / "store"
    trace = Killer(tmp_path / "trace", "agent0", None, trace=True, reads=True)
    take(local(world.source, python=trace.python), Store.open(tmp_path / "first"), probe=False)
    steps = [step for step in trace.steps() if str(world.source) in step[4] or not step[4].startswith("/")]
    points = thin(steps, 4)
    hits = []
    for step in points:
        shutil.rmtree(host_home, ignore_errors=True)
        store = Store.open(host_home)
        killer = Killer(tmp_path / "killer", "agent0", {"site": step[1:4]}, reads=True)
        _done, error = outcome(lambda killer=killer, store=store: take(local(world.source, python=killer.python), store, probe=False))
        hits.append(killer.hit)
        if not killer.hit:  # another thread was at that line this time
            assert error is None
            continue
        assert isinstance(error, HostUnreachable), f"{killer.hit}: {error!r}"
        assert store.refs() == []
        check_store(world, host_home)
        assert take(local(world.source), store, probe=False).ref.id == world.snapshot
    report("P2 snapshot, agent killed", steps=len(steps), tried=len(points), hit=sum(hit is not None for hit in hits))
    assert any(hits)


def test_cache_prune_killed_at_every_step(tmp_path: Path) -> None:
    world = make_world(tmp_path / "world", data=20_000)
    home = tmp_path / "full"
    store = Store.open(home)
    kept = take(local(world.source), store, probe=False).ref.id
    for version in ("0.1", "0.2"):
        venv = make_venv(tmp_path / version, package("alpha", version), package("gamma", version))
        take(local(venv), store, probe=False)
    take(local(world.source), store, probe=False)  # the newest again

    def fresh() -> Path:
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        return Path(shutil.copytree(home, tmp_path / "store"))

    trace = Killer(tmp_path / "trace", "controller", None, trace=True)
    assert _controller(world, "prune", trace, "", fresh(), world.source).returncode == 0
    whole = check_store(world, tmp_path / "store")
    points = kill_points(trace.steps(), 12)
    hits = []
    for kill in points:
        at = fresh()
        killer = Killer(tmp_path / "killer", "controller", kill)
        _controller(world, "prune", killer, "", at, world.source)
        hits.append(killer.hit)
        check_store(world, at)
        done = _controller(world, "prune", None, "", at, world.source)
        assert done.returncode == 0, done.stderr
        assert check_store(world, at) == whole
        assert [ref.id for ref in Store.open(at).refs()] == [kept]
        assert [p.name for p in (at / "store" / "snapshots").iterdir()] == [f"{kept}.json"]
    report("P2 cache prune, killed", steps=len(trace.steps()), tried=len(points), hit=sum(hit is not None for hit in hits))
    assert any(hits)
