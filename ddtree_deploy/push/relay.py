"""Let hosts that have a snapshot feed those that still need it, so that it leaves this machine once (`push --relay`).

The conversation with the target stays ours: it alone says what is missing, and its agent takes from a feeder nothing else and hashes
all of it. A feeder only delivers. Whatever it does not deliver is sent from here.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddtree_deploy import answers
from ddtree_deploy.errors import DeployError, IntegrityFailure
from ddtree_deploy.events import Event, Note, Progress, Step
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.hosts.ssh_config import settings
from ddtree_deploy.session import Session

#: So many feeders are tried for one host: who can not be reached by two is seldom reached by a third.
TRIES = 2
#: Less than this is sent from here sooner than two logins take.
WORTH_BYTES = 1 << 20

_OPENED = answers.fields(command=answers.each(answers.text))
_FED = answers.fields(why=answers.text)
_CLOSED = answers.fields(bytes=answers.count, why=answers.text)

Need = Sequence[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Fed:
    """What a host got from others: their names, the bytes, and what of `need` is left for us to send."""

    by: tuple[str, ...] = ()
    bytes: int = 0
    left: Need = ()


class Relay:
    """The hosts of one run that have the snapshot; threads share it."""

    def __init__(self) -> None:
        self._hosts: dict[str, Host] = {}
        self._feeding: dict[str, int] = {}
        self._lock = threading.Lock()

    def finished(self, host: Host) -> None:
        """Note that `host` has the snapshot, confirmed. What runs on this machine would feed over this machine's line."""
        if host.transport != "local":
            with self._lock:
                self._hosts[host.name], self._feeding[host.name] = host, 0

    def feed(self, session: Session, need: Need) -> Fed:
        """Let finished hosts bring `need` (digest, size) to the push that is open in `session`, and say why when they can not."""
        host, left, taken, by = session.host, list(need), 0, list[str]()
        if sum(size for _digest, size in need) < WORTH_BYTES or not self._hosts:
            return Fed(left=left)
        if host.via or host.transport == "local":
            session.emit(Note(host.name, "sent from here: `--relay` feeds what ssh reaches directly, and no hop", "warn"))
            return Fed(left=left)
        tried: list[str] = []
        while left and len(tried) < TRIES and (feeder := self._borrow(tried)) is not None:
            tried.append(feeder.name)
            try:
                count, missing, why = _between(feeder, session, left)
            finally:
                with self._lock:
                    self._feeding[feeder.name] -= 1
            left = [item for item in left if item[0] in missing]
            taken += count
            by += [feeder.name] if count else []
            if left:
                session.emit(Note(host.name, f"`{feeder.name}` {'fed only a part' if count else 'can not feed it'}: {why}", "warn"))
        if left:
            session.emit(Note(host.name, f"{len(left)} of {len(need)} objects are sent from here", "warn"))
        return Fed(tuple(by), taken, left)

    def _borrow(self, tried: Sequence[str]) -> Host | None:
        """Return the finished host that feeds the fewest others now, or None when all were tried."""
        with self._lock:
            name = min((name for name in self._hosts if name not in tried), key=self._feeding.__getitem__, default=None)
            if name is None:
                return None
            self._feeding[name] += 1
            return self._hosts[name]


def _between(feeder: Host, session: Session, need: Need) -> tuple[int, set[str], str]:
    """Let `feeder` send to the open push; return the bytes that arrived, the digests that did not, and why not."""
    host = session.host

    def told(event: Event) -> None:
        if isinstance(event, Progress):
            session.emit(replace(event, host=host.name, what="send"))
        elif isinstance(event, Note):
            session.emit(event)

    session.emit(Step(host.name, f"take {len(need)} objects from `{feeder.name}`"))
    where = settings(host.address or host.name, ssh_config=host.ssh_config, options=host.ssh_options)
    command = _shaped(session, session.ask("relay-open").fields, _OPENED)["command"]
    to = {"host": where.hostname, "user": where.user, "port": where.port}
    try:
        with Session(feeder, writable=False, emit=told, parts=("relay",)) as other:
            value = {"objects": [list(item) for item in need], "command": command, "to": to}
            why = _shaped(other, other.ask("relay-feed", value, venv=feeder.venv).fields, _FED)["why"]
    except DeployError as problem:
        why = problem.message
    reply = session.ask("relay-close")
    closed = _shaped(session, reply.fields, _CLOSED)
    if not answers.each(answers.digest)(reply.value):
        raise _misshapen(session)
    return closed["bytes"], set(reply.value), closed["why"] or why or "some of its files are not what was pushed"


def _shaped(session: Session, found: dict[str, Any], shape: answers.Shape) -> dict[str, Any]:
    if not shape(found):
        raise _misshapen(session)
    return found


def _misshapen(session: Session) -> IntegrityFailure:
    return IntegrityFailure(f"`{session.host.name}` answered with something else than an answer")
