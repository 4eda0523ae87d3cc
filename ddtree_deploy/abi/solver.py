"""The smallest set of distributions that must move together, and the chain of reasons for each."""

from __future__ import annotations

import fnmatch
import shlex
from collections.abc import Collection
from dataclasses import dataclass

from packaging.utils import canonicalize_name

from ddtree_deploy.abi.case import BLOCK, Case, make_case, plain
from ddtree_deploy.abi.closure import LIBRARY, SYMBOL, Closure, Miss, closure
from ddtree_deploy.abi.model import Dist, Site
from ddtree_deploy.abi.rules_cuda import mixed
from ddtree_deploy.abi.rules_tree import new_unmet
from ddtree_deploy.composition import CUDA_SUFFIX

MAX_ROUNDS = 24
FAMILY = 3  # so many names with one beginning, and no other on the source, are said as `nvidia*`


@dataclass(frozen=True, slots=True, order=True)
class Step:
    """A distribution that must move too, because of `asker`, which is in the set; `why` is said of the asker."""

    name: str
    version: str
    asker: str
    why: str

    @property
    def text(self) -> str:
        return f"{self.name} {self.version} <- {self.asker} {self.why}"


@dataclass(frozen=True, slots=True)
class Solution:
    """The set: what was asked for, what is added and why, and what no move can mend.

    `names` is everything that moves, sorted; `spelled` the same as `--only` may say it. `unsolved` are sentences; the set
    is consistent when there are none.
    """

    asked: tuple[str, ...]
    steps: tuple[Step, ...]
    unsolved: tuple[str, ...]
    spelled: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted({*self.asked, *(step.name for step in self.steps)}))

    @property
    def consistent(self) -> bool:
        return not self.unsolved

    def chain(self, name: str) -> tuple[Step, ...]:
        """Return why `name` moves, from it back to something that was asked for."""
        by_name = {step.name: step for step in self.steps}
        out: list[Step] = []
        while name in by_name and by_name[name] not in out:
            out.append(by_name[name])
            name = by_name[name].asker
        return tuple(out)

    def command(self, target: str, *options: str) -> str:
        """Return the one command that pushes the set; `options` say what else was meant (`--venv`, `--snapshot`)."""
        only = (f"--only {shlex.quote(name)}" for name in self.spelled or self.names)
        return " ".join(["ddtree-deploy push", target, *options, *only])


def roots(source: Site, names: Collection[str]) -> tuple[str, ...]:
    """Return the keys of the source's distributions that `names` mean: by name, import package, or a pattern of names.

    Names that mean nothing are left out: a profile lists what a snapshot may hold.
    """
    wanted = {str(canonicalize_name(name)) for name in names}
    packages = {f"{name}/__init__.py" for name in names}
    return tuple(
        sorted(
            dist.key
            for dist in source.tree.dists
            if any(fnmatch.fnmatchcase(dist.key, pattern) for pattern in wanted) or packages & dist.owns
        )
    )


def spell(names: Collection[str], everything: Collection[str]) -> tuple[str, ...]:
    """Return names sorted, families that are in whole said by their beginning: `nvidia*`."""
    families = {name.partition("-")[0] for name in names}
    whole = {family for family in families for all_ in [[n for n in everything if n.startswith(family)]]
             if len(all_) >= FAMILY and set(all_) <= set(names)}  # fmt: skip
    return tuple(sorted({f"{family}*" if family in whole else name for name in names for family in [name.partition("-")[0]]}))


def smallest_set(source: Site, target: Site, asked: Collection[str]) -> Solution:
    """Return the smallest superset of `asked` that leaves nothing newly unresolved on `target`."""
    return solve(source, target, asked, closure(source), closure(target))


def solve(source: Site, target: Site, asked: Collection[str], before: Closure, now: Closure) -> Solution:
    """As `smallest_set`, with both closures at hand.

    Each round adds what the misses of the round before force: the provider on the source of what a moved file needs,
    the source's version of what an unmoved file lost. Then each addition is tried without: what is not needed in the
    end goes.
    """
    have = {dist.key for dist in source.tree.dists}
    start = frozenset(asked) & have
    steps: dict[str, Step] = {}
    for _ in range(MAX_ROUNDS):
        case = make_case(source, target, start | steps.keys(), before, now)
        before_round = len(steps)
        for step in _forced(case)[0]:
            if step.name not in start:
                steps.setdefault(step.name, step)
        if len(steps) == before_round:
            break
    steps = _prune(source, target, start, steps, before, now)
    unsolved = _forced(make_case(source, target, start | steps.keys(), before, now))[1]
    spelled = spell(start | steps.keys(), {dist.key for dist in source.tree.dists})
    return Solution(tuple(sorted(start)), tuple(steps.values()), unsolved, spelled)


