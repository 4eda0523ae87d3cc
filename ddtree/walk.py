"""Walk a verified tree: from the root, follow the child that carries the token the target chooses.

The target alone chooses every token, so the output is the target's for any tree: its greedy text, or samples of
exactly its distribution. The tree only decides how many of the choices one forward pass answers.

A walk over k nodes emits k tokens: the target's choice after each node. The choices after all but the last are the
tokens of the next nodes on the path; the last one is new, and becomes the root of the next round. The cache rows to
keep are those of the k nodes of the path.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.sampling import Sampling, sample_token, sample_tokens
from ddtree.tree import Tree, TreeBatch


@dataclass(frozen=True, slots=True)
class Walk:
    """Hold the nodes visited, root first, and the token emitted after each: two tuples of one length, at least 1."""

    path: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def accepted(self) -> int:
        """Count the draft tokens that were right."""
        return len(self.path) - 1

    def cut(self, count: int) -> Walk:
        """Keep the first `count` emitted tokens and the nodes whose cache rows they need."""
        return Walk(self.path[:count], self.tokens[:count])


@dataclass(frozen=True, slots=True)
class WalkBatch:
    """Hold the walk of each request; entries at and beyond `lengths` are -1."""

    path: Tensor  # [bs, steps] int64, node indices
    tokens: Tensor  # [bs, steps] int64
    lengths: Tensor  # [bs] int64, tokens emitted, at least 1

    def walk(self, index: int) -> Walk:
        """Return request `index` as a `Walk` (copies to the host)."""
        length = int(self.lengths[index])
        return Walk(tuple(self.path[index, :length].tolist()), tuple(self.tokens[index, :length].tolist()))


def greedy_walk(tree: Tree, target_next: Sequence[int]) -> Walk:
    """Walk by `target_next[node]`, the target's best token after each node (one per node of the tree)."""
    return _walk(tree, lambda node: target_next[node])


def sample_walk(tree: Tree, logits: Tensor, sampling: Sampling, seed: int, root_position: int) -> Walk:
    """Walk by draws from the target: `logits [n, V]` holds its logits after each node; only visited nodes are drawn.

    The token emitted after a node of depth d stands at absolute position `root_position + d + 1`, and that position
    and the seed alone decide its noise: plain decoding with the same seed draws the same tokens.
    """
    return _walk(tree, lambda node: sample_token(logits[node], sampling, seed, root_position + tree.depths[node] + 1))


def stop_walk(walk: Walk, stop_tokens: Collection[int], room: int) -> Walk:
    """End the walk after the first stop token (kept) and after at most `room >= 1` tokens."""
    for count, token in enumerate(walk.tokens[:room], 1):
        if token in stop_tokens:
            return walk.cut(count)
    return walk.cut(room)


def greedy_walk_batch(trees: TreeBatch, target_next: Tensor, max_depth: int) -> WalkBatch:
    """Walk all requests by `target_next [bs, n]` in `max_depth + 1` fixed steps, without waiting for the device."""
    return _walk_batch(trees, lambda node, _: target_next.gather(1, node[:, None])[:, 0], max_depth)


def sample_walk_batch(
    trees: TreeBatch,
    logits: Tensor,
    sampling: Sequence[Sampling],
    seeds: Tensor,
    root_positions: Tensor,
    max_depth: int,
) -> WalkBatch:
    """Walk all requests by draws from `logits [bs, n, V]`; token for token what `sample_walk` does for each.

    `seeds` and `root_positions` are int64 `[bs]` on the device. One row per request and step is read.
    """
    row = torch.arange(logits.shape[0], device=logits.device)

    def choose(node: Tensor, depth: int) -> Tensor:
        return sample_tokens(logits[row, node], sampling, seeds, root_positions + depth + 1)

    return _walk_batch(trees, choose, max_depth)


def stop_walk_batch(walks: WalkBatch, stop_tokens: Tensor, room: Tensor) -> WalkBatch:
    """End each walk after its first token in `stop_tokens [s]` (kept) and after at most `room [bs] >= 1` tokens."""
    step = torch.arange(walks.tokens.shape[1], device=walks.tokens.device)
    stops = (walks.tokens[:, :, None] == stop_tokens).any(dim=2)
    first = torch.where(stops, step + 1, walks.tokens.shape[1]).amin(dim=1)
    lengths = torch.minimum(torch.minimum(walks.lengths, first), room)
    live = step < lengths[:, None]
    return WalkBatch(torch.where(live, walks.path, -1), torch.where(live, walks.tokens, -1), lengths)


def _walk(tree: Tree, choose: Callable[[int], int]) -> Walk:
    children = {
        (parent, token): node for node, (parent, token) in enumerate(zip(tree.parents, tree.token_ids, strict=True))
    }
    path, tokens = [0], [choose(0)]
    while (node := children.get((path[-1], tokens[-1]))) is not None:
        path.append(node)
        tokens.append(choose(node))
    return Walk(tuple(path), tuple(tokens))


def _walk_batch(trees: TreeBatch, choose: Callable[[Tensor, int], Tensor], max_depth: int) -> WalkBatch:
    bs, n = trees.tokens.shape
    device = trees.tokens.device
    index = torch.arange(n, device=device)
    # The root has parent -1 and dead nodes get it too: neither is anybody's child.
    parents = torch.where(index < trees.n_valid[:, None], trees.parents, -1)
    node = torch.zeros(bs, dtype=torch.int64, device=device)
    alive = torch.ones(bs, dtype=torch.bool, device=device)
    path, tokens, lives = [], [], []
    for depth in range(max_depth + 1):
        token = choose(node, depth)
        path.append(node)
        tokens.append(token)
        lives.append(alive)
        # Children of a node carry distinct tokens, so at most one column matches.
        match = (parents == node[:, None]) & (trees.tokens == token[:, None])
        alive = alive & match.any(dim=1)
        node = torch.where(alive, match.long().argmax(dim=1), node)
    live = torch.stack(lives, dim=1)
    return WalkBatch(
        torch.where(live, torch.stack(path, dim=1), -1),
        torch.where(live, torch.stack(tokens, dim=1), -1),
        live.sum(dim=1),
    )
