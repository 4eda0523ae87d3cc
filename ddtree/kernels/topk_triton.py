# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Take top-k and logsumexp of a vocabulary in two launches that read the logits little more than once.

The first reads everything and keeps, of every group of neighbouring columns, only the maximum. The K groups with the
largest maxima hold the K best tokens: K groups each with a better maximum would hold K better tokens. So the second
launch finds those groups, reads them again (K * GROUP of V columns), and sorts what is left. Both selections search the
K-th value bit by bit, and among equals take the smaller token ids: the order of ddtree/topk.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.topk import ShardTopK

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

MAX_K = 1024

if triton is not None:

    @triton.jit
    def _clean(logits):
        x = logits.to(tl.float32)
        x = tl.where(x == x, x, float("-inf"))
        return tl.minimum(x, 3.4028234663852886e38)

    @triton.jit
    def _ordered(x):
        # The bits of a float as an int32 that sorts alike; -0.0 is +0.0.
        bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
        return bits ^ ((bits >> 31) & 0x7FFFFFFF)

    @triton.jit
    def _best_k(keys, index, k, INDEX_BITS: tl.constexpr):
        """Return which int32 keys are the k largest, ties by smaller index (unique); there are at least k."""
        # From the sign bit down: a bit of the threshold can be set as long as k keys reach it. Done once exactly k do.
        zero = tl.sum(keys * 0, axis=0)
        reach = tl.sum((keys >= 0).to(tl.int32), axis=0)
        bound = tl.where(reach >= k, zero, zero - 2147483647 - 1)
        reach = tl.where(reach >= k, reach, k + 1)
        bit = zero + 30
        while (bit >= 0) & (reach > k):
            trial = bound + ((zero + 1) << bit)
            count = tl.sum((keys >= trial).to(tl.int32), axis=0)
            bound = tl.where(count >= k, trial, bound)
            reach = tl.where(count >= k, count, reach)
            bit -= 1
        # Too many keys equal the threshold: find the index up to which they fit in the same way.
        level = keys == bound
        room = k - tl.sum((keys > bound).to(tl.int32), axis=0)
        last = zero
        bit = tl.where(reach > k, zero + INDEX_BITS - 1, zero - 1)
        while bit >= 0:
            trial = last + ((zero + 1) << bit)
            count = tl.sum((level & (index < trial)).to(tl.int32), axis=0)
            last = tl.where(count < room, trial, last)
            bit -= 1
        return (keys > bound) | (level & ((reach == k) | (index <= last)))

    @triton.jit
    def _group_max_kernel(
        logits_ptr,
        group_ptr,  # [rows, groups] int32 ordered maxima
        peak_ptr,  # [rows, tiles] float32 maximum of each tile
        mass_ptr,  # [rows, tiles] float32 sum of exp(x - peak)
        counter_ptr,  # [rows, 2] int32, set to 0 for the second launch
        stride,
        vocabulary,
        groups,
        tiles,
        TILE: tl.constexpr,
        GROUP: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        tile = tl.program_id(1)
        group = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = _clean(tl.load(logits_ptr + row * stride + column, mask=column < vocabulary, other=float("-inf")))
        tl.store(
            counter_ptr + row * 2 + tl.arange(0, 2), tl.zeros((2,), tl.int32), mask=tile + tl.arange(0, 2) * 0 == 0
        )
        best = tl.max(x, axis=1)
        tl.store(group_ptr + row * groups + group, _ordered(best), mask=group < groups)
        peak = tl.max(best, axis=0)
        # An all -inf tile has no mass; subtracting its peak would make NaN.
        base = tl.where(peak == float("-inf"), 0.0, peak)
        tl.store(peak_ptr + row * tiles + tile, peak)
        tl.store(mass_ptr + row * tiles + tile, tl.sum(tl.sum(tl.exp(x - base), axis=1), axis=0))

    @triton.jit(do_not_specialize=["k", "groups", "tiles", "vocabulary", "id_offset"])
    def _merge_kernel(
        logits_ptr,
        group_ptr,
        peak_ptr,
        mass_ptr,
        counter_ptr,
        picked_ptr,  # [rows, K] int32 scratch: the groups to read again
        slot_ptr,  # [rows, K] int64 scratch: the K winners before sorting
        values_ptr,  # [rows, K] float32
        ids_ptr,  # [rows, K] int64
        lse_ptr,  # [rows] float64
        stride,
        vocabulary,
        groups,
        tiles,
        k,
        id_offset,
        AS_LOGP: tl.constexpr,
        GROUP: tl.constexpr,
        GROUPS_BLOCK: tl.constexpr,
        TILES_BLOCK: tl.constexpr,
        K_BLOCK: tl.constexpr,
        INDEX_BITS: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        lowest: tl.constexpr = -2147483648

        tile = tl.arange(0, TILES_BLOCK)
        peaks = tl.load(peak_ptr + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
        masses = tl.load(mass_ptr + row * tiles + tile, mask=tile < tiles, other=0.0)
        peak = tl.max(peaks, axis=0)
        base = tl.where(peak == float("-inf"), 0.0, peak)
        mass = tl.sum(tl.exp(peaks - base).to(tl.float64) * masses.to(tl.float64), axis=0)
        lse = base.to(tl.float64) + tl.log(mass)
        tl.store(lse_ptr + row, lse)

        group = tl.arange(0, GROUPS_BLOCK)
        maxima = tl.load(group_ptr + row * groups + group, mask=group < groups, other=lowest)
        wanted = tl.minimum(k, groups)
        chosen = _best_k(maxima, group, wanted, INDEX_BITS)
        # Any order will do here: the winners are sorted at the end.
        place = tl.atomic_add(counter_ptr + row * 2 + group * 0, 1, mask=chosen)
        tl.store(picked_ptr + row * k + place, group, mask=chosen)
        tl.debug_barrier()

        seat = tl.arange(0, K_BLOCK * GROUP)
        picked = tl.load(picked_ptr + row * k + seat // GROUP, mask=seat // GROUP < wanted, other=0)
        column = picked * GROUP + seat % GROUP
        real = (seat // GROUP < wanted) & (column < vocabulary)
        x = _clean(tl.load(logits_ptr + row * stride + column, mask=real, other=float("-inf")))
        # Padding sorts below every real logit, -inf included.
        keys = tl.where(real, _ordered(x), lowest)
        # Padding gets indices of its own beyond the vocabulary.
        kept = _best_k(keys, tl.where(real, column, (1 << (INDEX_BITS - 1)) + seat), k, INDEX_BITS)
        place = tl.atomic_add(counter_ptr + row * 2 + 1 + seat * 0, 1, mask=kept)
        packed = (keys.to(tl.int64) << 32) | (0xFFFFFFFF - column.to(tl.int64))
        tl.store(slot_ptr + row * k + place, packed, mask=kept)
        tl.debug_barrier()

        out = tl.arange(0, K_BLOCK)
        best = tl.load(slot_ptr + row * k + out, mask=out < k, other=-9223372036854775808)
        best = tl.sort(best, descending=True)
        bits = (best >> 32).to(tl.int32)
        value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        if AS_LOGP:
            logp = tl.minimum(value - lse.to(tl.float32), 0.0)
            value = tl.where(value == float("-inf"), value, logp)
        tl.store(values_ptr + row * k + out, value, mask=out < k)
        tl.store(ids_ptr + row * k + out, 0xFFFFFFFF - (best & 0xFFFFFFFF) + id_offset, mask=out < k)


def shard_topk_triton(logits: Tensor, k: int, *, id_offset: int = 0, as_logp: bool = False) -> ShardTopK:
    """Return what `shard_topk` returns, with log-probabilities for values on request; `logits` is `[rows, V]`.

    fp32, bf16 or fp16 with unit stride along V. The logsumexp sums tiles in fp32: within 1e-6 of the torch form.
    Raises ValueError for k beyond 1024.
    """
    rows, vocabulary = logits.shape
    k = min(k, vocabulary)
    if not 0 < k <= MAX_K:
        raise ValueError(f"the kernel takes k from 1 to {MAX_K}: {k}")
    tile = 4096
    # The second launch handles V / group maxima and k * group candidates: keep both small.
    group = min((16, 32, 64, 128), key=lambda g: triton.next_power_of_2(-(-vocabulary // g)) + _block(k) * g)
    groups, tiles = -(-vocabulary // group), -(-vocabulary // tile)
    device = logits.device
    maxima = torch.empty((rows, groups), dtype=torch.int32, device=device)
    peak, mass = torch.empty((2, rows, tiles), dtype=torch.float32, device=device).unbind(0)
    picked, counter = torch.empty(rows * (k + 2), dtype=torch.int32, device=device).split([rows * k, rows * 2])
    slot, ids = torch.empty((2, rows, k), dtype=torch.int64, device=device).unbind(0)
    values = torch.empty((rows, k), dtype=torch.float32, device=device)
    lse = torch.empty(rows, dtype=torch.float64, device=device)
    _group_max_kernel[(rows, tiles)](
        *(logits, maxima, peak, mass, counter, logits.stride(0), vocabulary, groups, tiles),
        TILE=tile,
        GROUP=group,
        num_warps=8,
    )
    _merge_kernel[(rows,)](
        *(logits, maxima, peak, mass, counter, picked, slot, values, ids, lse),
        *(logits.stride(0), vocabulary, groups, tiles, k, id_offset),
        AS_LOGP=as_logp,
        GROUP=group,
        GROUPS_BLOCK=triton.next_power_of_2(groups),
        TILES_BLOCK=triton.next_power_of_2(tiles),
        K_BLOCK=_block(k),
        # One bit more than the vocabulary needs, and room for the seats of the padding.
        INDEX_BITS=max(vocabulary, _block(k) * group).bit_length() + 1,
        # 16 numbers a thread.
        num_warps=min(16, max(4, max(triton.next_power_of_2(groups), _block(k) * group) // 512)),
    )
    return ShardTopK(values, ids, lse)


def _block(k: int) -> int:
    return int(triton.next_power_of_2(k))
