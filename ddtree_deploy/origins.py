"""Say where each file of a tree comes from: which distribution, and whether it still is what RECORD says. Pure."""

from __future__ import annotations

import os.path
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree_deploy.agent.paths import HostilePath, parse, parse_link
from ddtree_deploy.models import PATCHED, STOCK, UNOWNED, Distribution, FileEntry, Finding

#: Findings that make a snapshot something else than what ran on the host: refused without `--allow-drift`.
DRIFT = frozenset({"editable", "pth-path", "outside-link", "missing", "special", "hostile-name", "changed"})
#: Directories that careless wheels drop at the top level: no claim on an import package.
_NOT_PACKAGES = frozenset({"tests", "test", "docs", "doc", "examples", "benchmarks", "scripts"})


@dataclass(frozen=True, slots=True)
class Classified:
    """The distributions and files of a tree, and what a reader must know about it."""

    distributions: tuple[Distribution, ...]
    files: tuple[FileEntry, ...]
    findings: tuple[Finding, ...]


def classify(scan: Mapping[str, Any], digests: Mapping[str, str | None]) -> Classified:
    """Turn what the agent scanned (`files`, `distributions`, `pth`, `torch`) into owned, judged files.

    `digests` maps the path of every regular file to its sha256; None means that it changed while it was read.
    """
    rows = scan["distributions"]
    owner, recorded, shared, findings = _ownership(rows)
    findings += _pth(scan["pth"])
    files: list[FileEntry] = []
    seen: set[str] = set()
    for path, kind, mode, size, *_stamp, target, _known in scan["files"]:
        seen.add(path)
        fault = _fault(path, kind, target)
        if fault:
            findings.append(fault)
            continue
        who = owner.get(path, -1)
        if kind == "l":
            files.append(FileEntry(path, "l", 0o777, 0, target, STOCK if who >= 0 else UNOWNED, who))
            continue
        digest = digests.get(path)
        if digest is None:
            findings.append(Finding("changed", path, "changed while it was read"))
            continue
        origin = UNOWNED if who < 0 else PATCHED if recorded.get(path) not in (None, digest) else STOCK
        files.append(FileEntry(path, "f", 0o755 if mode & 0o111 else 0o644, size, digest, origin, who))
    for path in recorded:
        if path not in seen and not path.startswith("..") and "__pycache__" not in path:
            findings.append(Finding("missing", path, f"in RECORD of {rows[owner[path]]['name']}, not on the disk"))
    distributions = _distributions(rows, files, shared, scan.get("torch") or {})
    return Classified(distributions, tuple(sorted(files)), tuple(sorted(findings, key=lambda f: (f.kind, f.where))))


def _ownership(
    rows: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, int], dict[str, str | None], dict[tuple[int, int], list[str]], list[Finding]]:
    """Return the first owner of each path, its hash by RECORD, what later ones (first owner, later one) list too, and findings."""
    owner: dict[str, int] = {}
    recorded: dict[str, str | None] = {}
    findings: list[Finding] = []
    outside: Counter[str] = Counter()
    shared: dict[tuple[int, int], list[str]] = {}
    names: Counter[str] = Counter(_canonical(row["name"]) for row in rows)
    for name, count in names.items():
        if count > 1:
            findings.append(Finding("duplicate", name, f"{count} dist-info directories: one is left over from an interrupted install"))
    for index, row in enumerate(rows):
        if row["editable"]:
            text = f"installed in place from {row['editable']}: install it as a wheel (`pip install .`) first"
            findings.append(Finding("editable", row["name"], text))
        if row["record"] is None:
            findings.append(Finding("no-record", row["dir"], "has no RECORD: its files count as unowned"))
            owner[f"{row['dir']}/METADATA"] = index
            continue
        for path, digest in row["record"]:
            if path.startswith(("..", "/")):
                if "/bin/" not in path:
                    outside[row["name"]] += 1
                continue
            if path in owner and owner[path] != index:
                shared.setdefault((owner[path], index), []).append(path)
                if recorded.get(path) is None:
                    recorded[path] = digest
                continue
            owner[path] = index
            recorded[path] = digest
    for name, count in sorted(outside.items()):
        text = f"{count} files outside site-packages (data, headers, manual pages) are not carried"
        findings.append(Finding("outside-files", name, text))
    for (first, second), paths in sorted(shared.items()):
        findings.append(Finding("two-owners", rows[second]["name"], f"{len(paths)} files also belong to {rows[first]['name']}"))
    return owner, recorded, shared, findings


def _pth(rows: Sequence[Sequence[Any]]) -> list[Finding]:
    out = []
    for name, paths, code in rows:
        for line in paths:
            if line.startswith("/") or os.path.normpath(line).startswith(".."):
                text = f"puts `{line}` on the path, which is not carried: install what is there into the venv"
                out.append(Finding("pth-path", name, text))
        if name.startswith("__editable__"):
            out.append(Finding("editable", name, "an editable install: install it as a wheel (`pip install .`) first"))
        elif code and not name.startswith(("distutils-precedence", "_virtualenv")):
            out.append(Finding("pth-code", name, f"runs code at start-up: {code[0][:80]}"))
    return out


def _fault(path: str, kind: str, target: str) -> Finding | None:
    try:
        parse(path)
        if kind == "l":
            parse_link(path, target)
    except HostilePath as error:
        if kind == "l":
            return Finding("outside-link", path, f"a link to `{target}`, which is not carried: replace it by what it points to")
        return Finding("hostile-name", repr(path), str(error))
    if kind == "?":
        return Finding("special", path, "a socket, pipe, device, or a directory too deep for a path: remove it")
    return None


def import_packages(paths: Sequence[str]) -> tuple[str, ...]:
    """Return the import packages among a distribution's paths: directories with `__init__.py`, modules, top-level extensions."""
    found = set()
    for path in paths:
        head, _, rest = path.partition("/")
        if rest in ("__init__.py", "__init__.pyi"):
            if rest == "__init__.py":
                found.add(head)
        elif not rest and head.endswith(".py"):
            found.add(head[:-3])
        elif not rest and head.endswith(".so") and head.count("."):
            found.add(head.split(".", 1)[0])
    return tuple(sorted(name for name in found if name.isidentifier() and name not in _NOT_PACKAGES))


def _distributions(
    rows: Sequence[Mapping[str, Any]], files: Sequence[FileEntry], shared: Mapping[tuple[int, int], Sequence[str]], torch: Mapping[str, Any]
) -> tuple[Distribution, ...]:
    owned: dict[int, list[str]] = {}
    there = {entry.path for entry in files} if shared else set()
    for entry in files:
        owned.setdefault(entry.owner, []).append(entry.path)
    out = []
    for index, row in enumerate(rows):
        paths = owned.get(index, [])
        build = ""
        if "torch/version.py" in paths and torch.get("version") and torch["version"] != row["version"]:
            build = torch["version"]
        out.append(
            Distribution(
                name=row["name"],
                version=row["version"],
                directory=row["dir"],
                build=build,
                packages=import_packages(paths),
                scripts=tuple((name, target) for name, target in row["scripts"]),
                requires=tuple(row["requires"]),
                shares=tuple(sorted({path for (_first, who), paths in shared.items() if who == index for path in paths if path in there})),
            )
        )
    return tuple(out)


def _canonical(name: str) -> str:
    from packaging.utils import canonicalize_name

    return canonicalize_name(name)
