"""Start, prove, stop and repeat servers on a host. The host keeps what was launched, so that nothing here must remember it."""

from __future__ import annotations

import getpass
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ddtree_deploy.errors import DeployError, Incompatible, IntegrityFailure, ServerNotReady, TargetBusy, UsageProblem
from ddtree_deploy.events import Emit, Note, Step, ignore
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.launch import budgets, preflight
from ddtree_deploy.launch.argv import Command, Request, build
from ddtree_deploy.launch.models import Ready, Record, Server, Stopped
from ddtree_deploy.launch.readiness import Watch, wait
from ddtree_deploy.launch.sources import collect
from ddtree_deploy.models import Check
from ddtree_deploy.session import Session

PARTS = ("serving",)
WAIT = 900.0
COMPLETIONS = 8


@dataclass(frozen=True, slots=True)
class Options:
    """How a launch goes about: seconds to readiness, completions that prove it, seconds to drain, what to do at the end.

    `restart` is `on-failure` (at most three times in 15 minutes, and only what was healthy once) or `no`; `keep` leaves a server
    that failed its proof as it is; `nccl` runs the all-reduce check before more than one GPU is used.
    """

    wait: float = WAIT
    completions: int = COMPLETIONS
    drain: float = 30.0
    restart: str = "on-failure"
    keep: bool = False
    nccl: bool = True
    detach: bool = False


@dataclass(frozen=True, slots=True)
class Prepared:
    """A launch that was looked at and may begin: what runs, where, and what the checks say."""

    host: Host
    request: Request
    command: Command
    argv: tuple[str, ...]
    checks: tuple[Check, ...]
    generation: int | None
    facts: Mapping[str, Any]

    @property
    def blocks(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.level == "block")


def open_session(host: Host, writable: bool, emit: Emit = ignore) -> Session:
    """Open a session whose agent also knows servers."""
    return Session(host, writable=writable, emit=emit, parts=PARTS)


def prepare(host: Host, request: Request, emit: Emit = ignore, *, nccl: bool = False) -> Prepared:
    """Look at a host and build the command line for it; changes nothing there.

    Raises UsageProblem for a request that can not be meant. What speaks against it on this host is in `checks`.
    """
    emit(Step(host.name, "look at the host"))
    asked: dict[str, Any] = {
        "engine": request.engine, "algorithm": request.algorithm, "model": request.model, "drafter": request.drafter,
        "listen": request.listen, "ports": preflight.ports(request), "env": dict(request.env), "binaries": request.gpus > 0,
    }  # fmt: skip
    with open_session(host, writable=False, emit=emit) as session:
        facts = session.ask("serve-survey", venv=host.venv, **asked).value
    request, tuned = budgets.apply(facts, request)
    command = build(request, facts["flags"])
    checks = (*preflight.judge(facts, request, command), *tuned)
    argv = (f"{facts['venv']}/bin/python", *command.tail)
    if nccl and request.engine == "sglang" and request.gpus > 1 and not any(check.level == "block" for check in checks):
        checks = (*checks, reach(host, request.gpus, request.env, emit))
    return Prepared(host, request, command, argv, checks, facts["generation"], facts)


def reach(host: Host, ranks: int, env: Mapping[str, str], emit: Emit = ignore, *, backend: str = "nccl", seconds: float = 60.0) -> Check:
    """Try one all-reduce over the GPUs, with a deadline (NCCL hangs where P2P is broken, and the server would hang with it)."""
    emit(Step(host.name, f"all-reduce over {ranks} GPUs"))
    fields = {"venv": host.venv, "ranks": ranks, "seconds": seconds, "env": dict(env), "backend": backend}
    with open_session(host, writable=True, emit=emit) as session:
        found = session.ask("serve-nccl", patience=4 * seconds + 60, **fields).value
    if found["ok"]:
        return Check("nccl", "ok", f"an all-reduce over {ranks} ranks took {found['seconds']:.1f} s")
    hung = any(code is None for code in found["ranks"])
    text = f"an all-reduce over {ranks} ranks {'hangs' if hung else 'fails'}"
    mend = "look at `nvidia-smi topo -m` and `NCCL_DEBUG=INFO` on the host"
    if found["without_p2p"]:
        text += ", but not with NCCL_P2P_DISABLE=1"
        mend = "launch with `--env NCCL_P2P_DISABLE=1`, or mend P2P (ACS, IOMMU)"
    return Check("nccl", "block", text, tuple(found["lines"]), mend)


