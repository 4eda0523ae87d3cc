"""Validate and size DDTREE from SGLang 0.5.23's arguments, and refuse what was not read through there."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

from sglang_overlay.runtime.args import DEFAULT_BUDGET, DEFAULT_TOPK_CAP, REFUSED_TARGETS, TARGETS, Refusal, parse_rungs
from sglang_overlay.runtime.requests import refusal

logger = logging.getLogger(__name__)
BACKENDS = ("triton",)
DEFAULT_BLOCK = 16
TOPK = "SGLANG_DDTREE_TOPK"


def refusals(args: Any) -> Iterator[Refusal]:
    """Yield every setting of SGLang's resolved arguments that the adapter does not support."""
    from sglang.srt.arg_groups.overrides import attention_backends_of

    on_off = (
        ("--enable-dp-attention", args.enable_dp_attention or args.dp_size > 1, "data-parallel ranks would verify different widths"),
        ("--enable-lora", bool(args.enable_lora or args.lora_paths), "adapters are not applied to the drafter"),
        ("--enable-hierarchical-cache", args.enable_hierarchical_cache, "untested with the drafter's cache"),
        ("--enable-deterministic-inference", args.enable_deterministic_inference, "untested with tree masks"),
        ("--enable-pdmux", args.enable_pdmux, "untested with tree masks"),
        ("--enable-two-batch-overlap", args.enable_two_batch_overlap, "untested with tree masks"),
        ("--speculative-adaptive", args.speculative_adaptive, "the verify width is the tree's"),
        ("--speculative-use-block-verification", args.speculative_use_block_verification, "it accepts chains"),
    )
    for flag, is_on, reason in on_off:
        if is_on:
            yield Refusal(flag, "on", reason, "leave it out")
    exact = (
        ("--page-size", args.page_size or 1, 1, "an accepted path is scattered over its slots, which pages can not express"),
        ("--pipeline-parallel-size", args.pp_size, 1, "the drafter reads hidden states of several layers"),
        ("--attention-context-parallel-size", args.attn_cp_size, 1, "untested with tree masks"),
        ("--disaggregation-mode", args.disaggregation_mode, "null", "the drafter's cache is not transferred"),
        ("--speculative-accept-threshold-single", args.speculative_accept_threshold_single, 1.0, "DDTREE is lossless"),
        ("--speculative-accept-threshold-acc", args.speculative_accept_threshold_acc, 1.0, "DDTREE is lossless"),
    )
    for flag, value, want, reason in exact:
        if value != want:
            yield Refusal(flag, value, reason, f"use `{flag} {want}`")
    for backend in sorted(set(attention_backends_of(args)) - set(BACKENDS), key=str):
        reason = "on this version nobody has shown that it attends along the tree"
        yield Refusal("--attention-backend", backend, reason, f"use one of {', '.join(BACKENDS)}")
    if not str(args.device).startswith("cuda"):
        yield Refusal("--device", args.device, "only CUDA has the kernels", "use `--device cuda`")
    if args.speculative_draft_window_size is not None:
        reason = "the compact draft table is untested with permuted slots"
        yield Refusal("--speculative-draft-window-size", args.speculative_draft_window_size, reason, "leave it out")
    if args.speculative_draft_model_path is None:
        yield Refusal("--speculative-draft-model-path", None, "DDTREE needs a DFlash drafter", "give its path")


