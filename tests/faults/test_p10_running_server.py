"""P10: a running server is not disturbed: pushes and prunes go on, and it still imports the modules of its own generation."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddtree_deploy.generations import generations, prune_generations
from ddtree_deploy.models import Plan
from tests.faults.harness import rest
from tests.fixtures.venvs import BASE_PYTHON, install, make_venv, package, site
from tests.fixtures.world import World, make_world

pytestmark = pytest.mark.faults

#: Runs from a generation's own path, holds a shared object of it mapped, and imports what it is told, a line at a time.
SERVER = """
import importlib, mmap, os, sys
root = sys.argv[1]
sys.path.insert(0, root)
fd = os.open(os.path.join(root, "alpha", "payload.bin"), os.O_RDONLY)
library = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
os.close(fd)
print(hash(library[:]), flush=True)
for line in sys.stdin:
    print(importlib.import_module(line.strip()).OWN, hash(library[:]), flush=True)
"""


class Server:
    """The process, and what it said first about its mapped file."""

    def __init__(self, root: Path) -> None:
        argv = [str(BASE_PYTHON), "-B", "-I", "-S", "-c", SERVER, str(root)]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.mapped = self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def imports(self, module: str) -> str:
        """Return the version of a module that is imported only now; the mapped file must still be what it was."""
        assert self.process.stdin is not None
        self.process.stdin.write(module + "\n")
        self.process.stdin.flush()
        version, _, mapped = self._line().partition(" ")
        assert mapped == self.mapped, f"the mapped file changed, or the server died: {self.process.poll()}"
        return version


@contextlib.contextmanager
def server(root: Path) -> Iterator[Server]:
    made = Server(root)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.communicate()


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = make_world(tmp_path / "world", data=2 << 20)  # large enough to stay linked between generations
    install(made.source, package("gamma", "2.0", modules=4))
    made.snapshot = made.take().ref.id
    made.push()
    rest(made.target)
    return made


def versions(world: World) -> list[str]:
    """Take snapshots of versions 3 and 4, which differ in every file."""
    found = []
    for version in ("3.0", "4.0"):
        venv = make_venv(world.root / version, package("alpha", version, data=2 << 20), package("gamma", version, modules=4))
        (site(venv) / "extra.py").write_text(version)
        world.source = venv
        found.append(world.take().ref.id)
    return found


def test_a_server_keeps_its_modules_and_its_libraries_across_pushes_and_prunes(world: World) -> None:
    seen: list[set[int]] = []

    def approve(plan: Plan) -> bool:
        seen.append({use.pid for use in plan.uses})
        return True

    third, fourth = versions(world)
    with server(world.state / "generations" / "1" / "site-packages") as running:
        pid = running.process.pid
        assert running.imports("gamma.m0") == "2.0"
        pushed = world.push(third, approve=approve)
        assert seen == [{pid}], "the push did not tell that a process runs from there"
        assert {use.pid for use in pushed.in_use} == {pid}
        rest(world.target)
        assert running.imports("gamma.m1") == "2.0"
        world.push(fourth)
        rest(world.target)
        # 3 is live, 2 the one before, 1 in use; 0 went with the push, or goes now.
        assert set(prune_generations(world.host(), 1)) <= {0}
        rest(world.target)
        assert running.imports("gamma.m2") == "2.0" and running.imports("alpha.m1") == "2.0"
        assert {row.number: row.in_use for row in generations(world.host())} == {3: (), 2: (), 1: (pid,)}
    assert prune_generations(world.host(), 1) == [1]


def test_a_push_under_a_running_server_is_asked_about_and_without_a_terminal_refused(world: World) -> None:
    third, _fourth = versions(world)
    env = {**os.environ, "DDTREE_HOME": str(world.store.root.parent)}
    command = [sys.executable, "-c", "from ddtree_deploy.cli import main; main()"]
    argv = [*command, "push", "local", "--venv", str(world.target), "--snapshot", third]
    live = world.live()
    with server(world.state / "generations" / "1" / "site-packages") as running:
        refused = subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, cwd=world.root)
        assert refused.returncode == 2 and "1 process on `local` runs from this venv" in refused.stderr, refused.stderr
        assert world.live() == live and str(running.process.pid) in refused.stderr
        told = subprocess.run([*argv, "-y"], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, cwd=world.root)
        assert told.returncode == 0 and f"until restarted: pid {running.process.pid}" in told.stderr, told.stderr
        assert running.imports("gamma.m3") == "2.0"
