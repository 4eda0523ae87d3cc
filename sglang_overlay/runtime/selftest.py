"""Prove at start-up that the target attends along the tree, and not down a chain.

Several attention backends drop the tree's mask without an error: under a CUDA graph one of them decides at capture time
whether a mask exists at all. The text would stay plausible and be wrong. So before serving, one known tree is verified
three times: a changed token may move the logits of its descendants, and of nobody else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ddtree.layout import pad_tree
from ddtree.tree import Tree
from sglang_overlay.runtime.plan import Plan

# Two branches below the root, each with a child, in breadth-first order: 1 and 2, then 3 below 1 and 4 below 2.
PARENTS = (-1, 0, 0, 1, 2)
DEPTHS = (0, 1, 1, 2, 2)
PREFIX_LENGTHS = (5, 9)
# What may leak from one branch to the other, relative to what a real ancestor moves: rounding in a batched kernel.
TOLERANCE = 0.02

Verify = Callable[[Plan, Sequence[int]], Tensor]


class SelfTestFailed(RuntimeError):
    """The verify forward does not attend along the tree."""


def self_test(verify: Verify, width: int, vocab: int, batch: int, device: torch.device | str, what: str) -> None:
    """Verify the tree with each branch changed in turn.

    `verify` takes a plan and the prefix lengths and returns logits `[batch, width, V]`. Raises SelfTestFailed naming
    `what`, the backend and mode under test. With a width below 3 every tree is a chain, so there is nothing to prove.
    """
    live = min(width, len(PARENTS))
    if live < 3:
        return
    lengths = PREFIX_LENGTHS[:batch]
    tokens = [1 + 7 * node % (vocab - 2) for node in range(live)]
    base = verify(_plan(tokens, width, lengths, device), lengths)
    for changed in range(1, live):
        other = list(tokens)
        other[changed] = (tokens[changed] + 3) % (vocab - 1) + 1
        moved = (verify(_plan(other, width, lengths, device), lengths) - base).abs().amax(dim=2)
        family = [node for node in range(live) if changed in _line(node)]
        must = moved[:, family].amin()
        must_not = moved[:, [node for node in range(live) if node not in family]].amax()
        if not torch.isfinite(moved[:, :live]).all() or must <= 0:
            raise SelfTestFailed(_message(what, f"a changed token does not reach its own logits or its child's ({must:.3g})"))
        if must_not > TOLERANCE * must:
            detail = f"a changed token moves logits outside its branch by {must_not:.3g}, inside by {must:.3g}"
            raise SelfTestFailed(_message(what, detail))


def _line(node: int) -> list[int]:
    line = []
    while node >= 0:
        line.append(node)
        node = PARENTS[node]
    return line


def _plan(tokens: Sequence[int], width: int, lengths: Sequence[int], device: torch.device | str) -> Plan:
    live = len(tokens)
    tree = Tree(tuple(tokens), PARENTS[:live], DEPTHS[:live], (0.0,) * live)
    padded = pad_tree(tree, width, device)
    bs = len(lengths)
    seq_lens = torch.tensor(lengths, dtype=torch.int64, device=device)
    return Plan(
        padded.tokens.repeat(bs, 1),
        padded.parents.repeat(bs, 1),
        padded.n_valid.repeat(bs),
        padded.depths.repeat(bs, 1) + seq_lens[:, None],
        max(DEPTHS),
    )


def _message(what: str, detail: str) -> str:
    return (
        f"DDTREE start-up self-test failed ({what}): {detail}; the tree mask is not in effect, so answers would be "
        "wrong: use `--attention-backend triton`, or leave speculation out"
    )
