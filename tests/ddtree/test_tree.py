"""Trees: prefix-closed, optimal, and the same from every builder."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddtree.kernels.native import native_library
from ddtree.layout import ancestor_mask
from ddtree.tree import (
    Tree,
    build_tree,
    build_tree_batch,
    build_tree_heap,
    quantise,
    sort_log_probs,
    tree_hash,
)
from tests.ddtree.cases import draw_log_probs, draw_shape


def parts(tree: Tree) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    return tree.token_ids, tree.parents, tree.depths


def objective(tree: Tree) -> float:
    return math.fsum(math.exp(score) for score in tree.scores[1:])


def assert_tree(tree: Tree, logp: Tensor, budget: int) -> None:
    """Assert what holds for every tree of `logp [L, V]`."""
    assert len(tree) <= budget + 1
    assert (tree.parents[0], tree.depths[0], tree.scores[0]) == (-1, 0, 0.0)
    seen = set()
    for node in range(1, len(tree)):
        parent, depth, token = tree.parents[node], tree.depths[node], tree.token_ids[node]
        assert 0 <= parent < node
        assert depth == tree.depths[parent] + 1
        assert (parent, token) not in seen
        seen.add((parent, token))
        edge = float(logp[depth - 1, token])
        assert tree.scores[node] == pytest.approx(tree.scores[parent] + min(edge, 0.0), abs=2e-6)
    assert list(tree.scores) == sorted(tree.scores, reverse=True)


def brute_force(logp: Tensor, budget: int) -> float:
    """Return the best objective over all prefix-closed trees, by trying every one."""
    limit, vocabulary = logp.shape
    prefixes = [p for d in range(1, limit + 1) for p in itertools.product(range(vocabulary), repeat=d)]
    weight = {p: math.exp(math.fsum(float(logp[i, t]) for i, t in enumerate(p))) for p in prefixes}
    best, frontier = 0.0, {frozenset()}
    for _ in range(budget):
        # Grow every tree by every prefix whose parent it holds.
        frontier = {
            tree | {p} for tree in frontier for p in prefixes if p not in tree and (len(p) == 1 or p[:-1] in tree)
        }
        best = max([best, *(math.fsum(weight[p] for p in tree) for tree in frontier)])
    return best


@pytest.mark.parametrize("case", range(24))
def test_the_tree_is_the_best_of_all_trees(case: int) -> None:
    generator = torch.Generator().manual_seed(case)
    limit, vocabulary, budget = ((2, 3, 4), (3, 2, 5), (1, 5, 3), (2, 2, 6))[case % 4]
    logp = torch.log_softmax(torch.randn(limit, vocabulary, generator=generator) * (1 + case % 3), dim=-1)
    assert objective(build_tree(logp, budget)) == pytest.approx(brute_force(logp, budget), abs=1e-5)


def test_ten_thousand_random_trees_are_the_same_from_every_builder() -> None:
    rng, generator = random.Random(1), torch.Generator().manual_seed(1)
    compared = short = 0
    while compared < 10_000:
        limit, vocabulary, budget = draw_shape(rng)
        bs = 64
        logp = draw_log_probs(compared // bs, bs, limit, vocabulary, generator)
        values, ids = sort_log_probs(logp)
        roots = torch.arange(bs)
        batch = build_tree_batch(values, ids, budget, root_tokens=roots)
        costs, names = quantise(values).tolist(), ids.tolist()
        columns = [getattr(batch, name).tolist() for name in ("tokens", "parents", "depths", "scores")]
        for index, size in enumerate(batch.n_valid.tolist()):
            tokens, parents, depths, scores = (tuple(column[index][:size]) for column in columns)
            heap = build_tree_heap(costs[index], names[index], budget, index)
            assert parts(heap) == (tokens, parents, depths)
            # The batched form keeps scores in fp32: the same numbers, rounded once.
            assert tuple(torch.tensor(heap.scores).tolist()) == scores
            assert build_tree(values[index], budget, token_ids=ids[index], root_token=index) == heap
            compared += 1
            short += size <= budget
        assert_tree(build_tree(logp[0], budget), torch.nan_to_num(logp[0], nan=-torch.inf), budget)
    # The cases must include trees that the vocabulary or -inf keeps below the budget.
    assert short > 1000


@given(
    st.integers(1, 4).flatmap(
        lambda v: st.lists(st.lists(st.integers(0, 6), min_size=v, max_size=v), min_size=1, max_size=4)
    ),
    st.integers(0, 12),
)
@settings(deadline=None, max_examples=200)
def test_any_costs_make_a_prefix_closed_tree(levels: list[list[int]], budget: int) -> None:
    logp = torch.tensor(levels, dtype=torch.float32) * -0.25
    tree = build_tree(logp, budget)
    assert_tree(tree, logp, budget)
    every = sum(len(levels[0]) ** depth for depth in range(1, len(levels) + 1))
    assert len(tree) == min(budget, every) + 1


@pytest.mark.parametrize("seed", range(5))
def test_a_smaller_budget_is_a_prefix(seed: int) -> None:
    logp = torch.log_softmax(torch.randn(6, 30, generator=torch.Generator().manual_seed(seed)) * 2, dim=-1)
    large = build_tree(logp, 64)
    for budget in (0, 1, 5, 31, 63):
        assert build_tree(logp, budget) == large.prefix(budget)


def test_one_token_a_position_is_the_drafted_chain() -> None:
    logp = torch.log_softmax(torch.randn(15, 50, generator=torch.Generator().manual_seed(3)), dim=-1)
    values, ids = sort_log_probs(logp)
    tree = build_tree(values[:, :1], 15, token_ids=ids[:, :1], root_token=9)
    assert tree.token_ids == (9, *logp.argmax(dim=-1).tolist())
    assert tree.parents == tuple(range(-1, 15))
    batch = build_tree_batch(values[None, :, :1], ids[None, :, :1], 15, root_tokens=torch.tensor([9]))
    assert parts(batch.tree(0)) == parts(tree)


def test_an_empty_budget_or_no_positions_leave_the_root() -> None:
    logp = torch.zeros(2, 3)
    assert build_tree(logp, 0, root_token=4) == Tree((4,), (-1,), (0,), (0.0,))
    assert len(build_tree(torch.zeros(0, 3), 5)) == 1
    batch = build_tree_batch(torch.zeros(2, 0, 3), torch.zeros(2, 0, 3, dtype=torch.int64), 3)
    assert batch.n_valid.tolist() == [1, 1]
    assert batch.tokens.shape == (2, 4)


def test_padding_is_dead_and_harmless() -> None:
    logp = torch.tensor([[[0.0, -torch.inf]]])
    batch = build_tree_batch(logp, torch.tensor([[[5, 6]]]), 3, root_tokens=torch.tensor([8]))
    assert batch.n_valid.tolist() == [2]
    assert batch.tokens.tolist() == [[8, 5, 8, 8]]
    assert batch.parents.tolist() == [[-1, 0, 0, 0]]
    assert batch.depths.tolist() == [[0, 1, 1, 1]]


@pytest.mark.parametrize(
    ("logp", "budget", "message"),
    [
        (torch.zeros(2, 3), -1, "budget must not be negative: -1"),
        (torch.zeros(32, 3), 4, "at most 31 positions can be drafted: 32"),
        (torch.zeros(3), 4, "log-probabilities must have 2 dimensions"),
    ],
)
def test_wrong_inputs_are_named(logp: Tensor, budget: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_tree(logp, budget)


def test_the_deepest_and_widest_costs_do_not_overflow() -> None:
    logp = torch.full((31, 2), -63.9)
    values, ids = sort_log_probs(logp)
    tree = build_tree(logp, 200)
    assert parts(build_tree_batch(values[None], ids[None], 200).tree(0)) == parts(tree)
    assert build_tree_heap(quantise(values).tolist(), ids.tolist(), 200) == tree
    chain = build_tree(logp[:, :1], 31)
    assert chain.scores[-1] == pytest.approx(31 * -63.9, rel=1e-6)
    # Beyond e^-64 a token counts as impossible.
    assert len(build_tree(torch.full((3, 4), -65.0), 10)) == 1


def test_hashes_tell_trees_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    values, ids = sort_log_probs(torch.log_softmax(torch.randn(500, 4, 12, generator=generator), dim=-1))
    hashes = tree_hash(build_tree_batch(values, ids, 16))
    assert len(set(hashes.tolist())) == 500
    assert torch.equal(hashes, tree_hash(build_tree_batch(values, ids, 16)))
    other = ids.clone()
    other[0, 0, 0] += 100
    assert tree_hash(build_tree_batch(values, other, 16))[0] != hashes[0]


def test_python_builds_the_same_without_the_compiled_form(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(5)
    cases = [draw_log_probs(case, 1, 5, 20, generator)[0] for case in range(60)]
    compiled = [build_tree(logp, 40) for logp in cases]
    masks = [ancestor_mask(tree) for tree in compiled]
    monkeypatch.setenv("DDTREE_NATIVE", "0")
    native_library.cache_clear()
    try:
        assert native_library() is None
        assert [build_tree(logp, 40) for logp in cases] == compiled
        assert all(torch.equal(ancestor_mask(tree), mask) for tree, mask in zip(compiled, masks, strict=True))
    finally:
        native_library.cache_clear()


def test_the_compiled_form_refuses_a_cache_that_others_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ddtree").mkdir()
    (tmp_path / "ddtree").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native_library.cache_clear()
    try:
        assert native_library() is None
        assert list((tmp_path / "ddtree").iterdir()) == []
    finally:
        native_library.cache_clear()
