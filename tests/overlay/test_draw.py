"""Draws inside SGLang: the published noise, the target's filtered distribution, and no word from batch, tree or node."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sglang_overlay.runtime.draw import Draw, choose_tokens, seeded_gumbel


def draw_for(
    bs: int,
    *,
    temperature: float = 1.0,
    top_k: int = 1 << 30,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seeds: Tensor | None = None,
) -> Draw:
    return Draw(
        torch.full((bs, 1), temperature),
        torch.full((bs,), top_k, dtype=torch.int32),
        torch.full((bs,), top_p),
        torch.full((bs,), min_p),
        top_k < 1 << 30 or top_p < 1 or min_p > 0,
        seeds,
    )


def murmur3_32(data: bytes) -> int:
    """MurmurHash3 x86 32-bit of whole words with seed 0, from its published description."""
    word, state = 0xFFFFFFFF, 0
    for at in range(0, len(data), 4):
        k = int.from_bytes(data[at : at + 4], "little") * 0xCC9E2D51 & word
        k = ((k << 15 | k >> 17) & word) * 0x1B873593 & word
        state = ((state ^ k) << 13 | (state ^ k) >> 19) & word
        state = state * 5 + 0xE6546B64 & word
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & word
    state = (state ^ state >> 13) * 0xC2B2AE35 & word
    return state ^ state >> 16


def test_seeded_noise_is_the_published_hash() -> None:
    seeds, positions = torch.tensor([0, 7, (5 << 40) + 3]), torch.tensor([0, 12, 70000])
    noise = seeded_gumbel(seeds, positions, 5)
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        for column in range(5):
            text = seed.to_bytes(8, "little") + position.to_bytes(4, "little") + column.to_bytes(4, "little")
            uniform = torch.tensor(murmur3_32(text), dtype=torch.float64) / 0xFFFFFFFF
            assert torch.equal(noise[row, column], -torch.log(-torch.log(uniform)))


def test_seeded_draws_do_not_depend_on_batch_tree_or_node() -> None:
    logits = torch.randn(3, 6, 50, generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([[9, 10, 10, 11, 11, 12]]).repeat(3, 1) + torch.tensor([[0], [40], [7]])
    seeds = torch.tensor([11, 12, 13])
    together = choose_tokens(logits, positions, draw_for(3, temperature=0.7, seeds=seeds))
    for row in range(3):
        for node in range(6):
            # Plain decoding: one request, one position, its logits and the noise of that position.
            noise = seeded_gumbel(seeds[row : row + 1], positions[row : row + 1, node], 50)[0]
            alone = (torch.softmax(logits[row, node] / 0.7, dim=0).log().double() + noise).argmax()
            assert int(together[row, node]) == int(alone)


@pytest.mark.parametrize("limits", [{}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 5, "top_p": 0.7, "min_p": 0.05}])
@pytest.mark.parametrize("seeded", [True, False])
def test_draws_follow_the_targets_filtered_distribution(limits: dict[str, float], seeded: bool) -> None:
    torch.manual_seed(4)
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0])
    count, nodes = 10000, 2
    seeds = torch.arange(count) if seeded else None
    positions = torch.tensor([17, 18]).repeat(count, 1)
    draw = draw_for(count, temperature=0.9, seeds=seeds, **limits)
    drawn = choose_tokens(logits.repeat(count, nodes, 1), positions, draw).flatten()
    count *= nodes
    probs = torch.softmax(logits / 0.9, dim=0)
    rank = torch.arange(8)
    keep = (rank < limits.get("top_k", 8)) & (probs.cumsum(0) - probs <= limits.get("top_p", 1.0))
    keep &= probs >= limits.get("min_p", 0.0) * probs[0]
    want = torch.where(keep, probs, 0.0) / probs[keep].sum()
    seen = torch.bincount(drawn, minlength=8)
    assert not seen[~keep].any()
    expected = want[keep] * count
    chi_square = float(((seen[keep] - expected) ** 2 / expected).sum())
    assert chi_square < 30, f"{seen.tolist()} against {expected.tolist()}"  # p < 1e-4 at 7 degrees of freedom


def test_greedy_requests_in_a_sampled_batch_get_the_argmax() -> None:
    logits = torch.randn(2, 4, 30, generator=torch.Generator().manual_seed(2))
    draw = draw_for(2, top_k=1)
    assert torch.equal(choose_tokens(logits, torch.zeros(2, 4, dtype=torch.int64), draw), logits.argmax(dim=2))
