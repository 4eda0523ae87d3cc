"""When each of several hosts may move: whatever the hosts do, and in whatever order they end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_deploy.errors import DeployError, Incompatible, ProofFailed, RestoreUnconfirmed
from ddtree_deploy.push.fleet import End, State, failure, moves

#: How a host will behave: its plan fails, it has the snapshot, its push fails, its push succeeds.
FATES = ("bad plan", "current", "bad push", "good")
ENDS = {State.DONE, State.CURRENT, State.FAILED, State.LEFT}


@dataclass
class Played:
    """What happened in a run: the states at the end, and the order in which hosts began to push."""

    states: list[State]
    began: list[int]


def play(fates: list[str], jobs: int, keep_going: bool, draw: Callable[[Any], Any]) -> Played:
    """Let hosts with these fates run against `moves`, ending in an order that hypothesis chooses; check it at every step."""
    states = [State.WAITING] * len(fates)
    began: list[int] = []
    while True:
        while found := moves(states, jobs, keep_going):
            for index, state in found.items():
                assert states[index] is (State.WAITING if state is State.LOOKING else State.PLANNED)
                states[index] = state
                if state is State.PUSHING:
                    assert not {State.WAITING, State.LOOKING} & set(states), "a push before all were planned"
                    assert keep_going or State.FAILED not in states, "a push after a failure"
                    assert State.DONE in states or states.count(State.PUSHING) == 1, "two push what nobody has proved"
                    began.append(index)
        assert states.count(State.PUSHING) <= jobs and states.count(State.LOOKING) <= jobs
        busy = [index for index, state in enumerate(states) if state in (State.LOOKING, State.PUSHING)]
        if not busy:
            break
        index = draw(st.sampled_from(busy))
        fate = fates[index]
        if states[index] is State.LOOKING:
            states[index] = {"bad plan": State.FAILED, "current": State.CURRENT}.get(fate, State.PLANNED)
        else:
            states[index] = State.FAILED if fate == "bad push" else State.DONE
    assert set(states) <= ENDS, f"it hangs: {states}"
    return Played(states, began)


@settings(deadline=None)
@given(st.lists(st.sampled_from(FATES), min_size=1, max_size=8), st.integers(1, 9), st.booleans(), st.data())
def test_every_run_ends_and_no_host_moves_out_of_turn(fates: list[str], jobs: int, keep_going: bool, data: st.DataObject) -> None:
    played = play(fates, jobs, keep_going, lambda strategy: data.draw(strategy))
    ended = dict(enumerate(played.states))
    assert all((ended[i] is State.CURRENT) == (fate == "current") for i, fate in enumerate(fates))
    work = [i for i, fate in enumerate(fates) if fate in ("bad push", "good")]
    if keep_going:
        assert State.LEFT not in played.states and played.began == work
    elif "bad plan" in fates:
        assert played.began == [], "a host was written to although another can not be planned"
    elif work and fates[work[0]] == "bad push":
        assert played.began == work[:1] and all(ended[i] is State.LEFT for i in work[1:])


def test_the_first_that_has_something_to_do_proves_for_the_rest() -> None:
    states = [State.CURRENT, State.PLANNED, State.PLANNED, State.PLANNED]
    assert moves(states, 4, False) == {1: State.PUSHING}
    states[1] = State.PUSHING
    assert moves(states, 4, False) == {}
    states[1] = State.DONE
    assert moves(states, 4, False) == {2: State.PUSHING, 3: State.PUSHING}
    assert moves(states, 1, False) == {2: State.PUSHING}


def test_the_exit_code_is_the_worst_that_a_host_told_else_the_first_in_the_user_s_order() -> None:
    fine = End("a", State.DONE)
    refused, broken = End("b", State.FAILED, error=Incompatible("b is old")), End("c", State.FAILED, error=ProofFailed("c broke"))
    unknown, left = End("d", State.FAILED, error=RestoreUnconfirmed("d is silent")), End("e", State.LEFT)
    assert failure([fine, left], detail=False) is None

    def told(*ends: End) -> DeployError:
        error = failure(ends, detail=True)
        assert error is not None
        return error

    assert told(fine, refused, broken).exit_code == 13 and told(broken, refused).exit_code == 17
    worst = told(fine, refused, broken, unknown, left)
    assert worst.exit_code == 18 and worst.message == "3 of 5 hosts failed: `b`, `c`, `d`, 1 not touched"
    assert worst.causes == ("b: b is old", "c: c broke", "d: d is silent")
