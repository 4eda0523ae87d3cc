"""The engine gives the target's own text, whatever is drafted, and leaves the caches as a prefill would."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ddtree.sampling import GREEDY, Sampling
from ddtree.server.engine import Engine, Generation, Mode, Request, Round, run
from ddtree.server.errors import ContextTooLong, ModelError
from ddtree.server.load import load_engine
from ddtree.server.target import Target, Verified
from tests.server.conftest import Variant

VARIANTS = ((Mode.DFLASH, 1), (Mode.DDTREE, 8), (Mode.DDTREE, 24), (Mode.DDTREE, 64))
SAMPLINGS = (Sampling(1.0), Sampling(2.0), Sampling(1.5, top_k=20), Sampling(1.2, top_p=0.9), Sampling(1.8, min_p=0.05))


def prompts(count: int, seed: int) -> list[tuple[int, ...]]:
    """Return prompts of 1 to 60 tokens; most repeat a phrase, as text does."""
    rng = random.Random(seed)
    out = []
    for _ in range(count):
        phrase = [rng.randrange(4, 316) for _ in range(rng.randint(1, 30))]
        out.append(tuple(phrase * rng.randint(1, 2)))
    return out


def rounds_of(engine: Engine, request: Request) -> tuple[Generation, list[Round]]:
    generation, rounds = engine.start(request), []
    while generation.finish_reason is None:
        rounds.append(engine.step(generation))
    return generation, rounds


def long_request(**changes: Any) -> Request:
    """Return a request whose paths are long."""
    return Request(**{"prompt": tuple(range(40, 72)), "max_tokens": 64, "ignore_eos": True, **changes})


def check_lossless(variant: Variant, count: int, tokens: int, sampling: Sampling | None, seed: int) -> None:
    emitted = dict.fromkeys(VARIANTS, 0)
    passes = dict.fromkeys(VARIANTS, 0)
    for number, prompt in enumerate(prompts(count, seed)):
        how = SAMPLINGS[number % len(SAMPLINGS)] if sampling is None else sampling
        request = Request(prompt, tokens, how, seed=number, ignore_eos=number % 2 == 0)
        plain = run(variant(Mode.PLAIN), request)
        text = plain.take_text()
        for mode, budget in VARIANTS:
            drafted = run(variant(mode, budget), request)
            assert (drafted.tokens, drafted.finish_reason) == (plain.tokens, plain.finish_reason), (prompt, mode, budget)
            assert drafted.take_text() == text
            emitted[mode, budget] += drafted.stats.emitted
            passes[mode, budget] += drafted.stats.rounds
    lengths = {key: emitted[key] / passes[key] for key in VARIANTS}
    assert lengths[Mode.DDTREE, 64] > lengths[Mode.DDTREE, 8] > 1.5, lengths
    assert lengths[Mode.DDTREE, 64] > 1.05 * lengths[Mode.DFLASH, 1], lengths


@pytest.mark.slow
def test_greedy_trees_and_chains_give_plain_decoding_token_for_token(variant: Variant) -> None:
    check_lossless(variant, 10, 20, GREEDY, seed=1)


@pytest.mark.slow
def test_sampled_trees_and_chains_give_plain_sampling_token_for_token(variant: Variant) -> None:
    check_lossless(variant, 8, 16, None, seed=2)


@pytest.mark.slow
def test_greedy_over_many_prompts_and_budgets(variant: Variant) -> None:
    check_lossless(variant, 110, 32, GREEDY, seed=3)


@pytest.mark.slow
def test_sampling_over_many_prompts_and_budgets(variant: Variant) -> None:
    check_lossless(variant, 60, 24, None, seed=4)


def test_paths_are_long_and_the_tree_beats_the_chain(variant: Variant) -> None:
    chain = run(variant(Mode.DFLASH), long_request()).stats
    tree = run(variant(Mode.DDTREE, 64), long_request()).stats
    assert chain.acceptance_length > 2.5
    assert tree.acceptance_length > chain.acceptance_length
    assert tree.emitted == 63 and tree.accepted == tree.emitted - tree.rounds
    assert run(variant(Mode.PLAIN), long_request()).stats.acceptance_length == 1.0


class Unanchored(Engine):
    """An engine with the error that ports made: the block is masks throughout."""

    def block(self, root: int, size: int) -> torch.Tensor:
        return torch.full_like(super().block(root, size), self.mask_token or 0)


def test_a_block_without_the_last_token_in_its_first_slot_costs_the_acceptance(variant: Variant) -> None:
    lengths = []
    for kind in (Engine, Unanchored):
        engine = variant(Mode.DFLASH, kind=kind)
        done = [run(engine, long_request(prompt=tuple(range(n, n + 32)), max_tokens=32)).stats for n in (40, 101, 202)]
        lengths.append(sum(stats.emitted for stats in done) / sum(stats.rounds for stats in done))
    right, wrong = lengths
    assert wrong < 0.6 * right, lengths
    engine = variant(Mode.DDTREE)
    assert engine.block(77, 4).tolist() == [77, engine.mask_token, engine.mask_token, engine.mask_token]


def rows(engine: Engine, generation: Generation) -> list[torch.Tensor]:
    """Return every cached row of target and drafter."""
    length = generation.cache.get_seq_length()
    kept = [t for layer in generation.cache.layers for t in (layer.keys, layer.values)]
    context = generation.context
    assert context is not None and context.length == length
    return [*kept, *(t[:, :, :length] for pair in context._buffers for t in pair)]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(2.0)])
def test_after_each_round_the_caches_are_those_of_a_prefill(variant: Variant, sampling: Sampling) -> None:
    engine = variant(Mode.DDTREE, 64)
    request = long_request(sampling=sampling, max_tokens=40, seed=9)
    generation = engine.start(request)
    moved = 0
    while generation.finish_reason is None:
        round = engine.step(generation)
        moved += round.walk.path != tuple(range(len(round.walk.path)))
        committed = (*request.prompt, *generation.tokens[:-1])  # the last token has no row yet
        fresh = engine.start(Request(committed, 1))
        assert generation.cache.get_seq_length() == len(committed)
        for ours, theirs in zip(rows(engine, generation), rows(engine, fresh), strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-3)
    assert moved > 0  # rows were really compacted


def test_the_verify_pass_gives_each_node_the_logits_of_its_own_path(variant: Variant) -> None:
    engine = variant(Mode.DDTREE, 24)
    generation = engine.start(long_request())
    for _ in range(3):
        before = (*long_request().prompt, *generation.tokens)
        round = engine.step(generation)
        tree = round.tree
        for node in range(len(tree)):
            path, up = [], node
            while up > 0:
                path.insert(0, tree.token_ids[up])
                up = tree.parents[up]
            with torch.inference_mode():
                alone = engine.target.prefill([*before, *path], engine.target.new_cache(), 0).logits[-1]
            torch.testing.assert_close(round.logits[node], alone, atol=2e-3, rtol=1e-3)


def test_every_limit_ends_the_text_where_plain_decoding_would_be(variant: Variant) -> None:
    plain = run(variant(Mode.PLAIN), long_request()).tokens
    engine = variant(Mode.DDTREE, 64)
    for limit in range(1, 24):
        generation = run(engine, long_request(max_tokens=limit))
        assert generation.tokens == plain[:limit] and generation.finish_reason == "length"


def inside_a_path(engine: Engine, request: Request) -> tuple[Round, int, list[int]]:
    """Return a round, the index of its first token, and the tokens, such that the second is new and not the last."""
    generation, rounds = rounds_of(engine, request)
    for round in rounds:
        first = round.root_position - len(request.prompt) + 1
        token = generation.tokens[first + 1]
        if len(round.walk.tokens) >= 4 and generation.tokens.index(token) == first + 1:
            return round, first, generation.tokens
    raise AssertionError("no round is long enough")


def test_an_end_token_inside_a_path_ends_the_text_there(variant: Variant) -> None:
    engine = variant(Mode.DDTREE, 64)
    _, first, tokens = inside_a_path(engine, long_request())
    engine.eos_ids = frozenset({tokens[first + 1]})
    generation, rounds = rounds_of(engine, long_request(ignore_eos=False))
    assert generation.tokens == tokens[: first + 2] and generation.finish_reason == "stop"
    assert len(rounds[-1].walk.tokens) == 2
    assert generation.cache.get_seq_length() == len(long_request().prompt) + first + 1
    text = engine.tokenizer.decode(tokens[: first + 1], skip_special_tokens=True)
    assert generation.take_text() == text  # the end token is no text


def test_a_stop_string_inside_a_path_ends_the_text_there(variant: Variant) -> None:
    engine = variant(Mode.DDTREE, 64)
    text = run(engine, long_request()).take_text()
    hits = [text[at : at + 4] for at in range(10, 40) if "\ufffd" not in text[at : at + 4]]
    assert hits
    for stop in hits:
        generation, rounds = rounds_of(engine, long_request(stop=(stop,)))
        assert generation.take_text() == text[: text.index(stop)] and generation.finish_reason == "stop"
        assert len(generation.tokens) == 1 + sum(len(round.walk.tokens) for round in rounds)


def test_generations_that_take_turns_do_not_see_each_other(variant: Variant) -> None:
    engine = variant(Mode.DDTREE, 24)
    requests = [Request(p, 24, Sampling(1.5), seed=i, ignore_eos=True) for i, p in enumerate(prompts(3, seed=6))]
    alone = [run(engine, request).tokens for request in requests]
    generations = [engine.start(request) for request in requests]
    while any(g.finish_reason is None for g in generations):
        for generation in generations:
            if generation.finish_reason is None:
                engine.step(generation)
    assert [g.tokens for g in generations] == alone


def test_the_end_of_the_context_ends_the_text(variant: Variant) -> None:
    engine = variant(Mode.DDTREE, 24)
    engine.max_context = 40
    generation = run(engine, long_request())
    assert len(generation.tokens) == 8 and generation.finish_reason == "length"
    for length in (0, 40, 41):
        with pytest.raises(ContextTooLong):
            engine.start(Request((5,) * length, 1))


def test_a_prompt_longer_than_a_piece_of_the_prefill_reads_the_same(
    variant: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = variant(Mode.DDTREE, 24)
    whole = run(engine, long_request()).tokens
    monkeypatch.setattr("ddtree.server.engine.PREFILL_CHUNK", 7)
    assert run(engine, long_request()).tokens == whole


class Deaf(Target):
    """A target whose attention ignores masks, as some kernels do without a word."""

    def forward(self, ids: Any, positions: Any, cache: Any, mask: Any, last_only: bool) -> Verified:
        return super().forward(ids, positions, cache, None, last_only)


def test_a_target_that_ignores_the_tree_mask_is_refused(variant: Variant) -> None:
    good = variant(Mode.DDTREE).target
    good.self_test()
    with pytest.raises(ModelError, match="siblings see each other"):
        Deaf(good._model).self_test()


def test_a_tree_mode_needs_a_drafter(pair: tuple[Path, Path]) -> None:
    with pytest.raises(ModelError, match="needs a drafter") as caught:
        load_engine(str(pair[0]), None, device="cpu")
    assert "--mode plain" in caught.value.mend
    assert run(load_engine(str(pair[0]), None, mode=Mode.PLAIN, device="cpu"), long_request(max_tokens=3)).tokens
