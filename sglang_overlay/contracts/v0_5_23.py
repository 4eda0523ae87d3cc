"""What the adapter (`adapters/v2*.py`) calls, overrides or reads in SGLang 0.5.23."""

from __future__ import annotations

from sglang_overlay.contract import Symbol

SRT = "sglang/srt/"
SPEC = SRT + "speculative/"
FIELDS = SRT + "arg_groups/fields/"

SYMBOLS: tuple[Symbol, ...] = (
    # The registry. What is called on every algorithm object and only the enum has, our class delegates to it.
    Symbol(
        SPEC + "spec_info.py", "SpeculativeAlgorithm.register", params=("name", "supports_overlap", "validate_server_args", "spec_class")
    ),
    Symbol(
        SPEC + "spec_info.py",
        "SpeculativeAlgorithm",
        members=("DFLASH", "carries_draft_hidden_states", "create_future_map", "get_platform_worker_cls", "need_topk", "from_string"),
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
        SPEC + "spec_registry.py", "CustomSpecAlgo.get_num_tokens_per_req_for_target_verify", params=("num_draft_tokens", "is_draft_worker")
    ),
    Symbol(SPEC + "spec_registry.py", "CustomSpecAlgo.handle_server_args", params=("server_args",)),
    Symbol(SRT + "plugins/__init__.py", "load_plugins"),
    Symbol(SRT + "plugins/hook_registry.py", "HookRegistry.register", params=("target", "hook", "hook_type")),
    # The worker that we subclass.
    Symbol(
        SPEC + "dflash_worker_v2.py",
        "DFlashWorkerV2",
        params=("server_args", "target_worker"),
        members=(
            "_draft_write_ids",
            "_greedy_sample_from_vocab_parallel_head",
            "_is_domino",
            "_make_next_draft_input_decode",
            "_maybe_build_draft_sampler",
            "_target_logits_processor",
            "_tp_sync",
            "alloc_memory_pool",
            "block_size",
            "device",
            "forward_batch_generation",
            "init_attention_backends",
            "init_cuda_graphs",
            "lilicorr",
            "model_runner",
            "selector",
        ),
    ),
    Symbol(SPEC + "dflash_worker_v2.py", "DFlashWorkerV2.forward_batch_generation", params=("batch", "on_publish", "grammar_barrier")),
    Symbol(SPEC + "dflash_worker_v2.py", "DFlashWorkerV2._greedy_sample_from_vocab_parallel_head", params=("hidden_states", "lm_head")),
    Symbol(SPEC + "dflash_worker_v2.py", "DFlashWorkerV2._make_next_draft_input_decode", params=("bonus_tokens", "new_seq_lens")),
    Symbol(SPEC + "dflash_worker_v2.py", "DFlashWorkerV2._draft_write_ids", params=("plan",)),
    Symbol(
        SPEC + "dflash_worker_v2.py",
        "DFlashWorkerV2._append_target_hidden_to_draft_kv_by_loc",
        params=("target_hidden", "cache_loc", "cache_loc_2d", "positions", "commit_lens"),
    ),
    Symbol(SPEC + "base_spec_worker.py", "BaseSpecWorker", members=("target_worker",)),
    # A round.
    Symbol(
        SPEC + "dflash_info.py",
        "DFlashVerifyInput",
        params=("draft_token", "positions", "draft_token_num", "custom_mask", "capture_hidden_mode", "kv_loc_plan"),
    ),
    Symbol(SPEC + "dflash_info.py", "DFlashVerifyInput.__post_init__"),
    Symbol(SPEC + "dflash_info.py", "DFlashVerifyInput.prepare_for_verify", params=("batch", "target_worker")),
    Symbol(
        SPEC + "dflash_info_v2.py",
        "DFlashDraftInputV2",
        members=("bonus_tokens", "new_seq_lens", "nxt_kv_lens_cpu", "nxt_kv_lens_sum", "prepare_for_decode"),
    ),
    Symbol(
        SPEC + "dflash_utils.py",
        "apply_dflash_verify_logits_adjustments",
        params=("next_token_logits", "sampling_info", "draft_token_num"),
    ),
    Symbol(SPEC + "dflash_utils.py", "parse_dflash_draft_config", params=("draft_hf_config",)),
    Symbol(SPEC + "spec_tp_sync.py", "SpecTpSyncSite", members=("DFLASH_ACCEPT_GREEDY", "DFLASH_ACCEPT_SAMPLE")),
    Symbol(SPEC + "spec_tp_sync.py", "SpecTpSync.sync"),
    Symbol(
        "sglang/kernels/ops/speculative/cache_locs.py",
        "assign_extend_cache_locs_func",
        params=("req_pool_indices", "req_to_token", "start_offset", "end_offset", "batch_size", "draft_token_num", "device"),
    ),
    Symbol(
        SRT + "mem_cache/kv_index_translator.py",
        "KVIndexTranslator.plan",
        params=("req_pool_indices", "seq_lens", "seq_lens_cpu", "write_virtual", "read_extent"),
    ),
    Symbol(SRT + "mem_cache/kv_index_translator.py", "KVIndexTranslator.bind_own_plan", params=("forward_batch",)),
    Symbol(
        SRT + "managers/tp_worker.py",
        "TpModelWorker.forward_batch_generation",
        params=("batch", "forward_batch", "is_verify", "skip_attn_backend_init"),
    ),
    Symbol(
        SRT + "managers/utils.py",
        "GenerationBatchResult",
        params=(
            "logits_output",
            "next_token_ids",
            "accept_lens",
            "can_run_cuda_graph",
            "next_draft_input",
            "speculative_num_draft_tokens",
            "new_seq_lens",
            "routed_experts_output",
            "indexer_topk_output",
        ),
    ),
    Symbol(SRT + "layers/logits_processor.py", "LogitsProcessor", members=("is_deferred_shard", "finish_deferred_gather")),
    Symbol(SRT + "model_executor/forward_batch_info.py", "CaptureHiddenMode", members=("FULL",)),
    Symbol(SRT + "model_executor/forward_batch_info.py", "ForwardMode", members=("TARGET_VERIFY",)),
    Symbol(
        SRT + "model_executor/forward_batch_info.py",
        "ForwardBatch",
        params=(
            "forward_mode",
            "batch_size",
            "input_ids",
            "req_pool_indices",
            "seq_lens",
            "out_cache_loc",
            "seq_lens_sum",
            "seq_lens_cpu",
            "positions",
            "spec_algorithm",
            "spec_info",
            "capture_hidden_mode",
            "can_run_decode_cuda_graph",
        ),
    ),
    Symbol(SRT + "managers/scheduler.py", "validate_dflash_request"),
    Symbol(SRT + "sampling/sampling_batch_info.py", "SamplingBatchInfo", members=(
        "is_all_greedy", "min_ps", "need_min_p_sampling", "need_top_k_sampling", "need_top_p_sampling", "temperatures", "top_ks", "top_ps",
    )),
    Symbol(SRT + "distributed/parallel_state.py", "get_tp_group"),
    # The configuration.
    Symbol(SRT + "runtime_context.py", "get_spec"),
    Symbol(SRT + "runtime_context.py", "get_schedule"),
    Symbol(SRT + "runtime_context.py", "_ConfigBag", members=("override",)),
    Symbol(SRT + "arg_groups/model_override_base.py", "attention_backends_of", params=("cfg",)),
    Symbol(SRT + "utils/hf_transformers/config.py", "get_config", params=("model", "trust_remote_code", "revision")),
    Symbol(FIELDS + "spec.py", "Spec", members=(
        "speculative_accept_threshold_acc", "speculative_accept_threshold_single", "speculative_adaptive", "speculative_algorithm",
        "speculative_dflash_block_size", "speculative_draft_attention_backend", "speculative_draft_model_path",
        "speculative_draft_model_revision", "speculative_draft_window_size", "speculative_eagle_topk", "speculative_num_draft_tokens",
        "speculative_num_steps", "speculative_use_block_verification",
    )),
    Symbol(FIELDS + "schedule.py", "Schedule", members=(
        "disable_overlap_schedule", "enable_mixed_chunk", "max_running_requests", "page_size",
    )),
    Symbol(FIELDS + "parallel.py", "Parallel", members=("attn_cp_size", "dp_size", "enable_dp_attention", "pp_size")),
    Symbol(FIELDS + "disagg.py", "Disagg", members=("disaggregation_mode", "enable_pdmux")),
    Symbol(FIELDS + "model.py", "Model", members=("model_path", "revision", "trust_remote_code")),
    Symbol(FIELDS + "device.py", "Device", members=("device",)),
    Symbol(FIELDS + "lora.py", "Lora", members=("enable_lora", "lora_paths")),
    Symbol(FIELDS + "memory.py", "Memory", members=("enable_hierarchical_cache",)),
    Symbol(FIELDS + "exec_.py", "ExecOverlap", members=("enable_two_batch_overlap",)),
    Symbol(FIELDS + "exec_.py", "ExecDeterministic", members=("enable_deterministic_inference",)),
)
