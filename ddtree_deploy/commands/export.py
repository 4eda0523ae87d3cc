"""Hand a snapshot to other engines: an image for registries, containerd and Kubernetes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ddtree_deploy.commands import flags
from ddtree_deploy.commands.run import command
from ddtree_deploy.render.ui import Ui

PANEL = "Snapshots"


def register(app: typer.Typer) -> None:
    """Add the command of this family."""
    command(app, "export", panel=PANEL, acts=True, examples=(
        "export --oci ./images --snapshot known-good --base ./base:python-3.12",
        "export --oci ./images --only sglang -n",
        "export -q --oci ./images && skopeo inspect oci:./images",
    ))(export)  # fmt: skip


def export(
    ui: Ui,
    oci: Annotated[Path, typer.Option("--oci", metavar="DIR", help="An OCI image layout: a new directory, or one to add to.")],
    snapshot: flags.Snapshot = None,
    only: flags.Only = None,
    tag: Annotated[str, typer.Option("--tag", metavar="NAME", help="The image's name in the layout; the snapshot's identity.")] = "",
    base: Annotated[
        str,
        typer.Option("--base", metavar="DIR[:NAME]", help="The image, in a layout, that brings the interpreter; its layers come first."),
    ] = "",
    prefix: Annotated[str, typer.Option("--prefix", metavar="PATH", help="Where the packages lie in the image.")] = "/opt/ddtree",
    compress: Annotated[Literal["none", "gzip", "zstd"], typer.Option("--compress", help="How layers are stored.")] = "none",
    dry_run: flags.DryRun = False,
) -> None:
    """Write a snapshot as an OCI image.

    One layer for each large or patched distribution and one for the rest; equal snapshots give equal digests. Without
    --base it is an image of files alone, to mount or to copy from.
    """
    from ddtree_deploy.export.oci import ExportOptions, export_oci, plan_export
    from ddtree_deploy.render import export_views
    from ddtree_deploy.store import Store

    store = Store.open()
    options = ExportOptions(oci, tag, tuple(only or ()), base, prefix, compress)
    identity = store.resolve(snapshot)
    if dry_run:
        export_views.planned(ui, plan_export(store, identity, options))
    else:
        export_views.exported(ui, export_oci(store, identity, options, ui.emit))
