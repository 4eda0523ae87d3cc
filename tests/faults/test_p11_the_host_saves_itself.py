"""P11: a switch that nobody confirms is taken back by the host, whatever became of the controller, the line, or the disk; seven cases."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddtree_deploy import session as conversation
from ddtree_deploy.agent import durable
from ddtree_deploy.errors import RestoreUnconfirmed, RevertedAfterFailure
from ddtree_deploy.events import Event, Note, ignore
from ddtree_deploy.push.confirmation import confirm
from ddtree_deploy.session import Session
from tests.faults.harness import ROOT_ONLY, in_lanes, ledger, litter, live_generation, outcome, report, rest
from tests.fixtures.venvs import BASE_PYTHON, SITE, contents, make_venv, package, site
from tests.fixtures.world import BRIEF, QUICK, World, make_world
from tests.harness.lab import lab_missing, two_hosts

pytestmark = pytest.mark.faults
#: How often the confirmation is raced against its deadline.
RACES = int(os.environ.get("DDTREE_CONFIRM_RACES", "16"))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path / "world", data=20_000)


def before(op: str, act: Callable[[], Any]) -> tuple[Callable[[Event], None], list[str]]:
    """Return a listener that does `act()` once, just before the request `op` is sent, and the warnings that it heard."""
    done: list[bool] = []
    warnings: list[str] = []

    def emit(event: Event) -> None:
        if isinstance(event, Note) and event.level == "warn":
            warnings.append(event.text)
        if isinstance(event, Note) and event.text.startswith(f"ask {op} ") and not done:
            done.append(True)
            act()

    return emit, warnings


def back(world: World, tree: dict[str, str], generation: int) -> None:
    """Assert that a host is at rest and as it was before the push, and that its ledger says so."""
    rest(world.target, 90)
    assert world.live() == tree and live_generation(world.target) == generation
    last = ledger(world.target)[-1]
    assert last["event"] == "reverted" and last["previous"] == generation, last
    assert litter(world.target) == []


def second(world: World, code: str = "") -> dict[str, str]:
    """Take a snapshot of version 3, whose alpha also runs `code`, and push version 2 first; return what is live then."""
    world.push()
    rest(world.target)
    (site(world.source) / "alpha" / "__init__.py").write_text(f'VERSION = "3.0"\n{code}\n')
    world.snapshot = world.take().ref.id
    return world.live()


def only_once(marker: Path) -> str:
    """Return code that can be imported once: the staged tree is proved, the live one is not."""
    return (
        "import os\n"
        f"marker = os.open({str(marker)!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)\n"
        "os.write(marker, b'x')\n"
        "if os.fstat(marker).st_size > 1:\n"
        "    raise RuntimeError('only once')\n"
    )


@pytest.mark.parametrize("first", [True, False], ids=["first push", "later push"])
def test_i_a_proof_that_fails_on_the_live_tree(world: World, tmp_path: Path, first: bool) -> None:
    """(vi) too: of the first push ever, the way back is to what was found."""
    if first:
        (site(world.source) / "alpha" / "__init__.py").write_text(only_once(tmp_path / "imported"))
        world.snapshot, old = world.take().ref.id, world.old
    else:
        old = second(world, only_once(tmp_path / "imported"))
    _done, error = outcome(lambda: world.push(options=replace(QUICK, verify=True)))
    assert isinstance(error, RevertedAfterFailure) and error.exit_code == 17, repr(error)
    assert any("only once" in cause for cause in error.causes)
    back(world, old, 0 if first else 1)
    assert (tmp_path / "imported").stat().st_size == 2


DOOMED = """
import os, signal, sys
from pathlib import Path
from ddtree_deploy.store import Store
from tests.fixtures.world import BRIEF, World, local
home, venv, snapshot, last = sys.argv[1:]
def emit(event):
    if getattr(event, "text", "").startswith(f"ask {last} "):
        os.kill(os.getpid(), signal.SIGKILL)
