"""P20: a second run is quiet: nothing sent, no new generation, exit code 0, and it says so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_deploy.events import Event, Progress, Step
from ddtree_deploy.snapshot import take
from tests.faults.harness import ledger, live_generation, rest
from tests.fixtures.venvs import make_venv, package, tree_hash
from tests.fixtures.world import World, local, make_world


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path / "world", data=20_000)


def test_a_second_push_does_nothing(world: World) -> None:
    first = world.push()
    rest(world.target)
    before, entries = tree_hash(world.target), len(ledger(world.target))
    seen: list[Event] = []
    second = world.push(emit=seen.append, approve=lambda _plan: pytest.fail("asked about nothing"))
    assert second.already and second.generation == first.generation == 1
    assert (second.sent_objects, second.sent_bytes, second.changed_files) == (0, 0, 0)
    assert not [event for event in seen if isinstance(event, Progress) and event.what == "send"]
    assert not [event for event in seen if isinstance(event, Step) and event.what == "switch"]
    assert tree_hash(world.target) == before and len(ledger(world.target)) == entries


def test_the_command_says_that_it_is_up_to_date(world: World) -> None:
    env = {**os.environ, "DDTREE_HOME": str(world.store.root.parent), "NO_COLOR": "1"}
    main = "from ddtree_deploy.cli import main; main()"
    argv = [sys.executable, "-c", main, "push", "local", "--venv", str(world.target), "-y", "--no-verify"]
    runs = [
        subprocess.run(argv, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=200, check=False)
        for _ in range(2)
    ]
    assert [done.returncode for done in runs] == [0, 0], [done.stderr for done in runs]
    assert re.search(r"already up to date", runs[1].stdout + runs[1].stderr)
    assert live_generation(world.target) == 1


@pytest.mark.faults
def test_the_same_tree_under_another_snapshot_makes_no_new_generation(world: World) -> None:
    """Another source that holds the same distributions: another snapshot, no other tree."""
    world.push()
    rest(world.target)
    other = make_venv(world.root / "again", package("alpha", "2.0", data=20_000), package("beta", "2.0"))
    for dist in ("alpha", "beta"):  # the recorded hashes of the console scripts name the venv
        record = f"{dist}-2.0.dist-info/RECORD"
        text = (world.source / "lib").joinpath(*world.site.relative_to(world.target / "lib").parts, record).read_text()
        (other / "lib").joinpath(*world.site.relative_to(world.target / "lib").parts, record).write_text(text)
    snapshot = take(local(other), world.store, probe=False).ref.id
    assert snapshot != world.snapshot
    assert world.push(snapshot).already
    assert live_generation(world.target) == 1


@pytest.mark.faults
def test_after_an_edit_by_hand_a_push_brings_the_file_back(world: World) -> None:
    world.push()
    rest(world.target)
    (world.site / "alpha" / "m0.py").write_text("edited = True\n")
    (world.site / "alpha" / "added.py").write_text("")
    (world.site / "beta" / "m1.py").unlink()
    third = world.push()
    assert not third.already and third.changed_files == 3 and third.generation == 2
    assert world.live() == world.new
