"""A toy target and drafter over a small vocabulary: logits are tables, so plain and tree decoding see equal bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.tree import Tree


@dataclass(frozen=True)
class Toy:
    """Hold next-token logits by the last two tokens, `[V, V, V]`: the target's, and a drafter's that blurs them."""

    target: Tensor
    draft: Tensor

    @classmethod
    def make(cls, vocabulary: int, seed: int, sharp: float = 2.0, blur: float = 1.0) -> Toy:
        generator = torch.Generator().manual_seed(seed)
        target = torch.randn(vocabulary, vocabulary, vocabulary, generator=generator) * sharp
        return cls(target, target + torch.randn(target.shape, generator=generator) * blur)

    def logits(self, text: list[int]) -> Tensor:
        """Return the target's logits `[V]` after `text` (at least two tokens)."""
        return self.target[text[-2], text[-1]]

    def tree_logits(self, text: list[int], tree: Tree) -> Tensor:
        """Return the target's logits `[n, V]` after each node: what one masked forward pass would return."""
        before = [text[-2], *(tree.token_ids[parent] for parent in tree.parents[1:])]
        return torch.stack([self.target[a, b] for a, b in zip(before, tree.token_ids, strict=True)])

    def draft_log_probs(self, text: list[int], positions: int) -> Tensor:
        """Return a block drafter's distributions `[L, V]`: it sees the text, and no token between text and guess."""
        probs = torch.softmax(self.draft, dim=-1)
        # The exact marginals of the drafter's own chain, position by position.
        state = torch.zeros(probs.shape[:2])
        state[text[-2], text[-1]] = 1.0
        rows = []
        for _ in range(positions):
            joint = state[:, :, None] * probs
            rows.append(joint.sum(dim=(0, 1)))
            state = joint.sum(dim=0)
        return torch.stack(rows).log()
