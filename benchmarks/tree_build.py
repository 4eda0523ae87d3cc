"""Time tree builders and top-k side by side in one run and print markdown tables.

    python benchmarks/tree_build.py [--check CASES] [--out FILE]

The yardstick is the straightforward builder of the DDTree reference, written anew: one heap of rank tuples, then the
visibility matrix row by row. With a CUDA device the GPU forms run too, each captured in a CUDA graph.
"""

from __future__ import annotations

import argparse
import heapq
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ddtree.layout import ancestor_mask, ancestor_mask_batch, flat_mask
from ddtree.tree import TreeBatch, build_tree, build_tree_batch, build_tree_heap, quantise, sort_log_probs
from ddtree.walk import greedy_walk_batch

POSITIONS, VOCABULARY = 15, 151_936
BATCHES, BUDGETS = (1, 8, 16, 64), (16, 32, 64, 128, 256, 512, 1024)


def reference_build(logp: np.ndarray, ids: np.ndarray, budget: int) -> tuple[Tensor, Tensor, list[int], Tensor]:
    """Build as the reference does: path tuples in the heap, numpy scalars, a dict a node, visibility by rows."""
    limit, width = logp.shape
    tokens, depths = np.empty(budget, np.int64), np.empty(budget, np.int64)
    parents = np.empty(budget + 1, np.int32)
    parents[0] = -1
    children: list[dict[int, int]] = [{}]
    first = float(logp[0, 0])
    heap = [(-first, (0,), 0, 1, 0, first)]
    count = 0
    while heap and count < budget:
        _, ranks, parent, depth, rank, score = heapq.heappop(heap)
        token = int(ids[depth - 1, rank])
        tokens[count], depths[count] = token, depth
        count += 1
        parents[count] = parent
        children.append({})
        children[parent][token] = count
        if rank + 1 < width:
            sibling = score - float(logp[depth - 1, rank]) + float(logp[depth - 1, rank + 1])
            heapq.heappush(heap, (-sibling, (*ranks[:-1], rank + 1), parent, depth, rank + 1, sibling))
        if depth < limit:
            child = score + float(logp[depth, 0])
            heapq.heappush(heap, (-child, (*ranks, 0), count, depth + 1, 0, child))
    n = count + 1
    visible = np.zeros((n, n), np.bool_)
    visible[0, 0] = True
    for node in range(1, n):
        visible[node, :node] = visible[int(parents[node]), :node]
        visible[node, node] = True
    return torch.from_numpy(tokens), torch.from_numpy(depths), parents.tolist(), torch.from_numpy(visible)


