"""Tidying moves the stamps of the live tree: whoever looks meanwhile waits until the index knows the new ones."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from ddtree_deploy.agent import layout, locks, tidy
from ddtree_deploy.session import Session
from tests.faults.harness import rest
from tests.fixtures.world import make_world


def test_a_look_in_the_middle_of_it_knows_the_tree_all_the_same(tmp_path: Path) -> None:
    world = make_world(tmp_path / "world", data=5000)
    world.push()
    rest(world.target)
    found = layout.locate(str(world.target))
    seen: dict[str, object] = {}

    def look() -> None:
        with Session(world.host(), writable=False) as session:
            seen.update(session.ask("scan", venv=str(world.target)).fields)

    looking = threading.Thread(target=look)
    with tidy._Vouched(found) as vouched:
        vouched.moving()
        for at, _directories, files in os.walk(found.tree(1)):
            for name in files:  # a link more or less: that is all that happens to a live file
                os.link(os.path.join(at, name), tmp_path / "link")
                os.unlink(tmp_path / "link")
        looking.start()
        looking.join(3)  # long enough for a look that does not wait
    looking.join(60)
    assert seen["clean"] is True


def test_it_is_not_waited_for_without_end(tmp_path: Path) -> None:
    world = make_world(tmp_path / "world", data=5000)
    found = layout.locate(str(world.target))
    locks.steady(found)  # nobody ever tidied there
    os.makedirs(found.state)
    with tidy._Vouched(found) as vouched:
        vouched.moving()
        locks.steady(found, 0.1)
    locks.steady(found, 0.0)
