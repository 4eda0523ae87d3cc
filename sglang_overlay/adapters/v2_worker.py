"""The 0.5.23 worker: SGLang's DFLASH worker drafts unchanged, and from there on all is ours.

Its drafting is left by an exception where it would pick the greedy block, as in `v1`. Then come the tree, its verify forward,
the walk, and the commit. Slots are reserved ahead as a window of the request table, so a commit frees nothing: it permutes
the window's pointers so that the accepted path comes first, and the next round writes over the rest. Results stay on the
device; the scheduler copies them when it needs them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sglang_overlay.adapters.v1 import Drafted
from sglang_overlay.adapters.v2_settings import TOPK, number, refuse_requests
from sglang_overlay.runtime.args import DEFAULT_TOPK_CAP
from sglang_overlay.runtime.draw import choose_tokens
from sglang_overlay.runtime.plan import Plan, make_trees
from sglang_overlay.runtime.selftest import self_test
from sglang_overlay.runtime.serve import output_head
from sglang_overlay.runtime.verify import draw_of

logger = logging.getLogger(__name__)


def path_first(path: Tensor, lengths: Tensor, n: int) -> Tensor:
    """Return each request's permutation `[bs, n]` of its nodes: the first `lengths` of `path`, then the others ascending.

    `path` is `[bs, steps]`; what is behind a length is ignored. Ranks of equal keys do not occur, so any sort will do.
    """
    bs, steps = path.shape
    step = torch.arange(steps, device=path.device)
    key = torch.arange(n, device=path.device).repeat(bs, 1) + steps
    key = torch.cat((key, key[:, :1]), dim=1)  # one column more, for what is ignored
    node = torch.where(step < lengths[:, None], path, n)
    return key.scatter(1, node, step.expand(bs, -1))[:, :n].argsort(dim=1)


def commit(table: Tensor, rows: Tensor, prefix_lens: Tensor, window: Tensor, path: Tensor, lengths: Tensor) -> Tensor:
    """Permute the windows `[bs, n]` of the request table so that the path comes first; return them as they are now.

    No cache row moves: the rows were written at position `prefix + depth`, which is where the path ends up.
    """
    n = window.shape[1]
    ordered = window.gather(1, path_first(path, lengths, n))
    columns = prefix_lens[:, None] + torch.arange(n, device=window.device)
    table[rows[:, None], columns] = ordered.to(table.dtype)
    return ordered


@functools.cache
def worker_class() -> Any:
    """Return the worker class."""
    from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_func
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput
    from sglang.srt.speculative.dflash_utils import apply_dflash_verify_logits_adjustments
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
    from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite

    class DDTreeWorker(DFlashWorkerV2):  # type: ignore[misc]
        """Draft as DFLASH does, verify a tree."""

        def __init__(self, server_args: Any, *args: Any, **named: Any) -> None:
            self.tree_width = int(get_spec().speculative_num_draft_tokens)
            self.tree_topk = min(number(TOPK, DEFAULT_TOPK_CAP), self.tree_width - 1)
            with self._drafting():
                super().__init__(server_args, *args, **named)
            other = [what for what, has in (("a selector", self.selector), ("LiLiCorr", self.lilicorr), ("Domino", self._is_domino)) if has]
            if other:
                raise ValueError(f"DDTREE does not support a drafter with {', '.join(other)}: it needs the plain head's distributions")
            self.tree_head = output_head(self.model_runner)
            refuse_requests()

        @contextmanager
        def _drafting(self) -> Iterator[None]:
            """Let SGLang build what belongs to the drafter: its verify width is a block."""
            with get_spec().override(speculative_num_draft_tokens=int(get_spec().speculative_dflash_block_size)):
                yield

        def alloc_memory_pool(self, *args: Any, **named: Any) -> None:
            with self._drafting():
                super().alloc_memory_pool(*args, **named)

        def init_attention_backends(self) -> None:
            with self._drafting():
                super().init_attention_backends()

        def init_cuda_graphs(self) -> None:
            """Capture the drafter's graphs; then prove that the target, whose graphs exist by now, attends along a tree."""
            with self._drafting():
                super().init_cuda_graphs()
            self.prove()

        def _maybe_build_draft_sampler(self) -> None:
            """Keep the head out of the draft graph, so that the hidden states come out of it."""

        def _greedy_sample_from_vocab_parallel_head(self, *, hidden_states: Tensor, **_: Any) -> Tensor:
            raise Drafted(hidden_states)

        def forward_batch_generation(self, batch: Any, on_publish: Any = None, *args: Any, **named: Any) -> Any:
            """Return SGLang's result; a decode round's is a tree's."""
            try:
                return super().forward_batch_generation(batch, on_publish, *args, **named)
            except Drafted as drafted:
                return self._tree_round(batch, drafted.hidden, on_publish)

        def _tree_round(self, batch: Any, hidden: Tensor, on_publish: Any) -> Any:
            bs, n, block = len(batch.seq_lens), self.tree_width, int(self.block_size)
            draft_input, prefix_lens = batch.spec_info, batch.seq_lens
            hidden = hidden.view(bs, block - 1, -1)
            tokens, parents, n_valid, positions = make_trees(
                hidden, draft_input.bonus_tokens, prefix_lens, self.tree_head, n - 1, self.tree_topk
            )
            plan = Plan(tokens, parents, n_valid, positions, block - 1)
            window = self._window(batch, prefix_lens)
            cpu = batch.seq_lens_cpu
            kv_plan = self.model_runner.kv_index_translator.plan(
                req_pool_indices=batch.req_pool_indices,
                seq_lens=prefix_lens,
                seq_lens_cpu=draft_input.nxt_kv_lens_cpu if cpu is None else cpu,
                write_virtual=window.reshape(-1),
                read_extent=n,
            )
            verify = self._verify_input(plan, prefix_lens, cpu, kv_plan)
            logits_output, target_out = self._verify(batch, verify, window, draft_input)
            chosen = self._choose(logits_output.next_token_logits, plan, batch)
            packed = plan.walk(chosen)
            path, tokens, lengths = packed[:, :block], packed[:, block:-1], packed[:, -1]
            bonus = tokens.gather(1, lengths[:, None] - 1)[:, 0]
            new_seq_lens = prefix_lens + lengths.to(prefix_lens.dtype)
            if on_publish is not None:
                on_publish(new_seq_lens)

            table = self.model_runner.req_to_token_pool.req_to_token
            commit(table, batch.req_pool_indices, prefix_lens, window, path, lengths)
            self._append_path(logits_output.hidden_states, kv_plan, prefix_lens, path, lengths)
            logits_output.hidden_states = None
            out = torch.zeros((bs, n), dtype=torch.int64, device=tokens.device)
            out[:, :block] = tokens
            return GenerationBatchResult(
                logits_output=logits_output,
                next_token_ids=out.reshape(-1),
                accept_lens=lengths.to(torch.int32),
                can_run_cuda_graph=target_out.can_run_cuda_graph,
                next_draft_input=self._make_next_draft_input_decode(bonus_tokens=bonus, new_seq_lens=new_seq_lens),
                speculative_num_draft_tokens=n,
                new_seq_lens=new_seq_lens,
                routed_experts_output=target_out.routed_experts_output,
                indexer_topk_output=target_out.indexer_topk_output,
            )

        def _window(self, batch: Any, prefix_lens: Tensor) -> Tensor:
            """Return the slots `[bs, n]` that were reserved behind each prefix."""
            bs, n = len(prefix_lens), self.tree_width
            slots: Tensor = assign_extend_cache_locs_func(
                req_pool_indices=batch.req_pool_indices,
                req_to_token=self.model_runner.req_to_token_pool.req_to_token,
                start_offset=prefix_lens,
                end_offset=prefix_lens + n,
                batch_size=bs,
                draft_token_num=n,
                device=self.device,
            )
            return slots.view(bs, n)

        def _verify_input(self, plan: Plan, prefix_lens: Tensor, cpu: Tensor | None, kv_plan: Any) -> Any:
            # Without the overlap schedule the host's lengths are the device's; a backend that keeps none costs a wait.
            total = int(prefix_lens.sum() if cpu is None else cpu.sum())
            return DFlashVerifyInput(
                draft_token=plan.tokens.reshape(-1),
                positions=plan.positions.reshape(-1),
                draft_token_num=plan.width,
                custom_mask=plan.mask(prefix_lens, total),
                capture_hidden_mode=CaptureHiddenMode.FULL,
                kv_loc_plan=kv_plan,
            )

        def _verify(self, batch: Any, verify: Any, window: Tensor, draft_input: Any) -> tuple[Any, Any]:
            """Run the target over the trees, with the host's lengths widened meanwhile as DFLASH does it."""
            batch.out_cache_loc = window.reshape(-1)
            before = batch.seq_lens_cpu, batch.seq_lens_sum
            if before[0] is not None:
                batch.seq_lens_cpu = before[0] + self.tree_width
                batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
            elif draft_input.nxt_kv_lens_cpu is not None:
                batch.seq_lens_cpu, batch.seq_lens_sum = draft_input.nxt_kv_lens_cpu, int(draft_input.nxt_kv_lens_sum)
            forward_batch, _ = verify.prepare_for_verify(batch, self.target_worker)
            batch.seq_lens_cpu, batch.seq_lens_sum = before
            out = self.target_worker.forward_batch_generation(
                batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
            )
            logits_output, processor = out.logits_output, self._target_logits_processor
            if processor is not None and processor.is_deferred_shard(logits_output.next_token_logits):
                logits_output.next_token_logits = processor.finish_deferred_gather(logits_output.next_token_logits)
            if logits_output.hidden_states is None:
                raise RuntimeError("DDTREE: the verify forward returned no hidden states")
            return logits_output, out

        def _choose(self, logits: Tensor, plan: Plan, batch: Any) -> Tensor:
            """Return the target's token after each node, `[bs, n]`, the same on every rank."""
            bs, n = plan.tokens.shape
            info = batch.sampling_info
            if info is not None:
                apply_dflash_verify_logits_adjustments(next_token_logits=logits, sampling_info=info, draft_token_num=n)
            if info is None or info.is_all_greedy:
                chosen, site = logits.argmax(dim=-1).view(bs, n), SpecTpSyncSite.DFLASH_ACCEPT_GREEDY
            else:
                chosen = choose_tokens(logits.view(bs, n, -1), plan.positions, draw_of(info, batch.reqs, logits.device))
                site = SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE
            self._tp_sync.sync(site, chosen)
            return chosen

        def _append_path(self, hidden: Tensor, kv_plan: Any, prefix_lens: Tensor, path: Tensor, lengths: Tensor) -> None:
            """Write the path's hidden states into the drafter's cache, at the slots that the path keeps."""
            bs, n, block = len(prefix_lens), self.tree_width, path.shape[1]
            node = path.clamp(min=0)
            row = torch.arange(bs, device=path.device)[:, None] * n + node
            slots = self._draft_write_ids(kv_plan).view(bs, n).gather(1, node)
            positions = prefix_lens[:, None] + torch.arange(block, device=path.device)
            self._append_target_hidden_to_draft_kv_by_loc(
                target_hidden=hidden[row.reshape(-1)],
                cache_loc=slots.reshape(-1),
                cache_loc_2d=slots,
                positions=positions.reshape(-1),
                commit_lens=lengths.to(torch.int32),
            )

        def prove(self) -> None:
            """Verify a known tree, in the graph and eagerly. Raises SelfTestFailed when its mask is not in effect."""
            runner = self.model_runner
            batch = min(2, runner.req_to_token_pool.req_to_token.shape[0] - 1)
            modes = [("CUDA graph", True)] if getattr(runner, "decode_cuda_graph_runner", None) else []
            for mode, graph in (*modes, ("eager", False)):
                what = f"{type(runner.attn_backend).__name__}, budget {self.tree_width - 1}, {mode}"
                verify = functools.partial(self._verify_known, graph)
                self_test(verify, self.tree_width, runner.model_config.vocab_size, batch, self.device, what)
            logger.info("DDTREE ready: budget %d, self-test passed", self.tree_width - 1)

        def _verify_known(self, graph: bool, plan: Plan, lengths: Sequence[int]) -> Tensor:
            """Return the logits `[bs, n, V]` of a plan, on slots that are given back."""
            runner, n, bs = self.model_runner, plan.width, len(lengths)
            allocator, table = runner.token_to_kv_pool_allocator, runner.req_to_token_pool.req_to_token
            rows = torch.arange(1, bs + 1, device=self.device)
            saved, slots = table[rows].clone(), allocator.alloc(sum(lengths) + bs * n)
            try:
                parts = torch.split(slots, [length + n for length in lengths])
                for row, part in zip(rows.tolist(), parts, strict=True):
                    table[row, : part.numel()] = part.to(table.dtype)
                seq_lens = torch.tensor(lengths, dtype=torch.int64, device=self.device)
                cpu = torch.tensor(lengths, dtype=torch.int64)
                verify = self._verify_input(plan, seq_lens, cpu, None)
                forward_batch = ForwardBatch(
                    forward_mode=ForwardMode.TARGET_VERIFY,
                    batch_size=bs,
                    input_ids=verify.draft_token,
                    req_pool_indices=rows,
                    seq_lens=seq_lens,
                    out_cache_loc=torch.cat([part[-n:] for part in parts]),
                    seq_lens_sum=int(cpu.sum()) + bs * n,
                    seq_lens_cpu=cpu + n,
                    positions=verify.positions,
                    spec_algorithm=runner.spec_algorithm,
                    spec_info=verify,
                    capture_hidden_mode=CaptureHiddenMode.FULL,
                    can_run_decode_cuda_graph=graph,
                )
                runner.kv_index_translator.bind_own_plan(forward_batch)
                with torch.inference_mode():
                    logits: Tensor = runner.forward(forward_batch).logits_output.next_token_logits
                    processor = self._target_logits_processor
                    if processor is not None and processor.is_deferred_shard(logits):
                        logits = processor.finish_deferred_gather(logits)
                return logits.float().view(bs, n, -1).clone()
            finally:
                table[rows] = saved
                allocator.free(slots)

    return DDTreeWorker
