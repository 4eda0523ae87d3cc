"""What this machine's own commands show: doctor, hosts, config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddtree_deploy import __version__
from ddtree_deploy.render import as_json
from ddtree_deploy.render.table import columns
from ddtree_deploy.render.words import plural, some

if TYPE_CHECKING:
    from ddtree_deploy.config import Config
    from ddtree_deploy.models import Check
    from ddtree_deploy.render.ui import Ui


def doctor(ui: Ui, checks: Sequence[Check]) -> int:
    """Show a doctor's rows, each problem with its mend; return 1 when one of them stops a push."""
    words = {"ok": "ok", "warn": "warn", "block": "fail"}
    styles = {"ok": "green", "warn": "yellow", "block": "bold red"}
    failed = sum(check.level == "block" for check in checks)
    code = 1 if failed else 0
    rows = [{**as_json.fields(check), "level": words[check.level]} for check in checks]
    ui.document("doctor", {"code": code, "version": __version__, "checks": rows})
    for check in checks:
        if ui.quiet and check.level == "ok":
            continue
        ui.data(f"{words[check.level]:<5} {check.id:<12} {check.text}", styles[check.level] if check.level != "ok" else "")
        shown, more = some(check.evidence, 100 if ui.verbose else 5)
        for line in [*shown, *([f"… and {more} more (-v)"] if more else [])]:
            ui.data(f"{'':<19}{line}")
        if check.level != "ok" and check.mend:
            ui.data(f"{'':<19}hint: {check.mend}", "cyan")
    warned = sum(check.level == "warn" for check in checks)
    ui.say(f"{plural(failed, 'failure')}, {plural(warned, 'warning')}")
    return code


def hosts(ui: Ui, config: Config, names: Mapping[str, str]) -> None:
    """List host names (`names`: name to where it is defined) and how each is reached."""
    keys = ("name", "transport", "address", "via", "venv", "origin")
    rows = []
    for name, origin in names.items():
        entry = config.hosts.get(name)
        how = "local" if name == "local" else (entry and entry.transport) or "openssh"
        address = "" if how == "local" else (entry and entry.address) or name
        rows.append((name, how, address, (entry and entry.via) or "", (entry and entry.venv) or "", origin))
    ui.document("hosts", {"hosts": [dict(zip(keys, row, strict=True)) for row in rows]})
    ui.table(columns("name", "transport", "address", "via", "venv", "defined in"), rows)


def config(ui: Ui, rows: Sequence[tuple[str, Any, str]]) -> None:
    """Show settings: key, value, where the value comes from."""
    ui.document("config", {"settings": [{"key": key, "value": value, "origin": origin} for key, value, origin in rows]})
    shown = [(key, ", ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value), origin) for key, value, origin in rows]
    ui.table(columns("setting", "value", "from"), shown)
