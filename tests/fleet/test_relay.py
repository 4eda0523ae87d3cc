"""`push --relay`: a finished host feeds the next, through its own ssh; what it can not deliver comes from the controller.

Machines are network namespaces behind real sshds. What leaves the controller is what its bridge says, not what we say.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ddtree_deploy.agent import frames
from ddtree_deploy.agent.landing import Landing
from ddtree_deploy.agent.main import Session
from ddtree_deploy.agent.relay.door import PIPE, Door
from tests.cli.conftest import COMMAND
from tests.fixtures.venvs import BASE_PYTHON, SITE, Dist, contents, make_venv
from tests.harness.lab import Lab, lab_missing, two_hosts

HOSTS = ("h1", "h2", "h3", "h4")
#: The host key of h4 is on the record of h2 alone.
KNOWS_H4 = "h2"
PIECE = 1 << 20
CONTENT = {f"kernel/data{number}.bin": os.urandom(PIECE) for number in range(12)}
WHOLE = PIECE * len(CONTENT)
lab_tests = [pytest.mark.ssh, pytest.mark.slow, pytest.mark.skipif(bool(lab_missing()), reason=lab_missing())]


@dataclass(frozen=True)
class Project:
    """A directory with a ddtree.toml that knows the machines, and a snapshot to push."""

    lab: Lab
    root: Path
    new: dict[str, str]

    def start(self, *argv: str) -> subprocess.Popen[str]:
        env = {**os.environ, **self.lab.env, "DDTREE_HOME": str(self.root / "home")}
        command = self.lab.argv([*COMMAND, "push", *argv, "--relay", "-y", "--json"])
        return subprocess.Popen(command, cwd=self.root, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def push(self, *argv: str) -> tuple[int, list[dict[str, Any]], str]:
        return ended(self.start(*argv))

    def has_it(self, name: str) -> bool:
        return contents(self.lab[name].path("/srv/venv") / SITE) == self.new


def ended(running: subprocess.Popen[str]) -> tuple[int, list[dict[str, Any]], str]:
    """Return a run's exit code, its table, and all that it said."""
    try:
        out, err = running.communicate(timeout=250)
    finally:
        running.kill()
    print(out, err)
    lines = [json.loads(line) for line in out.splitlines()]
    return running.returncode, next(line["hosts"] for line in lines if "hosts" in line), out + err


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with two_hosts(*HOSTS, disk_mib=400) as lab:
        for name in HOSTS:
            own = lab[name].path("/srv/home/.ssh")
            own.mkdir(mode=0o700)
            (own / "id_ed25519").write_bytes((lab.root / "identity").read_bytes())
            (own / "id_ed25519").chmod(0o600)
            hidden = "" if name == KNOWS_H4 else lab["h4"].address
            known = [line for line in lab.known_hosts.read_text().splitlines() if line.split()[0] != hidden]
            (own / "known_hosts").write_text("\n".join([*known, ""]))
        yield lab


@pytest.fixture
def project(lab: Lab, tmp_path: Path) -> Project:
    for name in HOSTS:
        lab[name].run(["rm", "-rf", "/srv/venv"])
        make_venv(lab[name].path("/srv/venv"), Dist("kernel", "1.0", {"kernel/__init__.py": ""}))
    source = make_venv(tmp_path / "source", Dist("kernel", "2.0", {"kernel/__init__.py": "VERSION = 2\n", **CONTENT}))
    table = "\n".join(f'[hosts.{name}]\nvenv = "/srv/venv"\npython = "{BASE_PYTHON}"' for name in HOSTS)
    (tmp_path / "ddtree.toml").write_text(table + "\n")
    taken = lab.run(
        [*COMMAND, "snapshot", "-q", "local", "--venv", str(source), "--no-probe"],
        env={"DDTREE_HOME": str(tmp_path / "home")}, cwd=tmp_path, timeout=250,
    )  # fmt: skip
    assert taken.returncode == 0, taken.stderr
    return Project(lab, tmp_path, contents(source / SITE))


def left_the_controller(lab: Lab) -> int:
    """Return the bytes that the controller itself put on the bridge; what machines tell each other is not among them."""
    shown = lab.run(["ip", "-j", "-s", "link", "show", "br0"], check=True).stdout
    return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])


