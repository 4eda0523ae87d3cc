"""P5: a line cut in the middle of a file is harmless, and the next push resumes: two machines, real sshd, silence or a reset."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddtree_deploy import session as conversation
from ddtree_deploy.errors import HostUnreachable, RestoreUnconfirmed, RevertedAfterFailure
from ddtree_deploy.events import Event, Progress
from ddtree_deploy.hosts.base import Host
from tests.faults.harness import ROOT_ONLY, check_objects, outcome, report
from tests.fixtures.venvs import SITE, contents, make_venv, package
from tests.fixtures.world import BASE_PYTHON, BRIEF, QUICK, World, make_world
from tests.harness.lab import Lab, Machine, lab_missing, two_hosts

pytestmark = [
    pytest.mark.ssh, ROOT_ONLY,
    pytest.mark.skipif(os.geteuid() == 0 and "not installed" in lab_missing(), reason=lab_missing()),
]  # fmt: skip

MIB = 1 << 20
#: Large objects, so that a cut lands inside one; their sum takes long enough to be cut at a chosen byte.
SIZES = [6 * MIB, 4 * MIB, 3 * MIB, 2 * MIB, MIB]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with two_hosts(disk_mib=2000) as lab:
        yield lab


@pytest.fixture(scope="module")
def world(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> World:
    """Hold a snapshot of five packages with one large object each."""
    root = tmp_path_factory.mktemp("cut")
    made = make_world(root, data=1000)
    source = make_venv(root / "large", *(package(f"pkg{n}", "1.0", data=size, modules=2) for n, size in enumerate(SIZES)))
    made.source = source
    made.snapshot = made.take().ref.id
    return made


def fresh(target: Machine, name: str) -> tuple[str, Path]:
    """Make an ordinary venv on the machine; return its path there and from here."""
    venv = f"/srv/{name}"
    make_venv(target.path(venv), package("keep", "1.0", modules=1))
    return venv, target.path(venv)


def host(lab: Lab, venv: str) -> Host:
    return lab.host("ct200", venv=venv, python=str(BASE_PYTHON))


def idle(target: Machine, seconds: float = 90.0) -> None:
    """Wait until no agent of ours runs on the machine (it notices the end of its input, or its lease runs out)."""
    deadline = time.monotonic() + seconds
    while [argv for _pid, argv in target.processes() if "memfd_create" in argv]:
        assert time.monotonic() < deadline, target.processes()
        time.sleep(0.1)


def landed(here: Path) -> dict[str, int]:
    incoming = here / ".ddtree" / "incoming"
    return {p.name: p.stat().st_size for p in incoming.iterdir() if len(p.name) == 64} if incoming.is_dir() else {}


def cut_at(target: Machine, at: int, how: str) -> Any:
    """Return a listener that cuts the line once `at` bytes were handed to it."""
    done = []

    def emit(event: Event) -> None:
        if isinstance(event, Progress) and event.what == "send" and event.done >= at and not done:
            done.append(True)
            target.cut() if how == "silence" else target.reset()

    return emit


def check(lab: Lab, world: World, target: Machine, name: str, how: str, at: int) -> tuple[int, int]:
    """Cut one push at a byte; push again; return (bytes that landed before, bytes sent by the second)."""
    venv, here = fresh(target, name)
    old = contents(here / SITE)
    received = target.received_bytes()
    with lab.inside():
        _done, error = outcome(lambda: world.push(host=host(lab, venv), emit=cut_at(target, at, how), options=BRIEF))
    target.restore()
    assert isinstance(error, (HostUnreachable, RestoreUnconfirmed, RevertedAfterFailure)), f"{how} at {at}: {error!r}"
    idle(target)
    crossed = target.received_bytes() - received
    check_objects(here / ".ddtree")
    assert contents(here / SITE) == old
    before = landed(here)
    with lab.inside():
        second = world.push(host=host(lab, venv), options=QUICK)
    check_objects(here / ".ddtree")
    new = contents(here / SITE)
    assert new == {**contents(world.source / SITE), **old}
    total = sum(SIZES)
    # What is whole on the host is not sent again.
    assert second.sent_bytes <= total + 200_000 - sum(before.values())
    # So of what had crossed the wire, only the object in flight (and what stood in the pipes of ssh) comes twice.
    pipes = 5 * MIB
    assert crossed - sum(before.values()) <= max(SIZES) + pipes, f"{crossed} crossed, {sum(before.values())} stayed"
    return sum(before.values()), second.sent_bytes


def test_a_connection_that_is_reset_at_random_bytes(lab: Lab, world: World) -> None:
    target = lab["ct200"]
    lab.shape(200)  # slow enough that the cut falls into the transfer and not behind it
    random.seed(5)
    cuts = sorted(random.randrange(MIB // 2, sum(SIZES) - MIB) for _ in range(4))
    kept = []
    try:
        for number, at in enumerate(cuts):
            kept.append(check(lab, world, target, f"reset{number}", "reset", at))
    finally:
        target.restore()
        lab.shape(None)
    assert any(before for before, _sent in kept), "no cut left anything to resume from"
    report("P5 connections reset", cuts=len(cuts), resumed_with=[before for before, _ in kept], sent_again=[sent for _, sent in kept])


def test_a_line_that_falls_silent(lab: Lab, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody says goodbye: the controller gives up by itself, the agent when the line is back (or at the end of its lease)."""
    monkeypatch.setattr(conversation, "SILENCE_SECONDS", 5.0)  # a minute in the product; what is waited for is the same
    monkeypatch.setattr(conversation, "PING_SECONDS", 1.0)
    target = lab["ct200"]
    lab.shape(200)
    try:
        kept = [check(lab, world, target, f"silence{number}", "silence", at) for number, at in enumerate((2 * MIB, 9 * MIB))]
    finally:
        target.restore()
        lab.shape(None)
    report("P5 silent lines", cuts=len(kept), resumed_with=[before for before, _ in kept], sent_again=[sent for _, sent in kept])


