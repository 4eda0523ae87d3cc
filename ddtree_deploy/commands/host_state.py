"""What a host has: generations, going back, status, lock, ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ddtree_deploy.commands import flags
from ddtree_deploy.commands.run import command
from ddtree_deploy.render.ui import Ui

if TYPE_CHECKING:
    from ddtree_deploy.generations import RollbackPlan

PANEL = "Look and go back"


def _group(default: str) -> type[TyperGroup]:
    """Make a group whose first word may be a host: then the command is `default`."""

    class Group(TyperGroup):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            if args and not args[0].startswith("-") and args[0] not in self.commands:
                args = [default, *args]
            return super().parse_args(ctx, args)

    return Group


def register(app: typer.Typer) -> None:
    """Add the commands of this family."""
    mode = app.rich_markup_mode
    command(app, "status", panel=PANEL, examples=("status ct200", "status ct200 --json"))(status)
    command(app, "rollback", panel=PANEL, acts=True, examples=(
        "rollback ct200", "rollback ct200 5 -n", "rollback local --venv /root/venv -y",
    ))(rollback)  # fmt: skip
    generations = typer.Typer(
        cls=_group("ls"),
        help="The trees that a host keeps: list, prune, release.",
        no_args_is_help=True,
        rich_markup_mode=mode,
    )
    command(generations, "ls", examples=("generations ct200", "generations ls ct200 --json"))(generations_ls)
    command(generations, "prune", examples=("generations prune ct200 -n", "generations prune ct200 --keep 2 -y"))(generations_prune)
    command(generations, "release", examples=("generations release ct200 -n", "generations release ct200 -y"))(generations_release)
    app.add_typer(generations, name="generations", rich_help_panel=PANEL)
    lock = typer.Typer(cls=_group("status"), help="Who works on a host now.", no_args_is_help=True, rich_markup_mode=mode)
    command(lock, "status", examples=("lock status ct200", "lock status ct200 --json"))(lock_status)
    app.add_typer(lock, name="lock", rich_help_panel=PANEL)
    command(app, "audit", panel=PANEL, examples=("audit ct200", "audit ct200 --limit 200 --json"))(audit)


def status(
    ui: Ui,
    name: flags.OptionalTarget = "",
    venv: flags.Venv = None,
    transport: flags.Transport = None,
    accept_new_host_key: flags.AcceptNewHostKey = False,
) -> None:
    """Show what is live on a host, and its drift.

    The generation, files changed by hand since, unfinished work, the lock, and who uses it.
    """
    from ddtree_deploy.generations import status as read
    from ddtree_deploy.render import views

    views.status(ui, read(flags.host(name, venv, transport, accept_new_host_key), ui.emit))


def rollback(
    ui: Ui,
    name: flags.Target,
    generation: Annotated[
        int | None,
        typer.Argument(metavar="[GENERATION]", help="Which one; the one before if not given.", show_default=False),
    ] = None,
    venv: flags.Venv = None,
    transport: flags.Transport = None,
    accept_new_host_key: flags.AcceptNewHostKey = False,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Prove it after the switch.")] = True,
    dry_run: flags.DryRun = False,
    yes: flags.Yes = False,
) -> None:
    """Make an earlier generation live again.

    Needs nothing from this machine but a connection.
    """
    from ddtree_deploy.generations import rollback as run
    from ddtree_deploy.render import views

    def approve(plan: RollbackPlan) -> bool:
        return views.approve_rollback(ui, name, plan, yes)

    where = flags.host(name, venv, transport, accept_new_host_key and not dry_run)
    views.rolled_back(ui, run(where, generation, approve=approve, dry_run=dry_run, verify=verify, emit=ui.emit), dry_run)


def generations_ls(
    ui: Ui,
    name: flags.Target,
    venv: flags.Venv = None,
    transport: flags.Transport = None,
    accept_new_host_key: flags.AcceptNewHostKey = False,
) -> None:
    """List the generations of a host, newest first."""
    from ddtree_deploy.generations import generations
    from ddtree_deploy.render import views

    views.generations(ui, generations(flags.host(name, venv, transport, accept_new_host_key), ui.emit))


def generations_prune(
    ui: Ui,
    name: flags.Target,
    venv: flags.Venv = None,
    transport: flags.Transport = None,
    accept_new_host_key: flags.AcceptNewHostKey = False,
    keep: Annotated[int | None, typer.Option("--keep", metavar="N", min=1, help="How many to keep (keep_generations, 3).")] = None,
    dry_run: flags.DryRun = False,
    yes: flags.Yes = False,
) -> None:
    """Delete old generations.

    Never the live one, the one before it, or one in use.
    """
    from ddtree_deploy.config import load
    from ddtree_deploy.errors import UsageProblem
    from ddtree_deploy.generations import prune_generations
    from ddtree_deploy.render.words import plural

    where = flags.host(name, venv, transport, accept_new_host_key and not dry_run)
    keep = keep or load().keep_generations
    doomed = prune_generations(where, keep, True, ui.emit)
    if doomed and not dry_run:
        if not ui.confirm(f"delete {plural(len(doomed), 'generation')} on `{name}`?", yes):
            raise UsageProblem("nothing was deleted: not confirmed", mend="answer `y`, or add `-y`")
        doomed = prune_generations(where, keep, False, ui.emit)
    numbers = ", ".join(str(info) for info in doomed)
    ui.document("generations-prune", {"dry_run": dry_run, "generations": doomed})
    ui.data(f"{'would delete' if dry_run else 'deleted'} {numbers}" if doomed else "nothing to delete")


def generations_release(
    ui: Ui,
    name: flags.Target,
    venv: flags.Venv = None,
    transport: flags.Transport = None,
    accept_new_host_key: flags.AcceptNewHostKey = False,
    dry_run: flags.DryRun = False,
    yes: flags.Yes = False,
) -> None:
    """Turn the venv back into an ordinary one.

    The live tree becomes its site-packages, the others are deleted.
    """
    from ddtree_deploy.errors import UsageProblem
    from ddtree_deploy.generations import release

    where = flags.host(name, venv, transport, accept_new_host_key and not dry_run)
    live = release(where, True, ui.emit)
    if not dry_run:
        if not ui.confirm(f"delete all generations of `{name}` but {live}?", yes):
            raise UsageProblem("nothing was changed: not confirmed", mend="answer `y`, or add `-y`")
        release(where, False, ui.emit)
    ui.document("generations-release", {"dry_run": dry_run, "generation": live})
    ui.data(f"{name}: {'would be' if dry_run else 'is'} an ordinary venv again, with what generation {live} holds")


def lock_status(
    ui: Ui,
    name: flags.Target,
    venv: flags.Venv = None,
    transport: flags.Transport = None,
    accept_new_host_key: flags.AcceptNewHostKey = False,
) -> None:
    """Show who holds the lock of a host. The kernel frees it when that process dies: there is nothing to break."""
    from ddtree_deploy.generations import lock_status as read
    from ddtree_deploy.render.views import holder

    lock = read(flags.host(name, venv, transport, accept_new_host_key), ui.emit)
    ui.document("lock", {"host": name, "held": lock is not None, "lock": lock})
    ui.data(f"{name}: locked by {holder(lock)}" if lock else f"{name}: not locked")


def audit(
    ui: Ui,
    name: flags.Target,
    venv: flags.Venv = None,
    transport: flags.Transport = None,
    accept_new_host_key: flags.AcceptNewHostKey = False,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="How many lines, the newest.")] = 50,
) -> None:
    """Show the ledger that the host keeps.

    Who switched what, when, and how it ended.
    """
    from ddtree_deploy.generations import audit as read
    from ddtree_deploy.render import views

    views.audit(ui, read(flags.host(name, venv, transport, accept_new_host_key), limit, ui.emit))
