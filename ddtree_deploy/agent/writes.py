"""Requests that change a host. A push is: begin, stage, objects..., received, build, prove, switch, probe; then confirm, afresh.

Each handler journals the state it is about to enter. The end of the connection closes the push: what was received stays for
the next try, the partial tree goes, and a switch that was made is the guardian's affair.
"""

from __future__ import annotations

import os
import time

from ddtree_deploy.agent import durable, facts, guardian, landing, layout, locks, prove, stage, switch, tidy, venvs, walk, zstd
from ddtree_deploy.agent.failure import Failure
from ddtree_deploy.agent.reads import venv_python

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, TypeVar

    from ddtree_deploy.agent.main import Session
    from ddtree_deploy.agent.reads import Handler
    from ddtree_deploy.agent.walk import Entry

    T = TypeVar("T")


#: In our directory, and not a push's to remove: what was launched from the venv may run.
LAUNCHED = ("servers", "jit")


class Push:
    """What a connection holds between `begin` and its end."""

    def __init__(self, found: layout.Layout, lock_fd: int, tidy_fd: int, who: dict[str, Any]) -> None:
        self.found = found
        self.fds = [lock_fd, tidy_fd]
        self.lock_fd = lock_fd
        self.who = who
        self.tx = os.urandom(8).hex()
        self.python = venv_python(found.venv)
        self.number: int | None = None
        self.journal: dict[str, Any] = {}
        self.info: dict[str, Any] = {}
        self.wanted: list[stage.Wanted] = []
        self.sources: stage.Sources | None = None
        self.landing: landing.Landing | None = None
        self.index: layout.Index | None = None
        self.used: set[str] = set()
        self.switched = False
        self.keep_incoming = True
        self.keep_generations = 3
        self.fresh_incoming = not os.path.isdir(found.incoming)


def _open(session: Session) -> Push:
    if session.push is None:
        raise Failure("internal", "this request needs a push that has begun")
    return session.push


def _need(value: T | None) -> T:
    """Return what an earlier request of this push has left; raise Failure when requests come out of their order."""
    if value is None:
        raise Failure("internal", "the requests of this push came out of their order")
    return value


def create(_session: Session, header: dict[str, Any], _value: object) -> dict[str, Any]:
    """Make the venv with an interpreter of the host that has the wanted minor version."""
    return {"_big": venvs.create(os.path.abspath(os.path.expanduser(header["venv"])), header["minor"], header.get("candidates", []))}


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
    stirred = bool(found.partials()) or os.path.exists(found.journal)
    recovered = switch.recover(found, push.python)
    push.journal = switch.write_journal(found, {
        "tx": push.tx, "state": "receiving", "allowed": header.get("allowed", []), "overlay": header.get("overlay", ""), **who,
        "pid": os.getpid(), "previous": found.live() or 0,
    })
    return {"tx": push.tx, "generation": found.live(), "recovered": recovered, "stirred": stirred}


def stage_request(session: Session, header: dict[str, Any], value: dict[str, Any]) -> dict[str, Any]:
    """Check the wanted tree, compare the host with the plan's base, and answer which content is missing."""
    push = _open(session)
    push.info = value["info"]
    live = push.found.live()
    root = push.found.site if live is None else push.found.tree(live)
    entries = _still_the_base(session, root, header["base"])
    push.sources = stage.gather(push.found, entries, value.get("vouch", []))
    if "delta" in value:
        index = layout.Index.load(os.path.join(push.found.directory(live), "index")) if live is not None else None
        if live is None or index is None or (push.found.info(live) or {}).get("result") != value["delta"]["result"]:
            raise Failure("stale-plan", "`%s` is not what the plan was made for" % push.found.site)
        push.wanted = stage.apply_delta(index, value["delta"]["changes"], value["delta"]["gone"])
    else:
        push.wanted = stage.parse_result(value["files"])
    wanted = {row[0]: row[4] for row in push.wanted}
    _refuse_moved(push.sources, [path for path, known in push.sources.by_path.items() if wanted.get(path) != known[0]])
    if value.get("base"):
        stage.add_base(push.sources, value["base"]["root"], value["base"]["vouch"])
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
    push = _open(session)
    arrived = _need(push.landing)
    if arrived.error is not None:
        raise arrived.error
    bad, arrived.bad = arrived.bad, []
    return {"objects": arrived.received, "bytes": arrived.bytes, "bad": bad}


