"""P1: old or new, never a mixture. A process looks all the while: at real pushes, at 200 switches, at 60 adoptions."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddtree_deploy.agent import durable, layout, switch
from tests.faults.harness import report, rest
from tests.fixtures.venvs import BASE_PYTHON
from tests.fixtures.world import World, make_world


class Observer:
    result: dict[str, Any]

    def check(self, name: str, *, both: bool = True, **counts: Any) -> None:
        report(f"P1 {name}", looks=self.result["looks"], files_a_look=self.result["files"], wrong=self.result["wrong_count"], **counts)
        assert self.result["wrong_count"] == 0, self.result["wrong"]
        assert self.result["files"] >= 9
        assert all(self.result["looks"]) if both else any(self.result["looks"]), "the observer missed a state altogether"


@contextlib.contextmanager
def observed(world: World, directory: Path) -> Iterator[Observer]:
    directory.mkdir(exist_ok=True)
    expected, stop, result = directory / "expected.json", directory / "stop", directory / "result.json"
    stop.unlink(missing_ok=True)
    expected.write_text(json.dumps([world.old, world.new]))
    argv = [sys.executable, str(Path(__file__).with_name("observer.py")), str(world.site), str(stop), str(expected), str(result)]
    process = subprocess.Popen(argv)
    observer = Observer()
    try:
        yield observer
    finally:
        stop.touch()
        try:
            process.wait(30)
        finally:
            process.kill()
    observer.result = json.loads(result.read_text())


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = make_world(tmp_path, data=20_000)
    shared = [name for name in made.old if name in made.new]
    assert len(shared) >= 9 and any(made.old[name] != made.new[name] for name in shared)
    return made


@pytest.mark.faults
def test_an_observer_of_real_pushes_and_rollbacks_sees_one_generation_whole(world: World, tmp_path: Path) -> None:
    rounds = 4
    with observed(world, tmp_path / "look") as observer:
        for _ in range(rounds):
            world.push()
            world.rollback()
    rest(world.target)
    observer.check("pushes and rollbacks", switches=2 * rounds)


def test_an_observer_of_200_switches_sees_one_generation_whole(world: World, tmp_path: Path) -> None:
    world.push()
    rest(world.target)
    found = layout.locate(os.fspath(world.target))
    with observed(world, tmp_path / "look") as observer:
        for number in [0, 1] * 100:
            switch.flip(found, number, str(BASE_PYTHON))
    observer.check("switches alone", switches=200)


def test_an_observer_of_adoptions_never_finds_the_directory_missing(world: World, tmp_path: Path) -> None:
    found = layout.locate(os.fspath(world.target))
    os.makedirs(found.generations)
    with observed(world, tmp_path / "look") as observer:
        for turn in range(60):
            switch.adopt(found, False, {"number": 0})
            assert found.live() == 0
            epoch = tmp_path / "look" / "stop.epoch"
            epoch.write_text(str(2 * turn + 1))
            durable.exchange(found.site, found.tree(0))  # back to an ordinary directory
            layout.remove(found.directory(0))
            epoch.write_text(str(2 * turn + 2))
    observer.check("adoptions", both=False, switches=60)


@pytest.mark.faults
def test_an_interpreter_that_starts_at_any_moment_imports_one_version(world: World, tmp_path: Path) -> None:
    """What users do: `import` of several packages while switches go on; a process resolves the link once, at its start."""
    world.push()
    rest(world.target)
    found = layout.locate(os.fspath(world.target))
    code = (
        "import sys, os; root = os.path.realpath(sys.argv[1]); sys.path.insert(0, root)\n"
        "import alpha, beta, alpha.m0, alpha.m1, beta.m2\n"
        "print({alpha.VERSION, beta.VERSION, alpha.m0.OWN, alpha.m1.OWN, beta.m2.OWN})"
    )
    seen = set()
    for turn in range(16):
        process = subprocess.Popen([str(BASE_PYTHON), "-I", "-S", "-c", code, str(world.site)], stdout=subprocess.PIPE, text=True)
        while process.poll() is None:
            switch.flip(found, turn % 2, str(BASE_PYTHON))
            turn += 1
        assert process.stdout is not None
        seen.add(process.stdout.read().strip())
        process.stdout.close()
        assert process.returncode == 0
    assert seen <= {"{'1.0'}", "{'2.0'}"}, seen
