"""Keep tensor-parallel ranks on one tree: each contributes the best of its vocabulary shard, all merge alike."""

from __future__ import annotations

import torch
from torch import Tensor, distributed

from ddtree.topk import ShardTopK, TopK, merge_topk
from ddtree.tree import TreeBatch, tree_hash


def gather_topk(shard: ShardTopK, k: int, group: distributed.ProcessGroup | None = None) -> TopK:
    """Gather the shards of all ranks in one collective and merge them; every rank returns the same `[..., k]`.

    Shards narrower than k are filled up with impossible tokens, so ranks may hold any number of columns.
    """
    width = shard.values.shape[-1]
    values = torch.nn.functional.pad(shard.values[..., :k], (0, max(0, k - width)), value=-torch.inf)
    ids = torch.nn.functional.pad(shard.ids[..., :k], (0, max(0, k - width)), value=(1 << 31) - 1)
    # fp32 and fp64 travel as the integers they are made of.
    bits = values.contiguous().view(torch.int32).to(torch.int64)
    mine = torch.cat([bits, ids, shard.lse.contiguous().view(torch.int64)[..., None]], dim=-1)
    ranks = [torch.empty_like(mine) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(ranks, mine, group=group)
    every = torch.stack(ranks)
    bits, ids, lse = every[..., :k], every[..., k : 2 * k], every[..., 2 * k]
    return merge_topk(bits.to(torch.int32).view(torch.float32), ids, lse.contiguous().view(torch.float64), k)


def trees_agree(batch: TreeBatch, group: distributed.ProcessGroup | None = None) -> Tensor:
    """Tell for each request whether all ranks hold the same tree: bool `[bs]`, two small all-reduces."""
    low = tree_hash(batch)
    high = low.clone()
    distributed.all_reduce(low, distributed.ReduceOp.MIN, group=group)
    distributed.all_reduce(high, distributed.ReduceOp.MAX, group=group)
    return low == high
