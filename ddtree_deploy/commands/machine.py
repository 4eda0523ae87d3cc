"""This machine's side: hosts, configuration, doctor, demo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddtree_deploy.commands import flags
from ddtree_deploy.commands.run import command
from ddtree_deploy.render.ui import Ui

PANEL = "Set up"


def register(app: typer.Typer) -> None:
    """Add the commands of this family."""
    command(app, "demo", panel=PANEL, examples=("demo", "demo --keep /tmp/look"))(demo)
    command(app, "doctor", panel=PANEL, examples=("doctor", "doctor ct200", "doctor ct200 --needs torch,fastapi"))(doctor)
    command(app, "hosts", panel=PANEL, examples=("hosts", "hosts --json"))(hosts)
    command(app, "config", panel=PANEL, examples=("config", "config --example > ddtree.toml"))(config)


def demo(
    ui: Ui,
    keep: Annotated[Path | None, typer.Option("--keep", metavar="DIR", help="Work there and leave it; else a temporary directory.")] = None,
) -> None:
    """Play the main job on this machine, start to end.

    Snapshot, diff, push with proofs, a broken snapshot refused, rollback. Two hosts that are really separate venvs,
    over a loopback sshd where this user can start one. No root, no second machine, under two minutes.
    """
    from ddtree_deploy.demo.story import run

    def say(text: str) -> None:
        # A command stays with what it prints; a remark begins a new paragraph.
        ui.say(text if text.startswith("$ ") else f"\n{text}", "bold")

    run(say, keep)


def doctor(
    ui: Ui,
    name: Annotated[
        str | None,
        typer.Argument(metavar="[HOST]", help="Also look at this host.", autocompletion=flags.complete_host, show_default=False),
    ] = None,
    needs: Annotated[str, typer.Option("--needs", metavar="MODULE,...", help="Try to import these on the host.", show_default=False)] = "",
    venv: flags.Venv = None,
    transport: flags.Transport = None,
    accept_new_host_key: flags.AcceptNewHostKey = False,
) -> int:
    """Check this machine, or a host, for what a push needs.

    Each problem comes with what to do. Exits with 1 when a row fails; warnings alone exit with 0. `--json` is what to
    attach to a bug report.
    """
    from ddtree_deploy.config import load, resolve_host
    from ddtree_deploy.doctor import doctor as run
    from ddtree_deploy.errors import UsageProblem
    from ddtree_deploy.render import machine_views
    from ddtree_deploy.venvs import modules

    where = None
    if needs and not name:
        raise UsageProblem("`--needs` is about a host", mend="name one: `doctor HOST --needs MODULE`")
    if name:
        where = resolve_host(name, load(), venv=venv, transport=transport, accept_new=accept_new_host_key)
    return machine_views.doctor(ui, run(where, needs=modules(needs), emit=ui.emit))


def hosts(ui: Ui) -> None:
    """List the hosts that commands can name.

    `local`, those of ddtree.toml, and ssh aliases.
    """
    from ddtree_deploy.config import known_names, load
    from ddtree_deploy.render import machine_views

    config = load()
    machine_views.hosts(ui, config, known_names(config))


def config(ui: Ui, example: Annotated[bool, typer.Option("--example", help="Print an annotated ddtree.toml.")] = False) -> None:
    """Show every setting and where it comes from."""
    from ddtree_deploy import config as configuration
    from ddtree_deploy.render import machine_views

    if example:
        ui.document("config-example", {"text": configuration.example()})
        ui.data(configuration.example().rstrip())
    else:
        machine_views.config(ui, list(configuration.load().rows()))
