"""Which distribution owns which file: read METADATA, RECORD, entry points and direct_url of every dist-info by hand.

importlib.metadata would parse each METADATA as e-mail; these are the few fields that are needed, for the whole tree in a
tenth of a second. Formats: the packaging specifications "Recording installed projects" and "Entry points".
"""

from __future__ import annotations

import base64
import binascii
import csv
import io
import json
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypedDict

    class Distribution(TypedDict):
        dir: str
        name: str
        version: str
        requires: list[str]
        installer: str
        record: list[list[str | None]] | None
        editable: str | None
        direct_url: str | None
        scripts: list[list[str]]


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return None


def _headers(text: str) -> dict[str, list[str]]:
    fields: dict[str, list[str]] = {}
    for line in text.splitlines():
        if not line:
            break
        key, sep, value = line.partition(": ")
        if sep and not line[0].isspace():
            fields.setdefault(key.lower(), []).append(value.strip())
    return fields


def record_digest(field: str) -> str | None:
    """Return the hex sha256 of a RECORD hash field (`sha256=<urlsafe base64, unpadded>`), or None."""
    name, _, value = field.partition("=")
    if name != "sha256" or not value:
        return None
    try:
        raw = base64.urlsafe_b64decode(value + "=" * (-len(value) % 4))
    except (binascii.Error, ValueError):
        return None
    return raw.hex() if len(raw) == 32 else None


def _record(text: str | None) -> list[list[str | None]] | None:
    """Return the rows of a RECORD, or None where there is none that can be read."""
    rows: list[list[str | None]] = []
    try:
        for row in csv.reader(io.StringIO(text or "")):
            if row and row[0]:
                rows.append([os.path.normpath(row[0]), record_digest(row[1]) if len(row) > 1 else None])
    except csv.Error:
        return None
    return None if text is None else rows


def _scripts(text: str | None) -> list[list[str]]:
    found = []
    section = ""
    for line in (text or "").splitlines():
        line = line.split("#", 1)[0].strip()
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1].strip()
        elif line and section in ("console_scripts", "gui_scripts") and "=" in line:
            name, _, target = line.partition("=")
            target = target.split("[", 1)[0].strip()
            found.append([name.strip(), target])
    return found


def read_distributions(root: str, records: bool = True) -> list[Distribution]:
    """Return one dict per `*.dist-info` directly below `root`, sorted by directory.

    Keys: `dir`, `name`, `version`, `requires`, `installer`, `record` (`[[path, sha256 or None], ...]`, paths normalised and
    relative to `root`; None when there is no RECORD), `editable` (target URL or None), `direct_url`, `scripts`
    (`[[name, "module:attr"], ...]`). Without `records` a RECORD that is there counts as empty: reading them is most of the time.
    """
    out: list[Distribution] = []
    for name in sorted(os.listdir(root)):
        if not name.endswith(".dist-info"):
            continue
        base = os.path.join(root, name)
        if not os.path.isdir(base):
            continue
        fields = _headers(_read(os.path.join(base, "METADATA")) or "")
        place = os.path.join(base, "RECORD")
        record = _read(place) if records else "" if os.path.isfile(place) else None
        url, editable = _direct_url(_read(os.path.join(base, "direct_url.json")))
        stem = name[: -len(".dist-info")]
        fallback, _, fallback_version = stem.partition("-")
        out.append(
            {
                "dir": name,
                "name": (fields.get("name") or [fallback])[0],
                "version": (fields.get("version") or [fallback_version])[0],
                "requires": fields.get("requires-dist") or [],
                "installer": (_read(os.path.join(base, "INSTALLER")) or "").strip(),
                "record": _record(record),
                "editable": editable,
                "direct_url": url,
                "scripts": _scripts(_read(os.path.join(base, "entry_points.txt"))),
            }
        )
    return out


def _direct_url(text: str | None) -> tuple[str | None, str | None]:
    if text is None:
        return None, None
    try:
        value = json.loads(text)
        url = str(value.get("url", ""))
        editable = bool(value.get("dir_info", {}).get("editable"))
    except (ValueError, AttributeError, RecursionError):
        return None, None
    # A URL may carry a password (https://user:secret@...): keep scheme and host only.
    scheme, sep, rest = url.partition("://")
    clean = scheme + sep + rest.rsplit("@", 1)[-1]
    return clean, clean if editable else None


def read_pth(root: str) -> list[list[str | list[str]]]:
    """Return `[[file, [path lines], [code lines]], ...]` of the `.pth` files directly below `root` (site's rules)."""
    out: list[list[str | list[str]]] = []
    for name in sorted(os.listdir(root)):
        if not name.endswith(".pth"):
            continue
        paths: list[str] = []
        code: list[str] = []
        for line in (_read(os.path.join(root, name)) or "").splitlines():
            line = line.strip()
            if line.startswith(("import ", "import\t")):
                code.append(line[:200])
            elif line and not line.startswith("#"):
                paths.append(line)
        out.append([name, paths, code])
    return out


def torch_version(root: str) -> dict[str, str | None]:
    """Return `torch/version.py`'s `__version__` and `cuda` as strings or None, without importing it."""
    import ast

    text = _read(os.path.join(root, "torch", "version.py"))
    found: dict[str, str | None] = {"version": None, "cuda": None}
    if text is None:
        return found
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return found
    for node in tree.body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)):
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                if target.id == "__version__":
                    found["version"] = node.value.value
                elif target.id == "cuda":
                    found["cuda"] = node.value.value
    return found
