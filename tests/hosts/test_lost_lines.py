"""P5, P6: a line that is reset, cut or silent, between two real machines."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from ddtree_deploy.errors import HostUnreachable
from ddtree_deploy.hosts.base import Channel
from ddtree_deploy.hosts.connect import connector
from tests.harness.lab import Lab, lab_missing, two_hosts

pytestmark = [pytest.mark.ssh, pytest.mark.faults, pytest.mark.skipif(bool(lab_missing()), reason=lab_missing())]
TRANSPORTS = ("openssh", "fabric")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with two_hosts(disk_mib=2_000) as made, made.inside():
        yield made


@pytest.fixture
def echoes(lab: Lab) -> Iterator[list[Channel]]:
    """One living `cat` on ct200 by each transport."""
    channels = [connector(lab.host("ct200", transport=transport)).start(["cat"]) for transport in TRANSPORTS]
    try:
        for channel in channels:
            assert answers(channel)
        yield channels
    finally:
        lab["ct200"].restore()
        for channel in channels:
            channel.close()


def answers(channel: Channel) -> bool:
    channel.stdin.write(b"ping")
    return channel.stdout.read(4) == b"ping"


def assert_lost(channel: Channel, seconds: float) -> None:
    assert channel.wait(seconds) == 255
    assert channel.stdout.read(1) == b""
    problem = channel.failure()
    assert isinstance(problem, HostUnreachable)
    assert problem.message == "lost the connection to `ct200`"
    assert problem.mend == "run the same command again"


def test_killed_server_processes_are_noticed_at_once(lab: Lab, echoes: list[Channel]) -> None:
    lab["ct200"].reset()
    for channel in echoes:
        assert_lost(channel, 10)


def test_a_short_cut_is_survived(lab: Lab, echoes: list[Channel]) -> None:
    lab["ct200"].cut()
    assert [channel.wait(1) for channel in echoes] == [None, None]
    lab["ct200"].restore()
    assert all(answers(channel) for channel in echoes)


def test_silence_is_noticed_within_a_minute(lab: Lab, echoes: list[Channel]) -> None:
    writers = [connector(lab.host("ct200", transport=transport)).start(["cat"]) for transport in TRANSPORTS]
    try:
        assert all(answers(channel) for channel in writers)
        lab["ct200"].drop()
        silent_since = time.monotonic()
        for channel in writers:
            channel.stdin.write(b"x" * 1000)
        for channel in (*writers, *echoes):
            assert_lost(channel, 60 - (time.monotonic() - silent_since))
    finally:
        for channel in writers:
            channel.close()


def test_an_absent_machine_is_an_error_and_not_a_wait(lab: Lab) -> None:
    lab["ct129"].drop()
    try:
        channel = connector(lab.host("ct129", transport="openssh")).start(["true"])
        with pytest.raises(HostUnreachable, match="cannot reach `ct129`"):
            connector(lab.host("ct129", transport="fabric")).start(["true"])
        assert channel.wait(30) == 255
        assert channel.failure().message == "cannot reach `ct129`"
        channel.close()
    finally:
        lab["ct129"].restore()
