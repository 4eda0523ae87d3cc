"""P9: a push is never based on a stale plan: what changed after the plan was shown stops it, and nothing was written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ddtree_deploy.errors import StalePlan
from ddtree_deploy.models import Plan
from tests.faults.harness import litter, live_generation, outcome, rest
from tests.fixtures.venvs import contents, install, package
from tests.fixtures.world import World, make_world


def edit(site: Path) -> None:
    (site / "keep" / "__init__.py").write_text("edited = True\n")


def edit_same_size(site: Path) -> None:
    path = site / "keep" / "__init__.py"
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


def add(site: Path) -> None:
    (site / "new.py").write_text("")


def remove(site: Path) -> None:
    (site / "keep" / "m0.py").unlink()


def retarget(site: Path) -> None:
    (site / "link").symlink_to("keep")


def chmod(site: Path) -> None:
    (site / "keep" / "m0.py").chmod(0o755)


def pip_install(site: Path) -> None:
    install(site.parents[2], package("late", "1.0"))


def edit_what_goes(site: Path) -> None:
    (site / "alpha" / "m0.py").write_text("edited = True\n")


def chmod_what_goes(site: Path) -> None:
    (site / "alpha" / "m0.py").chmod(0o755)


#: Two of them in the fast tier, the rest with the sweeps.
CHANGES = [edit, edit_same_size, add, remove, retarget, chmod, pip_install, edit_what_goes, chmod_what_goes]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path / "world", data=1000)


@pytest.mark.parametrize("change", [pytest.param(c, marks=[] if c in (edit, add) else pytest.mark.faults) for c in CHANGES])
def test_a_target_that_changed_since_the_plan_is_not_touched(world: World, change: Callable[[Path], None]) -> None:
    after: dict[str, str] = {}

    def approve(_plan: Plan) -> bool:
        change(world.site)
        after.update(contents(world.site))
        return True

    _done, error = outcome(lambda: world.push(approve=approve))
    assert isinstance(error, StalePlan) and error.exit_code == 21 and "changed since the plan" in error.message
    assert world.live() == after
    assert not world.state.exists(), sorted(os.listdir(world.state))


@pytest.mark.faults
def test_planned_anew_it_goes(world: World) -> None:
    def approve(_plan: Plan) -> bool:
        edit(world.site)
        return True

    assert isinstance(outcome(lambda: world.push(approve=approve))[1], StalePlan)
    world.push()
    assert (world.site / "keep" / "__init__.py").read_text() == "edited = True\n"


@pytest.mark.faults
def test_a_managed_target_that_changed_since_the_plan_keeps_its_generation(world: World) -> None:
    world.push()
    rest(world.target)
    world.rollback(0)
    rest(world.target)
    ledger = (world.state / "ledger.jsonl").read_bytes()

    def approve(_plan: Plan) -> bool:
        edit(world.site)
        return True

    _done, error = outcome(lambda: world.push(approve=approve))
    assert isinstance(error, StalePlan)
    rest(world.target)
    assert live_generation(world.target) == 0 and litter(world.target) == []
    assert (world.state / "ledger.jsonl").read_bytes() == ledger
    assert (world.site / "keep" / "__init__.py").read_text() == "edited = True\n"


@pytest.mark.faults
def test_another_push_between_plan_and_application_is_a_change_too(world: World) -> None:
    def approve(_plan: Plan) -> bool:
        world.push()
        rest(world.target)
        return True

    _done, error = outcome(lambda: world.push(approve=approve))
    assert isinstance(error, StalePlan)
    assert live_generation(world.target) == 1 and world.live() == world.new


@pytest.mark.faults
def test_and_also_when_the_live_tree_was_a_generation(world: World) -> None:
    world.push()
    rest(world.target)
    world.rollback(0)
    rest(world.target)

    def approve(_plan: Plan) -> bool:
        world.push()
        rest(world.target)
        return True

    _done, error = outcome(lambda: world.push(approve=approve))
    assert isinstance(error, StalePlan)
    assert live_generation(world.target) == 2 and world.live() == world.new and litter(world.target) == []


def test_what_was_not_approved_was_not_begun(world: World) -> None:
    _done, error = outcome(lambda: world.push(approve=lambda _plan: False))
    assert error is not None and error.exit_code == 2 and "nothing was changed" in error.message
    assert not world.state.exists() and world.live() == world.old
