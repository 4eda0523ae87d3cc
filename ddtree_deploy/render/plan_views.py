"""A plan as the user reads it: the package table first, files when asked, what stands in the way, and the sum."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from typing import TYPE_CHECKING

from ddtree_deploy.render import as_json
from ddtree_deploy.render.table import columns, plain_table
from ddtree_deploy.render.uses import use_lines
from ddtree_deploy.render.words import generation, plural, short, size, some

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddtree_deploy.models import Check, PackageChange, Plan
    from ddtree_deploy.render.ui import Ui

SIGNS = {"add": "+", "replace": "~", "change": "~", "remove": "-", "keep": "="}
STYLES = {"+": "green", "~": "yellow", "-": "red", "=": "dim"}
ROWS_IN_A_PUSH = 12


def heading(plan: Plan) -> str:
    """Say what goes where, onto what."""
    onto = "an ordinary venv" if plan.base_generation is None else f"generation {generation(plan.base_generation)}"
    overlay = f" + ddtree overlay {short(plan.overlay)}" if plan.overlay else ""
    return f"{plan.target}: {plan.venv} — snapshot {short(plan.snapshot)}{overlay} onto {onto}"


def summary(plan: Plan) -> str:
    """Say how much changes, in one line."""
    if plan.empty:
        return "nothing would change"
    signs = Counter(change.sign for change in plan.changes)
    arriving = sum(change.size for change in plan.changes if change.sign != "-")
    parts = [f"{signs[sign]} {word}" for sign, word in (("+", "added"), ("~", "changed"), ("-", "removed")) if signs[sign]]
    return f"{plural(len(plan.changes), 'file')} differ: {', '.join(parts)}; {size(arriving)} of new content".replace(
        "1 file differ:", "1 file differs:"
    )


def package_row(change: PackageChange) -> tuple[str, ...]:
    """Lay out one distribution."""
    after = "(same, other files)" if change.action == "change" else change.after
    return (
        SIGNS.get(change.action, change.action),
        change.name,
        change.before or "—",
        after or "—",
        str(change.files) if change.files else "",
        size(change.bytes) if change.bytes else "",
        change.why.split(" <- ")[-1],  # the oracle begins with the name, which the row has
    )


def check_lines(checks: tuple[Check, ...], verbose: int = 0) -> list[tuple[str, str]]:
    """Lay out checks that are not fine (with `-v` all) as (line, style)."""
    lines: list[tuple[str, str]] = []
    styles = {"block": "bold red", "warn": "yellow", "ok": "green"}
    for check in checks:
        if check.level == "ok" and not verbose:
            continue
        lines.append((f"{check.level:<5} {check.id}: {check.text}", styles.get(check.level, "")))
        shown, more = some(check.evidence, 20 if verbose else 5)
        lines += [(f"        {line}", "") for line in shown]
        lines += [(f"        … and {more} more (-v)", "")] if more else []
        lines += [(f"        hint: {check.mend}", "cyan")] if check.mend and check.level != "ok" else []
    return lines


def tag_lines(plan: Plan, width: int | None = None) -> list[tuple[str, str]]:
    """Lay out the ABI tags that differ between the snapshot, the target and the result."""
    rows = [(row.name, *row.brief) for row in plan.oracle.tags if row.differs] if plan.oracle else []
    table = plain_table(columns("ABI tag", "snapshot", "here now", "becomes"), rows, width and width - 3) if rows else []
    return [(f"   {line}", "bold" if not index else "") for index, line in enumerate(table)]


def set_lines(plan: Plan) -> list[tuple[str, str]]:
    """Lay out, where the oracle blocks, the smallest set that would not, why each is in it, and the command that pushes it."""
    solution = plan.oracle.solution if plan.oracle else None
    if solution is None:
        return []
    broken = plan.oracle.broken if plan.oracle else ()
    lines = [(f"would no longer work, and is not moved: {', '.join(broken)}", "red")] if broken else []
    lines += [(f"also needed: {step.text}", "yellow") for step in solution.steps]
    lines += [(f"no set mends this: {text}", "red") for text in solution.unsolved]
    if solution.consistent and solution.steps:
        command = solution.command(plan.target, f"--venv {shlex.quote(plan.venv)}", f"--snapshot {short(plan.snapshot)}")
        lines.append((f"hint: {plural(len(solution.names), 'distribution')} that go together: {command}", "cyan"))
    return lines


def lay_out(ui: Ui, plan: Plan, files: bool, say: Callable[[str, str], None], rows: int | None, as_data: bool) -> None:
    """Write a plan with `say(line, style)`; a table of at most `rows` packages (None: all)."""
    width = ui.width(sys.stdout if as_data else sys.stderr)
    changed = [change for change in plan.packages if change.action != "keep" or ui.verbose]
    kept = sum(change.action == "keep" for change in plan.packages)
    say(heading(plan), "bold")
    if changed:
        shown = changed if rows is None or ui.verbose else changed[:rows]
        more = len(changed) - len(shown)
        table = [package_row(change) for change in shown]
        heads = columns("", "package", "now", "becomes", "#files", "#size", "why")
        if not any(row[-1] for row in table):
            table, heads = [row[:-1] for row in table], heads[:-1]
        if as_data:
            ui.table(heads, table, [STYLES.get(row[0], "") for row in table])
        else:
            for line in plain_table(heads, table, width):
                say(line, "")
        if more:
            say(f"… and {plural(more, 'package')} more (`ddtree-deploy diff` shows all)", "")
    if kept and not ui.verbose:
        say(f"=  {plural(kept, 'other distribution')} kept as they are", "dim")
    if files:
        for change in plan.changes:
            origin = f"  ({change.origin})" if change.origin not in ("", "stock") else ""
            say(f"{change.sign} {change.path}{origin}", STYLES.get(change.sign, ""))
    # Who uses the tree stands below, in full.
    checks = tuple(check for check in plan.checks if ui.verbose or not (check.id == "K14" and plan.uses))
    for line, style in (*tag_lines(plan, width), *check_lines(checks, ui.verbose), *set_lines(plan)):
        say(line, style)
    for line in use_lines(plan.uses, ui.verbose):
        say(line, "yellow")
    say(summary(plan), "")


def show(ui: Ui, plan: Plan, files: bool, line: bool = False) -> None:
    """Print a plan as data: `diff`, and `push -n` (there as a JSON line, `line`)."""
    if line:
        ui.json_line({"type": "plan", **as_json.plan(plan)})
    else:
        ui.document("plan", as_json.plan(plan))
    if not ui.quiet:
        lay_out(ui, plan, files, ui.data, None, as_data=True)


def announce(ui: Ui, plan: Plan, files: bool) -> None:
    """Tell a plan that is about to be applied."""
    ui.json_line({"type": "plan", **as_json.plan(plan, files)})
    if not ui.json and not ui.quiet and not plan.empty:
        lay_out(ui, plan, files, ui.say, ROWS_IN_A_PUSH, as_data=False)
