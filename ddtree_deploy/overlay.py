"""The DDTree overlay as snapshots, plans and proofs see it: recognised by digests, built from stock content, laid over a result.

RECORD stays the publisher's: the edited files are patched ones there, as they are in truth, and are recognised by their sha256.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import sglang_overlay
from ddtree_deploy.agent import durable
from ddtree_deploy.errors import DeployError, Incompatible, IntegrityFailure, UsageProblem
from ddtree_deploy.models import PATCHED, UNOWNED, Check, Distribution, FileEntry, ImportProof
from sglang_overlay import build, manifest
from sglang_overlay.errors import OverlayError, UnknownVersion

if TYPE_CHECKING:
    from ddtree_deploy.store import Store

NAME = "sglang"
#: What the import proof tries besides packages, and a stock module of SGLang that needs at least as much of the environment:
#: where that does not import either, nothing is said about ours.
SIBLING, MODULE, FLAGS = "sglang.srt.speculative.dflash_utils", "sglang.srt.speculative.ddtree_utils", "sglang.srt.server_args"
PROBES = (SIBLING, MODULE, FLAGS)


@contextmanager
def told() -> Iterator[None]:
    """Turn what `sglang_overlay` raises into the errors of the command line, with their exit codes."""
    try:
        yield
    except OverlayError as error:
        kind = {13: Incompatible, 14: IntegrityFailure}.get(error.exit_code, DeployError)
        raise kind(error.message, mend=error.mend, causes=error.causes) from error


@dataclass(frozen=True, slots=True)
class Carried:
    """What a tree's SGLang is. `overlay` is the whole overlay's id when it is there byte for byte, else empty.

    `partial` says that only some of its files are; `patched` are files that somebody else changed or added.
    """

    version: str
    overlay: str
    patched: tuple[str, ...]
    partial: bool = False

    @property
    def text(self) -> str:
        """Say it in one line."""
        state = f" + ddtree overlay {self.overlay[:7]}, byte-identical" if self.overlay else ""
        if self.partial:
            state = " + parts of the ddtree overlay"
        if self.patched:
            count = f"{len(self.patched)} file{'s' * (len(self.patched) > 1)}"
            rest = ", …" if len(self.patched) > 3 else ""
            return f"sglang {self.version}{state}, {count} patched by somebody else: {', '.join(self.patched[:3])}{rest}"
        return f"sglang {self.version}{state or ', stock'}"


@dataclass(frozen=True, slots=True)
class Overlay:
    """The five files for one SGLang version, ready to be laid over stock ones; `contents` by digest."""

    version: str
    id: str
    files: tuple[FileEntry, ...]
    contents: Mapping[str, bytes]


def carried(distributions: Sequence[Distribution], files: Sequence[FileEntry]) -> Carried | None:
    """Say what the SGLang of a tree is; None when the tree has none."""
    index = _index(distributions)
    if index is None:
        return None
    version = distributions[index].version
    patched = {e.path for e in files if e.owner == index and e.origin == PATCHED}
    patched |= {e.path for e in files if e.origin == UNOWNED and e.path.startswith(f"{NAME}/")}
    try:
        state = build.recognise(version, {e.path: e.digest for e in files})
    except UnknownVersion:
        return Carried(version, "", tuple(sorted(patched)))
    ours = {f.path for f in state.files if f.state is build.State.BUILT}
    foreign = tuple(sorted((patched | set(state.foreign)) - ours))
    return Carried(version, state.overlay_id if state.is_built else "", foreign, bool(ours) and not state.is_built)


def prepare(store: Store) -> tuple[Overlay, ...]:
    """Build the overlay of each version whose stock files the store holds; other versions are left out."""
    from ddtree_deploy.patches import in_store

    found = []
    for version, pins in manifest.load().items():
        if pins.route != "overlay" or not all(store.path(digest).exists() for digest in pins.base.values()):
            continue
        with told():
            built = build.build_from(in_store(store, pins.base), version)
        entries = tuple(FileEntry(f.path, "f", 0o644, len(f.data), f.sha256, PATCHED, -1) for f in built)
        found.append(Overlay(version, pins.overlay_id, entries, {f.sha256: f.data for f in built}))
    return tuple(found)


def keep(store: Store, overlays: Sequence[Overlay]) -> None:
    """Put the built files into the store, where a push sends from."""
    for overlay in overlays:
        for digest, data in overlay.contents.items():
            path = store.path(digest)
            if not path.exists():
                path.parent.mkdir(exist_ok=True)
                durable.write_file(os.fspath(path), data, 0o444)


def lay_over(
    distributions: Sequence[Distribution], files: Sequence[FileEntry], overlays: Sequence[Overlay]
) -> tuple[tuple[FileEntry, ...], str]:
    """Return a tree's files with the overlay for its SGLang in them, and the overlay's id.

    Files that are the built ones already stay as they are. Raises UsageProblem for a tree without SGLang, Incompatible
    for a version without edited files, IntegrityFailure naming each file that is not the pinned stock one.
    """
    index = _index(distributions)
    if index is None:
        raise UsageProblem("there would be no sglang to lay the overlay over", mend="push one along: `--only sglang` or the whole snapshot")
    version = distributions[index].version
    with told():
        state = build.recognise(version, {e.path: e.digest for e in files})
    if state.is_built:
        return tuple(files), state.overlay_id
    base = manifest.pinned(version).base
    if not state.is_stock:
        wrong = [
            f"{f.path}: {f.found or 'missing'}, expected {base.get(f.path, 'no such file')}"
            for f in state.files
            if f.found != base.get(f.path)
        ]
        raise IntegrityFailure(
            f"the overlay is for stock sglang {version}, and {len(wrong)} of {len(state.files)} files would be others",
            mend="see them with `ddtree-deploy overlay diff`, and push a snapshot with the stock files",
            causes=tuple(wrong),
        )
    overlay = next((one for one in overlays if one.version == version), None)
    if overlay is None:
        raise IntegrityFailure(
            f"the stock files of sglang {version} are not in the store, so there is nothing to build the overlay from",
            mend="snapshot a host that has them: `ddtree-deploy snapshot HOST --only sglang`",
        )
    laid = {e.path: e for e in files} | {e.path: e._replace(owner=index) for e in overlay.files}
    return tuple(sorted(laid.values())), overlay.id


def reads_checks(distributions: Sequence[Distribution], files: Sequence[FileEntry]) -> tuple[Check, ...]:
    """Warn of stock files that the overlay only reads and that are others here: the server will say so too, and go on."""
    version = next(dist.version for dist in distributions if dist.name == NAME)
    digests = {e.path: e.digest for e in files}
    other = tuple(path for path, want in manifest.pinned(version).reads.items() if digests.get(path) != want)
    if not other:
        return ()
    text = f"{len(other)} files that the overlay relies on are not stock"
    return (Check("overlay", "warn", text, other, "see `ddtree-deploy overlay diff`"),)


def excused(failed: Sequence[str]) -> set[str]:
    """Return which of the failed imports say nothing about the overlay: SGLang's own module failed beside ours."""
    return set(PROBES) & set(failed) if SIBLING in failed else set()


