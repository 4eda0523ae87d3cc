"""P15: rollback always works, with neither store nor source; of a rollback too; to a pruned generation it lists what is there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ddtree_deploy.errors import UsageProblem
from ddtree_deploy.events import Event, Note
from ddtree_deploy.generations import generations, prune_generations, rollback
from ddtree_deploy.models import RolledBack
from tests.faults.harness import check_generations, ledger, litter, live_generation, outcome, rest
from tests.fixtures.venvs import contents, install, make_venv, package, site
from tests.fixtures.world import World, make_world, yes

pytestmark = pytest.mark.faults


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Three generations: as found, 2.0, 3.0 (live); then the store and the source are gone."""
    made = make_world(tmp_path / "world", data=20_000)
    made.push()
    shutil.rmtree(made.source)
    make_venv(made.source, package("alpha", "3.0", data=20_000), package("beta", "3.0"))
    made.push(made.take().ref.id)
    rest(made.target)
    kept = {path: digest for path, digest in made.old.items() if path.startswith("keep")}
    made.trees = {0: made.old, 1: made.new, 2: {**contents(site(made.source)), **kept}}  # type: ignore[attr-defined]
    shutil.rmtree(made.source)
    shutil.rmtree(made.store.root)
    return made


def went_to(world: World, number: int) -> None:
    rest(world.target)
    assert live_generation(world.target) == number
    assert world.live() == world.trees[number]  # type: ignore[attr-defined]
    assert litter(world.target) == []
    assert ledger(world.target)[-1]["event"] == "confirmed"


def test_rollback_needs_neither_store_nor_source_and_a_rollback_can_be_rolled_back(world: World) -> None:
    done = world.rollback()
    assert (done.generation, done.previous) == (1, 2)
    went_to(world, 1)
    assert world.rollback().generation == 2  # back to where it came from
    went_to(world, 2)
    assert world.rollback(0).generation == 0
    went_to(world, 0)
    assert check_generations(world.target) == [0, 1, 2]


def test_console_scripts_go_back_too(world: World) -> None:
    (world.target / "bin" / "alpha").unlink()
    world.rollback(1)
    rest(world.target)
    assert "from alpha import main" in (world.target / "bin" / "alpha").read_text()


def test_to_a_generation_that_is_not_there_it_lists_the_ones_that_are(world: World) -> None:
    for number, problem in ((7, "there is no generation 7"), (2, "generation 2 is live already")):
        _done, error = outcome(lambda number=number: world.rollback(number))
        assert isinstance(error, UsageProblem) and problem in error.message
        assert "0, 1" in error.mend
    went_to(world, 2)


def test_to_a_pruned_generation_it_lists_the_ones_that_are(world: World) -> None:
    assert prune_generations(world.host(), 1) == [0]
    rest(world.target)
    _done, error = outcome(lambda: world.rollback(0))
    assert isinstance(error, UsageProblem) and "generations to go back to: 1" in error.mend
    world.rollback()
    went_to(world, 1)


def test_pruning_never_takes_the_live_one_or_the_one_before(world: World) -> None:
    assert prune_generations(world.host(), 1, dry_run=True) == [0]
    assert sorted(info.number for info in generations(world.host())) == [0, 1, 2]
    prune_generations(world.host(), 1)
    prune_generations(world.host(), 1)
    assert {info.number: info.state for info in generations(world.host())} == {2: "live", 1: "kept"}
    went_to(world, 2)


def test_a_file_edited_in_the_live_tree_does_not_change_in_the_generation_before(world: World) -> None:
    """People patch `.py` files in place: what a rollback brings back must not have changed with them."""
    kept = world.state / "generations" / "1" / "site-packages" / "keep" / "m0.py"
    live = world.site / "keep" / "m0.py"
    assert kept.read_bytes() == live.read_bytes() and kept.stat().st_ino != live.stat().st_ino
    with open(live, "a") as file:
        file.write("EDITED = True\n")
    world.rollback(1)
    went_to(world, 1)


def test_an_ordinary_venv_has_nothing_to_go_back_to(tmp_path: Path) -> None:
    venv = make_venv(tmp_path / "plain", package("alpha", "1.0"))
    lone = World(tmp_path, None, venv, venv, "")  # type: ignore[arg-type]
    _done, error = outcome(lone.rollback)
    assert isinstance(error, UsageProblem) and "push to it first" in error.mend
    assert not os.path.exists(venv / ".ddtree")


def test_what_is_imported_is_what_the_restored_generation_has(tmp_path: Path) -> None:
    """sglang came with generation 1: its absence from 0 is no failure, its presence in 1 is proved, and no proof is not called one."""
    world = make_world(tmp_path / "world")
    install(world.source, package("sglang", "0.5.11"))
    world.push(world.take().ref.id)
    told: list[Event] = []

    def back(number: int) -> RolledBack:
        return rollback(world.host(), number, approve=yes, confirm_timeout=60.0, emit=told.append)

    assert back(0).proofs == ()
    (proofs,) = back(1).proofs
    assert [(proof.module, proof.ok) for proof in proofs.imports or ()] == [("sglang", True)]
    assert not [event for event in told if isinstance(event, Note) and event.level == "warn"]
