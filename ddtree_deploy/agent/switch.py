"""The switch and its settlement: one rename makes a generation live, one link(2) decides whether it stays.

States: idle -> receiving -> staged -> proved -> switched -> probed -> confirmed | reverted. Each is journaled and fsynced
before the act. After the switch a decision is due by the deadline: whoever creates the file `decision` first, the confirming
connection or the guardian, has decided, and both then carry the same decision out. Every step may be repeated.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time

from ddtree_deploy.agent import durable, layout, locks
from ddtree_deploy.agent.failure import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ddtree_deploy.agent.layout import Layout


def write_journal(found: Layout, journal: dict[str, Any], **changes: object) -> dict[str, Any]:
    """Record the state that the work is about to enter; returns the new journal."""
    journal = {**journal, **changes, "at": time.time()}
    durable.write_json(found.journal, journal)
    return journal


def log(found: Layout, **entry: object) -> None:
    """Append a line to the host's ledger."""
    durable.append_line(found.ledger, json.dumps({"time": locks.utc(), **entry}, sort_keys=True))


def adopt(found: Layout, accept_gap: bool, info: dict[str, Any]) -> None:
    """Turn an ordinary site-packages into generation 0 and a link to it: by RENAME_EXCHANGE, so that it never is missing.

    Raises Failure(incompatible) where the file system can not exchange, unless `accept_gap` allows two renames.
    """
    if found.live() is not None:
        return
    home = found.directory(0)
    os.makedirs(home, exist_ok=True)
    if os.path.isdir(found.tree(0)) and not os.path.islink(found.tree(0)):
        raise Failure("internal", "generation 0 exists although `%s` is not adopted" % found.site)
    layout.remove(found.tree(0))
    os.symlink(found.link_text(0), found.tree(0))
    found.write_info(0, info)
    try:
        # The link lies at the tree's future place and vice versa: one exchange puts both where they belong.
        durable.exchange(found.site, found.tree(0))
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM, errno.EXDEV):
            raise
        if not accept_gap:
            layout.remove(home)
            raise Failure(
                "incompatible",
                "the file system of `%s` can not exchange a directory with a link in one step" % found.venv,
                mend="run again with `--accept-gap`: site-packages is then missing for some microseconds, once",
            ) from None
        layout.remove(found.tree(0))
        os.rename(found.site, found.tree(0))
        os.symlink(found.link_text(0), found.site)
    durable.sync_directory(os.path.dirname(found.site))
    durable.sync_directory(home)


def mend_gap(found: Layout) -> None:
    """Finish an adoption by two renames that was cut between them."""
    if not os.path.lexists(found.site) and os.path.isdir(found.tree(0)):
        os.symlink(found.link_text(0), found.site)


def flip(found: Layout, number: int, python: str) -> None:
    """Make generation `number` live, and the console scripts those of its distributions."""
    from ddtree_deploy.agent import dists, scripts  # the connection that confirms needs neither

    former = [name for dist in dists.read_distributions(found.site, records=False) for name, _target in dist["scripts"]]
    durable.replace_link(found.site, found.link_text(number))
    scripts.regenerate(found.tree(number), os.path.join(found.venv, "bin"), python, former)


def _decision(found: Layout, tx: str) -> str:
    return "%s-%s" % (found.decision, tx)


def decide(found: Layout, tx: str, verdict: str, reason: str = "") -> str:
    """Claim the decision about the switch `tx`; return the verdict that holds, ours or the one that came first.

    What is true in the end is what the ledger says (`outcome`), since a decision that comes after the settlement is void.
    """
    mine = "%s.%d" % (_decision(found, tx), os.getpid())
    durable.write_json(mine, {"tx": tx, "verdict": verdict, "reason": reason})
    try:
        os.link(mine, _decision(found, tx))
    except FileExistsError:
        verdict = (durable.read_json(_decision(found, tx)) or {}).get("verdict", verdict)
    finally:
        os.unlink(mine)
    durable.sync_directory(found.state)
    return verdict


def outcome(found: Layout, tx: str) -> str | None:
    """Return how the ledger says that the switch `tx` ended: `confirmed`, `reverted`, or None while it is open."""
    for entry in reversed(found.ledger_entries()):
        if entry.get("tx") == tx and entry.get("event") in ("confirmed", "reverted"):
            event: str = entry["event"]
            return event
    return None


