"""What a bench will do: variants read, steps in order, the same prompts for all."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from ddtree_deploy.bench import plan
from ddtree_deploy.bench import prompts as texts
from ddtree_deploy.errors import UsageProblem
from ddtree_deploy.launch.argv import Request, build


def test_variants_become_launches() -> None:
    plain, chain, tree, wide = plan.variants("plain,dflash,ddtree,ddtree:63")
    base = Request(engine="standalone", model="tiny", gpus=0)
    assert build(plain.of(base, 31000)).tail[2:5] == ("--tiny", "--mode", "plain")
    assert "--mode dflash" in " ".join(build(chain.of(base, 31000)).tail)
    assert "--budget" not in build(tree.of(base, 31000)).tail
    tail = " ".join(build(wide.of(base, 31003)).tail)
    assert "--mode ddtree --budget 63" in tail and tail.endswith("--port 31003")


@pytest.mark.parametrize("text", ["", "eagle", "plain:3", "ddtree:0", "ddtree:", "plain,plain", "plain,"])
def test_what_is_no_variant(text: str) -> None:
    with pytest.raises(UsageProblem):
        plan.variants(text)


def test_concurrencies() -> None:
    assert plan.numbers("16,1,4,4") == (1, 4, 16)
    for text in ("", "0", "1,", "a", "1;2"):
        with pytest.raises(UsageProblem):
            plan.numbers(text)


def order(steps: list[plan.Step], kind: str) -> list[tuple[int, int, int]]:
    return [(step.round, step.concurrency, step.variant) for step in steps if step.kind == kind]


def test_together_the_variants_take_turns_within_each_round() -> None:
    steps = plan.steps(3, (1, 4), 2, together=True)
    assert [step.kind for step in steps[:3]] == ["start"] * 3 and [step.kind for step in steps[-3:]] == ["stop"] * 3
    assert order(steps, "measure") == [
        (0, 1, 0), (0, 1, 1), (0, 1, 2), (0, 4, 0), (0, 4, 1), (0, 4, 2),
        (1, 1, 1), (1, 1, 2), (1, 1, 0), (1, 4, 1), (1, 4, 2), (1, 4, 0),
    ]  # fmt: skip


def test_in_turn_one_server_is_up_at_a_time_and_the_second_pass_is_backwards() -> None:
    steps = plan.steps(2, (1,), 2, passes=2)
    up: set[int] = set()
    for step in steps:
        if step.kind == "start":
            assert not up
            up.add(step.variant)
        elif step.kind == "stop":
            up.remove(step.variant)
        else:
            assert step.variant in up
    assert not up and [step.variant for step in steps if step.kind == "start"] == [0, 1, 1, 0]
    # Each variant has each round once: ratios have something to compare.
    assert set(Counter((step.variant, step.round) for step in steps if step.kind == "measure").values()) == {1}
    assert {step.round for step in steps if step.kind == "measure"} == {0, 1, 2, 3}


@pytest.mark.parametrize("together", [True, False])
def test_every_server_is_warmed_at_each_concurrency_before_it_is_measured(together: bool) -> None:
    warmed: set[tuple[int, int]] = set()
    for step in plan.steps(2, (1, 8), 1, together=together):
        if step.kind == "warm":
            warmed.add((step.variant, step.concurrency))
        elif step.kind == "measure":
            assert (step.variant, step.concurrency) in warmed
        elif step.kind == "start":
            warmed = {pair for pair in warmed if pair[0] != step.variant}


def test_a_server_that_runs_is_neither_started_nor_stopped() -> None:
    assert {step.kind for step in plan.steps(1, (1,), 3, fresh=False)} == {"warm", "measure"}


def test_a_measurement_asks_enough_and_from_the_first_prompt_on() -> None:
    load = plan.Load(prompts=("a", "b", "c"), requests=4)
    assert load.of(1) == ("a", "b", "c", "a") and len(load.of(8)) == 8
    told = plan.told(plan.steps(2, (1, 8), 2), load, ["plain", "ddtree"])
    assert told[-1].startswith("8 measurements, 48 answers of up to 128 tokens") and told.count("warm up plain") == 1


def test_prompts_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "a.jsonl").write_text('{"prompt": "x\\ny"}\n')
    assert texts.read(tmp_path / "a.txt") == ("one", "two") and texts.read(tmp_path / "a.jsonl") == ("x\ny",)
    (tmp_path / "bad.jsonl").write_text("[]\n")
    (tmp_path / "none.txt").write_text("\n")
    for name in ("bad.jsonl", "none.txt", "absent.txt"):
        with pytest.raises(UsageProblem):
            texts.read(tmp_path / name)
