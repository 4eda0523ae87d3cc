"""Figures of a bench from the times of its answers: rates, latencies, acceptance, ratios, and whether the texts agree. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ddtree_deploy.errors import IntegrityFailure


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer; times in seconds since the measurement began. `gaps` lie between its pieces, `rounds` counts verify passes.

    A piece is what one event of the stream brought: a token of plain decoding, a whole round of speculation.
    """

    prompt: int
    began: float
    first: float | None
    ended: float
    gaps: tuple[float, ...]
    tokens: int
    rounds: int | None
    text: str
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error and self.first is not None and self.tokens > 0


@dataclass(frozen=True, slots=True)
class Sample:
    """The answers of one measurement."""

    variant: str
    concurrency: int
    round: int
    answers: tuple[Answer, ...]

    @property
    def good(self) -> tuple[Answer, ...]:
        return tuple(answer for answer in self.answers if answer.ok)

    @property
    def rate(self) -> float:
        """Tokens per second over all answers, from the first request to the last piece."""
        good = self.good
        seconds = max((one.ended for one in good), default=0.0) - min((one.began for one in good), default=0.0)
        return sum(one.tokens for one in good) / seconds if seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Cell:
    """A variant at a concurrency. Seconds; `rates` has tokens per second of each round, `rate` their median.

    `acceptance` is tokens per verify pass, the target's own included (None without speculation); `per_token` the median over
    answers of the time per token after the first. `ratios` are medians over rounds, each against the same round.
    """

    variant: str
    concurrency: int
    rates: tuple[float, ...]
    rate: float
    ttft: float
    itl_p50: float
    itl_p99: float
    per_token: float
    acceptance: float | None
    answers: int
    failed: int
    ratios: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Agreement:
    """How many answers of a variant have the reference's text, and where the first one that has not leaves it (characters)."""

    variant: str
    reference: str
    same: int
    compared: int
    prompt: int | None = None
    at: int | None = None


def read(rows: Any) -> tuple[Answer, ...]:
    """Return the answers that a host measured. Raises IntegrityFailure when they are no such thing."""
    try:
        return tuple(
            Answer(
                int(row["prompt"]), _time(row["began"]), None if row["first"] is None else _time(row["first"]), _time(row["ended"]),
                tuple(map(_time, row["gaps"])), int(row["tokens"]), None if row["rounds"] is None else int(row["rounds"]),
                str(row["text"]), str(row["error"]),
            )
            for row in rows
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityFailure(f"the host's measurements can not be read: {error!r}") from error


def _time(value: Any) -> float:
    number = float(value)
    if not 0 <= number < 1e9:  # also NaN
        raise ValueError(f"no time: {value!r}")
    return number


def percentile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that at least `share` of all are not above (nearest rank); NaN of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def acceptance(answers: Iterable[Answer]) -> float | None:
    """Return tokens per verify pass; an answer's first token comes with its prompt and is no pass's."""
    known = [(one.tokens - 1, one.rounds) for one in answers if one.rounds]
    return sum(tokens for tokens, _ in known) / sum(rounds for _, rounds in known) if known else None


def cells(samples: Sequence[Sample]) -> tuple[Cell, ...]:
    """Return a cell for each variant and concurrency, in the order in which variants first come, concurrencies ascending."""
    names = list(dict.fromkeys(sample.variant for sample in samples))
    levels = sorted({sample.concurrency for sample in samples})
    return tuple(
        _cell([one for one in samples if (one.variant, one.concurrency) == (name, level)], samples, [n for n in names if n != name])
        for name in names
        for level in levels
    )


def _cell(own: Sequence[Sample], everything: Sequence[Sample], others: Sequence[str]) -> Cell:
    answers = [answer for sample in own for answer in sample.good]
    gaps = [gap for answer in answers for gap in answer.gaps]
    rates = tuple(sample.rate for sample in sorted(own, key=lambda sample: sample.round))
    began = [(answer, answer.first) for answer in answers if answer.first is not None]
    per_token = [(answer.ended - first) / (answer.tokens - 1) for answer, first in began if answer.tokens > 1]
    return Cell(
        own[0].variant, own[0].concurrency, rates, median(rates),
        median([first - answer.began for answer, first in began] or [math.nan]),
        percentile(gaps, 0.5), percentile(gaps, 0.99), median(per_token or [math.nan]), acceptance(answers), len(answers),
        sum(len(sample.answers) for sample in own) - len(answers),
        {other: value for other in others if (value := ratio(own, [one for one in everything if one.variant == other])) is not None},
    )  # fmt: skip


def ratio(own: Sequence[Sample], other: Sequence[Sample]) -> float | None:
    """Return the median over rounds of one variant's rate to another's in the same round; None when no round has both."""
    known = {(sample.concurrency, sample.round): sample.rate for sample in other}
    pairs = [(sample.rate, known.get((sample.concurrency, sample.round), 0.0)) for sample in own]
    quotients = [mine / theirs for mine, theirs in pairs if theirs > 0]
    return median(quotients) if quotients else None


def agreements(samples: Sequence[Sample], prompts: int) -> tuple[Agreement, ...]:
    """Compare the texts of all variants with those of `plain`, or of the first where plain is not among them.

    Prompt `n` of a measurement is prompt `n % prompts` of the list; what counts as the reference's text is its first answer.
    """
    names = list(dict.fromkeys(sample.variant for sample in samples))
    reference = "plain" if "plain" in names else names[0]
    texts: dict[int, str] = {}
    for sample in samples:
        if sample.variant == reference:
            for answer in sample.good:
                texts.setdefault(answer.prompt % prompts, answer.text)
    return tuple(_agreement(name, reference, samples, texts, prompts) for name in names)


def _agreement(name: str, reference: str, samples: Sequence[Sample], texts: Mapping[int, str], prompts: int) -> Agreement:
    answers = [answer for sample in samples if sample.variant == name for answer in sample.good]
    pairs = [(answer.prompt % prompts, answer.text) for answer in answers if answer.prompt % prompts in texts]
    others = [(prompt, text) for prompt, text in pairs if texts[prompt] != text]
    if not others:
        return Agreement(name, reference, len(pairs), len(pairs))
    prompt, text = others[0]
    at = next((n for n, (a, b) in enumerate(zip(text, texts[prompt], strict=False)) if a != b), min(len(text), len(texts[prompt])))
    return Agreement(name, reference, len(pairs) - len(others), len(pairs), prompt, at)
