"""The documents of an image: configuration, manifest, index (OCI image-spec 1.0). Pure; equal input gives equal bytes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddtree_deploy.errors import IntegrityFailure, UsageProblem
from ddtree_deploy.export.groups import interpreter
from ddtree_deploy.models import Manifest

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
REF_NAME = "org.opencontainers.image.ref.name"
#: When an image was made must not be part of what it is.
CREATED = "1980-01-01T00:00:00Z"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64le", "s390x": "s390x", "riscv64": "riscv64"}
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_TAG = re.compile(r"[A-Za-z0-9]+(?:(?:[-._:@/+]|--)[A-Za-z0-9]+)*")
_PREFIX = re.compile(r"(?:/[A-Za-z0-9_][A-Za-z0-9_.+-]*)+")
# Some tools keep Docker's names for the same bytes.
_OCI_NAMES = {
    "application/vnd.docker.image.rootfs.diff.tar": "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.docker.image.rootfs.diff.tar.gzip": "application/vnd.oci.image.layer.v1.tar+gzip",
    "application/vnd.docker.image.rootfs.diff.tar.zstd": "application/vnd.oci.image.layer.v1.tar+zstd",
}


@dataclass(frozen=True, slots=True)
class Base:
    """The image whose layers come first: its digest (`sha256:...`, empty for no base), its layers and its configuration."""

    digest: str = ""
    layers: tuple[Mapping[str, Any], ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of ours: `digest` and `diff_id` in hex, `size` in bytes as stored, `new` if the layout did not have it."""

    name: str
    distributions: tuple[str, ...]
    files: int
    digest: str
    diff_id: str
    size: int
    media_type: str
    new: bool = True


def encode(document: Mapping[str, Any]) -> bytes:
    """Return the canonical bytes of a document."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def descriptor(media_type: str, data: bytes, annotations: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the descriptor of a document (image-spec "OCI Content Descriptors")."""
    found: dict[str, Any] = {"mediaType": media_type, "digest": "sha256:" + hashlib.sha256(data).hexdigest(), "size": len(data)}
    return found | ({"annotations": dict(annotations)} if annotations else {})


def digest_of(found: Mapping[str, Any]) -> str:
    """Return the hex digest of a descriptor. Raises IntegrityFailure for anything but a sha256, which could be a path."""
    text = found.get("digest")
    if not isinstance(text, str) or not _DIGEST.fullmatch(text):
        raise IntegrityFailure(f"a blob named {text!r}, only sha256 digests are read")
    return text.removeprefix("sha256:")


def architecture(manifest: Manifest) -> str:
    """Return the architecture of a snapshot as images name it (GOARCH)."""
    return ARCHITECTURES.get(manifest.python.machine, manifest.python.machine)


def check_names(tag: str, prefix: str) -> None:
    """Raise UsageProblem for a tag or a prefix that an image can not have."""
    if not _TAG.fullmatch(tag):
        raise UsageProblem(f"`{tag}` can not name an image", mend="letters, digits, and single `-._:@/+` between them")
    if not _PREFIX.fullmatch(prefix):
        raise UsageProblem(f"`{prefix}` can not be the prefix", mend="an absolute path of plain names, say `/opt/ddtree`")


def environment(base: Sequence[str], prefix: str) -> list[str]:
    """Return an image's environment: the base's, with our packages and scripts found first."""
    values = dict(item.partition("=")[::2] for item in base)
    python_path = values.get("PYTHONPATH")
    values["PATH"] = f"{prefix}/bin:{values.get('PATH') or _PATH}"
    values["PYTHONPATH"] = f"{prefix}/site-packages" + (f":{python_path}" if python_path else "")
    return [f"{key}={value}" for key, value in values.items()]


def labels(snapshot: str, manifest: Manifest, prefix: str, base: Base) -> dict[str, str]:
    """Return what an image tells of itself; the host and the paths that it came from stay at home."""
    found = {
        "org.opencontainers.image.title": f"ddtree-deploy snapshot {snapshot[:12]}",
        "org.opencontainers.image.revision": snapshot,
        "ddtree-deploy.snapshot": snapshot,
        "ddtree-deploy.python": interpreter(manifest),
        "ddtree-deploy.libc": manifest.python.libc,
        "ddtree-deploy.site-packages": f"{prefix}/site-packages",
    }
    if base.digest:
        found["org.opencontainers.image.base.digest"] = base.digest
    return found


def config(snapshot: str, manifest: Manifest, prefix: str, layers: Sequence[Layer], base: Base) -> dict[str, Any]:
    """Return an image's configuration: the base's (user, command, ...), our layers, environment and labels."""
    inner = dict(base.config.get("config") or {})
    inner["Env"] = environment(inner.get("Env") or (), prefix)
    inner["Labels"] = {**(inner.get("Labels") or {}), **labels(snapshot, manifest, prefix, base)}
    below = list((base.config.get("rootfs") or {}).get("diff_ids") or ())
    if len(below) != len(base.layers):
        raise IntegrityFailure(f"the base has {len(base.layers)} layers and names {len(below)}")
    document: dict[str, Any] = {
        "architecture": architecture(manifest),
        "os": "linux",
        "created": CREATED,
        "config": inner,
        "rootfs": {"type": "layers", "diff_ids": below + ["sha256:" + layer.diff_id for layer in layers]},
    }
    past = list(base.config.get("history") or ())
    # One entry a layer, or none at all: readers pair them by position.
    if sum(not step.get("empty_layer") for step in past) == len(below):
        ours = [{"created": CREATED, "created_by": "ddtree-deploy export", "comment": _comment(layer)} for layer in layers]
        document["history"] = past + ours
    return document


def _comment(layer: Layer) -> str:
    return layer.distributions[0] if len(layer.distributions) == 1 else f"{layer.name}: {len(layer.distributions)} distributions"


def manifest(config: Mapping[str, Any], layers: Sequence[Layer], base: Base) -> dict[str, Any]:
    """Return an image's manifest, given the descriptor of its configuration."""
    ours = [
        {"mediaType": layer.media_type, "digest": "sha256:" + layer.digest, "size": layer.size,
         "annotations": {"ddtree-deploy.layer": layer.name}}
        for layer in layers
    ]  # fmt: skip
    below = [{**layer, "mediaType": _OCI_NAMES.get(layer.get("mediaType", ""), layer.get("mediaType", ""))} for layer in base.layers]
    return {"schemaVersion": 2, "mediaType": MANIFEST, "config": dict(config), "layers": below + ours}


def index(entries: Sequence[Mapping[str, Any]], made: Mapping[str, Any], tag: str) -> dict[str, Any]:
    """Return a layout's index with the image `made` under `tag`; an older image of that tag leaves the index."""
    others = [dict(entry) for entry in entries if (entry.get("annotations") or {}).get(REF_NAME) != tag]
    return {"schemaVersion": 2, "mediaType": INDEX, "manifests": [*others, {**made, "annotations": {REF_NAME: tag}}]}
