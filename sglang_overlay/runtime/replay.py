"""Replay a fixed-shape function from CUDA graphs, one a batch size, so that its many small kernels cost one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]


class Replay:
    """Run `function` on the leading rows of fixed buffers.

    `examples` are its inputs at the largest size; each input and output has the batch as its first dimension, and row
    i of the outputs must not depend on later rows. Batches above the largest captured size, and everything when `sizes`
    is empty, run eagerly. Outputs are overwritten by the next call.
    """

    def __init__(self, function: Callable[..., Tensors], examples: Tensors, sizes: Sequence[int]) -> None:
        self.function = function
        self.sizes = sorted(sizes)
        self.buffers = examples
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensors]] = {}
        for size in reversed(self.sizes):
            self.graphs[size] = self._capture(size)

    def __call__(self, *inputs: Tensor) -> Tensors:
        """Return the outputs for `inputs` of one batch size."""
        batch = inputs[0].shape[0]
        size = next((size for size in self.sizes if size >= batch), None)
        if size is None:
            return self.function(*inputs)
        for buffer, value in zip(self.buffers, inputs, strict=True):
            buffer[:batch].copy_(value)
        graph, outputs = self.graphs[size]
        graph.replay()
        return tuple(output[:batch] for output in outputs)

    def _capture(self, size: int) -> tuple[torch.cuda.CUDAGraph, Tensors]:
        rows = tuple(buffer[:size] for buffer in self.buffers)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Twice: the first call fills caches and compiles, which a capture must not do.
            self.function(*rows)
            self.function(*rows)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = self.function(*rows)
        return graph, outputs
