"""What an export shows: the layers, and the line it ends with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddtree_deploy.render.table import columns
from ddtree_deploy.render.words import plural, short, size

if TYPE_CHECKING:
    from ddtree_deploy.export.oci import Exported, ExportPlan
    from ddtree_deploy.render.ui import Ui


def planned(ui: Ui, plan: ExportPlan) -> None:
    """Show the layers that an export would write."""
    rows = [(group.name, str(len(group.files)), size(group.bytes), _held(group.distributions)) for group in plan.groups]
    layers = [
        {"name": group.name, "files": len(group.files), "bytes": group.bytes, "distributions": group.distributions} for group in plan.groups
    ]
    if not ui.quiet:
        ui.table(columns("layer", "#files", "#size", "holds"), rows)
    verb = "add to" if plan.adds else "make"
    ui.data(f"would {verb} {plan.directory}: image {plan.tag} — snapshot {short(plan.snapshot)}, {_layers(len(plan.groups), plan.base)}")
    ui.result(
        dry_run=True, dir=plan.directory, tag=plan.tag, snapshot=plan.snapshot, base=plan.base, bytes=plan.bytes,
        adds=plan.adds, layers=layers,
    )  # fmt: skip


def exported(ui: Ui, done: Exported) -> None:
    """Say what an export wrote; with `-q` the image's digest alone."""
    ui.result(image=done)
    if ui.quiet:
        ui.data(done.digest)
    elif done.already:
        ui.data(f"{done.directory}: already there — image {done.tag}, snapshot {short(done.snapshot)}, {done.digest}")
    else:
        ui.data(
            f"{done.directory}: image {done.tag} — snapshot {short(done.snapshot)}, {_layers(len(done.layers), done.base)}, "
            f"{size(done.bytes)}, {size(done.new_bytes)} new, {done.digest}"
        )


def _layers(count: int, base: str) -> str:
    return plural(count, "layer") + (f" on base {base.removeprefix('sha256:')[:12]}" if base else "")


def _held(distributions: tuple[str, ...]) -> str:
    return ", ".join(distributions[:3]) + (f" and {len(distributions) - 3} more" if len(distributions) > 3 else "")
