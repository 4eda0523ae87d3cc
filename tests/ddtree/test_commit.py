"""Commit: every slot is kept or freed once, and compaction moves rows as a plain gather would."""

from __future__ import annotations

import random

import torch

from ddtree.commit import compaction, keep_mask, kept_slots, split_slots
from ddtree.tree import build_tree_batch, sort_log_probs
from ddtree.walk import greedy_walk_batch, stop_walk_batch


def test_every_slot_is_kept_or_freed_once_over_a_thousand_rounds() -> None:
    rng = random.Random(0)
    free, held, n = list(range(400)), [], 9
    for _ in range(1000):
        if len(free) < n:
            free, held = free + held, []
            rng.shuffle(free)
        slots, free = free[:n], free[n:]
        path = sorted(rng.sample(range(1, n), rng.randrange(0, 5)))
        split = split_slots(slots, [0, *path])
        assert split.keep == tuple(slots[node] for node in [0, *path])
        held += split.keep
        free += split.free
        assert sorted(free + held) == list(range(400))


def test_the_batched_forms_agree_with_the_single_one() -> None:
    generator = torch.Generator().manual_seed(1)
    logp = torch.log_softmax(torch.randn(30, 5, 3, generator=generator), dim=-1)
    batch = build_tree_batch(*sort_log_probs(logp), 20)
    follow = torch.randint(0, 3, batch.tokens.shape, generator=generator)
    walks = greedy_walk_batch(batch, follow, 5)
    walks = stop_walk_batch(walks, torch.tensor([2]), torch.randint(1, 4, (30,), generator=generator))
    slots = torch.randperm(30 * 21, generator=generator).view(30, 21)
    mask, kept = keep_mask(walks.path, 21), kept_slots(slots, walks.path)
    for index in range(30):
        split = split_slots(slots[index].tolist(), walks.walk(index).path)
        assert tuple(slots[index][~mask[index]].tolist()) == split.free
        assert tuple(slot for slot in kept[index].tolist() if slot >= 0) == split.keep


def test_compaction_brings_the_path_to_the_front() -> None:
    rows = torch.arange(10 + 8)
    source, destination = compaction(10, (0, 1, 4, 7))
    assert (source, destination) == ([14, 17], [12, 13])
    rows[destination] = rows[source]
    assert rows[:14].tolist() == [*range(10), 10, 11, 14, 17]
    assert compaction(10, (0, 1, 2)) == ([], [])
