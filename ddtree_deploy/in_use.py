"""Which processes use a venv: the agent's answer as data."""

from __future__ import annotations

from ddtree_deploy.models import Use
from ddtree_deploy.session import Session


def uses_of(session: Session, live: int | None) -> tuple[Use, ...]:
    """Return who uses the venv, and of which generation; `live` is meant where a path does not name one."""
    rows = session.ask("users", venv=session.host.venv).value["users"]
    return tuple(Use(row["pid"], row["command"], row["how"], _number(row["path"], live), row["root"]) for row in rows)


def _number(path: str, live: int | None) -> int | None:
    parts = path.split("/")
    if ".ddtree" in parts:
        after = parts[parts.index(".ddtree") + 2 :]
        if after and after[0].isdigit():
            return int(after[0])
    return live
