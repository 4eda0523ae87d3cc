"""Time one layer's attention of a verify forward on a GPU with FA3: a chain, a tree as SGLang attends to it, a tree as we do.

    python benchmarks/tree_attention.py [--json OUT] [--layers 32]

All forms run in one CUDA graph each of so many layers, interleaved, on the same cache; before that, both trees are compared with
float32 attention under the ancestor mask. Needs `sgl_kernel` of SGLang 0.5.11. Microseconds a layer, the median of repeats.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddtree.kernels.path_triton import path_attention_triton, path_steps, tree_slots_triton
from ddtree.layout import ancestor_mask_batch
from sglang_overlay.runtime.fa3 import Seen, unseen

DEPTH = 15
SHAPES = ((32, 8, 128), (8, 4, 64))  # query heads, key heads, size: an 8 B target, a tiny one
CASES = ((1, 16, 512), (1, 64, 512), (1, 64, 4096), (8, 32, 512), (8, 32, 4096), (32, 16, 512), (32, 16, 4096))
CONTEXT = 8192
Attend = Callable[[Tensor], Tensor]


class Layer:
    """A cache of one layer, a batch of trees behind their prefixes, and the ways to attend to them."""

    def __init__(self, shape: tuple[int, int, int], case: tuple[int, int, int]) -> None:
        from sgl_kernel import merge_state_v2
        from sgl_kernel.flash_attn import flash_attn_with_kvcache, get_scheduler_metadata

        self.attend, self.plan, self.merge = flash_attn_with_kvcache, get_scheduler_metadata, merge_state_v2
        heads, self.kv_heads, self.dim = shape
        self.batch, self.width, self.prefix = case
        self.heads, self.scale = heads, self.dim**-0.5
        held = self.prefix + self.width
        slots = torch.randperm(self.batch * held, device="cuda").int() + 1
        self.table = torch.zeros((self.batch, CONTEXT), dtype=torch.int32, device="cuda")
        self.table[:, :held] = slots.view(self.batch, held)
        self.keys, self.values = (torch.randn(len(slots) + 1, self.kv_heads, self.dim, device="cuda").bfloat16() for _ in range(2))
        rng = random.Random(0)
        rows = [[-1, *(rng.randrange(min(node, DEPTH)) for node in range(1, self.width))] for _ in range(self.batch)]
        self.parents = torch.tensor(rows, device="cuda")
        self.q = torch.randn(self.batch * self.width, heads, self.dim, device="cuda").bfloat16()
        self.seq_lens = torch.full((self.batch,), self.prefix, device="cuda")
        self.seen: Seen = unseen(self.batch, self.width, path_steps(DEPTH), CONTEXT, "cuda")
        out = {"lengths": self.seen.lengths, "pages": self.seen.pages, "paths": self.seen.paths}
        tree_slots_triton(self.table, torch.arange(self.batch, device="cuda"), self.seq_lens, self.parents, self.prefix, **out)
        # What SGLang's form reads: the ancestors' slots first, and how many they are.
        self.mask = ancestor_mask_batch(self.parents, DEPTH)
        own = self.table[:, self.prefix : held].repeat_interleave(self.width, 0)
        order = (~self.mask).to(torch.int8).view(-1, self.width).argsort(dim=1, stable=True)
        self.own, self.counts = own.gather(1, order).contiguous(), self.mask.sum(2).view(-1).int()
        self.singles = torch.arange(self.batch * self.width + 1, dtype=torch.int32, device="cuda")
        self.chain_lengths = (self.seq_lens + self.width).int()

    def _fa3(self, q: Tensor, pages: Tensor, lengths: Tensor, starts: Tensor, width: int, **more: Any) -> Any:
        caches = {"k_cache": self.keys.unsqueeze(1), "v_cache": self.values.unsqueeze(1)}
        sizes = {"page_table": pages, "cache_seqlens": lengths, "cu_seqlens_q": starts, "max_seqlen_q": width}
        return self.attend(q=q, **caches, **sizes, softmax_scale=self.scale, **more)

    def chain(self, q: Tensor) -> Tensor:
        """Attend as DFLASH does."""
        out: Tensor = self._fa3(q, self.table, self.chain_lengths, self.seen.starts, self.width, causal=True)
        return out

    def cascade(self, q: Tensor) -> Tensor:
        """Attend to the tree as SGLang does: twice by FA3, two transposes, a merge."""
        a, lse_a, *_ = self._fa3(q, self.seen.pages, self.seen.lengths, self.seen.starts, self.width, return_softmax_lse=True)
        b, lse_b, *_ = self._fa3(q, self.own, self.counts, self.singles, 1, return_softmax_lse=True)
        out: Tensor = self.merge(a, lse_a.T.contiguous(), b, lse_b.T.contiguous())[0]
        return out

    def path(self, q: Tensor, schedule: Tensor | None = None) -> Tensor:
        """Attend to the tree as we do."""
        more = {"return_softmax_lse": True, "scheduler_metadata": schedule}
        out, lse, *_ = self._fa3(q, self.seen.pages, self.seen.lengths, self.seen.starts, self.width, **more)
        path_attention_triton(q, self.keys, self.values, self.seen.paths, out, lse, self.scale)
        result: Tensor = out
        return result

    def schedule(self) -> Tensor:
        """Plan FA3's work for all layers."""
        sizes = {"batch_size": self.batch, "max_seqlen_q": self.width, "max_seqlen_k": CONTEXT, "page_size": 1}
        heads = {"num_heads": self.heads, "num_heads_k": self.kv_heads, "headdim": self.dim}
        plan: Tensor = self.plan(**sizes, **heads, cache_seqlens=self.seen.lengths, cu_seqlens_q=self.seen.starts)
        return plan

    def exact(self) -> Tensor:
        """Attend in float32 under the mask."""
        slots = self.table[:, : self.prefix + self.width].long()
        k, v = (x[slots].float().repeat_interleave(self.heads // self.kv_heads, 2) for x in (self.keys, self.values))
        scores = torch.einsum("bqhd,bkhd->bhqk", self.q.float().view(self.batch, self.width, self.heads, self.dim), k) * self.scale
        seen = torch.ones((self.batch, self.width, self.prefix), dtype=torch.bool, device="cuda")
        allowed = torch.cat([seen, self.mask], 2)[:, None]
        weights = scores.masked_fill(~allowed, float("-inf")).softmax(3)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v).reshape(self.q.shape)


def capture(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def micros(graphs: Mapping[str, torch.cuda.CUDAGraph], layers: int, repeats: int = 30) -> dict[str, float]:
    """Replay the graphs in turns; the median microseconds a layer."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(repeats):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end) * 1000 / layers)
    return {name: round(statistics.median(many), 2) for name, many in times.items()}


def measure(shape: tuple[int, int, int], case: tuple[int, int, int], layers: int) -> dict[str, Any]:
    """Check and time one shape and case."""
    layer = Layer(shape, case)
    exact = layer.exact()
    errors = {
        name: round(float((got.float() - exact).norm() / exact.norm()), 5)
        for name, got in (
            ("cascade", layer.cascade(layer.q)),
            ("path", layer.path(layer.q)),
            ("path, planned once", layer.path(layer.q, layer.schedule())),
        )
    }

    def repeat(attend: Attend) -> Callable[[], None]:
        def run() -> None:
            for _ in range(layers):
                attend(layer.q)

        return run

    def planned_once() -> None:
        schedule = layer.schedule()
        for _ in range(layers):
            layer.path(layer.q, schedule)

    forms = {"chain": repeat(layer.chain), "cascade": repeat(layer.cascade), "path": repeat(layer.path), "path, planned once": planned_once}
    return {"micros": micros({name: capture(run) for name, run in forms.items()}, layers), "errors": errors}


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the table."""
    names = list(rows[0]["micros"])
    print(f"| heads, of keys, size | requests, tokens each, prefix | {' | '.join(names)} | error of the tree forms |")
    print(f"|---|---|{'---|' * (len(names) + 1)}")
    for row in rows:
        cells = [f"{row['micros'][name]:.1f}" for name in names]
        print(f"| {row['shape']} | {row['case']} | {' | '.join(cells)} | {', '.join(map(str, row['errors'].values()))} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    parser.add_argument("--layers", type=int, default=32)
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = [
        {"shape": ", ".join(map(str, shape)), "case": ", ".join(map(str, case)), **measure(shape, case, args.layers)}
        for shape in SHAPES
        for case in CASES
    ]
    show(rows)
    if args.json is not None:
        args.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
