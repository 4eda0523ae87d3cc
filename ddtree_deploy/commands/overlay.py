"""The DDTree overlay for SGLang on this machine: what there is, what a tree carries, build it, see what was changed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddtree_deploy.commands import flags
from ddtree_deploy.commands.run import command
from ddtree_deploy.render.ui import Ui

if TYPE_CHECKING:
    from ddtree_deploy.patches import Tree

PANEL = "Move"
Version = Annotated[str, typer.Option("--version", metavar="V", help="The SGLang version, where the tree does not say it.")]
SglangDir = Annotated[
    Path | None,
    typer.Option("--sglang-dir", metavar="DIR", help="A venv, a site-packages directory, or the sglang package in one."),
]
Snapshot = Annotated[
    str | None,
    typer.Option(
        "--snapshot", metavar="ID|LABEL", help="A snapshot; the newest if no directory is given.", autocompletion=flags.complete_snapshot
    ),
]
Wheel = Annotated[Path | None, typer.Option("--wheel", metavar="FILE", help="The stock wheel, for content that is not in the store.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this family."""
    overlay = typer.Typer(
        name="overlay",
        help="DDTree inside SGLang: edits for stock files of its versions.",
        no_args_is_help=True,
        rich_markup_mode=app.rich_markup_mode,
    )
    command(overlay, "list", examples=("overlay list", "overlay list --json"))(list_)
    command(overlay, "check", examples=(
        "overlay check", "overlay check --sglang-dir /opt/sglang/venv", "overlay check --snapshot known-good",
    ))(check)  # fmt: skip
    command(overlay, "build", examples=(
        "overlay build --wheel sglang-0.5.11-cp312-cp312-manylinux_2_34_x86_64.whl",
        "overlay build --snapshot known-good --out built -n",
    ))(build)  # fmt: skip
    command(overlay, "diff", examples=("overlay diff", "overlay diff --sglang-dir /opt/sglang/venv --wheel sglang-0.5.11-*.whl"))(diff)
    app.add_typer(overlay, rich_help_panel=PANEL)


def list_(
    ui: Ui,
    version: Annotated[str, typer.Option("--version", metavar="V", help="Only this SGLang version.")] = "",
) -> None:
    """List the supported SGLang versions."""
    from ddtree_deploy.overlay import told
    from ddtree_deploy.render import overlay as views
    from sglang_overlay import manifest

    with told():
        entries = [manifest.pinned(version)] if version else list(manifest.load().values())
    views.listing(ui, entries)


def check(ui: Ui, version: Version = "", sglang_dir: SglangDir = None, snapshot: Snapshot = None) -> None:
    """Say what each file is: stock, ours or others'.

    For a version that DDTREE enters as a plugin, say whether everything that it calls is there.
    """
    from ddtree_deploy.errors import Incompatible, IntegrityFailure
    from ddtree_deploy.overlay import told
    from ddtree_deploy.render import overlay as views
    from sglang_overlay import build as builder
    from sglang_overlay import contract, manifest

    tree = _tree(sglang_dir, snapshot, version)
    with told():
        pins = manifest.pinned(tree.version)
        if pins.route != "overlay":
            broken = contract.check_contract(tree.read, tree.version)
            views.contract(ui, tree.label, pins, broken)
            if broken:
                raise Incompatible(f"sglang {tree.version} is not what DDTREE was written for", causes=tuple(map(str, broken)),
                                   mend="use a stock install of a supported version: see `ddtree-deploy overlay list`")  # fmt: skip
            return
        state = builder.recognise(tree.version, tree.files)
    views.check(ui, tree.label, state)
    if not (state.is_stock or state.is_built):
        raise IntegrityFailure(
            f"sglang {tree.version}: {builder.describe(state)}",
            mend="see what was changed with `ddtree-deploy overlay diff`; `push --overlay` needs the stock files",
        )


