"""Results as the user reads them: one function a command."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddtree_deploy.models import PATCHED, UNOWNED
from ddtree_deploy.render import as_json
from ddtree_deploy.render.launch import server_lines
from ddtree_deploy.render.proof_views import import_lines
from ddtree_deploy.render.table import columns
from ddtree_deploy.render.uses import pids, running, use_lines
from ddtree_deploy.render.words import generation, plural, push_line, rollback_line, short, size, some

if TYPE_CHECKING:
    from ddtree_deploy.generations import RollbackPlan
    from ddtree_deploy.models import GenerationInfo, Manifest, Pushed, RolledBack, SnapshotRef, Status, Taken
    from ddtree_deploy.render.ui import Ui


def taken(ui: Ui, taken: Taken) -> None:
    """Tell what a snapshot found; its identity goes to stdout, alone."""
    from ddtree_deploy.overlay import carried  # here: most commands do not need it

    manifest, ref = taken.manifest, taken.ref
    origins = Counter(entry.origin for entry in manifest.files)
    ui.say(
        f"{ref.host}: {plural(len(manifest.distributions), 'distribution')}, {plural(ref.files, 'file')}, "
        f"{size(ref.bytes)} — {origins[PATCHED]} patched, {origins[UNOWNED]} unowned"
    )
    sglang = carried(manifest.distributions, manifest.files)
    if sglang:
        ui.say(f"  {sglang.text}")
    _patched(ui.say, manifest, 20)
    _findings(ui.say, manifest, ui.verbose)
    for proof in taken.import_failures:
        for line in import_lines(proof)[: None if ui.verbose else 1]:
            ui.say(f"  on the source too: {line}", "yellow")
    ui.say(
        f"read {plural(taken.hashed_files, 'file')}, knew {taken.reused_files} from before; "
        f"stored {plural(taken.new_objects, 'new object')}, {size(taken.new_bytes)}"
    )
    ui.json_line(
        {
            "type": "result",
            "schema": as_json.SCHEMA,
            "code": 0,
            "snapshot": as_json.fields(ref),
            "origins": dict(origins),
            "patched": [entry.path for entry in manifest.files if entry.origin == PATCHED],
            "unowned": [entry.path for entry in manifest.files if entry.origin == UNOWNED],
            "findings": as_json.plain(manifest.findings),
            "sglang": as_json.plain(sglang),
            "import_failures": as_json.plain(taken.import_failures),
            **{name: getattr(taken, name) for name in ("new_objects", "new_bytes", "hashed_files", "reused_files")},
        }
    )
    ui.data(ref.id)


def _findings(say: Callable[..., None], manifest: Manifest, verbose: int) -> None:
    """Say each finding; of one kind only the first few unless verbose: a slimmed package lacks a thousand files."""
    for kind in dict.fromkeys(finding.kind for finding in manifest.findings):
        lines = [f"  {kind} {finding.where}: {finding.text}" for finding in manifest.findings if finding.kind == kind]
        shown, more = some(lines, len(lines) if verbose else 5)
        for line in [*shown, *([f"  {kind} … and {more} more (-v lists them)"] if more else [])]:
            say(line, "yellow")


def _patched(say: Any, manifest: Manifest, most: int) -> None:
    """Name what somebody did by hand: files that differ from RECORD, and files added to a package that has one."""
    from ddtree_deploy.plan import travels

    packages = {package for dist in manifest.distributions for package in dist.packages}
    lines = [f"patched {entry.path}" for entry in manifest.files if entry.origin == PATCHED]
    lines += [f"added   {entry.path}" for entry in manifest.files if travels(entry, packages)]
    shown, more = some(lines, most)
    for line in shown:
        say(f"  {line}")
    if more:
        say(f"  … and {more} more (`ddtree-deploy show --files`)")


def snapshots(ui: Ui, refs: Sequence[SnapshotRef]) -> None:
    """List snapshots."""
    ui.document("snapshots", {"snapshots": refs})
    if ui.quiet:
        for ref in refs:
            ui.data(ref.id)
    elif refs:
        heads = columns("snapshot", "label", "host", "venv", "taken", "#files", "#size", "#patched", "")
        rows = [
            (
                short(ref.id),
                ref.label,
                ref.host,
                ref.venv,
                _when(ref.created),
                str(ref.files),
                size(ref.bytes),
                str(ref.patched),
                "" if ref.complete else "incomplete",
            )
            for ref in refs
        ]
        ui.table(heads, rows, ["" if ref.complete else "red" for ref in refs])
    else:
        ui.say("no snapshots yet: `ddtree-deploy snapshot HOST` takes one")


def _when(stamp: str) -> str:
    return stamp[:16].replace("T", " ")


def snapshot(ui: Ui, ref: SnapshotRef, manifest: Manifest, files: bool) -> None:
    """Show what a snapshot holds."""
    from ddtree_deploy.overlay import carried  # here: most commands do not need it

    sglang = carried(manifest.distributions, manifest.files)
    ui.document("snapshot", {"ref": as_json.fields(ref), "manifest": as_json.manifest(manifest, files), "sglang": sglang})
    label = f" ({ref.label})" if ref.label else ""
    ui.data(f"{ref.id}{label}", "bold")
    python = manifest.python
    ui.data(f"{ref.host}:{ref.venv}, taken {_when(ref.created)} UTC, Python {python.version} {python.machine}, {python.libc}")
    if sglang:
        ui.data(sglang.text)
    owned = Counter(entry.owner for entry in manifest.files)
    bytes_of: Counter[int] = Counter()
    patched_of: Counter[int] = Counter()
    for entry in manifest.files:
        bytes_of[entry.owner] += entry.size
        patched_of[entry.owner] += entry.origin == PATCHED
    order = sorted(range(len(manifest.distributions)), key=lambda index: manifest.distributions[index].name.lower())
    rows = [
        (
            manifest.distributions[index].name,
            manifest.distributions[index].shown_version,
            str(owned[index]),
            size(bytes_of[index]),
            str(patched_of[index] or ""),
        )
        for index in order
    ]
    if owned[-1]:
        rows.append(("(in nobody's RECORD)", "", str(owned[-1]), size(bytes_of[-1]), ""))
    ui.table(columns("package", "version", "#files", "#size", "#patched"), rows)
    if files:
        for entry in manifest.files:
            content = entry.digest[:12] if entry.kind == "f" else f"-> {entry.digest}"
            ui.data(f"{entry.origin:<7} {entry.size:>12} {content} {entry.path}")
    else:
        _patched(ui.data, manifest, 50)
    _findings(ui.data, manifest, ui.verbose)
    for server in manifest.servers:
        ui.data(f"  server {' '.join(server.argv)}")


def pushed(ui: Ui, pushed: Pushed, alone: bool = True) -> None:
    """Say how a push ended: the one line that scripts may rely on; with `-q` the generation alone. Of several, a table is the data."""
    for proofs in pushed.proofs:
        ui.json_line({"type": "proofs", "host": pushed.host, "ok": proofs.ok, **as_json.fields(proofs)})
    if ui.verbose and pushed.phases:
        ui.say(", ".join(f"{name} {spent:.1f} s" for name, spent in pushed.phases.items()))
    if pushed.in_use and not pushed.already:
        ui.warn(f"{pushed.host}: still running from the old generation until restarted: {pids(pushed.in_use)}")
    ui.json_line({"type": "pushed", **as_json.fields(pushed)})
    if alone:
        ui.data(str(pushed.generation) if ui.quiet else push_line(pushed))
    else:
        ui.say(push_line(pushed))


def approve_rollback(ui: Ui, name: str, plan: RollbackPlan, yes: bool) -> bool:
    """Tell what a rollback will do; ask only when processes run from the live tree."""
    ui.json_line({"type": "plan", **as_json.fields(plan)})
    for line in use_lines(plan.uses, ui.verbose):
        ui.say(f"{name}: {line}", "yellow")
    return not plan.uses or ui.confirm(f"{running(name, plan.uses)}; switch all the same?", yes)


def rolled_back(ui: Ui, back: RolledBack, dry_run: bool) -> None:
    """Say how a rollback ended; with `-q` the generation alone."""
    for proofs in back.proofs:
        ui.json_line({"type": "proofs", "host": back.host, "ok": proofs.ok, **as_json.fields(proofs)})
    ui.result(dry_run=dry_run, rolled_back=back)
    if ui.quiet:
        ui.data(str(back.generation))
    elif dry_run:
        ui.data(f"{back.host}: generation {generation(back.generation)} would be active (is {generation(back.previous)})")
    else:
        ui.data(rollback_line(back))


def generations(ui: Ui, infos: Sequence[GenerationInfo]) -> None:
    """List generations."""
    ui.document("generations", {"generations": infos})
    if ui.quiet:
        for info in infos:
            ui.data(str(info.number))
    elif infos:
        heads = columns("#generation", "state", "snapshot", "since", "#files", "#size", "in use by")
        rows = [
            (
                str(info.number),
                info.state,
                short(info.snapshot) or "—",
                _when(info.created),
                str(info.files),
                size(info.bytes),
                ", ".join(f"pid {pid}" for pid in info.in_use),
            )
            for info in infos
        ]
        ui.table(heads, rows, ["bold" if info.state == "live" else "" for info in infos])
    else:
        ui.say("no generations: an ordinary venv, nothing was pushed there yet")


def holder(lock: Mapping[str, Any]) -> str:
    """Say who holds a lock: `user@host (pid 7) since 2026-11-29T14:00:00Z: push`."""
    text = str(lock.get("who", "unknown"))
    text += f" on {lock['host']}" if lock.get("host") else ""
    text += f" (pid {lock['pid']})" if lock.get("pid") else ""
    text += f" since {lock['since']}" if lock.get("since") else ""
    return text + (f": {lock['what']}" if lock.get("what") else "")


def status(ui: Ui, status: Status) -> None:
    """Show a host's state: one fact a line, what needs attention marked by its words."""
    drifted = len(status.changed) + len(status.added) + len(status.removed)
    ui.document("status", {**as_json.fields(status), "drift": drifted})
    if ui.quiet:
        ui.data("none" if status.generation is None else str(status.generation))
        return
    if not status.managed:
        ui.data(f"{status.host}: {status.venv} — an ordinary venv, nothing was pushed there yet")
    else:
        overlay = f" + ddtree overlay {short(status.overlay)}" if status.overlay else ""
        ui.data(
            f"{status.host}: {status.venv} — generation {generation(status.generation)}, "
            f"snapshot {short(status.snapshot) or 'none'}{overlay}, live since {_when(status.since)}"
        )
        ui.data(
            "drift     none" if not drifted else f"drift     {plural(drifted, 'file')} by hand since",
            "yellow" * bool(drifted),
        )
        for sign, paths in (("~", status.changed), ("+", status.added), ("-", status.removed)):
            shown, more = some(paths, 1000 if ui.verbose else 10)
            for path in shown:
                ui.data(f"  {sign} {path}")
            if more:
                ui.data(f"  {sign} … and {more} more (-v)")
    ui.data(f"journal   {status.journal or 'idle'}")
    ui.data(f"lock      {'held by ' + holder(status.lock) if status.lock else 'free'}")
    for line in use_lines(status.uses, ui.verbose) or ["not in use by a process"]:
        ui.data(f"process   {line}")
    for line, style in server_lines(status.servers):
        ui.data(line, style)
    if status.packages and not ui.verbose:
        ui.data(f"packages  {len(status.packages)} (-v lists them)")
    for name, version in status.packages if ui.verbose else ():
        ui.data(f"package   {name} {version}")


def audit(ui: Ui, lines: Sequence[Mapping[str, Any]]) -> None:
    """Show the ledger, oldest first."""
    ui.document("audit", {"lines": lines})
    if not lines:
        ui.say("the ledger is empty: nothing was pushed there yet")
    for line in lines:
        rest = [
            f"{key}={short(str(value)) if key in ('snapshot', 'overlay') else value}"
            for key, value in line.items()
            if key not in ("time", "event") and value not in ("", None)
        ]
        ui.data("  ".join([str(line.get("time", "")), str(line.get("event", "")), *rest]))
