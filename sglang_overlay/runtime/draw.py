"""Draw the target's choice after every node, from exactly the distribution that plain SGLang draws from.

Gumbel-max over the filtered log-probabilities. A request with a `sampling_seed` gets noise that depends on the seed,
the absolute position and the token id alone: the hash that SGLang's deterministic mode uses (MurmurHash3 of those
words), so without top-k, top-p and min-p both draw the same tokens. Nodes at one depth share their noise, as they must.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROWS_AT_ONCE = 1 << 25  # elements of fp32 logits handled at a time
_WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Draw:
    """Hold what the draw of one batch needs, one entry a request, on the device."""

    temperatures: Tensor  # [bs, 1] float32
    top_ks: Tensor  # [bs] int32
    top_ps: Tensor  # [bs] float32
    min_ps: Tensor  # [bs] float32
    filters: bool  # any request restricts the tokens
    seeds: Tensor | None  # [bs] int64, -1 where the request gave none; None when none did


def choose_tokens(logits: Tensor, positions: Tensor, draw: Draw) -> Tensor:
    """Draw after each node: `logits [bs, n, V]`, `positions [bs, n]` of the nodes themselves; returns int64 `[bs, n]`.

    A request with top-k 1, which is how SGLang writes temperature 0, gets the argmax.
    """
    bs, n, vocab = logits.shape
    step = max(1, ROWS_AT_ONCE // (n * vocab))
    parts = []
    for first in range(0, bs, step):
        rows = slice(first, first + step)
        part = Draw(
            draw.temperatures[rows],
            draw.top_ks[rows],
            draw.top_ps[rows],
            draw.min_ps[rows],
            draw.filters,
            None if draw.seeds is None else draw.seeds[rows],
        )
        parts.append(_choose(logits[rows].float(), positions[rows], part))
    return torch.cat(parts)


def _choose(logits: Tensor, positions: Tensor, draw: Draw) -> Tensor:
    n, vocab = logits.shape[1:]
    greedy = logits.argmax(dim=2)
    probs = torch.softmax(logits / draw.temperatures[:, :, None], dim=2)
    if draw.filters:
        probs = _restrict(probs, draw)
    # A node's noise is its depth's, and siblings share a depth: draw it per depth, then give it to the nodes.
    depth = positions - positions[:, :1]
    depths = min(n, 32)
    noise = _random_noise(probs.shape[0], depths, vocab, probs.device)
    if draw.seeds is not None:
        at = positions[:, :1] + torch.arange(depths, device=positions.device)
        seeded = seeded_gumbel(draw.seeds[:, None].expand_as(at), at, vocab)
        noise = torch.where((draw.seeds >= 0)[:, None, None], seeded, noise)
    noisy = torch.log(probs).double()
    noisy += noise.gather(1, depth[:, :, None].expand(-1, -1, vocab))
    return torch.where((draw.top_ks == 1)[:, None], greedy, noisy.argmax(dim=2))


def _restrict(probs: Tensor, draw: Draw) -> Tensor:
    """Zero what top-k, top-p and min-p exclude; all three look at the whole distribution, as SGLang's sampler does."""
    order = torch.sort(probs, dim=2, descending=True, stable=True)
    rank = torch.arange(probs.shape[2], device=probs.device)
    keep = rank < draw.top_ks[:, None, None]
    keep = keep & (torch.cumsum(order.values, dim=2) - order.values <= draw.top_ps[:, None, None])
    keep &= order.values >= draw.min_ps[:, None, None] * order.values[:, :, :1]
    kept = torch.zeros_like(keep).scatter_(2, order.indices, keep)
    return torch.where(kept, probs, 0.0)


def _random_noise(bs: int, depths: int, vocab: int, device: torch.device) -> Tensor:
    noise = torch.empty((bs, depths, vocab), dtype=torch.float64, device=device)
    return noise.exponential_().log_().neg_()


def seeded_gumbel(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Return Gumbel noise `[..., vocab]` float64, a pure function of (seed, position, column)."""
    column = torch.arange(vocab, device=seeds.device)
    state = torch.zeros_like(seeds)
    for word in (seeds & _WORD, (seeds >> 32) & _WORD, positions & _WORD):
        state = _murmur_mix(state, word)
    state = _murmur_mix(state[..., None], column)
    uniform = _murmur_end(state ^ 16).double() / _WORD
    return -torch.log((-torch.log(uniform)).clamp_(max=torch.finfo(torch.float64).max))


def _murmur_mix(state: Tensor, word: Tensor) -> Tensor:
    """Mix one 32-bit word into a MurmurHash3 state (both int64 below 2^32)."""
    word = _times32(word, 0xCC9E2D51)
    word = _times32(_rotate32(word, 15), 0x1B873593)
    return (_rotate32(state ^ word, 13) * 5 + 0xE6546B64) & _WORD


def _murmur_end(state: Tensor) -> Tensor:
    state = _times32(state ^ (state >> 16), 0x85EBCA6B)
    state = _times32(state ^ (state >> 13), 0xC2B2AE35)
    return state ^ (state >> 16)


def _rotate32(x: Tensor, by: int) -> Tensor:
    return ((x << by) | (x >> (32 - by))) & _WORD


def _times32(x: Tensor, factor: int) -> Tensor:
    """Multiply modulo 2^32; int64 products wrap modulo 2^64, so the low word is right."""
    return (x * factor) & _WORD
