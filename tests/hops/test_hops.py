"""A container as a host: what its configuration may say, what its hop says when it can not get in, and bytes that are changed."""

from __future__ import annotations

import ast
import base64
import hashlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_deploy.agent import search, single
from ddtree_deploy.config import load, resolve_host
from ddtree_deploy.errors import DeployError, HostUnreachable, UsageProblem
from ddtree_deploy.hosts import pct_guest
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.hosts.connect import connector
from ddtree_deploy.hosts.docker import hints
from ddtree_deploy.hosts.hop import Hint, explained
from ddtree_deploy.hosts.pct import HINTS
from tests.hops.node import stand_ins


def configured(folder: Path, text: str) -> Host:
    (folder / "ddtree.toml").write_text(f"[hosts.c]\n{text}\n")
    return resolve_host("c", load(folder, {"HOME": str(folder)}))


def test_a_container_is_named_by_its_hop_and_the_machine_before_it(tmp_path: Path) -> None:
    host = configured(tmp_path, 'address = "root@pve"\nvia = "pct:200"\nvenv = "~/venv"')
    assert (host.address, host.via, host.transport, host.venv) == ("root@pve", "pct:200", "openssh", "~/venv")
    host = configured(tmp_path, 'transport = "local"\nvia = "podman:box"\nvenv = "~/venv"')
    assert (host.via, host.transport, host.venv) == ("podman:box", "local", "~/venv"), "`~` is the container's, not ours"


def test_a_container_behind_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="behind which machine") as problem:
        configured(tmp_path, 'via = "pct:200"')
    assert "`address`" in problem.value.mend and 'transport = "local"' in problem.value.mend


SAID = [
    (HINTS, "container '200' not running!", "container 200 on `pve` is not running", "pct start 200"),
    (HINTS, "Configuration file 'nodes/pve/lxc/200.conf' does not exist", "there is no container 200 on `pve`", "pct list"),
    (HINTS, "please run as root", "`pct` wants root on `pve`", "root@"),
    (HINTS, "bash: line 1: pct: command not found", "`pve` has no `pct`", "not the container"),
    (HINTS, "sh: 1: pct: not found", "`pve` has no `pct`", "not the container"),
    (hints("docker"), "Error response from daemon: No such container: 200", "there is no container `200`", "docker ps -a"),
    (hints("docker"), "Error response from daemon: container 0123abcd is not running", "is not running", "docker start 200"),
    (hints("docker"), "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?",
     "docker does not run on `pve`", "systemctl start docker"),
    (hints("docker"), "permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock",
     "may not use docker", "`docker` group"),
    (hints("podman"), 'Error: no container with name or ID "200" found: no such container', "there is no container `200`", "podman ps -a"),
    (hints("podman"), "Error: can only create exec sessions on running containers: container state improper",
     "is not running", "podman start 200"),
]  # fmt: skip


@pytest.mark.parametrize(("known", "stderr", "means", "mend"), SAID, ids=[row[1][:40] for row in SAID])
def test_the_words_of_a_hop_become_an_error_with_a_mend(known: tuple[Hint, ...], stderr: str, means: str, mend: str) -> None:
    engine = "pct" if known is HINTS else "docker"
    problem = explained(Host("c", address="pve", via=f"{engine}:200"), HostUnreachable("exit status 1"), stderr, known)
    assert isinstance(problem, HostUnreachable)
    assert means in problem.message and mend in problem.mend and stderr in problem.causes


def test_what_a_process_inside_says_is_left_as_it_is() -> None:
    own = HostUnreachable("exit status 3")
    assert explained(Host("c", via="pct:200"), own, "ModuleNotFoundError: zlib", HINTS) is own


def failure(via: str) -> DeployError:
    try:
        channel = connector(Host("c", transport="local", via=via)).start(["true"])
    except DeployError as problem:
        return problem
    try:
        assert channel.wait(30) != 0
        return channel.failure()
    finally:
        channel.close()


