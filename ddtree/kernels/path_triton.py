# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Attend to a tree in Triton, where a library kernel has attended to the prefix: one launch a layer.

A node sees the prefix, which all nodes share, and the path from the root down to itself, which is at most as long as
the drafted block. So the prefix is left to a kernel for long sequences, and what is here reads the few keys of each
path and merges both parts by their logsumexp (Hydragen, arXiv 2402.05099).
"""

from __future__ import annotations

from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

# A matrix product takes 16 rows or more.
LEAST_STEPS = 16

if triton is not None:

    @triton.jit(do_not_specialize=["live", "n", "table_stride", "pages_stride"])
    def _tree_slots_kernel(
        table_ptr,  # [rows, table_stride] int32: the cache slot of each position of a request
        rows_ptr,  # [bs] which row of the table
        seq_lens_ptr,  # [bs] length of the prefix
        parents_ptr,  # [live, n] int64
        lengths_ptr,  # [bs] int32
        pages_ptr,  # [bs, pages_stride] int32
        paths_ptr,  # [bs, n, STEPS] int32
        table_stride,
        pages_stride,
        live,
        n,
        N_BLOCK: tl.constexpr,
        STEPS: tl.constexpr,
        CHUNK: tl.constexpr,
    ):
        request = tl.program_id(0).to(tl.int64)
        table_ptr += tl.load(rows_ptr + request).to(tl.int64) * table_stride
        seq_len = tl.load(seq_lens_ptr + request).to(tl.int64)
        column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        prefix = tl.load(table_ptr + column, mask=column < seq_len, other=0)
        tl.store(pages_ptr + request * pages_stride + column, prefix, mask=column < seq_len)
        if tl.program_id(1) == 0:
            tl.store(lengths_ptr + request, seq_len.to(tl.int32))
            key = tl.arange(0, N_BLOCK)
            node = tl.where(key < n, key, -1).to(tl.int64)
            for step in range(STEPS):
                slot = tl.load(table_ptr + seq_len + node, mask=node >= 0, other=-1)
                tl.store(paths_ptr + (request * n + key) * STEPS + step, slot, mask=key < n)
                # Rows beyond the live ones only fill a captured batch up: each of their nodes sees itself.
                node = tl.load(parents_ptr + request * n + node, mask=(node >= 0) & (request < live), other=-1)

    @triton.jit(do_not_specialize=["scale", "lse_stride"])
    def _path_attention_kernel(
        q_ptr,  # [tokens, heads, D], contiguous
        k_ptr,  # [slots, kv_heads, D], contiguous
        v_ptr,
        paths_ptr,  # [tokens, STEPS] int32, -1 where a path has ended
        out_ptr,  # [tokens, heads, D], contiguous: attention to the prefix, then to both
        lse_ptr,  # [heads, tokens] float32 of the prefix
        scale,
        lse_stride,
        KV_HEADS: tl.constexpr,
        GROUP: tl.constexpr,
        D: tl.constexpr,
        G_BLOCK: tl.constexpr,
        D_BLOCK: tl.constexpr,
        STEPS: tl.constexpr,
    ):
        token = tl.program_id(0).to(tl.int64)
        kv_head = tl.program_id(1)
        member = tl.arange(0, G_BLOCK)
        head = kv_head * GROUP + member
        dim = tl.arange(0, D_BLOCK)
        slot = tl.load(paths_ptr + token * STEPS + tl.arange(0, STEPS)).to(tl.int64)
        row = (slot * KV_HEADS + kv_head) * D
        here = (token * KV_HEADS * GROUP + head)[:, None] * D + dim[None, :]
        ours = (member < GROUP)[:, None] & (dim < D)[None, :]

        q = tl.load(q_ptr + here, mask=ours, other=0.0)
        k = tl.load(k_ptr + row[None, :] + dim[:, None], mask=(slot >= 0)[None, :] & (dim < D)[:, None], other=0.0)
        score = tl.dot(q, k, input_precision="ieee") * scale
        score = tl.where((slot >= 0)[None, :], score, float("-inf"))
        lse = tl.load(lse_ptr + head * lse_stride + token, mask=member < GROUP, other=0.0)
        peak = tl.maximum(tl.max(score, axis=1), lse)
        weight = tl.exp(score - peak[:, None])
        before = tl.exp(lse - peak)
        v = tl.load(v_ptr + row[:, None] + dim[None, :], mask=(slot >= 0)[:, None] & (dim < D)[None, :], other=0.0)
        path = tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        prefix = tl.load(out_ptr + here, mask=ours, other=0.0).to(tl.float32)
        both = (path + before[:, None] * prefix) / (tl.sum(weight, axis=1) + before)[:, None]
        tl.store(out_ptr + here, both.to(out_ptr.dtype.element_ty), mask=ours)


def path_steps(max_depth: int) -> int:
    """Return the width of a table of paths: `max_depth + 1` nodes and padding."""
    return max(LEAST_STEPS, int(triton.next_power_of_2(max_depth + 1)))


def tree_slots_triton(
    table: Tensor, rows: Tensor, seq_lens: Tensor, parents: Tensor, longest: int, *, lengths: Tensor, pages: Tensor, paths: Tensor
) -> None:
    """Look up the cache slots that each node sees, in one launch.

    `table [rows, width]` int32 holds the slot of every position; `rows` and `seq_lens` `[bs]` say which row, and how long
    its prefix is (`longest` at most), behind which the tree lies. `parents` `[live, n]` may have fewer rows. Writes `lengths
    [bs]`, the prefix into `pages [bs, >= longest]`, and each node's path, from itself up, into `paths [bs * n, steps]`, all int32.
    """
    live, n = parents.shape
    chunk = 1024
    _tree_slots_kernel[(rows.shape[0], -(-longest // chunk))](
        *(table, rows, seq_lens, parents, lengths, pages, paths, table.stride(0), pages.stride(0), live, n),
        N_BLOCK=triton.next_power_of_2(n),
        STEPS=paths.shape[1],
        CHUNK=chunk,
    )


def path_attention_triton(q: Tensor, k_cache: Tensor, v_cache: Tensor, paths: Tensor, out: Tensor, lse: Tensor, scale: float) -> None:
    """Add each token's path to `out`, which holds its attention to the prefix, in one launch.

    `q` and `out` are `[tokens, heads, D]`, the caches `[slots, kv_heads, D]`, all contiguous; `lse [heads, tokens]` is the natural
    logsumexp of the prefix' scores, fp32. `paths [tokens, steps]` int32 is as `tree_slots_triton` writes it.
    """
    tokens, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    group = heads // kv_heads
    _path_attention_kernel[(tokens, kv_heads)](
        *(q, k_cache, v_cache, paths, out, lse, scale, lse.stride(0)),
        KV_HEADS=kv_heads,
        GROUP=group,
        D=dim,
        G_BLOCK=max(LEAST_STEPS, triton.next_power_of_2(group)),
        D_BLOCK=max(LEAST_STEPS, triton.next_power_of_2(dim)),
        STEPS=paths.shape[1],
        num_warps=2,
    )
