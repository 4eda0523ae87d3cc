"""A snapshot in a store, and a reader of layouts that shares no code with the writer."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import zstandard

from ddtree_deploy.export.image import ARCHITECTURES
from ddtree_deploy.export.oci import ExportOptions
from ddtree_deploy.snapshot import take
from ddtree_deploy.store import Store
from tests.fixtures.venvs import make_venv, package, site
from tests.fixtures.world import local


@dataclass(frozen=True)
class Case:
    """A store with one snapshot of a venv: `alpha` patched by hand, `beta` with a console script, a link, a loose file."""

    root: Path
    store: Store
    venv: Path
    snapshot: str

    def options(self, directory: Path, **fields: Any) -> ExportOptions:
        return replace(ExportOptions(directory), **fields)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    root = tmp_path_factory.mktemp("export")
    venv = make_venv(root / "venv", package("alpha", "2.0", data=70_000), package("beta", "1.0"))
    (site(venv) / "alpha/m0.py").write_text("OWN = 'by hand'\n")
    (site(venv) / "beta/again.py").symlink_to("m1.py")
    (site(venv) / "beta/ünï-name.txt").write_text("long " * 50)
    deep = site(venv) / "beta" / ("d" * 90) / ("e" * 90)
    deep.mkdir(parents=True)
    (deep / "deep.py").write_text("DEEP = 1\n")
    store = Store.open(root / "home")
    return Case(root, store, venv, take(local(venv), store, probe=False, allow_drift=True).ref.id)


def blob(layout: Path, descriptor: dict[str, Any]) -> bytes:
    """Return a blob after checking its size and its digest."""
    algorithm, _, digest = descriptor["digest"].partition(":")
    data = (layout / "blobs" / algorithm / digest).read_bytes()
    assert len(data) == descriptor["size"] and hashlib.new(algorithm, data).hexdigest() == digest
    return data


@dataclass(frozen=True)
class Read:
    """An image as it was read: its manifest, its configuration, and the layers' tars, bottom up."""

    manifest: dict[str, Any]
    config: dict[str, Any]
    tars: list[bytes]

    def members(self, at: int) -> dict[str, tarfile.TarInfo]:
        with tarfile.open(fileobj=io.BytesIO(self.tars[at])) as archive:
            found = archive.getmembers()
            assert len({member.name for member in found}) == len(found), "a member twice"
            return {member.name: member for member in found}


def read_image(layout: Path, tag: str) -> Read:
    """Read an image as the image specification says, and check all that it promises of digests and sizes."""
    assert json.loads((layout / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    index = json.loads((layout / "index.json").read_text())
    (entry,) = [e for e in index["manifests"] if e["annotations"]["org.opencontainers.image.ref.name"] == tag]
    manifest = json.loads(blob(layout, entry))
    config = json.loads(blob(layout, manifest["config"]))
    tars = []
    for layer, diff_id in zip(manifest["layers"], config["rootfs"]["diff_ids"], strict=True):
        data = blob(layout, layer)
        if layer["mediaType"].endswith("gzip"):
            data = gzip.decompress(data)
        elif layer["mediaType"].endswith("zstd"):
            data = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)).read()
        assert "sha256:" + hashlib.sha256(data).hexdigest() == diff_id
        tars.append(data)
    if "history" in config:
        assert sum(not step.get("empty_layer") for step in config["history"]) == len(tars)
    return Read(manifest, config, tars)


def unpack(read: Read, root: Path) -> Path:
    """Extract the layers in order."""
    for data in read.tars:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            archive.extractall(root, filter="tar")
    return root


def names(directory: Path) -> list[str]:
    return sorted(os.fspath(path.relative_to(directory)) for path in directory.rglob("*")) if directory.exists() else []


def make_base(at: Path, files: Mapping[str, bytes], links: Mapping[str, str] | None = None) -> Path:
    """Make a base image `py:3`: one gzip layer below an index of platforms; a user, a command, an environment of its own."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o755
            archive.addfile(info, io.BytesIO(data))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            archive.addfile(info)
    (at / "blobs/sha256").mkdir(parents=True)

    def put(data: bytes, media: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (at / "blobs/sha256" / digest).write_bytes(data)
        return {"mediaType": f"application/vnd.{media}", "digest": f"sha256:{digest}", "size": len(data)}

    platform = {"os": "linux", "architecture": ARCHITECTURES[os.uname().machine]}
    config = {
        **platform, "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(raw.getvalue()).hexdigest()]},
        "config": {"User": "app", "Cmd": ["python3"], "Env": ["PATH=/usr/bin:/bin", "LANG=C.UTF-8", "PYTHONPATH=/app"]},
        "history": [{"created_by": "base"}, {"created_by": "env", "empty_layer": True}],
    }  # fmt: skip
    manifest = {
        "schemaVersion": 2, "config": put(json.dumps(config).encode(), "oci.image.config.v1+json"),
        "layers": [put(gzip.compress(raw.getvalue(), 1), "docker.image.rootfs.diff.tar.gzip")],
    }  # fmt: skip
    entry = {**put(json.dumps(manifest).encode(), "oci.image.manifest.v1+json"), "platform": platform}
    inner = put(json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode(), "oci.image.index.v1+json")
    outer = {**inner, "annotations": {"org.opencontainers.image.ref.name": "py:3"}}
    (at / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [outer]}))
    (at / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return at
