"""The Ansible module against real venvs, without Ansible: check mode, diff, `changed`, failures. `integrations/ansible/try` has Ansible."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddtree_deploy.cli import build
from tests.faults.harness import ledger
from tests.fixtures.venvs import tree_hash
from tests.fixtures.world import World, make_world

ROLE = Path(__file__).parents[2] / "integrations/ansible/roles/ddtree_push"


@pytest.fixture(scope="module")
def module() -> Any:
    spec = importlib.util.spec_from_file_location("ddtree_push", ROLE / "library/ddtree_push.py")
    assert spec and spec.loader
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture
def world(tmp_path: Path, quiet_home: Path) -> World:
    return make_world(tmp_path, data=1000, home=quiet_home / "ddtree")


@pytest.fixture
def play(module: Any, world: World, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run the module as Ansible would, with its defaults."""
    deploy = tmp_path / "ddtree-deploy"
    deploy.write_text(f"#!{sys.executable}\nfrom ddtree_deploy.cli import main\nmain()\n")
    deploy.chmod(0o755)

    def run(check: bool = False, diff: bool = False, **params: Any) -> dict[str, Any]:
        given = {"target": "local", "venv": str(world.target), "snapshot": world.snapshot, "executable": str(deploy), **params}
        assert set(given) <= set(module.ARGUMENTS)
        values = {name: spec.get("default") for name, spec in module.ARGUMENTS.items()} | given
        result: dict[str, Any] = module.push(values, check, diff)
        return result

    return run


@pytest.mark.slow
def test_check_then_push_then_nothing_to_do(play: Callable[..., dict[str, Any]], world: World) -> None:
    before = tree_hash(world.target)
    planned = play(check=True, diff=True)
    assert planned["changed"] and not planned.get("failed") and tree_hash(world.target) == before
    assert planned["diff"]["after"].splitlines()[0].startswith("alpha 2.0 (")
    assert planned["diff"]["before"].splitlines()[0].startswith("alpha 1.0 (")
    pushed = play()
    assert (pushed["changed"], pushed["generation"], pushed["previous"], pushed["rc"]) == (True, 1, 0, 0)
    assert world.live() == world.new
    again = play(diff=True)
    assert (again["changed"], again["generation"], "diff" in again) == (False, 1, False)


@pytest.mark.slow
def test_a_failure_says_what_the_command_said(play: Callable[..., dict[str, Any]], world: World) -> None:

    (next((world.source / "lib").iterdir()) / "site-packages/beta/m0.py").write_text("def broken(:\n")
    snapshot = world.take(allow_drift=True).ref.id
    failed = play(snapshot=snapshot)
    assert failed["failed"] and failed["rc"] == 17 and failed["restored"] and not failed["changed"]
    assert any("syntax" in cause for cause in failed["causes"]) and failed["mend"]
    assert not [line for line in ledger(world.target) if line["event"] == "confirmed"]
    unknown = play(target="no-such-host", venv=None)
    assert unknown["failed"] and unknown["rc"] == 2 and "no-such-host" in unknown["msg"]
    missing = play(executable="/no/such/command")
    assert missing["failed"] and missing["rc"] == 127


def test_every_flag_that_the_module_passes_is_one_of_push(module: Any) -> None:
    from typer.main import get_command

    command = get_command(build()).commands["push"]  # type: ignore[attr-defined]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    everything: dict[str, Any] = dict.fromkeys(module.ARGUMENTS, "x")
    everything |= {"only": ["a", "b"], "also": ["c"], "allow": ["K1:x"], "verify": False, "rollback": False, "target": "host"}
    words = module.argv(everything, True)
    flags = [word for word in words if word.startswith("-")]
    assert len(flags) > 15 and set(flags) <= known
    assert words[1:3] == ["push", "host"] and words.count("--only") == 2


def test_the_modules_options_are_documented(module: Any) -> None:
    options = module.DOCUMENTATION.partition("options:")[2].partition("attributes:")[0]
    assert [line.split(":")[0].strip() for line in options.strip().splitlines()] == list(module.ARGUMENTS)
    task = (ROLE / "tasks/main.yml").read_text()
    defaults = [line.split(":")[0] for line in (ROLE / "defaults/main.yml").read_text().splitlines() if line.startswith("ddtree_")]
    assert len(defaults) >= 10 and all(f"{{{{ {name} }}}}" in task for name in defaults)


def test_the_role_hands_on_every_option_but_what_a_fleet_leaves_alone(module: Any) -> None:
    passed = re.findall(r'^    (\w+): "\{\{ ddtree_(\w+) \}\}"$', (ROLE / "tasks/main.yml").read_text(), re.MULTILINE)
    assert [option for option, _ in passed] == [variable for _, variable in passed]
    left = set(module.ARGUMENTS) - {option for option, _ in passed}
    assert left == {"transport", "rollback", "accept_gap", "accept_new_host_key"}
