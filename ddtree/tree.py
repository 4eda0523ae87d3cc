"""Build the best tree of draft tokens under a node budget.

A block drafter gives one distribution per future position. The tree of at most `budget` nodes that maximises the
expected number of accepted tokens is the one with the `budget` most probable prefixes (DDTree paper, arXiv 2604.12989,
best-first theorem): a prefix is at most as probable as its parent, so the best prefixes always form a tree.

One order rules all builders. Log-probabilities are rounded once to fixed point (`FRACTION_BITS` binary digits of a
nat), so a path's cost is an exact integer sum: no builder can differ by rounding. Nodes are ordered by

    (cost ascending, depth ascending, index of the parent ascending, rank among its siblings ascending)

which puts a parent before its children, and makes the tree for a smaller budget a prefix of the tree for a larger one.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from ctypes import CDLL, addressof, c_int64
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ddtree.kernels.native import native_library

FRACTION_BITS = 20
ONE_NAT = 1 << FRACTION_BITS
# A token less probable than e^-64 can never matter to a tree, and 31 positions of 64 nats still fit 31 bits.
MAX_EDGE = 64 * ONE_NAT
MAX_DEPTH = 31
IMPOSSIBLE = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Tree:
    """Hold one tree as parallel tuples, root first and every parent before its children.

    `parents[0]` is -1, `depths[0]` is 0 and `scores[0]` is 0.0; `scores` are log-probabilities of whole paths (nats).
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    scores: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.token_ids)

    def prefix(self, budget: int) -> Tree:
        """Return the best tree for a smaller budget: the first `budget + 1` nodes."""
        n = budget + 1
        return Tree(self.token_ids[:n], self.parents[:n], self.depths[:n], self.scores[:n])


@dataclass(frozen=True, slots=True)
class TreeBatch:
    """Hold one tree per request, padded to `n = budget + 1` nodes.

    Padding is dead: token of the root, parent 0, depth 1, score -inf. A dead node attends to the root and to itself,
    so no row of the mask is empty; `n_valid` tells the walk where the live nodes end.
    """

    tokens: Tensor  # [bs, n] int64
    parents: Tensor  # [bs, n] int64, root -1
    depths: Tensor  # [bs, n] int64
    scores: Tensor  # [bs, n] float32
    n_valid: Tensor  # [bs] int64, counts the root

    def tree(self, index: int) -> Tree:
        """Return request `index` as a `Tree` without its padding (copies to the host)."""
        n = int(self.n_valid[index])
        return Tree(
            tuple(self.tokens[index, :n].tolist()),
            tuple(self.parents[index, :n].tolist()),
            tuple(self.depths[index, :n].tolist()),
            tuple(self.scores[index, :n].tolist()),
        )


def quantise(log_probs: Tensor) -> Tensor:
    """Return log-probabilities as int32 fixed-point costs; impossible, NaN and below e^-64 become `IMPOSSIBLE`."""
    cost = (log_probs.float() * -float(ONE_NAT)).round_()
    # NaN compares false, so it lands on the impossible side.
    return (
        torch.where(cost <= MAX_EDGE, cost.clamp_(0, MAX_EDGE), float(IMPOSSIBLE))
        .to(torch.int64)
        .clamp_(max=IMPOSSIBLE)
    )