def probes(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the modules that a tree with the overlay must import, and the stock one to hold them against."""
    return PROBES if MODULE.replace(".", "/") + ".py" in paths else ()


def flags_code() -> dict[str, str]:
    """Return the code that proves, after the import of `server_args`, that it understands our flags."""
    return {FLAGS: Path(sglang_overlay.__file__).with_name("parse_probe.py").read_text()}


def live_checks(found: Carried, proofs: Sequence[ImportProof]) -> tuple[Check, ...]:
    """Say of a live tree with the overlay's file what it carries, and whether it imports and understands our flags."""
    mend = "" if found.overlay else "see `ddtree-deploy overlay diff`, and push the overlay again"
    carries = Check("overlay", "ok" if found.overlay else "warn", found.text, (), mend)
    failed = {proof.module: proof.error for proof in proofs if not proof.ok}
    if SIBLING in failed:
        text = f"imports and flags were not tried: stock sglang does not import there: {failed[SIBLING]}"
        return (carries, Check("overlay", "warn", text, (), "prove it on the host that serves"))
    if {MODULE, FLAGS} & failed.keys():
        return (carries,)  # the failed imports tell
    return (carries, Check("overlay", "ok", "`ddtree_utils` imports, `server_args` understands its flags"))


def _index(distributions: Sequence[Distribution]) -> int | None:
    return next((index for index, dist in enumerate(distributions) if dist.name == NAME), None)
