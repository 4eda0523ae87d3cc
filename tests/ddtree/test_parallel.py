"""Tensor parallelism over gloo: every rank builds the tree that one process builds from the whole vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, multiprocessing

from ddtree.parallel import gather_topk, trees_agree
from ddtree.topk import shard_topk, topk_logprobs
from ddtree.tree import build_tree_batch, tree_hash

LIMIT, BATCH = 4, 64


def draw_logits(case: int) -> tuple[Tensor, int]:
    """Draw `[BATCH * LIMIT, V]` logits and a budget; vocabularies down to fewer tokens than ranks * k."""
    generator = torch.Generator().manual_seed(case)
    vocabulary, budget = ((24, 33), (64, 7), (1000, 24), (9, 16))[case % 4]
    logits = torch.randn(BATCH * LIMIT, vocabulary, generator=generator) * (1 + case % 3 * 2)
    if case % 2:
        logits = logits.round()
    if case % 5 == 0:
        logits[torch.rand(logits.shape, generator=generator) < 0.3] = -torch.inf
    if case % 7 == 0:
        logits[torch.rand(logits.shape, generator=generator) < 0.02] = torch.nan
    return logits, budget


def single_process_hash(case: int) -> Tensor:
    logits, budget = draw_logits(case)
    top = topk_logprobs(logits, budget)
    return tree_hash(build_tree_batch(top.logp.view(BATCH, LIMIT, -1), top.ids.view(BATCH, LIMIT, -1), budget))


def run_rank(rank: int, ranks: int, meeting: str, cases: list[int], hashes: list[Tensor]) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    try:
        for case, wanted in zip(cases, hashes, strict=True):
            logits, budget = draw_logits(case)
            vocabulary = logits.shape[1]
            # Uneven shards: the last ones may be short or empty of useful columns.
            size = -(-vocabulary // ranks)
            start = min(rank * size, vocabulary - 1)
            stop = min(start + size, vocabulary) if rank * size < vocabulary else start
            own = logits[:, start:stop] if stop > start else torch.full((BATCH * LIMIT, 1), -torch.inf)
            shard = shard_topk(own, budget, id_offset=start if stop > start else vocabulary + rank)
            top = gather_topk(shard, budget)
            batch = build_tree_batch(top.logp.view(BATCH, LIMIT, -1), top.ids.view(BATCH, LIMIT, -1), budget)
            assert trees_agree(batch).all(), f"case {case}: ranks differ"
            assert torch.equal(tree_hash(batch), wanted), f"case {case}: rank {rank} differs from one process"
        # And the check must notice a rank that went astray.
        batch.tokens[0, 1] += rank
        agree = trees_agree(batch)
        assert not agree[0]
        assert agree[1:].all()
    finally:
        distributed.destroy_process_group()


def check_ranks(ranks: int, cases: list[int], tmp_path: Path) -> None:
    hashes = [single_process_hash(case) for case in cases]
    multiprocessing.spawn(run_rank, (ranks, str(tmp_path / "meeting"), cases, hashes), nprocs=ranks)


@pytest.mark.slow
def test_two_ranks_build_the_tree_of_one(tmp_path: Path) -> None:
    check_ranks(2, list(range(8)), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ten_thousand_trees_are_the_same_on_all_ranks(ranks: int, tmp_path: Path) -> None:
    # 53 batches of 64 for each of the three worlds: 10 176 trees.
    check_ranks(ranks, list(range(ranks * 1000, ranks * 1000 + 53)), tmp_path)
