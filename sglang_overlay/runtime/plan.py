"""From the drafter's hidden states to what a verify forward needs: fixed shapes, and nothing waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddtree.layout import ancestor_mask_batch, flat_mask_index, tree_positions
from ddtree.topk import TopK, merge_topk, topk_from_hidden
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
    """Hold the trees of one batch and their layout; valid until the next plan."""

    tokens: Tensor  # [bs, n] int64
    parents: Tensor  # [bs, n] int64
    n_valid: Tensor  # [bs] int64
    positions: Tensor  # [bs, n] int64
    ancestors: Tensor  # [bs, n, n] bool
    mask_index: Tensor  # [bs, n, n] int64, where `ancestors` goes in SGLang's flat mask

    @property
    def width(self) -> int:
        """Count the tokens of one request."""
        return self.tokens.shape[1]

    def mask(self, seq_lens_sum: int) -> Tensor:
        """Return SGLang's flat bool mask for prefixes that are `seq_lens_sum` tokens long together."""
        bs, n = self.tokens.shape
        flat = torch.ones(n * (seq_lens_sum + bs * n), dtype=torch.bool, device=self.tokens.device)
        return flat.scatter_(0, self.mask_index.reshape(-1), self.ancestors.reshape(-1))


def best_tokens(hidden: Tensor, head: Head, k: int) -> TopK:
    """Return the k best tokens after each hidden state `[..., H]` with log-probabilities over the whole vocabulary.

    Ranks exchange k values, k ids and one logsumexp per row, and merge them by a total order: no broadcast follows.
    """
    shard = topk_from_hidden(hidden.to(head.weight.dtype), head.weight, k, id_offset=head.id_offset)
    values, ids, lse = shard.values, shard.ids, shard.lse
    if head.gather is None:
        return merge_topk(values[None], ids[None], lse[None], k)
    # One message: everything as 32-bit words.
    words = torch.cat((values.view(torch.int32), ids.to(torch.int32), lse[..., None].view(torch.int32)), dim=-1)
    words = head.gather(words.contiguous())
    width = values.shape[-1]
    return merge_topk(
        words[..., :width].contiguous().view(torch.float32),
        words[..., width : 2 * width].long(),
        words[..., 2 * width :].contiguous().view(torch.float64)[..., 0],
        k,
    )


def make_plan(
    hidden: Tensor, roots: Tensor, seq_lens: Tensor, head: Head, budget: int, topk: int
) -> tuple[Tensor, ...]:
    """Build the tree of each request and lay it out; returns the fields of `Plan` in order.

    `hidden` is `[bs, L, H]` for the drafted positions, `roots` `[bs]` the last verified tokens, `seq_lens` `[bs]`.
    """
    best = best_tokens(hidden, head, topk)
    tree = build_tree_batch(best.logp, best.ids, budget, root_tokens=roots)
    return (
        tree.tokens,
        tree.parents,
        tree.n_valid,
        tree_positions(tree.depths, seq_lens),
        ancestor_mask_batch(tree.parents, hidden.shape[1]),
        flat_mask_index(seq_lens, budget + 1),
    )


def walk(tokens: Tensor, parents: Tensor, n_valid: Tensor, chosen: Tensor, depth: int) -> tuple[Tensor]:
    """Walk each tree by the target's choices `[bs, n]`; returns `[bs, 2 * (depth + 1) + 1]`: path, tokens, length.

    Packed, so that one copy brings a round's result to the host.
    """
    zeros: Any = parents
    walks = greedy_walk_batch(TreeBatch(tokens, parents, zeros, zeros, n_valid), chosen, depth)
    return (torch.cat((walks.path, walks.tokens, walks.lengths[:, None]), dim=1),)
