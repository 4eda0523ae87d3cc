"""Launches as the user reads them: the command line, the checks, one last line; servers in `status`, a stop."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ddtree_deploy.agent.procs import is_secret, redact, scrub
from ddtree_deploy.render import as_json
from ddtree_deploy.render.plan_views import check_lines
from ddtree_deploy.render.uses import processes
from ddtree_deploy.render.words import plural, seconds, size

if TYPE_CHECKING:
    from ddtree_deploy.launch.lifecycle import Prepared
    from ddtree_deploy.launch.models import Ready, Server, Stopped
    from ddtree_deploy.render.ui import Ui


def command_line(argv: Sequence[str], env: Mapping[str, str]) -> str:
    """Return a command line that a shell takes as it is: the variables in front, secrets replaced."""
    variables = [f"{name}={shlex.quote('***' if is_secret(name, value) else scrub(value))}" for name, value in sorted(env.items())]
    return " ".join([*variables, shlex.join(redact(list(argv)))])


def prepared(ui: Ui, found: Prepared, notes: Sequence[str] = (), *, only: bool = False) -> None:
    """Show what will be started, and what the checks say; with `only` (`-n`) the command line is the result."""
    env = {**found.host.service_env, **found.command.env}
    line = command_line(found.argv, env)
    tree = f"generation {found.generation}" if found.generation is not None else "the venv as it is"
    for note in notes:
        ui.say(f"{found.host.name}: {note}")
    for text, style in check_lines(found.checks, 1 if ui.verbose else 0):
        ui.say(f"{found.host.name}: {text}", style)
    ui.json_line({
        "type": "plan", "host": found.host.name, "argv": redact(list(found.argv)), "command": line, "generation": found.generation,
        "checks": as_json.plain(found.checks), "notes": list(notes),
    })  # fmt: skip
    if only:
        ui.data(line)
    else:
        ui.say(f"{found.host.name}: from {tree}: {line}")


def begun(ui: Ui, server: Server) -> None:
    """Tell that a server was started, and where its log is."""
    unit = f", unit {server.unit}" if server.unit else ""
    ui.json_line({"type": "started", **as_json.fields(server)})
    ui.say(f"{server.record.host}: started server {server.record.name} (pid {server.pid}{unit}); it does not depend on this command")


def ready(ui: Ui, found: Ready) -> None:
    """Say that a server serves: the one line that scripts may rely on; with `-q` its URL alone."""
    ui.result(ready=found)
    ui.data(found.server.url if ui.quiet else ready_line(found))


def ready_line(found: Ready) -> str:
    budget = found.detail.get("budget") or found.detail.get("speculative_ddtree_budget")
    how = found.algorithm or "algorithm unknown"
    how = "plain decoding" if how == "none" else f"{how}, budget {budget}" if how == "ddtree" and budget else how
    tree = "" if found.server.generation is None else f" from generation {found.server.generation}"
    return (
        f"{found.server.record.host}: serving {found.server.url}{tree} — {how}, "
        f"{plural(found.completions, 'completion')} in order, ready in {seconds(found.seconds)}"
    )


def detached(ui: Ui, server: Server) -> None:
    """Say that a server was started and nobody waits for it."""
    ui.result(server=server)
    ui.data(
        server.url
        if ui.quiet
        else f"{server.record.host}: starting {server.url} — `ddtree-deploy status {server.record.host}` tells how it goes"
    )


def stopped(ui: Ui, found: Stopped) -> None:
    """Say how a stop ended, and what did not come back."""
    ui.result(stopped=found)
    killed = f", {processes(found.killed)} killed" if found.killed else ""
    memory = ", GPU memory is back" if found.gpus and found.memory_back else ""
    was = f" (was {found.was})" if found.was != "serving" else ""
    ui.data(f"{found.host}: server {found.name} stopped{was} in {seconds(found.seconds)}{killed}{memory}")
    if found.replaced_by:
        ui.warn(f"{found.host}: another launch took its place, by {found.replaced_by}; it was left alone")
    if found.left:
        ui.warn(f"{found.host}: these processes do not end: {', '.join(map(str, found.left))}; a driver may hold them, look at `dmesg`")
    if not found.port_free:
        ui.warn(f"{found.host}: port {found.name} is still taken")
    for row in found.gpus:
        if not row["back"]:
            ui.warn(f"{found.host}: GPU {row['index']} has {size(row['free'])} free, {size(row['before'])} before the launch")


def server_lines(servers: Sequence[Server], now: float | None = None) -> list[tuple[str, str]]:
    """Lay out the servers of a host for `status`, as (line, style)."""
    lines = []
    for server in servers:
        age = f" for {seconds(max(0.0, (now or time.time()) - server.since))}" if server.since else ""
        tree = "" if server.generation is None else f", from generation {server.generation}"
        words = f"{server.url} {server.phase}{age}{tree}"
        if server.proved:
            words += (
                f", {server.proved.get('algorithm')}" if server.proved.get("ok") else f", its launch failed: {server.proved.get('why')}"
            )
        if server.pid:
            words += f", pid {server.pid}"
        good = server.phase == "serving" and not server.stale
        lines.append((f"server    {words}", "" if good else "yellow"))
        if server.restarts and server.last:
            lines.append((f"          restarted {plural(server.restarts, 'time')}, last after {server.last.get('how')}", "yellow"))
        elif server.phase in ("failed", "dead") and server.last:
            lines.append((f"          it ended: {server.last.get('how') or server.last.get('error')}", "yellow"))
        if server.stale and server.runs:
            hint = f"`ddtree-deploy restart {server.record.host} --port {server.record.name}`"
            lines.append((f"          it runs from an older generation than the live one: {hint}", "yellow"))
    return lines
