"""SGLang 0.5.11: DDTREE is DFLASH whose verify input is a tree.

Everything that branches on `is_dflash()` then holds for DDTREE too (graph runner, model runner, pool sizing, request
checks), so four stock files get a few lines each and all logic lives in the new `ddtree_utils.py`.
Every edit only inserts, so cutting the insertions out gives the stock file back byte for byte.
"""

from __future__ import annotations

from sglang_overlay.anchors import (
    Anchor,
    Where,
    assignment,
    attribute,
    call_with,
    definition,
    equality_test,
    last_statement,
    list_item,
    return_statement,
)
from sglang_overlay.edits import Edit

SPEC_INFO = "sglang/srt/speculative/spec_info.py"
DFLASH_INFO = "sglang/srt/speculative/dflash_info.py"
DFLASH_WORKER = "sglang/srt/speculative/dflash_worker.py"
SERVER_ARGS = "sglang/srt/server_args.py"
NEW_FILE = "sglang/srt/speculative/ddtree_utils.py"

EDITS: tuple[Edit, ...] = (
    Edit(
        SPEC_INFO,
        Anchor("SpeculativeAlgorithm", "the last member", assignment("NONE")),
        Where.AFTER,
        "    DDTREE = auto()\n",
        "after the last member, so that no stock member changes its value",
    ),
    Edit(
        SPEC_INFO,
        Anchor("SpeculativeAlgorithm.is_dflash", "its return", return_statement),
        Where.BEFORE,
        "        if self == SpeculativeAlgorithm.DDTREE:\n            return True\n",
        "a tree is verified by the DFLASH machinery",
    ),
    Edit(
        SPEC_INFO,
        Anchor("SpeculativeAlgorithm", "`is_dflash`", definition("is_dflash")),
        Where.AFTER,
        "\n    def is_ddtree(self) -> bool:\n        return self == SpeculativeAlgorithm.DDTREE\n",
        "to tell the two apart where it matters",
    ),
    Edit(
        SERVER_ARGS,
        Anchor("ServerArgs", "the last DFLASH field", assignment("speculative_dflash_draft_window_size")),
        Where.AFTER,
        "    speculative_ddtree_budget: Optional[int] = None\n"
        "    speculative_ddtree_topk: Optional[int] = None\n"
        "    speculative_ddtree_budget_table: Optional[str] = None\n",
        "the three flags",
    ),
    Edit(
        SERVER_ARGS,
        Anchor("ServerArgs.add_cli_args", "the algorithm's choices", list_item("--speculative-algorithm", "choices")),
        Where.AT,
        '"DDTREE", ',
        "argparse refuses what is not listed",
    ),
    Edit(
        SERVER_ARGS,
        Anchor("ServerArgs.add_cli_args", "the last DFLASH flag", call_with("--speculative-dflash-draft-window-size")),
        Where.AFTER,
        "        from sglang.srt.speculative.ddtree_utils import add_cli_args as add_ddtree_args\n\n        add_ddtree_args(parser)\n",
        "the three flags",
    ),
    Edit(
        SERVER_ARGS,
        Anchor(
            "ServerArgs._handle_speculative_decoding",
            "the DFLASH branch",
            equality_test("self", "speculative_algorithm", "DFLASH"),
        ),
        Where.BEFORE,
        '        if self.speculative_algorithm == "DDTREE":\n'
        "            from sglang.srt.speculative.ddtree_utils import resolve_server_args\n\n"
        "            resolve_server_args(self)\n\n",
        "validate and size the tree; the DFLASH branch does not apply to it",
    ),
    Edit(
        DFLASH_INFO,
        Anchor("DFlashVerifyInput.__post_init__", "its end", last_statement),
        Where.AFTER,
        "        from sglang.srt.speculative.ddtree_utils import install_capture_mask\n\n        install_capture_mask(self)\n",
        "a graph captured without a mask would verify every tree as a chain",
    ),
    Edit(
        DFLASH_WORKER,
        Anchor("DFlashWorker.__init__", "the draft's arguments", assignment("draft_server_args")),
        Where.AFTER,
        "        from sglang.srt.speculative.ddtree_utils import start as start_ddtree\n\n        start_ddtree(self, draft_server_args)\n",
        "the drafter works on blocks, not on trees; and the target must prove its mask before anything is served",
    ),
    Edit(
        DFLASH_WORKER,
        Anchor("DFlashWorker.__init__", "the block size", attribute("server_args", "speculative_num_draft_tokens"), count=2),
        Where.AT,
        "draft_",
        "the block size is the drafter's, the verify width is the tree's",
    ),
    Edit(
        DFLASH_WORKER,
        Anchor("DFlashWorker._prepare_for_speculative_decoding", "the greedy block", assignment("draft_next")),
        Where.BEFORE,
        "        if self.model_runner.spec_algorithm.is_ddtree():\n"
        "            from sglang.srt.speculative.ddtree_utils import prepare_verify\n\n"
        "            prepare_verify(self, batch, draft_hidden[:, 1:], draft_input.verified_id)\n"
        "            return\n\n",
        "build and verify a tree instead of the greedy chain",
    ),
)
