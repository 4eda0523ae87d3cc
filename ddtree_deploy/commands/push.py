"""Move a snapshot to a host: what would change, the push itself, and proof of what is there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ddtree_deploy.commands import flags
from ddtree_deploy.commands.run import command
from ddtree_deploy.render.ui import Ui

if TYPE_CHECKING:
    from ddtree_deploy.abi import Allowance
    from ddtree_deploy.overlay import Overlay
    from ddtree_deploy.store import Store

PANEL = "Move"
SWITCH = "Switch"


def register(app: typer.Typer) -> None:
    """Add the commands of this family."""
    command(app, "diff", panel=PANEL, examples=(
        "diff ct200",
        "diff ct200 --snapshot known-good --only sglang --files",
        "diff ct200 --exit-code -q || echo differs",
    ))(diff)  # fmt: skip
    command(app, "push", panel=PANEL, acts=True, examples=(
        "push ct200 --verify",
        "push ct200 ct201 ct202 --jobs 8 --keep-going --relay",
        "push ct200 --snapshot known-good --only sglang --only sglang-kernel -n",
        "push ct200 --overlay -y",
        "push local --venv /tmp/copy --create --base /root/venv -y",
    ))(push)  # fmt: skip


def diff(
    ui: Ui,
    name: flags.OptionalTarget = "",
    venv: flags.Venv = None,
    transport: flags.Transport = None,
    accept_new_host_key: flags.AcceptNewHostKey = False,
    snapshot: flags.Snapshot = None,
    only: flags.Only = None,
    with_: flags.With = None,
    files: flags.Files = False,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 3 when something would change.")] = False,
) -> int:
    """Show what a push would change; with --files also each file."""
    from ddtree_deploy.config import load
    from ddtree_deploy.push.request import PushOptions
    from ddtree_deploy.render import plan_views
    from ddtree_deploy.store import Store
    from ddtree_deploy.transfer import plan_push

    store = Store.open()
    options = PushOptions(only=tuple(only or ()), with_=tuple(with_ or ()), roots=load().roots)
    where = flags.host(name, venv, transport, accept_new_host_key)
    plan = plan_push(where, store, store.resolve(snapshot), options, ui.emit)
    plan_views.show(ui, plan, files)
    return 3 if exit_code and not plan.empty else 0


def push(
    ui: Ui,
    names: flags.Targets = None,
    venv: flags.Venv = None,
    transport: flags.Transport = None,
    accept_new_host_key: flags.AcceptNewHostKey = False,
    snapshot: flags.Snapshot = None,
    only: flags.Only = None,
    with_: flags.With = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify",
            help="Try the imports there (hashes and syntax are always proved).",
            rich_help_panel=SWITCH,
        ),
    ] = True,
    overlay: Annotated[
        bool,
        typer.Option("--overlay", help="Lay DDTREE over the stock sglang that would be there.", rich_help_panel=flags.WHAT),
    ] = False,
    files: flags.Files = False,
    create: Annotated[bool, typer.Option("--create", help="Make the venv if it is missing.", rich_help_panel=flags.HOST)] = False,
    base: Annotated[
        str,
        typer.Option("--base", metavar="VENV", help="With --create: take over this venv.", rich_help_panel=flags.HOST),
    ] = "",
    confirm_timeout: Annotated[
        float | None,
        typer.Option(
            "--confirm-timeout",
            metavar="SECS",
            min=1,
            help="The host goes back unless confirmed by then (30).",
            rich_help_panel=SWITCH,
        ),
    ] = None,
    rollback: Annotated[
        bool,
        typer.Option("--rollback/--no-rollback", help="Go back when a proof fails after the switch.", rich_help_panel=SWITCH),
    ] = True,
    probe_timeout: Annotated[
        float, typer.Option("--probe-timeout", metavar="SECS", min=1, help="For one import.", rich_help_panel=SWITCH)
    ] = 120.0,
    lock_wait: Annotated[
        float,
        typer.Option("--lock-wait", metavar="SECS", min=0, help="Wait for another run there.", rich_help_panel=flags.HOST),
    ] = 0.0,
    accept_gap: Annotated[
        bool,
        typer.Option(
            "--accept-gap",
            help="First push, file system without RENAME_EXCHANGE: accept a moment without packages.",
            rich_help_panel=flags.SAFETY,
        ),
    ] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow", metavar="CHECK:WHAT", help="Take on a block of the oracle, say K4:flash_ops.", rich_help_panel=flags.SAFETY
        ),
    ] = None,
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Why; kept in the host's ledger.", rich_help_panel=flags.SAFETY)
    ] = "",
    restart: Annotated[
        bool,
        typer.Option(
            "--restart", help="Stop its servers for the switch, start them from the new tree; go back if not ready.", rich_help_panel=SWITCH
        ),
    ] = False,
    jobs: Annotated[int, typer.Option("--jobs", metavar="N", min=1, help="Hosts at a time, after the first.")] = 4,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Go on with other hosts after a failure.")] = False,
    relay: Annotated[
        bool,
        typer.Option("--relay", help="Finished hosts feed the others, by the ssh keys and known_hosts that you have there."),
    ] = False,
    dry_run: flags.DryRun = False,
    yes: flags.Yes = False,
) -> int:
    """Bring a snapshot to hosts, prove it there, and switch.

    The new tree is staged beside the live one and proved by the host's own interpreter; only then one rename makes it
    live. It is probed again, and goes back by itself unless a fresh connection confirms it. With several hosts all are
    planned first, then one proves the snapshot, then the others follow; a table tells how it ended for each.
    """
    from ddtree_deploy.commands import pushing
    from ddtree_deploy.config import load
    from ddtree_deploy.push.request import PushOptions
    from ddtree_deploy.store import Store

    config, store = load(), Store.open()
    identity = store.resolve(snapshot)
    overlays = _overlays(store, keep=not dry_run) if overlay else None
    options = PushOptions(
        only=tuple(only or ()),
        with_=tuple(with_ or ()),
        overlays=overlays,
        verify=verify,
        create=create,
        base=base,
        confirm_timeout=confirm_timeout or config.confirm_timeout,
        rollback=rollback,
        lock_wait=lock_wait,
        accept_gap=accept_gap,
        probe_timeout=probe_timeout,
        keep_generations=config.keep_generations,
        allow=_allowances(allow or [], reason),
        roots=config.roots,
    )
    # Recording a host key is a write, which a dry run does not do.
    accept = accept_new_host_key and not dry_run
    hosts = [flags.host(name, venv, transport, accept) for name in dict.fromkeys(names or [""])]
    if dry_run:
        store.remembers = False
        if len(hosts) > 1:
            return pushing.plan_fleet(ui, hosts, store, identity, options, files)
        from ddtree_deploy.render import plan_views
        from ddtree_deploy.transfer import plan_push

        plan_views.show(ui, plan_push(hosts[0], store, identity, options, ui.emit), files, line=True)
        ui.result(dry_run=True)
        return 0
    if len(hosts) > 1:
        return pushing.push_fleet(ui, hosts, store, identity, options, jobs, keep_going, yes, files, restart, relay)
    approve = pushing.approval(ui, yes, files, restart)
    pushed = pushing.push_one(hosts[0], store, identity, options, approve, ui.emit, restart)
    from ddtree_deploy.render import views  # only now: the connection need not wait for it

    views.pushed(ui, pushed)
    ui.result(pushed=[pushed])
    return 0


def _overlays(store: Store, keep: bool) -> tuple[Overlay, ...]:
    from ddtree_deploy import overlay

    ready = overlay.prepare(store)
    if keep:
        overlay.keep(store, ready)
    return ready


def _allowances(texts: list[str], reason: str) -> tuple[Allowance, ...]:
    if not texts:
        return ()
    from ddtree_deploy.abi import Allowance
    from ddtree_deploy.errors import UsageProblem

    if not reason:
        raise UsageProblem("--allow needs a reason", mend='say why with `--reason "..."`: it is kept in the host\'s ledger')
    try:
        return tuple(Allowance.parse(text, reason) for text in texts)
    except ValueError as error:
        raise UsageProblem(str(error), mend="see the checks in docs/abi.md, and what `ddtree-deploy diff` names") from error
