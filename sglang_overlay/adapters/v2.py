"""DDTREE on SGLang 0.5.23: what is registered there, the algorithm and the mask that its graphs are captured with.

The work is done in `v2_worker`; what is accepted and refused is in `v2_settings`: only what was read through, which is triton
attention, one budget, and no overlap schedule. Not run on a GPU.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from sglang_overlay.adapters.v2_settings import drafter_block, resolve, target_architectures
from sglang_overlay.adapters.v2_worker import worker_class
from sglang_overlay.runtime.args import NAME

VERIFY_INPUT = "sglang.srt.speculative.dflash_info.DFlashVerifyInput.__post_init__"


def register() -> None:
    """Register the algorithm, and the mask that its graphs must be captured with."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    HookRegistry.register(VERIFY_INPUT, with_capture_mask, HookType.AROUND)
    SpeculativeAlgorithm.register(NAME, supports_overlap=False, spec_class=algorithm_class())(lambda _: worker_class())


def with_capture_mask(original: Any, verify: Any) -> None:
    """Give the target's placeholders a mask: a graph that is captured without one verifies every tree as a chain."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.runtime_context import get_schedule, get_spec

    original(verify)
    if verify.draft_token is not None or verify.custom_mask is not None or verify.capture_hidden_mode != CaptureHiddenMode.FULL:
        return
    if str(get_spec().speculative_algorithm).upper() == NAME:
        n = int(verify.draft_token_num)
        requests = int(get_schedule().max_running_requests or 1)
        verify.custom_mask = torch.ones(requests * n * (n + 1), dtype=torch.bool, device=_device())


def _device() -> str:
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"


@functools.cache
def algorithm_class() -> Any:
    """Return the class of the registered algorithm: DFLASH wherever SGLang asks what it is."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class DDTreeAlgorithm(CustomSpecAlgo):  # type: ignore[misc]
        """A tree is verified by the DFLASH machinery; target and drafter have different widths."""

        def is_dflash(self) -> bool:
            return True

        def is_dflash_family(self) -> bool:
            return True

        def supports_target_verify_for_draft(self) -> bool:
            return True

        def handle_server_args(self, server_args: Any) -> None:
            """Resolve the arguments, after SGLang's own defaults."""
            resolve(server_args, target_architectures(server_args), drafter_block(server_args))

        def get_num_tokens_per_req_for_target_verify(self, num_draft_tokens: int, is_draft_worker: bool) -> int:
            from sglang.srt.runtime_context import get_spec

            return int(get_spec().speculative_dflash_block_size) if is_draft_worker else int(num_draft_tokens)

        def get_platform_worker_cls(self) -> None:
            """No platform replaces our worker (the enum would ask for one by our name)."""

        def __getattr__(self, name: str) -> Any:
            # Only for what the base lacks and the enum has; underscores would break copying.
            if name.startswith("_"):
                raise AttributeError(name)
            return getattr(SpeculativeAlgorithm.DFLASH, name)

    return DDTreeAlgorithm
