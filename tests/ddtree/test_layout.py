"""Positions and masks against the plainest oracle there is."""

from __future__ import annotations

import pytest
import torch

from ddtree.layout import (
    ancestor_mask,
    ancestor_mask_batch,
    flat_mask,
    hf_mask,
    pad_tree,
    tree_positions,
)
from ddtree.tree import Tree, TreeBatch, build_tree, build_tree_batch, sort_log_probs
from tests.ddtree.cases import draw_log_probs


def sees(tree: Tree, query: int, key: int) -> bool:
    """Follow the parents of `query` and look for `key`."""
    while query >= 0:
        if query == key:
            return True
        query = tree.parents[query]
    return False


def draw_batch(seed: int, bs: int = 5, limit: int = 4, vocabulary: int = 6, budget: int = 12) -> TreeBatch:
    logp = draw_log_probs(seed, bs, limit, vocabulary, torch.Generator().manual_seed(seed))
    return build_tree_batch(*sort_log_probs(logp), budget, root_tokens=torch.arange(bs))


@pytest.mark.parametrize("seed", range(20))
def test_a_node_sees_its_ancestors_and_itself(seed: int) -> None:
    batch = draw_batch(seed)
    masks = ancestor_mask_batch(batch.parents, 4)
    for index in range(5):
        tree = batch.tree(index)
        n = len(tree)
        oracle = torch.tensor([[sees(tree, q, k) for k in range(n)] for q in range(n)])
        assert torch.equal(ancestor_mask(tree), oracle)
        assert torch.equal(masks[index, :n, :n], oracle)
        # A dead node sees the root and itself; nobody sees it.
        dead = torch.eye(13, dtype=torch.bool)[n:]
        dead[:, 0] = True
        assert torch.equal(masks[index, n:], dead)
        assert not masks[index, :n, n:].any()


@pytest.mark.parametrize("seed", range(6))
def test_the_flat_mask_has_the_prefix_and_the_tail_of_every_request(seed: int) -> None:
    batch = draw_batch(seed)
    tails = ancestor_mask_batch(batch.parents, 4)
    lengths = torch.tensor([0, 7, 1, 30, 2])
    flat = flat_mask(tails, lengths, 40)
    assert flat.numel() == sum(13 * (length + 13) for length in lengths.tolist())
    start = 0
    for index, length in enumerate(lengths.tolist()):
        rows = flat[start : start + 13 * (length + 13)].view(13, length + 13)
        assert rows[:, :length].all()
        assert torch.equal(rows[:, length:], tails[index])
        start += rows.numel()


def test_the_flat_mask_fills_a_longer_buffer_and_refuses_a_shorter_one() -> None:
    tails = ancestor_mask_batch(draw_batch(0).parents, 4)
    lengths = torch.tensor([3, 3, 3, 3, 3])
    size = 5 * 13 * 16
    buffer = torch.zeros(size + 9, dtype=torch.bool)
    out = flat_mask(tails, lengths, 15, out=buffer)
    assert out.data_ptr() == buffer.data_ptr()
    assert torch.equal(out, flat_mask(tails, lengths, 15))
    assert not buffer[size:].any()
    with pytest.raises(ValueError, match=f"mask buffer is too short: {size - 1}, needs {size}"):
        flat_mask(tails, lengths, 15, out=buffer[: size - 1])


def test_the_additive_mask_shuts_out_with_the_lowest_number() -> None:
    tree = build_tree(torch.log_softmax(torch.randn(3, 5, generator=torch.Generator().manual_seed(0)), dim=-1), 8)
    ancestors = ancestor_mask(tree)
    mask = hf_mask(ancestors, 4, torch.float16)
    assert mask.shape == (1, 1, 9, 13)
    assert (mask[..., :4] == 0).all()
    assert torch.equal(mask[0, 0, :, 4:] == 0, ancestors)
    assert set(mask.unique().tolist()) == {torch.finfo(torch.float16).min, 0.0}


def test_positions_follow_depth_not_index() -> None:
    tree = Tree((9, 1, 2, 3), (-1, 0, 0, 1), (0, 1, 1, 2), (0.0, -1.0, -1.5, -2.0))
    assert tree_positions(torch.tensor(tree.depths), 100).tolist() == [100, 101, 101, 102]
    batch = pad_tree(tree, 5)
    both = tree_positions(torch.cat([batch.depths, batch.depths]), torch.tensor([10, 20]))
    assert both.tolist() == [[10, 11, 11, 12, 11], [20, 21, 21, 22, 21]]


def test_padding_one_tree_is_what_the_batch_builder_does() -> None:
    logp = torch.log_softmax(torch.randn(2, 2, generator=torch.Generator().manual_seed(0)), dim=-1)
    values, ids = sort_log_probs(logp)
    wide = build_tree_batch(values[None], ids[None], 12, root_tokens=torch.tensor([3]))
    padded = pad_tree(build_tree(logp, 12, root_token=3), 13)
    for name in ("tokens", "parents", "depths", "scores", "n_valid"):
        assert torch.equal(getattr(padded, name), getattr(wide, name))
    with pytest.raises(ValueError, match="tree of 7 nodes does not fit 6"):
        pad_tree(build_tree(logp, 12), 6)
