"""What the overlay for SGLang 0.5.11 calls, reads and replaces."""

from __future__ import annotations

from sglang_overlay.contract import Symbol
from sglang_overlay.contracts.first_worker import FIRST_WORKER, SPEC, SRT

SYMBOLS: tuple[Symbol, ...] = (
    *FIRST_WORKER,
    Symbol(SRT + "server_args.py", "ServerArgs", members=("speculative_dflash_draft_window_size",)),
    Symbol(SPEC + "spec_info.py", "SpeculativeAlgorithm", members=("DFLASH", "NONE", "from_string", "is_dflash")),
    Symbol(SPEC + "dflash_info.py", "DFlashDraftInput", members=("verified_id",)),
    Symbol(
        SRT + "managers/schedule_batch.py",
        "Req",
        members=("spec_accepted_drafts", "update_spec_acceptance_histogram"),
    ),
)
