"""A bench as the user reads it: the plan, the table, how the texts compare."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddtree_deploy.agent.procs import redact
from ddtree_deploy.bench import report
from ddtree_deploy.bench.report import figure
from ddtree_deploy.render.launch import command_line
from ddtree_deploy.render.table import columns
from ddtree_deploy.render.words import seconds

if TYPE_CHECKING:
    from ddtree_deploy.bench.measure import Arm
    from ddtree_deploy.bench.tune import Tuned
    from ddtree_deploy.launch.models import Ready
    from ddtree_deploy.render.ui import Ui

NAMES = {"bench.html": report.html, "bench.svg": report.picture}


def planned(ui: Ui, arms: Sequence[Arm], steps: Sequence[str]) -> None:
    """Show what would be launched and done, and what speaks against it: the result of `-n`."""
    launches = []
    for arm in arms:
        if arm.prepared is None:
            ui.data(f"{arm.variant.name}: server {arm.name}, which runs")
            continue
        line = command_line(arm.prepared.argv, {**arm.prepared.host.service_env, **arm.prepared.command.env})
        launches.append({"variant": arm.variant.name, "argv": redact(list(arm.prepared.argv)), "command": line})
        ui.data(f"{arm.variant.name}: {line}")
        for check in arm.prepared.blocks:
            ui.warn(f"{arm.variant.name}: {check.text}; {check.mend}")
    for text in steps:
        ui.data(f"  {text}")
    ui.result(dry_run=True, launches=launches, steps=list(steps))


def serving(ui: Ui, name: str, ready: Ready) -> None:
    """Say that a variant's server serves."""
    ui.say(f"{ready.server.record.host}: {name} serves {ready.server.url} after {seconds(ready.seconds)}")


def measured(ui: Ui, result: report.Result) -> None:
    """Show the table, and how the texts of the variants compare."""
    ui.table(columns(*report.HEADINGS), report.rows(result.cells))
    for one in result.agreements:
        ui.data(report.words(one), "" if one.same == one.compared else "yellow")
    ui.result(bench=report.document(result))


def tuned(ui: Ui, host: str, found: Tuned, kept: str) -> None:
    """Show the choice for each batch size, what was fitted, and how the table is used; the table alone with `-q`."""
    rows = []
    for choice in found.choices:
        best = max((budget for budget, batch in found.rates if batch == choice.batch), key=lambda one: found.rates[one, choice.batch])
        rate, plain = found.rates[choice.budget, choice.batch], found.rates[0, choice.batch]
        chosen = str(choice.budget) if choice.budget else "plain"
        pays = figure(rate / plain if plain else None, 2)
        rows.append([str(choice.batch), chosen, figure(rate), pays, figure(choice.gain, 2), str(best) if best else "plain"])
    if ui.quiet:
        ui.data(found.table)
    else:
        ui.table(columns("#at a time", "#budget", "#tok/s", "#x plain", "#x fitted", "#best measured"), rows)
        accepted = ", ".join(f"{budget}: {tokens:.2f}" for budget, tokens in sorted(found.tokens.items()) if budget)
        ui.data(f"tokens per pass by budget: {accepted}; {1e3 * found.cost.fixed:.1f} ms of a round are not the pass")
        ui.data(f"budget table: {found.table}")
        ui.say(f"{host}: kept in {kept}: `launch {host} --budget auto` uses it for this pair on these GPUs")
    if any(not choice.budget for choice in found.choices):
        ui.warn("where plain decoding is best the table has the smallest budget: a server can not leave speculation out for some batches")
    ui.result(tuned={
        "table": found.table, "kept": kept, "tokens_per_pass": {str(k): v for k, v in found.tokens.items()}, "cost": found.cost,
        "choices": found.choices, "rates": [[*pair, rate] for pair, rate in found.rates.items()],
    })  # fmt: skip


def write(ui: Ui, directory: Path, result: report.Result) -> None:
    """Write the report's files: the page, its charts as a picture, the figures."""
    for name, make in NAMES.items():
        (directory / name).write_text(make(result), "utf-8")
    (directory / "bench.json").write_text(json.dumps(report.document(result), indent=1, ensure_ascii=False) + "\n", "utf-8")
    ui.say(f"report: {directory / 'bench.html'}")