def build(
    ui: Ui,
    version: Version = "",
    sglang_dir: SglangDir = None,
    snapshot: Snapshot = None,
    wheel: Annotated[Path | None, typer.Option("--wheel", metavar="FILE", help="Build from this wheel.")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Write the files below this directory.")] = None,
    dry_run: flags.DryRun = False,
) -> None:
    """Build the five files from stock ones.

    The results are compared with the pinned ones.

    Nothing is written without --out: `push --overlay` builds them itself.
    """
    from ddtree_deploy.errors import IoProblem
    from ddtree_deploy.overlay import told
    from ddtree_deploy.patches import of_wheel
    from ddtree_deploy.render import overlay as views
    from sglang_overlay import build as builder

    if wheel is not None:
        read, version = of_wheel(wheel), version or _version_of(wheel)
    else:
        tree = _tree(sglang_dir, snapshot, version)
        read, version = tree.read, tree.version
    with told():
        files = builder.build_from(read, version)
        identity = builder.overlay_pins(version).overlay_id
    if out is not None and not dry_run:
        try:
            for file in files:
                (out / file.path).parent.mkdir(parents=True, exist_ok=True)
                (out / file.path).write_bytes(file.data)
        except OSError as error:
            raise IoProblem(f"cannot write below `{out}`: {error.strerror}", mend="give another directory with `--out`") from error
    views.built(ui, version, identity, files, out, dry_run)


def diff(ui: Ui, version: Version = "", sglang_dir: SglangDir = None, snapshot: Snapshot = None, wheel: Wheel = None) -> None:
    """Show what was changed against stock.

    Stock content comes from the store, where another snapshot holds it, or from --wheel.
    """
    from ddtree_deploy.patches import in_store, of_wheel, patches
    from ddtree_deploy.render import overlay as views
    from ddtree_deploy.store import Store

    tree = _tree(sglang_dir, snapshot, version)
    sources = [in_store(Store.open(), tree.record), *([of_wheel(wheel)] if wheel else [])]
    views.patches(ui, f"sglang {tree.version} of {tree.label}", list(patches(tree, sources)))


def _tree(directory: Path | None, snapshot: str | None, version: str) -> Tree:
    """Return the sglang that the flags mean. Raises UsageProblem when there is none."""
    from ddtree_deploy import patches
    from ddtree_deploy.errors import UsageProblem
    from ddtree_deploy.overlay import NAME, told
    from ddtree_deploy.render.words import short
    from ddtree_deploy.store import Store
    from sglang_overlay.build import installed_version

    if directory is not None:
        if snapshot is not None:
            raise UsageProblem("`--sglang-dir` and `--snapshot` exclude each other", mend="give one of them")
        site = _site(directory)
        with told():
            return patches.of_directory(site, version or installed_version(site))
    store = Store.open()
    identity = store.resolve(snapshot)
    manifest = store.manifest(identity)
    found = [index for index, dist in enumerate(manifest.distributions) if dist.name == NAME]
    if not found:
        raise UsageProblem(f"snapshot `{short(identity)}` has no sglang", mend="name another with `--snapshot`, or give `--sglang-dir DIR`")
    return patches.of_snapshot(store, manifest, found[0], f"snapshot {short(identity)}")


def _site(directory: Path) -> Path:
    """Return the site-packages that a venv, such a directory, or the sglang package in one means."""
    from ddtree_deploy.errors import UsageProblem

    candidates = [directory, *sorted(directory.glob("lib/python3.*/site-packages")), directory.absolute().parent]
    for site in candidates:
        if (site / "sglang/srt").is_dir():
            return site
    raise UsageProblem(f"`{directory}` holds no sglang", mend="give a venv, or the site-packages directory that holds `sglang`")


def _version_of(wheel: Path) -> str:
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    from ddtree_deploy.errors import UsageProblem

    try:
        return str(parse_wheel_filename(wheel.name)[1])
    except InvalidWheelFilename as error:
        mend = "keep the name that it has on the index, or give `--version`"
        raise UsageProblem(f"`{wheel.name}` is no name of a wheel", mend=mend) from error
