"""Load a pair: find the checkpoints, check that they belong together, choose device and type, prove the tree mask."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoTokenizer

from ddtree.server.drafter import Drafter, load_drafter
from ddtree.server.engine import Engine, Mode
from ddtree.server.errors import ModelError
from ddtree.server.target import Target, load_target, locate

DEFAULT_BUDGET = 64
CPU_BUDGET = 24
MASK_TOKEN = "<|MASK|>"


def choose_device(name: str) -> torch.device:
    """Return the device for `auto`, `cpu`, `cuda` or `cuda:N`."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"unknown device: `{name}`") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("no CUDA device is visible")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the type for `auto` (bf16 on a GPU, fp32 on a CPU), `float32`, `bfloat16` or `float16`."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ModelError(f"unknown type: `{name}`")
    return dtype


def load_engine(
    model: str,
    drafter: str | None,
    *,
    mode: Mode = Mode.DDTREE,
    budget: int = DEFAULT_BUDGET,
    device: str = "auto",
    dtype: str = "auto",
) -> Engine:
    """Load a target and, unless `mode` is plain, its drafter, and return the engine that runs them.

    `model` and `drafter` are directories or hub ids. Raises ModelError, saying why, for what cannot be served.
    """
    where = choose_device(device)
    kind = choose_dtype(dtype, where)
    draft: Drafter | None = None
    if mode is not Mode.PLAIN:
        if drafter is None:
            raise ModelError(f"mode `{mode}` needs a drafter", "name one with `--drafter`, or use `--mode plain`")
        draft = load_drafter(locate(drafter), kind, where)
    path = str(locate(model))
    read = draft.config.target_layer_ids if draft else ()
    target = load_target(path, kind, where, read, draft.config.num_target_layers if draft else None)
    tokenizer = AutoTokenizer.from_pretrained(path)
    if draft is not None:
        check_pair(target, draft)
        target.self_test()
    return Engine(target, draft, tokenizer, mode, budget, mask_token(draft, tokenizer) if draft else None)


def check_pair(target: Target, drafter: Drafter) -> None:
    """Raise ModelError unless the drafter can use the target's hidden states, embedding and head."""
    config = drafter.config
    if config.hidden_size != target.hidden_size:
        raise ModelError(f"hidden sizes differ: target {target.hidden_size}, drafter {config.hidden_size}")
    if config.vocab_size != target.vocab_size:
        raise ModelError(f"vocabularies differ: target {target.vocab_size}, drafter {config.vocab_size}")
    if getattr(target.head, "bias", None) is not None:
        raise ModelError("a target whose output head has a bias is not supported")


def mask_token(drafter: Drafter, tokenizer: Any) -> int:
    """Return the id that fills the block: the config's, else the tokenizer's mask token."""
    for found in (drafter.config.mask_token_id, tokenizer.mask_token_id, tokenizer.get_vocab().get(MASK_TOKEN)):
        if found is not None:
            return int(found)
    raise ModelError("the drafter's config names no `mask_token_id` and the tokenizer has no mask token")


def default_budget(device: str) -> int:
    """Return a budget that pays: a GPU reads many tokens in the time of one, a CPU does not."""
    return DEFAULT_BUDGET if choose_device(device).type == "cuda" else CPU_BUDGET
