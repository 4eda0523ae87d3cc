"""Requests that decide which generation is live: choose, switch, probe, revert, confirm; and prune and release, which need the lock."""

from __future__ import annotations

import os
import time

from ddtree_deploy.agent import durable, guardian, layout, locks, switch, tidy, walk
from ddtree_deploy.agent.failure import Failure
from ddtree_deploy.agent.push import LAUNCHED, clear, imports, need, opened, unlock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ddtree_deploy.agent.main import Session
    from ddtree_deploy.agent.push import Push
    from ddtree_deploy.agent.reads import Handler


def choose(session: Session, header: dict[str, Any], _value: object) -> dict[str, Any]:
    """Aim a rollback at an existing generation (`generation`, or the one before the live one)."""
    push = opened(session)
    found = push.found
    numbers = found.numbers()
    live = found.live()
    if live is None:
        raise Failure("usage", "`%s` has no generations yet" % found.venv, mend="push to it first")
    wanted = header.get("generation")
    if wanted is None:
        wanted = found.previous_of(live)
    if wanted not in numbers:
        raise Failure("usage", "there is no generation %s to go back to" % ("before %d" % live if wanted is None else wanted),
                      mend="generations here: %s" % ", ".join(str(n) for n in numbers))
    push.number = wanted
    snapshot = (found.info(wanted) or {}).get("snapshot", "")
    push.journal = switch.write_journal(found, push.journal, state="proved", generation=wanted, snapshot=snapshot)
    return {"generation": wanted, "previous": live}


def switch_request(session: Session, header: dict[str, Any], _value: object) -> dict[str, Any]:
    """Start the guardian, then make the generation live. From here on the host goes back by itself unless it is confirmed."""
    push = opened(session)
    found = push.found
    number, seconds = need(push.number), float(header["deadline"])
    push.journal = switch.write_journal(
        found, push.journal, state="switched", generation=number, previous=found.live() or 0, deadline=time.time() + seconds
    )
    push.switched = True
    try:
        guardian.start(found, push.tx, push.lock_fd, session.zip_fd, push.keep_generations)
        if found.live() is None:
            _adopt(push, bool(header.get("accept_gap")))
        switch.flip(found, number, push.python)
    except (OSError, Failure) as error:
        if _taken_back(push, "the switch failed: %s" % error):
            raise
        raise _half_way(error) from None
    return {"generation": number, "previous": push.journal["previous"], "tx": push.tx}


def _adopt(push: Push, accept_gap: bool) -> None:
    found = push.found
    entries = walk.walk(found.site)
    rows: dict[str, layout.Row] = {}
    known = need(push.sources).by_path
    for entry in entries:
        digest = entry[8] if entry[1] == "l" else known[entry[0]][0] if entry[0] in known else ""
        rows[entry[0]] = (entry[1], entry[2], entry[3], digest, entry[4], entry[5], entry[6], entry[7])
    info = {"number": 0, "created": locks.utc(), "as_found": True, "snapshot": "", "result": "",
            "files": len(rows), "bytes": sum(row[2] for row in rows.values())}
    os.makedirs(found.directory(0), exist_ok=True)
    layout.Index(rows).save(os.path.join(found.directory(0), "index"))
    switch.adopt(found, accept_gap, info)


def probe_live(session: Session, header: dict[str, Any], value: list[str] | None) -> dict[str, Any]:
    """Prove the live tree again after the switch, and give the confirmation its deadline."""
    push = opened(session)
    rows = imports(session, push, push.found.tree(need(push.number)), header, value) if value else []
    try:
        push.journal = switch.write_journal(
            push.found, push.journal, state="probed", deadline=time.time() + float(header["confirm_timeout"])
        )
    except OSError as error:
        if _taken_back(push, "the journal could not be written: %s" % error):
            raise Failure("reverted", "went back to generation %d: %s" % (push.journal["previous"], error)) from None
        raise _half_way(error) from None
    return {"_big": rows}


def _taken_back(push: Push, reason: str) -> bool:
    """Undo a switch that failed in the middle; tell whether the host is as it was."""
    try:
        return _revert(push, reason) == "reverted" and push.found.live() != push.number
    except OSError:
        return False


def _half_way(error: Exception) -> Failure:
    return Failure("restore-unconfirmed", "the switch failed half-way, and is taken back as soon as the disk allows it: %s" % error)


def revert(session: Session, header: dict[str, Any], _value: object) -> dict[str, Any]:
    """Decide that the switch is not kept, and wait until the host's ledger says so."""
    push = opened(session)
    return {"outcome": _revert(push, str(header.get("reason", ""))), "live": push.found.live()}


def _revert(push: Push, reason: str) -> str | None:
    switch.decide(push.found, push.tx, "reverted", reason)
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline and switch.outcome(push.found, push.tx) is None:
        time.sleep(0.02)
    if switch.outcome(push.found, push.tx) is None:
        switch.settle(push.found, push.python)
    return switch.outcome(push.found, push.tx)


def prune(session: Session, header: dict[str, Any], _value: object) -> dict[str, Any]:
    """Remove generations that may go; needs the lock, which `begin` took."""
    push = opened(session)
    live = push.found.live()
    gone = tidy.prune(push.found, int(header["keep"]), live)
    return {"removed": gone, "in_use": {str(number): pids for number, pids in tidy.in_use(push.found).items()}}


def release(session: Session, _header: dict[str, Any], _value: object) -> dict[str, Any]:
    """Turn the venv back into an ordinary one that holds the live generation; the other generations go."""
    push = opened(session)
    found = push.found
    live = found.live()
    if live is None:
        raise Failure("usage", "`%s` is an ordinary venv already" % found.venv)
    push.journal = switch.write_journal(found, push.journal, state="releasing")
    durable.exchange(found.site, found.tree(live))
    durable.sync_directory(os.path.dirname(found.site))
    switch.log(found, event="released", generation=live, who=push.who["who"])
    session.push = None
    unlock(push)
    layout.remove(found.generations)
    clear(found, LAUNCHED)
    return {"generation": live}


HANDLERS: dict[str, Handler] = {
    "choose": choose,
    "switch": switch_request,
    "probe-live": probe_live,
    "revert": revert,
    "prune": prune,
    "release": release,
}
