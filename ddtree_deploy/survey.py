"""Look at a venv through its agent: walk it, and hash only the files that no earlier look can vouch for."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree_deploy.agent import durable
from ddtree_deploy.agent.paths import HostilePath, parse
from ddtree_deploy.errors import IntegrityFailure
from ddtree_deploy.events import Step
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.manifest import python_facts
from ddtree_deploy.models import Inventory, Manifest
from ddtree_deploy.origins import Classified, classify
from ddtree_deploy.session import Session
from ddtree_deploy.store import Store

RACY_NS = 1_000_000_000
#: Findings about entries that no manifest can hold, so that a new generation is made without them.
LEFT_BEHIND = frozenset({"outside-link", "special", "hostile-name", "changed"})


@dataclass(frozen=True, slots=True)
class Survey:
    """A venv as it is now. `fields` are the scan's plain answers, `scan` its lists; `digests` cover every regular file.

    `tree` is set instead of the lists when the host vouches that nothing was touched since a push whose result we know;
    `same` when that push was the one that is asked for now.
    """

    fields: Mapping[str, Any]
    scan: Mapping[str, Any]
    digests: Mapping[str, str | None]
    hashed: int = 0
    vouched: int = 0
    tree: Manifest | None = None

    @property
    def same(self) -> bool:
        return bool(self.fields.get("same"))

    def classified(self) -> Classified:
        if self.tree is not None:
            return Classified(self.tree.distributions, self.tree.files, ())
        return classify(self.scan, self.digests)


def key(host: Host) -> str:
    return f"{host.transport}:{host.via}:{host.address or host.name}:{host.venv}"


def survey(session: Session, store: Store, *, unless: Sequence[Any] | None = None, whole: bool = True) -> Survey:
    """Walk the host's venv and know the digest of each file: by the host's own index, by our stamps, else by reading it.

    `unless` is a push request (`[snapshot id, names]`): when the live generation was made by it and is untouched, nothing more
    is asked. With `whole=False`, a tree that we pushed ourselves is not sent again.
    """
    host = session.host
    session.emit(Step(host.name, "look at the venv"))
    knows = [] if whole else store.trees()
    reply = session.ask("scan", venv=host.venv, unless=list(unless) if unless else None, knows=knows)
    if reply.fields["same"]:
        return Survey(reply.fields, {}, {})
    if reply.value is None or "files" not in reply.value:
        if reply.value is None or reply.fields["info"].get("result") not in knows:
            raise IntegrityFailure(f"`{host.name}` left out a tree that nobody said to know")
        return Survey(reply.fields, reply.value, {}, tree=store.tree(reply.fields["info"]["result"]))
    cache = store.stat_cache(key(host))
    stamps = _load_stamps(cache)
    digests: dict[str, str | None] = {}
    unknown: list[str] = []
    size = 0
    for path, kind, _mode, length, dev, ino, mtime, ctime, _target, known in reply.value["files"]:
        if kind != "f":
            continue
        stamp = stamps.get(path)
        if known:
            digests[path] = known
        elif stamp is not None and stamp[:5] == [dev, ino, length, mtime, ctime]:
            digests[path] = stamp[5]
        elif _honest(path):
            unknown.append(path)
            size += length
    if unknown:
        session.emit(Step(host.name, f"hash {len(unknown)} files"))
        digests.update(session.ask("hash", unknown, venv=host.venv, total=size, patience=3600.0).value)
        if store.remembers:
            _remember(cache, reply.value["files"], digests, int(reply.fields["now_ns"]))
    return Survey(reply.fields, reply.value, digests, len(unknown), len(digests) - len(unknown))


def _honest(path: str) -> bool:
    """Tell whether a name may be asked for; `classify` tells of the others."""
    try:
        parse(path)
    except HostilePath:
        return False
    return True


def _remember(cache: Any, files: list[list[Any]], digests: Mapping[str, str | None], now_ns: int) -> None:
    settled: dict[str, list[Any]] = {}
    for path, kind, _mode, length, dev, ino, mtime, ctime, _target, _known in files:
        digest = digests.get(path)
        # git's racily-clean rule: a file touched just before we looked may change again within the same clock tick.
        if kind == "f" and digest and max(mtime, ctime) < now_ns - RACY_NS:
            settled[path] = [dev, ino, length, mtime, ctime, digest]
    _save_stamps(cache, settled)


def inventory(host: Host, seen: Survey) -> Inventory:
    """Return a survey of a target as the planner wants it."""
    found = seen.classified()
    space = seen.fields["space"]
    return Inventory(
        host=host.name,
        venv=seen.fields["venv"],
        site=seen.fields["site"],
        python=python_facts(seen.scan["python"]),
        generation=seen.fields["generation"],
        fingerprint=seen.fields["fingerprint"],
        distributions=found.distributions,
        files=found.files,
        free_bytes=space["free_bytes"],
        free_inodes=space["free_inodes"],
        facts={
            **seen.scan["facts"],
            "space": space,
            "writable": seen.fields["writable"],
            "left_behind": [f"{f.where} ({f.kind})" for f in found.findings if f.kind in LEFT_BEHIND],
        },
    )


def _load_stamps(path: Path) -> dict[str, list[Any]]:
    """Return `{path: [dev, ino, size, mtime_ns, ctime_ns, digest]}` of an earlier look, or nothing."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _save_stamps(path: Path, stamps: Mapping[str, list[Any]]) -> None:
    """Remember stamps for the next look; a full disk only costs a longer one."""
    try:
        path.parent.mkdir(exist_ok=True)
        durable.write_file(os.fspath(path), json.dumps(stamps, separators=(",", ":")).encode())
    except OSError:
        pass
