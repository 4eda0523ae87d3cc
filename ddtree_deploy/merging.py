"""Lay what moves over a target's tree, by the rules of `composition`: the files that result, and what the target loses by it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from packaging.utils import canonicalize_name

from ddtree_deploy.agent.paths import parents
from ddtree_deploy.composition import Part, below, objects, replacement
from ddtree_deploy.models import Check, Distribution, FileEntry, Inventory, Manifest


@dataclass(frozen=True, slots=True)
class Merged:
    """The tree that results, why each distribution of the target goes that does, and the checks that speak of what stays."""

    distributions: tuple[Distribution, ...]
    files: tuple[FileEntry, ...]
    replaced: Mapping[str, str]
    checks: tuple[Check, ...]


def merge(snapshot: Manifest, target: Inventory, moved: Collection[str], *, whole: bool) -> Merged:
    """Lay out the tree that would result, and renumber the owners.

    A file that several distributions list comes when one of them does, and stays when one of them does.
    """
    incoming = [index for index, dist in enumerate(snapshot.distributions) if dist.name in moved]
    rules = replacement(_parts(snapshot.distributions, snapshot.files), _parts(target.distributions, target.files), incoming, whole)
    brought = held(snapshot.files, snapshot.distributions, rules.comes)
    staying = held(target.files, target.distributions, rules.stays)
    coming = {entry.path: entry for entry in brought}
    # Where one tree has a file and the other a directory, what comes has the place.
    directories = parents(coming)
    files = coming.keys() & parents(entry.path for entry in staying)
    kept = [entry for entry in staying if entry.path not in directories and not (files and below(entry.path, files))]
    left = [index for index in range(len(target.distributions)) if index not in rules.gone]
    sides = (
        (target.distributions, kept, {-1: -1} | {old: new for new, old in enumerate(left)}),
        (snapshot.distributions, brought, {-1: -1} | {old: len(left) + new for new, old in enumerate(incoming)}),
    )
    result: dict[str, FileEntry] = {}
    for _dists, entries, number in sides:
        result.update((entry.path, _owned_by(entry, number[entry.owner])) for entry in entries)
    distributions = (*(target.distributions[index] for index in left), *(snapshot.distributions[index] for index in incoming))
    return Merged(
        _sharing(distributions, result, sides),
        tuple(sorted(result.values())),
        {target.distributions[index].name: found.why for index, found in rules.gone.items()},
        _clashes(target, snapshot.distributions, staying, coming, result.keys()),
    )


def sharers(distributions: Sequence[Distribution]) -> dict[str, list[int]]:
    """Return the distributions, by index, that list a path which belongs to another."""
    out: dict[str, list[int]] = {}
    for index, dist in enumerate(distributions):
        for path in dist.shares:
            out.setdefault(path, []).append(index)
    return out


def held(files: Iterable[FileEntry], distributions: Sequence[Distribution], holds: Callable[[str, int], bool]) -> list[FileEntry]:
    """Return the files for which `holds(path, owner)`; a shared one goes to the next of its owners when it does not for the first."""
    others = sharers(distributions)
    out = []
    for entry in files:
        if holds(entry.path, entry.owner):
            out.append(entry)
        elif entry.path in others:
            out += [_owned_by(entry, owner) for owner in others[entry.path] if holds(entry.path, owner)][:1]
    return out


def _parts(distributions: Sequence[Distribution], files: Sequence[FileEntry]) -> list[Part]:
    paths: dict[int, list[str]] = {}
    for entry in files:
        paths.setdefault(entry.owner, []).append(entry.path)
    return [
        Part(
            canonicalize_name(dist.name), f"{dist.name} {dist.shown_version}", frozenset(dist.packages),
            objects((*paths.get(index, ()), *dist.shares)),
        )
        for index, dist in enumerate(distributions)
    ]  # fmt: skip


def _owned_by(entry: FileEntry, owner: int) -> FileEntry:
    # Not `_replace`, which takes five times as long, for each file of a tree.
    return entry if entry.owner == owner else FileEntry(*entry[:-1], owner)


def _sharing(
    distributions: Sequence[Distribution],
    result: Mapping[str, FileEntry],
    sides: Sequence[tuple[Sequence[Distribution], Sequence[FileEntry], Mapping[int, int]]],
) -> tuple[Distribution, ...]:
    """Return the distributions with what each of them shares in the result, also with one that came over it."""
    shares: dict[int, set[str]] = {}
    for dists, entries, number in sides:
        claims = [(number[index], path) for index, dist in enumerate(dists) if index in number for path in dist.shares]
        claims += [(number[entry.owner], entry.path) for entry in entries if result[entry.path].owner != number[entry.owner]]
        for index, path in claims:
            if index >= 0 and path in result and result[path].owner != index:
                shares.setdefault(index, set()).add(path)
    return tuple(
        dist if not dist.shares and index not in shares else replace(dist, shares=tuple(sorted(shares.get(index, ()))))
        for index, dist in enumerate(distributions)
    )


def _clashes(
    target: Inventory, ours: Sequence[Distribution], staying: Sequence[FileEntry], coming: Mapping[str, FileEntry], result: Collection[str]
) -> tuple[Check, ...]:
    """Say what distributions that stay lose to what comes: files without a place (block), files with another content (warn)."""
    lost: dict[int, list[str]] = {}
    changed: list[str] = []
    for entry in staying:
        rival = coming.get(entry.path)
        if entry.path not in result:
            lost.setdefault(entry.owner, []).append(entry.path)
        elif rival is not None and entry.owner >= 0 and (rival.kind, rival.digest) != (entry.kind, entry.digest):
            changed.append(f"`{entry.path}` of {_shown(target.distributions, entry.owner)}, by {_shown(ours, rival.owner)}")
    out = []
    for owner, paths in lost.items():
        rival = next(coming[path] for path in sorted(coming) if below(path, {paths[0]}) or below(paths[0], {path}))
        who, by = _shown(target.distributions, owner), _shown(ours, rival.owner)
        place = f"`{paths[0]}` and `{rival.path}` can not both be there: {by} brings the second"
        if owner < 0:
            text = f"{len(paths)} of the files that nobody owns would go: {place}"
            out.append(Check("K8-place", "warn", text, tuple(paths[:20]), "they stay in the generation before"))
        else:
            mend = f"uninstall {target.distributions[owner].name} there, or take it along if the snapshot has it (`--with`)"
            text = f"{who}, which stays, would lose {len(paths)} of its files: {place}"
            out.append(Check("K8-place", "block", text, tuple(paths[:20]), mend))
    if changed:
        text = f"{len(changed)} of the files of distributions that stay are overwritten with another content"
        out.append(Check("K8-place", "warn", text, tuple(changed[:20])))
    return tuple(out)


def _shown(distributions: Sequence[Distribution], owner: int) -> str:
    return f"{distributions[owner].name} {distributions[owner].shown_version}" if owner >= 0 else "the snapshot"
