"""Choose the node budget: profile a machine, fit a cost, make a table by batch size.

More nodes raise the expected number of accepted tokens, with falling returns; they also make the verify forward longer,
slowly up to a knee and linearly beyond it. The best budget is where tokens per second peak (CaDDTree's rule: grow while
(1 + phi(n)) / cost(n) rises). The forward sees all requests at once, so the budget falls with the batch size.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cost:
    """Hold a verify cost in seconds by total tokens, linear between the points and beyond the last; never falls."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    fixed: float = 0.0  # drafting and host work per round, seconds

    def round_seconds(self, tokens: int) -> float:
        """Return the time of a whole round that verifies `tokens` tokens over all requests."""
        x, y = self.tokens, self.seconds
        right = min(max(bisect_left(x, tokens), 1), len(x) - 1)
        if len(x) == 1 or tokens <= x[0]:
            return self.fixed + y[0]
        slope = (y[right] - y[right - 1]) / (x[right] - x[right - 1])
        return self.fixed + y[right - 1] + slope * (tokens - x[right - 1])


@dataclass(frozen=True, slots=True)
class Choice:
    """Hold the budget chosen for one batch size and what it promises; budget 0 means that drafting does not pay."""

    batch: int
    budget: int
    tokens_per_second: float
    gain: float  # over plain decoding at the same batch size


def fit_cost(samples: Sequence[tuple[int, float]], fixed: float = 0.0) -> Cost:
    """Fit a non-decreasing cost to measured (tokens, seconds) pairs: median per size, then pool adjacent violators.

    Raises ValueError without samples.
    """
    if not samples:
        raise ValueError("no measurement to fit a cost to")
    sizes = sorted({tokens for tokens, _ in samples})
    blocks: list[tuple[float, int]] = []
    for size in sizes:
        times = sorted(seconds for tokens, seconds in samples if tokens == size)
        blocks.append((times[len(times) // 2], 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (high, a), (low, b) = blocks[-2:]
            blocks[-2:] = [((high * a + low * b) / (a + b), a + b)]
    seconds = [value for value, count in blocks for _ in range(count)]
    return Cost(tuple(sizes), tuple(seconds), fixed)


def expected_tokens(scores: Sequence[float]) -> list[float]:
    """Return the expected tokens per round for each budget 0, 1, ...: 1 plus the probability of each node in order.

    `scores` are a tree's path log-probabilities, root first; meaningful as far as the drafter is calibrated.
    """
    total, out = 1.0, [1.0]
    for score in scores[1:]:
        total += math.exp(score)
        out.append(total)
    return out


def best_budget(phi: Sequence[float], cost: Cost, batch: int, choices: Sequence[int]) -> Choice:
    """Choose among `choices` the budget with the most tokens per second; `phi[b]` is tokens per round at budget b.

    Budgets beyond the end of `phi` gain nothing more. Plain decoding (no drafting, no `fixed` cost) competes.
    """
    plain = batch / (cost.round_seconds(batch) - cost.fixed)
    best = Choice(batch, 0, plain, 1.0)
    for budget in sorted(choices):
        rate = batch * phi[min(budget, len(phi) - 1)] / cost.round_seconds(batch * (budget + 1))
        if rate > best.tokens_per_second:
            best = Choice(batch, budget, rate, rate / plain)
    return best


def budget_table(
    phi: Sequence[float], cost: Cost, batches: Sequence[int], choices: Sequence[int] = (7, 15, 31, 63, 127, 255)
) -> list[Choice]:
    """Return the best budget for each batch size."""
    return [best_budget(phi, cost, batch, choices) for batch in batches]
