"""The arguments and options that several commands share, and what TAB completes (from local files only)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from ddtree_deploy.hosts.base import Host

HOST, SAFETY, WHAT = "Host", "Safety", "What to move"


def complete_host(incomplete: str) -> list[str]:
    """Return the host names that begin so: `local`, those of `ddtree.toml`, and ssh aliases."""
    from ddtree_deploy.config import known_names, load
    from ddtree_deploy.errors import DeployError

    try:
        names = known_names(load())
    except DeployError:
        return ["local"]  # TAB has nowhere to complain
    return [name for name in names if name.startswith(incomplete)]


def complete_snapshot(incomplete: str) -> list[str]:
    """Return the labels and short identities of the snapshots in the local store that begin so."""
    from ddtree_deploy.errors import DeployError
    from ddtree_deploy.render.words import short
    from ddtree_deploy.store import Store

    try:
        refs = Store.open().refs()
    except DeployError:
        return []  # TAB has nowhere to complain
    names = [ref.label for ref in refs if ref.label] + [short(ref.id) for ref in refs]
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]


Target = Annotated[
    str,
    typer.Argument(metavar="HOST", help="`local`, a host of ddtree.toml, or an ssh alias.", autocompletion=complete_host),
]
OptionalTarget = Annotated[
    str,
    typer.Argument(
        metavar="[HOST]",
        help="`local`, a host of ddtree.toml, or an ssh alias; default_target if not given.",
        autocompletion=complete_host,
        show_default=False,
    ),
]
Targets = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[HOST]...",
        help="`local`, hosts of ddtree.toml, ssh aliases; default_target if none is given.",
        autocompletion=complete_host,
        show_default=False,
    ),
]
Venv = Annotated[
    str | None,
    typer.Option("--venv", metavar="PATH", help="The virtual environment there.", rich_help_panel=HOST),
]
Transport = Annotated[
    Literal["openssh", "fabric"] | None,
    typer.Option("--transport", envvar="DDTREE_TRANSPORT", help="How to reach it.", rich_help_panel=HOST),
]
AcceptNewHostKey = Annotated[
    bool,
    typer.Option(
        "--accept-new-host-key",
        help="First contact: record an unknown host key and print it. A changed key never passes.",
        rich_help_panel=HOST,
    ),
]
DryRun = Annotated[bool, typer.Option("-n", "--dry-run", help="Show what would be done; write nothing.", rich_help_panel=SAFETY)]
Yes = Annotated[bool, typer.Option("-y", "--yes", envvar="DDTREE_YES", help="Do not ask.", rich_help_panel=SAFETY)]
Snapshot = Annotated[
    str | None,
    typer.Option(
        "--snapshot",
        metavar="ID|LABEL",
        help="Which snapshot; the newest if not given.",
        autocompletion=complete_snapshot,
        rich_help_panel=WHAT,
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="DIST", help="Only this distribution (repeatable).", rich_help_panel=WHAT),
]
With = Annotated[
    list[str] | None,
    typer.Option("--with", metavar="DIST", help="Besides --only, this one too (repeatable).", rich_help_panel=WHAT),
]
Files = Annotated[bool, typer.Option("--files", help="List every file.")]


def host(name: str, venv: str | None, transport: str | None, accept_new_host_key: bool) -> Host:
    """Resolve a name, empty for `default_target`; the command line wins. Raises UsageProblem with near names."""
    from ddtree_deploy.config import load, resolve_host
    from ddtree_deploy.errors import UsageProblem

    config = load()
    if not (name or config.default_target):
        raise UsageProblem("no host given", mend="name one (see `ddtree-deploy hosts`), or set `default_target`")
    where = name or config.default_target
    found = resolve_host(where, config, venv=venv, transport=transport, accept_new=accept_new_host_key)
    if not found.venv:
        raise UsageProblem(
            f"`{where}` has no venv configured",
            mend=f"give `--venv PATH`, or `venv` under [hosts.{where}] in ddtree.toml",
        )
    return found
