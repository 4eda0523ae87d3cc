"""Push to several hosts: plan all, let the first prove, then the rest in parallel.

When a host may move on is a pure function of where all of them are (`moves`); the threads only ask it. A host that waits for its
turn holds its plan and its connection, and nothing on the host but the empty venv of `--create`, which goes with the connection: what
changed there meanwhile is a stale plan (exit 21).
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from ddtree_deploy import waiting
from ddtree_deploy.errors import DeployError, RestoreUnconfirmed
from ddtree_deploy.events import Event, Step
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.models import Plan, Pushed


class State(Enum):
    """Where a host is. The last four are ends."""

    WAITING = "waiting"
    LOOKING = "looking"
    PLANNED = "planned"
    PUSHING = "pushing"
    DONE = "done"
    CURRENT = "current"
    FAILED = "failed"
    LEFT = "left"


def moves(states: Sequence[State], jobs: int, keep_going: bool) -> dict[int, State]:
    """Return which hosts move on now, and where to; nothing while others have to end first.

    All are looked at, `jobs` at a time, also when one fails: that is when the user wants to know of the others. Then the first
    that has something to do pushes alone, until one has proved the snapshot; the rest follow, `jobs` at a time. After a failure
    nobody begins, unless `keep_going`.
    """
    if State.WAITING in states or State.LOOKING in states:
        begin, among, free = State.LOOKING, State.WAITING, jobs - states.count(State.LOOKING)
    elif State.FAILED in states and not keep_going:
        begin, among, free = State.LEFT, State.PLANNED, len(states)
    else:
        proved = State.DONE in states
        begin, among, free = State.PUSHING, State.PLANNED, (jobs if proved else 1) - states.count(State.PUSHING)
    return dict.fromkeys([index for index, state in enumerate(states) if state is among][: max(0, free)], begin)


@dataclass(frozen=True, slots=True)
class End:
    """How it ended for one host, or where it was when the run was stopped (`step`). `generation` is what is live there, if known."""

    host: str
    state: State
    seconds: float = 0.0
    generation: int | None = None
    step: str = ""
    plan: Plan | None = None
    pushed: Pushed | None = None
    error: DeployError | None = None


def failure(ends: Sequence[End], *, detail: bool) -> DeployError | None:
    """Return what the whole run ends with, or None when every host has the snapshot.

    Its exit code is 18 (look at the host) if that is any host's, else that of the first failed host in the user's order.
    `detail` names what each host said.
    """
    failed = [(end.host, end.error) for end in ends if end.error is not None]
    if not failed:
        return None
    worst = next((error for _host, error in failed if isinstance(error, RestoreUnconfirmed)), failed[0][1])
    untouched = sum(end.state is State.LEFT for end in ends)
    return type(worst)(
        f"{len(failed)} of {len(ends)} hosts failed: {', '.join(f'`{host}`' for host, _error in failed)}"
        + (f", {untouched} not touched" if untouched else ""),
        mend=worst.mend,
        causes=tuple(f"{host}: {error.message}" for host, error in failed) if detail else (),
    )


class Left(Exception):
    """This host's turn does not come: another one failed."""


class Fleet:
    """One run over several hosts. `told(end)` is called as each ends, on the thread of that host."""

    def __init__(self, hosts: Sequence[Host], jobs: int, keep_going: bool, told: Callable[[End], None]) -> None:
        self.hosts = hosts
        self.jobs = jobs
        self.keep_going = keep_going
        self.told = told
        self._ends = [End(host.name, State.WAITING) for host in hosts]
        self._turn = threading.Condition()
        self._broken: Exception | None = None

    def run(self, work: Callable[[Host, Callable[[Plan], None]], Pushed]) -> list[End]:
        """Do `work(host, cleared)` for each host and return the ends, in the order of the hosts.

        `work` calls `cleared(plan)` before it writes anything: it returns when that host's turn has come, and raises Left when it
        does not come. The threads are daemons: after Ctrl-C this process ends at once, and each agent takes the end of its input
        for what it is. A pool would wait for the work that was to be stopped.
        """
        threads = [threading.Thread(target=self._one, args=(index, work), daemon=True) for index in range(len(self.hosts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            waiting.join(thread)
        if self._broken is not None:
            raise self._broken
        return list(self._ends)

    def stop(self) -> list[End]:
        """Let nobody begin any more, and return where every host is: who did not push yet is left as it is."""
        with self._turn:
            early = (State.WAITING, State.LOOKING, State.PLANNED)
            self._ends = [replace(end, state=State.LEFT) if end.state in early else end for end in self._ends]
            self._turn.notify_all()
            return list(self._ends)

    def heard(self, event: Event) -> None:
        """Remember the step that a host is at."""
        if isinstance(event, Step):
            with self._turn:
                self._ends = [replace(end, step=event.what) if end.host == event.host else end for end in self._ends]

    def _set(self, index: int, end: End) -> None:
        with self._turn:
            self._ends[index] = end
            self._turn.notify_all()

    def _wait(self, index: int, turn: State) -> None:
        """Wait until this host is let on to `turn`. Raises Left."""
        with self._turn:
            while True:
                found = moves([end.state for end in self._ends], self.jobs, self.keep_going)
                for other, state in found.items():
                    self._ends[other] = replace(self._ends[other], state=state)
                if found:
                    self._turn.notify_all()
                if self._ends[index].state is State.LEFT:
                    raise Left
                if self._ends[index].state is turn:
                    return
                self._turn.wait()

    def _one(self, index: int, work: Callable[[Host, Callable[[Plan], None]], Pushed]) -> None:
        begun, waited = time.monotonic(), 0.0

        def cleared(plan: Plan) -> None:
            nonlocal waited
            if self._ends[index].state is State.LOOKING:  # else it is asked again, about a plan that was made anew
                since = time.monotonic()
                self._set(index, replace(self._ends[index], state=State.PLANNED, plan=plan, generation=plan.base_generation))
                self._wait(index, State.PUSHING)
                waited = time.monotonic() - since

        host, pushed, error, state = self.hosts[index], None, None, State.LEFT
        try:
            self._wait(index, State.LOOKING)
            begun = time.monotonic()
            pushed = work(host, cleared)
            state = State.CURRENT if pushed.already else State.DONE
        except Left:
            pass
        except Exception as caught:
            error, state = caught if isinstance(caught, DeployError) else _bug(host, caught), State.FAILED
        end = self._ends[index]
        seconds = time.monotonic() - begun - waited
        live = pushed.generation if pushed else None if isinstance(error, RestoreUnconfirmed) else end.generation
        pushed = replace(pushed, seconds=seconds) if pushed else None
        end = replace(end, state=state, seconds=seconds, generation=live, pushed=pushed, error=error)
        try:
            self.told(end)
        except Exception as caught:  # who reads our output has gone: the others end their work, then this is raised
            self._broken = caught
        self._set(index, end)


def _bug(host: Host, caught: Exception) -> DeployError:
    trace = traceback.format_exception(caught)
    return DeployError(f"internal error at `{host.name}`: {type(caught).__name__}: {caught}", causes=tuple(trace[-2:]))
