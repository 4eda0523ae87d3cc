"""P19: a dry run writes nothing: neither in the venv, nor in the store, nor in known_hosts; each command that has `-n`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ddtree_deploy.snapshot import take
from tests.faults.harness import rest
from tests.fixtures.venvs import make_venv, package, tree_hash
from tests.fixtures.world import World, local, make_world

COMMAND = [sys.executable, "-c", "from ddtree_deploy.cli import main; main()"]

#: The command, and its exit code; `{venv}` is the target, managed or not as the name says.
DRY = {
    "push to a managed venv": ["push", "local", "--venv", "{venv}", "-n"],
    "push to an ordinary venv": ["push", "local", "--venv", "{plain}", "-n"],
    "push that would make the venv": ["push", "local", "--venv", "{none}", "--create", "-n"],
    "rollback": ["rollback", "local", "--venv", "{venv}", "-n"],
    "generations prune": ["generations", "prune", "local", "--venv", "{venv}", "--keep", "1", "-n"],
    "generations release": ["generations", "release", "local", "--venv", "{venv}", "-n"],
    "cache prune": ["cache", "prune", "--keep", "1", "-n"],
    "export": ["export", "--oci", "{none}", "-n"],
}
#: Commands that only look have no `-n`, and write nothing on the host either.
LOOKS = {
    "diff": ["diff", "local", "--venv", "{plain}", "--files"],
    "status": ["status", "local", "--venv", "{venv}"],
    "generations": ["generations", "local", "--venv", "{venv}"],
    "lock": ["lock", "local", "--venv", "{venv}"],
    "audit": ["audit", "local", "--venv", "{venv}"],
    "verify": ["verify", "local", "--venv", "{venv}"],
    "verify an ordinary venv": ["verify", "local", "--venv", "{plain}"],
    "doctor": ["doctor"],
    "hosts": ["hosts"],
    "cache ls": ["cache", "ls"],
    "show": ["show"],
}

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A target with generations 0, 1 and 2, another that is ordinary, a store with two snapshots, a known_hosts file."""
    made = make_world(tmp_path_factory.mktemp("dry"), data=20_000)
    make_venv(made.root / "plain", package("alpha", "1.0"), package("keep", "1.0"))
    make_venv(made.root / "other", package("alpha", "3.0", data=1000), package("beta", "3.0"))
    made.push()
    made.push(take(local(made.root / "other"), made.store, probe=False).ref.id)
    rest(made.target)
    (made.root / "user" / ".ssh").mkdir(parents=True)
    (made.root / "user" / ".ssh" / "known_hosts").write_text("[127.0.0.1]:22 ssh-ed25519 AAAA\n")
    return made


def run(world: World, words: list[str]) -> subprocess.CompletedProcess[str]:
    places = {"venv": world.target, "plain": world.root / "plain", "none": world.root / "none"}
    argv = [word.format(**places) for word in words]
    env = {
        **os.environ, "DDTREE_HOME": str(world.store.root.parent), "HOME": str(world.root / "user"), "NO_COLOR": "1",
        "XDG_STATE_HOME": str(world.root / "user" / "state"),
    }  # fmt: skip
    return subprocess.run([*COMMAND, *argv], env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=200, check=False)


def seen(world: World, *, store: bool) -> dict[str, str]:
    parts = {"venv": [world.target], "plain": [world.root / "plain"], "known_hosts": [world.root / "user" / ".ssh"]}
    if store:
        parts["store"] = [world.store.root]
    return {name: tree_hash(*roots) for name, roots in parts.items()} | {"none": str((world.root / "none").exists())}


@pytest.mark.parametrize("name", DRY)
def test_a_dry_run_changes_no_byte(world: World, name: str) -> None:
    before = seen(world, store=True)
    done = run(world, DRY[name])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() or done.stderr.strip(), "a dry run says what it would do"
    assert seen(world, store=True) == before


@pytest.mark.parametrize("name", LOOKS)
def test_a_look_changes_no_byte_on_the_host(world: World, name: str) -> None:
    before = seen(world, store=False)
    done = run(world, LOOKS[name])
    assert done.returncode in (0, 1), done.stderr
    assert seen(world, store=False) == before
