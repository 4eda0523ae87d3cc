"""Carry out `push`: one host with its question, or several with their table."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from ddtree_deploy.render.ui import Ui

if TYPE_CHECKING:
    from ddtree_deploy.events import Emit, Event
    from ddtree_deploy.hosts.base import Host
    from ddtree_deploy.models import Plan, Pushed
    from ddtree_deploy.push.relay import Relay
    from ddtree_deploy.push.request import PushOptions
    from ddtree_deploy.store import Store


def push_one(
    where: Host,
    store: Store,
    identity: str,
    options: PushOptions,
    approve: Callable[[Plan], bool],
    emit: Emit,
    restart: bool,
    relay: Relay | None = None,
) -> Pushed:
    """Push to one host, and restart its servers around the switch if that was asked for."""
    from ddtree_deploy.transfer import push

    def work(about_to_switch: Callable[[], None]) -> Pushed:
        return push(where, store, identity, options, approve=approve, about_to_switch=about_to_switch, emit=emit, relay=relay)

    if not restart:
        return work(lambda: None)
    from ddtree_deploy.push.restart import push_and_restart

    return push_and_restart(where, work, emit=emit)


def approval(ui: Ui, yes: bool, files: bool, restart: bool, several: bool = False) -> Callable[[Plan], bool]:
    """Make the question of a push: the plan is always shown; a person is asked only when processes run from there."""
    lock, told = threading.Lock(), list[str]()

    def approve(plan: Plan) -> bool:
        from ddtree_deploy.render import fleet_views, plan_views
        from ddtree_deploy.render.uses import running

        with lock:
            if several:
                fleet_views.announce(ui, plan, files, first=not told)
            else:
                plan_views.announce(ui, plan, files)
            told.append(plan.target)
            if plan.empty or not plan.uses:
                return True
            if not restart and any(" -m ddtree.server" in use.command or "sglang" in use.command for use in plan.uses):
                ui.say(
                    f"hint: a server runs from there: `ddtree-deploy restart {plan.target}` takes it to the new generation afterwards",
                    "cyan",
                )
            what = "stop the servers among them for the switch" if restart else "switch all the same"
            return ui.confirm(f"{running(plan.target, plan.uses)}; {what}?", yes)

    return approve


def push_fleet(
    ui: Ui,
    hosts: list[Host],
    store: Store,
    identity: str,
    options: PushOptions,
    jobs: int,
    keep_going: bool,
    yes: bool,
    files: bool,
    restart: bool,
    relayed: bool,
) -> int:
    """Push to several hosts, print the table, and raise what the run ends with."""
    from ddtree_deploy.push.fleet import End, Fleet, failure
    from ddtree_deploy.push.read_once import ReadOnce
    from ddtree_deploy.push.relay import Relay
    from ddtree_deploy.render import fleet_views

    once, relay = ReadOnce(store), Relay() if relayed else None
    named = {where.name: where for where in hosts}

    def ended(end: End) -> None:
        if relay is not None and end.pushed is not None:
            relay.finished(named[end.host])
        fleet_views.ended(ui, end)

    fleet = Fleet(hosts, jobs, keep_going, ended)
    approve = approval(ui, yes, files, restart, several=True)

    def emit(event: Event) -> None:
        fleet.heard(event)
        ui.emit(event)

    def work(where: Host, cleared: Callable[[Plan], None]) -> Pushed:
        def approved(plan: Plan) -> bool:
            if not approve(plan):
                return False
            cleared(plan)
            return True

        return push_one(where, once, identity, options, approved, emit, restart, relay)

    try:
        ends = fleet.run(work)
    except KeyboardInterrupt:
        ui.json_line({"type": "hosts", "hosts": fleet_views.table(ui, fleet.stop())})
        raise
    rows = fleet_views.table(ui, ends)
    problem = failure(ends, detail=ui.quiet)
    if problem is not None:
        ui.json_line({"type": "hosts", "hosts": rows})
        raise problem
    ui.result(hosts=rows, pushed=[end.pushed for end in ends])
    return 0


def plan_fleet(ui: Ui, hosts: list[Host], store: Store, identity: str, options: PushOptions, files: bool) -> int:
    """Show what a push to several hosts would do; a host that can not be planned does not hide the others."""
    from ddtree_deploy.errors import DeployError
    from ddtree_deploy.push.fleet import End, State, failure
    from ddtree_deploy.push.read_once import ReadOnce
    from ddtree_deploy.render import fleet_views, plan_views
    from ddtree_deploy.transfer import plan_push

    once, ends = ReadOnce(store), []
    for where in hosts:
        try:
            plan = plan_push(where, once, identity, options, ui.emit)
        except DeployError as error:
            end = End(where.name, State.FAILED, error=error)
            fleet_views.ended(ui, end)
        else:
            plan_views.show(ui, plan, files, line=True)
            end = End(where.name, State.CURRENT if plan.empty else State.PLANNED, generation=plan.base_generation, plan=plan)
        ends.append(end)
    rows = fleet_views.table(ui, ends)
    problem = failure(ends, detail=ui.quiet)
    if problem is not None:
        ui.json_line({"type": "hosts", "hosts": rows})
        raise problem
    ui.result(dry_run=True, hosts=rows)
    return 0