def test_a_stopped_and_an_absent_container_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{stand_ins(tmp_path / 'bin')}:{os.environ['PATH']}")
    assert failure("pct:201").message == "container 201 on this machine is not running"
    assert failure("pct:7").message == "there is no container 7 on this machine"
    assert failure("docker:off").message == "container `off` on this machine is not running"
    assert failure("podman:nobody").message == "there is no container `nobody` on this machine"


def test_a_machine_without_the_hop_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert failure("pct:200").message == "this machine has no `pct`: it is no Proxmox node"
    assert failure("docker:box").message == "this machine has no `docker`"


# --- what runs on a host


PARTS = [Path(pct_guest.__file__), *(path for part in (single, search) for path in Path(part.__file__).parent.glob("*.py"))]


@pytest.mark.parametrize("path", PARTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_runs_on_a_host_is_python_3_9_and_the_standard_library(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(), feature_version=(3, 9))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            assert name.startswith("ddtree_deploy.agent") or name.split(".")[0] in sys.stdlib_module_names, name


# --- the guest's side of `pct push`


def guest(*lines: bytes, argv: tuple[str, ...] = ("cat",)) -> tuple[int, bytes, bytes]:
    """Run the program as the container would; return its status, and what it says the process wrote."""
    command = [sys.executable, "-I", "-S", "-c", Path(pct_guest.__file__).read_text(), *argv]
    done = subprocess.run(command, input=b"".join(line + b"\n" for line in lines), capture_output=True, timeout=60, check=False)
    said: dict[bytes, bytes] = {b"O": b"", b"R": b""}
    for line in done.stdout.splitlines():
        tag, _, text = line.removeprefix(b"ddtree-").partition(b":")
        said[tag] = said.get(tag, b"") + base64.b64decode(text)
    return done.returncode, said[b"O"], said[b"R"]


def pushed(path: Path, data: bytes, digest: str = "") -> bytes:
    path.write_bytes(data)
    return f"F{path} {len(data)} {digest or hashlib.sha256(data).hexdigest()}".encode()


def test_lines_and_pushed_files_become_one_stream(tmp_path: Path) -> None:
    block = bytes(range(256)) * 100
    file = pushed(tmp_path / "staged", block)
    promise = f"P{tmp_path / 'staged'}".encode()
    status, out, _errors = guest(b"D" + base64.b64encode(b"a\x03\x04\r\n"), promise, file, b"D" + base64.b64encode(b"z"), b"E")
    assert (status, out) == (0, b"a\x03\x04\r\n" + block + b"z")
    assert not (tmp_path / "staged").exists()


@pytest.mark.parametrize("change", [b"short", b"x" * 1000, b"y" * 999])
def test_a_pushed_file_that_is_not_what_was_sent_stops_everything(tmp_path: Path, change: bytes) -> None:
    promised = tmp_path / "staged"
    line = pushed(promised, b"x" * 999)
    promised.write_bytes(change)
    status, out, errors = guest(b"D" + base64.b64encode(b"before "), line, b"D" + base64.b64encode(b" after"), b"E")
    assert (status, out) == (74, b"before ")
    assert b"a pushed file is not what was sent" in errors
    assert not promised.exists()


def test_a_link_in_the_place_of_a_pushed_file_is_not_followed(tmp_path: Path) -> None:
    line = pushed(tmp_path / "real", b"secret")
    (tmp_path / "staged").symlink_to(tmp_path / "real")
    status, out, _errors = guest(line.replace(b"/real ", b"/staged "), b"E")
    assert (status, out) == (74, b"")
    assert (tmp_path / "real").read_bytes() == b"secret"


def test_a_file_that_was_promised_and_never_used_is_removed(tmp_path: Path) -> None:
    (tmp_path / "staged").write_bytes(b"left")
    assert guest(f"P{tmp_path / 'staged'}".encode(), b"E")[0] == 0
    assert not (tmp_path / "staged").exists()


def test_a_line_that_a_terminal_changed_is_noticed() -> None:
    with pytest.raises(ValueError, match="damaged"):
        pct_guest.feed(io.BytesIO(b"^C\n"), io.BytesIO(), set())
    with pytest.raises(ValueError):
        pct_guest.feed(io.BytesIO(b"Dabc\n"), io.BytesIO(), set())
