"""Send objects to a host: raw while the link is fast, compressed once it proves slow and the store has them so."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ddtree_deploy.errors import IntegrityFailure
from ddtree_deploy.events import Note, Progress, Step
from ddtree_deploy.session import Session
from ddtree_deploy.store import Store

#: So much is sent raw before the link is judged; below this rate compressed objects arrive sooner than raw ones.
TRIAL_BYTES = 24 << 20
SLOW_BYTES_PER_SECOND = 250e6


@dataclass(frozen=True, slots=True)
class Sent:
    """What a host received: objects, their bytes, and the bytes that crossed the wire for them."""

    objects: int = 0
    bytes: int = 0
    wire: int = 0


def send(session: Session, store: Store, need: Sequence[tuple[str, int]], *, unpacks: bool, name: Callable[[str], str]) -> Sent:
    """Send the objects `need` (digest, size), and once more those that were damaged on the way.

    `unpacks` says that the host can decompress; `name(digest)` names a file for messages. Raises IntegrityFailure for an object that
    is damaged in our store, or twice on the way.
    """
    host = session.host.name
    wire = 0
    todo, packed = list(need), store.packed(need) if unpacks else {}
    for attempt in (1, 2):
        if not todo:
            break
        session.emit(Step(host, f"send {len(todo)} objects"))
        wire += _stream(session, store, todo, packed)
        fields = session.ask("received", patience=3600.0).fields
        bad = set(fields["bad"])
        for digest in bad:
            _check_ours(store, digest, name)
        todo, packed = [item for item in todo if item[0] in bad], {}
        if todo and attempt == 1:
            session.emit(Note(host, f"{len(todo)} objects were damaged on the way, sending them again", "warn"))
    else:
        if todo:
            causes = tuple(name(digest) for digest, _size in todo[:10])
            raise IntegrityFailure(f"objects are damaged on the way to `{host}`", mend="try another network path to it", causes=causes)
    return Sent(fields["objects"], fields["bytes"], wire) if need else Sent()


def _stream(session: Session, store: Store, todo: Sequence[tuple[str, int]], packed: Mapping[str, int]) -> int:
    """Stream the objects; return the bytes that went over the wire."""
    total = sum(size for _digest, size in todo)
    sizes = dict(todo)
    done = wire = 0

    def moved(count: int) -> None:
        nonlocal wire
        wire += count
        session.emit(Progress(session.host.name, "send", min(total, done + wire), total))

    trial, rest = _trial(todo) if packed else (list(todo), [])
    begun = time.monotonic()
    session.send_objects(trial, lambda item: store.open_object(item[0]), moved)
    rate = wire / max(time.monotonic() - begun, 1e-6)
    if rate > SLOW_BYTES_PER_SECOND:
        packed = {}
    if rest:
        session.emit(Note(session.host.name, f"the link takes {rate / 1e6:.0f} MB/s: {'compressed' if packed else 'raw'} objects", "debug"))
        opened = store.open_packed if packed else store.open_object
        session.send_objects(rest, lambda item: (opened if item[0] in packed else store.open_object)(item[0]), moved, packed)
        done = sum(sizes[digest] - packed[digest] for digest, _size in rest if digest in packed)
        moved(0)
    return wire


def _trial(todo: Sequence[tuple[str, int]]) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Split off objects to judge the link by: about `TRIAL_BYTES`, none of them huge."""
    trial: list[tuple[str, int]] = []
    rest: list[tuple[str, int]] = []
    total = 0
    for item in todo:
        if item[1] <= TRIAL_BYTES // 2 and total < TRIAL_BYTES:
            trial.append(item)
            total += item[1]
        else:
            rest.append(item)
    return trial, rest


def _check_ours(store: Store, digest: str, name: Callable[[str], str]) -> None:
    """Raise IntegrityFailure, with the file's name, when it is our own object that is damaged."""
    try:
        store.check(digest)
    except IntegrityFailure as error:
        raise IntegrityFailure(error.message, mend=error.mend, causes=(name(digest),)) from error
