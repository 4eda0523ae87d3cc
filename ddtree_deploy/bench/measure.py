"""Do what a plan says: launch, warm, measure, stop. Whatever was started here is stopped, however it ends.

What ended well leaves no record on the host; what did not keeps its log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddtree_deploy.bench.plan import Load, Step, Variant
from ddtree_deploy.bench.stats import Sample, read
from ddtree_deploy.errors import DeployError, ServerNotReady, UsageProblem
from ddtree_deploy.events import Emit, Note, ignore
from ddtree_deploy.events import Step as Doing
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.launch import budgets, lifecycle
from ddtree_deploy.launch.argv import Request
from ddtree_deploy.launch.lifecycle import Options, Prepared
from ddtree_deploy.launch.models import Ready, Server
from ddtree_deploy.session import Session

PARTS = ("serving", "load")


@dataclass(frozen=True, slots=True)
class Arm:
    """A variant and its server: one to be launched (`prepared`), or one that runs (`name` alone)."""

    variant: Variant
    name: str
    prepared: Prepared | None = None


def fresh(host: Host, base: Request, variants: Sequence[Variant], together: bool, emit: Emit = ignore) -> tuple[Arm, ...]:
    """Look whether each variant can be launched, and return what would be; together each has a port of its own.

    Raises UsageProblem, and for what stands in the way on the host what `launch` raises.
    """
    arms = []
    for number, variant in enumerate(variants):
        port = base.port + (number if together else 0)
        arms.append(Arm(variant, str(port), lifecycle.prepare(host, variant.of(base, port), emit)))
    return tuple(arms)


def running(host: Host, name: str = "", emit: Emit = ignore) -> Arm:
    """Return the server that runs on a host, named by what it was proved to decode with. Raises UsageProblem unless it is one."""
    found = [server for server in lifecycle.running(host, emit) if not name or server.record.name == name]
    if len(found) != 1:
        names = ", ".join(server.record.name for server in found)
        what = f"more than one server runs on `{host.name}`: {names}" if found else f"no server runs on `{host.name}`"
        raise UsageProblem(what, mend="name one with `--port`" if found else "name what to launch: `--model`, or `--profile`")
    proved = str((found[0].proved or {}).get("algorithm") or found[0].record.algorithm or "as launched")
    known = "plain" if proved == "none" else proved
    return Arm(Variant(known, proved), found[0].record.name)


def run(
    host: Host, arms: Sequence[Arm], steps: Sequence[Step], load: Load, options: Options, emit: Emit = ignore,
    ready: Callable[[str, Ready], None] = lambda _name, _ready: None,
) -> tuple[Sample, ...]:
    """Do the steps and return the samples. `ready` hears of each server that was launched.

    Raises what `launch` raises, and ServerNotReady when a server gives not one good answer in a measurement.
    """
    for arm in arms:
        if arm.prepared is not None:
            lifecycle.refuse(arm.prepared)
    up: dict[str, str] = {}  # server: its launch
    samples: list[Sample] = []
    try:
        with Session(host, writable=True, emit=emit, parts=PARTS) as session:
            session.greet()  # only then it is kept alive while servers start
            for step in steps:
                arm = arms[step.variant]
                if step.kind == "start":
                    assert arm.prepared is not None
                    emit(Doing(host.name, f"launch {arm.variant.name}"))
                    ready(arm.variant.name, lifecycle.launch(arm.prepared, options, emit, lambda server: _note(up, server)))
                elif step.kind == "stop":
                    lifecycle.stop(host, arm.name, launch=up[arm.name], drain=0, emit=emit)
                    session.ask("bench-forget", venv=host.venv, name=arm.name, launch=up.pop(arm.name))
                else:
                    words = "warm up" if step.kind == "warm" else f"round {step.round + 1}"
                    emit(Doing(host.name, f"{words}: {arm.variant.name}, {step.concurrency} at a time"))
                    sample = measure(session, arm, step, load)
                    if step.kind == "measure":
                        samples.append(sample)
    finally:
        for name, launch in up.items():
            _end(host, name, launch, emit)
    return tuple(samples)


def measure(session: Session, arm: Arm, step: Step, load: Load) -> Sample:
    """Ask a server for the answers of one measurement. Raises ServerNotReady when none is good."""
    value = {
        "prompts": list(load.of(step.concurrency)), "concurrency": step.concurrency, "max_tokens": load.max_tokens,
        "temperature": load.temperature, "seconds": load.seconds,
    }  # fmt: skip
    asked = session.ask("load-run", value, patience=load.seconds + 60, venv=session.host.venv, name=arm.name).value
    sample = Sample(arm.variant.name, step.concurrency, step.round, read(asked.get("answers") if isinstance(asked, dict) else None))
    if not sample.good:
        why = next((answer.error for answer in sample.answers if answer.error), "no token came")
        text = f"{session.host.name}: {arm.variant.name} gave no answer at {step.concurrency} at a time: {why}"
        raise ServerNotReady(text, mend=f"see `ddtree-deploy logs {session.host.name} --port {arm.name}`")
    return sample


def keep(host: Host, arm: Arm, table: str, emit: Emit = ignore) -> str:
    """Leave a budget table on the host for launches like this arm's; return the file there."""
    assert arm.prepared is not None
    value = {"key": budgets.key(arm.prepared.facts, arm.prepared.request), "table": table}
    with Session(host, writable=True, emit=emit, parts=PARTS) as session:
        return str(session.ask("tune-keep", value, venv=host.venv).fields.get("path", ""))


def _note(up: dict[str, str], server: Server) -> None:
    up[server.record.name] = server.launch


def _end(host: Host, name: str, launch: str, emit: Emit) -> None:
    try:
        lifecycle.stop(host, name, launch=launch, drain=0, emit=emit)
    except DeployError as problem:
        text = f"server {name} of this bench may still run: {problem.message}; `ddtree-deploy stop {host.name} --port {name}`"
        emit(Note(host.name, text, "warn"))
