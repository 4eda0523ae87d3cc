"""The pure heart: compose the tree that would result on a target, and say what changes. No I/O, no host."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from packaging.utils import canonicalize_name

from ddtree_deploy.errors import UsageProblem
from ddtree_deploy.merging import merge
from ddtree_deploy.models import (
    PATCHED,
    UNOWNED,
    Check,
    Distribution,
    FileChange,
    FileEntry,
    Inventory,
    Manifest,
    PackageChange,
    Plan,
    PythonFacts,
    Use,
)
from ddtree_deploy.overlay import Overlay, lay_over, probes, reads_checks

if TYPE_CHECKING:
    from ddtree_deploy.abi import Verdict


def make(
    snapshot_id: str,
    snapshot: Manifest,
    target: Inventory,
    *,
    only: Sequence[str] = (),
    why: Mapping[str, str] | None = None,
    checks: Sequence[Check] = (),
    uses: Sequence[Use] = (),
    oracle: Verdict | None = None,
    overlays: Sequence[Overlay] | None = None,
) -> Plan:
    """Plan the push of a snapshot, or of the distributions `only` names, onto a target.

    What they replace, `composition` decides; nothing of that stays but what a distribution that stays lists too. The target's
    other distributions, and what nobody owns outside replaced packages, are kept. `why` says of a moved one what needs it.
    With `overlays` (not None) the one for the SGLang that would result is laid over it; raises as `overlay.lay_over`.

    Raises UsageProblem for a name that the snapshot does not have.
    """
    moved = chosen(snapshot.distributions, only) if only else frozenset(d.name for d in snapshot.distributions)
    merged = merge(snapshot, target, moved, whole=not only)
    python = target.python or snapshot.python
    files, overlay = merged.files, ""
    if overlays is not None:
        files, overlay = lay_over(merged.distributions, files, overlays)
        checks = (*checks, *reads_checks(merged.distributions, files))
    result = Manifest(host=target.host, venv=target.venv, python=python, distributions=merged.distributions, files=files)
    changes = file_changes(target.files, result.files)
    return Plan(
        target=target.host,
        venv=target.venv,
        snapshot=snapshot_id,
        selected=tuple(sorted(moved)) if only else (),
        base=target.fingerprint,
        base_generation=target.generation,
        result=result,
        packages=_package_table(target, moved, merged.replaced, result, changes, why or {}),
        changes=changes,
        checks=(
            *interpreter_checks(snapshot.python, target.python), *_place_checks(target, result, judged=oracle is not None), *merged.checks,
            *checks,
        ),
        uses=tuple(uses),
        oracle=oracle,
        overlay=overlay,
    )


def chosen(distributions: Sequence[Distribution], names: Collection[str]) -> frozenset[str]:
    """Return the distributions that `names` mean: by distribution name, else by import package; `*` at the end allowed.

    Raises UsageProblem naming near ones when one means nothing.
    """
    found: set[str] = set()
    for name in names:
        key = canonicalize_name(name.rstrip("*"))
        exact = {d.name for d in distributions if canonicalize_name(d.name) == key and not name.endswith("*")}
        matches = exact or {
            d.name
            for d in distributions
            if name in d.packages or (name.endswith("*") and canonicalize_name(d.name).startswith(key))
        }
        if not matches:
            near = difflib.get_close_matches(key, [canonicalize_name(d.name) for d in distributions], n=3, cutoff=0.4)
            raise UsageProblem(f"the snapshot has no distribution `{name}`", mend=f"near: {', '.join(near)}" if near else None)
        found |= matches
    return frozenset(found)


def travels(entry: FileEntry, packages: Collection[str]) -> bool:
    """Tell whether a file that nobody owns goes with the import packages `packages`: a hand-made addition inside one."""
    return entry.origin == UNOWNED and entry.path.partition("/")[0] in packages


def file_changes(before: Sequence[FileEntry], after: Sequence[FileEntry]) -> tuple[FileChange, ...]:
    """Return what differs between two trees, by path: content, kind, mode or link target."""
    old = {entry.path: entry for entry in before}
    new = {entry.path: entry for entry in after}
    out = [FileChange("-", path, entry.size, entry.origin) for path, entry in old.items() if path not in new]
    for path, entry in new.items():
        was = old.get(path)
        if was is entry:
            continue
        if was is None:
            out.append(FileChange("+", path, entry.size, entry.origin))
        elif (was.kind, was.mode, was.digest) != (entry.kind, entry.mode, entry.digest):
            out.append(FileChange("~", path, entry.size, entry.origin))
    return tuple(sorted(out, key=lambda change: change.path))


def _package_table(
    target: Inventory,
    moved: frozenset[str],
    replaced: Mapping[str, str],
    result: Manifest,
    changes: Sequence[FileChange],
    reasons: Mapping[str, str],
) -> tuple[PackageChange, ...]:
    old = {canonicalize_name(d.name): d for d in target.distributions}
    counts, sizes = _by_owner(target, result, changes)
    patched = Counter(entry.owner for entry in result.files if entry.origin == PATCHED)
    rows = []
    for index, dist in enumerate(result.distributions):
        was = old.get(canonicalize_name(dist.name))
        if was is None:
            action = "add"
        elif was.shown_version != dist.shown_version:
            action = "replace"
        else:
            action = "change" if counts[dist.name] else "keep"
        why = f"{patched[index]} patched" if patched[index] and dist.name in moved else reasons.get(dist.name, "")
        before = was.shown_version if was else ""
        rows.append(PackageChange(action, dist.name, before, dist.shown_version, counts[dist.name], sizes[dist.name], why))
    kept = {canonicalize_name(d.name) for d in result.distributions}
    for name, why in replaced.items():
        if canonicalize_name(name) not in kept:
            rows.append(PackageChange("remove", name, old[canonicalize_name(name)].shown_version, "", counts[name], 0, why))
    if counts[""]:
        rows.append(PackageChange("change", "(unowned files)", "", "", counts[""], sizes[""]))
    order = {"remove": 0, "replace": 1, "change": 2, "add": 3, "keep": 4}
    return tuple(sorted(rows, key=lambda row: (order[row.action], canonicalize_name(row.name))))


def _by_owner(target: Inventory, result: Manifest, changes: Sequence[FileChange]) -> tuple[Counter[str], Counter[str]]:
    """Count changed files and the bytes of new content by the name of the distribution that they belong to."""
    changed = {change.path: change for change in changes}
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tree, gone in ((target, True), (result, False)):
        names = [*(d.name for d in tree.distributions), ""]  # owner -1 is nobody
        for entry in tree.files:
            change = changed.get(entry.path)
            if change is not None and (change.sign == "-") == gone:
                counts[names[entry.owner]] += 1
                sizes[names[entry.owner]] += 0 if gone else change.size
    return counts, sizes


def interpreter_checks(source: PythonFacts, target: PythonFacts | None) -> tuple[Check, ...]:
    """Compare two interpreters as extension modules see them (K7): minor version, implementation, ABI flags, machine."""
    if target is None:
        return (Check("K7", "block", "the target has no interpreter that runs"),)
    faults = []
    if _minor(source) != _minor(target):
        faults.append(f"python {_minor(source)} against {_minor(target)}")
    if source.implementation != target.implementation:
        faults.append(f"{source.implementation} against {target.implementation}")
    if (source.abiflags, source.debug, source.free_threaded) != (target.abiflags, target.debug, target.free_threaded):
        faults.append(f"extension suffix {source.ext_suffix} against {target.ext_suffix}")
    if source.machine != target.machine:
        faults.append(f"{source.machine} against {target.machine}")
    if not faults:
        return (Check("K7", "ok", f"python {target.version}, {target.ext_suffix}"),)
    return (
        Check(
            "K7", "block", "the interpreters differ: " + ", ".join(faults), (target.executable,),
            f"make a venv with python {_minor(source)} there: `--create --venv PATH`",
        ),
    )  # fmt: skip


def _minor(python: PythonFacts) -> str:
    return ".".join(python.version.split(".")[:2])


def _place_checks(target: Inventory, result: Manifest, judged: bool = False) -> tuple[Check, ...]:
    """Check the place itself (K12): writable, not noexec, not NFS, inodes and bytes for what is new.

    With `judged`, the oracle has looked at the links that leave the tree (K10), and blocks where they would be missed.
    """
    out = []
    space = target.facts.get("space", {})
    mount = (space.get("mount", ""),)
    left = tuple(row for row in target.facts.get("left_behind", ()) if not (judged and row.endswith("(outside-link)")))
    if left:
        text = "the new generation is made without what can not be carried: " + ", ".join(left[:5])
        out.append(Check("K12", "warn", text, left[:20], "put into the venv what the links point to, or link it again after the push"))
    if space.get("read_only"):  # and so not writable, whoever asks
        out.append(Check("K12-read-only", "block", "the file system there is read-only", mount, "mount it writable"))
    elif target.facts.get("writable") is False:
        out.append(Check("K12", "block", f"`{target.venv}` is not writable for this user", (), "connect as its owner, or as root"))
    if space.get("noexec"):
        mend = "shared objects can not be loaded from it"
        out.append(Check("K12", "block", "the file system there is mounted noexec", mount, mend))
    if space.get("nfs"):
        out.append(Check("K12", "warn", "the venv is on NFS: other machines see the switch late, JIT caches go stale", mount))
    known = {entry.digest for entry in target.files}
    need = sum({entry.digest: entry.size for entry in result.files if entry.kind == "f" and entry.digest not in known}.values())
    if need > target.free_bytes:
        out.append(Check("K12-space", "block", f"{need} bytes are needed there, {target.free_bytes} are free", mount))
    if target.free_inodes < len(result.files) + 1024:
        text = f"{len(result.files)} inodes are needed there, {target.free_inodes} are free"
        out.append(Check("K12-space", "block", text, mount))
    return tuple(out)


def probe_modules(plan: Plan, roots: Sequence[str]) -> list[str]:
    """Return the import packages to prove: those of distributions whose files change, and the profile's roots that are there."""
    changed = {change.path for change in plan.changes}
    touched = {entry.owner for entry in plan.result.files if entry.path in changed and entry.owner >= 0}
    names = {name for index in touched for name in plan.result.distributions[index].packages}
    present = {name for dist in plan.result.distributions for name in dist.packages}
    wanted = sorted(name for name in names | (present & set(roots)) if not name.startswith("_"))
    return [*wanted, *probes(entry.path for entry in plan.result.files)] if "sglang" in wanted else wanted
