"""Write a snapshot as an OCI image layout: layers streamed from the store, then the index, by one rename."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree_deploy.agent import durable
from ddtree_deploy.errors import IntegrityFailure, IoProblem, Locked, NoSpace, UsageProblem
from ddtree_deploy.events import Emit, Note, Progress, Step, ignore
from ddtree_deploy.export import image
from ddtree_deploy.export.groups import Group, groups, interpreter
from ddtree_deploy.export.image import Base, Layer
from ddtree_deploy.export.layout import MARK, Brought, Layout, brought, copy_blob
from ddtree_deploy.export.tar import MEDIA_TYPES, write_layer
from ddtree_deploy.models import Manifest
from ddtree_deploy.store import Store

WHO = "export"
PREFIX = "/opt/ddtree"


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """Where an image goes and how: `tag` (empty: the snapshot's short identity), `only`, `base` (`DIR[:NAME]`), `compression`."""

    directory: Path
    tag: str = ""
    only: tuple[str, ...] = ()
    base: str = ""
    prefix: str = PREFIX
    compression: str = "none"


@dataclass(frozen=True, slots=True)
class Exported:
    """What `export` did: the image's digest (`sha256:...`), its layers bottom up, and whether the layout had it already."""

    directory: str
    tag: str
    digest: str
    snapshot: str
    base: str
    layers: tuple[Layer, ...]
    bytes: int
    new_bytes: int
    already: bool


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """What `export` would do. `adds` says that the directory is a layout already; `base` is the digest of the base."""

    directory: str
    tag: str
    snapshot: str
    base: str
    groups: tuple[Group, ...]
    adds: bool

    @property
    def bytes(self) -> int:
        return sum(group.bytes for group in self.groups)


def plan_export(store: Store, snapshot: str, options: ExportOptions) -> ExportPlan:
    """Say what an export would write; write nothing.

    Raises UsageProblem for a directory that holds something else, IntegrityFailure for a snapshot that lacks objects.
    """
    return _prepare(store, snapshot, options)[2]


def export_oci(store: Store, snapshot: str, options: ExportOptions, emit: Emit = ignore) -> Exported:
    """Write a snapshot as an image into a layout: a new one, or one that is there, where only what it lacks is added.

    A reader sees the layout without the image or with it whole. Memory is bounded by the list of files. Raises UsageProblem,
    IntegrityFailure, NoSpace, IoProblem, and Locked while another export writes there.
    """
    manifest, base, plan = _prepare(store, snapshot, options)
    with _told(options.directory), store.lock("export", shared=True), _staging(options.directory) as (room, final):
        work = Layout(room)
        work.blobs.mkdir(parents=True)
        there = Layout(final) if final else None
        layers = _write_layers(store, plan.groups, options, work, there, emit)
        if base.layers:
            _take_base(_base_layout(options.base)[0], base, work, there, manifest, emit)
        return _finish(plan, manifest, base, layers, options, work, there, emit)


def _prepare(store: Store, snapshot: str, options: ExportOptions) -> tuple[Manifest, Base, ExportPlan]:
    manifest = store.manifest(snapshot)
    tag = options.tag or snapshot[:12]
    image.check_names(tag, options.prefix)
    divided = groups(manifest, options.only)
    stored = store.digests()
    missing = {entry.digest for group in divided for entry in group.files if entry.kind == "f"} - stored
    if missing:
        raise IntegrityFailure(
            f"{len(missing)} objects of the snapshot are missing from the store",
            mend="take the snapshot again while its host is reachable",
            causes=tuple(f"object {digest[:12]}" for digest in sorted(missing)[:5]),
        )
    base = Base()
    if options.base:
        source, name = _base_layout(options.base)
        base = source.base(name, image.architecture(manifest))
    at = options.directory
    if os.path.lexists(at) and not at.is_dir():
        raise UsageProblem(f"`{at}` is not a directory", mend="name a new directory, an empty one, or a layout")
    held = at.is_dir() and any(path.name != _ROOM for path in at.iterdir())
    if held:
        try:
            Layout.at(at)
        except UsageProblem as problem:
            raise UsageProblem(problem.message, mend="name a new directory, an empty one, or a layout") from None
    return manifest, base, ExportPlan(os.fspath(at), tag, snapshot, base.digest, divided, held)


def _base_layout(text: str) -> tuple[Layout, str]:
    """Return the layout and the image name of `DIR[:NAME]`."""
    where, _, name = (text, "", "") if Path(text).is_dir() else text.partition(":")
    return Layout.at(Path(where)), name


_ROOM = ".ddtree-export"


@contextmanager
def _staging(directory: Path) -> Iterator[tuple[Path, Path | None]]:
    """Yield a room on the same file system to build in, and the directory to add to (None: the room becomes it).

    The room is locked by flock: what an export that was killed left there is removed by the next one.
    """
    adds = directory.is_dir()
    directory.parent.mkdir(parents=True, exist_ok=True)
    room = directory / _ROOM if adds else directory.parent / f".{directory.name}{_ROOM}"
    fd = _locked(room)
    try:
        for stale in room.iterdir():
            shutil.rmtree(stale)
        yield room / "layout", directory if adds else None
    finally:
        shutil.rmtree(room, ignore_errors=True)
        os.close(fd)


def _locked(room: Path) -> int:
    while True:
        room.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):  # the one before us has just cleared up
            fd = os.open(room, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                raise Locked(f"another export writes to `{room.parent}`", mend="run it again when that one is done") from None
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), room.stat()):
                    return fd
            os.close(fd)


