"""P22: Ctrl-C is safe at every event, says what is left, and a second one ends at once; the host cleans up or goes back by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.harness import EVERYTHING, check_generations, ledger, litter, live_generation, report, rest
from tests.fixtures.venvs import BASE_PYTHON, make_venv, package, tree_hash
from tests.fixtures.world import World, make_world

pytestmark = pytest.mark.faults

#: Where the signal comes: an event of the push, and whether something was switched by then.
POINTS = {"ask scan ": False, "ask build ": False, "ask switch ": False, "ask probe-live ": True, "ask confirm ": True}
MORE = {
    "look": False, "ask begin ": False, "ask stage ": False, "send": False, "ask received ": False, "prove": False, "ask prove ": False,
    "ask commit ": False, "switch": False, "confirm": True,
}  # fmt: skip


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = make_world(tmp_path / "world", data=20_000)
    (made.root / "ddtree.toml").write_text(f'[hosts.here]\ntransport = "local"\nvenv = "{made.target}"\npython = "{BASE_PYTHON}"\n')
    return made


def stopped(
    world: World, number: int, where: str, again: str = "once", hosts: tuple[str, ...] = ("here",)
) -> subprocess.CompletedProcess[str]:
    """Push, and send a signal at an event; the deadline of the confirmation is short."""
    argv = [sys.executable, "-m", "tests.faults.interrupted", str(int(number)), where, again]
    argv += ["push", *hosts, "-y", "--confirm-timeout", "3", "--lock-wait", "30"]
    repository = str(Path(__file__).parents[2])
    env = {**os.environ, "DDTREE_HOME": str(world.store.root.parent), "PYTHONPATH": repository}
    return subprocess.run(argv, env=env, cwd=world.root, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


def as_before(world: World, switched: bool) -> None:
    """Assert that the host came to rest as it was, by what its ledger says, and without litter (what was received may be resumed)."""
    rest(world.target)
    assert world.live() == world.old
    assert [path for path in litter(world.target) if "/incoming/" not in path] == []
    if switched:
        assert ledger(world.target)[-1]["event"] == "reverted" and live_generation(world.target) in check_generations(world.target)


def test_ctrl_c_at_every_event(world: World) -> None:
    points = {**POINTS, **MORE} if EVERYTHING else POINTS
    for where, switched in points.items():
        done = stopped(world, signal.SIGINT, where)
        assert done.returncode == 130, f"{where}: {done.returncode} {done.stderr}"
        assert "error: stopped by SIGINT while `here` was at: " in done.stderr, f"{where}: {done.stderr}"
        assert ("goes back by itself" in done.stderr) == (switched or where in ("ask switch ", "switch")), f"{where}: {done.stderr}"
        as_before(world, switched)
    report("P22 Ctrl-C", events=len(points))
    world.push()
    rest(world.target)
    assert world.live() == world.new


def test_ctrl_c_of_several_hosts_names_who_was_not_touched(world: World) -> None:
    other = make_venv(world.root / "other", package("alpha", "1.0"))
    with (world.root / "ddtree.toml").open("a") as file:
        file.write(f'[hosts.other]\ntransport = "local"\nvenv = "{other}"\npython = "{BASE_PYTHON}"\n')
    before = tree_hash(other)
    done = stopped(world, signal.SIGINT, "ask probe-live ", hosts=("here", "other"))
    assert done.returncode == 130, done.stderr
    _heads, here, there = done.stdout.splitlines()
    assert here.split()[:2] == ["here", "stopped"] and there.split()[:3] == ["other", "not", "touched"], done.stdout
    as_before(world, True)
    assert tree_hash(other) == before


def test_sigterm_has_its_own_exit_code(world: World) -> None:
    done = stopped(world, signal.SIGTERM, "ask build ")
    assert done.returncode == 143 and "stopped by SIGTERM" in done.stderr, done.stderr
    as_before(world, False)


@pytest.mark.parametrize("where", ["ask build ", "ask probe-live "])
def test_a_second_ctrl_c_ends_at_once_and_the_host_cleans_up(world: World, where: str) -> None:
    done = stopped(world, signal.SIGINT, where, "twice")
    assert done.returncode == -signal.SIGINT, done.stderr
    as_before(world, POINTS[where])
    assert not world.push().already
    rest(world.target)
