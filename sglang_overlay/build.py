"""Turn the stock files of a pinned SGLang version into the patched ones, and recognise both.

Nothing here writes. `site` is always the directory that holds the `sglang` package.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from sglang_overlay.anchors import locate, offset
from sglang_overlay.edits import Edit, v0_5_11
from sglang_overlay.errors import BaseMismatch, BuildMismatch, UnknownVersion
from sglang_overlay.manifest import Pinned, Read, Span, pinned, reader, sha256
from sglang_overlay.vendor import ddtree_utils

EDITS: Mapping[str, tuple[Edit, ...]] = {"0.5.11": v0_5_11.EDITS}


class State(StrEnum):
    """What one file of a site is."""

    STOCK = "stock"
    BUILT = "built"
    OTHER = "other"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class BuiltFile:
    """One result: its bytes, and where our insertions are in them (the new file has none: it is all ours)."""

    path: str
    data: bytes
    spans: tuple[Span, ...]

    @property
    def sha256(self) -> str:
        return sha256(self.data)


@dataclass(frozen=True, slots=True)
class FileState:
    """The state of one file in a site, and the digest found there (None when missing)."""

    path: str
    state: State
    found: str | None


@dataclass(frozen=True, slots=True)
class Check:
    """The state of each file that the overlay touches."""

    version: str
    overlay_id: str
    files: tuple[FileState, ...]

    @property
    def is_stock(self) -> bool:
        """Say whether nothing of the overlay, and nothing of anybody else, is there."""
        edited = [f for f in self.files if f.path != v0_5_11.NEW_FILE]
        new = [f for f in self.files if f.path == v0_5_11.NEW_FILE]
        return all(f.state is State.STOCK for f in edited) and all(f.state is State.MISSING for f in new)

    @property
    def is_built(self) -> bool:
        """Say whether every file is the built one, byte for byte."""
        return all(f.state is State.BUILT for f in self.files)

    @property
    def foreign(self) -> tuple[str, ...]:
        """Name the files that are neither stock nor ours."""
        wrong = {State.OTHER, State.MISSING}
        return tuple(f.path for f in self.files if f.state in wrong and not (f.path == v0_5_11.NEW_FILE and f.found is None))


def installed_version(site: Path) -> str:
    """Return the version of the sglang distribution in `site`. Raises UnknownVersion when there is not exactly one."""
    found = [p.name.removeprefix("sglang-").removesuffix(".dist-info") for p in site.glob("sglang-*.dist-info")]
    if len(found) != 1:
        mend = "give the site-packages directory that holds `sglang`, or a version with `--version`"
        raise UnknownVersion(f"`{site}` has {len(found)} sglang distributions", mend=mend)
    return found[0]


def insert(path: str, source: bytes, edits: Sequence[Edit]) -> BuiltFile:
    """Insert the edits of one file into its stock source. Raises AnchorMismatch, or BuildMismatch if it won't parse."""
    tree = ast.parse(source)
    places = sorted(
        (
            (offset(source, node, edit.where), order, edit.text.encode())
            for order, edit in enumerate(edits)
            for node in locate(tree, edit.anchor, path)
        ),
        key=lambda place: place[:2],
    )
    out, spans, done = bytearray(), [], 0
    for at, _, text in places:
        out += source[done:at]
        spans.append((len(out), len(text)))
        out += text
        done = at
    out += source[done:]
    try:
        ast.parse(bytes(out), filename=path, feature_version=(3, 10))
    except SyntaxError as error:
        raise BuildMismatch(f"the edits make `{path}` unparsable: {error}") from error
    return BuiltFile(path, bytes(out), tuple(spans))


def cut(data: bytes, spans: Sequence[Span]) -> bytes:
    """Remove the insertions again."""
    out, done = bytearray(), 0
    for at, size in spans:
        out += data[done:at]
        done = at + size
    return bytes(out + data[done:])


