"""Run DDTREE in SGLang's DFLASH worker: set up at start, then build a tree for every round."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_overlay.runtime.args import NAME, Rung, logger, narrow_draft_args, parse_rungs, takes_over
from sglang_overlay.runtime.built import EDITED_FILES, READ_FILES
from sglang_overlay.runtime.fa3 import tree_attention_class
from sglang_overlay.runtime.plan import Head, Plan, make_trees, must_agree
from sglang_overlay.runtime.replay import Replay
from sglang_overlay.runtime.requests import refusing
from sglang_overlay.runtime.selftest import self_test
from sglang_overlay.runtime.verify import verify_input_class

#: Set to anything: compare the trees of the tensor-parallel ranks in every round, at the price of a wait for the device.
CHECK_RANKS = "SGLANG_DDTREE_CHECK_RANKS"
_capture_masks: dict[tuple[int, int], Tensor] = {}


@dataclass(frozen=True, slots=True)
class Stage:
    """One rung of the budget table, ready to run: SGLang's side (backend and graphs for its width) and ours."""

    rung: Rung
    backend: Any
    graphs: Any
    trees: Replay
    reads_mask: bool  # whether the backend attends by a mask, or has its own way to see the tree


@dataclass(frozen=True, slots=True)
class Runtime:
    """What a worker keeps between rounds."""

    stages: tuple[Stage, ...]

    def stage(self, batch: int) -> Stage:
        """Return the stage for a batch size."""
        return next(s for s in self.stages if s.rung.max_batch is None or batch <= s.rung.max_batch)


def start(worker: Any, draft_args: Any) -> None:
    """Set DDTREE up while the worker is constructed: the target is loaded, the drafter is not.

    Does nothing for DFLASH. Raises RuntimeError when files do not belong together, ValueError for an unsupported
    target, SelfTestFailed when the target would not attend along the tree.
    """
    args = worker.server_args
    if args.speculative_algorithm != NAME:
        return
    check_files(Path(__file__).resolve().parents[3])
    runner = worker.target_worker.model_runner
    refuse_target(runner)
    narrow_draft_args(draft_args)
    refuse_requests()
    head = output_head(runner)
    rungs = parse_rungs(args.speculative_ddtree_budget, args.speculative_ddtree_budget_table)
    # The largest verify input comes first, so that smaller ones reuse its buffers.
    stages = {rung: _stage(args, runner, rung, head) for rung in sorted(rungs, key=lambda r: -r.budget)}
    worker.ddtree = Runtime(tuple(stages[rung] for rung in rungs))
    for stage in worker.ddtree.stages:
        _prove(worker, stage)
    if worker.tp_rank == 0:
        logger.info("DDTREE ready: budgets %s, self-test passed", [stage.rung.budget for stage in worker.ddtree.stages])


def prepare_verify(worker: Any, batch: Any, hidden: Tensor, roots: Tensor) -> None:
    """Turn the hidden states of the drafted positions `[bs, block - 1, H]` into trees, ready to verify.

    `roots` `[bs]` are the last verified tokens, whose own cache rows the verify forward writes.
    """
    runtime: Runtime = worker.ddtree
    stage = runtime.stage(batch.batch_size())
    tokens, parents, n_valid, positions = stage.trees(hidden, roots, batch.seq_lens)
    plan = Plan(tokens, parents, n_valid, positions, worker.block_size - 1)
    _enter(worker.model_runner, stage)
    verify = _verify_input(plan, stage.reads_mask)
    verify.prepare_for_verify(batch, worker.page_size)
    batch.forward_mode = _forward_mode("TARGET_VERIFY")
    batch.spec_info = verify
    batch.return_hidden_states = False


def install_capture_mask(verify: Any) -> None:
    """Give the target's graph capture an all-True mask, so that its graphs read one.

    Called for every DFLASH verify input made; only the target's placeholders have no tokens and want hidden states.
    """
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.server_args import get_global_server_args

    args = get_global_server_args()
    if args is None or args.speculative_algorithm != NAME or verify.custom_mask is not None:
        return
    if verify.draft_token is not None or verify.capture_hidden_mode != CaptureHiddenMode.FULL:
        return
    n = int(verify.draft_token_num)
    batch = max(args.max_running_requests, args.cuda_graph_max_bs or 1)
    if (n, batch) not in _capture_masks:
        # Placeholder requests have a prefix of one token.
        _capture_masks[n, batch] = torch.ones(batch * n * (n + 1), dtype=torch.bool, device=args.device)
    verify.custom_mask = _capture_masks[n, batch]