@contextmanager
def _told(directory: Path) -> Iterator[None]:
    """Turn what a disk refuses into NoSpace or IoProblem."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace(f"no space left for the image in `{directory}`", mend="free space there, or name another directory") from error
        raise IoProblem(f"`{directory}` can not be written: {error.strerror}") from error


def _write_layers(
    store: Store, divided: Sequence[Group], options: ExportOptions, work: Layout, there: Layout | None, emit: Emit
) -> tuple[Layer, ...]:
    total, done = sum(group.bytes for group in divided), 0

    def moved(count: int, path: str) -> None:
        nonlocal done
        done += count
        emit(Progress(WHO, "write layers", done, total, "bytes", path))

    if options.compression == "none" and there is None:
        _room_for(work, total)
    made = []
    for group in divided:
        emit(Step(WHO, f"write layer {group.name}"))
        temporary = work.root / "layer"
        with temporary.open("wb") as file:
            written = write_layer(file, group, options.prefix.strip("/"), store, options.compression, moved)
        new = not _holds(there, written.digest, written.size)
        if new:
            temporary.rename(work.blobs / written.digest)
        else:
            temporary.unlink()
        media = MEDIA_TYPES[options.compression]
        count = len(group.files) + len(group.scripts)
        made.append(Layer(group.name, group.distributions, count, written.digest, written.diff_id, written.size, media, new))
    return tuple(made)


def _room_for(work: Layout, needed: int) -> None:
    """Raise NoSpace before anything is written when the bytes can not fit."""
    status = os.statvfs(work.root)
    free = status.f_bavail * status.f_frsize
    if free < needed:
        raise NoSpace(f"the image needs {needed >> 20} MiB, there are {free >> 20} MiB free", mend="name a directory on a larger disk")


def _holds(there: Layout | None, digest: str, size: int) -> bool:
    """Tell whether the layout has a blob, whole."""
    with suppress(FileNotFoundError):
        return there is not None and (there.blobs / digest).stat().st_size == size
    return False


def _take_base(source: Layout, base: Base, work: Layout, there: Layout | None, manifest: Manifest, emit: Emit) -> None:
    """Copy the base's layers, checked, and warn of a base that this snapshot can not run on."""
    emit(Step(WHO, f"take {len(base.layers)} layers of the base"))
    held = Brought()
    for layer in base.layers:
        digest = image.digest_of(layer)
        if not _holds(there, digest, int(layer.get("size", -1))) and not (work.blobs / digest).exists():
            copy_blob(source.blobs / digest, work.blobs / digest)
        held |= brought(source.blobs / digest, str(layer.get("mediaType", "")))
    for text in _doubts(held, manifest):
        emit(Note(WHO, text, "warn"))


def _doubts(base: Brought, manifest: Manifest) -> Iterator[str]:
    python = interpreter(manifest)
    if not any(name.endswith(f"bin/{python}") for name in base.names):
        yield f"the base has no `{python}`, which this snapshot is for"
    if any(os.path.basename(name).startswith("ld-musl-") for name in base.names):
        yield "the base has musl as its C library; wheels for glibc do not load there"
    source = manifest.python.libc.removeprefix("glibc ")
    if base.glibc and source.replace(".", "").isdigit() and _version(base.glibc) < _version(source):
        yield f"the base has glibc {base.glibc}, the snapshot comes from {source}: what was built there may not load"


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def _finish(
    plan: ExportPlan, manifest: Manifest, base: Base, layers: tuple[Layer, ...], options: ExportOptions, work: Layout,
    there: Layout | None, emit: Emit,
) -> Exported:  # fmt: skip
    emit(Step(WHO, "write manifest and index"))
    config = image.encode(image.config(plan.snapshot, manifest, options.prefix, layers, base))
    document = image.encode(image.manifest(image.descriptor(image.CONFIG, config), layers, base))
    made = image.descriptor(image.MANIFEST, document)
    made["platform"] = {"os": "linux", "architecture": image.architecture(manifest)}
    for data in (config, document):
        (work.blobs / image.digest_of(image.descriptor("", data))).write_bytes(data)
    old = there.entries() if there and (there.root / "index.json").exists() else []
    index = image.index(old, made, plan.tag)
    already = any(entry["digest"] == made["digest"] for entry in old if (entry.get("annotations") or {}).get(image.REF_NAME) == plan.tag)
    new_bytes = _publish(work, there, index, options.directory, already)
    size = sum(layer.size for layer in layers)
    return Exported(plan.directory, plan.tag, made["digest"], plan.snapshot, base.digest, layers, size, new_bytes, already)


def _publish(work: Layout, there: Layout | None, index: dict[str, Any], directory: Path, already: bool) -> int:
    """Give the blobs their place, then the index; return how many bytes of blobs are new."""
    new = [path for path in work.blobs.iterdir() if not _holds(there, path.name, path.stat().st_size)]
    size = sum(path.stat().st_size for path in new)
    (work.root / "oci-layout").write_bytes(image.encode(MARK))
    (work.root / "index.json").write_bytes(image.encode(index))
    for path in (*new, work.root / "oci-layout", work.root / "index.json"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    durable.sync_directory(os.fspath(work.blobs))
    durable.sync_directory(os.fspath(work.root))
    if there is None:
        work.root.rename(directory)
        durable.sync_directory(os.fspath(directory.parent))
        return size
    there.blobs.mkdir(parents=True, exist_ok=True)
    for path in new:
        path.rename(there.blobs / path.name)
    durable.sync_directory(os.fspath(there.blobs))
    if not already:
        for name in ("oci-layout", "index.json"):  # the last is the commit point
            (work.root / name).rename(there.root / name)
        durable.sync_directory(os.fspath(there.root))
    return size
