"""What an adapter for SGLang 0.5.23 will stand on. There is none yet; this says whether its seams are where they were read.

The worker became asynchronous there (spec v2): cache slots are reserved ahead, results stay on the device, and the
algorithm object has hooks that give target and drafter different widths.
"""

from __future__ import annotations

from sglang_overlay.contract import Symbol

SRT = "sglang/srt/"
SPEC = SRT + "speculative/"

SYMBOLS: tuple[Symbol, ...] = (
    Symbol(
        SPEC + "spec_info.py",
        "SpeculativeAlgorithm.register",
        params=("name", "supports_overlap", "validate_server_args", "spec_class"),
    ),
    # Called on every algorithm object, but only the enum has them: our class has to bring them.
    Symbol(
        SPEC + "spec_info.py",
        "SpeculativeAlgorithm",
        members=("DFLASH", "carries_draft_hidden_states", "create_future_map", "need_topk", "from_string"),
    ),
    Symbol(
        SPEC + "spec_registry.py",
        "CustomSpecAlgo",
        members=(
            "create_worker",
            "get_num_tokens_per_req_for_target_verify",
            "handle_server_args",
            "has_draft_kv",
            "is_dflash",
            "is_dflash_family",
            "resolve_max_speculative_num_draft_tokens",
            "supports_target_verify_for_draft",
        ),
    ),
    Symbol(
        SPEC + "spec_registry.py",
        "CustomSpecAlgo.get_num_tokens_per_req_for_target_verify",
        params=("num_draft_tokens", "is_draft_worker"),
    ),
    Symbol(
        SPEC + "dflash_worker_v2.py",
        "DFlashWorkerV2",
        params=("server_args", "target_worker"),
        members=(
            "_accept_block",
            "_append_target_hidden_to_draft_kv_by_loc",
            "_greedy_sample_from_vocab_parallel_head",
            "_make_next_draft_input_decode",
            "_maybe_build_draft_sampler",
            "forward_batch_generation",
        ),
    ),
    Symbol(
        SPEC + "dflash_worker_v2.py",
        "DFlashWorkerV2.forward_batch_generation",
        params=("batch", "on_publish", "grammar_barrier"),
    ),
    Symbol(
        SPEC + "dflash_worker_v2.py",
        "DFlashWorkerV2._append_target_hidden_to_draft_kv_by_loc",
        params=("target_hidden", "cache_loc", "cache_loc_2d", "positions", "commit_lens"),
    ),
    Symbol(
        SPEC + "dflash_info.py",
        "DFlashVerifyInput",
        params=("draft_token", "positions", "draft_token_num", "custom_mask", "capture_hidden_mode", "kv_loc_plan"),
    ),
    Symbol(SPEC + "dflash_info.py", "DFlashVerifyInput.prepare_for_verify", params=("batch", "target_worker")),
    Symbol(SPEC + "dflash_info_v2.py", "DFlashDraftInputV2", members=("bonus_tokens", "new_seq_lens", "prepare_for_decode")),
    Symbol(SRT + "plugins/__init__.py", "load_plugins"),
    Symbol(SRT + "plugins/hook_registry.py", "HookRegistry.register", params=("target", "hook", "hook_type")),
)
