"""Models as JSON-ready values, one shape a command (`schema: 1`; fields are only ever added)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from ddtree_deploy.errors import DeployError
from ddtree_deploy.events import Event, Note, Progress
from ddtree_deploy.models import FileEntry, Manifest, Plan

SCHEMA = 1


def plain(value: Any) -> Any:
    """Turn a model into dicts, lists, strings and numbers."""
    if isinstance(value, FileEntry):
        return value._asdict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, PurePath) else value


def document(kind: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """Wrap the answer of a command that reads."""
    return {"schema": SCHEMA, "kind": kind, **plain(value)}


def fields(value: Any) -> dict[str, Any]:
    """Return the fields of a model as a JSON-ready dict."""
    result = plain(value)
    assert isinstance(result, dict)
    return result


def plan(plan: Plan, files: bool = True) -> dict[str, Any]:
    """Return a plan without the whole resulting tree (which can have 60 000 entries): its size stands for it."""
    rest = {field.name: plain(getattr(plan, field.name)) for field in dataclasses.fields(plan) if field.name not in ("result", "changes")}
    changes = {"changed_files": len(plan.changes)} | ({"changes": plain(plan.changes)} if files else {})
    return rest | changes | {"result": {"files": len(plan.result.files), "bytes": plan.result.bytes}}


def manifest(manifest: Manifest, files: bool) -> dict[str, Any]:
    """Return a snapshot's manifest, its file list only when asked for."""
    rest = {field.name: plain(getattr(manifest, field.name)) for field in dataclasses.fields(manifest) if field.name != "files"}
    return rest | ({"files": plain(manifest.files)} if files else {})


def event(event: Event) -> dict[str, Any]:
    """Return an event as a JSON line's object."""
    kind = "progress" if isinstance(event, Progress) else "note" if isinstance(event, Note) else "step"
    return {"type": kind, **fields(event)}


def error(problem: DeployError, code: int, log: str) -> dict[str, Any]:
    """Return an error as the last JSON line's object."""
    return {
        "type": "error",
        "schema": SCHEMA,
        "code": code,
        "kind": problem.kind,
        "message": problem.message,
        "causes": list(problem.causes),
        "mend": problem.mend,
        "log": log,
    }