def make(read: Read, version: str) -> tuple[BuiltFile, ...]:
    """Build without comparing with the manifest's results; the base is checked. For `build` and for pinning."""
    pins = pinned(version)
    edits = EDITS.get(version)
    if edits is None:
        raise UnknownVersion(f"sglang {version} has no edited files: its route is `{pins.route}`")
    stock = {path: read(path) for path in pins.base}
    found = {path: "missing" if data is None else sha256(data) for path, data in stock.items()}
    wrong = [f"{path}: {found[path]}, expected {want}" for path, want in pins.base.items() if found[path] != want]
    if wrong:
        raise BaseMismatch(f"{len(wrong)} of {len(pins.base)} files are not those of sglang {version}", causes=tuple(wrong))
    edited = [insert(path, data, [e for e in edits if e.path == path]) for path, data in stock.items() if data is not None]
    new = ddtree_utils(version, {f.path: f.sha256 for f in edited}, pins.reads)
    return (*edited, BuiltFile(v0_5_11.NEW_FILE, new, ()))


def build(site: Path, version: str | None = None) -> tuple[BuiltFile, ...]:
    """Build the patched files from a stock site. Raises as `build_from`."""
    return build_from(reader(site), version or installed_version(site))


def build_from(read: Read, version: str) -> tuple[BuiltFile, ...]:
    """Build the patched files from stock content.

    Raises BaseMismatch if any base file has a changed byte, BuildMismatch if a result is not the pinned one.
    """
    files = make(read, version)
    want = pinned(version).built
    wrong = [f"{f.path}: {f.sha256}, pinned {want.get(f.path)}" for f in files if want.get(f.path) != f.sha256]
    if wrong:
        raise BuildMismatch(f"{len(wrong)} of {len(files)} results are not the pinned ones", causes=tuple(wrong))
    return files


def check(site: Path, version: str | None = None) -> Check:
    """Say for each file of the overlay whether it is stock, built, somebody else's, or missing."""
    version = version or installed_version(site)
    pins, read = overlay_pins(version), reader(site)
    found = {path: read(path) for path in pins.built}
    return classify(pins, {path: None if data is None else sha256(data) for path, data in found.items()})


def classify(pins: Pinned, digests: Mapping[str, str | None]) -> Check:
    """Do the same for digests that were read elsewhere, on a host or in a snapshot."""
    files = []
    for path, want in pins.built.items():
        found = digests.get(path)
        state = State.OTHER
        if found is None:
            state = State.MISSING
        elif found == want:
            state = State.BUILT
        elif found == pins.base.get(path):
            state = State.STOCK
        files.append(FileState(path, state, found))
    return Check(pins.version, pins.overlay_id, tuple(files))


def recognise(version: str, digests: Mapping[str, str]) -> Check:
    """Say what a host or a snapshot carries, from the sha256 of its files by path relative to site-packages.

    Raises UnknownVersion for a version without edited files.
    """
    return classify(overlay_pins(version), digests)


def describe(state: Check) -> str:
    """Say in one line what a site carries."""
    if state.is_built:
        return f"ddtree overlay {state.overlay_id[:7]}, byte-identical"
    if state.is_stock:
        return "stock"
    if state.foreign:
        return f"patched by somebody else: {', '.join(state.foreign)}"
    return f"ddtree overlay {state.overlay_id[:7]}, incomplete"


def diff(site: Path, stock: Path, version: str | None = None) -> str:
    """Return the unified diff from the stock files to a site's, for the files the overlay knows; "" when equal."""
    version = version or installed_version(site)
    out: list[str] = []
    for path in overlay_pins(version).built:
        before, after = _text(stock / path), _text(site / path)
        out += difflib.unified_diff(before, after, f"stock/{path}", f"site/{path}")
    return "".join(out)


def overlay_pins(version: str) -> Pinned:
    """Return the pins of a version with edited files. Raises UnknownVersion for any other."""
    pins = pinned(version)
    if pins.route != "overlay":
        mend = "use a version with an overlay: see `ddtree-deploy overlay list`"
        if pins.route == "plugin":
            mend = "nothing to build: DDTREE registers itself when this package is installed beside sglang"
        raise UnknownVersion(f"sglang {version} has no edited files: its route is `{pins.route}`", mend=mend)
    return pins


def _text(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return []
