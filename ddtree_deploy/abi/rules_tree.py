"""K7 interpreter, K8 RECORD, K9 metadata, K10 paths: what the tree says of itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from ddtree_deploy.abi.case import BLOCK, NOTE, WARN, Case, Evidence
from ddtree_deploy.abi.closure import EXTENSION
from ddtree_deploy.abi.model import Dist, Site, Tree

# A partner that must have the very same version, though its metadata does not say so.
PAIRS = (("flashinfer-cubin", "flashinfer-python"), ("flashinfer-jit-cache", "flashinfer-python"))


def python(case: Case) -> Iterator[Evidence]:
    """Compare the interpreters with the suffixes of the moved extension modules (K7)."""
    ours, theirs = case.source.host, case.target.host
    if ours.machine and theirs.machine and ours.machine != theirs.machine:
        text = f"{case.source.name} is {ours.machine}, {case.target.name} is {theirs.machine}"
        yield Evidence("K7", BLOCK, "machine", text, "take a snapshot of a host with the same processor")
    tag = theirs.python_tag
    if tag is None:
        reason = theirs.get("python", "error")
        if reason:
            yield Evidence("K7", WARN, "python", f"the interpreter of {case.target.name} did not answer: {reason}")
        return
    if bool(ours.get("python", "free_threaded")) != bool(theirs.get("python", "free_threaded")) and ours.raw:
        yield Evidence("K7", BLOCK, "python", "one interpreter is free-threaded, the other is not; extension modules differ")
    for dist in case.composition.moved:
        stems: dict[str, set[str]] = {}
        for path in dist.owns & case.result.tree.objects.keys():
            match = EXTENSION.search(path)
            if match:
                stems.setdefault(path[: match.start()], set()).add(f"cp{match.group(1)}")
            elif path.endswith(".abi3.so"):
                stems.setdefault(path[: -len(".abi3.so")], set()).add(tag)
        lost = sorted(stem for stem, tags in stems.items() if tag not in tags and (ours.python_tag in tags or ours.python_tag is None))
        if lost:
            have = " ".join(sorted(stems[lost[0]]))
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            yield Evidence(
                "K7", BLOCK, dist.key,
                f"`{lost[0]}`{more} ({dist.shown}) is built for {have}, {case.target.name} runs {tag}",
                f"make a venv of Python {have[2:3]}.{have[3:]} on the target (`push --create`)",
            )  # fmt: skip
    if ours.python_tag and ours.python_tag != tag:
        yield Evidence("K7", WARN, "python", f"{case.source.name} runs {ours.python_tag}, {case.target.name} runs {tag}")


# --- K8 -------------------------------------------------------------------------------------------------------------


def record(case: Case) -> Iterator[Evidence]:
    """Check that what moves is complete by its RECORD, and say what the rest already lacks (K8)."""
    moved = {id(dist) for dist in case.composition.moved}
    for dist in case.result.tree.dists:
        if id(dist) in moved:
            yield from incomplete(dist, case.source.name, BLOCK)
        else:
            yield from incomplete(dist, case.target.name, WARN)
    for path, item in sorted(case.result.tree.objects.items()):
        if item.damaged:
            known = item.damaged in {
                other.damaged for site in (case.source, case.target) for other in [site.tree.objects.get(path)] if other
            }
            if not known or case.from_source(path):
                yield Evidence("K8", BLOCK, path, f"`{path}` is {item.damaged}", "take the snapshot again")


def incomplete(dist: Dist, where: str, level: str) -> Iterator[Evidence]:
    """Report a distribution without RECORD, or whose RECORD names files that are absent; shared objects weigh most."""
    if not dist.raw.get("record", True):
        yield Evidence("K8", WARN, dist.key, f"{dist.shown} on {where} has no RECORD: its files can not be told from others'")
    count, examples = dist.sample("missing")
    if count:
        code = ".so" in examples[0] or examples[0].endswith(".py")
        text = f"{dist.shown} on {where} lacks {count} of its files, `{examples[0]}` first"
        if ".so" in examples[0]:
            text += "; it may be loaded by name, which no link check sees"
        yield Evidence("K8", level if code else NOTE, dist.key, text, f"reinstall {dist.name} on {where}")


# --- K9 -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class Unmet:
    """A Requires-Dist that a tree does not satisfy: who asks, for what, and what is there instead (empty: nothing)."""

    dist: str
    requirement: str
    name: str
    have: str
    exact: bool


@lru_cache(maxsize=4)
def unmet(site: Site) -> frozenset[Unmet]:
    """Return the requirements (PEP 508, with the extras asked for) that a tree does not satisfy inside itself."""
    installed = {dist.key: dist for dist in site.tree.dists}
    tag = site.host.python_tag or "cp312"
    environment = {
        "python_version": f"{tag[2:3]}.{tag[3:]}", "python_full_version": f"{tag[2:3]}.{tag[3:]}.0", "extra": "",
        "sys_platform": "linux", "platform_system": "Linux", "os_name": "posix",
        "platform_machine": site.host.machine or "x86_64", "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }  # fmt: skip
    out = set()
    todo = [(dist, "") for dist in installed.values()]
    asked = set(todo)
    for dist, extra in todo:  # grows: `cuda-toolkit[cublas]` asks for what cuda-toolkit requires under that extra
        for wanted in _requirements(dist, {**environment, "extra": extra}):
            found = installed.get(str(canonicalize_name(wanted.name)))
            if found is None or not _satisfies(found.version, wanted):
                exact = any(spec.operator in ("==", "===") for spec in wanted.specifier)
                shown = f"{wanted.name}{wanted.specifier}"
                out.add(Unmet(dist.key, shown, str(canonicalize_name(wanted.name)), found.version if found else "", exact))
                continue
            more = [(found, name) for name in wanted.extras if (found, name) not in asked]
            asked.update(more)
            todo += more
    return frozenset(out)


def _requirements(dist: Dist, environment: dict[str, str]) -> Iterator[Requirement]:
    frozen = tuple(environment.items())
    for text in dist.requires:
        wanted = _applicable(text, frozen)
        if wanted is not None:
            yield wanted


@lru_cache(maxsize=65536)
def _applicable(text: str, environment: tuple[tuple[str, str], ...]) -> Requirement | None:
    """Parse a Requires-Dist; None when its marker excludes it here, or when it can not be read."""
    try:
        wanted = Requirement(text)
        return wanted if wanted.marker is None or wanted.marker.evaluate(dict(environment)) else None
    except (InvalidRequirement, ValueError, KeyError):
        return None


def _satisfies(version: str, wanted: Requirement) -> bool:
    try:
        return wanted.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True


def new_unmet(case: Case) -> tuple[Unmet, ...]:
    """Return what the result does not satisfy although the host that the asking distribution comes from does."""
    source, target = unmet(case.source), unmet(case.target)
    moved = {dist.key for dist in case.composition.moved}
    known = {(item.dist, item.name) for item in source if item.dist in moved}
    known |= {(item.dist, item.name) for item in target if item.dist not in moved}
    return tuple(sorted(item for item in unmet(case.result) if (item.dist, item.name) not in known))


def metadata(case: Case) -> Iterator[Evidence]:
    """Check requirements, duplicates, and that metadata and code name the same version (K9)."""
    moved = {dist.key: dist for dist in case.composition.moved}
    here = {dist.key: dist for dist in case.result.tree.dists}
    for item in new_unmet(case):
        dist = here[item.dist]
        have = f"has {item.have}" if item.have else "lacks it"
        level = BLOCK if item.dist in moved or item.exact else WARN
        untouched = "" if item.dist in moved else ", which is not moved,"
        yield Evidence("K9", level, item.name, f"{dist.shown}{untouched} requires {item.requirement}; the result {have}")
    yield from disagreements(case.result, known=disagreements(case.source), also=disagreements(case.target))
    for name, partner in PAIRS:
        if name in here and partner in here and here[name].version != here[partner].version and (name in moved or partner in moved):
            yield Evidence("K9", BLOCK, name, f"{here[name].shown} must have the version of {here[partner].shown}")


def disagreements(site: Site, known: Iterator[Evidence] | tuple[()] = (), also: Iterator[Evidence] | tuple[()] = ()) -> Iterator[Evidence]:
    """Report doubled dist-infos, and packages whose code names another version than their metadata (K9)."""
    accepted = {(item.what, item.text) for items in (known, also) for item in items}
    seen: dict[str, Dist] = {}
    found = []
    for dist in site.tree.dists:
        if dist.key in seen:
            text = f"{dist.name} has two dist-infos: `{seen[dist.key].directory}` and `{dist.directory}`"
            found.append(Evidence("K9", BLOCK, dist.key, text, "remove the one that does not match the code"))
        elif dist.raw.get("metadata") is False:
            found.append(Evidence("K9", WARN, dist.key, f"`{dist.directory}` has no METADATA: left by an interrupted install"))
        seen[dist.key] = dist
    for package, code in (site.tree.raw.get("versions") or {}).items():
        owner = next((d for d in site.tree.dists if f"{package}/__init__.py" in d.owns), None)
        if owner is not None and _public(owner.version) != _public(code):
            text = f"the metadata says {owner.shown}, the code in `{package}` says {code}"
            found.append(Evidence("K9", BLOCK, owner.key, text, "the package was overwritten by hand; push the whole distribution"))
    for item in found:
        if (item.what, item.text) in accepted:
            yield Evidence(item.check, WARN, item.what, item.text, item.mend)
        else:
            yield item


def _public(version: str) -> str:
    try:
        return Version(version).public
    except InvalidVersion:
        return version


# --- K10 ------------------------------------------------------------------------------------------------------------


def paths(case: Case) -> Iterator[Evidence]:
    """Report what points out of the tree: editable installs, `.pth` lines, links (K10)."""
    for dist in case.composition.moved:
        if dist.raw.get("editable"):
            text = f"{dist.shown} is installed in editable mode from `{dist.raw['editable']}`: its code is not in the tree"
            yield Evidence("K10", BLOCK, dist.key, text, f"install it properly on {case.source.name} and snapshot again")
    moved = frozenset().union(*(dist.owns for dist in case.composition.moved))
    for name, lines, _code in case.source.tree.raw.get("pth") or ():
        outside = [line for line in lines if line.startswith("/") and not line.startswith(case.source.tree.root)]
        if outside and name in moved:
            yield Evidence("K10", WARN, name, f"`{name}` adds `{outside[0]}`, a path of {case.source.name}")
    rules = case.composition.rules
    for path, shown, more in links_out(case.source.tree, rules.comes):
        text = f"{shown}, outside of the tree: it would be missing on {case.target.name}{more}"
        yield Evidence("K10", BLOCK, path, text, f"replace it by what it points to on {case.source.name}, and snapshot again")
    for path, shown, more in links_out(case.target.tree, rules.stays):
        text = f"{shown}, outside of the tree: no generation can hold it, it would be gone{more}"
        yield Evidence("K10", BLOCK, path, text, "replace it by what it points to, or allow it and link it again after the push")
    executable = case.target.host.get("python", "executable")
    if executable and case.target.host.get("python", "error"):
        yield Evidence(
            "K10",
            BLOCK,
            executable,
            f"`{executable}` on {case.target.name} does not run",
            "repair the venv's interpreter",
        )


def links_out(tree: Tree, counts: Callable[[str, int], bool]) -> Iterator[tuple[str, str, str]]:
    """Yield the links out of a tree that resolve, for which `counts(path, owner)`: one a distribution, and how many more.

    A link that dangles gave nothing before and is not missed.
    """
    groups: dict[int | str, list[tuple[str, str]]] = {}
    for path, target, *resolves in tree.raw.get("outside_links") or ():
        owners = [index for index, dist in enumerate(tree.dists) if path in dist.owns] or [-1]
        owner = next((index for index in owners if counts(path, index)), None)
        if all(resolves) and owner is not None:
            groups.setdefault(owner if owner >= 0 else path, []).append((path, target))
    for who, found in sorted(groups.items(), key=lambda group: group[1]):
        path, target = found[0]
        label = f" ({tree.dists[who].shown})" if isinstance(who, int) else ""
        more = f"; and so would {len(found) - 1} more of its files" if len(found) > 1 else ""
        yield path, f"`{path}`{label} is a link to `{target}`", more


def merged(site: Site) -> Iterator[Evidence]:
    """Recognise a tree that was laid over another by hand: resized files and strangers by the hundred (K8)."""
    resized = [(count, dist, examples) for dist in site.tree.dists for count, examples in [dist.sample("resized")] if count]
    total = sum(count for count, _dist, _examples in resized)
    overwritten = any(".so" in path for _count, _dist, examples in resized for path in examples)
    majors, newcomer = _newcomer(site)
    if overwritten and (total > 20 or newcomer):
        ranked = sorted(resized, key=lambda row: -row[0])[:4]
        names = ", ".join(f"{dist.name} {dist.version}" for _count, dist, _examples in ranked)
        strangers = (site.tree.raw.get("unowned") or {}).get("count", 0)
        yield Evidence(
            "K8", BLOCK, "merged tree",
            f"a merged tree{majors}: {newcomer or 'another environment'} was laid over {names}; "
            f"{total} files differ in size from their RECORD, {strangers} belong to nobody",
            "push a complete set, which removes the old distributions' files",
        )  # fmt: skip
    elif total:
        _count, dist, examples = resized[0]
        yield Evidence(
            "K8",
            NOTE,
            dist.key,
            f"{total} files differ in size from their RECORD, `{examples[0]}` of {dist.shown} first",
        )


def _newcomer(site: Site) -> tuple[str, str]:
    """Return which CUDA lies over which (`, CUDA 13 over CUDA 12`), and the torch that came, if its metadata says otherwise."""
    tree, torch = site.tree, site.tree.dist("torch")
    if torch is None or tree.torch_version is None or _public(torch.version) == _public(tree.torch_version):
        return "", ""
    below = {int(match.group(1)) for dist in tree.dists for match in [re.search(r"-cu(\d+)$", dist.key)] if match}
    majors = f", CUDA {tree.cuda_major} over CUDA {max(below)}" if below and tree.cuda_major not in {None, *below} else ""
    return majors, f"torch {tree.torch_version}"
