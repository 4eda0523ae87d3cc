# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Build the trees of a batch in one Triton launch, one program a request: the order of ddtree/tree.py, bit for bit.

Best-first search needs one minimum a node. Every node keeps one candidate, its best child not yet taken, as two int32:
its cost, and what breaks ties, depth (5 bits), parent (13), rank (13). All candidates live in registers. A step takes
the least cost (one `redux` a warp), among equals the least tie-breaker, turns that candidate into the parent's next
child by a precomputed difference, and puts the new node's first child into the new node's place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.tree import MAX_EDGE, ONE_NAT, TreeBatch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

# Parents have 13 bits.
MAX_NODES = 1 << 13

if triton is not None:

    @triton.jit
    def _edge_cost(log_prob, ONE_NAT: tl.constexpr, MAX_EDGE: tl.constexpr):
        # Adding 1.5 * 2^52 leaves a float64 no fraction bits, so the hardware rounds to an integer, ties to even.
        magic = 6755399441055744.0
        exact = log_prob.to(tl.float32).to(tl.float64) * (-1.0 * ONE_NAT)
        cost = (exact + magic) - magic
        possible = cost <= MAX_EDGE  # false for NaN too
        return tl.where(possible, tl.maximum(cost, 0.0), 2147483647.0).to(tl.int32)

    # Sizes that vary by request must not make a new kernel each.
    @triton.jit(do_not_specialize=["limit", "budget", "K"])
    def _tree_kernel(
        logp_ptr,  # [bs, L, K]
        ids_ptr,  # [bs, L, K] int64
        root_ptr,  # [bs] int64
        step_ptr,  # [bs, L, K] int32 scratch: from the cost of a candidate to that of its next sibling
        first_ptr,  # [bs, 32] int32 scratch: the cost of the best token of each position
        key_ptr,  # [bs, n] int64 scratch: the nodes in order, cost << 31 | depth << 26 | parent << 13 | rank
        tokens_ptr,  # [bs, n] int64 and so on: the TreeBatch
        parents_ptr,
        depths_ptr,
        scores_ptr,
        valid_ptr,
        stride_batch,
        stride_depth,
        ids_stride_batch,
        ids_stride_depth,
        limit,
        budget,
        K,
        K_BLOCK: tl.constexpr,
        SLOTS: tl.constexpr,
        N_BLOCK: tl.constexpr,
        ONE_NAT: tl.constexpr,
        MAX_EDGE: tl.constexpr,
    ):
        request = tl.program_id(0).to(tl.int64)
        n = budget + 1
        logp_ptr += request * stride_batch
        ids_ptr += request * ids_stride_batch
        step_ptr += request * limit * K
        first_ptr += request * 32
        key_ptr += request * n
        none: tl.constexpr = 2147483647
        dead = tl.full((), none, tl.int32)

        rank = tl.arange(0, K_BLOCK)
        for above in range(limit):
            row = logp_ptr + above * stride_depth
            here = _edge_cost(tl.load(row + rank, mask=rank < K, other=float("-inf")), ONE_NAT, MAX_EDGE)
            after = _edge_cost(tl.load(row + rank + 1, mask=rank + 1 < K, other=float("-inf")), ONE_NAT, MAX_EDGE)
            tl.store(step_ptr + above * K + rank, tl.where(after == none, none, after - here), mask=rank < K)
            tl.store(first_ptr + above + rank, here, mask=rank == 0)
        # A child of the deepest nodes does not exist.
        tl.store(first_ptr + limit, dead)
        tl.debug_barrier()

        slot = tl.arange(0, SLOTS)
        cost = tl.where(slot == 0, tl.load(first_ptr), none)
        tie = tl.full((SLOTS,), 1 << 26, tl.int32)
        for number in range(1, budget + 1):
            least = tl.min(cost, axis=0)
            best = tl.min(tl.where(cost == least, tie, none), axis=0)
            tl.store(key_ptr + number, (least.to(tl.int64) << 31) | best.to(tl.int64))
            alive = least < none
            level = best >> 26
            step = tl.load(step_ptr + (level - 1) * K + (best & 0x1FFF), mask=alive, other=none)
            first = tl.load(first_ptr + level, mask=alive, other=none)
            own = (slot == ((best >> 13) & 0x1FFF)) & alive
            cost = tl.where(own, tl.where(step == none, none, least + step), cost)
            tie = tl.where(own, best + 1, tie)
            new = slot == number
            cost = tl.where(new, tl.where(first == none, none, least + first), cost)
            tie = tl.where(new, ((level + 1) << 26) | (number << 13), tie)
        tl.debug_barrier()

        node = tl.arange(0, N_BLOCK)
        inner = (node > 0) & (node < n)
        key = tl.load(key_ptr + node, mask=inner, other=0)
        live = inner & ((key >> 31) < none)
        depth = (key >> 26) & 31
        root = tl.load(root_ptr + request)
        token = tl.load(ids_ptr + (depth - 1) * ids_stride_depth + (key & 0x1FFF), mask=live, other=0)
        score = ((key >> 31).to(tl.float64) * (-1.0 / ONE_NAT)).to(tl.float32)
        out = request * n + node
        tl.store(tokens_ptr + out, tl.where(live, token, root), mask=node < n)
        tl.store(parents_ptr + out, tl.where(node == 0, -1, tl.where(live, (key >> 13) & 0x1FFF, 0)), mask=node < n)
        tl.store(depths_ptr + out, tl.where(node == 0, 0, tl.where(live, depth, 1)), mask=node < n)
        tl.store(scores_ptr + out, tl.where(node == 0, 0.0, tl.where(live, score, float("-inf"))), mask=node < n)
        tl.store(valid_ptr + request, tl.sum(live.to(tl.int64), axis=0) + 1)


def build_tree_triton(top_logp: Tensor, top_ids: Tensor, budget: int, root_tokens: Tensor) -> TreeBatch:
    """Build what `build_tree_batch` builds, in one launch; `[bs, L, K]` inputs with unit stride along K.

    Raises ValueError for a budget of 0 or beyond 8191; the caller checks shapes.
    """
    bs, limit, width = top_logp.shape
    if not 0 < budget < MAX_NODES:
        raise ValueError(f"the kernel takes budgets from 1 to {MAX_NODES - 1}: {budget}")
    width = min(width, budget)
    n = budget + 1
    device = top_logp.device
    step, first = torch.empty(bs * (limit * width + 32), dtype=torch.int32, device=device).split(
        [bs * limit * width, bs * 32]
    )
    tokens, parents, depths, key = torch.empty((4, bs, n), dtype=torch.int64, device=device).unbind(0)
    scores = torch.empty((bs, n), dtype=torch.float32, device=device)
    valid = torch.empty(bs, dtype=torch.int64, device=device)
    slots = triton.next_power_of_2(budget)
    _tree_kernel[(bs,)](
        *(top_logp, top_ids, root_tokens, step, first, key, tokens, parents, depths, scores, valid),
        *(top_logp.stride(0), top_logp.stride(1), top_ids.stride(0), top_ids.stride(1), limit, budget, width),
        K_BLOCK=triton.next_power_of_2(width),
        SLOTS=slots,
        N_BLOCK=triton.next_power_of_2(n),
        ONE_NAT=ONE_NAT,
        MAX_EDGE=MAX_EDGE,
        # One warp needs no barrier for its minimum, and wins up to 512 candidates (measured on an H200).
        num_warps=1 if slots <= 512 else min(8, slots // 256),
    )
    return TreeBatch(tokens, parents, depths, scores, valid)
