"""Take the K best tokens of a vocabulary and their log-probabilities, without a dense fp32 copy of the logits.

The order is total, so every device, tile size and tensor-parallel split finds the same tokens: value descending (as
fp32), then token id ascending. NaN counts as -inf and +inf as the largest finite number, on every rank alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 8192
_LOW = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class TopK:
    """Hold the K best tokens of each row, best first; `logp` is never positive, missing tokens have -inf."""

    logp: Tensor  # [..., K] float32
    ids: Tensor  # [..., K] int64


@dataclass(frozen=True, slots=True)
class ShardTopK:
    """Hold what one tensor-parallel rank contributes: its K best logits, their global ids, its logsumexp."""

    values: Tensor  # [..., K] float32 logits
    ids: Tensor  # [..., K] int64
    lse: Tensor  # [...] float64, so that the sum over ranks rounds the same for any number of ranks


def topk_logprobs(logits: Tensor, k: int) -> TopK:
    """Return the `min(k, V)` best tokens of `logits` `[..., V]` with log-softmax values."""
    shard = shard_topk(logits, k)
    return merge_topk(shard.values[None], shard.ids[None], shard.lse[None], k)


def shard_topk(logits: Tensor, k: int, *, id_offset: int = 0, tile: int = TILE) -> ShardTopK:
    """Return the best `min(k, V)` of a vocabulary shard whose column 0 is token `id_offset`.

    `logits` is `[..., V]`; only `tile` columns at a time are widened to fp32.
    """
    tiles = (
        _tile_topk(logits[..., start : start + tile], k, id_offset + start)
        for start in range(0, logits.shape[-1], tile)
    )
    return _fold(list(tiles), k)


def topk_from_hidden(hidden: Tensor, weight: Tensor, k: int, *, id_offset: int = 0, tile: int = TILE) -> ShardTopK:
    """Return `shard_topk(hidden @ weight.T, k)` while only `tile` columns of logits exist at a time.

    `hidden` is `[..., H]`, `weight` is this rank's rows of the output head `[V, H]`.
    """
    tiles = (
        _tile_topk(hidden @ weight[start : start + tile].T, k, id_offset + start)
        for start in range(0, weight.shape[0], tile)
    )
    return _fold(list(tiles), k)


def merge_topk(values: Tensor, ids: Tensor, lse: Tensor, k: int) -> TopK:
    """Merge what all ranks gathered: `values` and `ids` `[ranks, ..., k]`, `lse` `[ranks, ...]`.

    The result depends on the contributions only, not on their order, so each rank finds the same without a broadcast.
    """
    keys = _pack(values, ids)
    keys = keys.movedim(0, -2).flatten(-2)
    top_values, top_ids = _unpack(torch.topk(keys, min(k, keys.shape[-1]), dim=-1).values)
    total = torch.logsumexp(lse.double(), dim=0).float()
    logp = (top_values - total[..., None]).clamp_(max=0.0)
    return TopK(torch.where(top_values > -torch.inf, logp, -torch.inf), top_ids)


def _tile_topk(logits: Tensor, k: int, id_offset: int) -> ShardTopK:
    values = torch.nan_to_num(logits.float(), nan=-torch.inf, posinf=torch.finfo(torch.float32).max, neginf=-torch.inf)
    ids = torch.arange(id_offset, id_offset + logits.shape[-1], device=logits.device)
    top_values, top_ids = _unpack(torch.topk(_pack(values, ids), min(k, logits.shape[-1]), dim=-1).values)
    return ShardTopK(top_values, top_ids, torch.logsumexp(values.double(), dim=-1))


def _fold(tiles: list[ShardTopK], k: int) -> ShardTopK:
    keys = torch.cat([_pack(tile.values, tile.ids) for tile in tiles], dim=-1)
    values, ids = _unpack(torch.topk(keys, min(k, keys.shape[-1]), dim=-1).values)
    return ShardTopK(values, ids, torch.logsumexp(torch.stack([tile.lse for tile in tiles]), dim=0))


def _pack(values: Tensor, ids: Tensor) -> Tensor:
    """Pack (value, id) into an int64 that orders by value, then by smaller id: unique keys need no stable sort."""
    # Adding 0.0 turns -0.0 into +0.0; flipping the magnitude of negatives makes the bits of a float sort as integers.
    bits = (values + 0.0).view(torch.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(torch.int64) << 32) | (_LOW - ids)


def _unpack(keys: Tensor) -> tuple[Tensor, Tensor]:
    bits = (keys >> 32).to(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32), _LOW - (keys & _LOW)