def draw(bs: int, width: int, seed: int = 0, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Draw sorted log-probabilities `[bs, 15, width]` like a drafter's: sure near the root, vague far from it."""
    generator = torch.Generator().manual_seed(seed)
    sharp = torch.linspace(4.0, 2.0, POSITIONS)[None, :, None]
    logits = torch.randn(bs, POSITIONS, max(width, 4096), generator=generator) * sharp
    values, ids = sort_log_probs(torch.log_softmax(logits, dim=-1))
    return values[..., :width].contiguous().to(device), ids[..., :width].contiguous().to(device)


def cpu_times(*works: Callable[[], object], budget_s: float = 0.4) -> list[float]:
    """Return the median time of each of `works` in microseconds, measured in turn so that a busy machine hits all."""
    for work in works:
        work()
    times: list[list[float]] = [[] for _ in works]
    end = time.perf_counter() + budget_s
    while len(times[0]) < 5 or (time.perf_counter() < end and len(times[0]) < 2000):
        for work, own in zip(works, times, strict=True):
            start = time.perf_counter()
            work()
            own.append(time.perf_counter() - start)
    return [statistics.median(own) * 1e6 for own in times]


def cpu_table() -> list[str]:
    """Compare the CPU forms, one request and a loop over a batch (the reference has no batch form)."""
    rows = [
        "| batch | budget | reference, µs | Python heap, µs | `build_tree`, µs | gain, Python | gain, `build_tree` |",
        "|---|---|---|---|---|---|---|",
    ]
    for bs in BATCHES:
        for budget in BUDGETS:
            logp, ids = draw(bs, budget)
            lists = [(quantise(logp[i]).tolist(), ids[i].tolist()) for i in range(bs)]
            arrays = [(logp[i].numpy(), ids[i].numpy()) for i in range(bs)]
            tensors = [(logp[i], ids[i]) for i in range(bs)]

            def reference(arrays: list = arrays, budget: int = budget) -> None:
                for one, names in arrays:
                    reference_build(one, names, budget)

            def python(lists: list = lists, budget: int = budget) -> None:
                for one, names in lists:
                    ancestor_mask(build_tree_heap(one, names, budget))

            def best(tensors: list = tensors, budget: int = budget) -> None:
                for one, names in tensors:
                    ancestor_mask(build_tree(one, budget, token_ids=names))

            a, b, c = cpu_times(reference, python, best)
            rows.append(f"| {bs} | {budget} | {a:.0f} | {b:.0f} | {c:.0f} | {a / b:.1f}x | {a / c:.1f}x |")
    return rows


def graph_time(works: list[Callable[[], object]], repeat: int = 5) -> float:
    """Capture `works` (different inputs, one after another) in a CUDA graph; return the median µs of one of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for work in works[:2]:
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        keep = [work() for _ in range(repeat) for work in works]
    times = []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (repeat * len(works)))
    del keep
    return statistics.median(times[2:])


def gpu_tree_table() -> list[str]:
    """Compare the reference with its copies, the staircase in a graph and the kernel in a graph."""
    from ddtree.kernels.tree_triton import build_tree_triton

    rows = [
        "| batch | budget | reference + copies, µs | staircase (torch, graph), µs | kernel (graph), µs | gain |",
        "|---|---|---|---|---|---|",
    ]
    for bs in BATCHES:
        for budget in BUDGETS:
            logp, ids = draw(bs, budget, device="cuda")
            roots = torch.zeros(bs, dtype=torch.int64, device="cuda")

            def reference(logp: Tensor = logp, ids: Tensor = ids, budget: int = budget) -> None:
                host, names = logp.cpu().numpy(), ids.cpu().numpy()
                for one, own in zip(host, names, strict=True):
                    for tensor in reference_build(one, own, budget):
                        if isinstance(tensor, Tensor):
                            tensor.cuda(non_blocking=True)
                torch.cuda.synchronize()

            def staircase(logp: Tensor = logp, ids: Tensor = ids, budget: int = budget) -> TreeBatch:
                return build_tree_batch(logp, ids, budget)

            def kernel(
                logp: Tensor = logp, ids: Tensor = ids, budget: int = budget, roots: Tensor = roots
            ) -> TreeBatch:
                return build_tree_triton(logp, ids, budget, roots)

            (a,) = cpu_times(reference, budget_s=0.1)
            b, c = graph_time([staircase]), graph_time([kernel])
            rows.append(f"| {bs} | {budget} | {a:.0f} | {b:.0f} | {c:.1f} | {a / c:.0f}x |")
    return rows


def copy_bandwidth() -> float:
    """Measure bytes per second of a large copy by a kernel (the copy engine is slower), read plus written."""
    source = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    micro = graph_time([lambda: torch.add(source, 1.0, out=target)], repeat=2)
    return 2 * source.nbytes / (micro * 1e-6)


def gpu_topk_table(bandwidth: float) -> list[str]:
    """Compare torch.topk + logsumexp with the two-launch kernel, against the time to read the logits once."""
    from ddtree.kernels.topk_triton import shard_topk_triton

    rows = [
        "| batch | k | dtype | read floor, µs | torch, µs | kernel, µs | kernel / floor |",
        "|---|---|---|---|---|---|---|",
    ]
    for dtype in (torch.float32, torch.bfloat16):
        for bs in BATCHES:
            # Several inputs in turn, together larger than the L2, so that each is read from memory.
            size = bs * POSITIONS * VOCABULARY * dtype.itemsize
            inputs = [
                torch.randn(bs * POSITIONS, VOCABULARY, device="cuda").mul_(3).to(dtype)
                for _ in range(max(2, min(24, 200_000_000 // size)))
            ]
            floor = size / bandwidth * 1e6
            for k in (16, 64, 256, 1024):
                plain = [lambda x=x, k=k: (torch.topk(x, k), torch.logsumexp(x.float(), -1)) for x in inputs]
                fused = [lambda x=x, k=k: shard_topk_triton(x, k) for x in inputs]
                a, b = graph_time(plain, 1), graph_time(fused, 1)
                name = str(dtype).removeprefix("torch.")
                rows.append(f"| {bs} | {k} | {name} | {floor:.1f} | {a:.0f} | {b:.1f} | {b / floor:.1f}x |")
    return rows


def gpu_round_table() -> list[str]:
    """Compare mask and walk, torch forms and kernels, both in graphs."""
    from ddtree.kernels.round_triton import flat_mask_triton, greedy_walk_triton

    rows = [
        "| batch | budget | context | mask torch, µs | mask kernel, µs | walk torch, µs | walk kernel, µs |",
        "|---|---|---|---|---|---|---|",
    ]
    for bs, budget, context in ((1, 64, 2048), (1, 256, 32768), (16, 16, 2048), (16, 256, 2048), (64, 64, 2048)):
        logp, ids = draw(bs, budget, device="cuda")
        trees = build_tree_batch(logp, ids, budget)
        lengths = torch.full((bs,), context, device="cuda")
        follow = trees.tokens.roll(-1, 1).contiguous()
        total = bs * context

        def mask(trees: TreeBatch = trees, lengths: Tensor = lengths, total: int = total) -> Tensor:
            return flat_mask(ancestor_mask_batch(trees.parents, POSITIONS), lengths, total)

        def mask_kernel(trees: TreeBatch = trees, lengths: Tensor = lengths, total: int = total) -> Tensor:
            return flat_mask_triton(trees.parents, lengths, total, POSITIONS)

        def walk(trees: TreeBatch = trees, follow: Tensor = follow) -> object:
            return greedy_walk_batch(trees, follow, POSITIONS)

        def walk_kernel(trees: TreeBatch = trees, follow: Tensor = follow) -> object:
            return greedy_walk_triton(trees, follow, POSITIONS)

        times = [graph_time([work]) for work in (mask, mask_kernel, walk, walk_kernel)]
        rows.append(f"| {bs} | {budget} | {context} | " + " | ".join(f"{one:.1f}" for one in times) + " |")
    return rows


def main() -> None:
    """Run what this machine can run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", type=int, default=0, metavar="CASES", help="first compare GPU and CPU forms")
    parser.add_argument("--gpu-only", action="store_true", help="leave the CPU table out")
    parser.add_argument("--out", type=Path, help="also write the tables here")
    options = parser.parse_args()
    lines: list[str] = []

    def say(*more: str) -> None:
        lines.extend(more)
        print("\n".join(more), flush=True)
        if options.out:
            options.out.write_text("\n".join(lines) + "\n")

    say(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {POSITIONS} positions", "")
    if torch.cuda.is_available():
        import triton

        say(f"GPU: {torch.cuda.get_device_name()}, triton {triton.__version__}", "")
        if options.check:
            from tree_check import check

            # Every block size is a kernel to compile: share that out.
            jobs, context = min(8, options.check), multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(jobs, mp_context=context) as pool:
                trees = sum(pool.map(check, [options.check // jobs] * jobs, range(jobs)))
            say(f"{options.check // jobs * jobs} random batches, {trees} trees: every kernel equals its CPU form", "")
        bandwidth = copy_bandwidth()
        say(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s", "")
        say("### Trees on the GPU", "", *gpu_tree_table(), "")
        say("### Top-k and logsumexp", "", *gpu_topk_table(bandwidth), "")
        say("### Mask and walk", "", *gpu_round_table(), "")
    if not options.gpu_only:
        say("### Trees on the CPU, mask included", "", *cpu_table())


if __name__ == "__main__":
    main()