def refuse(prepared: Prepared) -> None:
    """Raise what the first blocking check means: TargetBusy for a port or leftovers, else Incompatible."""
    blocks = prepared.blocks
    if not blocks:
        return
    kind: type[DeployError] = TargetBusy if all(check.id in ("port", "orphan", "memory") for check in blocks) else Incompatible
    first, *others = blocks
    rest = (line for check in others for line in (f"{check.id}: {check.text}", *(f"  {one}" for one in check.evidence)))
    raise kind(f"cannot launch on `{prepared.host.name}`: {first.text}", mend=first.mend, causes=(*first.evidence, *rest))


def _wish(prepared: Prepared, options: Options) -> dict[str, Any]:
    """Return what the host is asked to start, and to keep for a restart. Raises what `refuse` raises."""
    refuse(prepared)
    request = prepared.request
    wish: dict[str, Any] = {
        "engine": request.engine, "tail": list(prepared.command.tail), "env": {**prepared.host.service_env, **prepared.command.env},
        "listen": request.listen, "port": request.port, "algorithm": request.algorithm, "user": prepared.host.service_user,
        "restart": options.restart if request.nodes == 1 else "no", "drain": options.drain, "rank": request.rank,
    }  # fmt: skip
    if request.engine == "standalone" and not prepared.facts["ddtree"]:
        wish["sources"], sent = collect(request.model == "tiny")
        if wish["sources"] not in prepared.facts["code"]:
            wish["code"] = sent
    return wish


def begin(prepared: Prepared, options: Options, emit: Emit = ignore) -> Server:
    """Start a prepared server on its host and return at once; it does not depend on this process.

    Raises TargetBusy when it runs already or its port is taken, and what `refuse` raises.
    """
    wish = _wish(prepared, options)
    with open_session(prepared.host, writable=True, emit=emit) as session:
        return _begin(session, prepared.request.port, wish)


def launch(prepared: Prepared, options: Options, emit: Emit = ignore, begun: Callable[[Server], None] = lambda _server: None) -> Ready:
    """Start a prepared server and prove it, over one connection; `begun` hears of it in between. Raises as `begin` and `prove`."""
    wish = _wish(prepared, options)
    with open_session(prepared.host, writable=True, emit=emit) as session:
        server = _begin(session, prepared.request.port, wish)
        begun(server)
        return _prove(session, server, options)


def _begin(session: Session, name: object, wish: Mapping[str, Any] | None) -> Server:
    session.emit(Step(session.host.name, "start"))
    return parse(session.host.name, session.ask("serve-start", wish, venv=session.host.venv, name=str(name), who=who()).value)


def prove(host: Host, server: Server, options: Options, emit: Emit = ignore) -> Ready:
    """Follow a server that was started until it serves; note on the host how that ended.

    Raises ServerNotReady; the server is stopped then, unless `options.keep`.
    """
    with open_session(host, writable=True, emit=emit) as session:
        return _prove(session, server, options)


def _prove(session: Session, server: Server, options: Options) -> Ready:
    host, emit = session.host, session.emit
    watch = Watch(session, server, parse, time.monotonic() + options.wait, emit)
    note: dict[str, Any] = {"venv": host.venv, "name": server.record.name, "launch": server.launch}
    try:
        ready = wait(watch, server.record.algorithm, options.completions)
    except ServerNotReady as problem:
        session.ask("serve-proved", {"ok": False, "why": problem.message[:300]}, **note)
        if not options.keep:
            emit(Step(host.name, "stop what did not become ready"))
            # This launch alone (`note`): somebody may have stopped it and started another.
            session.ask("serve-stop", drain=0, patience=300.0, who=who(), **note)
        raise
    fields = {"ok": True, "algorithm": ready.algorithm, "seconds": round(ready.seconds, 1), "completions": ready.completions}
    session.ask("serve-proved", fields, **note)
    return ready


def running(host: Host, emit: Emit = ignore) -> tuple[Server, ...]:
    """Return the servers that run on a host from its venv (also those that start, hang, or lost their supervisor)."""
    return tuple(server for server in servers(host, emit) if server.runs)


def servers(host: Host, emit: Emit = ignore) -> tuple[Server, ...]:
    """Return every server that was launched from a host's venv, also those that are over."""
    with open_session(host, writable=False, emit=emit) as session:
        return looked(session)


