"""Push: plan on the target as it is, send what is missing, prove the staged tree, switch, and confirm from a fresh connection."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddtree_deploy.agent.ahead import ahead
from ddtree_deploy.errors import (
    Incompatible,
    IntegrityFailure,
    IoProblem,
    NoSpace,
    UsageProblem,
)
from ddtree_deploy.events import Emit, Step, ignore
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.in_use import uses_of
from ddtree_deploy.models import Inventory, Manifest, Plan, Pushed, Use
from ddtree_deploy.push.confirmation import confirm
from ddtree_deploy.push.read_once import ReadOnce
from ddtree_deploy.push.request import Clock, PushOptions, asked
from ddtree_deploy.session import Session
from ddtree_deploy.store import Store
from ddtree_deploy.survey import Survey, inventory, survey

if TYPE_CHECKING:
    from ddtree_deploy.push.relay import Relay

# The heart (`oracle`, `plan`, `push.steps`) is imported where it is used: by then `ssh` is connecting, and a push of what is already
# there needs none of it.


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
    clock = Clock()
    if not store.ref(snapshot_id).complete:
        _loaded(store, snapshot_id)  # known to lack something: unless that came back, the host is not even contacted
    parts = ("relay",) if relay else ()
    once = store if isinstance(store, ReadOnce) else ReadOnce(store)
    with store.lock("push", shared=True), Session(host, writable=True, emit=emit, parts=parts) as session:
        ahead(lambda: _read_ahead(once, snapshot_id))
        if options.create and not _there(session):
            _create(session, _loaded(once, snapshot_id))
        with clock("look"):
            seen = survey(session, once, unless=asked(snapshot_id, options), whole=False)
            if seen.same:
                return _already(host, snapshot_id, seen.fields, clock)
            plan, base = _plan(session, once, snapshot_id, _loaded(once, snapshot_id), options, seen)
        if plan.empty and plan.base_generation is not None and not seen.fields["unfinished"]:
            return _already(host, snapshot_id, seen.fields, clock)
        _approved(plan, approve)
        from ddtree_deploy.push.steps import PushSteps

        work = PushSteps(host, once, session, plan, options, clock, emit, relay)
        if work.begin():
            # An earlier run was brought to its end, which moved stamps, and may have moved the live link: look again.
            seen = survey(session, once)
            work.plan, base = _plan(session, once, snapshot_id, _loaded(once, snapshot_id), options, seen)
            if work.plan.base != plan.base:
                plan = work.plan
                if plan.empty and plan.base_generation is not None:
                    return _already(host, snapshot_id, seen.fields, clock)
                _approved(plan, approve)
        work.stage(seen, base)
        work.prove(once.proof(snapshot_id))
        about_to_switch()
        tx, generation, previous = work.switch()
        uses = tuple(use for use in plan.uses if use.how in ("maps", "exe"))
    # The connection that switched is closed: only one that was made since proves that the host can still be reached.
    with clock("confirm"):
        confirm(host, tx, generation, previous, options.confirm_timeout, emit, work.fresh)
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


def _read_ahead(store: ReadOnce, snapshot_id: str) -> None:
    """Use the time that a connection takes; what fails here fails again where it is needed, and is told there."""
    if store.read_ahead(snapshot_id):
        from ddtree_deploy.push import steps  # noqa: F401


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


def _already(host: Host, snapshot_id: str, fields: Mapping[str, Any], clock: Clock) -> Pushed:
    generation = fields["generation"]
    return Pushed(host.name, generation, generation, snapshot_id, 0, 0, 0, clock.total(), dict(clock.phases), verified=True, already=True)


def _create(session: Session, snapshot: Manifest) -> None:
    minor = ".".join(snapshot.python.version.split(".")[:2])
    session.emit(Step(session.host.name, f"make the venv with python {minor}"))
    session.ask("create", venv=session.host.venv, minor=minor, candidates=[session.host.python] if session.host.python else [])


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
    uses = uses_of(session, seen.fields["generation"])
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
    if seen.tree is None or info.get("asked", [""])[1:] != asked(snapshot_id, options)[1:] or "shape" not in info:
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


def _approved(plan: Plan, approve: Callable[[Plan], bool]) -> None:
    _refuse_blocks(plan)
    if not approve(plan):
        raise UsageProblem("nothing was changed: the plan was not approved", mend="end what runs there first, or push again and answer `y`")


def _refuse_blocks(plan: Plan) -> None:
    if not plan.blocks:
        return
    first = plan.blocks[0]
    error = {"K12-space": NoSpace, "K12-read-only": IoProblem}.get(first.id, Incompatible)
    # A check's text says what kind of trouble it is; its evidence names the file, the symbol and who provides it.
    lines = [f"{block.text}: {line}" if line else block.text for block in plan.blocks for line in block.evidence or ("",)]
    solution = plan.oracle.solution if plan.oracle else None
    together = solution.command(plan.target) if solution and solution.consistent and solution.steps else ""
    mend = f"push what has to move together: `{together}`" if together else first.mend
    judged = next((item for item in plan.oracle.evidence if (item.check, item.level) == (first.id, "block")), None) if plan.oracle else None
    if judged and mend and not together:
        mend += f"; if you know better: `--allow {shlex.quote(f'{judged.check}:{judged.what}')} --reason WHY`"
    raise error(
        f"cannot push to `{plan.target}`: {lines[0]}",
        mend=mend or None,
        causes=tuple(lines[1:20]),
    )


