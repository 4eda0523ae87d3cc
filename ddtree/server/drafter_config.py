"""What the `config.json` of a DFlash drafter says, in the spelling of transformers 4 or 5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddtree.server.errors import ModelError


@dataclass(frozen=True)
class DrafterConfig:
    """What a drafter's `config.json` says, checked."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    attention_bias: bool
    rope: Mapping[str, Any]
    block_size: int
    mask_token_id: int | None
    target_layer_ids: tuple[int, ...]
    num_target_layers: int

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> DrafterConfig:
        """Read the fields of a published drafter's config, in the spelling of transformers 4 or 5.

        Raises ModelError where the config describes something this drafter does not do.
        """
        missing = [k for k in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size") if k not in raw]
        if missing:
            raise ModelError(f"not a drafter config: lacks {', '.join(f'`{k}`' for k in missing)}")
        if "sliding_attention" in (raw.get("layer_types") or ()) or raw.get("use_sliding_window"):
            raise ModelError("drafters with sliding-window layers are not supported")
        dflash = raw.get("dflash_config") or {}
        layers, target_layers = int(raw["num_hidden_layers"]), int(raw.get("num_target_layers") or 0)
        ids = dflash.get("target_layer_ids") or default_target_layers(target_layers, layers)
        if len(set(ids)) != len(ids):
            raise ModelError(f"the drafter reads a target layer twice: {list(ids)}")
        rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
        rope.setdefault("rope_theta", raw.get("rope_theta", 1e6))
        rope.setdefault("rope_type", rope.pop("type", "default"))
        heads = int(raw["num_attention_heads"])
        return cls(
            hidden_size=int(raw["hidden_size"]),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=int(raw.get("num_key_value_heads", heads)),
            head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
            intermediate_size=int(raw["intermediate_size"]),
            vocab_size=int(raw["vocab_size"]),
            max_position_embeddings=int(raw.get("max_position_embeddings", 32768)),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            attention_bias=bool(raw.get("attention_bias", False)),
            rope=rope,
            block_size=int(raw.get("block_size") or dflash.get("block_size") or 16),
            mask_token_id=dflash.get("mask_token_id"),
            target_layer_ids=tuple(int(i) for i in ids),
            num_target_layers=target_layers,
        )


def default_target_layers(target_layers: int, draft_layers: int) -> tuple[int, ...]:
    """Return the layers a drafter reads when its config names none: evenly spread from 1 to `target_layers - 3`."""
    if draft_layers == 1:
        return (target_layers // 2,)
    last = max(target_layers - 3, 1)
    return tuple(round(1 + i * (last - 1) / (draft_layers - 1)) for i in range(draft_layers))
