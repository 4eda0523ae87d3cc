"""The figures, against answers whose figures are known."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_deploy.bench.stats import Answer, Sample, acceptance, agreements, cells, percentile, read
from ddtree_deploy.errors import IntegrityFailure


def answer(prompt: int = 0, began: float = 0.0, gaps: tuple[float, ...] = (0.1,) * 9, tokens: int = 10, rounds: int | None = None,
           text: str = "same", error: str = "") -> Answer:  # fmt: skip
    first = began + 0.5
    return Answer(prompt, began, None if error else first, first + sum(gaps), gaps, tokens, rounds, text, error)


def test_a_cell_by_hand() -> None:
    plain = Sample("plain", 2, 0, (answer(0), answer(1, began=0.1)))
    # 20 tokens from 0.0 to 1.5.
    assert plain.rate == pytest.approx(20 / 1.5)
    tree = Sample("ddtree", 2, 0, (answer(0, gaps=(0.2, 0.2), rounds=3), answer(1, gaps=(0.2, 0.3), rounds=3)))
    first, second = cells([plain, tree])
    assert (first.variant, first.concurrency, first.acceptance, first.answers, first.failed) == ("plain", 2, None, 2, 0)
    assert first.ttft == pytest.approx(0.5) and first.itl_p50 == first.itl_p99 == 0.1 and first.per_token == pytest.approx(0.1)
    assert second.acceptance == pytest.approx(18 / 6) and (second.itl_p50, second.itl_p99) == (0.2, 0.3)
    assert second.rate == pytest.approx(20.0) and second.ratios == {"plain": pytest.approx(1.5)}
    assert first.ratios["ddtree"] == pytest.approx(1 / 1.5)


def test_ratios_are_of_the_same_round_and_concurrency() -> None:
    """The host gets ten times slower between two rounds: the ratio does not notice, the ratio of medians would."""

    def sample(name: str, number: int, seconds: float) -> Sample:
        return Sample(name, 1, number, (answer(gaps=(seconds - 0.5,)),))

    found = cells([sample("plain", 0, 2.0), sample("plain", 1, 20.0), sample("ddtree", 0, 1.0), sample("ddtree", 1, 10.0)])
    assert found[1].ratios["plain"] == pytest.approx(2.0) and found[1].rates == (pytest.approx(10.0), pytest.approx(1.0))
    alone = cells([sample("plain", 0, 2.0), sample("ddtree", 1, 1.0)])
    assert alone[1].ratios == {}


def test_failures_count_and_change_nothing_else() -> None:
    good = Sample("plain", 1, 0, (answer(0), answer(1)))
    worse = Sample("plain", 1, 0, (*good.answers, answer(2, error="HTTP 429")))
    (one,), (two,) = cells([good]), cells([worse])
    assert two.failed == 1 and (one.rate, one.ttft, one.answers) == (two.rate, two.ttft, two.answers)
    (none,) = cells([Sample("plain", 1, 0, (answer(error="gone"),))])
    assert none.rate == 0.0 and none.answers == 0 and math.isnan(none.ttft)


def test_acceptance_leaves_the_first_token_out() -> None:
    assert acceptance([answer(tokens=11, rounds=5)]) == 2.0
    assert acceptance([answer(rounds=None)]) is None and acceptance([answer(rounds=0)]) is None


def test_texts_are_compared_by_prompt() -> None:
    samples = [
        Sample("plain", 1, 0, (answer(0, text="abc"), answer(1, text="xyz"), answer(2, text="abc"))),
        Sample("dflash", 1, 0, (answer(0, text="abc"), answer(1, text="xyz"), answer(2, text="abc"))),
        Sample("ddtree", 1, 0, (answer(0, text="abc"), answer(1, text="xqz"), answer(2, error="lost"))),
    ]
    plain, dflash, ddtree = agreements(samples, prompts=2)
    assert (plain.same, plain.compared, dflash.same) == (3, 3, 3)
    assert (ddtree.reference, ddtree.same, ddtree.compared, ddtree.prompt, ddtree.at) == ("plain", 1, 2, 1, 1)
    # A text that only ends earlier differs where it ends.
    (cut,) = agreements([Sample("ddtree", 1, 0, (answer(0, text="abc"), answer(1, text="ab")))], prompts=1)
    assert (cut.reference, cut.same, cut.at) == ("ddtree", 1, 2)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1.0))
def test_a_percentile_is_a_value_that_enough_are_not_above(values: list[float], share: float) -> None:
    found = percentile(values, share)
    below = sum(value <= found for value in values)
    assert found in values and below >= share * len(values) - 1e-6
    assert sum(value < found for value in values) < share * len(values)


ROW: dict[str, Any] = {
    "prompt": 0, "began": 0.0, "first": 0.1, "ended": 0.3, "gaps": [0.1, 0.1], "tokens": 3, "rounds": None, "text": "x", "error": "",
}  # fmt: skip


def test_what_a_host_measured_is_read() -> None:
    assert read([ROW])[0].ok and read([{**ROW, "rounds": 2}])[0].rounds == 2


@pytest.mark.parametrize(
    "rows",
    [None, [None], [{}], *([{**ROW, **bad}] for bad in ({"ended": math.nan}, {"began": -1}, {"gaps": ["x"]}, {"tokens": None}))],
)
def test_what_is_no_measurement_is_refused(rows: Any) -> None:
    with pytest.raises(IntegrityFailure, match="can not be read"):
        read(rows)
