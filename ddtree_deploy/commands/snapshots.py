"""Snapshots on this machine: take one, list them, look into one, and look after their store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddtree_deploy.commands import flags
from ddtree_deploy.commands.run import command
from ddtree_deploy.render.ui import Ui

PANEL = "Snapshots"


def register(app: typer.Typer) -> None:
    """Add the commands of this family."""
    command(app, "snapshot", panel=PANEL, acts=True, examples=(
        "snapshot ct129",
        "snapshot ct129 --label known-good --only sglang --only sglang-kernel",
        'push ct200 --snapshot "$(ddtree-deploy snapshot -q ct129)"',
    ))(snapshot)  # fmt: skip
    command(app, "ls", panel=PANEL, examples=("ls", "ls --json"))(ls)
    command(app, "show", panel=PANEL, examples=(
        "show", "show known-good --files", "show 3f9a1c2 --json", "show known-good --patch > by-hand.diff",
    ))(show)  # fmt: skip
    cache = typer.Typer(
        name="cache",
        help="Look after the store of snapshots.",
        no_args_is_help=True,
        rich_markup_mode=app.rich_markup_mode,
    )
    command(cache, "ls", examples=("cache ls", "cache ls --json"))(ls)
    command(cache, "verify", examples=("cache verify", "cache verify --json"))(cache_verify)
    command(cache, "prune", examples=("cache prune -n", "cache prune --keep 3 -y"))(cache_prune)
    command(cache, "compress", examples=("cache compress", "snapshot ct129 && ddtree-deploy cache compress"))(cache_compress)
    command(cache, "forget", examples=("cache forget old-one -n", "cache forget 3f9a1c2 -y && ddtree-deploy cache prune -y"))(cache_forget)
    command(cache, "dir", examples=("cache dir", 'du -sh "$(ddtree-deploy cache dir)"'))(cache_dir)
    command(cache, "size", examples=("cache size", "cache size --json"))(cache_size)
    app.add_typer(cache, rich_help_panel=PANEL)


def snapshot(
    ui: Ui,
    name: flags.Target,
    venv: flags.Venv = None,
    transport: flags.Transport = None,
    accept_new_host_key: flags.AcceptNewHostKey = False,
    label: Annotated[str, typer.Option("--label", metavar="NAME", help="A name for it.")] = "",
    only: Annotated[list[str] | None, typer.Option("--only", metavar="DIST", help="Only this distribution (repeatable).")] = None,
    allow_drift: Annotated[bool, typer.Option("--allow-drift", help="Accept what the source's metadata does not vouch for.")] = False,
    probe: Annotated[bool, typer.Option("--probe/--no-probe", help="Try every import there, as a baseline.")] = True,
) -> None:
    """Record a host's environment in the local store.

    Every file of site-packages is kept by its sha256 and marked stock (equals RECORD), patched, or unowned.
    The identity goes to stdout, everything else to stderr.
    """
    from ddtree_deploy.render import views
    from ddtree_deploy.snapshot import take
    from ddtree_deploy.store import Store

    where = flags.host(name, venv, transport, accept_new_host_key)
    taken = take(where, Store.open(), only=tuple(only or ()), label=label, allow_drift=allow_drift, probe=probe, emit=ui.emit)
    views.taken(ui, taken)


def ls(ui: Ui) -> None:
    """List the snapshots of the local store, newest first."""
    from ddtree_deploy.render import views
    from ddtree_deploy.store import Store

    views.snapshots(ui, Store.open().refs())


def show(
    ui: Ui,
    snapshot: Annotated[
        str | None,
        typer.Argument(
            metavar="[ID|LABEL]",
            help="The newest if not given.",
            autocompletion=flags.complete_snapshot,
            show_default=False,
        ),
    ] = None,
    files: flags.Files = False,
    patch: Annotated[
        bool, typer.Option("--patch", help="Only what was changed by hand, as a diff against the publishers' files.")
    ] = False,
    wheel: Annotated[
        list[Path] | None,
        typer.Option("--wheel", metavar="FILE", help="With --patch: a stock wheel, for content that is not in the store (repeatable)."),
    ] = None,
) -> None:
    """Show what a snapshot holds.

    Packages and versions, patched files by name, findings, captured servers.
    """
    from ddtree_deploy.patches import of_wheel, patches_of
    from ddtree_deploy.render import overlay, views
    from ddtree_deploy.render.words import short
    from ddtree_deploy.store import Store

    store = Store.open()
    identity = store.resolve(snapshot)
    manifest = store.manifest(identity)
    if patch:
        found = list(patches_of(store, manifest, [of_wheel(file) for file in wheel or ()]))
        overlay.patches(ui, f"snapshot {short(identity)}", found)
    else:
        views.snapshot(ui, store.ref(identity), manifest, files)


def cache_verify(ui: Ui) -> int:
    """Read every object again and compare it with its digest; bad ones are quarantined."""
    from ddtree_deploy.errors import IntegrityFailure
    from ddtree_deploy.render.words import plural, short, size
    from ddtree_deploy.store import Store
    from ddtree_deploy.upkeep import verify

    report = verify(Store.open(), ui.emit)
    bad = [f"object {digest}: content differs" for digest in report.bad]
    bad += [f"snapshot {short(identity)}: object {digest} is missing" for identity, digest in report.missing]
    if bad:
        raise IntegrityFailure(f"the store has {plural(len(bad), 'problem')}", mend="take the snapshots again", causes=tuple(bad[:20]))
    ui.document("cache-verify", {"objects": report.objects, "bytes": report.bytes})
    ui.data(f"{plural(report.objects, 'object')}, {size(report.bytes)}: all as their digests say")
    return 0


def cache_prune(
    ui: Ui,
    keep: Annotated[
        int | None,
        typer.Option("--keep", metavar="N", min=1, help="Also forget all but the newest N unlabelled snapshots."),
    ] = None,
    dry_run: flags.DryRun = False,
    yes: flags.Yes = False,
) -> None:
    """Delete objects that no snapshot needs."""
    from ddtree_deploy.errors import UsageProblem
    from ddtree_deploy.render.words import plural, size
    from ddtree_deploy.store import Store
    from ddtree_deploy.upkeep import prune

    store = Store.open()
    planned = prune(store, keep, dry_run=True)
    nothing = not planned.objects and not planned.snapshots
    if not dry_run and not nothing:
        forgotten = f"{plural(len(planned.snapshots), 'snapshot')} and " if planned.snapshots else ""
        if not ui.confirm(f"delete {forgotten}{plural(planned.objects, 'object')} ({size(planned.bytes)})?", yes):
            raise UsageProblem("nothing was deleted: not confirmed", mend="answer `y`, or add `-y`")
        planned = prune(store, keep)
    verb = "would delete" if dry_run else "deleted"
    ui.document(
        "cache-prune",
        {"dry_run": dry_run, "objects": planned.objects, "bytes": planned.bytes, "snapshots": planned.snapshots},
    )
    ui.data("nothing to delete" if nothing else f"{verb} {plural(planned.objects, 'object')}, {size(planned.bytes)}")


def cache_compress(ui: Ui) -> None:
    """Keep a compressed twin of each object, for pushes over slow links.

    Costs processor time once and about half of the store's size; a push then uses the twins where the link takes less than
    250 MB/s and the host can decompress.
    """
    from ddtree_deploy.render.words import size
    from ddtree_deploy.store import Store
    from ddtree_deploy.upkeep import compress

    made, raw, small = compress(Store.open(), ui.emit)
    ui.say(f"compressed {made} objects: {size(raw)} to {size(small)}")
    ui.document("cache-compress", {"objects": made, "raw_bytes": raw, "bytes": small})


def cache_forget(
    ui: Ui,
    snapshot: Annotated[str, typer.Argument(metavar="ID|LABEL", autocompletion=flags.complete_snapshot)],
    dry_run: flags.DryRun = False,
    yes: flags.Yes = False,
) -> None:
    """Delete one snapshot; its objects go with the next prune."""
    from ddtree_deploy.errors import UsageProblem
    from ddtree_deploy.render.words import short
    from ddtree_deploy.store import Store

    store = Store.open()
    ref = store.ref(store.resolve(snapshot))
    name = f"{short(ref.id)} ({ref.label})" if ref.label else short(ref.id)
    if not dry_run:
        if not ui.confirm(f"delete snapshot {name} of `{ref.host}`?", yes):
            raise UsageProblem("nothing was deleted: not confirmed", mend="answer `y`, or add `-y`")
        store.forget(ref.id)
    ui.document("cache-forget", {"dry_run": dry_run, "snapshot": ref.id})
    ui.data(f"{'would delete' if dry_run else 'deleted'} snapshot {name}")


def cache_dir(ui: Ui) -> None:
    """Print the directory of the store."""
    from ddtree_deploy.store import Store

    root = Store.open().root
    ui.document("cache-dir", {"dir": root})
    ui.data(str(root))


def cache_size(ui: Ui) -> None:
    """Print how much the store holds."""
    from ddtree_deploy.render.words import plural, size
    from ddtree_deploy.store import Store

    objects, count = Store.open().size()
    ui.document("cache-size", {"objects": objects, "bytes": count})
    ui.data(f"{size(count)} in {plural(objects, 'object')}")
