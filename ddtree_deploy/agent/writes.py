"""Requests that change a host. A push is: begin, stage, objects..., received, build, prove, switch, probe; then confirm, afresh.

Each handler journals the state it is about to enter. The end of the connection closes the push: what was received stays for
the next try, the partial tree goes, and a switch that was made is the guardian's affair.
"""

from __future__ import annotations

import os

from ddtree_deploy.agent import confirming, facts, landing, layout, live, locks, prove, stage, switch, tidy, venvs, walk, zstd
from ddtree_deploy.agent.ahead import ahead
from ddtree_deploy.agent.failure import Failure
from ddtree_deploy.agent.push import Push, close, imports, need, opened
from ddtree_deploy.agent.sources import add_base, gather

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from ddtree_deploy.agent.main import Session
    from ddtree_deploy.agent.reads import Handler
    from ddtree_deploy.agent.sources import Sources
    from ddtree_deploy.agent.walk import Entry


def create(session: Session, header: dict[str, Any], _value: object) -> dict[str, Any]:
    """Make the venv with an interpreter of the host that has the wanted minor version; without a push it goes with the connection."""
    session.made = venvs.create(header["venv"], header["minor"], header.get("candidates", []))
    return {"_big": session.made.python}


def begin(session: Session, header: dict[str, Any], _value: object) -> dict[str, Any]:
    """Take the lock, bring what an earlier run left unfinished to its end, and open a push."""
    if session.push is not None:
        raise Failure("internal", "a push has already begun on this connection")
    found = layout.locate(header["venv"])
    if os.stat(found.venv).st_dev != os.stat(os.path.dirname(found.site)).st_dev:
        raise Failure("incompatible", "`%s` and its site-packages are on different file systems" % found.venv,
                      mend="a switch is one rename and needs both on one file system")
    for place in (found.state, found.generations, found.incoming):
        if os.path.islink(place):
            # What is below them is cleared without asking, so they must be ours.
            raise Failure("integrity", "`%s` is a link" % place, mend="put a directory in its place, or remove it")
    os.makedirs(found.generations, exist_ok=True)
    who = {"who": str(header.get("who", "unknown")), "what": str(header.get("what", "push")), "snapshot": header.get("snapshot", "")}
    lock_fd = locks.acquire(found, who, float(header.get("lock_wait", 0)), session.aborted)
    push = Push(found, lock_fd, tidy.wait_until_still(found), who)
    session.push = push
    push.keep_generations = int(header.get("keep_generations", 3))
    if session.made is not None:
        session.made.keep()
        session.made = None
    stirred = bool(found.partials()) or os.path.exists(found.journal)
    recovered = switch.recover(found, push.python)
    push.journal = switch.write_journal(found, {
        "tx": push.tx, "state": "receiving", "allowed": header.get("allowed", []), "overlay": header.get("overlay", ""), **who,
        "pid": os.getpid(), "previous": found.live() or 0,
    })
    return {"tx": push.tx, "generation": found.live(), "recovered": recovered, "stirred": stirred}


def get_ready(session: Session, found: layout.Layout) -> None:
    """Learn what the live tree holds by the scan of this connection, before a push asks; it holds for as long as that scan does."""
    live = found.live()
    if live is not None and session.walked is not None and session.walked[0] == found.tree(live):
        session.sources = gather(found, session.walked[1], [])


def stage_request(session: Session, header: dict[str, Any], value: dict[str, Any]) -> dict[str, Any]:
    """Check the wanted tree, compare the host with the plan's base, and answer which content is missing."""
    push = opened(session)
    live = push.found.live()
    root = push.found.site if live is None else push.found.tree(live)
    entries = _still_the_base(session, root, header["base"])
    push.sources = session.sources
    if push.sources is None or push.sources.entries is not entries or value.get("vouch"):
        push.sources = gather(push.found, entries, value.get("vouch", []))
    if "delta" in value:
        index = push.sources.index
        if live is None or index is None or (push.found.info(live) or {}).get("result") != value["delta"]["result"]:
            raise Failure("stale-plan", "`%s` is not what the plan was made for" % push.found.site)
        push.wanted = stage.apply_delta(index, value["delta"]["changes"], value["delta"]["gone"])
    else:
        push.wanted = stage.parse_result(value["files"])
    wanted = {row[0]: row[4] for row in push.wanted}
    _refuse_moved(push.sources, [path for path, known in push.sources.by_path.items() if wanted.get(path) != known[0]])
    if value.get("base"):
        add_base(push.sources, value["base"]["root"], value["base"]["vouch"])
    need = stage.missing(push.wanted, push.sources, push.found)
    space = facts.space(push.found.venv)
    short = sum(need.values()) + (64 << 20) - space["free_bytes"]
    inodes = len(push.wanted) + len(need) + 1024 - space["free_inodes"]
    if short > 0 or (space["free_inodes"] and inodes > 0):
        push.keep_incoming = False
        what = "%d bytes" % short if short > 0 else "%d inodes" % inodes
        raise Failure("no-space", "`%s` has too little space: %s are missing" % (push.found.venv, what))
    push.number = push.found.next_number()

    push.landing = landing.Landing(push.found.incoming, dict(need))
    return {"generation": push.number, "zstd": zstd.available(), "_big": sorted(need.items(), key=lambda item: (-item[1], item[0]))}