class TestInTheLab:
    pytestmark = lab_tests

    def test_the_content_leaves_the_controller_once(self, project: Project) -> None:
        before = left_the_controller(project.lab)
        code, table, said = project.push("h1", KNOWS_H4, "h4", "--jobs", "1")
        assert code == 0 and [row["outcome"] for row in table] == ["pushed"] * 3
        first, *others = table
        assert first["sent_bytes"] > WHOLE and (first["fed_bytes"], first["fed_by"]) == (0, [])
        assert [row["fed_by"] for row in others] == [["h1"], [KNOWS_H4]] and "`h1` can not feed it: " in said
        assert all((row["sent_bytes"], row["fed_bytes"]) == (0, first["sent_bytes"]) for row in others)
        assert WHOLE < left_the_controller(project.lab) - before < 2 * WHOLE
        assert all(map(project.has_it, ("h1", "h2", "h4")))

    def test_whom_no_feeder_may_enter_is_fed_from_here_and_the_screen_says_why(self, project: Project) -> None:
        code, table, said = project.push("h1", "h4")
        assert code == 0 and [row["outcome"] for row in table] == ["pushed"] * 2
        assert table[1]["sent_bytes"] == table[0]["sent_bytes"] and table[1]["fed_by"] == []
        assert "`h1` can not feed it: " in said and "Host key verification failed" in said and "are sent from here" in said
        assert project.has_it("h4")

    def test_a_feeder_that_dies_in_the_middle_costs_only_what_it_did_not_deliver(self, project: Project) -> None:
        lab = project.lab
        alone = project.start("h1")
        assert alone.communicate(timeout=250) and alone.returncode == 0
        lab["h1"].shape(8)
        running = project.start("h1", "h3")
        try:
            incoming = lab["h3"].path("/srv/venv/.ddtree/incoming")
            until(running, lambda: any(not path.name.startswith(".tmp-") for path in incoming.iterdir()))
            for pid, _argv in lab["h1"].processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        finally:
            lab["h1"].shape(None)
        code, table, said = ended(running)
        assert code == 0 and [row["outcome"] for row in table] == ["up to date", "pushed"]
        assert table[1]["fed_by"] == ["h1"] and table[1]["fed_bytes"] > 0 and table[1]["sent_bytes"] > 0
        assert "`h1` fed only a part: " in said and project.has_it("h3")


def until(running: subprocess.Popen[str], seen: Any) -> None:
    """Wait until something is seen while a run goes on."""
    deadline = time.monotonic() + 120
    while running.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if seen():
                return
        time.sleep(0.005)
    raise AssertionError(f"not seen: {ended(running)}")


GOOD, OTHER = b"what the push asked for", b"what nobody asked for!!"
DIGEST = hashlib.sha256(GOOD).hexdigest()


def frame(data: bytes, digest: str = DIGEST, size: int | None = None) -> bytes:
    return frames.encode({"objects": [[digest, len(data) if size is None else size]]}, len(data) if size is None else size) + data


@pytest.mark.parametrize(
    ("brought", "why"),
    [
        (frame(OTHER, hashlib.sha256(OTHER).hexdigest()), "an object that nobody asked for"),
        (frame(OTHER), "damaged objects"),
        (frame(GOOD, size=len(GOOD) - 1), "an object that nobody asked for"),
        (frames.encode({"objects": []}) * 2, "a frame without objects"),
        (frames.encode({"op": "switch", "id": 1}), "a frame without objects"),
        (b"SSH-2.0-rubbish" * 9, "a frame header of "),
        (frame(GOOD)[:-1], ""),
        (frame(GOOD) + frame(GOOD), "an object that nobody asked for"),
        (frame(GOOD), ""),
    ],
)
def test_a_visitor_leaves_what_was_asked_for_or_nothing(brought: bytes, why: str, tmp_path: Path) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    try:
        door = Door(Session(null, null, False, -1), Landing(str(tmp_path), {DIGEST: len(GOOD)}))
        pipe = [sys.executable, "-I", "-S", "-c", PIPE, door.name]
        done = subprocess.run(pipe, input=brought, capture_output=True, check=False, timeout=60)
        door.close()
    finally:
        os.close(null)
    whole = brought.startswith(frame(GOOD))
    assert done.stdout == b"+" and (done.returncode == 0) is (brought == frame(GOOD))
    assert door.why.startswith(why) and bool(door.why) is bool(why)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == ({DIGEST: GOOD} if whole else {})


@pytest.mark.skipif(os.geteuid() != 0, reason="another user needs root")
def test_another_user_of_the_target_is_not_let_in(tmp_path: Path) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    try:
        door = Door(Session(null, null, False, -1), Landing(str(tmp_path), {DIGEST: len(GOOD)}))
        done, mine = (
            subprocess.run(
                [sys.executable, "-I", "-S", "-c", first + PIPE, door.name], input=frame(GOOD), capture_output=True, check=False, timeout=60
            )
            for first in ("import os, socket, sys\nos.setuid(65534)\n", "")
        )
        door.close()
    finally:
        os.close(null)
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"not let in\n")
    assert (mine.returncode, door.landing.received) == (0, 1)