def sort_log_probs(log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Sort dense log-probabilities `[..., V]` into (values, token ids), best first, ties by smaller id."""
    values = torch.nan_to_num(log_probs.float(), nan=-torch.inf, posinf=0.0, neginf=-torch.inf)
    top = torch.sort(values, dim=-1, descending=True, stable=True)
    return top.values, top.indices


def build_tree(log_probs: Tensor, budget: int, *, token_ids: Tensor | None = None, root_token: int = 0) -> Tree:
    """Build the best tree of at most `budget` nodes below the root for one request.

    `log_probs` is `[L, K]`: with `token_ids` `[L, K]` each row holds the K best tokens of a position, best first;
    without, column v is token v and the rows need no order. Exact as long as `K >= min(budget, vocabulary)`. Raises
    ValueError for a negative budget, more than 31 positions, or shapes that differ.
    """
    _check(log_probs, token_ids, budget, 2)
    if token_ids is None:
        log_probs, token_ids = sort_log_probs(log_probs)
    if (library := native_library()) is not None:
        return _build_tree_native(library, log_probs, token_ids, budget, root_token)
    width = min(budget, log_probs.shape[1])
    costs: list[list[int]] = quantise(log_probs[:, :width]).tolist()
    ids: list[list[int]] = token_ids[:, :width].tolist()
    return build_tree_heap(costs, ids, budget, root_token)


def build_tree_heap(
    costs: Sequence[Sequence[int]], ids: Sequence[Sequence[int]], budget: int, root_token: int = 0
) -> Tree:
    """Build the best tree from fixed-point costs `[L][K]`, each row ascending, by best-first search."""
    tokens, parents, depths, spent = [root_token], [-1], [0], [0]
    limit = len(costs)
    # An entry is the best child not yet taken of one node: (cost, depth, parent, rank) is the order of the module.
    heap: list[tuple[int, int, int, int]] = []
    if limit and budget and costs[0] and costs[0][0] < IMPOSSIBLE:
        heap.append((costs[0][0], 1, 0, 0))
    while heap and len(tokens) <= budget:
        cost, depth, parent, rank = heap[0]
        row = costs[depth - 1]
        node = len(tokens)
        tokens.append(ids[depth - 1][rank])
        parents.append(parent)
        depths.append(depth)
        spent.append(cost)
        if rank + 1 < len(row) and row[rank + 1] < IMPOSSIBLE:
            heapq.heapreplace(heap, (spent[parent] + row[rank + 1], depth, parent, rank + 1))
        else:
            heapq.heappop(heap)
        if depth < limit and costs[depth][0] < IMPOSSIBLE:
            heapq.heappush(heap, (cost + costs[depth][0], depth + 1, node, 0))
    return Tree(tuple(tokens), tuple(parents), tuple(depths), tuple([cost / -ONE_NAT for cost in spent]))


def _build_tree_native(library: CDLL, log_probs: Tensor, token_ids: Tensor, budget: int, root_token: int) -> Tree:
    if log_probs.is_cuda or log_probs.dtype is not torch.float32:
        log_probs = log_probs.to("cpu", torch.float32)
    if token_ids.is_cuda or token_ids.dtype is not torch.int64:
        token_ids = token_ids.to("cpu", torch.int64)
    log_probs, token_ids = log_probs.contiguous(), token_ids.contiguous()
    limit, width = log_probs.shape
    n = budget + 1
    # Four rows of output (token, parent, depth, cost) and two for the heap. At a budget of 64 a tensor would cost more
    # than the search.
    memory = (c_int64 * (6 * n))()
    base, row = addressof(memory), 8 * n
    memory[0], memory[n] = root_token, -1
    count = library.ddtree_build(
        log_probs.data_ptr(), token_ids.data_ptr(), limit, width, budget, ONE_NAT, MAX_EDGE, base, row
    )
    tokens, parents, depths, costs = (memory[start : start + count] for start in range(0, 4 * n, n))
    return Tree(tuple(tokens), tuple(parents), tuple(depths), tuple([cost / -ONE_NAT for cost in costs]))


def build_tree_batch(top_logp: Tensor, top_ids: Tensor, budget: int, *, root_tokens: Tensor | None = None) -> TreeBatch:
    """Build the best tree for every request of a batch with fixed shapes and no data-dependent control flow.

    `top_logp` and `top_ids` are `[bs, L, K]`, best first along K. Depth by depth it keeps the `budget` best prefixes;
    as both prefixes and tokens are sorted, only pairs (prefix i, rank j) with (i+1)(j+1) <= budget can be among them.
    Can be captured in a CUDA graph after one warm-up call. Raises ValueError as `build_tree`.
    """
    _check(top_logp, top_ids, budget, 3)
    bs, limit, _ = top_logp.shape
    device = top_logp.device
    width = max(1, min(budget, top_logp.shape[2]))
    if root_tokens is None:
        root_tokens = torch.zeros(bs, dtype=torch.int64, device=device)
    if limit == 0 or budget == 0:
        return _finish([], [], [], root_tokens, budget)
    costs = quantise(top_logp[:, :, :width])
    ids = top_ids[:, :, :width].to(torch.int64)
    prefix_of, rank_of = _staircase(budget, width, device)
    kept = torch.full((bs, budget), IMPOSSIBLE, dtype=torch.int64, device=device)
    kept[:, 0] = 0
    all_costs, all_parents, all_tokens = [], [], []
    for depth in range(limit):
        sums = (kept[:, prefix_of] + costs[:, depth, rank_of]).clamp_(max=IMPOSSIBLE)
        # Candidates stand in (prefix, rank) order, so a stable sort leaves ties in the order of the module.
        best = torch.sort(sums, dim=1, stable=True)
        chosen = best.indices[:, :budget]
        kept = best.values[:, :budget]
        if chosen.shape[1] < budget:
            pad = budget - chosen.shape[1]
            kept = torch.nn.functional.pad(kept, (0, pad), value=IMPOSSIBLE)
            chosen = torch.nn.functional.pad(chosen, (0, pad))
        all_costs.append(kept)
        all_parents.append(prefix_of[chosen])
        all_tokens.append(ids[:, depth].gather(1, rank_of[chosen]))
    return _finish(all_costs, all_parents, all_tokens, root_tokens, budget)


def tree_hash(batch: TreeBatch) -> Tensor:
    """Hash the live nodes of each tree to one int64 `[bs]`, so that ranks can compare trees with one all-reduce."""
    n = batch.tokens.shape[1]
    position = torch.arange(n, device=batch.tokens.device)
    live = position < batch.n_valid[:, None]
    # Odd 64-bit constants; wrap-around multiplication is what we want.
    word = (batch.tokens + 1) * -7046029254386353131 + (batch.parents + 2) * -4417276706812531889 + batch.depths
    word = (word ^ (word >> 29)) * (2 * position + 1) * -49064778989728563
    return torch.where(live, word ^ (word >> 32), 0).sum(dim=1)


@lru_cache(maxsize=64)
def _staircase(budget: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    pairs = [(i, j) for i in range(budget) for j in range(min(width, budget // (i + 1)))]
    both = torch.tensor(pairs, dtype=torch.int64, device=device).reshape(-1, 2)
    return both[:, 0].contiguous(), both[:, 1].contiguous()


def _finish(
    costs: list[Tensor], parents: list[Tensor], tokens: list[Tensor], root_tokens: Tensor, budget: int
) -> TreeBatch:
    """Pick the `budget` best of all depths and rename the parents to positions in the final order."""
    bs, device = root_tokens.shape[0], root_tokens.device
    n = budget + 1
    out_tokens = root_tokens.to(torch.int64)[:, None].repeat(1, n)
    out_parents = torch.zeros((bs, n), dtype=torch.int64, device=device)
    out_parents[:, 0] = -1
    out_depths = torch.ones((bs, n), dtype=torch.int64, device=device)
    out_depths[:, 0] = 0
    out_scores = torch.full((bs, n), -torch.inf, dtype=torch.float32, device=device)
    out_scores[:, 0] = 0.0
    if not costs:
        return TreeBatch(
            out_tokens, out_parents, out_depths, out_scores, torch.ones_like(root_tokens, dtype=torch.int64)
        )
    best = torch.sort(torch.cat(costs, dim=1), dim=1, stable=True)
    chosen, cost = best.indices[:, :budget], best.values[:, :budget]
    # Where each of the L * budget prefixes stands in the final order; the root is 0.
    place = torch.empty_like(best.indices)
    place.scatter_(1, best.indices, torch.arange(1, best.indices.shape[1] + 1, device=device).expand_as(place))
    depth = torch.div(chosen, budget, rounding_mode="floor")
    above = torch.cat(parents, dim=1).gather(1, chosen) + (depth - 1) * budget
    parent = torch.where(depth > 0, place.gather(1, above.clamp(min=0)), 0)
    live = cost < IMPOSSIBLE
    out_tokens[:, 1:] = torch.where(live, torch.cat(tokens, dim=1).gather(1, chosen), out_tokens[:, 1:])
    out_parents[:, 1:] = torch.where(live, parent, 0)
    out_depths[:, 1:] = torch.where(live, depth + 1, 1)
    # Costs have up to 31 bits: divide in float64, then round once, as the heap form does.
    score = (cost.double() / -float(ONE_NAT)).float()
    out_scores[:, 1:] = torch.where(live, score, -torch.inf)
    return TreeBatch(out_tokens, out_parents, out_depths, out_scores, live.sum(dim=1) + 1)


def _check(log_probs: Tensor, token_ids: Tensor | None, budget: int, dims: int) -> None:
    if log_probs.dim() != dims:
        raise ValueError(f"log-probabilities must have {dims} dimensions: {tuple(log_probs.shape)}")
    if token_ids is not None and token_ids.shape != log_probs.shape:
        raise ValueError(
            f"token ids and log-probabilities differ in shape: {tuple(token_ids.shape)}, {tuple(log_probs.shape)}"
        )
    if budget < 0:
        raise ValueError(f"budget must not be negative: {budget}")
    if log_probs.shape[-2] > MAX_DEPTH:
        raise ValueError(f"at most {MAX_DEPTH} positions can be drafted: {log_probs.shape[-2]}")
