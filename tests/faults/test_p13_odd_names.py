"""P13: names at the edges: not UTF-8, as long as the kernel takes, deeper than it takes in one call; carried, or refused by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_deploy.errors import SourceDrift
from tests.faults.harness import outcome, rest
from tests.fixtures.world import make_world

pytestmark = pytest.mark.faults


def _deep(at: Path, length: int) -> None:
    """Make a file whose path below `at` has `length` bytes, one directory after the other."""
    fd = os.open(at, os.O_RDONLY | os.O_DIRECTORY)
    try:
        while length > 250:
            name = "d" * min(200, length - 30)
            os.mkdir(name, dir_fd=fd)
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd, length = inner, length - len(name) - 1
        os.close(os.open("f" * length, os.O_WRONLY | os.O_CREAT, dir_fd=fd))
    finally:
        os.close(fd)


def test_names_that_are_not_utf8_are_carried_and_shown(tmp_path: Path) -> None:
    world = make_world(tmp_path / "world", data=1000)
    place = world.source / world.site.relative_to(world.target)
    odd = os.fsencode(place) + b"/alpha/\xff\xfe caf\xe9.txt"
    with open(odd, "wb") as file:
        file.write(b"odd")
    snapshot = world.take().ref.id
    home, config = world.store.root.parent, tmp_path / "ddtree.toml"
    config.write_text(f'[hosts.here]\ntransport = "local"\nvenv = "{world.target}"\n')
    argv = [sys.executable, "-m", "ddtree_deploy", "diff", "here", "--snapshot", snapshot, "--files"]
    path = {"PYTHONPATH": os.fspath(Path(__file__).parents[2]), "DDTREE_HOME": os.fspath(home)}
    shown = subprocess.run(argv, capture_output=True, cwd=tmp_path, env={**os.environ, **path}, check=False)
    assert shown.returncode == 0, shown.stderr
    assert b"caf" in shown.stdout and b"\xff" not in shown.stdout
    world.push(snapshot)
    rest(world.target)
    with open(os.fsencode(world.site) + b"/alpha/\xff\xfe caf\xe9.txt", "rb") as file:
        assert file.read() == b"odd"


@pytest.mark.parametrize("length", [1000, 3000])
def test_long_paths_are_carried(tmp_path: Path, length: int) -> None:
    world = make_world(tmp_path / "world", data=1000)
    _deep(world.source / world.site.relative_to(world.target), length)
    snapshot = world.take()
    assert max(len(entry.path) for entry in snapshot.manifest.files) == length
    world.push(snapshot.ref.id)
    rest(world.target)
    assert max(len(path) for path in world.live()) == length


@pytest.mark.parametrize("length", [4096, 6000])
def test_paths_longer_than_the_kernel_takes_are_refused_by_name(tmp_path: Path, length: int) -> None:
    """No import can open such a file; what matters is that one does not end the look at all others."""
    world = make_world(tmp_path / "world", data=1000)
    _deep(world.source / world.site.relative_to(world.target), length)
    _done, error = outcome(world.take)
    assert isinstance(error, SourceDrift), repr(error)
    assert any("dddd" in cause for cause in error.causes), error.causes
    world.push(world.take(allow_drift=True).ref.id)
    rest(world.target)
    assert world.live() == world.new
