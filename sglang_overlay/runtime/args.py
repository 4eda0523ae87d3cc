"""Validate and size DDTREE from SGLang's server arguments. Every refusal names flag, value, reason and remedy."""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

NAME = "DDTREE"
DEFAULT_BUDGET = 31
DEFAULT_TOPK_CAP = 64
MAX_BUDGET = 1023
GRAPH_BUFFER_LIMIT = 4 << 30  # bytes; what SGLang itself sets aside for speculation
BUDGET_HELP = "nodes excluding the root; the verify forward has budget+1 tokens per request"
TARGETS = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
REFUSED_TARGETS = {
    "GptOssForCausalLM": "its sliding-window layers mask by index, not by depth in the tree",
    "Qwen3NextForCausalLM": "its linear-attention state has no tree form here",
    "Qwen3_5ForConditionalGeneration": "its linear-attention state has no tree form here",
    "Qwen3_5MoeForConditionalGeneration": "its linear-attention state has no tree form here",
    "Qwen3VLForConditionalGeneration": "its three-dimensional positions have no tree form here",
    "DeepseekV2ForCausalLM": "tree masks are untested with multi-head latent attention",
    "DeepseekV3ForCausalLM": "tree masks are untested with multi-head latent attention",
    "KimiK25ForConditionalGeneration": "tree masks are untested with multi-head latent attention",
}
BACKENDS = ("triton", "flashinfer", "fa3")
#: Set to anything: leave the trees of fa3 to SGLang's own two calls, to compare with them.
STOCK_ATTENTION = "SGLANG_DDTREE_STOCK_ATTENTION"


@dataclass(frozen=True, slots=True)
class Refusal:
    """One setting that DDTREE does not support."""

    flag: str
    value: object
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"`{self.flag}`: {self.value}: {self.reason}; {self.remedy}"


@dataclass(frozen=True, slots=True)
class Rung:
    """A node budget and the largest batch size it is for (None: any)."""

    budget: int
    max_batch: int | None

    @property
    def width(self) -> int:
        """Count the tokens of one request's verify forward."""
        return self.budget + 1


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """Add the three DDTREE flags to SGLang's parser."""
    parser.add_argument(
        "--speculative-ddtree-budget",
        type=int,
        default=None,
        help=f"DDTREE only. Node budget of the draft tree: {BUDGET_HELP}. Default: {DEFAULT_BUDGET}.",
    )
    parser.add_argument(
        "--speculative-ddtree-topk",
        type=int,
        default=None,
        help="DDTREE only. How many tokens per drafted position may enter the tree. A value below the budget is an "
        f"approximation of the best tree. Default: the budget, at most {DEFAULT_TOPK_CAP}.",
    )
    parser.add_argument(
        "--speculative-ddtree-budget-table",
        type=str,
        default=None,
        help="DDTREE only. Budgets by batch size, as `batch:budget` pairs or a file that holds them, for example "
        "`1:63,2:31,4:15,16:7`: batches up to the first number use the first budget, larger ones than the last number "
        "the last. Each budget captures its own CUDA graphs. Excludes --speculative-ddtree-budget.",
    )


def parse_rungs(budget: int | None, table: str | None) -> tuple[Rung, ...]:
    """Return the rungs by ascending batch size, the last one for any. Raises ValueError naming the flag."""
    if table is None:
        value = DEFAULT_BUDGET if budget is None else budget
        _check_budget("--speculative-ddtree-budget", value)
        return (Rung(value, None),)
    flag = "--speculative-ddtree-budget-table"
    if budget is not None:
        raise ValueError(f"`{flag}` and `--speculative-ddtree-budget` exclude each other; give one of them")
    text = Path(table).read_text() if ":" not in table and Path(table).is_file() else table
    try:
        pairs = [tuple(int(number) for number in item.split(":")) for item in text.replace("\n", ",").split(",") if item.strip()]
        rungs = [Rung(width, batch) for batch, width in pairs]
    except ValueError:
        raise ValueError(f"`{flag}`: {table}: not `batch:budget` pairs; write for example `1:63,2:31,4:15`") from None
    batches = [rung.max_batch or 0 for rung in rungs]
    if not rungs or batches != sorted(set(batches)) or batches[0] < 1:
        raise ValueError(f"`{flag}`: {table}: batch sizes must ascend from 1 or more; write for example `1:63,2:31,4:15`")
    for rung in rungs:
        _check_budget(flag, rung.budget)
    return (*rungs[:-1], Rung(rungs[-1].budget, None))


