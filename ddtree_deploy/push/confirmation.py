"""After a switch: the host's ledger is what happened, and only a fresh connection may add `confirmed` to it."""

from __future__ import annotations

import contextlib
import time
from threading import Thread

from ddtree_deploy.agent.ahead import ahead
from ddtree_deploy.errors import DeployError, HostUnreachable, IntegrityFailure, RestoreUnconfirmed, RevertedAfterFailure
from ddtree_deploy.events import Emit, Note, Step
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.session import Session


class Fresh:
    """A connection that is begun after a switch, and is ready by the time that the live tree is proved."""

    def __init__(self, host: Host, emit: Emit) -> None:
        self._session = ahead(lambda: Session(host, writable=True, emit=emit))

    def take(self) -> Session:
        """Return the connection, to be closed by the caller; raises what making it raised."""
        return self._session()

    def drop(self) -> None:
        """Close what nobody took; not waited for, since a connection may take its time to fail."""
        Thread(target=self._close, daemon=True).start()

    def _close(self) -> None:
        with contextlib.suppress(DeployError):
            self._session().close()


def confirm(host: Host, tx: str, generation: int, previous: int, seconds: float, emit: Emit, fresh: Fresh | None = None) -> None:
    """Confirm the switch `tx` within `seconds`; return only when the ledger says `confirmed`.

    `fresh` is tried first: a connection that was begun after the switch. Whatever fails is tried anew until the deadline.
    Raises RevertedAfterFailure when the host went back, RestoreUnconfirmed when the ledger could not be read.
    """
    emit(Step(host.name, "confirm from a fresh connection"))
    deadline = time.monotonic() + seconds
    while True:
        try:
            first, fresh = fresh, None
            with first.take() if first else Session(host, writable=True, emit=emit) as session:
                outcome = session.ask("confirm", venv=host.venv, tx=tx).fields["outcome"]
            break
        except DeployError as problem:
            # Unreachable, or its disk is full: until the deadline both may pass.
            if time.monotonic() > deadline:
                raise RestoreUnconfirmed(
                    f"`{host.name}` switched to generation {generation}, but that could not be confirmed",
                    mend=f"it goes back to {previous} by itself; see `ddtree-deploy status {host.name}`",
                    causes=(problem.message,),
                ) from problem
            emit(Note(host.name, "not confirmed yet, trying again", "debug"))
            time.sleep(1.0)
    if outcome == "confirmed":
        return
    if outcome == "reverted":
        raise RevertedAfterFailure(f"`{host.name}` is back at generation {previous}: the confirmation came too late")
    raise RestoreUnconfirmed(f"the ledger of `{host.name}` does not say how the switch to generation {generation} ended")


def outcome_after_loss(host: Host, tx: str, previous: int | None, seconds: float, emit: Emit, lost: DeployError) -> DeployError:
    """Return the error that tells how a switch ended whose connection broke, by reading the ledger until it says.

    That is `lost` itself when nothing was switched: `previous` is live, and nobody is left there who would decide.
    """
    emit(Note(host.name, "the connection broke at the switch; reading the host's ledger", "warn"))
    deadline = time.monotonic() + seconds + 10
    while time.monotonic() < deadline:
        try:
            with Session(host, writable=False, emit=emit) as session:
                seen = session.ask("look", venv=host.venv)
        except HostUnreachable:
            time.sleep(2.0)
            continue
        except IntegrityFailure:
            break  # it answers, but not what an agent of ours would: nothing that it says is known to be true
        for entry in seen.value["ledger"]:
            if entry.get("tx") == tx and entry.get("event") == "reverted":
                message = f"`{host.name}` went back by itself: the connection broke after the switch"
                return RevertedAfterFailure(message, causes=(lost.message,))
        if seen.fields["lock"] is None:
            if (seen.fields["generation"] or 0) == (previous or 0):
                return lost
            break
        time.sleep(1.0)
    return RestoreUnconfirmed(f"the connection to `{host.name}` broke after the switch", causes=(lost.message,))
