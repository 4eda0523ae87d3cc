"""A stop and a launch of one port at the same moment: the stop ends the launch that it saw, and no other."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ddtree_deploy.agent.serving import place
from ddtree_deploy.errors import DeployError, ServerNotReady, TargetBusy
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.launch import Options, Stopped, lifecycle, running, start, stop
from ddtree_deploy.launch.argv import Request
from ddtree_deploy.launch.lifecycle import begin, open_session, prepare, prove, servers
from tests.fixtures.until import until
from tests.launch.conftest import told

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

QUICK = Options(wait=120, completions=1, drain=20)


def beside(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Do something on another thread; the list gets how it ended."""
    ended: list[object] = []

    def go() -> None:
        try:
            ended.append(work())
        except DeployError as error:
            ended.append(error)

    thread = threading.Thread(target=go)
    thread.start()
    return thread, ended


def test_a_launch_that_waits_for_the_port_gets_it_at_once(host: Host, request_: Request) -> None:
    """Another controller asks for the launch over and over while a stop drains."""
    old = lifecycle.launch(prepare(host, told(request_, stubborn=1)), QUICK).server
    refused = set()
    with open_session(host, writable=True) as session:
        session.greet()
        stopping, ended = beside(lambda: stop(host, drain=1))
        while True:
            try:
                new = lifecycle.parse(host.name, session.ask("serve-start", venv=host.venv, name=old.record.name, who="other").value)
                break
            except TargetBusy as error:
                refused.add(error.message.partition("already: ")[2].partition(" ")[0])
    stopping.join(300)
    assert [server.launch for server in running(host)] == [new.launch] and new.launch != old.launch
    assert isinstance(ended[0], Stopped) and ended[0].left == ()
    # Nobody is refused because of a server that is over.
    assert refused and "stopped" not in refused


def test_a_stop_that_was_held_up_leaves_the_launch_after_it_alone(host: Host, request_: Request, tmp_path: Path) -> None:
    """The agent of the stop sleeps from when it asked the supervisor until the next launch is there."""
    old = lifecycle.launch(prepare(host, told(request_, stubborn=1)), QUICK).server
    pid, python = tmp_path / "pid", tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho $$ > "{pid}"\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    stopping, ended = beside(lambda: stop(replace(host, python=str(python)), drain=5))
    until(lambda: [server.phase for server in servers(host)] == ["stopping"], "the supervisor was asked")
    agent = int(pid.read_text())
    turn = None
    while turn is None:  # not in the middle of a turn, where everybody would wait for it
        os.kill(agent, signal.SIGSTOP)
        turn = place.lock(f"{host.venv}/.ddtree/servers/start.lock")
        if turn is None:
            os.kill(agent, signal.SIGCONT)
    os.close(turn)
    try:
        until(lambda: running(host) == (), "the old launch ends")
        new = start(host, old.record, options=QUICK).server
    finally:
        os.kill(agent, signal.SIGCONT)
    stopping.join(300)
    assert [(server.launch, server.phase) for server in running(host)] == [(new.launch, "serving")]
    assert isinstance(ended[0], Stopped) and ended[0].replaced_by.startswith(f"{lifecycle.who()} at 20"), ended


def test_a_launch_that_fails_ends_itself_and_not_the_one_after(host: Host, request_: Request) -> None:
    """Somebody stops a server that does not get ready, and starts another, while its first user still waits for it."""
    old = begin(prepare(host, told(request_, deaf=1)), QUICK)
    waiting, ended = beside(lambda: prove(host, old, QUICK))
    stop(host, drain=0)
    new = begin(prepare(host, request_), QUICK)
    waiting.join(300)
    assert isinstance(ended[0], ServerNotReady), ended
    assert [server.launch for server in running(host)] == [new.launch]
    assert stop(host, launch=old.launch).replaced_by and [server.launch for server in running(host)] == [new.launch]
