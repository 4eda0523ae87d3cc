"""The DDTree overlay as the user reads it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddtree_deploy.render.table import columns
from ddtree_deploy.render.words import plural, size
from sglang_overlay.build import describe

if TYPE_CHECKING:
    from ddtree_deploy.patches import Patch
    from ddtree_deploy.render.ui import Ui
    from sglang_overlay.build import BuiltFile, Check
    from sglang_overlay.contract import Broken
    from sglang_overlay.manifest import Pinned


def listing(ui: Ui, entries: Sequence[Pinned]) -> None:
    """List the supported versions."""
    rows = [
        {"version": e.version, "route": e.route, "overlay": e.overlay_id if e.built else "", "files": len(e.built), "made_beside": e.pins}
        for e in entries
    ]
    ui.document("overlays", {"overlays": rows})
    cells = []
    for e in entries:
        beside = ", ".join(f"{name} {version}" for name, version in e.pins.items())
        cells.append((e.version, e.route, e.overlay_id[:7] if e.built else "—", str(len(e.built) or ""), beside))
    ui.table(columns("sglang", "route", "overlay", "#files", "made beside"), cells)


def check(ui: Ui, label: str, state: Check) -> None:
    """Show the state of each file of the overlay, and of all."""
    ui.document("overlay-check", {
        "where": label, "version": state.version, "overlay": state.overlay_id, "is_stock": state.is_stock, "is_built": state.is_built,
        "foreign": state.foreign, "files": [{"path": f.path, "state": f.state.value, "sha256": f.found} for f in state.files],
    })  # fmt: skip
    styles = ["red" * (f.path in state.foreign) for f in state.files]
    ui.table(columns("state", "file"), [(f.state.value, f.path) for f in state.files], styles)
    ui.data(f"{label}: sglang {state.version}, {describe(state)}")


def contract(ui: Ui, label: str, pins: Pinned, broken: Sequence[Broken]) -> None:
    """Say whether a version that is entered as a plugin has what the adapter calls."""
    ui.document("overlay-check", {"where": label, "version": pins.version, "route": pins.route, "broken": [str(one) for one in broken]})
    verdict = f"{plural(len(broken), 'symbol')} not as called" if broken else "every symbol that it calls is there"
    ui.data(f"{label}: sglang {pins.version}, DDTREE enters as a {pins.route}: {verdict}")


def built(ui: Ui, version: str, identity: str, files: Sequence[BuiltFile], out: Path | None, dry_run: bool) -> None:
    """Tell what was built, and where it is now."""
    rows = [{"path": f.path, "sha256": f.sha256, "bytes": len(f.data), "insertions": len(f.spans)} for f in files]
    written = str(out) if out and not dry_run else ""
    ui.document("overlay-build", {"version": version, "overlay": identity, "written": written, "dry_run": dry_run, "files": rows})
    inserted = [plural(len(f.spans), "insertion") if f.spans else "new" for f in files]
    ui.table(
        columns("sha256", "#size", "", "file"),
        [(f.sha256[:12], size(len(f.data)), what, f.path) for f, what in zip(files, inserted, strict=True)],
    )
    where = f"written below {written}" if written else f"would be written below {out}" if out else "as pinned; `--out DIR` writes them"
    ui.data(f"sglang {version}: ddtree overlay {identity[:7]}, {where}")


def patches(ui: Ui, what: str, found: Sequence[Patch]) -> None:
    """Print diffs against stock content, one after another; name those whose stock content nobody has here."""
    ui.document("patches", {"of": what, "patches": found})
    hidden = [patch.path for patch in found if patch.diff is None]
    for patch in found:
        for line in (patch.diff or "").splitlines():
            heading = line.startswith(("--- ", "+++ "))
            ui.data(line, "bold" if heading else {"+": "green", "-": "red", "@": "cyan"}.get(line[:1], ""))
    counted = f"{plural(len(found), 'file')} differ".replace("1 file differ", "1 file differs")
    ui.say(f"{what}: {counted} from stock" if found else f"{what}: as its publisher made it")
    if hidden:
        names = ", ".join(hidden[:5]) + (", …" if len(hidden) > 5 else "")
        ui.warn(f"no stock content here for {plural(len(hidden), 'file')}: {names}; give the wheel with `--wheel FILE`")