def _still_the_base(session: Session, root: str, fingerprint: str) -> list[Entry]:
    """Return the entries of the live tree, which must be what the plan was made for; raise Failure(stale-plan).

    The scan of this connection serves as long as no directory changed since; a file that was written to meanwhile is found
    when it is linked or proved.
    """
    if session.walked is not None and session.walked[0] == root and walk.same_directories(root, session.walked[2]):
        entries, seen = session.walked[1], session.walked[3]
    else:
        entries = walk.walk(root)
        seen = walk.fingerprint(entries)
    if seen != fingerprint:
        raise Failure("stale-plan", "`%s` changed since the plan was made" % root)
    return entries


def received(session: Session, _header: dict[str, Any], _value: object) -> dict[str, Any]:
    """Say what arrived: objects, bytes, and the digests whose bytes were something else."""
    push = opened(session)
    arrived = need(push.landing)
    if arrived.error is not None:
        raise arrived.error
    bad, arrived.bad = arrived.bad, []
    return {"objects": arrived.received, "bytes": arrived.bytes, "bad": bad}


def build(session: Session, _header: dict[str, Any], _value: object) -> dict[str, Any]:
    """Build the new generation's tree from what is here."""
    push = opened(session)
    number, sources = need(push.number), need(push.sources)
    root = push.found.tree(number)
    os.makedirs(push.found.directory(number))
    push.index, push.used = stage.build(session, push.found, root, push.wanted, sources)
    stage.keep_bytecode(root, push.index, sources)
    push.journal = switch.write_journal(push.found, push.journal, state="staged", generation=number)
    known = sources.by_path
    changed = [path for path, row in push.index.rows.items() if row[0] == "f" and (path not in known or known[path][0] != row[3])]
    return {"generation": number, "root": root, "_big": sorted(changed)}


def prove_staged(session: Session, header: dict[str, Any], value: dict[str, Any]) -> dict[str, Any]:
    """Prove the staged tree: hashes of everything (`value.hash`), syntax of `value.sources`, import of `value.modules`."""
    push = opened(session)
    root = push.found.tree(need(push.number))
    out: dict[str, Any] = {"hashed": 0, "vouched": 0, "bad": [], "compiled": 0, "syntax_errors": [], "imports": []}
    # The compiler is a process of its own: it runs beside the walk, and is waited for however that ends.
    compiled = ahead(lambda: prove.syntax(session, push.python, root, value["sources"])) if value.get("sources") else None
    try:
        if value.get("hash"):
            index = need(push.index)
            entries = walk.walk(root)
            out["hashed"], out["vouched"], out["bad"] = prove.hashes(session, root, index.rows, entries)
            if not out["bad"]:
                push.proved = entries
            else:
                sources = need(push.sources)
                _refuse_moved(sources, sources.by_path)
    finally:
        if compiled is not None:
            out["compiled"], out["syntax_errors"] = compiled()
    if value.get("modules"):
        out["imports"] = imports(session, push, root, header, value["modules"])
    return {"_big": out}


def _refuse_moved(sources: Sources, paths: Iterable[str]) -> None:
    """Raise Failure(stale-plan) when one of these files of the live tree is not what the scan saw."""
    for path in paths:
        _digest, root, entry = sources.by_path[path]
        try:
            info = os.lstat(os.path.join(root, path))
        except OSError:
            info = None
        if info is None or (info.st_mode & 0o777, info.st_ino, info.st_size, info.st_mtime_ns) != (entry[2], entry[5], entry[3], entry[6]):
            raise Failure("stale-plan", "`%s` changed since the plan was made" % path)


def commit(session: Session, _header: dict[str, Any], value: dict[str, Any]) -> dict[str, Any]:
    """Make the proved tree a generation (not yet the live one), and `value` its record."""
    push = opened(session)
    number, index, proved = need(push.number), need(push.index), need(push.proved)
    push.journal = switch.write_journal(push.found, push.journal, state="proved")
    info = {**value, "number": number, "created": locks.utc(), "tx": push.tx, "who": push.who["who"]}
    proved = stage.consume(push.found, push.found.tree(number), index, push.used, proved)
    stage.publish(push.found, number, index, proved, info)
    return {"generation": number}


def abort(session: Session, header: dict[str, Any], _value: object) -> dict[str, Any]:
    """End the push without a switch: the partial tree goes, and with `everything` also what was received."""
    push = opened(session)
    push.keep_incoming = push.keep_incoming and not header.get("everything")
    close(session)
    return {}


HANDLERS: dict[str, Handler] = {
    "create": create,
    "begin": begin,
    "stage": stage_request,
    "received": received,
    "build": build,
    "prove": prove_staged,
    "commit": commit,
    "abort": abort,
    **confirming.HANDLERS,
    **live.HANDLERS,
}
