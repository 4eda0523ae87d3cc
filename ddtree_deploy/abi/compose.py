"""Compose the tree that would result: the target's files, minus the replaced distributions', plus the moved ones'."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ddtree_deploy.abi.model import COMMON, Dist, SharedObject, Site, Tree

SOURCE, TARGET = "source", "target"
CUDA_SUFFIX = re.compile(r"-cu\d+$")


@dataclass(frozen=True, slots=True)
class Removal:
    """A distribution of the target whose files go, why, and which moved distribution (its key) makes it go."""

    dist: Dist
    why: str
    by: str


@dataclass(frozen=True)
class Composition:
    """The resulting environment, what moved in, what went, and where each ELF file is from (`source`, `target`)."""

    result: Site
    moved: tuple[Dist, ...]
    removed: tuple[Removal, ...]
    origin: Mapping[str, str]

    def dist(self, path: str) -> Dist | None:
        """Return the distribution that owns an ELF file of the result."""
        return self.result.tree.owner(path)


def compose(source: Site, target: Site, moved: Collection[str]) -> Composition:
    """Return what would be on the target after `moved` (normalised distribution names of the source) were pushed.

    A distribution of the target goes when a moved one has its name, is the same library for another CUDA
    (`nvidia-cudnn-cu12` for `nvidia-cudnn-cu13`), or owns the same files under another name (`sgl-kernel` for
    `sglang-kernel`). Unowned files go with the package directory that they lie in.
    """
    coming = tuple(dist for dist in source.tree.dists if dist.key in moved)
    names = {dist.key: dist for dist in coming}
    claimed = {path: dist for dist in coming for path in dist.claims}
    removed = tuple(Removal(dist, *found) for dist in target.tree.dists for found in [_displaced(dist, names, claimed)] if found)
    gone = {id(item.dist) for item in removed}
    objects: dict[str, SharedObject] = {}
    origin: dict[str, str] = {}
    bare = _packages(target.tree, [item.dist for item in removed])
    for path, item in target.tree.objects.items():
        owners = target.tree.owners.get(path, ())
        stays = any(id(dist) not in gone for dist in owners) if owners else path.split("/")[0] not in bare
        if stays:
            objects[path], origin[path] = item, TARGET
    mine = _packages(source.tree, list(coming))
    for path, item in source.tree.objects.items():
        owners = source.tree.owners.get(path, ())
        if any(dist.key in names for dist in owners) or (not owners and path.split("/")[0] in mine):
            objects[path] = item.moved_to(f"{target.tree.root}/{path}")
            origin[path] = SOURCE
    kept = tuple(dist for dist in target.tree.dists if id(dist) not in gone)
    torch = source.tree.torch if "torch" in names else {} if "torch" in {r.dist.key for r in removed} else target.tree.torch
    tree = Tree(target.tree.root, dict(sorted(objects.items())), (*kept, *coming), torch, _rest(source, target, coming, removed))
    result = Site(f"{target.name} after the push", tree, target.host, target.system)
    return Composition(result, coming, removed, origin)


def _displaced(dist: Dist, coming: Mapping[str, Dist], claimed: Mapping[str, Dist]) -> tuple[str, str] | None:
    """Return why a distribution of the target goes, and the key of the moved one that makes it go."""
    if dist.key in coming:
        return f"replaced by {coming[dist.key].shown}", dist.key
    base = CUDA_SUFFIX.sub("", dist.key)
    for other in coming.values() if base.startswith("nvidia-") else ():
        if CUDA_SUFFIX.sub("", other.key) == base:
            return f"the same library as {other.shown}, for another CUDA", other.key
    rival = next((claimed[path] for path in sorted(dist.claims) if path in claimed), None)
    return (f"owns the same files as {rival.shown}", rival.key) if rival else None


def _packages(tree: Tree, dists: list[Dist]) -> frozenset[str]:
    """Return the top-level directories that belong to these distributions and to no other."""
    names = {id(dist) for dist in dists}
    mine: set[str] = set()
    others: set[str] = set()
    for dist in tree.dists:
        (mine if id(dist) in names else others).update(dist.tops)
    return frozenset(mine - others - COMMON)


def _rest(source: Site, target: Site, coming: tuple[Dist, ...], removed: tuple[Removal, ...]) -> dict[str, Any]:
    """Return the raw facts of the result: code versions follow the distribution that owns the package."""

    def package_of(dists: tuple[Dist, ...], name: str) -> bool:
        return any(f"{name}/__init__.py" in dist.owns or f"{name}/version.py" in dist.owns for dist in dists)

    gone = tuple(item.dist for item in removed)
    versions = {name: version for name, version in (target.tree.raw.get("versions") or {}).items() if not package_of(gone, name)}
    versions |= {name: version for name, version in (source.tree.raw.get("versions") or {}).items() if package_of(coming, name)}
    return {**target.tree.raw, "versions": versions}
