"""One file to a host, and where on a host things could run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddtree_deploy.commands import flags
from ddtree_deploy.commands.run import command
from ddtree_deploy.render.ui import Ui


def register(app: typer.Typer) -> None:
    """Add the commands of this family."""
    command(app, "put", panel="Move", acts=True, examples=(
        "put serve.py ct200:/root/serve.py --mode 0755", "put serve.py ct200:~/serve.py --venv /root/venv -n",
    ))(put)  # fmt: skip
    command(app, "venvs", panel="Look and go back", examples=(
        "venvs ct200", "venvs ct200 --needs torch,fastapi", "venvs ct200 --needs fla --root /scratch --json",
    ))(venvs)  # fmt: skip


def put(
    ui: Ui,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="One file of this machine.", show_default=False)],
    where: Annotated[str, typer.Argument(metavar="HOST:PATH", help="Where to: absolute, or `~/...` there.", show_default=False)],
    mode: Annotated[
        str | None, typer.Option("--mode", metavar="OCTAL", help="Its mode, as 0755. Default: that of the file it replaces.")
    ] = None,
    dry_run: flags.DryRun = False,
    venv: flags.Venv = None,
    transport: flags.Transport = None,
    accept_new_host_key: flags.AcceptNewHostKey = False,
) -> None:
    """Put one file onto a host, through all its hops.

    It arrives beside its place, its sha256 is checked there, Python is compiled there (by the venv's interpreter), and one
    rename puts it into place: the old file or the new one, never half of it. A directory is never replaced.
    """
    from ddtree_deploy.config import load, resolve_host
    from ddtree_deploy.errors import UsageProblem
    from ddtree_deploy.put import put as run
    from ddtree_deploy.render import file_views

    name, colon, path = where.partition(":")
    if not (colon and name and path.startswith(("/", "~/"))):
        raise UsageProblem(f"`{where}` is no HOST:PATH", mend="name the file there: `ct200:/root/serve.py`, `ct200:~/serve.py`")
    bits = None
    if mode is not None:
        if not mode or set(mode) - set("01234567") or int(mode, 8) > 0o7777:
            raise UsageProblem(f"`{mode}` is no mode", mend="give it in octal: `--mode 0755`")
        bits = int(mode, 8)
    host = resolve_host(name, load(), venv=venv, transport=transport, accept_new=accept_new_host_key and not dry_run)
    file_views.put(ui, run(host, file, path, mode=bits, dry_run=dry_run, emit=ui.emit), dry_run)


def venvs(
    ui: Ui,
    name: flags.Target,
    needs: Annotated[str, typer.Option("--needs", metavar="MODULE,...", help="Try to import these in each.", show_default=False)] = "",
    root: Annotated[list[str] | None, typer.Option("--root", metavar="DIR", help="Search below this directory too (repeatable).")] = None,
    timeout: Annotated[float, typer.Option("--import-timeout", metavar="SECS", help="How long one import may take.", min=1)] = 60.0,
    venv: flags.Venv = None,
    transport: flags.Transport = None,
    accept_new_host_key: flags.AcceptNewHostKey = False,
) -> None:
    """List the environments and interpreters of a host.

    With `--needs`, also which of them can import these modules: each import runs in a process of its own. The search looks
    at the usual places, four levels deep and for seconds only, never on network file systems.
    """
    from ddtree_deploy.config import load, resolve_host
    from ddtree_deploy.errors import UsageProblem
    from ddtree_deploy.render import file_views
    from ddtree_deploy.venvs import modules
    from ddtree_deploy.venvs import venvs as run

    for wrong in [text for text in root or () if not text.startswith(("/", "~/"))]:
        raise UsageProblem(f"`{wrong}` is not absolute", mend="give `--root /DIR` or `--root ~/DIR`")
    wanted = modules(needs)
    host = resolve_host(name, load(), venv=venv, transport=transport, accept_new=accept_new_host_key)
    file_views.venvs(ui, host.name, run(host, needs=wanted, roots=root or (), seconds=timeout, emit=ui.emit), wanted)
