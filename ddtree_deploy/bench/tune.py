"""From measured rounds to a budget table: what a verify pass costs by its tokens, what a tree gives, which budget is best. Pure.

The model is `ddtree.budget`'s: a round takes `fixed` (drafting, host) and a verify pass that depends on its tokens in all,
batch x (budget + 1). Plain decoding is the same pass with one token a request, and nothing fixed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from ddtree.budget import Choice, Cost, budget_table, fit_cost
from ddtree_deploy.bench.stats import Answer, Sample, acceptance
from ddtree_deploy.errors import Incompatible


@dataclass(frozen=True, slots=True)
class Tuned:
    """What was fitted. `tokens` are tokens per pass by budget, `rates` measured tokens per second by (budget, batch).

    Budget 0 is plain decoding. `table` is what `--budget` and SGLang's `--speculative-ddtree-budget-table` read: up to this
    batch size, that budget; the last one for any.
    """

    cost: Cost
    tokens: Mapping[int, float]
    rates: Mapping[tuple[int, int], float]
    choices: tuple[Choice, ...]
    table: str


def fit(samples: Sequence[Sample], budgets: Mapping[str, int]) -> Tuned:
    """Fit the model and choose; `budgets` says which variant has which budget, plain decoding 0 (it must be there).

    Raises Incompatible when the server does not say how often it verified.
    """
    tokens = {}
    for name, budget in budgets.items():
        found = acceptance(answer for sample in samples if sample.variant == name for answer in sample.good)
        if budget and found is None:
            raise Incompatible(f"the server does not say how often it verified: {name}", mend="use an engine that counts verify passes")
        tokens[budget] = found if budget and found else 1.0
    rounds: dict[tuple[int, int], list[float]] = {(budgets[one.variant], one.concurrency): [] for one in samples}
    rates: dict[tuple[int, int], list[float]] = {key: [] for key in rounds}
    for sample in samples:
        key = (budgets[sample.variant], sample.concurrency)
        rounds[key] += [seconds for answer in sample.good if (seconds := round_seconds(answer, key[0])) is not None]
        rates[key].append(sample.rate)
    points = {key: median(values) for key, values in rounds.items() if values}
    plain = fit_cost([(batch, seconds) for (budget, batch), seconds in points.items() if not budget])
    trees = [(batch * (budget + 1), seconds) for (budget, batch), seconds in points.items() if budget]
    fixed = overhead(plain, trees)
    passes = [(count, max(0.0, seconds - fixed)) for count, seconds in trees]
    cost = fit_cost([*zip(plain.tokens, plain.seconds, strict=True), *passes], fixed)
    batches = sorted({batch for _budget, batch in points})
    wanted = sorted(budget for budget in tokens if budget)
    choices = tuple(budget_table(between(tokens), cost, batches, wanted))
    return Tuned(cost, tokens, {key: median(values) for key, values in rates.items()}, choices, table(choices, wanted[0]))


def round_seconds(answer: Answer, budget: int) -> float | None:
    """Return the time of one of an answer's rounds, or None when it had none after its first token."""
    count = answer.rounds if budget else answer.tokens - 1
    return (answer.ended - answer.first) / count if answer.first is not None and count and count > 0 else None


def overhead(plain: Cost, trees: Sequence[tuple[int, float]]) -> float:
    """Return what a round of speculation takes beside its pass: how much longer it is than plain decoding of as many tokens.

    Where no tree is as small as a measured batch the smallest one is compared with the line through the largest batches.
    """
    small = [pair for pair in trees if pair[0] <= plain.tokens[-1]] or [min(trees)]
    return max(0.0, median(seconds - plain.round_seconds(count) for count, seconds in small))


def between(tokens: Mapping[int, float]) -> list[float]:
    """Return tokens per pass for each budget from 0 on, straight lines between those that were measured."""
    known = sorted(tokens.items())
    out = [known[0][1]]
    for (low, before), (high, after) in pairwise(known):
        out += [before + (after - before) * (one - low) / (high - low) for one in range(low + 1, high + 1)]
    return out


def table(choices: Sequence[Choice], least: int) -> str:
    """Return the table of choices, equal neighbours as one: each entry costs a set of graphs.

    Where drafting does not pay (budget 0) stands `least`: a server can not leave it out for some batches.
    """
    rungs: list[tuple[int, int]] = []
    for choice in choices:
        budget = choice.budget or least
        if rungs and rungs[-1][1] == budget:
            rungs.pop()
        rungs.append((choice.batch, budget))
    return ",".join(f"{batch}:{budget}" for batch, budget in rungs)
