"""Which files share a layer. Pure: a snapshot in, groups out, and the same distribution always makes the same layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from ddtree_deploy.agent import scripts
from ddtree_deploy.models import PATCHED, Distribution, FileEntry, Manifest
from ddtree_deploy.plan import chosen, travels

#: A distribution of this many bytes gets a layer of its own: registries and nodes then store and fetch it once.
OWN_LAYER = 32 << 20
#: overlayfs takes about 128 lower directories, and a base brings its own.
MOST_LAYERS = 80
REST = "rest"


@dataclass(frozen=True, slots=True)
class Group:
    """The files of one layer, sorted by path; `scripts` are its console scripts (`name`, text)."""

    name: str
    distributions: tuple[str, ...]
    files: tuple[FileEntry, ...]
    scripts: tuple[tuple[str, bytes], ...] = ()

    @property
    def bytes(self) -> int:
        return sum(entry.size for entry in self.files) + sum(len(text) for _name, text in self.scripts)


def groups(manifest: Manifest, only: Sequence[str] = ()) -> tuple[Group, ...]:
    """Divide a snapshot, or the distributions `only` names, into layers: large ones by name, the rest, patched ones by name.

    A node that unpacks images shares a layer only when all below it are equal too, so what changes most comes last.
    What nobody owns goes with the rest. Raises UsageProblem for a name that the snapshot does not have.
    """
    moved = chosen(manifest.distributions, only) if only else frozenset(d.name for d in manifest.distributions)
    held: dict[int, list[FileEntry]] = {index: [] for index, dist in enumerate(manifest.distributions) if dist.name in moved}
    packages = {name for index in held for name in manifest.distributions[index].packages}
    loose = []
    for entry in manifest.files:
        if entry.owner in held:
            held[entry.owner].append(entry)
        elif entry.owner < 0 and (not only or travels(entry, packages)):
            loose.append(entry)
    weights = {index: sum(entry.size for entry in files) for index, files in held.items()}
    patched = {index for index, files in held.items() if any(entry.origin == PATCHED for entry in files)}
    # A tie is broken by name, so that the order in which distributions were found does not count.
    order = sorted(held, key=lambda index: (-weights[index], manifest.distributions[index].name))
    alone = set([index for index in order if weights[index] >= OWN_LAYER or index in patched][:MOST_LAYERS])

    def group(index: int) -> Group:
        dist = manifest.distributions[index]
        return Group(dist.name, (f"{dist.name} {dist.shown_version}",), tuple(sorted(held[index])))

    shared = sorted((index for index in held if index not in alone), key=lambda index: manifest.distributions[index].name)
    rest = Group(
        REST,
        tuple(f"{manifest.distributions[index].name} {manifest.distributions[index].shown_version}" for index in shared),
        tuple(sorted([*loose, *(entry for index in shared for entry in held[index])])),
        _scripts([manifest.distributions[index] for index in held], interpreter(manifest)),
    )
    by_name = sorted((group(index) for index in alone), key=lambda made: made.name)
    changed = {manifest.distributions[index].name for index in patched}
    return (
        *(made for made in by_name if made.name not in changed),
        *([rest] if rest.files or rest.scripts else []),
        *(made for made in by_name if made.name in changed),
    )


def interpreter(manifest: Manifest) -> str:
    """Return the name of the interpreter that a snapshot is for: `python3.12`, `python3.14t`."""
    return "python" + ".".join(manifest.python.version.split(".")[:2]) + ("t" if manifest.python.free_threaded else "")


def _scripts(distributions: Sequence[Distribution], python: str) -> tuple[tuple[str, bytes], ...]:
    """Return console scripts that find the interpreter by PATH; of two with one name the last distribution's, by name."""
    made: dict[str, bytes] = {}
    for dist in sorted(distributions, key=lambda dist: dist.name):
        for name, target in dist.scripts:
            text = scripts.text_of(dist.name, target, python)
            if text is not None and PurePosixPath(name).name == name:
                made[name] = f"#!/usr/bin/env {python}\n{text.partition(chr(10))[2]}".encode()
    return tuple(sorted(made.items()))
