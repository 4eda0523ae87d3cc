"""Ask the ABI oracle about a push: gather the target's facts, recall the source's, judge what would move; and choose it."""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from packaging.utils import canonicalize_name

from ddtree_deploy import abi
from ddtree_deploy.agent import durable
from ddtree_deploy.errors import IntegrityFailure
from ddtree_deploy.events import Note, Step
from ddtree_deploy.models import Check, FileEntry, Manifest
from ddtree_deploy.session import Session
from ddtree_deploy.store import Store

_MATTERS = re.compile(r"\.so[^/]*\Z|\.dist-info/METADATA\Z|torch/(?:__init__|version)\.py\Z|\.pth\Z")


@dataclass(frozen=True, slots=True)
class Choice:
    """What moves: distribution names as the snapshot spells them (None: the whole snapshot).

    `why` says of each addition which chain of needs brought it in. `verdict` is None when there was nothing to judge by.
    """

    names: tuple[str, ...] | None
    why: Mapping[str, str]
    verdict: abi.Verdict | None


@contextmanager
def _facts_of(name: str) -> Iterator[None]:
    """Turn what malformed facts do to the code that reads them into IntegrityFailure: they came from a host."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, zlib.error) as error:
        message = f"the facts about the shared objects of `{name}` are malformed"
        raise IntegrityFailure(message, causes=(f"{type(error).__name__}: {error}",)) from error


def remember(session: Session, store: Store, snapshot_id: str) -> None:
    """Keep the source's ABI facts beside a snapshot (they are no part of its identity)."""
    path = store.root / "abi" / f"{snapshot_id}.json.z"
    if path.exists():
        return
    session.emit(Step(session.host.name, "read the shared objects"))
    facts = session.ask("abi", venv=session.host.venv, env=dict(session.host.service_env)).value
    path.parent.mkdir(exist_ok=True)
    durable.write_file(str(path), zlib.compress(json.dumps(facts, separators=(",", ":")).encode(), 3))


def recall(store: Store, snapshot_id: str) -> abi.Site | None:
    """Return the source's side of the oracle, or None when the snapshot has no ABI facts."""
    try:
        data = (store.root / "abi" / f"{snapshot_id}.json.z").read_bytes()
    except FileNotFoundError:
        return None
    with _facts_of(f"snapshot {snapshot_id[:7]}"):
        return abi.load(json.loads(zlib.decompress(data)), f"snapshot {snapshot_id[:7]}")


def target_site(session: Session, sonames: Sequence[str] = ()) -> abi.Site:
    """Return the target's side: its tree, its system libraries, its driver and GPUs, as they are now."""
    session.emit(Step(session.host.name, "read the shared objects"))
    facts = session.ask("abi", list(sonames), venv=session.host.venv, env=dict(session.host.service_env)).value
    with _facts_of(session.host.name):
        return abi.load(facts, session.host.name)


def choose(
    session: Session,
    store: Store,
    snapshot_id: str,
    snapshot: Manifest,
    *,
    only: Collection[str],
    also: Collection[str],
    roots: Collection[str],
    allow: Sequence[abi.Allowance],
    empty_target: bool,
) -> Choice:
    """Decide what moves and judge it.

    `only` are names that the user gave. Without them: the profile's `roots` that the snapshot holds and `also`, plus what must move
    with them; a snapshot that holds none of the roots, or a target that holds nothing, takes the whole.
    """
    source = recall(store, snapshot_id)
    asked = _keys(only) if only else _keys(d.name for d in snapshot.distributions if {*d.packages, d.name} & set(roots)) | _keys(also)
    everything = _keys(d.name for d in snapshot.distributions)
    if source is None:
        if any(entry.path.rpartition("/")[2].count(".so") for entry in snapshot.files):
            session.emit(Note(session.host.name, "the snapshot has no ABI facts: take it again to have the push judged", "warn"))
        return Choice(tuple(sorted(only)) or None, {}, None)
    with _facts_of(f"snapshot {snapshot_id[:7]}"):
        sonames = abi.wanted([source])
    target = target_site(session, sonames)
    whole = not only and (not asked or empty_target)
    why: dict[str, str] = {}
    if whole:
        asked = everything
    elif not only:
        with _facts_of(session.host.name):
            solution = abi.smallest_set(source, target, asked)
        why = {step.name: step.text for step in solution.steps}
        asked |= set(solution.names)
    with _facts_of(session.host.name):
        verdict = abi.judge(source, target, asked, allow, whole=whole)
    spelled = {_key(d.name): d.name for d in snapshot.distributions}
    names = None if whole else tuple(sorted(spelled[key] for key in asked if key in spelled))
    return Choice(names, {spelled.get(key, key): text for key, text in why.items()}, verdict)


def _key(name: str) -> str:
    return str(canonicalize_name(name))


def _keys(names: Collection[str] | Any) -> set[str]:
    return {_key(name) for name in names}


def shape(files: Sequence[FileEntry]) -> str:
    """Return a digest over what the oracle looks at in a tree: shared objects, metadata, torch's preload list.

    Two trees of one shape on one host have one verdict, so a push that only changes other files need not be judged again.
    """
    rows = [[e.path, e.digest] for e in files if _MATTERS.search(e.path)]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def unchanged(generation: int) -> tuple[Check, ...]:
    """Return the row that stands for a verdict that was given when `generation` was pushed."""
    return (Check("K1", "ok", f"no shared object and no metadata changes: judged when generation {generation} was pushed"),)


def tree_checks(session: Session) -> tuple[Check, ...]:
    """Judge the live tree as it stands (`verify --level link`, `doctor`)."""
    site = target_site(session)
    with _facts_of(session.host.name):
        verdict = abi.inspect(site)
    # What is broken first, and of that whether the tree was merged by hand, which explains the rest.
    found = sorted((check for check in verdict.checks if check.level != "ok"), key=lambda c: (c.level != "block", c.id != "K8"))
    return tuple(found) or (Check("link", "ok", "every shared object finds what it needs, and the tree is of one piece"),)


def gpu_checks(session: Session) -> tuple[Check, ...]:
    """Run one tiny operation per extension on every GPU (`verify --level gpu`); a host without GPUs skips it, and says so."""
    answer = session.ask("gpu", venv=session.host.venv, env=dict(session.host.service_env), patience=900.0).value
    with _facts_of(session.host.name):
        return abi.gpu_checks(answer)
