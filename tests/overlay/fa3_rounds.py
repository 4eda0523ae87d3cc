"""Verify trees by SGLang's own FA3 backend and by ours, on the CPU, and compare what every node attends to.

Run with a site: `fa3_rounds.py SITE`. Real is SGLang's `flashattention_backend.py`; FA3 itself and the merge of two results
are written out in torch, and our kernels run in Triton's interpreter. Nothing is captured: a replay here is what
SGLang does before one, and then the forward.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"
import torch
from hollow import hollow
from torch import Tensor

SITE = Path(sys.argv[1])
ATTENTION = "sglang.srt.layers.attention."
HEADS, KV_HEADS, DIM, SLOTS, CONTEXT, MAX_BATCH = 6, 2, 16, 1801, 200, 4


def anything(*args: object, **_: object) -> object:
    """Stand for a function or a decorator, with or without arguments."""
    return args[0] if args and callable(args[0]) else lambda function=None, *_: function


hollow(SITE, {ATTENTION + "base_attn_backend", ATTENTION + "flashattention_backend"}, ("sglang", "sgl_kernel"), lambda _name: anything)
import sgl_kernel  # noqa: E402
import sgl_kernel.flash_attn  # noqa: E402
import sglang.jit_kernel.flash_attention as jit  # noqa: E402
import sglang.srt.configs.model_config as model_config  # noqa: E402
import sglang.srt.layers.radix_attention as radix_attention  # noqa: E402
import sglang.srt.mem_cache.swa_memory_pool as swa_memory_pool  # noqa: E402

planned: list[int] = []


def flash_attn_with_kvcache(q, k_cache, v_cache, *, page_table, cache_seqlens, cu_seqlens_q, softmax_scale, **rest):
    """Attend as FA3 does to the first `cache_seqlens` entries of each row of the page table."""
    assert rest["causal"] is False and rest["return_softmax_lse"]
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])
    starts = cu_seqlens_q.tolist()
    for row, (first, last) in enumerate(itertools.pairwise(starts)):
        slots = page_table[row, : cache_seqlens[row]].long()
        k, v = (x[slots, 0].repeat_interleave(q.shape[1] // x.shape[2], 1) for x in (k_cache, v_cache))
        scores = torch.einsum("qhd,khd->hqk", q[first:last], k) * softmax_scale
        out[first:last] = torch.einsum("hqk,khd->qhd", scores.softmax(2), v)
        lse[:, first:last] = scores.logsumexp(2)
    return out, lse


def merge(a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    share = torch.sigmoid(lse_a - lse_b)[..., None]
    return share * a + (1 - share) * b, torch.logaddexp(lse_a, lse_b)


sgl_kernel.merge_state_v2 = merge
sgl_kernel.flash_attn.get_scheduler_metadata = lambda **sizes: planned.append(sizes["batch_size"]) or torch.zeros(1)
jit.flash_attn_with_kvcache = flash_attn_with_kvcache
model_config.AttentionArch = SimpleNamespace(MLA="MLA")
radix_attention.AttentionType = SimpleNamespace(ENCODER_ONLY="encoder")
swa_memory_pool.SWAKVPool = type("SWAKVPool", (), {})
from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend  # noqa: E402

from sglang_overlay.runtime.fa3 import tree_attention_class  # noqa: E402
from sglang_overlay.runtime.plan import Plan  # noqa: E402

VERIFY = SimpleNamespace(
    is_target_verify=lambda: True,
    is_decode_or_idle=lambda: False,
    is_context_parallel_extend=lambda: False,
    is_draft_extend=lambda **_: False,
)
LAYER = SimpleNamespace(
    layer_id=0, tp_q_head_num=HEADS, tp_k_head_num=KV_HEADS, tp_v_head_num=KV_HEADS, head_dim=DIM, v_head_dim=DIM, scaling=DIM**-0.5,
    k_scale=None, v_scale=None, sliding_window_size=None, is_cross_attention=False, attn_type="decoder", logit_cap=0.0,
)  # fmt: skip


class Pool:
    """A cache of one layer."""

    def __init__(self) -> None:
        self.keys, self.values = torch.randn(SLOTS, KV_HEADS, DIM), torch.randn(SLOTS, KV_HEADS, DIM)

    def set_kv_buffer(self, _layer, slots, k, v, *_scales) -> None:
        self.keys[slots], self.values[slots] = k, v

    def get_kv_buffer(self, _layer_id: int) -> tuple[Tensor, Tensor]:
        return self.keys, self.values


def runner(width: int) -> SimpleNamespace:
    args = SimpleNamespace(
        kv_cache_dtype="auto", speculative_eagle_topk=2, speculative_num_draft_tokens=width, enable_deterministic_inference=False,
        disable_cuda_graph=False, is_embedding=False, chunked_prefill_size=-1, disable_radix_cache=False,
    )  # fmt: skip
    config = SimpleNamespace(
        is_encoder_decoder=False, context_len=CONTEXT, attention_arch="MHA", is_local_attention_model=False, head_dim=DIM,
        hf_text_config=SimpleNamespace(num_attention_heads=HEADS), get_num_kv_heads=lambda _tp: KV_HEADS,
    )  # fmt: skip
    # Slot 0 takes what fills a batch up.
    table = (torch.randperm(SLOTS - 1) + 1).view(8, -1).int()
    return SimpleNamespace(
        server_args=args, model_config=config, sliding_window_size=None, device="cpu", kv_cache_dtype=torch.float32, page_size=1,
        req_to_token_pool=SimpleNamespace(req_to_token=table), token_to_kv_pool=Pool(), attn_cp_size=1, tp_size=1,
    )  # fmt: skip


def main() -> None:
    rng = random.Random(0)
    torch.manual_seed(0)
    for width, depth in ((2, 1), (9, 4), (9, 8), (17, 15)):
        target = runner(width)
        table = target.req_to_token_pool.req_to_token
        stock, ours = FlashAttentionBackend(target), tree_attention_class()(target, depth)
        for backend in (stock, ours):
            backend.init_cuda_graph_state(MAX_BATCH, MAX_BATCH * width)
            for size in (MAX_BATCH, 2, 1):
                ones = torch.ones(size, dtype=torch.int64)
                backend.init_forward_metadata_capture_cuda_graph(size, size * width, ones, ones, None, VERIFY, None)
        for live, padded in ((1, 1), (3, MAX_BATCH), (2, 2)):
            lengths = [rng.randint(1, CONTEXT - width) for _ in range(live)]
            rows, seq_lens = torch.tensor(rng.sample(range(8), live)), torch.tensor(lengths)
            parents = torch.tensor([[-1, *(rng.randrange(min(node, depth)) for node in range(1, width))] for _ in range(live)])
            positions = torch.zeros(live, width)
            plan = Plan(positions.long(), parents, torch.full((live,), width), positions, depth)
            slots = torch.cat([table[row, length : length + width] for row, length in zip(rows.tolist(), lengths, strict=True)])
            q, k, v = (torch.randn(live * width, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
            batch = SimpleNamespace(
                forward_mode=VERIFY, batch_size=live, req_pool_indices=rows, seq_lens=seq_lens, seq_lens_cpu=seq_lens,
                out_cache_loc=slots.long(), token_to_kv_pool=target.token_to_kv_pool, req_to_token_pool=target.req_to_token_pool,
                spec_info=SimpleNamespace(plan=plan, custom_mask=plan.mask(seq_lens, sum(lengths)), positions=positions.view(-1)),
                attn_cp_metadata=None, encoder_lens=None,
            )  # fmt: skip
            outputs = []
            for backend in (stock, ours):
                backend.init_forward_metadata(batch)
                outputs.append(backend.forward_extend(q, k, v, LAYER, batch))
            for backend in (stock, ours):
                # What fills a captured batch up: row 0, and a prefix of one token.
                fill = padded - live
                padded_lens = torch.cat([seq_lens, torch.ones(fill, dtype=torch.int64)])
                padded_rows = torch.cat([rows, torch.zeros(fill, dtype=torch.int64)])
                backend.init_forward_metadata_replay_cuda_graph(
                    padded, padded_rows, padded_lens, sum(lengths) + fill, None, VERIFY, batch.spec_info, padded_lens
                )
                wide = [torch.cat([x, torch.zeros(fill * width, *x.shape[1:])]) for x in (q, k, v)]
                batch.out_cache_loc = torch.cat([slots.long(), torch.zeros(fill * width, dtype=torch.int64)])
                outputs.append(backend.forward_extend(*wide, LAYER, batch)[: live * width])
            for other in outputs[1:]:
                assert torch.allclose(outputs[0], other, atol=1e-5), (outputs[0] - other).abs().max()
    assert planned and max(planned) == MAX_BATCH
    print("equal")


if __name__ == "__main__":
    main()
