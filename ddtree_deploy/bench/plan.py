"""What a bench will do, before it does it: which servers, in which order, what is asked of them. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ddtree_deploy.bench.prompts import DEFAULT
from ddtree_deploy.errors import UsageProblem
from ddtree_deploy.launch.argv import Request

VARIANTS = "plain,dflash,ddtree"


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to decode: `plain`, `dflash`, `ddtree` or `ddtree:N`; `algorithm` and `budget` as launch knows them."""

    name: str
    algorithm: str
    budget: str = "auto"

    def of(self, base: Request, port: int) -> Request:
        """Return the launch of this variant."""
        return replace(base, algorithm=self.algorithm, budget=self.budget, port=port)


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked in one measurement: at least `requests` answers of up to `max_tokens`, prompts from the first on, again and again.

    `waves` of them for each that is asked at a time, so that a measurement is not mostly its beginning and its end.
    """

    prompts: tuple[str, ...] = DEFAULT
    requests: int = 16
    max_tokens: int = 128
    temperature: float = 0.0
    seconds: float = 600.0
    waves: int = 1

    def of(self, concurrency: int) -> tuple[str, ...]:
        """Return the prompts of a measurement; the same ones for every variant and round."""
        count = max(self.requests, self.waves * concurrency)
        return tuple(self.prompts[number % len(self.prompts)] for number in range(count))


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do. `round` counts over all passes, so that equal rounds of two variants are compared with each other."""

    kind: Literal["start", "warm", "measure", "stop"]
    variant: int
    concurrency: int = 0
    round: int = 0


def variants(text: str) -> tuple[Variant, ...]:
    """Read `plain,dflash,ddtree:15,ddtree:63`. Raises UsageProblem."""
    found = []
    for word in text.split(","):
        match = re.fullmatch(r"(plain|dflash|ddtree)(?::([1-9]\d*))?", word.strip())
        if not match or (match[2] and match[1] != "ddtree"):
            raise UsageProblem(f"unknown variant: `{word.strip()}`", mend="use `plain`, `dflash`, `ddtree` or `ddtree:BUDGET`")
        found.append(Variant(word.strip(), "none" if match[1] == "plain" else match[1], match[2] or "auto"))
    if len(set(found)) != len(found):
        raise UsageProblem(f"a variant is named twice: {text}")
    return tuple(found)


def numbers(text: str, option: str = "--concurrency") -> tuple[int, ...]:
    """Read `1,4,16`, ascending and without doubles. Raises UsageProblem."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise UsageProblem(f"`{option}` wants numbers such as `1,4,16`: {text}")
    return tuple(sorted({int(word) for word in text.split(",")}))


def steps(
    count: int, concurrencies: Sequence[int], rounds: int, *, passes: int = 1, together: bool = False, fresh: bool = True
) -> list[Step]:
    """Return the steps of a bench over `count` variants.

    Together: all servers are up, and the variants take turns within each round, a rotated order each time, so that what drifts
    on the host falls on all of them. In turn (one set of GPUs): each pass starts, measures and stops one after the other, every
    second pass backwards. A server is warmed with each concurrency before it is measured.
    """
    if together or not fresh:
        everyone = range(count)
        begin = [Step("start", one) for one in everyone] if fresh else []
        middle = [Step("warm", one, level) for one in everyone for level in concurrencies]
        for number in range(rounds * passes):
            for level in concurrencies:
                middle += [Step("measure", (one + number) % count, level, number) for one in everyone]
        return begin + middle + ([Step("stop", one) for one in everyone] if fresh else [])
    out = []
    for number in range(passes):
        for one in range(count) if number % 2 == 0 else reversed(range(count)):
            out.append(Step("start", one))
            out += [Step("warm", one, level) for level in concurrencies]
            out += [Step("measure", one, level, number * rounds + round_) for round_ in range(rounds) for level in concurrencies]
            out.append(Step("stop", one))
    return out


def told(done: Sequence[Step], load: Load, names: Sequence[str]) -> list[str]:
    """Say the steps in words, the warm-up and the rounds of a server in one line."""
    measures = [step for step in done if step.kind == "measure"]
    answers = sum(len(load.of(step.concurrency)) for step in measures)
    out = []
    for step in done:
        if step.kind in ("start", "stop"):
            out.append(f"{step.kind} {names[step.variant]}")
        elif step.kind == "warm":
            line = f"warm up {names[step.variant]}"
            out += [line] if out[-1:] != [line] else []
        else:
            out.append(f"round {step.round + 1}, {step.concurrency} at a time: {names[step.variant]}")
    out.append(f"{len(measures)} measurements, {answers} answers of up to {load.max_tokens} tokens, besides the warm-up")
    return out
