"""The target model: any decoder of transformers with plain full attention, run on trees of tokens."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import Cache

from ddtree.layout import ancestor_mask, hf_mask
from ddtree.server.cache import new_cache
from ddtree.server.errors import ModelError
from ddtree.tree import Tree


@dataclass(frozen=True)
class Verified:
    """What one forward pass says: logits [tokens, vocabulary] and the features the drafter reads [tokens, width]."""

    logits: Tensor
    features: Tensor | None


def check_supported(config: Mapping[str, Any]) -> None:
    """Raise ModelError, naming the reason, unless the model has plain causal attention in every layer.

    A tree is verified through an explicit mask over a cache with one row a token. Windows, latent caches and recurrent
    layers have no such row or mask, and would answer wrongly without a sign of it.
    """
    kind = config.get("model_type", "unknown")
    other = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    reasons = {
        f"has `{', '.join(other)}` layers": bool(other),
        "uses a sliding window": bool(config.get("sliding_window")) and config.get("use_sliding_window") is not False,
        "keeps a latent cache (MLA)": config.get("kv_lora_rank") is not None,
        "has recurrent layers": any(
            config.get(k) for k in ("layers_block_type", "mamba_d_state", "ssm_cfg", "state_size", "attn_layer_period")
        ),
        "is an encoder-decoder": bool(config.get("is_encoder_decoder")),
        "is multimodal": "vision_config" in config or "audio_config" in config,
        "has three-dimensional positions": "mrope_section" in rope,
        "has rotary frequencies that change with the length": rope.get("rope_type") in ("dynamic", "longrope"),
        "uses ALiBi": bool(config.get("alibi")) or kind in ("bloom", "mpt"),
    }
    if reason := next((why for why, holds in reasons.items() if holds), None):
        raise ModelError(f"`{kind}` cannot be served with draft trees: it {reason}")


class Target:
    """A loaded target. Not thread-safe: one engine owns it."""

    def __init__(self, model: Any, feature_layers: Sequence[int] = ()) -> None:
        self._model = model
        body = model.base_model
        self.layers: int = len(body.layers)
        self.hidden_size: int = model.config.hidden_size
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.max_positions: int = int(getattr(model.config, "max_position_embeddings", 1 << 20))
        self.eos_ids = frozenset(_end_tokens(model))
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.head: nn.Module = model.get_output_embeddings()
        self.embedding: nn.Module = model.get_input_embeddings()
        # transformers 5.24 renamed the argument, and will drop the old name.
        known = inspect.signature(type(body).forward).parameters
        self._cache_name = "cache" if "cache" in known else "past_key_values"
        self._features: list[Tensor] = []
        self._feature_layers = tuple(feature_layers)
        if bad := [i for i in self._feature_layers if not 0 <= i < self.layers]:
            raise ModelError(f"the drafter reads layer {bad[0]} of a target with {self.layers} layers")
        for i in sorted(self._feature_layers):
            body.layers[i].register_forward_hook(self._capture)

    def _capture(self, _module: nn.Module, _inputs: object, output: Any) -> None:
        self._features.append((output[0] if isinstance(output, tuple) else output)[0])

    def new_cache(self) -> Cache:
        """Return an empty cache for one request."""
        return new_cache(self.layers)

    @torch.inference_mode()
    def forward(self, ids: Tensor, positions: Tensor, cache: Cache, mask: Tensor | None, last_only: bool) -> Verified:
        """Run `ids` [tokens] at `positions` [tokens] behind `cache`, which grows by as many rows.

        `mask` is additive, [1, 1, tokens, cached + tokens]; None means causal. With `last_only` the logits are those of
        the last token.
        """
        self._features.clear()
        out = self._model.base_model(
            input_ids=ids[None],
            position_ids=positions[None],
            attention_mask=mask,
            use_cache=True,
            **{self._cache_name: cache},
        )
        hidden = out.last_hidden_state[0]
        logits = self.head(hidden[-1:] if last_only else hidden)
        features = torch.cat(self._features, -1) if self._features else None
        return Verified(logits, features)

    def prefill(self, ids: Sequence[int], cache: Cache, begin: int, last: bool = True) -> Verified:
        """Run a piece of the prompt that starts at position `begin`."""
        tokens = torch.tensor(ids, device=self.device)
        return self.forward(tokens, torch.arange(begin, begin + len(ids), device=self.device), cache, None, last)

    def verify(self, tree: Tree, cache: Cache, prefix_len: int) -> Verified:
        """Run a whole tree whose root stands at `prefix_len`, each node seeing the prefix and its own ancestors."""
        tokens, depths = torch.tensor([tree.token_ids, tree.depths], device=self.device)
        mask = None
        if len(tree) > 1:
            mask = hf_mask(ancestor_mask(tree).to(self.device), prefix_len, self.dtype)
        return self.forward(tokens, depths + prefix_len, cache, mask, False)

    def self_test(self) -> None:
        """Raise ModelError unless the model obeys tree masks: siblings are blind to each other, children are not.

        An attention kernel that ignores the mask gives plausible text and wrong probabilities, so ask before serving.
        """
        size = min(self.vocab_size, 997)

        def logits(tokens: tuple[int, ...]) -> Tensor:
            cache = self.new_cache()
            self.prefill([size // 3, size // 5], cache, 0)
            # The root has two children (1 and 2), the second of which has one (3).
            tree = Tree(tokens, (-1, 0, 0, 2), (0, 1, 1, 2), (0.0,) * 4)
            return self.verify(tree, cache, 2).logits.float()

        base = logits((5, 7, 11, 13))
        sibling = logits((5, size // 2, 11, 13))
        parent = logits((5, 7, size // 2, 13))
        noise = 0.02 * float(base.std())  # bf16 kernels may differ a little from run to run
        if float((sibling - base)[2:].abs().max()) > noise or float((parent - base)[1].abs().max()) > noise:
            raise ModelError("the model's attention ignores the tree mask: siblings see each other")
        if float((parent - base)[3].abs().max()) <= noise:
            raise ModelError("the model's attention ignores the tree mask: a node does not see its parent")


def _end_tokens(model: Any) -> list[int]:
    ends = getattr(model.generation_config, "eos_token_id", None) or model.config.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def load_target(
    path: str, dtype: torch.dtype, device: torch.device, feature_layers: Sequence[int] = (), layers: int | None = None
) -> Target:
    """Load a target from a local directory or a hub id.

    `layers` is how many the drafter was trained for. Raises ModelError for a model that cannot be served.
    """
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the model's config: {error}") from error
    check_supported(config.to_dict())
    if layers not in (None, 0, config.num_hidden_layers):
        raise ModelError(f"the drafter was made for {layers} target layers, the model has {config.num_hidden_layers}")
    try:
        model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype, attn_implementation="sdpa")
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"cannot load the model: {error}") from error
    return Target(model.to(device).eval().requires_grad_(False), feature_layers)


def locate(name: str) -> Path:
    """Return the directory of a checkpoint: a local path as it is, a hub id after fetching it to the local cache."""
    if (path := Path(name)).is_dir():
        return path
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:  # no hub id looks like this
        raise ModelError(f"no such directory: `{name}`")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:
        raise ModelError(f"neither a directory nor a checkpoint that can be fetched: `{name}`: {error}") from error
