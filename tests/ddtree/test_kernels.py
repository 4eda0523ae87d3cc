"""Kernels: equal to their torch forms, on a GPU where there is one, else through Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import random

import pytest
import torch

from ddtree.layout import ancestor_mask_batch, flat_mask
from ddtree.topk import shard_topk
from ddtree.tree import build_tree_batch, sort_log_probs
from ddtree.walk import greedy_walk_batch
from tests.ddtree.cases import draw_log_probs

pytestmark = pytest.mark.slow
if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from ddtree.kernels.round_triton import flat_mask_triton, greedy_walk_triton  # noqa: E402
from ddtree.kernels.topk_triton import shard_topk_triton  # noqa: E402
from ddtree.kernels.tree_triton import build_tree_triton  # noqa: E402


@pytest.mark.parametrize("case", range(12))
def test_tree_walk_and_mask_are_those_of_torch(case: int) -> None:
    rng, generator = random.Random(case), torch.Generator().manual_seed(case)
    limit, vocabulary, budget = rng.choice((1, 3, 5)), rng.choice((1, 3, 40)), rng.choice((1, 5, 16, 33))
    logp = draw_log_probs(case, 2, limit, vocabulary, generator)
    values, ids = (part.to(DEVICE) for part in sort_log_probs(logp))
    roots = torch.tensor([7, 8], device=DEVICE)
    ours, kernel = (
        build_tree_batch(values, ids, budget, root_tokens=roots),
        build_tree_triton(values, ids, budget, roots),
    )
    for name in ("tokens", "parents", "depths", "scores", "n_valid"):
        assert torch.equal(getattr(ours, name), getattr(kernel, name))
    follow = torch.randint(0, vocabulary, ours.tokens.shape, generator=generator).to(DEVICE)
    follow.scatter_(1, ours.parents.clamp(min=0), ours.tokens)
    plain, fused = greedy_walk_batch(ours, follow, limit), greedy_walk_triton(ours, follow, limit)
    assert torch.equal(torch.cat((plain.path, plain.tokens, plain.lengths[:, None]), dim=1), fused)
    lengths = torch.tensor([3, 20], device=DEVICE)
    wide = flat_mask(ancestor_mask_batch(ours.parents, limit), lengths, 23)
    assert torch.equal(wide, flat_mask_triton(ours.parents, lengths, 23, limit))


@pytest.mark.parametrize("case", range(6))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_topk_is_that_of_torch(case: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(case)
    vocabulary, k = ((3, 5), (40, 7), (300, 16), (300, 70), (900, 1), (5000, 33))[case]
    logits = (torch.randn(2, vocabulary, generator=generator) * 4).to(dtype)
    if case % 2:
        logits[torch.rand(logits.shape, generator=generator) < 0.3] = -torch.inf
        logits[torch.rand(logits.shape, generator=generator) < 0.1] = torch.nan
    ours, kernel = shard_topk(logits.to(DEVICE), k, id_offset=9), shard_topk_triton(logits.to(DEVICE), k, id_offset=9)
    assert torch.equal(ours.values, kernel.values)
    assert torch.equal(ours.ids, kernel.ids)
    assert torch.allclose(ours.lse, kernel.lse, atol=1e-5)
