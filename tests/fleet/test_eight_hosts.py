"""Eight machines behind real sshds: one is broken, one slow, one has the snapshot already, and one can be made unreachable."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import COMMAND
from tests.fixtures.venvs import BASE_PYTHON, SITE, Dist, contents, make_venv
from tests.harness.lab import Lab, lab_missing, two_hosts

pytestmark = [
    pytest.mark.ssh, pytest.mark.slow, pytest.mark.skipif(bool(lab_missing()), reason=lab_missing()),
]  # fmt: skip

HOSTS = tuple(f"h{number}" for number in range(1, 9))
BROKEN, SLOW, CURRENT = "h3", "h5", "h7"
NO_DRIVER = "/srv/no-driver"
KERNEL = f"import os\nif os.path.exists({NO_DRIVER!r}):\n    raise RuntimeError('no driver here')\n"


@dataclass(frozen=True)
class Project:
    """A directory with a ddtree.toml that knows the eight, and the source that a snapshot was taken of."""

    lab: Lab
    root: Path
    new: dict[str, str]

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return self.lab.run([*COMMAND, *argv], env={"DDTREE_HOME": str(self.root / "home")}, cwd=self.root, timeout=250)

    def site(self, name: str) -> Path:
        return self.lab[name].path("/srv/venv") / SITE

    def found(self, name: str) -> dict[str, str]:
        return contents(self.site(name))

    def untouched(self, name: str) -> bool:
        """Tell whether a host is as it was found: an ordinary venv without a trace of us."""
        state = self.lab[name].path("/srv/venv/.ddtree")
        return not self.site(name).is_symlink() and (not state.exists() or [p.name for p in state.iterdir()] == ["ledger.jsonl"])


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with two_hosts(*HOSTS, disk_mib=400) as lab:
        lab[BROKEN].path(NO_DRIVER).touch()
        yield lab


@pytest.fixture
def project(lab: Lab, tmp_path: Path) -> Project:
    for name in HOSTS:
        lab[name].run(["rm", "-rf", "/srv/venv"])
        make_venv(lab[name].path("/srv/venv"), Dist("kernel", "1.0", {"kernel/__init__.py": ""}), Dist("own", "1.0", {"own.py": ""}))
    source = make_venv(tmp_path / "source", Dist("kernel", "2.0", {"kernel/__init__.py": KERNEL, "kernel/data.bin": b"\x07" * (1 << 20)}))
    table = "\n".join(f'[hosts.{name}]\nvenv = "/srv/venv"\npython = "{BASE_PYTHON}"' for name in HOSTS)
    (tmp_path / "ddtree.toml").write_text(table + "\n")
    own = {path: digest for path, digest in contents(lab["h1"].path("/srv/venv") / SITE).items() if path.startswith("own")}
    project = Project(lab, tmp_path, {**contents(source / SITE), **own})
    taken = project.run("snapshot", "-q", "local", "--venv", str(source), "--no-probe")
    assert taken.returncode == 0, taken.stderr
    return project


def rows(out: str) -> dict[str, list[str]]:
    """Read the table: host, outcome, generation, then the rest (cells are two blanks apart)."""
    head, *lines = out.splitlines()
    assert head.split() == ["host", "outcome", "generation", "sent", "seconds", "why"], out
    return {line.split()[0]: [cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines}


def test_with_keep_going_all_that_can_have_it_get_it_and_the_table_says_who_not(project: Project) -> None:
    lab = project.lab
    assert project.run("push", CURRENT, "-y").returncode == 0
    old = project.found(BROKEN)
    lab[SLOW].shape(8)
    try:
        done = project.run("push", *HOSTS, "--keep-going", "--jobs", "4", "-y")
    finally:
        lab[SLOW].shape(None)
    print(done.stdout, done.stderr)
    assert done.returncode == 17, done.stderr
    table = rows(done.stdout)
    assert tuple(table) == HOSTS
    for name in HOSTS:
        _name, outcome, generation, *_rest = table[name]
        if name == BROKEN:
            assert (outcome, generation) == ("failed", "—") and "no driver here" in table[name][-1]
            assert project.untouched(name) and project.found(name) == old
        elif name == CURRENT:
            assert (outcome, generation) == ("up to date", "1")
        else:
            assert (outcome, generation) == ("pushed", "1 (was 0)"), table[name]
        if name != BROKEN:
            assert project.found(name) == project.new
    assert f"error: 1 of 8 hosts failed: `{BROKEN}`\n" in done.stderr
    again = project.run("push", *(name for name in HOSTS if name != BROKEN), "-y", "-q")
    assert (again.returncode, again.stdout) == (0, "1\n" * 7), again.stderr


def _last(done: subprocess.CompletedProcess[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return next(line["hosts"] for line in lines if line["type"] == "hosts"), lines[-1]


def _refused(project: Project, hosts: Sequence[str], bad: str, code: int) -> None:
    """Push to hosts of which one must fail before any other is written to."""
    done = project.run("push", *hosts, "-y", "--json")
    assert done.returncode == code, done.stderr
    told, end = _last(done)
    outcomes = {row["host"]: row["outcome"] for row in told}
    assert outcomes == {name: "failed" if name == bad else "not touched" for name in hosts}
    assert (end["type"], end["code"]) == ("error", code) and f"`{bad}`, {len(hosts) - 1} not touched" in end["message"]
    assert all(project.untouched(name) for name in hosts)


def test_when_the_first_can_not_prove_it_the_others_are_not_touched(project: Project) -> None:
    _refused(project, [BROKEN, "h1", SLOW, "h2"], BROKEN, 17)


def test_when_one_can_not_be_planned_nobody_is_touched(project: Project) -> None:
    project.lab["h8"].stop_sshd()
    try:
        _refused(project, ["h1", "h8", "h2"], "h8", 10)
        dry = project.run("push", "h1", "h8", "h2", "-n")
        assert dry.returncode == 10
        outcomes = {line.split()[0]: line.split("  ") for line in dry.stdout.splitlines() if line.startswith(("h1  ", "h8  ", "h2  "))}
        assert {name: "would change" in cells for name, cells in outcomes.items()} == {"h1": True, "h8": False, "h2": True}
    finally:
        project.lab["h8"].start_sshd()
