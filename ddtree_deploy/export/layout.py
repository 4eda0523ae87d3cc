"""An OCI image layout on the disk: read an image out of one, add blobs and an index to one."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import tarfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import zstandard

from ddtree_deploy.agent import durable
from ddtree_deploy.errors import IntegrityFailure, UsageProblem
from ddtree_deploy.export import image
from ddtree_deploy.export.tar import CHUNK

MARK = {"imageLayoutVersion": "1.0.0"}
# Manifests and configurations are small; a base must not make us read an endless one.
_LARGEST_DOCUMENT = 16 << 20


class Layout:
    """The layout in `root`: `oci-layout`, `index.json`, `blobs/sha256/`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.blobs = root / "blobs" / "sha256"

    @classmethod
    def at(cls, root: Path) -> Layout:
        """Open a layout. Raises UsageProblem when the directory is not one, or is of a version that is not known."""
        mark = durable.read_json(os.fspath(root / "oci-layout"))
        if mark is None or durable.read_json(os.fspath(root / "index.json")) is None:
            raise UsageProblem(f"`{root}` is not an OCI image layout", mend="`skopeo copy SOURCE oci:DIR` makes one")
        if mark.get("imageLayoutVersion") != MARK["imageLayoutVersion"]:
            raise UsageProblem(f"`{root}` is a layout of version {mark.get('imageLayoutVersion')!r}, this version reads 1.0.0")
        return cls(root)

    def entries(self) -> list[dict[str, Any]]:
        """Return the descriptors of the index."""
        found = (durable.read_json(os.fspath(self.root / "index.json")) or {}).get("manifests", [])
        return [entry for entry in found if isinstance(entry, dict)]

    def names(self) -> list[str]:
        """Return the names of the images, as far as they have any."""
        return sorted(name for entry in self.entries() if (name := (entry.get("annotations") or {}).get(image.REF_NAME)))

    def blob(self, found: Mapping[str, Any]) -> Path:
        return self.blobs / image.digest_of(found)

    def document(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return a JSON blob. Raises IntegrityFailure when it is missing, is not what its digest says, or is no JSON object."""
        path = self.blob(found)
        try:
            if path.stat().st_size > _LARGEST_DOCUMENT:
                raise IntegrityFailure(f"blob `{path.name[:12]}` of `{self.root}` is too large for a document")
            data = path.read_bytes()
            value = json.loads(data)
        except (OSError, ValueError) as error:
            raise IntegrityFailure(f"blob `{path.name[:12]}` of `{self.root}` is missing or malformed", mend=_AGAIN) from error
        if hashlib.sha256(data).hexdigest() != path.name or not isinstance(value, dict):
            raise IntegrityFailure(f"blob `{path.name[:12]}` of `{self.root}` is not what its digest says", mend=_AGAIN)
        return value

    def base(self, name: str, architecture: str) -> image.Base:
        """Return the image `name` (empty: the only one) for `architecture`. Raises UsageProblem naming those that are there."""
        wanted = [entry for entry in self.entries() if not name or (entry.get("annotations") or {}).get(image.REF_NAME) == name]
        if len(wanted) != 1:
            there = ", ".join(f"`{known}`" for known in self.names()) or "none has a name"
            problem = f"has no image `{name}`" if name else f"has {len(wanted)} images"
            raise UsageProblem(f"`{self.root}` {problem}", mend=f"give `--base {self.root}:NAME`; there: {there}")
        found = self._for(wanted[0], architecture)
        manifest = self.document(found)
        config = self.document(manifest.get("config") or {})
        if (config.get("os"), config.get("architecture")) != ("linux", architecture):
            raise UsageProblem(f"the base is for {config.get('os')}/{config.get('architecture')}, the snapshot for linux/{architecture}")
        return image.Base("sha256:" + image.digest_of(found), tuple(manifest.get("layers") or ()), config)

    def _for(self, found: Mapping[str, Any], architecture: str) -> Mapping[str, Any]:
        """Follow indexes of several platforms to the manifest of one."""
        for _depth in range(4):
            if found.get("mediaType") not in (image.INDEX, "application/vnd.docker.distribution.manifest.list.v2+json"):
                return found
            inner = [entry for entry in self.document(found).get("manifests", []) if isinstance(entry, dict)]
            matching = [e for e in inner if (e.get("platform") or {}).get("architecture") == architecture]
            if not matching:
                raise UsageProblem(f"the base has no image for linux/{architecture}", mend="copy another one into the layout")
            found = matching[0]
        raise IntegrityFailure(f"the index of `{self.root}` is nested too deep")


_AGAIN = "copy the image into the layout again"
_MOST_NAMES = 1_000_000
_LIBC = re.compile(r"(^|/)libc(\.so\.6|-2\.\d+\.so)$")
_RELEASE = re.compile(rb"GNU C Library [^\n]* release version (\d+\.\d+)")


def copy_blob(source: Path, target: Path) -> None:
    """Copy a blob and check it on the way. Raises IntegrityFailure when it is missing or is not what its name says."""
    digest = hashlib.sha256()
    try:
        with source.open("rb") as old, target.open("wb") as new:
            while data := old.read(CHUNK):
                digest.update(data)
                new.write(data)
    except FileNotFoundError:
        raise IntegrityFailure(f"blob `{source.name[:12]}` of the base is missing", mend=_AGAIN) from None
    if digest.hexdigest() != source.name:
        raise IntegrityFailure(f"blob `{source.name[:12]}` of the base is not what its digest says", mend=_AGAIN)


@dataclass(frozen=True, slots=True)
class Brought:
    """What layers of a base bring: their paths, and the version of glibc (empty where none was found)."""

    names: frozenset[str] = frozenset()
    glibc: str = ""

    def __or__(self, above: Brought) -> Brought:
        return Brought(self.names | above.names, above.glibc or self.glibc)


def brought(blob: Path, media_type: str) -> Brought:
    """Look into a layer of a base; one that can not be read brings nothing that we know."""
    names: set[str] = set()
    glibc = ""
    unreadable = (tarfile.TarError, zstandard.ZstdError, OSError, EOFError, KeyError)
    with suppress(*unreadable), blob.open("rb") as file:
        stream: IO[bytes] = file
        if media_type.endswith("zstd"):
            stream = cast("IO[bytes]", zstandard.ZstdDecompressor().stream_reader(file))
        with tarfile.open(fileobj=stream, mode="r|*") as archive:
            for member in itertools.islice(archive, _MOST_NAMES):
                names.add(member.name.removeprefix("./"))
                # The library tells its own version; before 2.34 its file name did, too.
                if (
                    _LIBC.search(member.name)
                    and member.isreg()
                    and member.size < _LARGEST_DOCUMENT
                    and (held := archive.extractfile(member))
                ):
                    found = _RELEASE.search(held.read())
                    glibc = found[1].decode() if found else glibc
    return Brought(frozenset(names), glibc)
