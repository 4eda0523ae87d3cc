"""The story's first day, as it was: a container behind its Proxmox node. Real LXC, real sshd, a `pct` that does what Proxmox's does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.lab import Lab, two_hosts
from tests.hops.containers import Container, ddtree, lxc_missing, proxmox_node
from tests.hops.node import lxc_pct

pytestmark = [pytest.mark.slow, pytest.mark.ssh, pytest.mark.skipif(bool(lxc_missing()), reason=lxc_missing())]

CONFIG = """
[hosts.ct129]
address = "pve"
via = "pct:129"
venv = "/srv/venv"
[hosts.ct200]
address = "pve"
via = "pct:200"
venv = "/srv/venv"
[hosts.ct201]
address = "pve"
via = "pct:201"
venv = "/srv/venv"
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with two_hosts("pve", disk_mib=3000) as lab:
        (lab.root / "ddtree.toml").write_text(CONFIG)
        yield lab


@pytest.fixture(scope="module")
def containers(lab: Lab) -> Iterator[list[Container]]:
    with proxmox_node(lab["pve"], 129, 200) as made:
        made[0].venv(("alpha", "2.0"), ("beta", "2.0"))
        made[1].venv(("alpha", "1.0"), ("keep", "1.0"))
        yield made


@pytest.fixture(autouse=True)
def home(lab: Lab, tmp_path: Path) -> None:
    lab.env["DDTREE_HOME"] = str(tmp_path / "home")


def last(lines: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(lines.splitlines()[-1])
    return found


def left_behind(lab: Lab, target: Container) -> list[str]:
    """Name what of ours lies in /tmp on the node and in the container (this machine's own shines through)."""
    names = lab["pve"].run(["ls", "-A", "/tmp"]).stdout.split() + target.listing("/tmp")
    return [name for name in names if name.startswith(".ddtree")]


@pytest.mark.timeout(600)
def test_the_main_job_through_the_node(lab: Lab, containers: list[Container]) -> None:
    said = ddtree(lab, "doctor", "ct200", "--needs", "alpha,keep")
    assert "pct:200 behind pve: bytes pass as they are (a probe came back whole)" in said
    assert "answers in" in said and "on ct200" in said
    assert "/srv/venv imports keep" in said

    source, target = containers
    old, wanted, before = target.contents(), source.contents(), left_behind(lab, target)
    ddtree(lab, "snapshot", "-q", "ct129")
    pushed = last(ddtree(lab, "push", "ct200", "--verify", "-y", "--json", "--confirm-timeout", "120"))
    assert (pushed["code"], pushed["pushed"][0]["verified"]) == (0, True)
    new = target.contents()
    assert {path: new[path] for path in wanted} == wanted != old
    assert {path for path in old if path.startswith("keep")} < set(new)
    assert last(ddtree(lab, "push", "ct200", "--verify", "-y", "--json"))["pushed"][0]["already"]
    ddtree(lab, "verify", "ct200", "--deep")
    ddtree(lab, "rollback", "ct200", "-y")
    assert target.contents() == old
    assert left_behind(lab, target) == before
    assert not lab["pve"].path("/srv/venv").exists()


@pytest.mark.timeout(600)
def test_where_a_terminal_is_in_the_way_bytes_travel_by_pct_push(lab: Lab, containers: list[Container]) -> None:
    source, target = containers
    before = left_behind(lab, target)
    source.python("import os; open('/srv/venv/lib/large.bin', 'wb').write(os.urandom(1_000_000))")
    source.run(["sh", "-c", "mv /srv/venv/lib/large.bin /srv/venv/lib/python3*/site-packages/beta/"])
    pct = lab["pve"].path("/usr/sbin/pct")
    lxc_pct(pct, terminal=True)
    try:
        said = ddtree(lab, "doctor", "ct200")
        assert "they travel by `pct push`" in said and "a greeting arrived as" in said
        ddtree(lab, "snapshot", "-q", "ct129")
        pushed = last(ddtree(lab, "push", "ct200", "--verify", "-y", "--json", "--confirm-timeout", "120"))
    finally:
        lxc_pct(pct)
    assert (pushed["code"], pushed["pushed"][0]["verified"]) == (0, True)
    wanted, new = source.contents(), target.contents()
    assert {path: new[path] for path in wanted} == wanted
    assert sum(map(int, lab["pve"].path("/var/lib/lxc/pushed").read_text().split())) > 500_000
    assert left_behind(lab, target) == before


def test_the_single_file_of_the_story(lab: Lab, containers: list[Container]) -> None:
    target = containers[1]
    server = lab.root / "serve.py"
    server.write_text("import keep\nprint(keep.VERSION)\n")
    assert "would be new" in ddtree(lab, "put", str(server), "ct200:/srv/serve.py", "--mode", "0755", "-n")
    assert "serve.py" not in target.listing("/srv")
    assert "compiled by /srv/venv/bin/python" in ddtree(lab, "put", str(server), "ct200:/srv/serve.py", "--mode", "0755")
    assert target.run(["stat", "-c", "%a", "/srv/serve.py"]).stdout.strip() == "755"
    assert target.run(["/srv/venv/bin/python", "/srv/serve.py"]).stdout.strip() == "1.0"
    server.write_text("def broken(:\n")
    assert "does not compile" in ddtree(lab, "put", str(server), "ct200:/srv/serve.py", expect=17)
    assert target.run(["/srv/venv/bin/python", "/srv/serve.py"]).stdout.strip() == "1.0"
    assert [name for name in target.listing("/srv") if "ddtree" in name] == []
    found = json.loads(ddtree(lab, "venvs", "ct200", "--needs", "keep,nope", "--json"))
    (venv,) = [env for env in found["environments"] if env["path"] == "/srv/venv"]
    assert [(tried["module"], tried["state"]) for tried in venv["imports"]] == [("keep", "ok"), ("nope", "missing")]


def test_what_is_not_there_is_told_with_its_mend(lab: Lab, containers: list[Container]) -> None:
    node = lab["pve"]
    said = ddtree(lab, "status", "ct201", expect=10)
    assert "there is no container 201 on `pve`" in said and "pct list" in said
    node.run(["mkdir", "-p", "/var/lib/lxc/201"])
    node.path("/var/lib/lxc/201/config").write_text("lxc.rootfs.path = dir:/srv/201/root\n")
    said = ddtree(lab, "status", "ct201", expect=10)
    assert "container 201 on `pve` is not running" in said and "`pct start 201` there" in said
    pct = node.path("/usr/sbin/pct")
    pct.unlink()
    try:
        assert "`pve` has no `pct`: it is no Proxmox node" in ddtree(lab, "status", "ct200", expect=10)
    finally:
        lxc_pct(pct)
