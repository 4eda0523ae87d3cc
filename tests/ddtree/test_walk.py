"""Walks: the vectorised form, the plain one and a linked-list verifier agree; tree decoding equals plain decoding."""

from __future__ import annotations

import random

import pytest
import torch

from ddtree.sampling import GREEDY, Sampling, sample_token
from ddtree.tree import Tree, build_tree, build_tree_batch, sort_log_probs
from ddtree.walk import (
    Walk,
    greedy_walk,
    greedy_walk_batch,
    sample_walk,
    sample_walk_batch,
    stop_walk,
    stop_walk_batch,
)
from tests.ddtree.cases import draw_log_probs, draw_shape
from tests.ddtree.toy import Toy


def linked_list_walk(tree: Tree, target_next: list[int]) -> Walk:
    """Verify as engines do: first child and next sibling lists, candidates tried in turn."""
    n = len(tree)
    first, sibling = [-1] * n, [-1] * n
    for node in reversed(range(1, n)):
        sibling[node] = first[tree.parents[node]]
        first[tree.parents[node]] = node
    node, path, tokens = 0, [0], [target_next[0]]
    child = first[0]
    while child != -1:
        if tree.token_ids[child] == target_next[node]:
            node = child
            path.append(node)
            tokens.append(target_next[node])
            child = first[node]
        else:
            child = sibling[child]
    return Walk(tuple(path), tuple(tokens))


def test_all_walks_agree_on_random_trees() -> None:
    rng, generator = random.Random(2), torch.Generator().manual_seed(2)
    longest = 0
    for case in range(120):
        limit, vocabulary, budget = draw_shape(rng)
        logp = draw_log_probs(case, 4, limit, vocabulary, generator)
        batch = build_tree_batch(*sort_log_probs(logp), budget)
        follow = torch.randint(0, vocabulary, batch.tokens.shape, generator=generator)
        # Send some nodes to a child of theirs, so that walks get long.
        follow.scatter_(1, batch.parents.clamp(min=0), batch.tokens)
        walks = greedy_walk_batch(batch, follow, limit)
        for index in range(4):
            tree, wanted = batch.tree(index), follow[index].tolist()
            walk = greedy_walk(tree, wanted)
            assert walk == linked_list_walk(tree, wanted) == walks.walk(index)
            assert walk.tokens[:-1] == tuple(tree.token_ids[node] for node in walk.path[1:])
            assert (walks.path[index, len(walk.path) :] == -1).all()
            longest = max(longest, walk.accepted)
    assert longest >= 5


def test_a_dead_node_is_never_followed() -> None:
    batch = build_tree_batch(torch.zeros(1, 1, 1), torch.tensor([[[5]]]), 4, root_tokens=torch.tensor([8]))
    # The padding carries the root's token under the root: a target that repeats it must not walk into the padding.
    walk = greedy_walk_batch(batch, torch.full((1, 5), 8), 1).walk(0)
    assert walk == Walk((0,), (8,))


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0.7, top_k=3), Sampling(1.3, top_p=0.8), Sampling(0.9, 4, 0.9, 0.1), GREEDY]
)
def test_the_batched_sampling_walk_is_the_single_one(sampling: Sampling) -> None:
    generator = torch.Generator().manual_seed(3)
    logp = torch.log_softmax(torch.randn(6, 5, 9, generator=generator), dim=-1)
    batch = build_tree_batch(*sort_log_probs(logp), 40)
    logits = torch.randn(6, 41, 9, generator=generator)
    seeds, roots = torch.arange(6) * 77, torch.arange(6) * 1000
    # A batch may mix parameters.
    mixed = [sampling if index % 2 else Sampling(0.5) for index in range(6)]
    walks = sample_walk_batch(batch, logits, mixed, seeds, roots, 5)
    singles = [sample_walk(batch.tree(i), logits[i], mixed[i], 77 * i, 1000 * i) for i in range(6)]
    assert [walks.walk(i) for i in range(6)] == singles
    assert max(walk.accepted for walk in singles) > 0


def decode_plain(toy: Toy, text: list[int], count: int, sampling: Sampling, seed: int) -> list[int]:
    text = list(text)
    for _ in range(count):
        text.append(sample_token(toy.logits(text), sampling, seed, len(text)))
    return text


def decode_tree(
    toy: Toy, text: list[int], count: int, sampling: Sampling, seed: int, budget: int
) -> tuple[list[int], int]:
    text, wanted, rounds = list(text), len(text) + count, 0
    while len(text) < wanted:
        tree = build_tree(toy.draft_log_probs(text, 6), budget, root_token=text[-1])
        # The root is the last token of the text: it stands at len(text) - 1.
        walk = sample_walk(tree, toy.tree_logits(text, tree), sampling, seed, len(text) - 1)
        text.extend(stop_walk(walk, (), wanted - len(text)).tokens)
        rounds += 1
    return text, rounds


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(0.8, top_k=5, top_p=0.9), Sampling(1.2, min_p=0.05)])
@pytest.mark.parametrize("budget", [0, 1, 8, 40])
def test_tree_decoding_gives_the_tokens_of_plain_decoding(sampling: Sampling, budget: int) -> None:
    toy = Toy.make(12, seed=4)
    for seed in range(3):
        text, rounds = decode_tree(toy, [1, 2], 60, sampling, seed, budget)
        assert text == decode_plain(toy, [1, 2], 60, sampling, seed)
        # And the tree must have been of use, or the test shows nothing.
        assert rounds == 60 if budget == 0 else rounds < 60


def test_another_seed_gives_another_text() -> None:
    toy = Toy.make(12, seed=4)
    texts = {tuple(decode_plain(toy, [1, 2], 20, Sampling(), seed)) for seed in range(20)}
    assert len(texts) == 20


def test_walks_end_at_a_stop_token_and_at_the_room() -> None:
    walk = Walk((0, 2, 5, 9), (7, 3, 7, 4))
    assert stop_walk(walk, {3}, 100) == Walk((0, 2), (7, 3))
    assert stop_walk(walk, {4}, 100) == walk
    assert stop_walk(walk, {3}, 1) == Walk((0,), (7,))
    assert stop_walk(walk, (), 3) == Walk((0, 2, 5), (7, 3, 7))
    assert walk.accepted == 3


def test_batched_walks_end_where_single_ones_do() -> None:
    generator = torch.Generator().manual_seed(6)
    logp = torch.log_softmax(torch.randn(40, 6, 4, generator=generator), dim=-1)
    batch = build_tree_batch(*sort_log_probs(logp), 60)
    follow = torch.randint(0, 4, batch.tokens.shape, generator=generator)
    walks = greedy_walk_batch(batch, follow, 6)
    room = torch.randint(1, 6, (40,), generator=generator)
    stopped = stop_walk_batch(walks, torch.tensor([1, 3]), room)
    for index in range(40):
        assert stopped.walk(index) == stop_walk(walks.walk(index), {1, 3}, int(room[index]))
        assert (stopped.tokens[index, int(stopped.lengths[index]) :] == -1).all()
