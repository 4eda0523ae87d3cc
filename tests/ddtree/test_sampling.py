"""Sampling: the noise is what it should be, and tree decoding draws from exactly the target's joint distribution."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from ddtree.sampling import GREEDY, Sampling, gumbel, sample_token, sample_tokens, target_probs
from ddtree.tree import TreeBatch, build_tree_batch, sort_log_probs
from ddtree.walk import WalkBatch, greedy_walk_batch, sample_walk_batch
from tests.ddtree.toy import Toy

VOCABULARY, SAMPLES, TOKENS = 8, 100_000, 3


def chi_square_p(counts: Tensor, probs: Tensor) -> float:
    """Return the p-value of Pearson's test; cells expected below 5 times are pooled."""
    expected = probs.double() * counts.sum()
    small = expected < 5
    counts = torch.cat([counts[~small].double(), counts[small].sum()[None].double()])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def joint(toy: Toy, sampling: Sampling) -> Tensor:
    """Return the target's exact distribution of the three tokens after (0, 1), flat `[V^3]`."""
    probs = target_probs(toy.target, sampling)
    one = probs[0, 1]
    two = one[:, None] * probs[1]
    return (two[:, :, None] * probs[:, :, :]).flatten()


Verify = Callable[[TreeBatch, Tensor, Tensor, Tensor], WalkBatch]


def decode_three(toy: Toy, verify: Verify) -> Tensor:
    """Decode three tokens after (0, 1) with trees, `SAMPLES` times; return the counts of all `V^3` outcomes."""
    # All trees of the test, by the last two tokens.
    draft = torch.stack([toy.draft_log_probs([a, b], 3) for a in range(VOCABULARY) for b in range(VOCABULARY)])
    roots = torch.arange(VOCABULARY).repeat(VOCABULARY)
    every = build_tree_batch(*sort_log_probs(draft), 7, root_tokens=roots)
    text = torch.zeros(SAMPLES, 2 + TOKENS + 4, dtype=torch.int64)
    text[:, 1] = 1
    length = torch.full((SAMPLES,), 2)
    seeds = torch.arange(SAMPLES)
    while (todo := (length < 2 + TOKENS).nonzero()[:, 0]).numel():
        last = text[todo, length[todo] - 1]
        before = text[todo, length[todo] - 2]
        which = before * VOCABULARY + last
        trees = TreeBatch(*(getattr(every, field.name)[which] for field in fields(TreeBatch)))
        above = trees.tokens.gather(1, trees.parents.clamp(min=0))
        above[:, 0] = before
        walks = verify(trees, toy.target[above, trees.tokens], seeds[todo], length[todo] - 1)
        for step in range(4):
            live = todo[step < walks.lengths]
            text[live, length[live]] = walks.tokens[step < walks.lengths, step]
            length[live] += 1
    outcome = (text[:, 2] * VOCABULARY + text[:, 3]) * VOCABULARY + text[:, 4]
    return torch.bincount(outcome, minlength=VOCABULARY**TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_k=5, top_p=0.95)])
