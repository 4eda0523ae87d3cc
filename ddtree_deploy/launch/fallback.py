"""A launch that fails after a push: go back to the generation before, and serve from there."""

from __future__ import annotations

from ddtree_deploy.errors import DeployError, RestoreUnconfirmed, RevertedAfterFailure, ServerNotReady
from ddtree_deploy.events import Emit, Note, Step, ignore
from ddtree_deploy.generations import rollback
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.launch.lifecycle import Options, again


def go_back(host: Host, name: str, problem: ServerNotReady, options: Options, emit: Emit = ignore) -> DeployError:
    """Roll the host back and start the same launch there; return the error that says how the whole ended.

    RevertedAfterFailure when the old generation serves, RestoreUnconfirmed when it is live and does not serve either (or the
    rollback failed): a script must be able to tell the two apart.
    """
    emit(Note(host.name, f"not ready, going back: {problem.message}", "warn"))
    try:
        back = rollback(host, None, approve=lambda _plan: True, verify=False, emit=emit)
    except DeployError as second:
        return RestoreUnconfirmed(f"{problem.message}; and the rollback failed: {second.message}", mend=second.mend, causes=problem.causes)
    emit(Step(host.name, f"serve from generation {back.generation}"))
    try:
        ready = again(host, name, options, emit)
    except DeployError as second:
        text = f"{problem.message}; generation {back.generation} is live again, but does not serve either: {second.message}"
        return RestoreUnconfirmed(text, mend=second.mend, causes=problem.causes)
    return RevertedAfterFailure(
        f"{problem.message}; generation {back.generation} is live again and serves {ready.server.url}",
        mend=problem.mend,
        causes=problem.causes,
    )
