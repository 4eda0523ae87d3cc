"""Budgets: the fit follows the measurements, and the choice is the best of all choices."""

from __future__ import annotations

import math

import pytest

from ddtree.budget import best_budget, budget_table, expected_tokens, fit_cost

# Measured on an H200, an 8 B model in bf16: seconds by tokens.
H200 = [(1, 4.246e-3), (64, 4.346e-3), (128, 4.699e-3), (256, 6.561e-3), (512, 12.023e-3), (1024, 24.639e-3)]
PHI = [1 + 6 * (1 - math.exp(-budget / 20)) for budget in range(300)]


def test_the_fit_passes_through_monotone_measurements_and_between_them() -> None:
    cost = fit_cost(H200, fixed=1e-3)
    for tokens, seconds in H200:
        assert cost.round_seconds(tokens) == pytest.approx(seconds + 1e-3)
    assert cost.round_seconds(192) == pytest.approx((4.699e-3 + 6.561e-3) / 2 + 1e-3)
    assert cost.round_seconds(2048) == pytest.approx(24.639e-3 + 2 * 12.616e-3 + 1e-3)


def test_noise_never_makes_more_tokens_cheaper() -> None:
    cost = fit_cost([(1, 5.0), (1, 9.0), (1, 5.2), (8, 4.0), (16, 6.0), (32, 5.5)])
    times = [cost.round_seconds(tokens) for tokens in range(1, 40)]
    assert times == sorted(times)
    assert cost.round_seconds(1) == pytest.approx((5.2 + 4.0) / 2)


def test_one_measurement_is_a_constant_and_none_is_an_error() -> None:
    assert fit_cost([(8, 2.0)]).round_seconds(500) == 2.0
    with pytest.raises(ValueError, match="no measurement to fit a cost to"):
        fit_cost([])


def test_expected_tokens_add_the_probability_of_each_node() -> None:
    assert expected_tokens((0.0, math.log(0.5), math.log(0.25))) == pytest.approx([1.0, 1.5, 1.75])


@pytest.mark.parametrize("batch", [1, 2, 5, 16, 100])
def test_the_choice_beats_all_others(batch: int) -> None:
    cost, choices = fit_cost(H200, fixed=1.5e-3), range(1, 256)
    best = best_budget(PHI, cost, batch, choices)
    rates = {budget: batch * PHI[budget] / cost.round_seconds(batch * (budget + 1)) for budget in choices}
    rates[0] = batch / (cost.round_seconds(batch) - 1.5e-3)
    assert best.tokens_per_second == max(rates.values())
    assert rates[best.budget] == best.tokens_per_second
    assert best.gain == pytest.approx(best.tokens_per_second / rates[0])


def test_budgets_fall_with_the_batch_and_end_in_plain_decoding() -> None:
    table = budget_table(PHI, fit_cost(H200, fixed=1.5e-3), [1, 2, 4, 8, 16, 64, 512])
    budgets = [choice.budget for choice in table]
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[0] >= 63
    assert budgets[-1] == 0
    assert table[-1].gain == 1.0
