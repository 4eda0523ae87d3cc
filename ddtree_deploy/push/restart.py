"""Push under a server: stop it right before the switch, start it from the new generation, go back when it does not get ready."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from ddtree_deploy.errors import DeployError, RestoreUnconfirmed, RevertedAfterFailure
from ddtree_deploy.events import Emit, Note, ignore
from ddtree_deploy.generations import rollback
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.launch import Options, Server, running, start, stop
from ddtree_deploy.models import Pushed
from ddtree_deploy.session import Session

#: How long a settled switch may take to leave the journal, in seconds.
SETTLE = 30.0


def push_and_restart(
    host: Host, push: Callable[[Callable[[], None]], Pushed], *, options: Options | None = None, emit: Emit = ignore
) -> Pushed:
    """Run `push(about_to_switch)` and restart around it the servers that run from the host's venv.

    Nothing is stopped before the staged tree is proved. Raises what `push` raises, with the servers started again from what is live;
    RevertedAfterFailure when the new generation did not serve, and the old one does again; RestoreUnconfirmed when it does not.
    """
    options = options or Options()
    stopped: list[Server] = []

    def about_to_switch() -> None:
        for server in running(host, emit):
            stop(host, server.record.name, drain=options.drain, emit=emit)
            stopped.append(server)

    try:
        pushed = push(about_to_switch)
    except RestoreUnconfirmed:
        raise  # what is live is not known: nothing is started from it
    except DeployError as problem:
        _start_again(host, stopped, options, emit, problem)
        raise
    except KeyboardInterrupt:
        if stopped:
            emit(Note(host.name, f"the server is stopped, and not started again: {_names(stopped)}", "warn"))
        raise
    for server in stopped:
        try:
            _serve(host, server, options, emit)
        except DeployError as problem:
            raise _gone_back(host, pushed, stopped, options, emit, problem) from problem
    return replace(pushed, in_use=()) if stopped else pushed


def _names(servers: Sequence[Server]) -> str:
    return ", ".join(server.record.name for server in servers)


def _serve(host: Host, server: Server, options: Options, emit: Emit) -> None:
    deadline = time.monotonic() + SETTLE
    while time.monotonic() < deadline:
        with Session(host, writable=False, emit=emit) as session:
            if not session.ask("look", venv=host.venv, ledger=0).fields["unfinished"]:
                break
        time.sleep(0.2)
    ready = start(host, server.record, options=options, emit=emit)
    emit(Note(host.name, f"server {server.record.name} serves from generation {ready.server.generation}, ready in {ready.seconds:.0f} s"))


def _start_again(host: Host, stopped: Sequence[Server], options: Options, emit: Emit, problem: DeployError) -> None:
    """Start from the old generation what was stopped for a switch that was not kept. Raises RestoreUnconfirmed."""
    for server in stopped:
        try:
            _serve(host, server, options, emit)
        except DeployError as second:
            message = f"server {server.record.name} of `{host.name}` was stopped for the push, and did not start again"
            raise RestoreUnconfirmed(message, causes=(problem.message, second.message, *second.causes)) from second


def _gone_back(host: Host, pushed: Pushed, stopped: Sequence[Server], options: Options, emit: Emit, problem: DeployError) -> DeployError:
    """Go back to the generation before, start the servers from there, and return how that ended."""
    emit(Note(host.name, f"going back to generation {pushed.previous}: {problem.message}", "warn"))
    try:
        for server in running(host, emit):
            stop(host, server.record.name, drain=0, emit=emit)
        rollback(host, pushed.previous, approve=lambda _plan: True, verify=False, emit=emit)
        for server in stopped:
            _serve(host, server, options, emit)
    except DeployError as second:
        message = f"the server of `{host.name}` is not ready on generation {pushed.generation}, and the way back failed too"
        return RestoreUnconfirmed(message, causes=(problem.message, second.message, *second.causes))
    message = (
        f"`{host.name}` is back at generation {pushed.previous} and serves: the server was not ready on generation {pushed.generation}"
    )
    return RevertedAfterFailure(message, causes=(problem.message, *problem.causes))
