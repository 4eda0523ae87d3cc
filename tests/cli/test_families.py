"""A run loads the family of its command and no other; the table that says which must name every command."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.main import get_command

from ddtree_deploy.cli import FAMILIES, build

COMMANDS = [command for commands in FAMILIES.values() for command in commands]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_adds_what_the_table_says(family: str) -> None:
    for command in FAMILIES[family]:
        assert sorted(get_command(build([command])).commands) == sorted(FAMILIES[family])  # type: ignore[attr-defined]


@pytest.mark.parametrize("argv", [(), ("--help",), ("-h", "push"), ("no-such-command",)])
def test_whatever_is_no_command_gets_all_of_them(argv: tuple[str, ...]) -> None:
    assert sorted(get_command(build(argv)).commands) == sorted(COMMANDS)  # type: ignore[attr-defined]


def test_a_push_loads_neither_other_families_nor_what_it_does_not_need() -> None:
    lines = (
        "import sys", "from ddtree_deploy.cli import main", "sys.argv = ['ddtree-deploy', 'push', '--help']",
        "try: main()", "except SystemExit: print(*sys.modules)",
    )  # fmt: skip
    code = "\n".join(lines)
    loaded = set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())
    assert "ddtree_deploy.commands.push" in loaded
    assert not loaded & {"ddtree_deploy.commands.bench", "ddtree_deploy.abi", "rich", "paramiko", "fabric"}