def test_an_object_of_a_cut_push_that_rotted_meanwhile_is_sent_again(lab: Lab, world: World) -> None:
    """What a cut push left is only believed after it was hashed again."""
    target = lab["ct200"]
    lab.shape(200)
    try:
        venv, here = fresh(target, "rot")
        with lab.inside():
            _done, error = outcome(lambda: world.push(host=host(lab, venv), emit=cut_at(target, 11 * MIB, "reset"), options=BRIEF))
        assert error is not None
        idle(target)
        before = landed(here)
        assert before
        victim = here / ".ddtree" / "incoming" / max(before, key=lambda name: before[name])
        data = bytearray(victim.read_bytes())
        data[100] ^= 1
        victim.write_bytes(data)
        with lab.inside():
            second = world.push(host=host(lab, venv), options=replace(QUICK, verify=False))
        assert second.sent_bytes >= before[victim.name]
        assert contents(here / SITE)["pkg0/payload.bin"] == contents(world.source / SITE)["pkg0/payload.bin"]
    finally:
        target.restore()
        lab.shape(None)


def test_the_controller_s_death_leaves_a_host_that_resumes(lab: Lab, world: World, tmp_path: Path) -> None:
    """`kill -9` of the whole client in the middle of a transfer, as the measured `cat > tmp && mv tmp final` failure."""
    target = lab["ct200"]
    lab.shape(100)
    venv, here = fresh(target, "orphan")
    old = contents(here / SITE)
    code = (
        "import os, signal\n"
        "from pathlib import Path\n"
        "from ddtree_deploy.events import Progress\n"
        "from ddtree_deploy.hosts.base import Host\n"
        "from ddtree_deploy.store import Store\n"
        "from tests.fixtures.world import World, BRIEF\n"
        "def emit(event):\n"
        "    if isinstance(event, Progress) and event.what == 'send' and event.done > 5000000:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        f"host = Host('ct200', address='ct200', ssh_config={str(lab.ssh_config)!r}, venv={venv!r}, python={str(BASE_PYTHON)!r})\n"
        f"world = World(Path(), Store.open(Path({str(world.store.root.parent)!r})), Path(), Path(), {world.snapshot!r})\n"
        "world.push(host=host, emit=emit, options=BRIEF)\n"
    )
    try:
        done = lab.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
        assert done.returncode == -9, done.stderr
        idle(target)
        assert contents(here / SITE) == old
        check_objects(here / ".ddtree")
        with lab.inside():
            world.push(host=host(lab, venv))
        assert contents(here / SITE) == {**contents(world.source / SITE), **old}
    finally:
        lab.shape(None)
