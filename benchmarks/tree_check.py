"""Compare the GPU forms of a round with the CPU forms on random cases; `tree_build.py --check` runs this first."""

from __future__ import annotations

import torch

from ddtree.kernels.round_triton import flat_mask_triton, greedy_walk_triton
from ddtree.kernels.topk_triton import shard_topk_triton
from ddtree.kernels.tree_triton import build_tree_triton
from ddtree.layout import ancestor_mask_batch, flat_mask
from ddtree.topk import shard_topk
from ddtree.tree import build_tree, build_tree_batch
from ddtree.walk import greedy_walk_batch


def check(cases: int, seed: int) -> int:
    """Compare every form on cases with ties, -inf, NaN and tiny vocabularies; return how many trees were compared."""
    generator = torch.Generator().manual_seed(seed)

    def pick(options: tuple[int, ...]) -> int:
        return options[int(torch.randint(len(options), (1,), generator=generator))]

    trees = 0
    for case in range(cases):
        bs, limit, vocabulary = pick((1, 2, 5, 16)), pick((1, 2, 5, 15)), pick((2, 40, 300, 5000))
        budget = pick((1, 7, 16, 64, 127, 256, 1024))
        logits = torch.randn(bs, limit, vocabulary, generator=generator) * pick((0, 1, 3, 8))
        if case % 3 == 0:
            logits = (logits * 2).round() / 2
        if case % 4 == 0:
            logits[torch.rand(logits.shape, generator=generator) < 0.3] = -torch.inf
        if case % 7 == 0:
            logits[torch.rand(logits.shape, generator=generator) < 0.05] = torch.nan
        k = min(budget, vocabulary)
        rows = logits.reshape(bs * limit, vocabulary).to("cuda", torch.bfloat16 if case % 2 else torch.float32)
        host, device = shard_topk(rows.cpu(), k), shard_topk_triton(rows, k)
        assert torch.equal(host.values, device.values.cpu()), (case, "top-k values")
        assert torch.equal(host.ids, device.ids.cpu()), (case, "top-k ids")
        assert torch.allclose(host.lse, device.lse.cpu(), rtol=1e-6, atol=1e-5), (case, "logsumexp")
        logp = (host.values - host.lse[:, None].float()).nan_to_num(nan=-torch.inf).clamp(max=0.0)
        logp, ids = logp.view(bs, limit, k), host.ids.view(bs, limit, k)
        roots = torch.arange(bs)
        kernel = build_tree_triton(logp.cuda(), ids.cuda(), budget, roots.cuda())
        stairs = build_tree_batch(logp.cuda(), ids.cuda(), budget, root_tokens=roots.cuda())
        for name in ("tokens", "parents", "depths", "scores", "n_valid"):
            assert torch.equal(getattr(kernel, name), getattr(stairs, name)), (case, name)
        for index in range(bs):
            mine, ours = kernel.tree(index), build_tree(logp[index], budget, token_ids=ids[index], root_token=index)
            assert (mine.token_ids, mine.parents, mine.depths) == (ours.token_ids, ours.parents, ours.depths), case
            trees += 1
        # Follow mostly existing children, so that walks are long.
        follow = torch.randint(0, vocabulary, kernel.tokens.shape, generator=generator).cuda()
        follow.scatter_(1, kernel.parents.clamp(min=0), kernel.tokens)
        a, b = greedy_walk_batch(kernel, follow, limit), greedy_walk_triton(kernel, follow, limit)
        assert torch.equal(torch.cat((a.path, a.tokens, a.lengths[:, None]), dim=1), b), (case, "walk")
        lengths = torch.randint(0, 300, (bs,), generator=generator)
        total = int(lengths.sum())
        wide = flat_mask(ancestor_mask_batch(kernel.parents, limit), lengths.cuda(), total)
        assert torch.equal(wide, flat_mask_triton(kernel.parents, lengths.cuda(), total, limit)), (case, "mask")
    return trees
