"""Prove what is live on a host, a level at a time, by a read-only agent that writes no bytecode either."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddtree_deploy import overlay
from ddtree_deploy.errors import UsageProblem
from ddtree_deploy.events import Emit, Note, Step, ignore
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.models import STOCK, Check, ImportProof, Proofs
from ddtree_deploy.oracle import gpu_checks, tree_checks
from ddtree_deploy.origins import Classified, classify
from ddtree_deploy.session import Session
from ddtree_deploy.snapshot import import_proof, modules_of
from ddtree_deploy.store import Store

DEFAULT_LEVELS = ("files", "syntax", "import")


def verify(
    host: Host,
    store: Store | None,
    *,
    levels: Sequence[str] = DEFAULT_LEVELS,
    deep: bool = False,
    probe_timeout: float = 120.0,
    emit: Emit = ignore,
) -> Proofs:
    """Prove the tree that is live on `host` and return what was found; failed proofs are in the result, not raised.

    `store` knows which packages did not import on the source host either (None: every failure counts). With `deep`
    each file is read again, whatever its stat says. `probe_timeout` is seconds for one import. Raises UsageProblem for
    an unknown level, for a host without the venv, and for `files` alone where nothing was pushed.
    """
    for level in levels:
        if level not in LEVELS:
            raise UsageProblem(f"unknown level: `{level}`", mend=f"levels: {', '.join(LEVELS)}")
    with Session(host, writable=False, emit=emit) as session:
        reply = session.ask("scan", venv=host.venv)
        if reply.fields["generation"] is None and "files" in levels and len(set(levels)) > 1:
            emit(
                Note(
                    host.name,
                    "nothing was pushed there: files are compiled and imported, not compared",
                    "warn",
                )
            )
            levels = [level for level in levels if level != "files"]
        live = _Live(session, store, reply.fields, reply.value, deep, probe_timeout)
        proofs = Proofs(where="live")
        for level in LEVELS:
            if level in levels:
                proofs = LEVELS[level](live, proofs)
        return proofs


@dataclass(frozen=True, slots=True)
class _Live:
    """The tree that is live, as the scan saw it, and how to ask about it."""

    session: Session
    store: Store | None
    fields: Mapping[str, Any]
    scan: Mapping[str, Any]
    deep: bool
    probe_timeout: float

    def ask(self, op: str, value: Any = None, **fields: Any) -> Any:
        return self.session.ask(op, value, venv=self.session.host.venv, **fields)

    def step(self, what: str) -> None:
        self.session.emit(Step(self.session.host.name, what))

    def classified(self, digests: Mapping[str, str | None]) -> Classified:
        """Return distributions and files; origins hold for the paths in `digests` and for what the host vouches for."""
        vouched = {row[0]: row[-1] or "" for row in self.scan["files"] if row[1] == "f"}
        return classify(self.scan, {**vouched, **digests})

    def failed_before(self) -> set[str]:
        """Return the packages that did not import on the source either: as the push recorded it there, or as the store knows it."""
        info = self.fields["info"] or {}
        known = set(info.get("failed_imports", ()))
        if self.store is not None and info.get("snapshot"):
            known |= {row["module"] for row in self.store.proof(info["snapshot"]).get("imports", []) if not row["ok"]}
        return known


def _files(live: _Live, proofs: Proofs) -> Proofs:
    live.step("compare every file with what was pushed" if not live.deep else "read every file again")
    reply = live.ask("hashes", deep=live.deep)
    return replace(proofs, hashed=reply.fields["hashed"], vouched=reply.fields["vouched"], bad_files=tuple(reply.value))


def _syntax(live: _Live, proofs: Proofs) -> Proofs:
    live.step("compile every source")
    reply = live.ask("syntax")
    errors = [(path, text) for path, text in reply.value]
    if errors:
        digests = live.ask("hash", [path for path, _text in errors]).value
        origins = {entry.path: entry.origin for entry in live.classified(digests).files}
        # A stock file is what its publisher hashed: if that does not compile, it never did, and nothing imports it.
        errors = [pair for pair in errors if origins.get(pair[0]) != STOCK or pair[1].startswith("stale bytecode")]
    return replace(proofs, compiled=reply.fields["compiled"], syntax_errors=tuple(errors))


def _imports(live: _Live, proofs: Proofs) -> Proofs:
    modules = modules_of(live.classified({}).distributions)
    ours = overlay.probes([row[0] for row in live.scan["files"]])
    live.step(f"import {len(modules)} packages")
    host = live.session.host
    rows = live.ask(
        "probe", [*modules, *ours], user=host.service_user, env=dict(host.service_env), timeout=live.probe_timeout,
        code=overlay.flags_code() if ours else {},
    ).value  # fmt: skip
    known = live.failed_before() | overlay.excused([row["module"] for row in rows if not row["ok"]])
    imports = tuple(import_proof(row, not row["ok"] and row["module"] in known) for row in rows)
    return replace(proofs, imports=imports, extra=(*proofs.extra, *(_overlay(live, imports) if ours else ())))


def _overlay(live: _Live, imports: Sequence[ImportProof]) -> tuple[Check, ...]:
    digests = live.ask("hash", [row[0] for row in live.scan["files"] if row[1] == "f" and row[0].startswith("sglang/")]).value
    found = live.classified(digests)
    carried = overlay.carried(found.distributions, found.files)
    return overlay.live_checks(carried, imports) if carried else ()


def _link(live: _Live, proofs: Proofs) -> Proofs:
    return replace(proofs, extra=(*proofs.extra, *tree_checks(live.session)))


def _gpu(live: _Live, proofs: Proofs) -> Proofs:
    live.step("one tiny operation per extension on every GPU")
    return replace(proofs, extra=(*proofs.extra, *gpu_checks(live.session)))


#: In the order in which they run, the cheapest evidence first. A level is a function that adds what it found to the proofs.
LEVELS: Mapping[str, Callable[[_Live, Proofs], Proofs]] = {
    "files": _files, "syntax": _syntax, "link": _link, "import": _imports, "gpu": _gpu,
}  # fmt: skip