def looked(session: Session, name: str = "") -> tuple[Server, ...]:
    """Return the servers of an open session's host."""
    rows = session.ask("serve-look", venv=session.host.venv, name=name).value
    return tuple(parse(session.host.name, row) for row in rows)


def stop(host: Host, name: str = "", *, launch: str | None = None, drain: float | None = None, emit: Emit = ignore) -> Stopped:
    """Stop a server: the one of that name (its port), or the only one. Answers in progress get `drain` seconds (None: as launched).

    Every process of the launch that is there now is gone then, and the result says whether port and GPU memory are back. With
    `launch` (`Server.launch`) nothing is ended when another launch has taken its place.
    """
    emit(Step(host.name, "stop"))
    with open_session(host, writable=True, emit=emit) as session:
        value = session.ask("serve-stop", venv=host.venv, name=name, launch=launch, drain=drain, patience=600.0, who=who()).value
    return Stopped(
        host.name, value["name"], value["was"], value["seconds"], value["killed"], tuple(value["left"]), value["port_free"],
        tuple(value["gpus"]), value["replaced_by"],
    )  # fmt: skip


def start(host: Host, record: Record, *, options: Options | None = None, emit: Emit = ignore) -> Ready:
    """Start a recorded launch once more, from the generation that is live now, and prove it.

    Raises TargetBusy when it runs still, ServerNotReady when it does not become ready.
    """
    return again(host, record.name, options or Options(), emit)


def again(host: Host, name: str, options: Options, emit: Emit = ignore) -> Ready:
    """Start the last launch of a server's name once more, and prove it."""
    with open_session(host, writable=True, emit=emit) as session:
        return _prove(session, _begin(session, name, None), options)


def restart(host: Host, name: str = "", *, options: Options | None = None, drain: float | None = None, emit: Emit = ignore) -> Ready:
    """Stop a server if it runs, and start it again from the live generation."""
    with open_session(host, writable=False, emit=emit) as session:
        known = looked(session, name) if name else looked(session)
    candidates = [server for server in known if server.runs] or list(known)
    if len(candidates) != 1:
        names = ", ".join(server.record.name for server in candidates)
        what = f"there is more than one server on `{host.name}`: {names}" if candidates else f"there is no server on `{host.name}`"
        raise UsageProblem(what, mend="name one with `--port`" if candidates else "start one with `ddtree-deploy launch`")
    server = candidates[0]
    if server.runs:
        stop(host, server.record.name, launch=server.launch, drain=drain, emit=emit)
    return start(host, server.record, options=options, emit=emit)


def follow_log(
    host: Host,
    name: str,
    write: Callable[[str], None],
    *,
    lines: int = 100,
    since: float | None = None,
    follow: bool = False,
    emit: Emit = ignore,
) -> None:
    """Write a server's log: its last `lines`, or from the time `since`; with `follow` on and on, also over a restart."""
    with open_session(host, writable=False, emit=emit) as session:
        fields: dict[str, Any] = {"venv": host.venv, "name": name}
        value = session.ask("serve-log", lines=lines, since=since, **fields).value
        while True:
            if value["text"]:
                write(value["text"])
            elif not follow:
                return
            fields["name"] = value["name"]
            phase = value["server"].get("phase")
            if follow and phase in ("stopped", "failed", "dead") and not value["text"]:
                emit(Note(host.name, f"the server is {phase}", "info"))
                return
            wait_for = {"wait": 20.0, "phase": phase} if follow else {}
            value = session.ask("serve-log", offset=value["offset"], **wait_for, **fields).value


def who() -> str:
    return f"{getpass.getuser()}@{platform.node()}"


def parse(host: str, row: Mapping[str, Any]) -> Server:
    """Read what a host says of a server. Raises IntegrityFailure when it is not that."""
    try:
        launch = row["launch"]
        wish = launch["wish"]
        record = Record(
            host, str(row["name"]), tuple(map(str, launch["argv"])), dict(wish["env"]), str(wish.get("algorithm") or ""),
            int(wish["port"]), str(wish["listen"]),
        )  # fmt: skip
        return Server(
            record, str(row["phase"]), row["pid"], int(row["processes"]), row["since"], int(row["restarts"]), row["last"],
            row["generation"], bool(row["stale"]), str(row["unit"]), str(launch["url"]), str(launch["started"]), str(launch["who"]),
            str(launch["user"]), str(launch["id"]), row["proved"],
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityFailure(f"`{host}` says something of a server that can not be read: {error!r}") from error
