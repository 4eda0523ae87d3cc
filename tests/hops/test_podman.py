"""A container of podman behind ssh, real podman and crun; also by the name of `docker`, as Debian's podman-docker gives it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.lab import Lab, two_hosts
from tests.hops.containers import Container, ddtree, podman_missing, podman_node

pytestmark = [pytest.mark.slow, pytest.mark.ssh, pytest.mark.skipif(bool(podman_missing()), reason=podman_missing())]

CONFIG = "".join(
    f'[hosts.{name}]\naddress = "gpu"\nvia = "{via}"\nvenv = "{venv}"\n'
    for name, via, venv in (
        ("source", "podman:box", "/srv/source"), ("target", "docker:box", "/srv/venv"), ("gone", "podman:nobody", "/srv/venv"),
    )
)  # fmt: skip


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with two_hosts("gpu", disk_mib=3000) as lab:
        (lab.root / "ddtree.toml").write_text(CONFIG)
        yield lab


@pytest.fixture(scope="module")
def box(lab: Lab) -> Iterator[Container]:
    with podman_node(lab["gpu"], "box") as made:
        docker = lab["gpu"].path("/usr/local/bin/docker")
        docker.write_text('#!/bin/sh\nexec podman "$@"\n')
        docker.chmod(0o755)
        made.venv(("alpha", "2.0"), ("beta", "2.0"))
        made.run(["mv", "/srv/venv", "/srv/source"])
        made.venv(("alpha", "1.0"), ("keep", "1.0"))
        yield made


@pytest.mark.timeout(600)
def test_the_main_job_in_a_container(lab: Lab, box: Container, tmp_path: Path) -> None:
    lab.env["DDTREE_HOME"] = str(tmp_path / "home")
    said = ddtree(lab, "doctor", "target")
    assert "docker:box behind gpu: bytes pass as they are" in said
    old = box.contents()
    ddtree(lab, "snapshot", "-q", "source")
    pushed = json.loads(ddtree(lab, "push", "target", "--verify", "-y", "--json", "--confirm-timeout", "120").splitlines()[-1])
    assert (pushed["code"], pushed["pushed"][0]["verified"]) == (0, True)
    assert {"beta/__init__.py", "keep/__init__.py"} < set(box.contents())
    file = lab.root / "tool.py"
    file.write_text("import alpha; print(alpha.VERSION)\n")
    assert "verified there" in ddtree(lab, "put", str(file), "target:/srv/tool.py")
    assert box.run(["/srv/venv/bin/python", "/srv/tool.py"]).stdout == "2.0\n"
    ddtree(lab, "rollback", "target", "-y")
    assert box.contents() == old
    said = ddtree(lab, "status", "gone", expect=10)
    assert "there is no container `nobody` on `gpu`" in said and "podman ps -a" in said
    lab["gpu"].run(["env", "-C", "/", "podman", "stop", "-t", "0", "box"])
    assert "container `box` on `gpu` is not running" in ddtree(lab, "status", "target", expect=10)
