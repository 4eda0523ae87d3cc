# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""The rest of a round in Triton: the flat ancestor mask and the walk, one launch each."""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.tree import TreeBatch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

if triton is not None:

    @triton.jit(do_not_specialize=["bs", "n", "max_depth"])
    def _flat_mask_kernel(
        parents_ptr,  # [bs, n] int64
        seq_lens_ptr,  # [bs]
        mask_ptr,  # flat bool, as bytes
        bs,
        n,
        max_depth,
        BS_BLOCK: tl.constexpr,
        N_BLOCK: tl.constexpr,
        PREFIX_BLOCK: tl.constexpr,
    ):
        request = tl.program_id(0)
        query = tl.program_id(1)
        index = tl.arange(0, BS_BLOCK)
        lengths = tl.load(seq_lens_ptr + index, mask=index < bs, other=0).to(tl.int64)
        before = tl.sum(tl.where(index < request, lengths + n, 0), axis=0)
        seq_len = tl.sum(tl.where(index == request, lengths, 0), axis=0)
        row_ptr = mask_ptr + before * n + query * (seq_len + n)

        column = tl.arange(0, PREFIX_BLOCK)
        for start in range(0, seq_len, PREFIX_BLOCK):
            tl.store(row_ptr + start + column, tl.full((PREFIX_BLOCK,), 1, tl.int8), mask=start + column < seq_len)

        key = tl.arange(0, N_BLOCK)
        node = query.to(tl.int64)
        visible = key == node
        for _ in range(max_depth):
            # The root's parent is -1; staying at the root adds nothing.
            node = tl.maximum(tl.load(parents_ptr + request * n + node), 0)
            visible = visible | (key == node)
        tl.store(row_ptr + seq_len + key, visible.to(tl.int8), mask=key < n)

    @triton.jit(do_not_specialize=["n", "steps"])
    def _walk_kernel(
        tokens_ptr,  # [bs, n] int64
        parents_ptr,  # [bs, n] int64
        valid_ptr,  # [bs] int64
        next_ptr,  # [bs, n] int64
        walk_ptr,  # [bs, 2 * steps + 1] int64: path, tokens, length
        n,
        steps,
        N_BLOCK: tl.constexpr,
    ):
        request = tl.program_id(0)
        walk_ptr += request * (2 * steps + 1)
        index = tl.arange(0, N_BLOCK)
        valid = tl.load(valid_ptr + request)
        tokens = tl.load(tokens_ptr + request * n + index, mask=index < n, other=-1)
        parents = tl.load(parents_ptr + request * n + index, mask=index < n, other=-1)
        # Dead nodes are nobody's child.
        parents = tl.where(index < valid, parents, -1)
        node = tl.sum(tl.full((N_BLOCK,), 0, tl.int64), axis=0)
        length = node
        for step in range(steps):
            live = node >= 0
            token = tl.load(next_ptr + request * n + node, mask=live, other=-1)
            tl.store(walk_ptr + step, node)
            tl.store(walk_ptr + steps + step, token)
            length += live.to(tl.int64)
            child = tl.where((parents == node) & (tokens == token), index, -1)
            node = tl.where(live, tl.max(child, axis=0).to(tl.int64), -1)
        tl.store(walk_ptr + 2 * steps, length)


def flat_mask_triton(
    parents: Tensor, seq_lens: Tensor, seq_lens_sum: int, max_depth: int, *, out: Tensor | None = None
) -> Tensor:
    """Return what `flat_mask(ancestor_mask_batch(parents, max_depth), ...)` returns, in one launch."""
    bs, n = parents.shape
    size = n * (seq_lens_sum + bs * n)
    if out is None:
        out = torch.empty(size, dtype=torch.bool, device=parents.device)
    elif out.numel() < size:
        raise ValueError(f"mask buffer is too short: {out.numel()}, needs {size}")
    _flat_mask_kernel[(bs, n)](
        *(parents, seq_lens, out.view(torch.int8), bs, n, max_depth),
        BS_BLOCK=triton.next_power_of_2(bs),
        N_BLOCK=triton.next_power_of_2(n),
        PREFIX_BLOCK=4096,
    )
    return out[:size]


def greedy_walk_triton(trees: TreeBatch, target_next: Tensor, max_depth: int) -> Tensor:
    """Return what `greedy_walk_batch` returns as one tensor, in one launch; `target_next` is int64 `[bs, n]`, contiguous.

    The result is `[bs, 2 * steps + 1]`: path, tokens, length, with `max_depth + 1` steps.
    """
    bs, n = trees.tokens.shape
    steps = max_depth + 1
    walk = torch.empty((bs, 2 * steps + 1), dtype=torch.int64, device=trees.tokens.device)
    _walk_kernel[(bs,)](
        *(trees.tokens, trees.parents, trees.n_valid, target_next, walk, n, steps),
        N_BLOCK=triton.next_power_of_2(n),
        num_warps=1,
    )
    return walk
