"""Push: plan on the target as it is, send what is missing, prove the staged tree, switch, and confirm from a fresh connection."""

from __future__ import annotations

import getpass
import hashlib
import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Thread
from typing import TYPE_CHECKING, Any

from ddtree_deploy.confirmation import confirm, outcome_after_loss
from ddtree_deploy.errors import (
    DeployError,
    HostUnreachable,
    Incompatible,
    IntegrityFailure,
    NoSpace,
    ProofFailed,
    RestoreUnconfirmed,
    RevertedAfterFailure,
    UsageProblem,
)
from ddtree_deploy.events import Emit, Note, Step, ignore
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.models import STOCK, Inventory, Manifest, Plan, Proofs, Pushed, Use
from ddtree_deploy.sending import Sent, send
from ddtree_deploy.session import Session
from ddtree_deploy.snapshot import import_proof
from ddtree_deploy.store import Store
from ddtree_deploy.survey import Survey, inventory, survey

if TYPE_CHECKING:
    from ddtree_deploy.abi import Allowance
    from ddtree_deploy.overlay import Overlay
    from ddtree_deploy.relay import Fed, Relay

# The heart (`oracle`, `plan`, `overlay`) is imported where it is used: by then `ssh` is connecting, and a push of what is already
# there needs none of it.

ROOTS = ("sglang", "torch", "triton", "sgl_kernel")


@dataclass(frozen=True, slots=True)
class PushOptions:
    """What a user may ask of a push; times in seconds."""

    only: tuple[str, ...] = ()
    with_: tuple[str, ...] = ()
    verify: bool = True
    create: bool = False
    base: str = ""
    confirm_timeout: float = 30.0
    rollback: bool = True
    lock_wait: float = 0.0
    accept_gap: bool = False
    probe_timeout: float = 120.0
    keep_generations: int = 3
    roots: tuple[str, ...] = ROOTS
    allow: tuple[Allowance, ...] = ()
    overlays: tuple[Overlay, ...] | None = None  # None: none is wanted


def plan_push(host: Host, store: Store, snapshot_id: str, options: PushOptions, emit: Emit = ignore) -> Plan:
    """Plan a push without changing anything: the agent is read-only."""
    snapshot = _loaded(store, snapshot_id)
    with Session(host, writable=False, emit=emit) as session:
        if options.create and not _there(session):
            from ddtree_deploy.plan import make

            return make(snapshot_id, snapshot, _nothing_yet(host, snapshot), only=options.only, overlays=options.overlays)
        return _plan(session, store, snapshot_id, snapshot, options, survey(session, store, whole=False))[0]


def push(
    host: Host,
    store: Store,
    snapshot_id: str,
    options: PushOptions,
    *,
    approve: Callable[[Plan], bool],
    about_to_switch: Callable[[], None] = lambda: None,
    emit: Emit = ignore,
    relay: Relay | None = None,
) -> Pushed:
    """Push a snapshot to a host and return what the host's ledger says.

    `approve(plan)` is asked once, before anything is written; `about_to_switch()` is called when the staged tree is proved;
    `relay` knows the hosts that may feed this one.
    Raises Incompatible, NoSpace, Locked, StalePlan, ProofFailed with the live generation untouched; RevertedAfterFailure when the
    old one was restored; RestoreUnconfirmed when that is not known.
    """
    clock = _Clock()
    if not store.ref(snapshot_id).complete:
        _loaded(store, snapshot_id)  # known to lack something: unless that came back, the host is not even contacted
    parts = ("relay",) if relay else ()
    with store.lock("push", shared=True), Session(host, writable=True, emit=emit, parts=parts) as session:
        if options.create and not _there(session):
            _create(session, _loaded(store, snapshot_id))
        with clock("look"):
            seen = survey(session, store, unless=_asked(snapshot_id, options), whole=False)
            if seen.same:
                return _already(host, snapshot_id, seen.fields, clock)
            plan, base = _plan(session, store, snapshot_id, _loaded(store, snapshot_id), options, seen)
        if plan.empty and plan.base_generation is not None and not seen.fields["unfinished"]:
            return _already(host, snapshot_id, seen.fields, clock)
        _approved(plan, approve)
        work = _Push(host, store, session, plan, options, clock, emit, relay)
        if work.begin():
            # An earlier run was brought to its end, which moved stamps, and may have moved the live link: look again.
            seen = survey(session, store)
            work.plan, base = _plan(session, store, snapshot_id, _loaded(store, snapshot_id), options, seen)
            if work.plan.base != plan.base:
                plan = work.plan
                if plan.empty and plan.base_generation is not None:
                    return _already(host, snapshot_id, seen.fields, clock)
                _approved(plan, approve)
        work.stage(seen, base)
        work.prove(store.proof(snapshot_id))
        about_to_switch()
        tx, generation, previous = work.switch()
        uses = tuple(use for use in plan.uses if use.how in ("maps", "exe"))
    # The connection that switched is closed: only a fresh one proves that the host can still be reached.
    with clock("confirm"):
        confirm(host, tx, generation, previous, options.confirm_timeout, emit)
    return Pushed(
        host=host.name,
        generation=generation,
        previous=previous,
        snapshot=snapshot_id,
        changed_files=len(plan.changes),
        sent_objects=work.sent.objects,
        sent_bytes=work.sent.bytes,
        seconds=clock.total(),
        phases=dict(clock.phases),
        verified=options.verify,
        proofs=tuple(work.proofs),
        in_use=uses,
        fed_by=work.fed.by if work.fed else (),
        fed_bytes=work.fed.bytes if work.fed else 0,
    )