def _check_budget(flag: str, value: int) -> None:
    if not 1 <= value <= MAX_BUDGET:
        raise ValueError(f"`{flag}`: {value}: a budget is 1 to {MAX_BUDGET} ({BUDGET_HELP})")


def refusals(args: Any) -> Iterator[Refusal]:
    """Yield every unsupported setting of SGLang's resolved server arguments."""
    prefill, decode = args.get_attention_backends()
    on_off = (
        ("--enable-dp-attention", args.enable_dp_attention, "the draft worker has no data-parallel attention"),
        ("--enable-lora", bool(args.enable_lora or args.lora_paths), "adapters are not applied to the drafter"),
        ("--enable-hierarchical-cache", args.enable_hierarchical_cache, "untested with the drafter's cache"),
        ("--enable-deterministic-inference", args.enable_deterministic_inference, "untested with tree masks"),
        ("--enable-pdmux", args.enable_pdmux, "untested with tree masks"),
        ("--enable-two-batch-overlap", args.enable_two_batch_overlap, "untested with tree masks"),
    )
    for flag, is_on, reason in on_off:
        if is_on:
            yield Refusal(flag, "on", reason, "leave it out")
    exact = (
        ("--page-size", args.page_size, 1, "an accepted path is scattered over its slots, which pages can not express"),
        ("--pipeline-parallel-size", args.pp_size, 1, "the drafter reads hidden states of several layers"),
        ("--attention-context-parallel-size", args.attn_cp_size, 1, "untested with tree masks"),
        ("--disaggregation-mode", args.disaggregation_mode, "null", "the drafter's cache is not transferred"),
        ("--speculative-accept-threshold-single", args.speculative_accept_threshold_single, 1.0, "DDTREE is lossless"),
        ("--speculative-accept-threshold-acc", args.speculative_accept_threshold_acc, 1.0, "DDTREE is lossless"),
    )
    for flag, value, want, reason in exact:
        if value != want:
            yield Refusal(flag, value, reason, f"use `{flag} {want}`")
    if prefill != decode:
        reason = "which of two backends verifies depends on a third flag"
        yield Refusal("--prefill-attention-backend", f"{prefill}, decode {decode}", reason, "use one `--attention-backend`")
    elif decode not in BACKENDS:
        reason = "it can not attend along a tree, or nobody has shown that it does"
        yield Refusal("--attention-backend", decode, reason, f"use one of {', '.join(BACKENDS)}")
    if decode == "fa3" and str(args.kv_cache_dtype).startswith("fp8"):
        yield Refusal("--kv-cache-dtype", args.kv_cache_dtype, "untested with fa3 trees", "use triton or flashinfer")
    if args.device != "cuda":
        yield Refusal("--device", args.device, "only CUDA is tested", "use `--device cuda`")
    for name in ("speculative_dflash_draft_window_size", "speculative_draft_window_size"):
        value = getattr(args, name, None)
        if value is not None:
            reason = "the compact draft table is untested with scattered slots"
            yield Refusal("--" + name.replace("_", "-"), value, reason, "leave it out")
    if args.speculative_draft_model_path is None:
        yield Refusal("--speculative-draft-model-path", None, "DDTREE needs a DFlash drafter", "give its path")
    architecture = (args.get_model_config().hf_config.architectures or ["none"])[0]
    if architecture not in TARGETS:
        reason = REFUSED_TARGETS.get(architecture, "it has no hook for the hidden states that the drafter reads")
        yield Refusal("--model-path", architecture, reason, f"use one of {', '.join(TARGETS)}")


def resolve_server_args(args: Any) -> None:
    """Set what DDTREE needs on SGLang's server arguments. Raises ValueError naming everything it can not do."""
    refused = list(refusals(args))
    if refused:
        raise ValueError("DDTREE does not support:\n" + "\n".join(f"  {one}" for one in refused))
    rungs = parse_rungs(args.speculative_ddtree_budget, args.speculative_ddtree_budget_table)
    widest = max(rung.width for rung in rungs)
    if args.speculative_num_draft_tokens not in (None, widest):
        raise ValueError(
            f"`--speculative-num-draft-tokens`: {args.speculative_num_draft_tokens}: DDTREE verifies budget+1 = "
            f"{widest} tokens; leave it out"
        )
    config = _draft_config(args)
    block = int(args.speculative_dflash_block_size or config.get("block_size") or 16)
    if not 2 <= block <= 32:
        raise ValueError(f"`--speculative-dflash-block-size`: {block}: DDTREE drafts 1 to 31 tokens; use 2 to 32")
    topk = args.speculative_ddtree_topk
    if topk is not None and topk < 1:
        raise ValueError(f"`--speculative-ddtree-topk`: {topk}: at least one token per position; use 1 or more")
    args.speculative_ddtree_topk = min(topk or DEFAULT_TOPK_CAP, widest - 1)
    args.speculative_dflash_block_size = block
    args.speculative_num_draft_tokens = widest
    args.speculative_num_steps = 1
    # FA3 builds its tree metadata only above 1; elsewhere 1 keeps SGLang's own leak check awake.
    args.speculative_eagle_topk = 2 if "fa3" in args.get_attention_backends() else 1
    args.max_running_requests = args.max_running_requests or 48
    args.enable_mixed_chunk = False
    if not args.disable_overlap_schedule:
        args.disable_overlap_schedule = True
        logger.warning("DDTREE runs without the overlap schedule")
    _size_graphs(args, rungs)
    logger.info("DDTREE: budgets by batch size %s, block size %d, top-k %d", rungs, block, args.speculative_ddtree_topk)


