"""The command line over a real sshd: names from ddtree.toml, host keys, several hosts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ddtree_deploy.demo.sshd import LoopbackSshd, loopback_sshd, sshd_binary
from tests.cli.conftest import run
from tests.fixtures.venvs import contents, site

pytestmark = [pytest.mark.ssh, pytest.mark.skipif(sshd_binary() is None, reason="no sshd: install openssh-server")]


@pytest.fixture
def sshd(tmp_path: Path, quiet_home: Path) -> Iterator[LoopbackSshd]:
    with loopback_sshd(tmp_path / "sshd", aliases=("a", "b"), trusted=False) as server:
        yield server


@pytest.fixture
def project(tmp_path: Path, sshd: LoopbackSshd, source: Path, target: Path) -> Path:
    """A directory whose ddtree.toml knows `a` and `b`, two copies of the target behind one sshd."""
    import shutil

    shutil.copytree(target, tmp_path / "C", symlinks=True)
    lines = [f'ssh_config = "{sshd.client_config}"']
    lines += [f'[hosts.{name}]\nvenv = "{tmp_path / venv}"' for name, venv in (("a", "B"), ("b", "C"))]
    (tmp_path / "ddtree.toml").write_text("\n".join(lines) + "\n")
    assert run("snapshot", "-q", "local", "--venv", str(source), "--no-probe").code == 0
    return tmp_path


def test_first_contact_needs_a_flag_that_records_the_key(project: Path, sshd: LoopbackSshd) -> None:
    refused = run("status", "a", cwd=project)
    assert refused.code == 11 and "--accept-new-host-key" in refused.err and sshd.known_hosts.read_text() == ""
    accepted = run("status", "a", "--accept-new-host-key", cwd=project)
    assert accepted.code == 0 and "SHA256:" in accepted.err
    assert run("status", "a", cwd=project).code == 0


def test_of_several_hosts_the_first_proves_for_the_rest(project: Path, source: Path) -> None:
    run("status", "a", "--accept-new-host-key", cwd=project)
    good = run("push", "a", "b", "-q", cwd=project)
    assert (good.code, good.out) == (0, "1\n1\n"), good.err
    (site(source) / "kernel/__init__.py").write_text("raise RuntimeError('no driver here')\n")
    broken = run("snapshot", "-q", "local", "--venv", str(source), "--no-probe")
    assert broken.code == 0, broken.err
    before = contents(project / "C")
    bad = run("push", "a", "b", cwd=project)
    assert bad.code == 17 and "no driver here" in bad.err and "1 of 2 hosts failed: `a`, 1 not touched" in bad.err
    assert contents(project / "C") == before


def test_doctor_looks_at_a_host_through_its_name(project: Path) -> None:
    run("status", "a", "--accept-new-host-key", cwd=project)
    rows = {row["id"]: row for row in run("doctor", "a", "--json", cwd=project).json["checks"]}
    assert {"cipher", "reach", "agent", "venv", "write", "space", "generation", "lock"} <= set(rows)
    assert rows["venv"]["level"] == "ok" and rows["reach"]["level"] in ("ok", "warn")
