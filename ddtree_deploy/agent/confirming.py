"""The request of the fresh connection: confirm a switch. By itself, so that this connection loads little else."""

from __future__ import annotations

from ddtree_deploy.agent import layout, switch
from ddtree_deploy.agent.reads import venv_python

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ddtree_deploy.agent.main import Session
    from ddtree_deploy.agent.reads import Handler


def confirm(session: Session, header: dict[str, Any], _value: object) -> dict[str, Any]:
    """Confirm a switch from a fresh connection, and answer what the ledger says."""
    found = layout.locate(header["venv"])
    done = switch.confirm(found, str(header["tx"]), venv_python(found.venv), float(header.get("wait", 20)), session.aborted)
    return {"outcome": done, "live": found.live()}


HANDLERS: dict[str, Handler] = {"confirm": confirm}
