"""Say what a push replaces: which distributions of the target go, and whose files make the new tree. Pure.

`plan` applies these rules to every file, `abi.compose` to the shared objects, so that what the oracle judges is what a
push makes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

CUDA_SUFFIX = re.compile(r"-cu\d+$")
#: Directories that many distributions share: a file there belongs to nobody but its RECORD.
COMMON = frozenset(
    ["nvidia", "cuda", "lib", "lib64", "include", "bin", "share", "tests", "test", "docs", "doc", "examples", "scripts", "benchmarks"]
)


class Part(NamedTuple):
    """A distribution as its replacement sees it: normalised name, how people know it, import packages, shared objects.

    A package is that of the first that lists it (the others of a namespace are no rivals), a shared object that of all who do.
    """

    key: str
    shown: str
    packages: frozenset[str]
    objects: frozenset[str]


class Gone(NamedTuple):
    """Why a distribution of the target goes, and the key of the moved one that makes it go."""

    why: str
    by: str


@dataclass(frozen=True, slots=True)
class Replacement:
    """What moves (indexes of the source), what goes (indexes of the target), and the import packages of both.

    `whole`: everything of the source moves, what no RECORD names included. Owners are indexes, -1 for nobody; a path that
    several distributions name comes or stays when it does for one of them.
    """

    moved: frozenset[int]
    gone: Mapping[int, Gone]
    arriving: frozenset[str]
    leaving: frozenset[str]
    whole: bool = False

    def comes(self, path: str, owner: int) -> bool:
        """Tell whether a file of the source moves: owned by what moves, or a stray inside one of its packages."""
        return owner in self.moved if owner >= 0 else self.whole or path.partition("/")[0] in self.arriving

    def stays(self, path: str, owner: int) -> bool:
        """Tell whether a file of the target stays, as long as nothing that comes takes its place."""
        return owner not in self.gone if owner >= 0 else "/" not in path or path.partition("/")[0] not in self.leaving


def replacement(source: Sequence[Part], target: Sequence[Part], moved: Collection[int], whole: bool = False) -> Replacement:
    """Decide what of `target` goes when the distributions `moved` of `source` come.

    A distribution goes when it has the same name, is the same library for another CUDA (`nvidia-cudnn-cu12` for
    `nvidia-cudnn-cu13`), or owns an import package or a shared object that comes under another name (`sgl-kernel` for
    `sglang-kernel`).
    """
    coming = [source[index] for index in sorted(moved)]
    rivals: dict[str, dict[str, Part]] = {"key": {}, "base": {}, "package": {}, "object": {}}
    for part in coming:
        rivals["key"].setdefault(part.key, part)
        if part.key.startswith("nvidia-"):
            rivals["base"].setdefault(CUDA_SUFFIX.sub("", part.key), part)
        rivals["package"].update(dict.fromkeys(part.packages - COMMON, part))
        rivals["object"].update(dict.fromkeys(part.objects, part))
    gone = {index: found for index, part in enumerate(target) for found in [_displaced(part, rivals)] if found}
    arriving = frozenset().union(*(part.packages for part in coming)) - COMMON
    leaving = arriving.union(*(target[index].packages - COMMON for index in gone))
    return Replacement(frozenset(moved), gone, arriving, leaving, whole)


def _displaced(part: Part, rivals: Mapping[str, Mapping[str, Part]]) -> Gone | None:
    if part.key in rivals["key"]:
        return Gone(f"replaced by {rivals['key'][part.key].shown}", part.key)
    sibling = rivals["base"].get(CUDA_SUFFIX.sub("", part.key))
    if sibling is not None:
        return Gone(f"the same library as {sibling.shown}, for another CUDA", sibling.key)
    for kind, names in (("package", part.packages), ("object", part.objects)):
        shared = min(names & rivals[kind].keys(), default=None)
        if shared is not None:
            rival = rivals[kind][shared]
            return Gone(f"owns `{shared}`, which {rival.shown} brings", rival.key)
    return None


def objects(paths: Iterable[str]) -> frozenset[str]:
    """Return the shared objects among paths: what can have one owner only."""
    return frozenset(path for path in paths for name in [path.rpartition("/")[2]] if name.endswith(".so") or ".so." in name)


def below(path: str, places: Collection[str]) -> bool:
    """Tell whether one of `places` (a set) is a parent of `path`; the time depends on its depth, not on how many places there are."""
    at = path.rfind("/")
    while at > 0:
        if path[:at] in places:
            return True
        at = path.rfind("/", 0, at)
    return False