def resolve(args: Any, architectures: Sequence[str], drafter_block: int | None) -> None:
    """Set what DDTREE needs on SGLang's arguments. Raises ValueError naming everything it can not do.

    `args` is the stand-in that SGLang gives a plugin: reads see resolved values, writes are recorded. A plugin can not add
    flags: the budget is `--speculative-num-draft-tokens` minus one or SGLANG_DDTREE_BUDGET, K `--speculative-eagle-topk` or
    SGLANG_DDTREE_TOPK, the drafter's block `--speculative-dflash-block-size` or its own config.
    """
    refused = list(refusals(args))
    if os.environ.get("SGLANG_DDTREE_BUDGET_TABLE"):
        refused.append(Refusal("SGLANG_DDTREE_BUDGET_TABLE", "set", "graphs have one width on this version", "use SGLANG_DDTREE_BUDGET"))
    architecture = (list(architectures) or ["none"])[0]
    if architecture not in TARGETS:
        reason = REFUSED_TARGETS.get(architecture, "it has no hook for the hidden states that the drafter reads")
        refused.append(Refusal("--model-path", architecture, reason, f"use one of {', '.join(TARGETS)}"))
    if refused:
        raise ValueError("DDTREE does not support:\n" + "\n".join(f"  {one}" for one in refused))
    given = args.speculative_num_draft_tokens
    budget = number("SGLANG_DDTREE_BUDGET", DEFAULT_BUDGET if given is None else given - 1)
    parse_rungs(budget, None)  # its range
    block = int(args.speculative_dflash_block_size or drafter_block or DEFAULT_BLOCK)
    if not 2 <= block <= 32:
        raise ValueError(f"`--speculative-dflash-block-size`: {block}: DDTREE drafts 1 to 31 tokens; use 2 to 32")
    if budget + 1 < block:
        raise ValueError(
            f"DDTREE budget: {budget}: buffers are sized by the verify forward, which would be narrower than a block of {block}; "
            f"use {block - 1} or more"
        )
    topk = number(TOPK, args.speculative_eagle_topk or DEFAULT_TOPK_CAP)
    if topk < 1:
        raise ValueError(f"`{TOPK}`: {topk}: at least one token per position; use 1 or more")
    os.environ[TOPK] = str(min(topk, budget))  # for the schedulers, which this process starts
    args.speculative_dflash_block_size = block
    args.speculative_num_draft_tokens = budget + 1
    args.page_size = 1
    args.speculative_num_steps = 1
    args.speculative_eagle_topk = 1
    args.speculative_draft_attention_backend = args.speculative_draft_attention_backend or "triton"
    args.max_running_requests = args.max_running_requests or 48
    args.enable_mixed_chunk = False
    args.disable_overlap_schedule = True
    logger.info("DDTREE: budget %d, block size %d, top-k %d, without the overlap schedule", budget, block, min(topk, budget))


def number(variable: str, default: int) -> int:
    """Return a whole number from the environment, or the default. Raises ValueError naming the variable."""
    text = os.environ.get(variable)
    try:
        return int(text) if text else int(default)
    except ValueError:
        raise ValueError(f"`{variable}`: {text}: not a number; set for example `{variable}=63`") from None


def refuse_requests() -> None:
    """Put our request check behind the scheduler's own, in the process of a scheduler that runs DDTREE."""
    from sglang.srt.managers import scheduler

    validate = scheduler.validate_dflash_request
    if getattr(validate, "is_ddtree", False):
        return

    def check(req: Any, *rest: Any) -> str | None:
        return validate(req, *rest) or request_refusal(req)

    check.is_ddtree = True  # type: ignore[attr-defined]
    scheduler.validate_dflash_request = check


def request_refusal(req: Any) -> str | None:
    """Return why a tree can not answer a request losslessly, or None."""
    params = req.sampling_params
    if req.return_logprob:
        return "DDTREE does not support `return_logprob`: a tree's rows are not the text's; leave it out"
    if any(getattr(params, name) is not None for name in ("json_schema", "regex", "ebnf", "structural_tag")):
        return "DDTREE does not support grammars: they change along the tree; leave them out"
    return refusal(req)


def target_architectures(args: Any) -> Sequence[str]:
    """Return the architectures of the target's config."""
    from sglang.srt.utils.hf_transformers_utils import get_config

    config = get_config(args.model_path, trust_remote_code=args.trust_remote_code, revision=args.revision)
    return config.architectures or ()


def drafter_block(args: Any) -> int | None:
    """Return the block size of the drafter's config, or None."""
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
    from sglang.srt.utils.hf_transformers_utils import get_config

    if args.speculative_draft_model_path is None:
        return None
    config = get_config(
        args.speculative_draft_model_path, trust_remote_code=args.trust_remote_code, revision=args.speculative_draft_model_revision
    )
    size = parse_dflash_draft_config(draft_hf_config=config).resolve_block_size(default=None)
    return None if size is None else int(size)
