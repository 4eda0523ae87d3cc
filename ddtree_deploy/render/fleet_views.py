"""A push to several hosts as the user reads it: a line a host as it ends, then one table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddtree_deploy.errors import RestoreUnconfirmed, RevertedAfterFailure
from ddtree_deploy.push.fleet import End, State
from ddtree_deploy.render import as_json, plan_views, views
from ddtree_deploy.render.table import columns
from ddtree_deploy.render.words import error_lines, plural, short, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddtree_deploy.models import Plan
    from ddtree_deploy.render.ui import Ui

OUTCOMES = {
    State.PLANNED: "would change", State.PUSHING: "stopped", State.DONE: "pushed", State.CURRENT: "up to date", State.LEFT: "not touched",
}  # fmt: skip
STYLES = {"pushed": "green", "up to date": "dim", "not touched": "yellow", "went back": "red", "failed": "red", "look at it": "bold red"}


def outcome(end: End) -> str:
    """Say in two words how it ended for a host."""
    if isinstance(end.error, RestoreUnconfirmed):
        return "look at it"
    if isinstance(end.error, RevertedAfterFailure):
        return "went back"
    if end.error is not None:
        return "failed"
    if end.plan is not None and end.state is State.PLANNED and end.plan.blocks:
        return "blocked"
    return OUTCOMES.get(end.state, "not touched")


def why(end: End, failed: Sequence[str]) -> str:
    """Say why it ended so; `failed` names the hosts that failed."""
    if end.error is not None:
        return ": ".join([end.error.message, *end.error.causes[:1]])
    if end.pushed is not None:
        files = "" if end.pushed.already else f", {plural(end.pushed.changed_files, 'file')} changed"
        fed = f", {size(end.pushed.fed_bytes)} from {' and '.join(end.pushed.fed_by)}" if end.pushed.fed_by else ""
        return f"snapshot {short(end.pushed.snapshot)}{files}{fed}"
    if end.state is State.PUSHING:
        return f"at: {end.step}"
    if end.state is State.PLANNED and end.plan is not None:
        return end.plan.blocks[0].text if end.plan.blocks else plan_views.summary(end.plan)
    if end.state is State.LEFT and failed:
        return f"{' and '.join(f'`{name}`' for name in failed[:2])} failed"
    return "stopped before its turn" if end.state is State.LEFT else ""


def row(end: End, failed: Sequence[str]) -> dict[str, Any]:
    """Return what the table and `--json` say of a host."""
    return {
        "host": end.host,
        "outcome": outcome(end),
        "generation": end.generation,
        "previous": end.pushed.previous if end.pushed else None,
        "sent_bytes": end.pushed.sent_bytes if end.pushed else 0,
        "fed_bytes": end.pushed.fed_bytes if end.pushed else 0,
        "fed_by": list(end.pushed.fed_by) if end.pushed else [],
        "seconds": round(end.seconds, 3),
        "code": end.error.exit_code if end.error else 0,
        "why": why(end, failed),
    }


def table(ui: Ui, ends: Sequence[End]) -> list[dict[str, Any]]:
    """Print the table: what each host has now, and why; with `-q` the generations alone, in the user's order. Returns the rows."""
    failed = [end.host for end in ends if end.error is not None]
    rows = [row(end, failed) for end in ends]
    if ui.quiet:
        for found in rows:
            ui.data("-" if found["generation"] is None else str(found["generation"]))
        return rows
    cells = [
        (
            found["host"],
            found["outcome"],
            _generation(found),
            size(found["sent_bytes"]) if found["outcome"] == "pushed" else "",
            f"{found['seconds']:.1f}" if found["seconds"] else "",
            found["why"],
        )
        for found in rows
    ]
    ui.table(columns("host", "outcome", "generation", "#sent", "#seconds", "why"), cells, [STYLES.get(cell[1], "") for cell in cells])
    return rows


def _generation(found: dict[str, Any]) -> str:
    if found["outcome"] == "pushed":
        return f"{found['generation']} (was {found['previous']})"
    return "—" if found["generation"] is None else str(found["generation"])


def ended(ui: Ui, end: End) -> None:
    """Tell at once how it ended for a host; an error is told in full."""
    if end.pushed is not None:
        views.pushed(ui, end.pushed, alone=False)
    elif end.error is not None:
        told = {**as_json.error(end.error, end.error.exit_code, ui.log.path), "type": "failed", "host": end.host}
        ui.log.write("failed", host=end.host, error=end.error.kind, message=end.error.message, causes=end.error.causes)
        ui.json_line(told)
        for line in error_lines(end.error):
            ui.say(line, {"error": "bold red", "hint": "cyan"}.get(line.partition(":")[0], ""))


def announce(ui: Ui, plan: Plan, files: bool, first: bool) -> None:
    """Tell a plan: the first (and with `-v` or --files every one) in full, the others in a line."""
    if first or files or ui.verbose or ui.json:
        plan_views.announce(ui, plan, files)
    else:
        ui.say(f"{plan_views.heading(plan)}: {plan_views.summary(plan)}")
        for line, style in plan_views.check_lines(plan.checks):
            ui.say(line, style)
