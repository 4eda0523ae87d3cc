"""Take a snapshot: everything in a host's site-packages, by content, with where each file comes from and what ran there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ddtree_deploy.errors import SourceDrift
from ddtree_deploy.events import Emit, Note, Progress, Step, ignore
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.manifest import decode, encode, identity, python_facts
from ddtree_deploy.models import Distribution, FileEntry, Finding, ImportProof, Manifest, ServerCapture, Taken
from ddtree_deploy.origins import DRIFT, Classified
from ddtree_deploy.session import Session
from ddtree_deploy.store import Store
from ddtree_deploy.survey import Survey, survey

ATTEMPTS = 3


def take(
    host: Host,
    store: Store,
    *,
    only: Sequence[str] = (),
    label: str = "",
    allow_drift: bool = False,
    probe: bool = True,
    emit: Emit = ignore,
) -> Taken:
    """Capture the venv of `host` into the store.

    Only content that the store lacks crosses the wire. With `probe`, each import package is imported once on the source, so that
    a push knows what worked there. Raises SourceDrift when the tree is not what it seems (editable installs, links out of it,
    missing files) or keeps changing, unless `allow_drift` accepts it.
    """
    from ddtree_deploy.oracle import remember  # here, since `status` imports this module and should not wait for the oracle

    with store.lock("snapshot", shared=True), Session(host, writable=False, emit=emit) as session:
        new_objects = new_bytes = 0
        for attempt in range(ATTEMPTS):
            seen = survey(session, store)
            found = select(seen.classified(), only)
            _refuse_drift(host, found.findings, allow_drift)
            objects, sent, stale = _collect(session, store, found.files)
            new_objects, new_bytes = new_objects + objects, new_bytes + sent
            if not stale:
                break
            emit(Note(host.name, f"{len(stale)} files changed while they were read, looking again", "warn"))
            if attempt == ATTEMPTS - 1:
                raise SourceDrift(f"`{host.name}` keeps changing while it is read", causes=tuple(stale[:10]))
        manifest = _manifest(host, seen, found)
        data = encode(manifest)
        if not (store.snapshots / f"{identity(data)}.json").exists():
            decode(data)  # what the store holds can be read back, whatever a host says
        proof = _prove(session, store, manifest, host) if probe else {}
        # Before the snapshot counts: one without these facts could not be judged later, when its host may be gone.
        remember(session, store, identity(data))
        ref = store.add(manifest, label, proof=proof or None)
    failures = tuple(import_proof(row) for row in store.proof(ref.id).get("imports", []) if not row["ok"])
    return Taken(ref, manifest, new_objects, new_bytes, seen.hashed, seen.vouched, failures)


def select(found: Classified, only: Sequence[str]) -> Classified:
    """Keep the distributions named in `only` (all when empty), with the unowned files inside their packages."""
    if not only:
        return found
    from ddtree_deploy.merging import held
    from ddtree_deploy.plan import chosen, travels

    names = chosen(found.distributions, only)
    keep = [index for index, dist in enumerate(found.distributions) if dist.name in names]
    renumber = {old: new for new, old in enumerate(keep)}
    within = {package for index in keep for package in found.distributions[index].packages}
    owned = held(found.files, found.distributions, lambda _path, owner: owner in renumber)
    owners = {entry.path: renumber[entry.owner] for entry in owned}
    files = [*(entry._replace(owner=owners[entry.path]) for entry in owned), *(entry for entry in found.files if travels(entry, within))]
    distributions = [found.distributions[index] for index in keep]
    return Classified(
        tuple(
            replace(dist, shares=tuple(path for path in dist.shares if owners.get(path, index) != index))
            for index, dist in enumerate(distributions)
        ),
        tuple(sorted(files)),
        found.findings,
    )


def _refuse_drift(host: Host, findings: Sequence[Finding], allow: bool) -> None:
    drift = [finding for finding in findings if finding.kind in DRIFT]
    if drift and not allow:
        raise SourceDrift(
            f"the venv of `{host.name}` is not what its metadata says: {len(drift)} findings",
            mend="mend them there, or take the snapshot without them: `--allow-drift`",
            causes=tuple(f"{finding.kind}: {finding.where}: {finding.text}" for finding in drift[:20]),
        )


def _collect(session: Session, store: Store, files: Sequence[FileEntry]) -> tuple[int, int, list[str]]:
    stored = store.digests()
    wanted = {entry.digest: entry for entry in files if entry.kind == "f" and entry.digest not in stored}
    if not wanted:
        return 0, 0, []
    host = session.host.name
    total = sum(entry.size for entry in wanted.values())
    session.emit(Step(host, f"read {len(wanted)} objects"))
    order = sorted(wanted.values(), key=lambda entry: (-entry.size, entry.path))
    with store.ingest({entry.digest: entry.size for entry in order}) as batch:
        session.sink = _Counting(batch.landing, session, total)
        try:
            reply = session.ask("fetch", [[entry.path, entry.digest, entry.size] for entry in order], venv=session.host.venv)
        finally:
            session.sink = None
        bad = set(batch.bad)
        landing = batch.landing
    stale = [entry.path for entry in order if entry.digest in bad]
    return landing.received, landing.bytes, sorted({*stale, *reply.fields.get("changed", [])})


class _Counting:
    """A landing that reports progress and stops the transfer when the store is full."""

    def __init__(self, landing: Any, session: Session, total: int) -> None:
        self.landing, self.session, self.total = landing, session, total

    def receive(self, reader: Any, header: dict[str, Any]) -> None:
        self.landing.receive(reader, header)
        self.session.emit(Progress(self.session.host.name, "read", self.landing.bytes, self.total))
        if self.landing.error is not None:
            self.session.cancel()


def _manifest(host: Host, seen: Survey, found: Classified) -> Manifest:
    servers = tuple(
        ServerCapture(tuple(server["argv"]), server["env"], server["cwd"])
        for server in sorted(seen.scan["servers"], key=lambda server: [*server["argv"]])
    )
    return Manifest(
        host=host.name,
        venv=seen.fields["venv"],
        python=python_facts(seen.scan["python"]),
        distributions=found.distributions,
        files=found.files,
        findings=found.findings,
        servers=servers,
        facts={**seen.scan["facts"], "torch": seen.scan["torch"]},
    )


def modules_of(distributions: Sequence[Distribution]) -> list[str]:
    """Return the import packages of distributions, private ones left out."""
    return sorted({name for dist in distributions for name in dist.packages if not name.startswith("_")})


def _prove(session: Session, store: Store, manifest: Manifest, host: Host) -> Mapping[str, Any]:
    known = store.proof(identity(encode(manifest)))
    if known:
        return known
    modules = modules_of(manifest.distributions)
    session.emit(Step(host.name, f"import {len(modules)} packages"))
    rows = session.ask("probe", modules, venv=host.venv, user=host.service_user, env=dict(host.service_env)).value
    return {"imports": [{key: row[key] for key in ("module", "ok", "seconds", "error", "signal")} for row in rows]}


def import_proof(row: Mapping[str, Any], baseline: bool = False) -> ImportProof:
    """Return the agent's word on one import as a model."""
    return ImportProof(
        module=row["module"],
        ok=bool(row["ok"]),
        seconds=float(row["seconds"]),
        error=row.get("error", ""),
        traceback=row.get("traceback", ""),
        signal=row.get("signal", ""),
        foreign_libraries=tuple(row.get("foreign_libraries", ())),
        baseline=baseline,
    )