def check_files(site: Path) -> None:
    """Refuse to run beside files that the overlay was not built with; warn about files it only reads."""
    for files, is_edited in ((EDITED_FILES, True), (READ_FILES, False)):
        for name, want in files.items():
            path = site / name
            if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == want:
                continue
            if is_edited:
                raise RuntimeError(f"DDTREE: `{path}` is not the file this overlay was built with; push the overlay again")
            logger.warning("DDTREE: `%s` is not the stock file that this overlay was tested with", path)


def refuse_target(runner: Any) -> None:
    """Raise ValueError for a target whose attention has no tree form here, whatever its name says."""
    config = runner.model_config
    facts = (
        ("sliding-window attention", runner.sliding_window_size is not None or runner.is_hybrid_swa),
        ("linear-attention state", runner.hybrid_gdn_config is not None or runner.mamba2_config is not None),
        ("multi-head latent attention", config.attention_arch.name == "MLA"),
        ("image or audio input", config.is_multimodal),
    )
    found = [name for name, is_so in facts if is_so]
    if found:
        raise ValueError(f"DDTREE does not support `--model-path`: {config.model_path}: it has {', '.join(found)}; use a plain text model")


def refuse_requests() -> None:
    """Put our request check behind the scheduler's own."""
    from sglang.srt.managers import scheduler

    if not getattr(scheduler.validate_dflash_request, "is_ddtree", False):
        check: Any = refusing(scheduler.validate_dflash_request)
        check.is_ddtree = True
        scheduler.validate_dflash_request = check


def output_head(runner: Any) -> Head:
    """Return this rank's shard of the target's output head. Raises ValueError for one with added tokens or a bias."""
    from sglang.srt.distributed import get_tp_group

    head = getattr(runner.model, "lm_head", None)
    shard = getattr(head, "shard_indices", None)
    if head is None or shard is None or getattr(head, "weight", None) is None:
        raise ValueError("DDTREE needs a target with a vocabulary-parallel `lm_head`")
    if int(shard.num_added_elements) or getattr(head, "bias", None) is not None:
        raise ValueError("DDTREE does not support an `lm_head` with added vocabulary or a bias")
    group = get_tp_group()
    ranks = int(group.world_size)

    def gather(words: Tensor) -> Tensor:
        flat = words.reshape(-1)
        out = flat.new_empty(ranks * flat.numel())
        group.all_gather_into_tensor(out, flat)
        return out.view(ranks, *words.shape)

    weight = head.weight[: int(shard.num_org_elements)]
    return Head(weight, int(shard.org_vocab_start_index), gather if ranks > 1 else None)


def _stage(args: Any, runner: Any, rung: Rung, head: Head) -> Stage:
    sizes: list[int] = args.ddtree_graph_bs.get(rung.budget, [])
    backend, graphs = runner.attn_backend, runner.graph_runner
    block = args.speculative_dflash_block_size
    ours = takes_over(args)
    if ours or rung.width != args.speculative_num_draft_tokens:
        make = functools.partial(tree_attention_class(), max_depth=block - 1) if ours else _stock_attention
        backend, graphs = _target_for(args, runner, rung, sizes, make)
    topk = min(args.speculative_ddtree_topk, rung.budget)

    def trees(hidden: Tensor, roots: Tensor, seq_lens: Tensor) -> tuple[Tensor, ...]:
        made = make_trees(hidden, roots, seq_lens, head, rung.budget, topk)
        if head.gather is not None and os.environ.get(CHECK_RANKS):
            must_agree(made, head.gather)
        return made

    # Several ranks talk while they make trees; capturing that is left to SGLang's own graphs.
    most = max(sizes, default=1)
    # Not in inference mode: the buffers are written in every round, which runs outside of it.
    with torch.no_grad():
        roots = torch.zeros(most, dtype=torch.int64, device=runner.device)
        hidden = torch.zeros((most, block - 1, head.weight.shape[1]), dtype=runner.dtype, device=runner.device)
        seq_lens = torch.ones(most, dtype=torch.int64, device=runner.device)
        replay = Replay(trees, (hidden, roots, seq_lens), sizes if head.gather is None else [])
    return Stage(rung, backend, graphs, replay, not ours)