def build(session: Session, _header: dict[str, Any], _value: object) -> dict[str, Any]:
    """Build the new generation's tree from what is here."""
    push = _open(session)
    number, sources = _need(push.number), _need(push.sources)
    root = push.found.tree(number)
    os.makedirs(push.found.directory(number))
    push.index, push.used = stage.build(session, push.found, root, push.wanted, sources)
    stage.keep_bytecode(root, push.index, sources)
    push.journal = switch.write_journal(push.found, push.journal, state="staged", generation=number)
    changed = [path for path, row in push.index.rows.items() if row[0] == "f" and _is_new(sources, path, row)]
    return {"generation": number, "root": root, "_big": sorted(changed)}


def _is_new(sources: stage.Sources, path: str, row: layout.Row) -> bool:
    same = sources.by_path.get(path)
    return same is None or same[0] != row[3]


def prove_staged(session: Session, header: dict[str, Any], value: dict[str, Any]) -> dict[str, Any]:
    """Prove the staged tree: hashes of everything (`value.hash`), syntax of `value.sources`, import of `value.modules`."""
    push = _open(session)
    root = push.found.tree(_need(push.number))
    out: dict[str, Any] = {"hashed": 0, "vouched": 0, "bad": [], "compiled": 0, "syntax_errors": [], "imports": []}
    if value.get("hash"):
        index = _need(push.index)
        expected = [[path, row[0], row[1], row[2], row[3]] for path, row in sorted(index.rows.items())]
        stamps = {path: ((row[4], row[5], row[2], row[6], row[7]), row[3]) for path, row in index.rows.items()}
        entries = walk.walk(root)
        out["hashed"], out["vouched"], out["bad"] = prove.hashes(session, root, expected, stamps, entries)
        if not out["bad"]:
            stage.stamp(index, entries)
        else:
            sources = _need(push.sources)
            _refuse_moved(sources, sources.by_path)
    if value.get("sources"):
        out["compiled"], out["syntax_errors"] = prove.syntax(session, push.python, root, value["sources"])
    if value.get("modules"):
        out["imports"] = _imports(session, push, root, header, value["modules"])
    return {"_big": out}


def _refuse_moved(sources: stage.Sources, paths: Iterable[str]) -> None:
    """Raise Failure(stale-plan) when one of these files of the live tree is not what the scan saw."""
    for path in paths:
        _digest, root, entry = sources.by_path[path]
        try:
            info = os.lstat(os.path.join(root, path))
        except OSError:
            info = None
        if info is None or (info.st_mode & 0o777, info.st_ino, info.st_size, info.st_mtime_ns) != (entry[2], entry[5], entry[3], entry[6]):
            raise Failure("stale-plan", "`%s` changed since the plan was made" % path)


def _imports(session: Session, push: Push, root: str, header: dict[str, Any], modules: list[str]) -> list[dict[str, Any]]:
    live = push.found.live()
    live_root = push.found.site if live is None else push.found.tree(live)
    return prove.imports(
        session, push.python, root, live_root, push.found.venv, modules, header.get("user", ""), header.get("env", {}),
        float(header.get("timeout", 120)), header.get("jobs"),
    )


def commit(session: Session, header: dict[str, Any], _value: object) -> dict[str, Any]:
    """Make the proved tree a generation (not yet the live one)."""
    push = _open(session)
    push.journal = switch.write_journal(push.found, push.journal, state="proved")
    number, index = _need(push.number), _need(push.index)
    info = {**push.info, **header.get("proved", {}), "number": number, "created": locks.utc(), "tx": push.tx, "who": push.who["who"]}
    stage.consume(push.found, push.found.tree(number), index, push.used)
    stage.publish(push.found, number, index, info)
    return {"generation": number}


def choose(session: Session, header: dict[str, Any], _value: object) -> dict[str, Any]:
    """Aim a rollback at an existing generation (`generation`, or the one before the live one)."""
    push = _open(session)
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
    push = _open(session)
    found = push.found
    number, seconds = _need(push.number), float(header["deadline"])
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
    known = _need(push.sources).by_path
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
    push = _open(session)
    imports = _imports(session, push, push.found.tree(_need(push.number)), header, value) if value else []
    try:
        push.journal = switch.write_journal(
            push.found, push.journal, state="probed", deadline=time.time() + float(header["confirm_timeout"])
        )
    except OSError as error:
        if _taken_back(push, "the journal could not be written: %s" % error):
            raise Failure("reverted", "went back to generation %d: %s" % (push.journal["previous"], error)) from None
        raise _half_way(error) from None
    return {"_big": imports}


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
    push = _open(session)
    return {"outcome": _revert(push, str(header.get("reason", ""))), "live": push.found.live()}


