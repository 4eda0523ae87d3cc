"""From the drafter's hidden states to a tree per request, its mask and its walk: nothing here waits for the device.

On CUDA each step is one or two fused launches; elsewhere the reference form of the core runs, with equal results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddtree.kernels.round_triton import flat_mask_triton, greedy_walk_triton
from ddtree.kernels.topk_triton import shard_topk_triton
from ddtree.kernels.tree_triton import build_tree_triton
from ddtree.layout import ancestor_mask_batch, flat_mask, tree_positions
from ddtree.topk import TopK, merge_topk, shard_topk
from ddtree.tree import TreeBatch, build_tree_batch
from ddtree.walk import greedy_walk_batch


@dataclass(frozen=True, slots=True)
class Head:
    """Hold this rank's part of the target's output head, and how to gather from the other ranks."""

    weight: Tensor  # [V_rank, H]
    id_offset: int
    gather: Callable[[Tensor], Tensor] | None  # [...] -> [ranks, ...]; None on one rank


@dataclass(frozen=True, slots=True)
class Plan:
    """Hold the trees of one batch; valid until the next plan of the same width."""

    tokens: Tensor  # [bs, n] int64
    parents: Tensor  # [bs, n] int64
    n_valid: Tensor  # [bs] int64
    positions: Tensor  # [bs, n] int64
    depth: int  # no tree is deeper

    @property
    def width(self) -> int:
        """Count the tokens of one request."""
        return self.tokens.shape[1]

    def mask(self, seq_lens: Tensor, seq_lens_sum: int) -> Tensor:
        """Return SGLang's flat bool mask for prefixes of `seq_lens`, whose sum the host knows."""
        if self.parents.is_cuda:
            return flat_mask_triton(self.parents, seq_lens, seq_lens_sum, self.depth)
        return flat_mask(ancestor_mask_batch(self.parents, self.depth), seq_lens, seq_lens_sum)

    def walk(self, chosen: Tensor) -> Tensor:
        """Walk each tree by the target's choices `[bs, n]`; returns `[bs, 2 * (depth + 1) + 1]`: path, tokens, length.

        Packed, so that one copy brings a round's result to the host.
        """
        unused: Any = self.parents
        trees = TreeBatch(self.tokens, self.parents, unused, unused, self.n_valid)
        if chosen.is_cuda:
            return greedy_walk_triton(trees, chosen, self.depth)
        walks = greedy_walk_batch(trees, chosen, self.depth)
        return torch.cat((walks.path, walks.tokens, walks.lengths[:, None]), dim=1)


def make_trees(hidden: Tensor, roots: Tensor, seq_lens: Tensor, head: Head, budget: int, topk: int) -> tuple[Tensor, ...]:
    """Build the best tree of each request; returns the tensors of `Plan` in order.

    `hidden` is `[bs, L, H]` for the drafted positions, `roots` `[bs]` the last verified tokens, `seq_lens` `[bs]`.
    """
    best = best_tokens(hidden, head, topk)
    if hidden.is_cuda:
        tree = build_tree_triton(best.logp, best.ids, budget, roots)
    else:
        tree = build_tree_batch(best.logp, best.ids, budget, root_tokens=roots)
    return tree.tokens, tree.parents, tree.n_valid, tree_positions(tree.depths, seq_lens)


def must_agree(trees: tuple[Tensor, ...], gather: Callable[[Tensor], Tensor]) -> None:
    """Compare the trees of all ranks, node for node; waits for the device. Raises RuntimeError when two ranks differ."""
    tokens, parents, n_valid, _positions = trees
    every = gather(torch.cat((tokens, parents, n_valid[:, None]), dim=1).contiguous())
    differs = (every != every[0]).flatten(2).any(dim=2).any(dim=0).nonzero()[:, 0].tolist()
    if differs:
        raise RuntimeError(f"DDTREE: the tensor-parallel ranks built different trees for rows {differs} of the batch")


def best_tokens(hidden: Tensor, head: Head, k: int) -> TopK:
    """Return the k best tokens after each hidden state `[bs, L, H]` with log-probabilities over the whole vocabulary.

    Ranks exchange k values, k ids and one logsumexp per row, and merge them by a total order: no broadcast follows.
    """
    shape = hidden.shape[:2]
    logits = hidden.to(head.weight.dtype).flatten(0, 1) @ head.weight.T
    if logits.is_cuda:
        shard = shard_topk_triton(logits, k, id_offset=head.id_offset, as_logp=head.gather is None)
        if head.gather is None:
            return TopK(shard.values.view(*shape, -1), shard.ids.view(*shape, -1))
    else:
        shard = shard_topk(logits, k, id_offset=head.id_offset)
    # One message: everything as 32-bit words.
    width = shard.values.shape[1]
    words = torch.cat((shard.values.view(torch.int32), shard.ids.to(torch.int32), shard.lse[:, None].view(torch.int32)), 1)
    words = words[None] if head.gather is None else head.gather(words.contiguous())
    best = merge_topk(
        words[..., :width].contiguous().view(torch.float32),
        words[..., width : 2 * width].long(),
        words[..., 2 * width :].contiguous().view(torch.float64)[..., 0],
        k,
    )
    return TopK(best.logp.view(*shape, -1), best.ids.view(*shape, -1))
