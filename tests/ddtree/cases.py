"""Random drafts for the tests of this folder: ties, impossible tokens, vocabularies smaller than the budget."""

from __future__ import annotations

import random

import torch
from torch import Tensor


def draw_log_probs(case: int, bs: int, limit: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    """Draw `[bs, limit, vocabulary]` log-probabilities; what is odd about them depends on `case`."""
    scale = (1.0, 3.0, 0.0, 8.0)[case % 4]
    logits = torch.randn(bs, limit, vocabulary, generator=generator) * scale
    if case % 3 == 0:
        logits = (logits * 2).round() / 2
    logp = torch.log_softmax(logits, dim=-1)
    if case % 3 == 1:
        logp = (logp * 4).round() / 4
    if case % 5 == 0:
        logp[torch.rand(logp.shape, generator=generator) < 0.4] = -torch.inf
    if case % 11 == 0:
        logp[:, case % limit] = -torch.inf
    if case % 13 == 0:
        # Not a distribution, but the hardest ties there are.
        logp[:, case % limit] = 0.0
    if case % 17 == 0:
        logp[torch.rand(logp.shape, generator=generator) < 0.05] = torch.nan
    return logp


def draw_shape(rng: random.Random) -> tuple[int, int, int]:
    """Draw (positions, vocabulary, budget), often with a vocabulary below the budget."""
    return rng.choice((1, 2, 3, 5, 8)), rng.choice((1, 2, 3, 6, 12, 40)), rng.choice((1, 2, 3, 7, 16, 33, 64))
