"""P4: a full disk is clean. It fails before the switch, says how much is missing, leaves no litter; target and store."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddtree_deploy.errors import IoProblem, NoSpace, RestoreUnconfirmed, RevertedAfterFailure
from ddtree_deploy.events import Event, Progress, Step
from ddtree_deploy.snapshot import take
from ddtree_deploy.store import Store
from tests.faults.harness import ROOT_ONLY, check_objects, litter, outcome, report, rest, thin
from tests.faults.mounts import fill, fill_inodes, free, tmpfs
from tests.fixtures.venvs import make_venv, package
from tests.fixtures.world import BRIEF, World, local, make_world

pytestmark = [pytest.mark.faults, ROOT_ONLY]
MIB = 1 << 20
DATA = 3 * MIB


def old_venv(at: Path) -> Path:
    return make_venv(at, package("alpha", "1.0", data=DATA), package("beta", "1.0"), package("keep", "1.0", modules=1))


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("big"), data=DATA)


def at(world: World, target: Path) -> World:
    """Return the world with another target, as it is now."""
    moved = World(world.root, world.store, world.source, target, world.snapshot)
    _ = moved.old, moved.new
    return moved


def test_a_disk_that_is_read_only_is_an_io_problem_and_not_a_matter_of_who_asks(big: World, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", 84 * MIB) as disk:
        world = at(big, old_venv(disk / "venv"))
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        _done, error = outcome(world.push)
        assert isinstance(error, IoProblem) and "the file system there is read-only" in error.message
        assert error.mend == "mount it writable" and not error.causes


def test_a_disk_of_any_size_is_refused_or_enough(big: World, tmp_path: Path) -> None:
    sizes = thin([*range(4 * MIB, 84 * MIB, 4 * MIB)], 6)
    refused = 0
    for size in sizes:
        with tmpfs(tmp_path / "disk", size) as disk:
            world = at(big, old_venv(disk / "venv"))
            before = free(disk)
            done, error = outcome(world.push)
            if error is None:
                assert world.live() == world.new and not done.already
                continue
            refused += 1
            assert isinstance(error, NoSpace), f"{size}: {error!r} {error.causes}"
            assert any(part.isdigit() for part in error.message.split()), error.message
            assert world.live() == world.old
            assert litter(world.target) == [] and not world.state.exists()
            assert free(disk) == before
    report("P4 sizes of a target's disk", tried=len(sizes), refused=refused, enough=len(sizes) - refused)
    assert 0 < refused < len(sizes)


def _events(push: Callable[[Callable[[Event], None]], Any]) -> list[str]:
    """Return the steps that a push tells, in order."""
    seen: list[str] = []
    push(lambda event: seen.append(event.what) if isinstance(event, Step) else None)
    return seen


def _fill_at(disk: Path, what: str, point: int | str) -> tuple[Callable[[Event], None], Callable[[], None]]:
    """Return a listener that fills the disk at the n-th step (or the first progress of `point`), and what undoes it."""
    filler: list[Path] = []
    count = 0

    def emit(event: Event) -> None:
        nonlocal count
        middle = isinstance(event, Progress) and event.what == point
        if not filler and (middle or (isinstance(event, Step) and count == point)):
            filler.append(fill(disk) if what == "bytes" else fill_inodes(disk))
        count += isinstance(event, Step)

    def undo() -> None:
        for path in filler:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    return emit, undo


@pytest.mark.parametrize("what", ["bytes", "inodes"])
def test_a_disk_that_fills_up_at_any_step_fails_clean(big: World, tmp_path: Path, what: str) -> None:
    results: dict[str, int] = {}
    failures: list[str] = []
    with tmpfs(tmp_path / "disk", 96 * MIB, 6000) as disk:
        steps = _events(lambda emit: at(big, old_venv(disk / "venv")).push(emit=emit))
        rest(disk / "venv")
        # Every step, and the middle of the transfer.
        for point in [*range(len(steps)), "send"]:
            shutil.rmtree(disk / "venv")
            world = at(big, old_venv(disk / "venv"))
            before = free(disk)
            emit, undo = _fill_at(disk, what, point)
            done, error = outcome(lambda world=world, emit=emit: world.push(emit=emit, options=BRIEF))
            name = "done" if error is None else type(error).__name__
            results[name] = results.get(name, 0) + 1
            try:
                assert error is None or isinstance(error, (NoSpace, RevertedAfterFailure, RestoreUnconfirmed))
                assert world.live() == world.new if done else world.live() in (world.old, world.new)
                if isinstance(error, NoSpace):
                    assert world.live() == world.old, "no space, and yet it switched"
                undo()
                rest(world.target)  # a guardian decides as soon as there is room for its decision
                assert world.live() == (world.old if error else world.new)
                assert litter(world.target) == [] or done
                if not world.state.exists():
                    assert free(disk) == before, "room was not given back"
                world.push()
                assert world.live() == world.new
                rest(world.target)
            except Exception as problem:
                undo()
                failures.append(f"{point}: {steps[point] if isinstance(point, int) else point}: {error!r}: {problem!r}"[:800])
                rest(world.target)
    report(f"P4 disk fills up ({what})", tried=len(steps) + 1, **results)
    assert not failures, "\n".join(failures)
    assert results.get("NoSpace")


def test_few_inodes_are_refused_before_anything_is_sent(big: World, tmp_path: Path) -> None:
    refused = 0
    counts = thin([*range(60, 1500, 120)], 5)
    for inodes in counts:
        with tmpfs(tmp_path / "disk", 96 * MIB, inodes) as disk:
            world = at(big, old_venv(disk / "venv"))
            before = free(disk)
            _done, error = outcome(world.push)
            if error is None:
                assert world.live() == world.new
                continue
            refused += 1
            assert isinstance(error, NoSpace) and "inodes" in error.message, repr(error)
            assert world.live() == world.old and not world.state.exists() and free(disk) == before
    report("P4 inodes of a target's disk", tried=len(counts), refused=refused, enough=len(counts) - refused)
    assert 0 < refused < len(counts)


def test_a_full_store_keeps_what_it_has_and_says_so(big: World, tmp_path: Path) -> None:
    refused = 0
    sizes = thin([*range(256 << 10, 6 * MIB, 256 << 10)], 6)
    for size in sizes:
        with tmpfs(tmp_path / "store", size) as disk:
            store = Store.open(disk)
            done, error = outcome(lambda store=store: take(local(big.source), store, probe=False))
            if error is None:
                assert done.ref.id == big.snapshot
                continue
            refused += 1
            assert isinstance(error, NoSpace), f"{size}: {error!r}"
            assert store.refs() == [] and list(store.temporary.iterdir()) == []
            check_objects(store.objects)
            subprocess.run(["mount", "-o", f"remount,size={16 * MIB}", str(disk)], check=True)
            assert take(local(big.source), store, probe=False).ref.id == big.snapshot
    report("P4 sizes of the store's disk", tried=len(sizes), refused=refused, enough=len(sizes) - refused)
    assert 0 < refused < len(sizes)


def test_a_store_without_inodes_says_so(big: World, tmp_path: Path) -> None:
    for inodes in thin([*range(14, 60, 4)], 4):
        with tmpfs(tmp_path / "store", 16 * MIB, inodes) as disk:
            store, error = outcome(lambda disk=disk: Store.open(disk))
            if error is None:
                _done, error = outcome(lambda store=store: take(local(big.source), store, probe=False))
                assert store.refs() == [] or error is None
            assert error is None or isinstance(error, NoSpace), f"{inodes}: {error!r}"


def test_a_push_from_a_full_store_needs_no_room_there(big: World, tmp_path: Path) -> None:
    """A push writes little on this machine, stamps and what it resulted in, and can do without."""
    with tmpfs(tmp_path / "store", 16 * MIB) as disk:
        store = Store.open(disk)
        snapshot = take(local(big.source), store, probe=False).ref.id
        world = at(World(big.root, store, big.source, Path(), snapshot), old_venv(tmp_path / "venv"))
        fill(disk)
        world.push()
        assert world.live() == world.new
        rest(world.target)
        assert store.refs()[0].id == snapshot and store.absent(store.manifest(snapshot)) == []