def takes_over(args: Any) -> bool:
    """Return whether the target attends to trees by our kernel; else SGLang's backend has a form for them."""
    return "fa3" in args.get_attention_backends() and not os.environ.get(STOCK_ATTENTION)


def _size_graphs(args: Any, rungs: tuple[Rung, ...]) -> None:
    """Give each runner the batch sizes that it will see, and no more than fit the buffers' limit."""
    all_sizes = sorted(args.cuda_graph_bs or [])
    args.ddtree_draft_graph_bs = list(all_sizes)
    if args.disable_cuda_graph or not all_sizes:
        args.ddtree_graph_bs = {}
        return
    config = args.get_model_config()
    plan: dict[int, list[int]] = {}
    below = 0
    for rung in rungs:
        # Per token: fp32 logits over the vocabulary, and per context position an int64 index and a mask byte.
        per_request = rung.width * (4 * config.vocab_size + 9 * config.context_len)
        most = min(rung.max_batch or all_sizes[-1], GRAPH_BUFFER_LIMIT // per_request)
        sizes = [size for size in all_sizes if below < size <= most]
        below = rung.max_batch or below
        if rung.max_batch is not None and rung.max_batch not in sizes and rung.max_batch <= most:
            sizes.append(rung.max_batch)
        if rung.max_batch is None and most < all_sizes[-1]:
            logger.warning("DDTREE budget %d: CUDA graphs up to batch size %d, beyond it runs eagerly", rung.budget, most)
        plan[rung.budget] = sorted(set(plan.get(rung.budget, []) + sizes))
    args.ddtree_graph_bs = plan
    widest = max(rung.budget for rung in rungs)
    # SGLang captures its own attention first. Where ours replaces that, one size is enough.
    args.cuda_graph_bs = plan[widest][: 1 if takes_over(args) else None] or all_sizes[:1]
    args.cuda_graph_max_bs = max(args.cuda_graph_bs)


def narrow_draft_args(draft: Any) -> None:
    """Make a copy of the server arguments describe the drafter: blocks, a chain, all batch sizes, its own rope base."""
    draft.speculative_algorithm = "DFLASH"
    draft.speculative_num_draft_tokens = draft.speculative_dflash_block_size
    draft.speculative_eagle_topk = 1
    draft.cuda_graph_bs = list(draft.ddtree_draft_graph_bs) or None
    if draft.cuda_graph_bs:
        draft.cuda_graph_max_bs = max(draft.cuda_graph_bs)
    config = _draft_config(draft)
    theta = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta")
    if theta is not None:
        # transformers 5 keeps it under rope_parameters, where SGLang's drafter does not look and assumes 1e6.
        override = json.loads(draft.json_model_override_args)
        draft.json_model_override_args = json.dumps({"rope_theta": float(theta), **override})


def _draft_config(args: Any) -> dict[str, Any]:
    """Read the drafter's config.json as it is on disk; {} when the path is a hub name."""
    path = Path(args.speculative_draft_model_path) / "config.json"
    if not path.is_file():
        return _hub_config(args)
    config: dict[str, Any] = json.loads(path.read_text())
    inner = config.get("dflash_config") or {}
    return {**config, **{key: value for key, value in inner.items() if key == "block_size"}}


def _hub_config(args: Any) -> dict[str, Any]:
    from sglang.srt.utils.hf_transformers_utils import get_config

    config = get_config(
        args.speculative_draft_model_path,
        trust_remote_code=args.trust_remote_code,
        revision=args.speculative_draft_model_revision,
    ).to_dict()
    inner = config.get("dflash_config") or {}
    return {**config, **{key: value for key, value in inner.items() if key == "block_size"}}
