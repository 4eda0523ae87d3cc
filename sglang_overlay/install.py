"""Write the overlay into a site and take it out again: one rename a file, and all or nothing."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_overlay.build import State, build, check, cut, installed_version, overlay_pins
from sglang_overlay.edits.v0_5_11 import NEW_FILE
from sglang_overlay.errors import BaseMismatch, BuildMismatch, OverlayError
from sglang_overlay.manifest import sha256


@dataclass(frozen=True, slots=True)
class Change:
    """What `apply` or `revert` did: the paths written, and those removed."""

    version: str
    overlay_id: str
    written: tuple[str, ...]
    removed: tuple[str, ...]


def apply(site: Path, version: str | None = None) -> Change:
    """Write the patched files into a stock site; into a patched one, write nothing. Raises as `build` does."""
    version = version or installed_version(site)
    pins = overlay_pins(version)
    if check(site, version).is_built:
        return Change(version, pins.overlay_id, (), ())
    files = build(site, version)
    # The new file first: the edited ones import it, so no moment has an import that fails.
    ordered = sorted(files, key=lambda f: f.path != NEW_FILE)
    _replace(site, {f.path: f.data for f in ordered})
    return Change(version, pins.overlay_id, tuple(f.path for f in ordered), ())


def revert(site: Path, version: str | None = None) -> Change:
    """Cut our insertions out again and remove the new file. Needs no wheel: the manifest knows where they are.

    Raises BaseMismatch when a file is neither stock nor built, and then changes nothing.
    """
    version = version or installed_version(site)
    pins, state = overlay_pins(version), check(site, version)
    if state.foreign:
        raise BaseMismatch(
            f"{len(state.foreign)} files are neither stock nor this overlay's, so they can not be reverted",
            causes=state.foreign,
        )
    built = [f.path for f in state.files if f.state is State.BUILT]
    back = {p: cut((site / p).read_bytes(), pins.spans[p]) for p in built if p in pins.base}
    for path, data in back.items():
        if sha256(data) != pins.base[path]:
            raise BuildMismatch(f"cutting our insertions out of `{path}` does not give the stock file back")
    _replace(site, back)
    removed = [path for path in built if path not in pins.base]
    for path in removed:
        (site / path).unlink()
    return Change(version, pins.overlay_id, tuple(back), tuple(removed))


def _replace(site: Path, files: Mapping[str, bytes]) -> None:
    """Replace each file by a rename; when one fails, put back what was there before and raise."""
    before = {path: (site / path).read_bytes() if (site / path).exists() else None for path in files}
    done: list[str] = []
    try:
        for path, data in files.items():
            _write(site / path, data)
            done.append(path)
    except OSError as error:
        for path in reversed(done):
            old = before[path]
            if old is None:
                (site / path).unlink()
            else:
                _write(site / path, old)
        raise OverlayError(
            f"cannot write `{site / path}`: {error.strerror}",
            mend=f"nothing was changed: check the permissions and the space of `{site}`",
        ) from error


def _write(path: Path, data: bytes) -> None:
    """Write beside `path`, flush to disk, and rename over it, keeping its mode. Hard links elsewhere stay."""
    mode = path.stat().st_mode & 0o7777 if path.exists() else 0o644
    with _temporary(path) as (descriptor, name):
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
        Path(name).replace(path)


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[tuple[int, str]]:
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        yield descriptor, name
    finally:
        Path(name).unlink(missing_ok=True)