World(Path(), Store.open(Path(home)), Path(), Path(venv), snapshot).push(emit=emit, options=BRIEF)
"""


@pytest.mark.parametrize("first", [True, False], ids=["first push", "later push"])
@pytest.mark.parametrize("last", ["probe-live", "confirm"])
def test_ii_the_controller_is_killed_after_the_switch(world: World, first: bool, last: str) -> None:
    old = world.old if first else second(world)
    argv = [sys.executable, "-c", DOOMED, str(world.store.root.parent), str(world.target), world.snapshot, last]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == -signal.SIGKILL, done.stderr
    back(world, old, 0 if first else 1)
    assert not world.push().already
    rest(world.target)
    assert world.live() != old


def test_the_connection_that_confirms_was_begun_after_the_switch(world: World, tmp_path: Path) -> None:
    """Each agent says when it starts, and the live link when it was made."""
    begun = tmp_path / "begun"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase "$5" in rw) date +%s%N >> {begun};; esac\nexec {BASE_PYTHON} "$@"\n')
    python.chmod(0o755)
    done = world.push(host=world.host(python=str(python)))
    first, second = map(int, begun.read_text().split())
    switched = os.lstat(world.site).st_ctime_ns
    assert first < switched < second and not done.already
    assert ledger(world.target)[-1]["event"] == "confirmed"


@pytest.mark.ssh
@pytest.mark.skipif(bool(lab_missing()), reason=lab_missing())
def test_iii_the_line_is_cut_after_the_switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host goes back while nobody can reach it; the controller, which can not know, says to look."""
    monkeypatch.setattr(conversation, "SILENCE_SECONDS", 5.0)  # a minute in the product; what is waited for is the same
    monkeypatch.setattr(conversation, "PING_SECONDS", 1.0)
    monkeypatch.setattr(conversation, "HELLO_SECONDS", 5.0)
    made = make_world(tmp_path / "world", data=1000)
    with two_hosts("ct200", disk_mib=400) as lab:
        target = lab["ct200"]
        here = target.path("/srv/venv")
        make_venv(here, package("alpha", "1.0"), package("keep", "1.0"))
        old = contents(here / SITE)
        host = lab.host("ct200", venv="/srv/venv", python=str(BASE_PYTHON))
        emit, warnings = before("probe-live", target.drop)
        with lab.inside():
            _done, error = outcome(lambda: made.push(host=host, emit=emit, options=BRIEF))
        assert isinstance(error, RestoreUnconfirmed) and error.exit_code == 18, repr(error)
        assert any("reading the host's ledger" in text for text in warnings)
        deadline = time.monotonic() + 60
        while not ledger(here) or litter(here):
            assert time.monotonic() < deadline, "the host did not go back"
            time.sleep(0.1)
        assert contents(here / SITE) == old and ledger(here)[-1]["event"] == "reverted"
        target.restore()
        with lab.inside():
            assert made.push(host=host).generation == 2


def _race(world: World, early: float) -> str:
    """Switch to the generation that is not live, confirm `early` seconds before the deadline, and compare the two stories."""
    host, started = world.host(), time.monotonic()
    with Session(host, writable=True) as session:
        session.greet()
        lead = time.monotonic() - started  # a fresh connection takes so long here and now
        begun = session.ask("begin", venv=host.venv, who="race", what="rollback", lock_wait=60).fields
        live = begun["generation"]
        session.ask("choose", generation=1 - live)
        session.ask("switch", deadline=30)
        session.ask("probe-live", [], confirm_timeout=lead + 0.5)
        deadline = time.monotonic() + lead + 0.5
    time.sleep(max(0.0, deadline - lead - early - time.monotonic()))
    _done, error = outcome(lambda: confirm(host, begun["tx"], 1 - live, live, 5.0, ignore))
    said = "confirmed" if error is None else "reverted" if isinstance(error, RevertedAfterFailure) else repr(error)
    rest(world.target)
    wrote = [entry for entry in ledger(world.target) if entry.get("tx") == begun["tx"]]
    assert [entry["event"] for entry in wrote] == [said], f"{early:+.3f} s: the controller says {said}, the ledger {wrote}"
    assert live_generation(world.target) == (1 - live if said == "confirmed" else live)
    return said


def test_iv_a_confirmation_at_the_deadline(tmp_path: Path) -> None:
    """Early, late and in between: the controller says what the ledger says, every time (200 times with DDTREE_CONFIRM_RACES=200)."""

    def lane() -> World:
        made = make_world(tmp_path / os.urandom(4).hex(), data=100)
        made.push()
        rest(made.target)
        return made

    points = [0.4 - 0.8 * number / (RACES - 1) for number in range(RACES)]
    said = in_lanes(lane, points, _race)
    counts = {word: said.count(word) for word in sorted(set(said))}
    report("P11 confirmation at the deadline", races=len(said), agree=len(said), **counts)
    assert set(counts) <= {"confirmed", "reverted"}


@ROOT_ONLY
def test_v_a_way_back_that_the_disk_refuses_is_18_and_is_gone_when_it_can(world: World, tmp_path: Path) -> None:
    old = second(world, only_once(tmp_path / "imported"))

    def freeze() -> None:
        for words in (["--bind", str(world.state)], ["-o", "remount,bind,ro"]):
            subprocess.run(["mount", *words, str(world.state)], check=True)

    emit, _warnings = before("revert", freeze)
    try:
        _done, error = outcome(lambda: world.push(emit=emit, options=replace(BRIEF, verify=True)))
        assert isinstance(error, RestoreUnconfirmed) and error.exit_code == 18, repr(error)
        assert any("Read-only file system" in cause for cause in error.causes), error.causes
        assert live_generation(world.target) == 2
    finally:
        subprocess.run(["umount", "--lazy", str(world.state)], check=False)
    back(world, old, 1)


def test_vii_the_death_of_the_agent_is_noticed_before_the_deadline(world: World) -> None:
    open_then: list[bool] = []

    def kill() -> None:
        os.kill(durable.read_json(str(world.state / "journal"))["pid"], signal.SIGKILL)  # type: ignore[index]

    kill_it, warnings = before("probe-live", kill)

    def emit(event: Event) -> None:
        kill_it(event)
        if warnings and not open_then:
            open_then.append(not [entry for entry in ledger(world.target) if entry["event"] == "reverted"])

    _done, error = outcome(lambda: world.push(emit=emit, options=replace(BRIEF, confirm_timeout=10.0)))
    assert isinstance(error, RevertedAfterFailure) and error.exit_code == 17, repr(error)
    assert open_then == [True], "noticed only when the host had gone back"
    back(world, world.old, 0)
