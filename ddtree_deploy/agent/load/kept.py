"""Keep what `tune` found: `<venv>/.ddtree/budgets.json`, one entry for each pair, engine and set of GPUs."""

from __future__ import annotations

import os

from ddtree_deploy.agent import durable, layout, locks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ddtree_deploy.agent.main import Session


def keep(_session: Session, header: dict[str, Any], value: dict[str, Any]) -> dict[str, Any]:
    """Add an entry in place of the one with the same `key`; `value` has `key` and `table`."""
    found = layout.locate(header["venv"])
    path = os.path.join(found.state, "budgets.json")
    known = (durable.read_json(path) or {}).get("tables") or []
    rest = [one for one in known if any(one.get(name) != wanted for name, wanted in value["key"].items())]
    durable.write_json(path, {"tables": [*rest, {**value["key"], "table": value["table"], "measured": locks.utc()}]})
    return {"path": path}
