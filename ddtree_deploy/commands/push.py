"""Move a snapshot to a host: what would change, the push itself, and proof of what is there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from ddtree_deploy.commands import flags
from ddtree_deploy.commands.run import command
from ddtree_deploy.render.ui import Ui

if TYPE_CHECKING:
    from ddtree_deploy.abi import Allowance
    from ddtree_deploy.hosts.base import Host
    from ddtree_deploy.models import Plan, Pushed
    from ddtree_deploy.store import Store
    from ddtree_deploy.transfer import PushOptions

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
        "push ct200 --snapshot known-good --only sglang --only sglang-kernel -n",
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
    """Show what a push would change: packages, and files with --files."""
    from ddtree_deploy.config import load
    from ddtree_deploy.render import plan_views
    from ddtree_deploy.store import Store
    from ddtree_deploy.transfer import PushOptions, plan_push

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
    jobs: Annotated[int, typer.Option("--jobs", metavar="N", min=1, help="Hosts at a time, after the first.")] = 4,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Go on with other hosts after a failure.")] = False,
    dry_run: flags.DryRun = False,
    yes: flags.Yes = False,
) -> int:
    """Bring a snapshot to hosts, prove it there, and switch.

    The new tree is staged beside the live one and proved by the host's own interpreter; only then one rename makes it
    live. It is probed again, and goes back by itself unless a fresh connection confirms it. With several hosts the
    first one proves the snapshot before the others begin.
    """
    from ddtree_deploy.config import load
    from ddtree_deploy.render import plan_views
    from ddtree_deploy.store import Store
    from ddtree_deploy.transfer import PushOptions, plan_push

    config, store = load(), Store.open()
    identity = store.resolve(snapshot)
    options = PushOptions(
        only=tuple(only or ()),
        with_=tuple(with_ or ()),
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
        for where in hosts:
            plan_views.show(ui, plan_push(where, store, identity, options, ui.emit), files, line=True)
        ui.result(dry_run=True)
        return 0
    return _push_all(ui, hosts, store, identity, options, jobs, keep_going, yes, files)


def _allowances(texts: list[str], reason: str) -> tuple[Allowance, ...]:
    from ddtree_deploy.abi import Allowance
    from ddtree_deploy.errors import UsageProblem

    if texts and not reason:
        raise UsageProblem("--allow needs a reason", mend='say why with `--reason "..."`: it is kept in the host\'s ledger')
    try:
        return tuple(Allowance.parse(text, reason) for text in texts)
    except ValueError as error:
        raise UsageProblem(str(error), mend="see the checks in docs/abi.md, and what `ddtree-deploy diff` names") from error


def _approval(ui: Ui, yes: bool, files: bool, lock: threading.Lock) -> Callable[[Plan], bool]:
    """Make the question of a push: the plan is always shown; a person is asked only when processes run from there."""
    from ddtree_deploy.render import plan_views
    from ddtree_deploy.render.words import plural

    def approve(plan: Plan) -> bool:
        with lock:
            plan_views.announce(ui, plan, files)
            if plan.empty or not plan.uses:
                return True
            running = plural(len({use.pid for use in plan.uses}), "process").replace("processs", "processes")
            return ui.confirm(f"{running} on `{plan.target}` run from this venv; switch it under them?", yes)

    return approve


def _push_all(
    ui: Ui,
    hosts: list[Host],
    store: Store,
    identity: str,
    options: PushOptions,
    jobs: int,
    keep_going: bool,
    yes: bool,
    files: bool,
) -> int:
    """Push to the first host alone, then to the others `jobs` at a time; raise what the first failure was."""
    from ddtree_deploy.errors import DeployError
    from ddtree_deploy.render import views
    from ddtree_deploy.transfer import push as push_one

    approve = _approval(ui, yes, files, threading.Lock())
    failures: list[tuple[str, DeployError]] = []
    pushed: list[Pushed] = []

    def one(where: Host) -> None:
        try:
            done = push_one(where, store, identity, options, approve=approve, emit=ui.emit)
        except Exception as caught:
            if len(hosts) == 1:
                raise
            bug = DeployError(f"internal error at `{where.name}`: {type(caught).__name__}: {caught}")
            problem = caught if isinstance(caught, DeployError) else bug
            failures.append((where.name, problem))
            ui.error(problem)
        else:
            pushed.append(done)
            views.pushed(ui, done)

    one(hosts[0])
    if len(hosts) > 1 and (keep_going or not failures):
        _in_parallel(jobs, hosts[1:], one, lambda: bool(failures) and not keep_going)
    untouched = len(hosts) - len(pushed) - len(failures)
    if failures:
        names = ", ".join(f"`{name}`" for name, _problem in failures)
        rest = f", {untouched} not touched" if untouched else ""
        worst = failures[0][1]
        raise type(worst)(f"{len(failures)} of {len(hosts)} hosts failed: {names}{rest}", mend=worst.mend)
    ui.result(pushed=pushed)
    return 0


def _in_parallel(jobs: int, hosts: list[Host], work: Callable[[Host], None], stop: Callable[[], bool]) -> None:
    """Do `work` for each host, `jobs` at a time, until `stop()`.

    The threads are daemons: after Ctrl-C this process ends at once, and each agent takes the end of its input for what
    it is. A pool would wait for the work that was to be stopped.
    """
    left, lock = iter(hosts), threading.Lock()

    def loop() -> None:
        while not stop():
            with lock:
                where = next(left, None)
            if where is None:
                return
            work(where)

    threads = [threading.Thread(target=loop, daemon=True) for _ in range(min(jobs, len(hosts)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