def _prune(source: Site, target: Site, start: frozenset[str], steps: dict[str, Step], before: Closure, now: Closure) -> dict[str, Step]:
    """Drop additions that later ones made superfluous; requirements of what stays are never superfluous."""
    whole = _forced(make_case(source, target, start | steps.keys(), before, now))[1]
    for name in reversed(list(steps)):
        if steps[name].why.startswith("requires"):
            continue
        rest = {key: step for key, step in steps.items() if key != name}
        case = make_case(source, target, start | rest.keys(), before, now)
        forced, unsolved = _forced(case)
        if set(unsolved) <= set(whole) and not any(step.name not in start and step.name not in rest for step in forced):
            steps = rest
    return steps


def _forced(case: Case) -> tuple[list[Step], tuple[str, ...]]:
    """Return what the misses of a case force to move, and those that no move mends."""
    steps, unsolved = [], []
    for miss in case.fresh:
        step = _mend(case, miss)
        if step is not None:
            steps.append(step)
        else:
            unsolved.append(_sentence(case, miss))
    moved = {dist.key for dist in case.composition.moved}
    for item in new_unmet(case):
        provider = _by_key(case.source, item.name)
        asker = _by_key(case.source, item.dist)
        if item.dist in moved and provider is not None and item.name not in moved:
            steps.append(Step(provider.key, provider.version, item.dist, f"requires {item.requirement}"))
        elif item.dist not in moved and item.exact and asker is not None:
            steps.append(Step(asker.key, asker.version, item.name, f"changes, and {item.dist} requires {item.requirement}"))
        elif item.dist in moved or item.exact:
            unsolved.append(f"{item.dist} requires {item.requirement}, and {case.source.name} has nothing that satisfies it")
    for path, (level, _text) in mixed(case.result).items():
        # A library of the other CUDA that stayed: the source's build of the same library takes its place.
        stays = case.composition.dist(path)
        base = CUDA_SUFFIX.sub("", stays.key) if stays else ""
        sibling = next((d for d in case.source.tree.dists if base and CUDA_SUFFIX.sub("", d.key) == base), None)
        if (
            level == BLOCK
            and not case.from_source(path)
            and stays is not None
            and sibling
            and sibling.key not in moved
            and "torch" in moved
        ):
            steps.append(Step(sibling.key, sibling.version, "torch", f"is CUDA {case.result.tree.cuda}, {stays.shown} is not"))
    return steps, tuple(dict.fromkeys(unsolved))


def _mend(case: Case, miss: Miss) -> Step | None:
    moved = {dist.key for dist in case.composition.moved}
    asker = case.composition.dist(miss.by)
    name = asker.key if asker else miss.by
    what = f"`{plain(miss.item)}`" if miss.kind == SYMBOL else f"`{miss.item}`"
    found = case.provider(miss)
    if case.from_source(miss.by):
        provider = case.owner_of(*found) if found else None
        if provider is None or provider.key in moved:
            return None
        return Step(provider.key, provider.version, name, f"needs {what}")
    # A file that stays lost something: the source's own build of its distribution goes along, if there is one.
    instead = _instead(case, asker, miss.by)
    if instead is None or instead.key in moved:
        return None
    lost = case.owner_of(*found) if found else None
    removal = next((item for item in case.composition.removed if item.dist is lost), None)
    if removal is None:
        return Step(instead.key, instead.version, name, f"would no longer find {what}")
    replaced = f"replaces {removal.dist.shown}" if removal.by != removal.dist.key else f"replaces version {removal.dist.version}"
    return Step(instead.key, instead.version, removal.by, f"{replaced}, which gives {name} {what}")


def _instead(case: Case, dist: Dist | None, path: str) -> Dist | None:
    same = _by_key(case.source, dist.key) if dist else None
    return same or case.source.tree.owner(path)


def _by_key(site: Site, key: str) -> Dist | None:
    return site.tree.dist(key)


def _sentence(case: Case, miss: Miss) -> str:
    dist = case.composition.dist(miss.by)
    who = f"`{miss.by}`" + (f" of {dist.shown}" if dist else "")
    moved = "" if case.from_source(miss.by) else " (not moved)"
    thing = f"`{plain(miss.item)}`" if miss.kind == SYMBOL else f"`{miss.item}`" if miss.kind == LIBRARY else miss.item
    return f"{who}{moved} needs {thing}, which no distribution of {case.source.name} gives it"
