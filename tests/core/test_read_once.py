"""What a push reads while its connection is made: what it will need, or nothing when there was a push since the snapshot."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddtree_deploy.errors import IntegrityFailure
from ddtree_deploy.push.read_once import ReadOnce
from tests.fixtures.world import make_world


def test_a_new_snapshot_is_read_ahead_and_one_that_was_pushed_is_not(tmp_path: Path) -> None:
    world = make_world(tmp_path, data=1000)
    assert ReadOnce(world.store).read_ahead(world.snapshot)
    world.push()
    once = ReadOnce(world.store)
    assert not once.read_ahead(world.snapshot)
    # Taken again, its record is younger than the tree of that push; what was read is the very object that the push then gets.
    os.utime(world.store.references / f"{world.snapshot}.json")
    assert once.read_ahead(world.snapshot)
    assert once.manifest(world.snapshot) is once.manifest(world.snapshot)
    (tree,) = world.store.trees()
    assert once.tree(tree) is once.tree(tree) and once.tree(tree) == world.store.tree(tree)


def test_what_can_not_be_read_ahead_fails_where_it_is_needed(tmp_path: Path) -> None:
    world = make_world(tmp_path, data=1000)
    (world.store.snapshots / f"{world.snapshot}.json").chmod(0o644)
    (world.store.snapshots / f"{world.snapshot}.json").write_text("{}")
    with pytest.raises(IntegrityFailure, match="does not have that digest"):
        world.push()
    assert world.live() == world.old
