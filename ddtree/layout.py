"""Lay a tree out for a target model: positions and the ancestor mask in the forms that engines want.

A node attends to the whole prefix, to its ancestors and to itself. Its position is that of its depth, not of its index:
siblings share one. The key rows are therefore already rotated for the place where the accepted path ends up.
"""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from ddtree.kernels.native import native_library
from ddtree.tree import Tree, TreeBatch


def tree_positions(depths: Tensor, seq_lens: Tensor | int) -> Tensor:
    """Return absolute positions `depths [..., n] + seq_lens [...]`, where the root stands at position `seq_lens`."""
    return depths + (seq_lens[..., None] if isinstance(seq_lens, Tensor) else seq_lens)


def ancestor_mask(tree: Tree) -> Tensor:
    """Return bool `[n, n]`: row i is True at i and at every ancestor of i."""
    if (library := native_library()) is not None:
        parents = array("q", tree.parents)
        mask = torch.empty((len(tree), len(tree)), dtype=torch.bool)
        library.ddtree_closure(parents.buffer_info()[0], len(tree), mask.data_ptr())
        return mask
    rows: list[int] = []
    for node, parent in enumerate(tree.parents):
        rows.append(1 << node | (rows[parent] if parent >= 0 else 0))
    n = len(rows)
    width = (n + 7) // 8
    packed = torch.frombuffer(bytearray(b"".join([row.to_bytes(width, "little") for row in rows])), dtype=torch.uint8)
    bits = packed.view(n, width, 1) >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.view(n, width * 8)[:, :n].bool()


def ancestor_mask_batch(parents: Tensor, max_depth: int) -> Tensor:
    """Return bool `[bs, n, n]` from `parents [bs, n]` (root -1) in `max_depth` fixed steps, on the device."""
    bs, n = parents.shape
    mask = torch.eye(n, dtype=torch.bool, device=parents.device).repeat(bs, 1, 1)
    up = parents.clamp(min=0)
    above = up
    for _ in range(max_depth):
        mask.scatter_(2, above[:, :, None], True)
        above = up.gather(1, above)
    return mask


def hf_mask(ancestors: Tensor, prefix_len: int, dtype: torch.dtype) -> Tensor:
    """Return the additive mask `[1, 1, n, prefix_len + n]` of transformers: 0 attends, the lowest number does not."""
    n = ancestors.shape[-1]
    mask = torch.zeros((1, 1, n, prefix_len + n), dtype=dtype, device=ancestors.device)
    mask[0, 0, :, prefix_len:].masked_fill_(~ancestors, torch.finfo(dtype).min)
    return mask


def flat_mask(ancestors: Tensor, seq_lens: Tensor, seq_lens_sum: int, *, out: Tensor | None = None) -> Tensor:
    """Return the flat bool mask of SGLang: per request row-major `[n, seq_len + n]`, concatenated; True may attend.

    `ancestors` is `[bs, n, n]`, `seq_lens` is `[bs]` on the device; `seq_lens_sum` is its sum, known to the host, so
    that nothing waits for the device. `out` may be any longer bool buffer. Raises ValueError if it is too short.
    """
    bs, n, _ = ancestors.shape
    size = n * (seq_lens_sum + bs * n)
    if out is None:
        out = torch.empty(size, dtype=torch.bool, device=ancestors.device)
    elif out.numel() < size:
        raise ValueError(f"mask buffer is too short: {out.numel()}, needs {size}")
    flat = out[:size]
    flat.fill_(True)
    flat.scatter_(0, flat_mask_index(seq_lens, n).view(-1), ancestors.reshape(-1))
    return flat


def flat_mask_index(seq_lens: Tensor, n: int) -> Tensor:
    """Return where the `[n, n]` tail of each request lies in the flat mask: int64 `[bs, n, n]`."""
    row = (seq_lens + n).to(torch.int64)
    start = torch.cumsum(n * row, dim=0) - n * row
    node = torch.arange(n, device=seq_lens.device)
    return start[:, None, None] + node[None, :, None] * row[:, None, None] + (row - n)[:, None, None] + node


def pad_tree(tree: Tree, n: int, device: torch.device | str = "cpu") -> TreeBatch:
    """Return one tree as a batch of one, padded to `n` nodes with dead ones. Raises ValueError if it does not fit."""
    live = len(tree)
    if live > n:
        raise ValueError(f"tree of {live} nodes does not fit {n}")
    dead = n - live
    return TreeBatch(
        torch.tensor([[*tree.token_ids, *([tree.token_ids[0]] * dead)]], dtype=torch.int64, device=device),
        torch.tensor([[*tree.parents, *([0] * dead)]], dtype=torch.int64, device=device),
        torch.tensor([[*tree.depths, *([1] * dead)]], dtype=torch.int64, device=device),
        torch.tensor([[*tree.scores, *([float("-inf")] * dead)]], dtype=torch.float32, device=device),
        torch.tensor([live], dtype=torch.int64, device=device),
    )
