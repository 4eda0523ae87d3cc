"""P16: the store is never a lie: a snapshot that lacks something says so, and nothing that is done to a host reaches the store."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from ddtree_deploy import upkeep
from ddtree_deploy.errors import IntegrityFailure
from ddtree_deploy.hosts.base import Host
from tests.faults.harness import check_objects, outcome, rest
from tests.fixtures.venvs import tree_hash
from tests.fixtures.world import World, make_world


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path / "world", data=20_000)


def test_a_snapshot_that_lost_an_object_is_incomplete_refused_and_mended_by_another_snapshot(world: World) -> None:
    digests = sorted(world.store.digests())
    world.store.path(random.Random(16).choice(digests)).unlink()
    before = tree_hash(world.target)
    _done, error = outcome(world.push)
    assert isinstance(error, IntegrityFailure) and error.exit_code == 14 and "incomplete" in error.message
    assert tree_hash(world.target) == before
    assert [ref.complete for ref in world.store.refs()] == [False]
    # Now that it is known, a host is not even contacted: this one does not exist.
    nowhere = Host("nowhere", address="nowhere.invalid", venv="/srv/venv")
    _done, error = outcome(lambda: world.push(host=nowhere))
    assert isinstance(error, IntegrityFailure) and "incomplete" in error.message, repr(error)
    assert world.take().ref.complete
    assert sorted(world.store.digests()) == digests
    world.push()
    rest(world.target)
    assert world.live() == world.new


def test_cache_verify_finds_it_too(world: World) -> None:
    victim = sorted(world.store.digests())[0]
    world.store.path(victim).unlink()
    assert upkeep.verify(world.store).missing == ((world.snapshot, victim),)
    assert [ref.complete for ref in world.store.refs()] == [False]


def test_an_edit_of_a_deployed_file_in_place_does_not_reach_the_store(world: World) -> None:
    """(uv 15700) What is deployed is a copy: append to every file of the host, and the store is as it was."""
    world.push()
    rest(world.target)
    inodes = {(info.st_dev, info.st_ino) for info in (os.stat(path) for path in world.store.objects.rglob("*"))}
    for at, _dirs, files in os.walk(world.state / "generations" / "1" / "site-packages"):
        for name in files:
            path = Path(at, name)
            info = path.stat()
            assert (info.st_dev, info.st_ino) not in inodes
            path.chmod(0o644)
            with path.open("ab") as file:
                file.write(b"# by hand\n")
    assert check_objects(world.store.objects) == len(world.store.digests())
    report = upkeep.verify(world.store)
    assert report.bad == () and report.missing == ()
