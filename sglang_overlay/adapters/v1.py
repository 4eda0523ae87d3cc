"""DDTREE on SGLang 0.5.12.post1: its registry, and a subclass of its synchronous DFLASH worker.

The worker's own drafting runs unchanged up to the point where it would pick the greedy block. There the hidden states
are carried out by an exception, and the tree is built and verified instead of the chain.
"""

from __future__ import annotations

import functools
import os
from copy import deepcopy
from typing import Any

from torch import Tensor

from sglang_overlay.runtime.args import NAME, resolve_server_args
from sglang_overlay.runtime.serve import install_capture_mask, prepare_verify, start

ENVIRONMENT = {
    "speculative_ddtree_budget": ("SGLANG_DDTREE_BUDGET", int),
    "speculative_ddtree_topk": ("SGLANG_DDTREE_TOPK", int),
    "speculative_ddtree_budget_table": ("SGLANG_DDTREE_BUDGET_TABLE", str),
}
VERIFY_INPUT = "sglang.srt.speculative.dflash_info.DFlashVerifyInput.__post_init__"


class Drafted(Exception):
    """Leave SGLang's drafting with the hidden states `[bs * (block - 1), H]` of the drafted positions."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("the block is drafted")
        self.hidden = hidden


def register() -> None:
    """Register the algorithm, and the mask that its graphs must be captured with."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    HookRegistry.register(VERIFY_INPUT, _with_capture_mask, HookType.AROUND)
    SpeculativeAlgorithm.register(NAME, supports_overlap=False, validate_server_args=validate_server_args, spec_class=algorithm_class())(
        lambda _: worker_class()
    )


def validate_server_args(args: Any) -> None:
    """Take DDTREE's settings from the environment, as a plugin can not add flags, and resolve the rest from them.

    `--speculative-num-draft-tokens N` also sets the budget, to N - 1. Raises ValueError as `resolve_server_args`.
    """
    for field, (variable, kind) in ENVIRONMENT.items():
        text = os.environ.get(variable)
        try:
            setattr(args, field, kind(text) if text else None)
        except ValueError:
            raise ValueError(f"`{variable}`: {text}: not a number; set for example `{variable}=63`") from None
    given = (args.speculative_ddtree_budget, args.speculative_ddtree_budget_table)
    if given == (None, None) and args.speculative_num_draft_tokens is not None:
        args.speculative_ddtree_budget = args.speculative_num_draft_tokens - 1
    resolve_server_args(args)


def _with_capture_mask(original: Any, verify: Any) -> None:
    original(verify)
    install_capture_mask(verify)


@functools.cache
def algorithm_class() -> Any:
    """Return the class of the registered algorithm: DFLASH wherever SGLang asks what it is."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class DDTreeAlgorithm(CustomSpecAlgo):  # type: ignore[misc]
        """A tree is verified by the DFLASH machinery."""

        def is_dflash(self) -> bool:
            return True

        def __getattr__(self, name: str) -> Any:
            # Only for what the base lacks and the enum has; underscores would break copying.
            if name.startswith("_"):
                raise AttributeError(name)
            return getattr(SpeculativeAlgorithm.DFLASH, name)

    return DDTreeAlgorithm


@functools.cache
def worker_class() -> Any:
    """Return the worker class."""
    from sglang.srt.speculative.dflash_worker import DFlashWorker

    class DDTreeWorker(DFlashWorker):  # type: ignore[misc]
        """Draft as DFLASH does, verify a tree."""

        def __init__(self, server_args: Any, *, target_worker: Any, tp_rank: int, **rest: Any) -> None:
            self.server_args, self.target_worker, self.tp_rank = server_args, target_worker, tp_rank
            drafter_args = deepcopy(server_args)
            start(self, drafter_args)
            super().__init__(drafter_args, target_worker=target_worker, tp_rank=tp_rank, **rest)
            self.server_args = server_args

        def _prepare_for_speculative_decoding(self, batch: Any, draft_input: Any) -> None:
            try:
                super()._prepare_for_speculative_decoding(batch, draft_input)
            except Drafted as drafted:
                hidden = drafted.hidden.view(batch.batch_size(), self.block_size - 1, -1)
                prepare_verify(self, batch, hidden, draft_input.bonus_tokens)

        def _greedy_sample_from_vocab_parallel_head(self, *, hidden_states: Tensor, **_: Any) -> Tensor:
            raise Drafted(hidden_states)

    return DDTreeWorker
