"""The steps of one push, in their order: begin, stage, prove, switch. `transfer.push` takes them."""

from __future__ import annotations

import getpass
import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddtree_deploy import oracle
from ddtree_deploy.errors import DeployError, HostUnreachable, IntegrityFailure, ProofFailed, RestoreUnconfirmed, RevertedAfterFailure
from ddtree_deploy.events import Emit, Note, Step
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.models import STOCK, Plan, Proofs
from ddtree_deploy.overlay import PROBES, excused
from ddtree_deploy.plan import probe_modules
from ddtree_deploy.push.confirmation import Fresh, outcome_after_loss
from ddtree_deploy.push.request import Clock, PushOptions, asked
from ddtree_deploy.push.sending import Sent, send
from ddtree_deploy.session import Session
from ddtree_deploy.snapshot import import_proof
from ddtree_deploy.store import Store
from ddtree_deploy.survey import Survey

if TYPE_CHECKING:
    from ddtree_deploy.push.relay import Fed, Relay


@dataclass
class PushSteps:
    """One push on its way: what the steps share."""

    host: Host
    store: Store
    session: Session
    plan: Plan
    options: PushOptions
    clock: Clock
    emit: Emit
    relay: Relay | None = None
    fed: Fed | None = None
    tx: str = ""
    sent: Sent = field(default_factory=Sent)
    proofs: list[Proofs] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    fresh: Fresh | None = None

    def ask(self, op: str, value: Any = None, meanwhile: Callable[[], None] = lambda: None, /, **fields: Any) -> Any:
        return self.session.ask(op, value, meanwhile, patience=3600.0, **fields)

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
        plan = self.plan
        with self.clock("stage"):
            value: dict[str, Any] = {"vouch": _vouch(seen)}
            if seen.tree is not None and base is None:
                # Both sides know the tree that is live: what differs is enough.
                changed = {change.path for change in plan.changes}
                value["delta"] = {
                    "result": seen.fields["info"]["result"],
                    "changes": [entry[:5] for entry in plan.result.files if entry.path in changed],
                    "gone": [change.path for change in plan.changes if change.sign == "-"],
                }
            else:
                value["files"] = [entry[:5] for entry in plan.result.files]
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
            self.changed = self.ask("build", None, self._describe).value

    def _describe(self) -> None:
        """Note what the result is: for the host's record of the generation, and here, to know that tree again."""
        plan = self.plan
        rows = [entry[:5] for entry in plan.result.files]
        result = hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()
        self.info = {
            "moved": list(plan.selected), "shape": oracle.shape(plan.result.files), "allowed": self.allowed(), "overlay": plan.overlay,
            "snapshot": plan.snapshot, "asked": asked(plan.snapshot, self.options), "result": result, "files": len(rows),
            "bytes": plan.result.bytes, "packages": [[d.name, d.shown_version] for d in plan.result.distributions],
        }  # fmt: skip
        self.store.remember_tree(result, plan.result)

    def _name(self, digest: str) -> str:
        return next((entry.path for entry in self.plan.result.files if entry.digest == digest), digest)

    def prove(self, source: Mapping[str, Any]) -> None:
        """Prove the staged tree before anything is switched. Raises ProofFailed."""
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
            self.ask("commit", {**self.info, "failed_imports": sorted(baseline)})

    def _baseline(self, source: Mapping[str, Any], failed: Sequence[str]) -> set[str]:
        """Return the failed modules that did not import before either: on the source host, or in the target's live tree."""
        on_source = {row["module"]: row["ok"] for row in source.get("imports", [])}
        known = {module for module in failed if on_source.get(module) is False} | excused(failed)
        # What is new on the target has nothing to be compared with there: it must import.
        foreign = [module for module in failed if module not in on_source and module not in PROBES and _was_there(self.plan, module)]
        if foreign and (self.plan.base_generation is not None or self.plan.base):
            rows = self.ask("probe", foreign, venv=self.host.venv, **self._probing()).value
            known |= {row["module"] for row in rows if not row["ok"]}
        return known

    def _probing(self) -> dict[str, Any]:
        return {"user": self.host.service_user, "env": dict(self.host.service_env), "timeout": self.options.probe_timeout}

    def switch(self) -> tuple[str, int, int]:
        """Switch and probe the live tree; return (transaction, generation, previous). Raises when the host went back.

        What the confirmation takes, `fresh`, is dropped when there will be none.
        """
        try:
            return self._switch()
        except BaseException:
            if self.fresh is not None:
                self.fresh.drop()
            raise

    def _switch(self) -> tuple[str, int, int]:
        modules = probe_modules(self.plan, self.options.roots) if self.options.verify else []
        budget = self.options.confirm_timeout + (self.options.probe_timeout * max(1, len(modules) / 2) if modules else 0)
        try:
            with self.clock("switch"):
                self.step("switch")
                done = self.ask("switch", deadline=budget, accept_gap=self.options.accept_gap).fields
            tx, generation, previous = done["tx"], done["generation"], done["previous"]
            # Only from here on is a connection one that the switched host let in; it is made while the live tree is proved.
            self.fresh = Fresh(self.host, self.emit)
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


def _was_there(plan: Plan, module: str) -> bool:
    """Tell whether the target had something of an import package before."""
    added = {change.path for change in plan.changes if change.sign == "+"}
    before = [entry.path for entry in plan.result.files if entry.path not in added]
    before += [change.path for change in plan.changes if change.sign == "-"]
    return module.partition(".")[0] in {path.partition("/")[0].partition(".")[0] for path in before}


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