def _stock_attention(runner: Any) -> Any:
    return runner._get_attention_backend(init_new_workspace=True)


def _target_for(args: Any, runner: Any, rung: Rung, sizes: Sequence[int], make: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Give the target a second attention backend and graph set for another width; it keeps the ones it has."""
    from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner

    saved = {name: getattr(args, name) for name in ("speculative_num_draft_tokens", "cuda_graph_bs", "cuda_graph_max_bs")}
    saved_workspace = runner.init_new_workspace
    args.speculative_num_draft_tokens = rung.width
    try:
        backend = make(runner)
        graphs = None
        if sizes:
            args.cuda_graph_bs, args.cuda_graph_max_bs = list(sizes), max(sizes)
            graphs = CudaGraphRunner(runner, attn_backend=backend, speculative_num_draft_tokens=rung.width)
    finally:
        runner.init_new_workspace = saved_workspace
        for name, value in saved.items():
            setattr(args, name, value)
    return backend, graphs


def _enter(runner: Any, stage: Stage) -> None:
    runner.attn_backend, runner.graph_runner = stage.backend, stage.graphs


def _verify_input(plan: Plan, reads_mask: bool) -> Any:
    verify = verify_input_class()(
        draft_token=plan.tokens.reshape(-1),
        positions=plan.positions.reshape(-1),
        draft_token_num=plan.width,
        topk=2,
    )
    verify.plan, verify.reads_mask = plan, reads_mask
    return verify


def _forward_mode(name: str) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return ForwardMode[name]


def _prove(worker: Any, stage: Stage) -> None:
    runner = worker.target_worker.model_runner
    batch = min(2, runner.req_to_token_pool.size, stage.rung.max_batch or 2)
    modes = [("CUDA graph", stage.graphs)] if stage.graphs is not None else []
    for mode, graphs in (*modes, ("eager", None)):
        with _borrowed(runner, stage, graphs, batch) as verify:
            what = f"{type(stage.backend).__name__}, budget {stage.rung.budget}, {mode}"
            self_test(verify, stage.rung.width, runner.model_config.vocab_size, batch, runner.device, what)


@contextlib.contextmanager
def _borrowed(runner: Any, stage: Stage, graphs: Any, batch: int) -> Iterator[Any]:
    """Lend request rows and cache slots to the self-test, and give back everything as it was."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch

    table, allocator = runner.req_to_token_pool.req_to_token, runner.token_to_kv_pool_allocator
    state, saved = allocator.backup_state(), (runner.attn_backend, runner.graph_runner)
    rows = table[:batch].clone()

    def verify(plan: Plan, lengths: Sequence[int]) -> Tensor:
        n = plan.width
        allocator.restore_state(state)
        slots = allocator.alloc(sum(lengths) + batch * n)
        at = 0
        tails = []
        for row, length in enumerate(lengths):
            part = slots[at : at + length + n]
            table[row, : length + n] = part.to(table.dtype)
            tails.append(part[length:])
            at += length + n
        seq_lens = torch.tensor(lengths, dtype=torch.int64, device=runner.device)
        info = _verify_input(plan, stage.reads_mask)
        info.custom_mask = plan.mask(seq_lens, sum(lengths)) if stage.reads_mask else None
        forward = ForwardBatch(
            forward_mode=_forward_mode("TARGET_VERIFY"),
            batch_size=batch,
            input_ids=plan.tokens.reshape(-1),
            req_pool_indices=torch.arange(batch, dtype=torch.int64, device=runner.device),
            seq_lens=seq_lens,
            out_cache_loc=torch.cat(tails),
            seq_lens_sum=sum(lengths),
            seq_lens_cpu=torch.tensor(lengths, dtype=torch.int64),
            positions=plan.positions.reshape(-1),
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool=runner.token_to_kv_pool,
            attn_backend=stage.backend,
            spec_algorithm=runner.spec_algorithm,
            spec_info=info,
            capture_hidden_mode=CaptureHiddenMode.FULL,
        )
        with torch.inference_mode():
            logits: Tensor = runner.forward(forward).logits_output.next_token_logits
        return logits.float().view(batch, n, -1).clone()

    runner.attn_backend, runner.graph_runner = stage.backend, graphs
    try:
        yield verify
    finally:
        runner.attn_backend, runner.graph_runner = saved
        table[:batch] = rows
        allocator.restore_state(state)
