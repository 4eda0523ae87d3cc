"""The verdict: every check K1-K16 over a case, what was allowed, the tags, and the smallest set that would work."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ddtree_deploy.abi import rules_cuda, rules_host, rules_link, rules_tree, tags
from ddtree_deploy.abi.case import BLOCK, NOTE, WARN, Case, Evidence, make_case
from ddtree_deploy.abi.closure import closure
from ddtree_deploy.abi.compose import compose
from ddtree_deploy.abi.model import Site
from ddtree_deploy.abi.solver import Solution, solve
from ddtree_deploy.models import Check

TITLES = {
    "K1": "link closure", "K2": "one CUDA major", "K3": "torch ABI", "K4": "GPU architectures", "K5": "driver",
    "K6": "glibc and libstdc++", "K7": "interpreter", "K8": "RECORD", "K9": "metadata", "K10": "paths",
    "K11": "byte code", "K12": "file system", "K13": "transfer", "K14": "in use", "K15": "environment",
    "K16": "JIT caches",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Allowance:
    """A block that the user takes on: `--allow CHECK:WHAT --reason "..."`. `what` is a name, a glob, or a stem."""

    check: str
    what: str
    reason: str = ""

    @classmethod
    def parse(cls, text: str, reason: str = "") -> Allowance:
        """Read `K4:flash_ops`; raise ValueError for anything that is not a check, a colon and a name."""
        check, colon, what = text.partition(":")
        if check.upper() not in TITLES or not colon or not what:
            raise ValueError(f"`{text}` is not CHECK:WHAT with a check from K1 to K16")
        return cls(check.upper(), what, reason)

    def covers(self, item: Evidence) -> bool:
        if item.check != self.check:
            return False
        # What is wrong stands before the semicolon; who provides it, after it, is not what is allowed.
        wrong = item.text.partition(";")[0]
        names = {item.what, *re.findall(r"`([^`]+)`", wrong), *re.findall(r"\(([\w.-]+) ", wrong)}
        stems = {name.rsplit("/", 1)[-1].split(".")[0] for name in names if "/" in name}
        return self.what in stems or any(fnmatch.fnmatchcase(name, self.what) for name in names)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the oracle says: evidence per check, tags, what moves, what goes, what was allowed, and the smallest set.

    `moved` are normalised names; `removed` are `(name, version, why)` of the target's distributions whose files must
    go; `broken` are the distributions of the target that nobody moves and that would not work afterwards; `allowed` are
    `(check, what, reason)` that were used.
    """

    target: str
    moved: tuple[str, ...]
    removed: tuple[tuple[str, str, str], ...]
    evidence: tuple[Evidence, ...]
    tags: tuple[tags.TagRow, ...] = ()
    allowed: tuple[tuple[str, str, str], ...] = ()
    solution: Solution | None = None
    broken: tuple[str, ...] = ()

    def level(self, check: str) -> str:
        levels = {item.level for item in self.evidence if item.check == check}
        return BLOCK if BLOCK in levels else WARN if WARN in levels else "ok"

    @property
    def ok(self) -> bool:
        return all(item.level != BLOCK for item in self.evidence)

    @property
    def blocks(self) -> tuple[Evidence, ...]:
        return tuple(item for item in self.evidence if item.level == BLOCK)

    @property
    def checks(self) -> tuple[Check, ...]:
        """Return one row per check K1-K16, for a plan and for `diff`."""
        out = []
        for check, title in TITLES.items():
            items = sorted((e for e in self.evidence if e.check == check), key=lambda e: ((BLOCK, WARN, NOTE).index(e.level), e))
            mend = next((e.mend for e in items if e.mend), "")
            out.append(Check(check, self.level(check), title, tuple(e.text for e in items), mend))
        return tuple(out)


def gather(case: Case, needed_bytes: int = 0) -> tuple[Evidence, ...]:
    """Run every rule over a case."""
    found: list[Evidence] = []
    for rule in (
        rules_link.link, rules_link.baseline_note, rules_link.torch_abi, rules_cuda.cuda_major,
        rules_cuda.architectures, rules_cuda.driver, rules_tree.python, rules_tree.record, rules_tree.metadata,
        rules_tree.paths, rules_host.bytecode, rules_host.transfer, rules_host.in_use, rules_host.environment,
        rules_host.jit,
    ):  # fmt: skip
        found += rule(case)
    found += rules_host.filesystem(case, needed_bytes)
    return tuple(dict.fromkeys(sorted(found)))