class _Clock:
    """Where the seconds of a push went."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.phases: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            self.phases[phase] = self.phases.get(phase, 0.0) + time.monotonic() - begun

    def total(self) -> float:
        return time.monotonic() - self.started


def _there(session: Session) -> bool:
    return bool(session.ask("look", venv=session.host.venv, ledger=0).fields["inspect"].get("exists"))


def _loaded(store: Store, snapshot_id: str) -> Manifest:
    manifest = store.manifest(snapshot_id)
    absent = store.absent(manifest)
    store.mark(snapshot_id, not absent)
    if absent:
        raise IntegrityFailure(
            f"snapshot `{snapshot_id[:12]}` is incomplete: {len(absent)} objects are missing from the store",
            mend="take the snapshot again while its host is reachable: only what is missing is read",
        )
    return manifest


def _already(host: Host, snapshot_id: str, fields: Mapping[str, Any], clock: _Clock) -> Pushed:
    generation = fields["generation"]
    return Pushed(host.name, generation, generation, snapshot_id, 0, 0, 0, clock.total(), dict(clock.phases), verified=True, already=True)


def _create(session: Session, snapshot: Manifest) -> None:
    minor = ".".join(snapshot.python.version.split(".")[:2])
    session.emit(Step(session.host.name, f"make the venv with python {minor}"))
    session.ask("create", venv=session.host.venv, minor=minor, candidates=[session.host.python] if session.host.python else [])


def _asked(snapshot_id: str, options: PushOptions) -> list[Any]:
    """Return what a push was asked to do, as the host records it to know a repetition."""
    overlays = [] if options.overlays is None else [[overlay.id for overlay in options.overlays]]
    return [snapshot_id, list(options.only), list(options.with_), *overlays]


def _plan(
    session: Session, store: Store, snapshot_id: str, snapshot: Manifest, options: PushOptions, seen: Survey
) -> tuple[Plan, Survey | None]:
    from ddtree_deploy import oracle
    from ddtree_deploy.plan import chosen, make

    host = session.host
    target = inventory(host, seen)
    base: Survey | None = None
    if options.base and not target.files:
        base = survey(replace_host(session, replace(host, venv=options.base)), store)
        over = inventory(host, base)
        target = replace(target, distributions=over.distributions, files=over.files)
    uses = _uses(session, seen.fields["generation"])
    judged = _judged_before(snapshot_id, snapshot, options, seen, target, uses)
    if judged is not None:
        return judged, base
    choice = oracle.choose(
        session, store, snapshot_id, snapshot,
        only=chosen(snapshot.distributions, options.only) | chosen(snapshot.distributions, options.with_) if options.only else (),
        also=chosen(snapshot.distributions, options.with_), roots=options.roots, allow=options.allow,
        empty_target=not target.distributions,
    )  # fmt: skip
    checks = [check for check in choice.verdict.checks if check.level != "ok"] if choice.verdict else []
    return make(
        snapshot_id, snapshot, target, only=choice.names or (), why=choice.why, checks=checks, uses=uses,
        oracle=choice.verdict, overlays=options.overlays,
    ), base  # fmt: skip


def _judged_before(
    snapshot_id: str, snapshot: Manifest, options: PushOptions, seen: Survey, target: Inventory, uses: tuple[Use, ...]
) -> Plan | None:
    """Plan without the oracle when the same request made the live tree, and nothing that it looks at would change."""
    from ddtree_deploy import oracle
    from ddtree_deploy.plan import make

    info = seen.fields["info"]
    if seen.tree is None or info.get("asked", [""])[1:] != _asked(snapshot_id, options)[1:] or "shape" not in info:
        return None
    try:
        plan = make(
            snapshot_id, snapshot, target, only=info["moved"], checks=oracle.unchanged(target.generation or 0), uses=uses,
            overlays=options.overlays,
        )  # fmt: skip
    except UsageProblem:
        return None  # a distribution that moved then is not in this snapshot
    return plan if oracle.shape(plan.result.files) == info["shape"] else None


def replace_host(session: Session, host: Host) -> Session:
    """Return the same conversation, aimed at another venv of the host."""
    import copy

    other = copy.copy(session)
    other.host = host
    return other


def _nothing_yet(host: Host, snapshot: Manifest) -> Inventory:
    return Inventory(host.name, host.venv, "", snapshot.python, None, "", (), (), 1 << 62, 1 << 62)


def _uses(session: Session, live: int | None) -> tuple[Use, ...]:
    rows = session.ask("users", venv=session.host.venv).value["users"]
    return tuple(Use(row["pid"], row["command"], row["how"], live) for row in rows)


def _approved(plan: Plan, approve: Callable[[Plan], bool]) -> None:
    _refuse_blocks(plan)
    if not approve(plan):
        raise UsageProblem("nothing was changed: the plan was not approved")


def _refuse_blocks(plan: Plan) -> None:
    if not plan.blocks:
        return
    first = plan.blocks[0]
    error = NoSpace if first.id == "K12-space" else Incompatible
    # A check's text says what kind of trouble it is; its evidence names the file, the symbol and who provides it.
    lines = [f"{block.text}: {line}" if line else block.text for block in plan.blocks for line in block.evidence or ("",)]
    solution = plan.oracle.solution if plan.oracle else None
    together = solution.command(plan.target) if solution and solution.consistent and solution.steps else ""
    raise error(
        f"cannot push to `{plan.target}`: {lines[0]}",
        mend=f"push what has to move together: `{together}`" if together else first.mend or None,
        causes=tuple(lines[1:20]),
    )


@dataclass
class _Push:
    """One push on its way: what the steps share."""

    host: Host
    store: Store
    session: Session
    plan: Plan
    options: PushOptions
    clock: _Clock
    emit: Emit
    relay: Relay | None = None
    fed: Fed | None = None
    tx: str = ""
    sent: Sent = field(default_factory=Sent)
    proofs: list[Proofs] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)

    def ask(self, op: str, value: Any = None, **fields: Any) -> Any:
        return self.session.ask(op, value, patience=3600.0, **fields)

    def step(self, what: str) -> None:
        self.emit(Step(self.host.name, what))

    def allowed(self) -> list[list[str]]:
        """Return the blocks that the user took on, as the host journals them: check, what, reason."""
        return [list(row) for row in self.plan.oracle.allowed] if self.plan.oracle else []

    def begin(self) -> bool:
        """Take the host's lock; tell whether unfinished work of an earlier run was there."""
        with self.clock("stage"):
            begun = self.ask(
                "begin", venv=self.host.venv, who=f"{getpass.getuser()}@{platform.node()}", what="push", snapshot=self.plan.snapshot,
                overlay=self.plan.overlay,
                allowed=self.allowed(), lock_wait=self.options.lock_wait, keep_generations=self.options.keep_generations,
            ).fields  # fmt: skip
        self.tx = begun["tx"]
        if begun["recovered"]:
            self.emit(Note(self.host.name, begun["recovered"], "warn"))
        return bool(begun["stirred"])

    def stage(self, seen: Survey, base: Survey | None) -> None:
        """Send what is missing, build the tree."""
        from ddtree_deploy import oracle

        plan = self.plan
        rows = [[e.path, e.kind, e.mode, e.size, e.digest] for e in plan.result.files]
        result = hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()
        with self.clock("stage"):
            info = {
                "moved": list(plan.selected), "shape": oracle.shape(plan.result.files), "allowed": self.allowed(),
                "overlay": plan.overlay,
                "snapshot": plan.snapshot, "asked": _asked(plan.snapshot, self.options), "result": result, "files": len(rows),
                "bytes": plan.result.bytes, "packages": [[d.name, d.shown_version] for d in plan.result.distributions],
            }  # fmt: skip
            value: dict[str, Any] = {"info": info, "vouch": _vouch(seen)}
            if seen.tree is not None and base is None:
                # Both sides know the tree that is live: what differs is enough.
                changed = {change.path for change in plan.changes}
                value["delta"] = {
                    "result": seen.fields["info"]["result"],
                    "changes": [row for row in rows if row[0] in changed],
                    "gone": [change.path for change in plan.changes if change.sign == "-"],
                }
            else:
                value["files"] = rows
            if base is not None:
                value["base"] = {"root": f"{base.fields['venv']}/{base.fields['site']}", "vouch": _vouch(base)}
            reply = self.ask("stage", value, base=plan.base)
            need = [(digest, size) for digest, size in reply.value]
        with self.clock("send"):
            if self.relay is not None:
                self.fed = self.relay.feed(self.session, need)
                need = list(self.fed.left)
            self.sent = send(self.session, self.store, need, unpacks=bool(reply.fields["zstd"]), name=self._name)
        with self.clock("stage"):
            self.step("build the new generation")
            # While the host links files, this side notes what the result is.
            note = Thread(target=self.store.remember_tree, args=(result, plan.result))
            note.start()
            self.changed = self.ask("build").value
            note.join()

    def _name(self, digest: str) -> str:
        return next((entry.path for entry in self.plan.result.files if entry.digest == digest), digest)

    def prove(self, source: Mapping[str, Any]) -> None:
        """Prove the staged tree before anything is switched. Raises ProofFailed."""
        from ddtree_deploy.plan import probe_modules

        plan = self.plan
        entries = {e.path: e for e in plan.result.files}
        # Of a tree that we never proved, every source; else what changed. A stock file is what its publisher hashed: whether that
        # compiles is no patch's and no transfer's fault, and would not count.
        at_stake = entries if plan.base_generation is None else self.changed
        sources = [p for p in at_stake if p.endswith(".py") and entries[p].kind == "f" and entries[p].origin != STOCK]
        with self.clock("prove"):
            self.step(f"prove {len(entries)} files, {len(sources)} sources")
            found = self.ask("prove", {"hash": True, "sources": sources}).value
        modules = probe_modules(plan, self.options.roots)
        with self.clock("imports"):
            self.step(f"import {len(modules)} packages from the staged tree")
            rows = self.ask("prove", {"modules": modules}, **self._probing()).value["imports"] if not found["bad"] else []
            baseline = self._baseline(source, [row["module"] for row in rows if not row["ok"]])
        proofs = Proofs(
            where="staged",
            hashed=found["hashed"],
            vouched=found["vouched"],
            bad_files=tuple(map(str, found["bad"])),
            compiled=found["compiled"],
            syntax_errors=tuple((path, text) for path, text in found["syntax_errors"]),
            imports=tuple(import_proof(row, row["module"] in baseline) for row in rows),
        )
        self.proofs.append(proofs)
        if not proofs.ok:
            self.ask("abort", everything=True)
            if proofs.bad_files:
                raise IntegrityFailure(
                    f"the staged tree on `{self.host.name}` is not what was sent; the live one was not touched",
                    mend="check the disk there, then push again", causes=failed_lines(proofs),
                )  # fmt: skip
            raise ProofFailed(f"`{self.host.name}` keeps its generation: the staged tree is not proved", causes=failed_lines(proofs))
        with self.clock("prove"):
            self.ask("commit", proved={"failed_imports": sorted(baseline)})

    def _baseline(self, source: Mapping[str, Any], failed: Sequence[str]) -> set[str]:
        """Return the failed modules that did not import before either: on the source host, or in the target's live tree."""
        from ddtree_deploy.overlay import PROBES, excused

        on_source = {row["module"]: row["ok"] for row in source.get("imports", [])}
        known = {module for module in failed if on_source.get(module) is False} | excused(failed)
        foreign = [module for module in failed if module not in on_source and module not in PROBES]
        if foreign and (self.plan.base_generation is not None or self.plan.base):
            rows = self.ask("probe", foreign, venv=self.host.venv, **self._probing()).value
            known |= {row["module"] for row in rows if not row["ok"]}
        return known

    def _probing(self) -> dict[str, Any]:
        return {"user": self.host.service_user, "env": dict(self.host.service_env), "timeout": self.options.probe_timeout}

    def switch(self) -> tuple[str, int, int]:
        """Switch and probe the live tree; return (transaction, generation, previous). Raises when the host went back."""
        from ddtree_deploy.plan import probe_modules

        modules = probe_modules(self.plan, self.options.roots) if self.options.verify else []
        budget = self.options.confirm_timeout + (self.options.probe_timeout * max(1, len(modules) / 2) if modules else 0)
        try:
            with self.clock("switch"):
                self.step("switch")
                done = self.ask("switch", deadline=budget, accept_gap=self.options.accept_gap).fields
            tx, generation, previous = done["tx"], done["generation"], done["previous"]
            with self.clock("imports"):
                rows = self.ask("probe-live", modules, confirm_timeout=self.options.confirm_timeout, **self._probing()).value
        except (HostUnreachable, IntegrityFailure) as error:
            raise outcome_after_loss(self.host, self.tx, self.plan.base_generation, budget, self.emit, error) from error
        staged = {proof.module: proof for proof in self.proofs[-1].imports or ()}
        proofs = Proofs(
            where="live", imports=tuple(import_proof(row, row["module"] in staged and staged[row["module"]].baseline) for row in rows)
        )
        self.proofs.append(proofs)
        if not proofs.ok and not self.options.rollback:
            self.emit(Note(self.host.name, "a proof failed on the live tree, which stays because of --no-rollback", "warn"))
        elif not proofs.ok:
            self._revert(previous, proofs)
        return tx, generation, previous

    def _revert(self, previous: int, proofs: Proofs) -> None:
        try:
            outcome = self.ask("revert", reason="a proof failed on the live tree").fields["outcome"]
        except HostUnreachable as error:
            raise outcome_after_loss(self.host, self.tx, previous, self.options.confirm_timeout, self.emit, error) from error
        except DeployError as error:
            message = f"a proof failed on `{self.host.name}` after the switch, and it could not be told to go back"
            raise RestoreUnconfirmed(message, causes=(error.message, *failed_lines(proofs))) from error
        if outcome == "reverted":
            message = f"`{self.host.name}` is back at generation {previous}: a proof failed after the switch"
            raise RevertedAfterFailure(message, causes=failed_lines(proofs))
        message = f"a proof failed on `{self.host.name}`, and its ledger does not say that it went back"
        raise RestoreUnconfirmed(message, causes=failed_lines(proofs))


def _vouch(seen: Survey) -> list[list[Any]]:
    """Return the stamps and digests of the files that the host itself has no index of."""
    return [
        [path, dev, ino, size, mtime, ctime, seen.digests[path]]
        for path, kind, _mode, size, dev, ino, mtime, ctime, _target, known in seen.scan.get("files", ())
        if kind == "f" and not known and seen.digests.get(path)
    ]


def failed_lines(proofs: Proofs) -> tuple[str, ...]:
    """Return the failed proofs as lines for an error: the thing, what happened, the end of its traceback."""
    lines = [f"hash: {name}" for name in proofs.bad_files]
    lines += [f"syntax: {path}: {text}" for path, text in proofs.syntax_errors]
    for proof in proofs.imports or ():
        if not proof.ok and not proof.baseline:
            lines.append(f"import {proof.module}: {proof.error or proof.signal}")
            lines += [f"  {line}" for line in proof.traceback.splitlines()[-6:]]
            lines += [f"  from another tree: {path}" for path in proof.foreign_libraries]
    lines += [f"{check.id}: {check.text}" for check in proofs.extra if check.level == "block"]
    return tuple(lines[:60])
