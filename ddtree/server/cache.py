"""The target's key-value cache for one request: rows are appended by the model and compacted after each walk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from ddtree.commit import compaction


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """A cache layer that appends into a buffer of spare capacity, where transformers' own copies all rows each step."""

    keys: Tensor
    values: Tensor
    is_initialized: bool

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append rows [1, kv_heads, tokens, head_dim] and return all rows."""
        begin, end = self.length, self.length + key_states.shape[-2]
        if not self.is_initialized:
            self.is_initialized = True
            self.device = key_states.device
            self._buffers = [_spare(t, max(256, 2 * end)) for t in (key_states, value_states)]
        elif end > self._buffers[0].shape[-2]:
            larger = [_spare(t, 2 * end) for t in self._buffers]
            for old, new in zip(self._buffers, larger, strict=True):
                new[:, :, :begin] = old[:, :, :begin]
            self._buffers = larger
        for buffer, rows in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, begin:end] = rows
        self.resize(end)
        return self.keys, self.values

    def resize(self, length: int) -> None:
        """Let the first `length` rows of the buffers be the cache."""
        self.length = length
        self.keys, self.values = (buffer[:, :, :length] for buffer in self._buffers)

    def move(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy rows within the buffers; all are read before any is written."""
        for buffer in self._buffers:
            buffer[:, :, destinations] = buffer[:, :, sources]

    def get_seq_length(self, *_: Any) -> int:
        return self.length


def _spare(like: Tensor, capacity: int) -> Tensor:
    return like.new_empty(*like.shape[:2], capacity, like.shape[3])


def new_cache(layers: int) -> Cache:
    """Return an empty cache for one request."""
    return Cache(layers=[GrowingLayer() for _ in range(layers)])


def compact(cache: Cache, prefix_len: int, path: Sequence[int], device: torch.device) -> None:
    """Keep the rows of the prefix and of the walked `path` (node indices, root first), in path order.

    A node's keys were rotated for `prefix_len + depth`, which is where the row ends up: moving it is enough.
    """
    sources, destinations = compaction(prefix_len, path)
    if sources:
        source, destination = torch.tensor([sources, destinations], device=device)
        for layer in cache.layers:
            layer.move(source, destination)
    for layer in cache.layers:
        layer.resize(prefix_len + len(path))
