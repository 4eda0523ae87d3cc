"""The canonical form of a manifest: JSON with sorted keys; its sha256 is the snapshot's identity. Nothing in it is trusted."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ddtree_deploy.agent.paths import HostilePath, below, is_plain, parse, parse_link
from ddtree_deploy.errors import IntegrityFailure
from ddtree_deploy.models import (
    PATCHED,
    STOCK,
    UNOWNED,
    Distribution,
    FileEntry,
    Finding,
    Manifest,
    PythonFacts,
    ServerCapture,
)

SCHEMA = 1
_HEX = re.compile(r"[0-9a-f]{64}")
_MODES = (0o644, 0o755)
_TOO_LARGE = 1 << 50
_ORIGINS = (STOCK, PATCHED, UNOWNED)
_PYTHON_FIELDS = tuple(PythonFacts.__dataclass_fields__)


def encode(manifest: Manifest) -> bytes:
    """Return the canonical bytes of a manifest."""
    document = {
        "schema": SCHEMA,
        "host": manifest.host,
        "venv": manifest.venv,
        "python": {name: getattr(manifest.python, name) for name in _PYTHON_FIELDS},
        "distributions": [
            [d.name, d.version, d.directory, d.build, d.packages, d.scripts, d.requires, *([d.shares] if d.shares else ())]
            for d in manifest.distributions
        ],
        "files": manifest.files,
        "findings": [[f.kind, f.where, f.text] for f in manifest.findings],
        "servers": [[list(s.argv), dict(s.env), s.cwd] for s in manifest.servers],
        "facts": manifest.facts,
    }
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def identity(data: bytes) -> str:
    """Return the identity of canonical bytes."""
    return hashlib.sha256(data).hexdigest()


def decode(data: bytes, *, expect: str | None = None) -> Manifest:
    """Return the manifest in `data`; raise IntegrityFailure naming every fault (at most 20), or a digest that is not `expect`."""
    if expect is not None and identity(data) != expect:
        raise IntegrityFailure(f"manifest `{expect[:12]}` does not have that digest")
    try:
        document = json.loads(data)
        if document["schema"] != SCHEMA:
            raise IntegrityFailure(
                f"a manifest of schema {document['schema']!r}, this version reads {SCHEMA}",
                mend="use the version of ddtree-deploy that wrote it",
            )
        files = _files(document["files"], len(document["distributions"]))
        return Manifest(
            host=str(document["host"]),
            venv=str(document["venv"]),
            python=python_facts(document["python"]),
            distributions=tuple(_distribution(row) for row in document["distributions"]),
            files=files,
            findings=tuple(Finding(str(kind), str(where), str(text)) for kind, where, text in document["findings"]),
            servers=tuple(
                ServerCapture(tuple(map(str, argv)), {str(k): str(v) for k, v in env.items()}, str(cwd))
                for argv, env, cwd in document["servers"]
            ),
            facts=dict(document["facts"]),
        )
    except (HostilePath, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise IntegrityFailure("a malformed manifest", causes=(f"{type(error).__name__}: {error}",)) from error


def python_facts(value: Mapping[str, Any]) -> PythonFacts:
    """Return the facts of an interpreter out of JSON; unknown keys are ignored, missing ones raise KeyError."""
    fields: dict[str, Any] = {name: value[name] if name in ("debug", "free_threaded") else str(value[name]) for name in _PYTHON_FIELDS}
    return PythonFacts(**fields)


def _distribution(row: Any) -> Distribution:
    name, version, directory, build, packages, scripts, requires, *shares = row
    parse(directory)
    return Distribution(
        str(name), str(version), directory, str(build), tuple(map(str, packages)),
        tuple((str(n), str(t)) for n, t in scripts), tuple(map(str, requires)), tuple(str(path) for paths in shares for path in paths),
    )  # fmt: skip


def _files(rows: Iterable[Any], owners: int) -> tuple[FileEntry, ...]:
    faults: list[str] = []
    out: list[FileEntry] = []
    seen: set[str] = set()
    links: set[str] = set()
    for row in rows:
        try:
            entry = FileEntry(*row)
            path, kind, mode, size, digest, origin, owner = entry
            # The common case in one expression, since a tree has tens of thousands of files; `_check` says what is wrong.
            if not (
                kind == "f" and mode in _MODES and type(size) is int and 0 <= size < _TOO_LARGE and origin in _ORIGINS
                and type(owner) is int and -1 <= owner < owners and is_plain(path) and _HEX.fullmatch(digest)
            ):  # fmt: skip
                _check(entry, owners)
            if path in seen:
                raise HostilePath(f"a path that is named twice: {entry.path!r}")
            seen.add(entry.path)
            if entry.kind == "l":
                links.add(entry.path)
            out.append(entry)
        except (HostilePath, TypeError, ValueError) as error:
            faults.append(str(error))
    if links:
        for entry in out:
            try:
                below(links, entry.path)
            except HostilePath as error:
                faults.append(str(error))
    if faults:
        raise IntegrityFailure(f"the manifest is malformed or hostile: {len(faults)} faults", causes=tuple(faults[:20]))
    return tuple(out)


def _check(entry: FileEntry, owners: int) -> None:
    parse(entry.path)
    if entry.kind == "l":
        parse_link(entry.path, entry.digest)
    elif entry.kind != "f":
        raise HostilePath(f"an entry that is neither a file nor a link: {entry.path!r}")
    elif not _HEX.fullmatch(entry.digest) or entry.mode not in _MODES:
        raise HostilePath(f"a file with a malformed digest or mode: {entry.path!r}")
    if type(entry.size) is not int or not 0 <= entry.size < _TOO_LARGE:
        raise HostilePath(f"a file with an impossible size: {entry.path!r}")
    if entry.origin not in _ORIGINS or type(entry.owner) is not int or not -1 <= entry.owner < owners:
        raise HostilePath(f"a file with an unknown origin or owner: {entry.path!r}")
