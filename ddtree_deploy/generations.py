"""What a host keeps and how to go back: status, generations, rollback, release, lock, ledger. Needs no store."""

from __future__ import annotations

import getpass
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ddtree_deploy.errors import UsageProblem
from ddtree_deploy.events import Emit, Note, Step, ignore
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.in_use import uses_of
from ddtree_deploy.models import GenerationInfo, Proofs, RolledBack, Status, Use
from ddtree_deploy.push.confirmation import confirm
from ddtree_deploy.push.request import ROOTS
from ddtree_deploy.session import Reply, Session
from ddtree_deploy.snapshot import import_proof


@dataclass(frozen=True, slots=True)
class RollbackPlan:
    """Where a rollback goes, and who uses the venv."""

    target: str
    generation: int
    previous: int
    snapshot: str
    uses: tuple[Use, ...] = ()


def _look(session: Session, ledger: int = 200) -> Reply:
    return session.ask("look", venv=session.host.venv, ledger=ledger)


def _who() -> str:
    return f"{getpass.getuser()}@{platform.node()}"


def _session(host: Host, writable: bool, emit: Emit) -> Session:
    """Begin to talk to a host, and say so: one that does not answer takes its time."""
    emit(Step(host.name, "connect"))
    return Session(host, writable=writable, emit=emit)


def status(host: Host, emit: Emit = ignore) -> Status:
    """Return what is live on a host, what was changed by hand since it went live, and the servers that were launched from it."""
    with _session(host, False, emit) as session:
        seen = _look(session)
        fields = seen.fields
        if not fields["inspect"].get("exists"):
            raise UsageProblem(f"`{host.name}` has no venv `{fields['venv']}`", mend="give another with `--venv PATH`")
        live = fields["generation"]
        drift = session.ask("drift", venv=host.venv).value
        info = fields.get("info") or {}
        found = Status(
            host=host.name,
            venv=fields["venv"],
            managed=live is not None,
            generation=live,
            snapshot=info.get("snapshot", ""),
            since=_since(seen.value["ledger"], live) or info.get("created", ""),
            changed=tuple(drift["changed"]),
            added=tuple(drift["added"]),
            removed=tuple(drift["removed"]),
            journal=fields["unfinished"],
            lock=fields["lock"],
            uses=uses_of(session, live),
            packages=tuple((name, version) for name, version in info.get("packages", [])),
            overlay=info.get("overlay", ""),
        )
    if not fields["launched"]:
        return found
    # A connection of its own: what knows servers is only sent where something was launched.
    from ddtree_deploy.launch.lifecycle import looked, open_session

    with open_session(host, writable=False, emit=emit) as session:
        return replace(found, servers=looked(session))


def _since(ledger: list[Mapping[str, Any]], live: int | None) -> str:
    for entry in reversed(ledger):
        if entry.get("event") == "confirmed" and entry.get("generation") == live:
            return str(entry.get("time", ""))
        if entry.get("event") == "reverted" and entry.get("previous") == live:
            continue
    return ""


def generations(host: Host, emit: Emit = ignore) -> list[GenerationInfo]:
    """Return the generations of a host, newest first."""
    with _session(host, False, emit) as session:
        seen = _look(session)
        if seen.value is None:
            return []
        live = seen.fields["generation"]
        users: dict[int, set[int]] = {}
        for use in uses_of(session, live):
            if use.generation is not None:
                users.setdefault(use.generation, set()).add(use.pid)
    rows = [
        GenerationInfo(
            number=number,
            state="live" if number == live else "as-found" if info.get("as_found") else "kept",
            snapshot=info.get("snapshot", ""),
            created=info.get("created", ""),
            files=info.get("files", 0),
            bytes=info.get("bytes", 0),
            in_use=tuple(sorted(users.get(number, ()))),
        )
        for number, info in seen.value["generations"]
    ]
    return sorted(rows, key=lambda row: -row.number)


