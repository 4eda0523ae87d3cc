"""Verify trees with FA3 in two launches a layer: FA3 attends to the prefix, our kernel to each node's path, and merges.

SGLang's own form for trees attends a second time by FA3, with a page table of its own for every node, and then transposes
and merges: seven launches and more a layer, and some thirty small operations a round to prepare them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddtree.kernels.path_triton import path_attention_triton, path_steps, tree_slots_triton


@dataclass(frozen=True, slots=True)
class Seen:
    """The cache slots that the nodes of a batch see, on the device; all int32."""

    lengths: Tensor  # [bs] of the prefixes
    pages: Tensor  # [bs, longest] slots of the prefixes
    paths: Tensor  # [bs * n, steps] slots from each node up to the root, then -1
    starts: Tensor  # [bs + 1] first token of each request

    def rows(self, batch: int) -> Seen:
        """Return the part of these buffers that a smaller batch uses."""
        tokens = self.paths.shape[0] // self.lengths.shape[0] * batch
        return Seen(self.lengths[:batch], self.pages[:batch], self.paths[:tokens], self.starts[: batch + 1])


def unseen(batch: int, width: int, steps: int, longest: int, device: torch.device | str) -> Seen:
    """Return buffers for a batch of trees of `width` tokens behind prefixes of up to `longest`."""
    lengths, pages, paths = (
        torch.zeros(shape, dtype=torch.int32, device=device) for shape in ((batch,), (batch, longest), (batch * width, steps))
    )
    return Seen(lengths, pages, paths, torch.arange(0, (batch + 1) * width, width, dtype=torch.int32, device=device))


@functools.cache
def tree_attention_class() -> Any:
    """Return the target's attention backend: FA3's, but for the verify forward. Made at the first call: it imports FA3."""
    from sglang.srt.layers.attention import flashattention_backend as fa3

    class TreeAttention(fa3.FlashAttentionBackend):  # type: ignore[misc]
        """FlashAttention 3 with trees. Page size 1, one dtype for model and cache, no windows: what DDTREE accepts."""

        def __init__(self, runner: Any, max_depth: int) -> None:
            super().__init__(runner)
            self.tree_steps = path_steps(max_depth)
            self.seen: Seen | None = None  # of the verify forward that is being run or captured
            self.captured: dict[int, Seen] = {}

        def init_forward_metadata(self, forward_batch: Any) -> None:
            """Prepare a forward outside of CUDA graphs."""
            self.seen = None
            if not forward_batch.forward_mode.is_target_verify():
                super().init_forward_metadata(forward_batch)
                return
            longest = int(forward_batch.seq_lens_cpu.max())
            batch = forward_batch.batch_size
            self.seen = unseen(batch, self.speculative_num_draft_tokens, self.tree_steps, longest, self.device)
            self._look_up(forward_batch.spec_info.plan, forward_batch.req_pool_indices, forward_batch.seq_lens, longest)

        def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
            """Make the buffers that the graphs of all batch sizes share."""
            super().init_cuda_graph_state(max_bs, max_num_tokens)
            width = self.speculative_num_draft_tokens
            self.buffers = unseen(max_bs, width, self.tree_steps, self.max_context_len, self.device)

        def init_forward_metadata_capture_cuda_graph(
            self,
            bs: int,
            num_tokens: int,
            req_pool_indices: Tensor,
            seq_lens: Tensor,
            encoder_lens: Tensor | None,
            forward_mode: Any,
            spec_info: Any,
        ) -> None:
            """Point a graph that is about to be captured at its part of the buffers."""
            self.seen = None
            if not forward_mode.is_target_verify():
                super().init_forward_metadata_capture_cuda_graph(
                    bs, num_tokens, req_pool_indices, seq_lens, encoder_lens, forward_mode, spec_info
                )
                return
            self.seen = self.captured[bs] = self.buffers.rows(bs)
            self.seen.lengths.copy_(seq_lens)

        def init_forward_metadata_replay_cuda_graph(
            self,
            bs: int,
            req_pool_indices: Tensor,
            seq_lens: Tensor,
            seq_lens_sum: int,
            encoder_lens: Tensor | None,
            forward_mode: Any,
            spec_info: Any,
            seq_lens_cpu: Tensor,
            out_cache_loc: Tensor | None = None,
        ) -> None:
            """Fill the buffers for a graph that is about to be replayed: one launch."""
            if not forward_mode.is_target_verify():
                super().init_forward_metadata_replay_cuda_graph(
                    bs, req_pool_indices, seq_lens, seq_lens_sum, encoder_lens, forward_mode, spec_info, seq_lens_cpu, out_cache_loc
                )
                return
            self.seen = self.captured[bs]
            self._look_up(spec_info.plan, req_pool_indices[:bs], seq_lens[:bs], int(seq_lens_cpu[:bs].max()))

        def _look_up(self, plan: Any, rows: Tensor, seq_lens: Tensor, longest: int) -> None:
            seen = self.seen
            assert seen is not None
            out = {"lengths": seen.lengths, "pages": seen.pages, "paths": seen.paths}
            tree_slots_triton(self.req_to_token, rows, seq_lens, plan.parents, longest, **out)

        def forward_extend(
            self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
        ) -> Tensor:
            """Attend to prefix and path in the verify forward; as FA3 does in any other."""
            seen = self.seen
            if seen is None or not forward_batch.forward_mode.is_target_verify():
                stock: Tensor = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **more)
                return stock
            pool = forward_batch.token_to_kv_pool
            if save_kv_cache:
                pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v, layer.k_scale, layer.v_scale)
            keys, values = pool.get_kv_buffer(layer.layer_id)
            q = q.contiguous().view(-1, layer.tp_q_head_num, layer.head_dim)
            if layer.layer_id == 0:
                # In the captured graph too: replays plan anew, for the lengths of their round.
                self.schedule = self._schedule(seen)
            prefix, lse, *_ = fa3.flash_attn_with_kvcache(
                q=q,
                k_cache=keys.unsqueeze(1),
                v_cache=values.unsqueeze(1),
                page_table=seen.pages,
                cache_seqlens=seen.lengths,
                cu_seqlens_q=seen.starts,
                max_seqlen_q=self.speculative_num_draft_tokens,
                softmax_scale=layer.scaling,
                causal=False,
                scheduler_metadata=self.schedule,
                num_splits=self.num_splits,
                return_softmax_lse=True,
                ver=self.fa_impl_ver,
            )
            path_attention_triton(q, keys, values, seen.paths, prefix, lse, layer.scaling)
            output: Tensor = prefix.view(-1, layer.tp_q_head_num * layer.v_head_dim)
            return output

        def _schedule(self, seen: Seen) -> Tensor:
            """Plan FA3's work once for all layers, from the same sizes that FA3 would plan from in each."""
            schedule: Tensor = self._get_scheduler_metadata(
                batch_size=seen.lengths.shape[0],
                max_seqlen_q=self.speculative_num_draft_tokens,
                max_seqlen_k=seen.pages.shape[1],
                num_heads=self.num_attention_heads,
                num_heads_k=self.num_kv_heads,
                headdim=self.head_dim,
                cache_seqlens=seen.lengths,
                qkv_dtype=self.kv_cache_dtype,
                cu_seqlens_q=seen.starts,
                page_size=self.page_size,
                causal=False,
                num_splits=self.num_splits,
            )
            return schedule

    return TreeAttention
