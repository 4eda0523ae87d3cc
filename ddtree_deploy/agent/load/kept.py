"""What stays of a measurement on the host: the budget table that `tune` found, and nothing of the servers that it launched.

Tables are in `<venv>/.ddtree/budgets.json`, one entry for each pair, engine and set of GPUs.
"""

from __future__ import annotations

import os
import shutil

from ddtree_deploy.agent import durable, layout, locks
from ddtree_deploy.agent.serving import place, start

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


def forget(_session: Session, header: dict[str, Any], _value: object) -> dict[str, Any]:
    """Remove a server's directory, log and all, when it is the launch `launch` and is over: `restart` shall not find it."""
    found = layout.locate(header["venv"])
    known = start.settled(found, str(header["name"]))
    over = known is not None and not known["supervised"] and not known["processes"]
    gone = known is not None and over and known["launch"]["id"] == header["launch"]
    if gone:
        shutil.rmtree(place.directory(found, str(header["name"])))
    return {"gone": gone}
