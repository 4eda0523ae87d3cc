"""One server over several hosts: SGLang's own `--nnodes`, started on each, proved on the first, stopped together."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ddtree_deploy.errors import DeployError, ServerNotReady, UsageProblem
from ddtree_deploy.events import Emit, ignore
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.launch.argv import Request
from ddtree_deploy.launch.lifecycle import Options, Prepared, begin, looked, open_session, parse, prepare, refuse, stop
from ddtree_deploy.launch.models import OVER, Ready, Server
from ddtree_deploy.launch.readiness import KEPT_LINES, Watch, ending, wait

#: Beside the HTTP port, so that two servers on one host do not meet there.
RENDEZVOUS_STEP = 500


def rendezvous(first: Host, request: Request) -> str:
    """Return HOST:PORT at which the ranks meet: the first host's address as the others reach it."""
    address = (first.address or first.name).rpartition("@")[2].removeprefix("ssh://").partition(":")[0]
    if first.transport == "local" or not address:
        raise UsageProblem("the other nodes must reach the first: `local` is no address", mend="say it with `--rendezvous HOST:PORT`")
    return f"{address}:{request.port + RENDEZVOUS_STEP}"


def prepare_all(hosts: Sequence[Host], request: Request, emit: Emit = ignore, *, nccl: bool = False) -> tuple[Prepared, ...]:
    """Prepare one rank on each host, in order; the first is rank 0."""
    if len({(host.name, host.venv) for host in hosts}) != len(hosts):
        raise UsageProblem("a node is named twice", mend="name each host of `--nodes` once")
    request = replace(request, nodes=len(hosts), rendezvous=request.rendezvous or rendezvous(hosts[0], request))
    return tuple(prepare(host, replace(request, rank=rank), emit, nccl=nccl) for rank, host in enumerate(hosts))


def launch_all(
    prepared: Sequence[Prepared], options: Options, emit: Emit = ignore, begun: Callable[[Server], None] = lambda _s: None
) -> Ready | None:
    """Start every rank and prove the first; None with `options.detach`. When one fails, all are stopped."""
    for one in prepared:
        refuse(one)
    started: list[tuple[Prepared, Server]] = []
    try:
        for one in reversed(prepared):  # the first rank last: it waits for the others
            server = begin(one, options, emit)
            begun(server)
            started.append((one, server))
        return None if options.detach else _prove(started, options, emit)
    except DeployError:
        if not options.keep:
            for one, server in started:
                with contextlib.suppress(DeployError):
                    stop(one.host, server.record.name, launch=server.launch, drain=0, emit=emit)
        raise


def _prove(started: Sequence[tuple[Prepared, Server]], options: Options, emit: Emit) -> Ready:
    first, server = started[-1]
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(open_session(one.host, writable=False, emit=emit)) for one, _server in started[:-1]]
        session = stack.enter_context(open_session(first.host, writable=True, emit=emit))

        def others_live() -> None:
            for other, (one, known) in zip(others, started[:-1], strict=True):
                (now,) = looked(other, known.record.name)
                if now.phase in OVER:
                    value = other.ask("serve-log", venv=one.host.venv, name=known.record.name, offset=0).value
                    dead = Watch(other, now, parse, 0.0, emit, lines=value["text"].splitlines()[-KEPT_LINES:])
                    raise dead.failure(f"rank {one.request.rank} ended: {ending(now.last)}")

        watch = Watch(session, server, parse, time.monotonic() + options.wait, emit, first=others_live)
        note: dict[str, Any] = {"venv": first.host.venv, "name": server.record.name, "launch": server.launch}
        try:
            ready = wait(watch, server.record.algorithm, options.completions)
        except ServerNotReady as problem:
            session.ask("serve-proved", {"ok": False, "why": problem.message[:300]}, **note)
            raise
        session.ask(
            "serve-proved", {"ok": True, "algorithm": ready.algorithm, "seconds": round(ready.seconds, 1), "nodes": len(started)}, **note
        )
        return ready