def judge(
    source: Site,
    target: Site,
    moved: Collection[str],
    allow: Iterable[Allowance] = (),
    needed_bytes: int = 0,
    solve_set: bool = True,
    whole: bool = False,
) -> Verdict:
    """Judge pushing the distributions `moved` (normalised names) of `source` onto `target`; with `whole`, all of it.

    With `solve_set`, a verdict that blocks also carries the smallest set that would not. `needed_bytes` is what the new
    generation takes on the target's disk, when it is known.
    """
    case = make_case(source, target, moved, whole=whole)
    evidence = gather(case, needed_bytes)
    solution = None
    if solve_set and any(item.level == BLOCK for item in evidence):
        solution = solve(source, target, moved, case.before, case.now)
    evidence, allowed = _apply(evidence, tuple(allow))
    removed = tuple(sorted((item.dist.name, item.dist.version, item.why) for item in case.composition.removed))
    return Verdict(
        target.name,
        tuple(sorted(dist.key for dist in case.composition.moved)),
        removed,
        evidence,
        tags.table(source, target, case.result),
        allowed,
        solution,
        _broken(case),
    )


def _broken(case: Case) -> tuple[str, ...]:
    """Name the distributions that stay on the target and lose a library, a symbol, or a version that they insist on."""
    here = {dist.key: dist for dist in case.result.tree.dists}
    moved = {dist.key for dist in case.composition.moved}
    lost = {dist.key for miss in case.fresh if not case.from_source(miss.by) for dist in [case.composition.dist(miss.by)] if dist}
    lost |= {item.dist for item in rules_tree.new_unmet(case) if item.exact and item.dist not in moved}
    return tuple(sorted(here[key].shown for key in lost if key in here))


def _apply(evidence: tuple[Evidence, ...], allow: tuple[Allowance, ...]) -> tuple[tuple[Evidence, ...], tuple[tuple[str, str, str], ...]]:
    """Lower what is allowed to a warning; return the evidence and the allowances that were used."""
    out: list[Evidence] = []
    used: dict[tuple[str, str, str], None] = {}
    for item in evidence:
        cover = next((rule for rule in allow if item.level == BLOCK and rule.covers(item)), None)
        if cover is not None:
            used[(cover.check, cover.what, cover.reason)] = None
            item = Evidence(item.check, WARN, item.what, f"{item.text} (allowed: {cover.reason or 'no reason given'})", item.mend)
        out.append(item)
    return tuple(out), tuple(used)


def inspect(site: Site) -> Verdict:
    """Judge an environment as it stands (`verify --level link`, `doctor`): absolute, since there is no baseline.

    What the loader misses is a warning (clean trees have some: MPI, InfiniBand), unless `import torch` itself fails; a
    tree that was merged by hand, mixed CUDA majors, and metadata that lies are blocks.
    """
    known = closure(site)
    case = Case(site, site, compose(site, site, ()), known, known)
    found: list[Evidence] = []
    found += rules_link.missing(case, sorted(set(known.torch)), BLOCK)
    found += rules_link.missing(case, sorted(known.misses.difference(known.torch)), WARN)
    found += rules_cuda.one_a_distribution(site, rules_cuda.mixed(site))
    found += rules_tree.merged(site)
    found += (
        Evidence("K10", WARN, path, f"{shown}, outside of the tree: a snapshot does not carry it, a push would leave it out{more}")
        for path, shown, more in rules_tree.links_out(site.tree, lambda _path, _owner: True)
    )
    found += rules_tree.disagreements(site)
    for dist in site.tree.dists:
        found += rules_tree.incomplete(dist, site.name, BLOCK)
    for rule in (rules_cuda.driver, rules_host.environment, rules_host.in_use):
        found += rule(case)
    found += rules_host.stale(site, site.tree, False)
    found += rules_host.filesystem(case)
    evidence = tuple(dict.fromkeys(sorted(found)))
    return Verdict(site.name, (), (), evidence, tags.table(site, site, site))