@pytest.mark.parametrize("seed", range(3))
def test_trees_draw_from_the_targets_joint_distribution(seed: int, sampling: Sampling) -> None:
    toy = Toy.make(VOCABULARY, seed, sharp=1.5)

    def verify(trees: TreeBatch, logits: Tensor, seeds: Tensor, roots: Tensor) -> WalkBatch:
        return sample_walk_batch(trees, logits, [sampling] * len(seeds), seeds + SAMPLES * seed, roots, 3)

    assert chi_square_p(decode_three(toy, verify), joint(toy, sampling)) > 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_the_same_test_rejects_a_wrong_rule(seed: int) -> None:
    """Accept a child with probability min(1, p/q) and, if refused, draw from p itself: close, and wrong."""
    toy = Toy.make(VOCABULARY, seed, sharp=1.5, blur=0.5)
    generator = torch.Generator().manual_seed(seed)

    def verify(trees: TreeBatch, logits: Tensor, seeds: Tensor, roots: Tensor) -> WalkBatch:
        probs = torch.softmax(logits, dim=-1)
        follow = torch.multinomial(probs.flatten(0, 1), 1, generator=generator).view(trees.tokens.shape)
        # Best child first, as the tree has them in order; q is the drafter's probability of the edge.
        for node in reversed(range(1, 8)):
            parent, token = trees.parents[:, node].clamp(min=0), trees.tokens[:, node]
            row = torch.arange(len(seeds))
            q = (trees.scores[:, node] - trees.scores[row, parent]).exp()
            accept = torch.rand(len(seeds), generator=generator) < probs[row, parent, token] / q
            accept &= node < trees.n_valid
            follow[row, parent] = torch.where(accept, token, follow[row, parent])
        return greedy_walk_batch(trees, follow, 3)

    assert chi_square_p(decode_three(toy, verify), joint(toy, Sampling())) < 1e-6


def test_draws_of_single_tokens_follow_the_filtered_distribution() -> None:
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(1)) * 2
    for sampling in (Sampling(), Sampling(0.6), Sampling(top_k=4), Sampling(top_p=0.7), Sampling(min_p=0.2)):
        tokens = sample_tokens(
            logits.expand(50_000, -1), [sampling] * 50_000, torch.full((50_000,), 9), torch.arange(50_000)
        )
        assert chi_square_p(torch.bincount(tokens, minlength=20), target_probs(logits, sampling)[0]) > 1e-3


def test_the_noise_is_gumbel_and_depends_on_seed_and_position_alone() -> None:
    noise = gumbel(torch.tensor([1, 1, 2]), torch.tensor([5, 6, 5]), 200_000)
    assert torch.equal(noise[:1], gumbel(torch.tensor([1]), torch.tensor([5]), 200_000))
    assert torch.equal(noise[:, :100], gumbel(torch.tensor([1, 1, 2]), torch.tensor([5, 6, 5]), 100))
    assert torch.isfinite(noise).all()
    assert noise.mean(dim=1).tolist() == pytest.approx([0.5772] * 3, abs=0.01)
    assert noise.var(dim=1).tolist() == pytest.approx([math.pi**2 / 6] * 3, abs=0.03)
    assert float(torch.corrcoef(noise).fill_diagonal_(0).abs().max()) < 0.01


def test_filters_keep_what_they_say() -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625]).log()

    def kept(sampling: Sampling) -> list[int]:
        return target_probs(logits, sampling).nonzero()[:, 0].tolist()

    assert kept(Sampling(top_k=2)) == [0, 1]
    assert kept(Sampling(top_k=4)) == [0, 1, 2, 3]  # the tie goes to the smaller token
    assert kept(Sampling(top_p=0.4)) == [0]
    assert kept(Sampling(top_p=0.6)) == [0, 1]
    assert kept(Sampling(min_p=0.2)) == [0, 1, 2]
    assert kept(Sampling(top_k=3, top_p=0.8)) == [0, 1]
    assert kept(GREEDY) == [0]
    assert float(target_probs(logits, Sampling(top_k=2))[0]) == pytest.approx(2 / 3)


def test_half_precision_logits_are_widened_first() -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(2)).bfloat16()
    for position in range(50):
        narrow = sample_token(logits, Sampling(0.9, top_p=0.9), 3, position)
        assert narrow == sample_token(logits.float(), Sampling(0.9, top_p=0.9), 3, position)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -0.1}, "temperature must not be negative: -0.1"),
        ({"temperature": math.nan}, "temperature must not be negative: nan"),
        ({"top_k": -1}, "top_k must not be negative: -1"),
        ({"top_p": 0.0}, "top_p must be in"),
        ({"top_p": 1.5}, "top_p must be in"),
        ({"min_p": 2.0}, "min_p must be in"),
    ],
)
def test_wrong_parameters_are_named(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**wrong)  # type: ignore[arg-type]
