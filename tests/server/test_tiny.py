"""The pair that ships with the project: trained, so its acceptance is what training gave it."""

from __future__ import annotations

import pytest

from ddtree.sampling import GREEDY, Sampling
from ddtree.server import tiny
from ddtree.server.engine import Engine, Mode, Request, run
from ddtree.server.load import load_engine

pytestmark = pytest.mark.slow


def test_on_held_out_prompts_trees_beat_chains_and_change_nothing() -> None:
    base = load_engine(*map(str, tiny.paths()), device="cpu")

    def engine(mode: Mode) -> Engine:
        return Engine(base.target, base.drafter, base.tokenizer, mode, 48, base.mask_token)

    engines = {
        "plain": engine(Mode.PLAIN),
        "chain": engine(Mode.DFLASH),
        "tree": engine(Mode.DDTREE),
    }
    prompts = [
        base.tokenizer.encode(
            text
            if kind == "code"
            else base.tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
        )
        for kind, texts in tiny.held_out_prompts().items()
        for text in texts[:3]
    ]
    totals = {name: [0, 0] for name in engines}
    for number, prompt in enumerate(prompts):
        request = Request(tuple(prompt), 32, Sampling(0.7) if number % 3 == 2 else GREEDY, number, ignore_eos=True)
        done = {name: run(one, request) for name, one in engines.items()}
        assert len({tuple(generation.tokens) for generation in done.values()}) == 1, number
        for name, generation in done.items():
            totals[name][0] += generation.stats.emitted
            totals[name][1] += generation.stats.rounds
    length = {name: emitted / rounds for name, (emitted, rounds) in totals.items()}
    assert length["plain"] == 1.0
    assert length["chain"] > 1.7, length
    assert length["tree"] > 1.15 * length["chain"], length
