"""The budget that is best, from rounds whose cost is known; and which launch takes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddtree.budget import Choice
from ddtree_deploy.bench import tune
from ddtree_deploy.bench.stats import Answer, Sample
from ddtree_deploy.errors import Incompatible
from ddtree_deploy.launch import budgets
from ddtree_deploy.launch.argv import TABLE_FLAG, Request

DRAFT = 0.0015
TOKENS = {7: 3.0, 15: 4.0, 31: 5.0, 63: 5.6}
LEVELS = (1, 2, 4, 8, 16)


def verify(tokens: int) -> float:
    """A pass that is limited by memory up to 128 tokens, and by arithmetic beyond."""
    return 0.004 + 0.00003 * max(0, tokens - 128)


def sample(budget: int, batch: int, slower: float = 1.0) -> Sample:
    """Return a measurement of a server whose rounds take exactly what the model says."""
    rounds = 10
    if budget:
        seconds, tokens = (verify(batch * (budget + 1)) + DRAFT) * slower, 1 + round(rounds * TOKENS[budget])
    else:
        seconds, tokens = verify(batch) * slower, 1 + rounds
    ended = 0.1 + rounds * seconds
    answers = tuple(Answer(n, 0.0, 0.1, ended, (), tokens, rounds if budget else None, "x") for n in range(batch))
    return Sample(f"ddtree:{budget}" if budget else "plain", batch, 0, answers)


NAMES = {"plain": 0, **{f"ddtree:{budget}": budget for budget in TOKENS}}


def test_the_model_is_recovered_and_the_budget_falls_with_the_batch() -> None:
    found = tune.fit([sample(budget, batch) for budget in NAMES.values() for batch in LEVELS], NAMES)
    assert found.cost.fixed == pytest.approx(DRAFT) and found.tokens == pytest.approx({0: 1.0, **TOKENS})
    for tokens in (1, 64, 128, 256, 512, 1024):
        assert found.cost.round_seconds(tokens) - DRAFT == pytest.approx(verify(tokens), rel=1e-6)

    def rate(budget: int, batch: int) -> float:
        seconds = verify(batch * (budget + 1)) + DRAFT if budget else verify(batch)
        return batch * TOKENS.get(budget, 1.0) / seconds

    best = [max((0, *TOKENS), key=lambda budget, batch=batch: rate(budget, batch)) for batch in LEVELS]  # type: ignore[misc]
    assert [choice.budget for choice in found.choices] == best
    assert best[0] == 63 and best[-1] == 7 and best == sorted(best, reverse=True)
    assert found.table.startswith("2:63,") and found.table.endswith("16:7")


def test_a_measurement_that_went_wrong_does_not_turn_the_choice() -> None:
    """One of three rounds is ten times slower at the budget that is best: the median and the fit go on."""
    good = [sample(budget, batch) for budget in NAMES.values() for batch in LEVELS]
    odd = [replace(sample(63, 1), round=1), replace(sample(63, 1, slower=10.0), round=2)]
    assert tune.fit([*good, *odd], NAMES).table == tune.fit(good, NAMES).table


def test_only_trees_that_are_larger_than_every_batch() -> None:
    found = tune.fit([sample(0, 1), sample(7, 1), sample(63, 1)], {"plain": 0, "ddtree:7": 7, "ddtree:63": 63})
    assert found.cost.fixed == pytest.approx(DRAFT) and found.table == "1:63"


def test_a_server_that_does_not_count_its_passes() -> None:
    silent = sample(7, 1)
    silent = replace(silent, answers=tuple(replace(answer, rounds=None) for answer in silent.answers))
    with pytest.raises(Incompatible, match="how often it verified: ddtree:7"):
        tune.fit([sample(0, 1), silent], NAMES)


def test_tables() -> None:
    def chosen(*pairs: tuple[int, int]) -> str:
        return tune.table([Choice(batch, budget, 1.0, 1.0) for batch, budget in pairs], least=7)

    assert chosen((1, 63), (2, 63), (4, 31), (8, 0), (16, 0)) == "2:63,4:31,16:7"
    assert chosen((1, 15)) == "1:15"
    assert tune.between({0: 1.0, 2: 3.0, 4: 3.5}) == [1.0, 2.0, 3.0, 3.25, 3.5]


REQUEST = Request(model="/m", drafter="/d", gpus=2)


def facts(**changed: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"gpus": [{"name": "NVIDIA H200"}] * 2, "flags": [TABLE_FLAG], "sglang": "0.5.11", "budgets": []}
    return {**found, **changed}


def kept(table: str, **changed: Any) -> dict[str, Any]:
    return {**budgets.key(facts(), REQUEST), "table": table, "measured": "2026-11-29T18:00:00Z", **changed}


def test_a_launch_takes_the_table_that_was_measured_for_it() -> None:
    known = facts(budgets=[kept("1:7", model="/other"), kept("2:63,8:15")])
    request, (check,) = budgets.apply(known, REQUEST)
    assert request == replace(REQUEST, budget="2:63,8:15") and check.level == "ok" and "tuned here at 2026-11-29" in check.text
    for other in (
        replace(REQUEST, budget="31"), replace(REQUEST, algorithm="dflash"), replace(REQUEST, drafter="/e"), replace(REQUEST, gpus=1),
        replace(REQUEST, engine="standalone", gpus=1),
    ):  # fmt: skip
        assert budgets.apply(known, other) == (other, ())
    assert budgets.apply({**known, "gpus": [{"name": "NVIDIA B200"}] * 2}, REQUEST) == (REQUEST, ())


def test_an_engine_that_takes_one_budget() -> None:
    request, (check,) = budgets.apply(facts(flags=[], sglang="0.5.23", budgets=[kept("2:63,8:15")]), REQUEST)
    assert request == REQUEST and check.level == "warn" and "takes one budget" in check.text
    request, (check,) = budgets.apply(facts(flags=[], sglang="0.5.23", budgets=[kept("16:15")]), REQUEST)
    assert request.budget == "15" and check.level == "ok"


@pytest.mark.parametrize("known", [[None], ["x"], [{}], [kept("rm -rf /")], [kept("")], None])
def test_what_a_host_says_is_no_command(known: Any) -> None:
    assert budgets.apply(facts(budgets=known), REQUEST) == (REQUEST, ())
