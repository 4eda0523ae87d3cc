"""Draw tokens from a target's logits with noise that depends on (seed, absolute position) alone.

Gumbel-max: the draw is the argmax of log-probability plus noise. As the noise of a position does not depend on how the
position was reached, plain decoding, a chain and a tree draw the same token from the same logits, at any batch size.
All arithmetic is fp32 or wider, whatever the dtype of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sampling:
    """Hold sampling parameters; applied in this order, each on what the last one left and renormalised.

    `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 and `min_p` 0 are off. Among equal logits the smaller token id
    comes first. Raises ValueError outside the usual ranges.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not self.temperature >= 0.0:
            raise ValueError(f"temperature must not be negative: {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must not be negative: {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1]: {self.top_p}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be in [0, 1]: {self.min_p}")

    @property
    def filters(self) -> bool:
        """Tell whether any token is excluded before the draw."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


GREEDY = Sampling(temperature=0.0)


def sample_token(logits: Tensor, sampling: Sampling, seed: int, position: int) -> int:
    """Draw the token at absolute `position` from `logits [V]`."""
    device = logits.device
    seeds, positions = torch.tensor([seed], device=device), torch.tensor([position], device=device)
    return int(sample_tokens(logits[None], [sampling], seeds, positions)[0])


def sample_tokens(logits: Tensor, sampling: Sequence[Sampling], seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw one token a row: `logits [bs, V]`, `seeds` and `positions` int64 `[bs]`; returns int64 `[bs]`."""
    logits = logits.float()
    if all(one.temperature == 0.0 for one in sampling):
        return logits.argmax(dim=1)
    device = logits.device
    temperature = torch.tensor([one.temperature for one in sampling], dtype=torch.float32, device=device)[:, None]
    greedy = temperature == 0.0
    logp = torch.log_softmax(logits / torch.where(greedy, 1.0, temperature), dim=1)
    if any(one.filters for one in sampling):
        logp = _filter(logp, sampling)
    noisy = logp + gumbel(seeds, positions, logits.shape[1])
    return torch.where(greedy[:, 0], logits.argmax(dim=1), noisy.argmax(dim=1))


def target_probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the distribution `[..., V]` that `sample_token` draws from, in fp32."""
    rows = logits.float().reshape(-1, logits.shape[-1])
    if sampling.temperature == 0.0:
        return torch.nn.functional.one_hot(rows.argmax(dim=1), rows.shape[1]).float().view(logits.shape)
    logp = torch.log_softmax(rows / sampling.temperature, dim=1)
    if sampling.filters:
        logp = _filter(logp, [sampling] * rows.shape[0])
    return torch.softmax(logp, dim=1).view(logits.shape)


def gumbel(seeds: Tensor, positions: Tensor, size: int) -> Tensor:
    """Return Gumbel noise `[bs, size]` fp32, a pure function of (seed, position, column)."""
    stream = _mix(_mix(seeds) + positions)
    column = torch.arange(size, device=seeds.device)
    bits = _mix(stream[:, None] + (column + 1) * -7046029254386353131)
    # 53 random bits, centred: never 0 or 1. fp32 would cut both tails off.
    uniform = (((bits >> 11) & ((1 << 53) - 1)).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform)).float()


def _mix(x: Tensor) -> Tensor:
    """Scramble int64 values (the finaliser of splitmix64, Steele et al. 2014); products wrap around."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * -4658895280553007687
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * -7723592293110705685
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _filter(logp: Tensor, sampling: Sequence[Sampling]) -> Tensor:
    bs, size = logp.shape
    device = logp.device
    top_k = torch.tensor([one.top_k or size for one in sampling], device=device)[:, None]
    top_p = torch.tensor([one.top_p for one in sampling], dtype=torch.float32, device=device)[:, None]
    min_p = torch.tensor([one.min_p for one in sampling], dtype=torch.float32, device=device)[:, None]
    order = torch.sort(logp, dim=1, descending=True, stable=True)
    probs = order.values.exp()
    keep = torch.arange(size, device=device) < top_k
    probs = torch.where(keep, probs, 0.0)
    probs = probs / probs.sum(dim=1, keepdim=True)
    # Keep every token that the mass before it does not already reach top_p; the first always stays.
    keep = keep & ((torch.cumsum(probs, dim=1) - probs < top_p) | (top_p >= 1.0))
    keep = keep & (probs >= min_p * probs[:, :1])
    kept = torch.zeros((bs, size), dtype=torch.bool, device=device).scatter_(1, order.indices, keep)
    return torch.where(kept, logp, -torch.inf)
