"""Top-k: a total order, the same for every tile size and every split of the vocabulary."""

from __future__ import annotations

import pytest
import torch

from ddtree.topk import merge_topk, shard_topk, topk_from_hidden, topk_logprobs


def test_it_is_log_softmax_and_topk() -> None:
    logits = torch.randn(3, 5, 20_000, generator=torch.Generator().manual_seed(0)) * 4
    top = topk_logprobs(logits, 32)
    wanted = torch.log_softmax(logits, dim=-1).topk(32)
    assert torch.equal(top.ids, wanted.indices)
    assert torch.allclose(top.logp, wanted.values, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_go_to_the_smaller_token(dtype: torch.dtype) -> None:
    logits = (torch.randn(64, 900, generator=torch.Generator().manual_seed(1)) * 2).round().div(2).to(dtype)
    top = shard_topk(logits, 40)
    wanted = torch.sort(logits.float(), dim=-1, descending=True, stable=True)
    assert torch.equal(top.ids, wanted.indices[:, :40])
    assert torch.equal(top.values, wanted.values[:, :40])


@pytest.mark.parametrize("tile", [1, 7, 64, 999, 5000])
def test_the_tile_does_not_matter(tile: int) -> None:
    logits = (torch.randn(4, 999, generator=torch.Generator().manual_seed(2)) * 3).round()
    one, other = shard_topk(logits, 17), shard_topk(logits, 17, tile=tile)
    assert torch.equal(one.values, other.values)
    assert torch.equal(one.ids, other.ids)
    assert torch.equal(one.lse.float(), other.lse.float())


def test_zeros_of_either_sign_are_equal_and_odd_numbers_have_a_place() -> None:
    logits = torch.tensor([[-0.0, 0.0, torch.nan, torch.inf, -torch.inf, 1.0]])
    top = shard_topk(logits, 6)
    assert top.ids.tolist() == [[3, 5, 0, 1, 2, 4]]
    assert torch.isfinite(top.lse).all()


def test_a_row_of_nothing_stays_impossible() -> None:
    top = topk_logprobs(torch.full((2, 9), -torch.inf), 4)
    assert top.ids.tolist() == [[0, 1, 2, 3]] * 2
    assert (top.logp == -torch.inf).all()


def test_log_probabilities_are_never_positive() -> None:
    logits = torch.full((1, 50), -100.0)
    logits[0, 7] = 90.0
    assert topk_logprobs(logits, 3).logp[0].tolist()[0] == 0.0


def test_the_head_is_multiplied_tile_by_tile() -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, head = torch.randn(2, 3, 16, generator=generator), torch.randn(700, 16, generator=generator)
    whole, tiled = shard_topk(hidden @ head.T, 9), topk_from_hidden(hidden, head, 9, tile=64)
    assert torch.equal(whole.ids, tiled.ids)
    assert torch.allclose(whole.values, tiled.values, atol=1e-5)
    assert torch.allclose(whole.lse, tiled.lse)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_shards_in_any_order_merge_to_the_whole(ranks: int) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = (torch.randn(40, 480, generator=generator) * 3).round() / 3
    whole = topk_logprobs(logits, 24)
    size = 480 // ranks
    shards = [shard_topk(logits[:, r * size : (r + 1) * size], 24, id_offset=r * size) for r in range(ranks)]
    for order in (range(ranks), reversed(range(ranks))):
        picked = [shards[r] for r in order]
        merged = merge_topk(
            torch.stack([s.values for s in picked]),
            torch.stack([s.ids for s in picked]),
            torch.stack([s.lse for s in picked]),
            24,
        )
        assert torch.equal(merged.ids, whole.ids)
        assert torch.equal(merged.logp, whole.logp)
