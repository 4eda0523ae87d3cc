"""What somebody changed in a distribution: its files as they are, against the bytes that its publisher's RECORD vouches for.

Stock content is never guessed: it is taken from the store (another snapshot holds it), from a wheel that the user gives, or
by cutting our own insertions out; each by its sha256. Where none has it, the patch is named and not shown.
"""

from __future__ import annotations

import base64
import csv
import difflib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ddtree_deploy.errors import UsageProblem
from ddtree_deploy.models import PATCHED, UNOWNED, Manifest
from sglang_overlay import build, manifest
from sglang_overlay.errors import UnknownVersion
from sglang_overlay.manifest import Read, sha256

if TYPE_CHECKING:
    from ddtree_deploy.store import Store


@dataclass(frozen=True, slots=True)
class Tree:
    """One distribution as it is somewhere: sha256 by path as RECORD has it, sha256 by path of what is there, how to read that."""

    label: str
    version: str
    record: Mapping[str, str]
    files: Mapping[str, str]
    read: Read


@dataclass(frozen=True, slots=True)
class Patch:
    """One file that differs from its publisher's: `sign` is `~`, `+` or `-`; `diff` is None where the stock content is unknown."""

    sign: str
    path: str
    diff: str | None


def of_snapshot(store: Store, snapshot: Manifest, index: int, label: str) -> Tree:
    """Return distribution `index` of a snapshot, with the unowned files in its packages."""
    dist = snapshot.distributions[index]
    entries = {e.path: e for e in snapshot.files if e.kind == "f" and (e.owner == index or e.path.partition("/")[0] in dist.packages)}

    def read(path: str) -> bytes | None:
        return store.read(entries[path].digest) if path in entries else None

    record = parse_record(read(f"{dist.directory}/RECORD") or b"")
    return Tree(label, dist.version, record, {path: e.digest for path, e in entries.items() if _counts(path)}, read)


def of_directory(site: Path, version: str) -> Tree:
    """Return the sglang of a site-packages directory on this machine. Raises UsageProblem when it has no RECORD."""
    read = manifest.reader(site)
    raw = read(f"sglang-{version}.dist-info/RECORD")
    if raw is None:
        mend = "give the site-packages directory that sglang was installed into"
        raise UsageProblem(f"`{site}` has no RECORD of sglang {version}", mend=mend)
    record = parse_record(raw)
    # Its own package whole, for what somebody added there; besides, what its RECORD has elsewhere (a wheel may bring `tools/`).
    found = {path for path in (site / "sglang").rglob("*") if "__pycache__" not in path.parts} | {site / path for path in record}
    files = {path.relative_to(site).as_posix(): sha256(path.read_bytes()) for path in found if path.is_file()}
    return Tree(str(site), version, record, files, read)


def of_wheel(wheel: Path) -> Read:
    """Return what reads stock files out of a wheel. Raises UsageProblem when it is none."""
    try:
        archive = zipfile.ZipFile(wheel)
    except (OSError, zipfile.BadZipFile) as error:
        raise UsageProblem(f"`{wheel}` is not a wheel: {error}", mend="get it with `pip download --no-deps sglang==VERSION`") from error
    names = set(archive.namelist())
    return lambda path: archive.read(path) if path in names else None


def parse_record(raw: bytes) -> dict[str, str]:
    """Return sha256 (hex) by path of what a RECORD vouches for (PEP 627), bytecode and metadata left out.

    Raises UsageProblem when it is not one.
    """
    out = {}
    try:
        for path, digest, *_size in (row for row in csv.reader(raw.decode("utf-8", "surrogateescape").splitlines()) if len(row) >= 2):
            algorithm, _, value = digest.partition("=")
            if algorithm == "sha256" and _counts(path):
                out[path] = base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()
    except (csv.Error, ValueError) as problem:
        raise UsageProblem(f"a RECORD is damaged: {problem}", mend="give a wheel as its publisher made it") from None
    return out


def _counts(path: str) -> bool:
    return not path.startswith("..") and ".dist-info/" not in path and "__pycache__/" not in path


def patches(tree: Tree, stock: Sequence[Read]) -> Iterator[Patch]:
    """Yield what differs from RECORD, by path; `stock` are asked in turn for the content that RECORD vouches for."""
    sources = (*stock, _uncut(tree))
    for path in sorted(tree.record.keys() | tree.files.keys()):
        want, found = tree.record.get(path), tree.files.get(path)
        if want == found:
            continue
        before = b"" if want is None else next((data for read in sources if (data := read(path)) and sha256(data) == want), None)
        after = b"" if found is None else tree.read(path) or b""
        sign = "+" if want is None else "-" if found is None else "~"
        yield Patch(sign, path, None if before is None else unified(path, before, after))


def patches_of(store: Store, snapshot: Manifest, stock: Sequence[Read]) -> Iterator[Patch]:
    """Yield what was changed by hand in any distribution of a snapshot."""
    patched = {e.owner for e in snapshot.files if e.origin == PATCHED}
    added = {e.path.partition("/")[0] for e in snapshot.files if e.origin == UNOWNED}
    for index, dist in enumerate(snapshot.distributions):
        if index in patched or added.intersection(dist.packages):
            tree = of_snapshot(store, snapshot, index, dist.name)
            yield from patches(tree, [in_store(store, tree.record), *stock])


def in_store(store: Store, record: Mapping[str, str]) -> Read:
    """Return what reads out of the store the content that `record` vouches for."""

    def read(path: str) -> bytes | None:
        digest = record.get(path, "")
        return store.read(digest) if digest and store.path(digest).exists() else None

    return read


def _uncut(tree: Tree) -> Read:
    """Return what cuts the overlay's insertions out of its built files again."""
    try:
        pins = build.overlay_pins(tree.version)
    except UnknownVersion:
        return lambda _path: None

    def read(path: str) -> bytes | None:
        if path in pins.spans and tree.files.get(path) == pins.built[path]:
            return build.cut(tree.read(path) or b"", pins.spans[path])
        return None

    return read


def unified(path: str, before: bytes, after: bytes) -> str:
    """Return the unified diff of two contents, or one line that says that they are no text."""
    try:
        old, new = (data.decode().splitlines(keepends=True) for data in (before, after))
    except UnicodeDecodeError:
        return f"binary files stock/{path} and {path} differ\n"
    # A file whose last line is not ended would run into the next file's header.
    return "".join(line if line.endswith("\n") else line + "\n" for line in difflib.unified_diff(old, new, f"stock/{path}", path))