def _revert(push: Push, reason: str) -> str | None:
    switch.decide(push.found, push.tx, "reverted", reason)
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline and switch.outcome(push.found, push.tx) is None:
        time.sleep(0.02)
    if switch.outcome(push.found, push.tx) is None:
        switch.settle(push.found, push.python)
    return switch.outcome(push.found, push.tx)


def confirm(session: Session, header: dict[str, Any], _value: object) -> dict[str, Any]:
    """Confirm a switch from a fresh connection, and answer what the ledger says."""
    found = layout.locate(header["venv"])
    done = switch.confirm(found, str(header["tx"]), venv_python(found.venv), float(header.get("wait", 20)), session.aborted)
    return {"outcome": done, "live": found.live()}


def prune(session: Session, header: dict[str, Any], _value: object) -> dict[str, Any]:
    """Remove generations that may go; needs the lock, which `begin` took."""
    push = _open(session)
    live = push.found.live()
    gone = tidy.prune(push.found, int(header["keep"]), live)
    return {"removed": gone, "in_use": {str(number): pids for number, pids in tidy.in_use(push.found).items()}}


def release(session: Session, _header: dict[str, Any], _value: object) -> dict[str, Any]:
    """Turn the venv back into an ordinary one that holds the live generation; the other generations go."""
    push = _open(session)
    found = push.found
    live = found.live()
    if live is None:
        raise Failure("usage", "`%s` is an ordinary venv already" % found.venv)
    push.journal = switch.write_journal(found, push.journal, state="releasing")
    durable.exchange(found.site, found.tree(live))
    durable.sync_directory(os.path.dirname(found.site))
    switch.log(found, event="released", generation=live, who=push.who["who"])
    session.push = None
    _unlock(push)
    layout.remove(found.generations)
    _clear(found, LAUNCHED)
    return {"generation": live}


def abort(session: Session, header: dict[str, Any], _value: object) -> dict[str, Any]:
    """End the push without a switch: the partial tree goes, and with `everything` also what was received."""
    push = _open(session)
    push.keep_incoming = push.keep_incoming and not header.get("everything")
    close(session)
    return {}


def close(session: Session) -> None:
    """Leave the host as a push that ends here must leave it; called at the end of every connection."""
    push, session.push = session.push, None
    if push is None:
        return
    try:
        if not push.switched:
            if push.number is not None and push.index is not None:
                push.found.disown(push.number)
            stage.discard(push.found, everything=not push.keep_incoming)
            layout.remove(push.found.journal)
        elif push.found.live() == push.number or push.index is None:
            stage.discard(push.found, everything=True)
        if push.switched and push.journal["state"] == "switched" and switch.outcome(push.found, push.tx) is None:
            # Who asked for the switch went before the live tree was proved, and will not confirm it: the deadline is not waited for.
            switch.decide(push.found, push.tx, "reverted", "the connection ended before the live tree was proved")
        _tidy_away(push)
    finally:
        _unlock(push)


def _clear(found: layout.Layout, kept: Iterable[str]) -> None:
    """Remove our directory of a venv, but for these names."""
    for name in os.listdir(found.state):
        if name not in kept:
            layout.remove(os.path.join(found.state, name))
    if not os.listdir(found.state):
        os.rmdir(found.state)


def _tidy_away(push: Push) -> None:
    if push.fresh_incoming and not push.keep_incoming:
        layout.remove(push.found.incoming)
    if not push.switched and push.found.live() is None and not push.found.numbers() and not os.path.isdir(push.found.incoming):
        # A first push that came to nothing leaves an ordinary venv, as it was found.
        _clear(push.found, ("ledger.jsonl", *LAUNCHED))


def _unlock(push: Push) -> None:
    for fd in push.fds:
        os.close(fd)
    push.fds = []


HANDLERS: dict[str, Handler] = {
    "create": create,
    "begin": begin,
    "stage": stage_request,
    "received": received,
    "build": build,
    "prove": prove_staged,
    "commit": commit,
    "choose": choose,
    "switch": switch_request,
    "probe-live": probe_live,
    "revert": revert,
    "confirm": confirm,
    "prune": prune,
    "release": release,
    "abort": abort,
}
