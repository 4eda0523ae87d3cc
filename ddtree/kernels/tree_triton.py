# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Build the trees of a batch in one Triton launch, one program a request: the order of ddtree/tree.py, bit for bit.

Best-first search needs one minimum a node. Every node keeps one candidate, its best child not yet taken, as one int64

    cost (31 bits) | depth (5) | parent (13) | rank (13)

whose order is the order of nodes. All candidates live in registers; a step takes the minimum, adds a precomputed number
to turn it into the parent's next child, and puts the new node's first child into the new node's place.
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

# Bits of the key, low to high: rank, parent, depth, cost.
MAX_NODES = 1 << 13

if triton is not None:

    @triton.jit
    def _edge_cost(log_prob, ONE_NAT: tl.constexpr, MAX_EDGE: tl.constexpr):
        # Adding 1.5 * 2^52 leaves a float64 no fraction bits, so the hardware rounds to an integer, ties to even.
        magic = 6755399441055744.0
        exact = log_prob.to(tl.float32).to(tl.float64) * (-1.0 * ONE_NAT)
        cost = (exact + magic) - magic
        possible = cost <= MAX_EDGE  # false for NaN too
        cost = tl.where(possible, tl.maximum(cost, 0.0), 0.0).to(tl.int64)
        return tl.where(possible, cost, 1 << 31)

    # Sizes that vary by request must not make a new kernel each.
    @triton.jit(do_not_specialize=["limit", "budget", "K"])
    def _tree_kernel(
        logp_ptr,  # [bs, L, K]
        ids_ptr,  # [bs, L, K] int64
        root_ptr,  # [bs] int64
        step_ptr,  # [bs, L, K] int64 scratch: what turns a candidate into its next sibling
        first_ptr,  # [bs, 32] int64 scratch: the first candidate of each depth
        key_ptr,  # [bs, n] int64 scratch
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
        dead = tl.full((), 1 << 62, tl.int64)

        rank = tl.arange(0, K_BLOCK)
        for above in range(limit):
            row = logp_ptr + above * stride_depth
            here = _edge_cost(tl.load(row + rank, mask=rank < K, other=float("-inf")), ONE_NAT, MAX_EDGE)
            after = _edge_cost(tl.load(row + rank + 1, mask=rank + 1 < K, other=float("-inf")), ONE_NAT, MAX_EDGE)
            turn = tl.where(after < (1 << 31), ((after - here) << 31) + 1, dead)
            tl.store(step_ptr + above * K + rank, turn, mask=rank < K)
            start = tl.where(here < (1 << 31), (here << 31) + ((above + 1) << 26), dead)
            tl.store(first_ptr + above + rank, start, mask=rank == 0)
        # A child of the deepest nodes does not exist.
        tl.store(first_ptr + limit, dead)
        tl.debug_barrier()

        slot = tl.arange(0, SLOTS)
        frontier = tl.where(slot == 0, tl.load(first_ptr), dead)
        for number in range(1, budget + 1):
            best = tl.min(frontier, axis=0)
            tl.store(key_ptr + number, best)
            alive = best < dead
            parent = (best >> 13) & 0x1FFF
            level = (best >> 26) & 31
            step = tl.load(step_ptr + (level - 1) * K + (best & 0x1FFF), mask=alive, other=0)
            first = tl.load(first_ptr + level, mask=alive, other=0)
            child = ((best >> 31) << 31) + first + (number << 13)
            frontier = tl.where((slot == parent) & alive, best + step, frontier)
            frontier = tl.where((slot == number) & alive, tl.minimum(child, dead), frontier)
        tl.debug_barrier()

        node = tl.arange(0, N_BLOCK)
        inner = (node > 0) & (node < n)
        key = tl.load(key_ptr + node, mask=inner, other=0)
        live = inner & (key < dead)
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
    scratch = torch.empty(bs * (limit * width + 32 + n), dtype=torch.int64, device=device)
    step, first, key = scratch.split([bs * limit * width, bs * 32, bs * n])
    tokens, parents, depths = torch.empty((3, bs, n), dtype=torch.int64, device=device).unbind(0)
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
        # One warp needs no barrier for its minimum; beyond 8 candidates a thread more warps pay.
        num_warps=max(1, min(8, slots // 256)),
    )
    return TreeBatch(tokens, parents, depths, scores, valid)