def rollback(
    host: Host,
    generation: int | None,
    *,
    approve: Callable[[RollbackPlan], bool],
    dry_run: bool = False,
    verify: bool = True,
    confirm_timeout: float = 30.0,
    probe_timeout: float = 120.0,
    emit: Emit = ignore,
) -> RolledBack:
    """Make an earlier generation live again: the one before, or the one that is named. Needs nothing from this machine.

    Raises UsageProblem naming what is there, RevertedAfterFailure when its import probe failed and the old state was kept.
    """
    with _session(host, not dry_run, emit) as session:
        plan = _rollback_plan(session, generation)
        if dry_run:
            return RolledBack(host.name, plan.generation, plan.previous)
        if not approve(plan):
            mend = "end what runs there first, or run it again and answer `y`"
            raise UsageProblem("nothing was changed: the rollback was not approved", mend=mend)
        begun = session.ask("begin", venv=host.venv, who=_who(), what="rollback").fields
        if begun.get("recovered"):
            emit(Note(host.name, begun["recovered"], "warn"))
            plan = _rollback_plan(session, generation)
        session.ask("choose", generation=plan.generation)
        probing: dict[str, Any] = {"user": host.service_user, "env": dict(host.service_env), "timeout": probe_timeout}
        emit(Step(host.name, f"switch to generation {plan.generation}"))
        done = session.ask("switch", deadline=confirm_timeout + probe_timeout * len(ROOTS if verify else ())).fields
        modules = _modules(session) if verify else []  # of the tree that is live now
        rows = session.ask("probe-live", modules, patience=3600.0, confirm_timeout=confirm_timeout, **probing).value
        proofs = Proofs(where="live", imports=tuple(import_proof(row) for row in rows))
        if not proofs.ok:
            from ddtree_deploy.push.steps import failed_lines

            # The generation we came from may be just as broken; then the user's choice stands.
            lines = "; ".join([line for line in failed_lines(proofs) if not line.startswith(" ")][:3])
            emit(Note(host.name, f"a package does not import in the restored generation either: {lines}", "warn"))
    confirm(host, done["tx"], done["generation"], done["previous"], confirm_timeout, emit)
    return RolledBack(host.name, done["generation"], done["previous"], (proofs,) if modules else ())


def _rollback_plan(session: Session, generation: int | None) -> RollbackPlan:
    host = session.host
    seen = _look(session)
    live = seen.fields.get("generation")
    if live is None:
        raise UsageProblem(f"`{host.name}` has no generations to go back to", mend="push to it first")
    known = dict(seen.value["generations"])
    target = generation
    if target is None:
        target = _before(seen.value["ledger"], live, list(known))
    if target is None or target not in known or target == live:
        if target == live:
            what = f"generation {target} is live already"
        else:
            what = f"there is no generation {f'before {live}' if target is None else target}"
        here = ", ".join(str(number) for number in sorted(known) if number != live) or "none"
        raise UsageProblem(f"`{host.name}`: {what}", mend=f"generations to go back to: {here}")
    return RollbackPlan(host.name, target, live, (known[target] or {}).get("snapshot", ""), uses_of(session, live))


def _before(ledger: list[Mapping[str, Any]], live: int, numbers: list[int]) -> int | None:
    for entry in reversed(ledger):
        if entry.get("event") == "confirmed" and entry.get("generation") == live:
            if entry.get("previous") in numbers:
                return int(entry["previous"])
            break
    older = [number for number in numbers if number < live]
    return max(older) if older else None


def _modules(session: Session) -> list[str]:
    value = session.ask("scan", venv=session.host.venv).value
    tops = {row[0].partition("/")[0] for row in value["files"] if row[0].endswith("/__init__.py") and row[0].count("/") == 1}
    return sorted(tops & set(ROOTS))


def prune_generations(host: Host, keep: int, dry_run: bool = False, emit: Emit = ignore) -> list[int]:
    """Drop generations that are not live, not the one before, not in use, and beyond the newest `keep`; return their numbers."""
    if dry_run:
        with _session(host, False, emit) as session:
            return list(session.ask("prunable", venv=host.venv, keep=keep).fields["generations"])
    with _session(host, True, emit) as session:
        session.ask("begin", venv=host.venv, who=_who(), what="prune")
        return list(session.ask("prune", keep=keep).fields["removed"])


def release(host: Host, dry_run: bool = False, emit: Emit = ignore) -> int:
    """Turn a venv back into an ordinary one that holds the live generation; return its number."""
    with _session(host, not dry_run, emit) as session:
        live = _look(session).fields.get("generation")
        if live is None:
            raise UsageProblem(f"`{host.name}` is an ordinary venv already")
        if not dry_run:
            session.ask("begin", venv=host.venv, who=_who(), what="release")
            session.ask("release")
        return int(live)


def lock_status(host: Host, emit: Emit = ignore) -> Mapping[str, Any] | None:
    """Return who holds a host's lock, or None."""
    with _session(host, False, emit) as session:
        held: Mapping[str, Any] | None = _look(session, 0).fields.get("lock")
        return held


def audit(host: Host, limit: int = 200, emit: Emit = ignore) -> list[dict[str, Any]]:
    """Return the newest lines of a host's ledger, oldest first."""
    with _session(host, False, emit) as session:
        value = _look(session, limit).value
        return list(value["ledger"]) if value else []


