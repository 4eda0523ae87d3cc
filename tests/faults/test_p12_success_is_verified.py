"""P12: success is what the host's ledger says; an answer that says `ok` is not enough."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ddtree_deploy.agent import durable, layout, switch
from ddtree_deploy.errors import RestoreUnconfirmed, RevertedAfterFailure
from tests.faults.harness import ledger, litter, live_generation, outcome, rest
from tests.faults.test_p11_the_host_saves_itself import before
from tests.fixtures.world import QUICK, World, make_world, replace

pytestmark = pytest.mark.faults


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path / "world", data=20_000)


def test_success_is_in_the_ledger_and_names_what_was_proved(world: World) -> None:
    done = world.push(options=replace(QUICK, verify=True))
    last = ledger(world.target)[-1]
    assert (last["event"], last["generation"], last["snapshot"]) == ("confirmed", done.generation, world.snapshot)
    info = layout.locate(os.fspath(world.target)).info(done.generation)
    assert info is not None and info["snapshot"] == world.snapshot and info["tx"] == last["tx"]
    assert [proofs.where for proofs in done.proofs] == ["staged", "live"]
    assert all(proof.ok for proofs in done.proofs for proof in proofs.imports or ())
    assert world.live() == world.new


def test_an_answer_is_not_enough_when_the_host_has_gone_back(world: World) -> None:
    """The confirming agent answers `ok`, for it did what it was asked; but the ledger had the last word before."""

    def gone_back() -> None:
        found = layout.locate(os.fspath(world.target))
        journal = durable.read_json(found.journal)
        assert journal is not None and switch.decide(found, journal["tx"], "reverted", "a test decided so") == "reverted"

    emit, _warnings = before("confirm", gone_back)
    done, error = outcome(lambda: world.push(emit=emit))
    assert done is None and isinstance(error, RevertedAfterFailure) and error.exit_code == 17, repr(error)
    rest(world.target)
    assert ledger(world.target)[-1]["event"] == "reverted" and world.live() == world.old and litter(world.target) == []


def test_a_ledger_that_does_not_say_is_18(world: World) -> None:
    """The guardian is stopped: nobody carries the decision out, so that nobody may claim that it was."""
    guardians: list[int] = []

    def stop() -> None:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and os.fsencode(world.target) in (argv := _argv(entry)) and b"guardian" in argv:
                guardians.append(int(entry.name))
                os.kill(guardians[-1], signal.SIGSTOP)

    emit, _warnings = before("confirm", stop)
    try:
        done, error = outcome(lambda: world.push(emit=emit))
        assert len(guardians) == 1
        assert done is None and isinstance(error, RestoreUnconfirmed) and error.exit_code == 18, repr(error)
        assert [entry["event"] for entry in ledger(world.target)] == []
    finally:
        for pid in guardians:
            os.kill(pid, signal.SIGCONT)
    rest(world.target)
    last = ledger(world.target)[-1]
    assert (last["event"], live_generation(world.target)) == ("confirmed", 1)  # it had been decided: looking at the host tells
    assert world.push().already


def _argv(entry: Path) -> bytes:
    try:
        return (entry / "cmdline").read_bytes()
    except OSError:
        return b""
