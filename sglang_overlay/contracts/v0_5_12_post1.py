"""What the plugin for SGLang 0.5.12.post1 calls, reads and replaces."""

from __future__ import annotations

from sglang_overlay.contract import Symbol
from sglang_overlay.contracts.first_worker import FIRST_WORKER, SPEC, SRT

SYMBOLS: tuple[Symbol, ...] = (
    *FIRST_WORKER,
    Symbol(
        SPEC + "spec_info.py",
        "SpeculativeAlgorithm.register",
        params=("name", "supports_overlap", "validate_server_args", "spec_class"),
    ),
    Symbol(SPEC + "spec_registry.py", "CustomSpecAlgo", members=("create_worker", "is_dflash")),
    Symbol(SRT + "plugins/__init__.py", "load_plugins"),
    Symbol(SRT + "plugins/hook_registry.py", "HookRegistry.register", params=("target", "hook", "hook_type")),
    Symbol(SRT + "plugins/hook_registry.py", "HookType", members=("AROUND",)),
    Symbol(
        SPEC + "dflash_worker.py",
        "DFlashWorker._greedy_sample_from_vocab_parallel_head",
        params=("hidden_states", "lm_head"),
    ),
    Symbol(SPEC + "dflash_worker.py", "DFlashWorker.__init__", params=("server_args", "target_worker", "tp_rank")),
    Symbol(SRT + "server_args.py", "ServerArgs", members=("speculative_draft_window_size",)),
    Symbol(SPEC + "spec_info.py", "SpeculativeAlgorithm", members=("DFLASH", "from_string", "register")),
    Symbol(SPEC + "dflash_info.py", "DFlashDraftInput", members=("bonus_tokens",)),
    Symbol(
        SRT + "managers/schedule_batch.py",
        "Req",
        members=("spec_num_correct_drafts", "update_spec_correct_drafts_histogram"),
    ),
)
