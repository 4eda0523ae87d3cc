"""A node attends to the prefix and to its own path: by slots looked up once, and a merge with the prefix' attention."""

from __future__ import annotations

import importlib.util
import os
import random

import pytest
import torch
from torch import Tensor

from ddtree.layout import ancestor_mask_batch

pytestmark = pytest.mark.slow
if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from ddtree.kernels.path_triton import path_attention_triton, path_steps, tree_slots_triton  # noqa: E402


def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend in float64: `q [heads, D]`, `k` and `v` `[keys, kv_heads, D]`; returns the output and the logsumexp."""
    group = q.shape[0] // k.shape[1]
    scores = torch.einsum("hd,khd->hk", q.double(), k.double().repeat_interleave(group, 1)) * scale
    return torch.einsum("hk,khd->hd", scores.softmax(1), v.double().repeat_interleave(group, 1)), scores.logsumexp(1)


@pytest.mark.parametrize("case", range(8))
def test_both_parts_together_are_attention_under_the_ancestor_mask(case: int) -> None:
    rng, generator = random.Random(case), torch.Generator().manual_seed(case)
    n, depth = rng.choice(((2, 1), (9, 4), (33, 15), (21, 20)))
    kv_heads, group, dim = rng.choice(((1, 1, 16), (2, 3, 64), (2, 8, 80), (1, 20, 64)))
    lengths, width = [1, rng.randint(2, 40), 1030], 1100
    live, batch = 2, 3  # the second tree holds a chain as deep as may be; the third row only fills the batch up
    parents = torch.tensor([[-1, *(rng.randrange(min(i, depth)) for i in range(1, n))], [-1, *range(depth), *[0] * (n - 1 - depth)]])
    table = torch.stack([torch.randperm(3 * width, generator=generator)[:width] for _ in range(5)]).int()
    rows = torch.tensor([4, 0, 2])
    out = {"lengths": torch.zeros(batch, dtype=torch.int32), "pages": torch.full((batch, width), -7, dtype=torch.int32)}
    out["paths"] = torch.full((batch * n, path_steps(depth)), -7, dtype=torch.int32)
    moved = [x.to(DEVICE) for x in (table, rows, torch.tensor(lengths), parents)]
    out = {name: x.to(DEVICE) for name, x in out.items()}
    tree_slots_triton(*moved, max(lengths), **out)

    mask = ancestor_mask_batch(parents, depth)
    assert out["lengths"].tolist() == lengths
    for r, (row, length) in enumerate(zip(rows.tolist(), lengths, strict=True)):
        assert out["pages"][r, :length].tolist() == table[row, :length].tolist()
        assert (out["pages"][r, length:] == -7).all()
        for node in range(n):
            seen = mask[r, node].nonzero()[:, 0].tolist() if r < live else [node]
            path = out["paths"][r * n + node].tolist()
            assert sorted(path[: len(seen)]) == sorted(table[row, length + i].item() for i in seen)
            assert set(path[len(seen) :]) <= {-1}

    shape, scale = (3 * width, kv_heads, dim), dim**-0.5
    k, v = (torch.randn(shape, generator=generator) for _ in range(2))
    q = torch.randn((batch * n, kv_heads * group, dim), generator=generator)
    prefix = [
        _attention(q[t], *(x[table[rows[t // n], : lengths[t // n]].long()] for x in (k, v)), scale) for t in range(batch * n)
    ]
    merged = torch.stack([part for part, _ in prefix]).float().to(DEVICE)
    lse = torch.stack([part for _, part in prefix]).float().T.contiguous().to(DEVICE)
    path_attention_triton(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), out["paths"], merged, lse, scale)
    for t in range(batch * n):
        r, node = divmod(t, n)
        row, length = rows[r], lengths[r]
        seen = mask[r, node].nonzero()[:, 0] if r < live else torch.tensor([node])
        slots = torch.cat([table[row, :length], table[row, length + seen]]).long()
        assert torch.allclose(merged[t].cpu().double(), _attention(q[t], k[slots], v[slots], scale)[0], atol=1e-5)
