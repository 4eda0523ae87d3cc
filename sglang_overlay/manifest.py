"""Read and write `manifest.toml`: what each supported SGLang version starts from and what we make of it."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_overlay.errors import UnknownVersion

MANIFEST = Path(__file__).with_name("manifest.toml")
Span = tuple[int, int]  # byte offset and length of one insertion, in the built file
Read = Callable[[str], bytes | None]  # the bytes of a path relative to site-packages, None when it is not there


@dataclass(frozen=True, slots=True)
class Pinned:
    """One SGLang version: how DDTree enters it, and the sha256 of each file involved.

    `base` are the stock files that we edit (or, for a plugin, call into); `reads` those whose behaviour we rely on
    without touching them; `built` our results and `spans` where our text sits in them, both empty for a plugin.
    """

    version: str
    route: str  # "overlay": edited files; "plugin": registered at start, no file edited
    base: Mapping[str, str]
    reads: Mapping[str, str]
    built: Mapping[str, str]
    spans: Mapping[str, tuple[Span, ...]]
    pins: Mapping[str, str]

    @property
    def overlay_id(self) -> str:
        """Name the result: sha256 over the built files' paths and digests."""
        listing = "".join(f"{digest}  {path}\n" for path, digest in sorted(self.built.items()))
        return hashlib.sha256(listing.encode()).hexdigest()


def load(path: Path = MANIFEST) -> dict[str, Pinned]:
    """Return the pinned versions, oldest first."""
    table = tomllib.loads(path.read_text())
    return {
        version: Pinned(
            version=version,
            route=entry["route"],
            base=entry.get("base", {}),
            reads=entry.get("reads", {}),
            built=entry.get("built", {}),
            spans={name: tuple((at, size) for at, size in spans) for name, spans in entry.get("spans", {}).items()},
            pins=entry.get("pins", {}),
        )
        for version, entry in table["sglang"].items()
    }


def pinned(version: str, path: Path = MANIFEST) -> Pinned:
    """Return one version's pins. Raises UnknownVersion."""
    versions = load(path)
    if version not in versions:
        raise UnknownVersion(f"sglang {version} is not supported, only {', '.join(versions)}")
    return versions[version]


def dump(versions: Mapping[str, Pinned], path: Path = MANIFEST) -> None:
    """Write the manifest; `load` reads the same back."""
    out = ["# Written by `python -m sglang_overlay pin`. Digests are sha256; paths are relative to site-packages."]
    for version, entry in versions.items():
        out += ["", f'[sglang."{version}"]', f'route = "{entry.route}"']
        for name in ("pins", "base", "reads", "built"):
            table = getattr(entry, name)
            if table:
                out += ["", f'[sglang."{version}".{name}]', *(f'"{key}" = "{value}"' for key, value in table.items())]
        if entry.spans:
            out += ["", f'[sglang."{version}".spans]']
            out += [f'"{key}" = {[list(span) for span in spans]}' for key, spans in entry.spans.items()]
    path.write_text("\n".join(out) + "\n")


def reader(site: Path) -> Read:
    """Return what reads files of a site on this machine."""

    def read(path: str) -> bytes | None:
        try:
            return (site / path).read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    return read


def sha256(data: bytes) -> str:
    """Return the hex sha256 of `data`."""
    return hashlib.sha256(data).hexdigest()