def settle(found: Layout, python: str) -> str | None:
    """Carry out the decision about an unfinished switch; the caller holds the lock. Returns the verdict, or None.

    May be cut and run again at any step: each only moves towards the same end, and the ledger line comes before the clean-up.
    """
    journal = durable.read_json(found.journal)
    if not journal or journal.get("state") not in ("switched", "probed"):
        return None
    decision = durable.read_json(_decision(found, journal["tx"]))
    if not decision:
        return None
    verdict: str = outcome(found, journal["tx"]) or decision["verdict"]
    mend_gap(found)
    if verdict == "reverted" and found.live() is not None:
        flip(found, journal["previous"], python)  # also when the link is right: a cut may have left the scripts behind
    if outcome(found, journal["tx"]) is None:
        event = {key: journal.get(key) for key in ("tx", "generation", "previous", "snapshot", "who", "what")}
        event.update((key, journal[key]) for key in ("allowed", "overlay") if journal.get(key))
        log(found, event=verdict, reason=decision.get("reason", ""), **event)
    if verdict == "reverted" and journal.get("what") == "push" and found.live() != journal["generation"]:
        found.disown(journal["generation"])
    layout.remove(found.journal)
    layout.remove(_decision(found, journal["tx"]))
    durable.sync_directory(found.state)
    return verdict


def confirm(found: Layout, tx: str, python: str, wait: float, aborted: Callable[[], bool]) -> str | None:
    """Confirm the switch `tx` from a fresh connection; return the ledger's outcome, or None when it did not appear in time.

    The guardian, which holds the lock, settles; if it is dead, the lock is free and we do.
    """
    if outcome(found, tx) is None:
        decide(found, tx, "confirmed")
    deadline = time.monotonic() + wait
    while time.monotonic() < deadline and not aborted():
        done = outcome(found, tx)
        if done:
            break
        try:
            fd = locks.acquire(found, {"who": "confirm", "what": "settling"}, 0, aborted)
        except Failure:
            time.sleep(0.01)
            continue
        try:
            settle(found, python)
        finally:
            os.close(fd)
    done = outcome(found, tx)
    if done:
        # Ours may have come after the settlement, or be a predecessor's that was cut: the ledger has the last word.
        for name in os.listdir(found.state):
            if name.startswith(os.path.basename(_decision(found, tx))):
                layout.remove(os.path.join(found.state, name))
    return done


def recover(found: Layout, python: str) -> str:
    """Bring unfinished work of a run that died to its end; call it under the lock. Returns what was done, or an empty string.

    Before the switch there is nothing to undo but the partial tree. A switch whose deadline passed unconfirmed goes back.
    """
    mend_gap(found)
    journal = durable.read_json(found.journal)
    done = ""
    if journal and journal.get("state") in ("switched", "probed"):
        if decide(found, journal["tx"], "reverted", "the run that switched ended without a confirmation") == "reverted":
            done = "went back to generation %s: a switch to %s was never confirmed" % (journal["previous"], journal["generation"])
        settle(found, python)
    elif journal:
        done = "cleared a push that ended in state `%s`" % journal.get("state")
        log(found, event="cleared", state=journal.get("state"), tx=journal.get("tx"), who=journal.get("who"))
        if journal.get("state") == "proved" and journal.get("what") == "push":
            found.disown(journal["generation"])  # complete, but it never was live
        if journal.get("state") == "releasing" and found.live() is None:
            layout.remove(found.generations)  # an ordinary venv already: only the clean-up was cut
            os.makedirs(found.generations)
        layout.remove(found.journal)
    if found.live() is None and os.path.islink(found.tree(0)):
        layout.remove(found.directory(0))  # the link that an adoption was about to exchange
    for path in [*found.partials(), *_left_over(found)]:
        layout.remove(path)
    return done


def _left_over(found: Layout) -> list[str]:
    """Return the temporary files of runs that died, and decisions about switches that are settled."""
    names = [
        (found.state, r"\.tmp-|decision-"),
        (os.path.dirname(found.site), r"\.tmp-link-"),
        (os.path.join(found.venv, "bin"), r".*\.ddtree-\d+$"),
    ]
    names += [(found.directory(number), r"\.tmp-") for number in found.numbers()]
    return [os.path.join(at, name) for at, pattern in names for name in os.listdir(at) if re.match(pattern, name)]
