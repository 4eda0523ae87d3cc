"""What a connection holds of a push, from `begin` to its end, and how it leaves the host."""

from __future__ import annotations

import os

from ddtree_deploy.agent import layout, prove, stage, switch
from ddtree_deploy.agent.failure import Failure
from ddtree_deploy.agent.reads import venv_python

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, TypeVar

    from ddtree_deploy.agent.landing import Landing
    from ddtree_deploy.agent.main import Session
    from ddtree_deploy.agent.sources import Sources
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
        self.wanted: list[stage.Wanted] = []
        self.sources: Sources | None = None
        self.landing: Landing | None = None
        self.index: layout.Index | None = None
        self.used: set[str] = set()
        self.proved: list[Entry] | None = None  # the walk that proved the staged tree
        self.switched = False
        self.keep_incoming = True
        self.keep_generations = 3
        self.fresh_incoming = not os.path.isdir(found.incoming)


def opened(session: Session) -> Push:
    if session.push is None:
        raise Failure("internal", "this request needs a push that has begun")
    return session.push


def need(value: T | None) -> T:
    """Return what an earlier request of this push has left; raise Failure when requests come out of their order."""
    if value is None:
        raise Failure("internal", "the requests of this push came out of their order")
    return value


def imports(session: Session, push: Push, root: str, header: dict[str, Any], modules: list[str]) -> list[dict[str, Any]]:
    live = push.found.live()
    live_root = push.found.site if live is None else push.found.tree(live)
    return prove.imports(
        session, push.python, root, live_root, push.found.venv, modules, header.get("user", ""), header.get("env", {}),
        float(header.get("timeout", 120)), header.get("jobs"),
    )


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
        unlock(push)


def clear(found: layout.Layout, kept: Iterable[str]) -> None:
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
        clear(push.found, ("ledger.jsonl", *LAUNCHED))


def unlock(push: Push) -> None:
    for fd in push.fds:
        os.close(fd)
    push.fds = []
