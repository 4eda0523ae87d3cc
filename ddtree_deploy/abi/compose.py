"""Compose the tree that would result: the target's files, minus the replaced distributions', plus the moved ones'."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ddtree_deploy.abi.model import Dist, SharedObject, Site, Tree
from ddtree_deploy.agent.paths import parents
from ddtree_deploy.composition import Replacement, below, replacement

SOURCE, TARGET = "source", "target"


@dataclass(frozen=True, slots=True)
class Removal:
    """A distribution of the target whose files go, why, and which moved distribution (its key) makes it go."""

    dist: Dist
    why: str
    by: str


@dataclass(frozen=True)
class Composition:
    """The resulting environment, what moved in, what went, where each ELF file is from (`source`, `target`), the rules."""

    result: Site
    moved: tuple[Dist, ...]
    removed: tuple[Removal, ...]
    origin: Mapping[str, str]
    rules: Replacement

    def dist(self, path: str) -> Dist | None:
        """Return the distribution that owns an ELF file of the result."""
        return self.result.tree.owner(path)


def compose(source: Site, target: Site, moved: Collection[str], whole: bool = False) -> Composition:
    """Return the environment on `target` after the distributions `moved` (normalised names) of `source` are pushed.

    What goes and what comes, `ddtree_deploy.composition` decides, as for the push itself. A link out of either tree is not
    part of the result: no generation can hold one.
    """
    mine, theirs = source.tree.dists, target.tree.dists
    rules = replacement(source.tree.parts, target.tree.parts, [index for index, dist in enumerate(mine) if dist.key in moved], whole)
    brought = [
        path for path, item in source.tree.objects.items()
        if not item.raw.get("outside") and any(rules.comes(path, owner) for owner in source.tree.indexes(path))
    ]  # fmt: skip
    # What comes has the place where one tree has a file and the other a directory (of the source's strays only the ELF files are known).
    coming_paths = set(brought).union(*(mine[index].owns for index in rules.moved))
    directories = parents(coming_paths)
    objects: dict[str, SharedObject] = {}
    origin: dict[str, str] = {}
    for path, item in target.tree.objects.items():
        stays = any(rules.stays(path, owner) for owner in target.tree.indexes(path)) and not item.raw.get("outside")
        if stays and path not in directories and not below(path, coming_paths):
            objects[path], origin[path] = item, TARGET
    for path in brought:
        objects[path], origin[path] = source.tree.objects[path].moved_to(f"{target.tree.root}/{path}"), SOURCE
    coming = tuple(mine[index] for index in sorted(rules.moved))
    removed = tuple(Removal(theirs[index], found.why, found.by) for index, found in sorted(rules.gone.items()))
    kept = tuple(dist for index, dist in enumerate(theirs) if index not in rules.gone)
    names, gone = {dist.key for dist in coming}, {item.dist.key for item in removed}
    torch = source.tree.torch if "torch" in names else {} if "torch" in gone else target.tree.torch
    tree = Tree(target.tree.root, dict(sorted(objects.items())), (*kept, *coming), torch, _rest(source, target, coming, removed))
    result = Site(f"{target.name} after the push", tree, target.host, target.system)
    return Composition(result, coming, removed, origin, rules)


def _rest(source: Site, target: Site, coming: tuple[Dist, ...], removed: tuple[Removal, ...]) -> dict[str, Any]:
    """Return the raw facts of the result: code versions follow the distribution that owns the package."""

    def package_of(dists: tuple[Dist, ...], name: str) -> bool:
        return any(f"{name}/__init__.py" in dist.owns or f"{name}/version.py" in dist.owns for dist in dists)

    gone = tuple(item.dist for item in removed)
    versions = {name: version for name, version in (target.tree.raw.get("versions") or {}).items() if not package_of(gone, name)}
    versions |= {name: version for name, version in (source.tree.raw.get("versions") or {}).items() if package_of(coming, name)}
    return {**target.tree.raw, "versions": versions}
