"""Prove what is there."""

from __future__ import annotations

from typing import Annotated

import typer

from ddtree_deploy.commands import flags
from ddtree_deploy.commands.run import command
from ddtree_deploy.render.ui import Ui

PANEL = "Move"


def register(app: typer.Typer) -> None:
    """Add the command of this family."""
    command(app, "verify", panel=PANEL, acts=True, examples=(
        "verify ct200", "verify ct200 --level import", "verify local --venv /root/venv --deep --json",
    ))(verify)  # fmt: skip


def verify(
    ui: Ui,
    name: flags.OptionalTarget = "",
    venv: flags.Venv = None,
    transport: flags.Transport = None,
    accept_new_host_key: flags.AcceptNewHostKey = False,
    level: Annotated[
        list[str] | None,
        typer.Option(
            "--level", metavar="LEVEL", help="files, syntax, link, import, gpu; if not given: files, syntax, import (repeatable)."
        ),
    ] = None,
    deep: Annotated[bool, typer.Option("--deep", help="Read every file again, trust no stat cache.")] = False,
) -> int:
    """Prove what is live on a host.

    Every file has the recorded sha256, every source compiles there, every package imports.
    """
    from ddtree_deploy.errors import UsageProblem
    from ddtree_deploy.render import proof_views
    from ddtree_deploy.verify import verify as run

    known = ("files", "syntax", "link", "import", "gpu")
    levels = tuple(part for text in level or ("files", "syntax", "import") for part in text.split(","))
    for wrong in set(levels) - set(known):
        raise UsageProblem(f"unknown level: `{wrong}`", mend="use files, syntax, link, import or gpu")
    where = flags.host(name, venv, transport, accept_new_host_key)
    from ddtree_deploy.store import Store

    proofs = run(where, Store.open(), levels=levels, deep=deep, emit=ui.emit)
    proof_views.show(ui, where.name, proofs)
    proof_views.check(where.name, proofs)
    ui.result()
    return 0
