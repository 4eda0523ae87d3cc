"""What the rules look at: both sites, the composed result, three closures, and what in the result is new."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from ddtree_deploy.abi.closure import LIBRARY, SYMBOL, VERSION, Closure, Miss, closure
from ddtree_deploy.abi.compose import SOURCE, Composition, compose
from ddtree_deploy.abi.model import Dist, SharedObject, Site

WARN, BLOCK, NOTE = "warn", "block", "note"


@dataclass(frozen=True, slots=True, order=True)
class Evidence:
    """One thing that a check found. `what` is the file, distribution, soname, mount or variable that `--allow` can
    name.

    `level` is `block`, `warn`, or `note` (said, but it does not change the verdict).
    """

    check: str
    level: str
    what: str
    text: str
    mend: str = ""


@dataclass(frozen=True)
class Case:
    """A question: would `moved` from `source` work on `target`? `before` and `now` are their closures as they are."""

    source: Site
    target: Site
    composition: Composition
    before: Closure
    now: Closure

    @cached_property
    def after(self) -> Closure:
        return closure(self.composition.result)

    @property
    def result(self) -> Site:
        return self.composition.result

    def from_source(self, path: str) -> bool:
        return self.composition.origin.get(path) == SOURCE

    @cached_property
    def fresh(self) -> tuple[Miss, ...]:
        """What the result misses although the host that a file comes from does not: the differential verdict."""
        out = []
        for miss in sorted(self.after.misses):
            baseline = self.before if self.from_source(miss.by) else self.now
            if miss not in baseline.misses:
                out.append(miss)
        return tuple(out)

    def provider(self, miss: Miss) -> tuple[Site, SharedObject] | None:
        """Return who satisfies `miss` on the host that the file comes from."""
        site, known = (self.source, self.before) if self.from_source(miss.by) else (self.target, self.now)
        found = resolve(known, miss)
        return None if found is None else (site, found)

    def owner_of(self, site: Site, item: SharedObject) -> Dist | None:
        prefix = site.tree.root + "/"
        return site.tree.owner(item.path[len(prefix) :]) if item.path.startswith(prefix) else None


def make_case(
    source: Site, target: Site, moved: Collection[str], before: Closure | None = None, now: Closure | None = None, whole: bool = False
) -> Case:
    """Compose and wrap; pass `before` and `now` when they are known already."""
    return Case(source, target, compose(source, target, moved, whole), before or closure(source), now or closure(target))


def resolve(known: Closure, miss: Miss) -> SharedObject | None:
    """Return the object that satisfies a need in this closure, or None."""
    if known.process is None:
        return None
    process = known.process.fork()
    item = process.at.get(process.root + miss.by) or process.at.get(miss.by)
    if item is None:
        return None
    scope = process.dlopen(item).scope
    if miss.kind == LIBRARY:
        return process.names.get(miss.item)
    if miss.kind == VERSION:
        return process.names.get(miss.item.rpartition(" ")[2])
    if miss.kind == SYMBOL:
        return next((other for other in (*process.globals, *scope) if other is not item and other.offers(miss.item)), None)
    return None


def plain(symbol: str) -> str:
    """Return `c10::MessageLogger::stream` for `_ZN3c1013MessageLogger6streamB5cxx11Ev`; other names unchanged.

    Only the qualified name of the Itanium mangling is read, no arguments: enough to recognise it.
    """
    name = symbol.partition("@")[0]
    match = re.match(r"_ZN[VK]*", name)
    at = match.end() if match else 2 if name.startswith("_Z") and name[2:3].isdigit() else 0
    parts = []
    while at and (number := re.match(r"\d+", name[at:])):
        at += number.end()
        length = int(number.group())
        parts.append(name[at : at + length])
        at += length
        if not match:
            break
    return "::".join(parts) if parts else symbol
