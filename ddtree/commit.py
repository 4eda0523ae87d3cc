"""Decide which cache rows of a verified tree stay and which go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Slots:
    """Hold the cache slots of one request's tree: `keep` in path order, `free` in slot order. Together: all, once."""

    keep: tuple[int, ...]
    free: tuple[int, ...]


def split_slots(slots: Sequence[int], path: Sequence[int]) -> Slots:
    """Split the slots of a tree by its walked path (node indices, root first)."""
    on_path = set(path)
    return Slots(
        tuple(slots[node] for node in path),
        tuple(slot for node, slot in enumerate(slots) if node not in on_path),
    )


def keep_mask(path: Tensor, n: int) -> Tensor:
    """Return bool `[bs, n]`, True at the nodes of `path [bs, steps]`; -1 is no node. Does not wait for the device."""
    mask = torch.zeros((path.shape[0], n + 1), dtype=torch.bool, device=path.device)
    # -1 goes to a column of its own, cut off again.
    return mask.scatter_(1, torch.where(path < 0, n, path), True)[:, :n]


def kept_slots(slots: Tensor, path: Tensor) -> Tensor:
    """Return the slot of each node of `path [bs, steps]` from `slots [bs, n]`, in path order; -1 stays -1."""
    return torch.where(path < 0, -1, slots.gather(1, path.clamp(min=0)))


def compaction(prefix_len: int, path: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return (source rows, destination rows) that move the path to the front of a contiguous tail at `prefix_len`.

    Rows already in place are left out; both lists ascend and no source lies before its destination, but they may
    overlap: gather first, then write.
    """
    moves = [(prefix_len + node, prefix_len + step) for step, node in enumerate(path) if node != step]
    return [source for source, _ in moves], [destination for _, destination in moves]
