"""The DFlash drafter: one parallel forward pass proposes a distribution for each of the next positions.

The checkpoint format is that of the published drafters (arXiv 2602.06036): Qwen3-style layers without an embedding and
without an output head, because the target's are used. Queries come from the block (the last committed token and masks);
keys and values come from the target's hidden states for the context and from the block itself for the block, and
nothing in the block is hidden from the rest of it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddtree.server.drafter_config import DrafterConfig
from ddtree.server.errors import ModelError

KeysValues = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    """Normalise by the root mean square, in fp32, then scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * wide.to(x.dtype)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Turn `x` [batch, heads, tokens, head_dim] by the rotary table (cos, sin), each [batch, tokens, head_dim]."""
    cos, sin = (t.unsqueeze(1).to(x.dtype) for t in rope)
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys, as in Qwen3."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        c, bias = config, config.attention_bias
        self.head_dim = c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=bias)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=bias)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=bias)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=bias)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim)

    def queries(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Project `x` [batch, tokens, hidden] to rotated queries [batch, heads, tokens, head_dim]."""
        return rotate(self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2), rope)

    def keys_values(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> KeysValues:
        """Project `x` [batch, tokens, hidden] to rotated keys and values [batch, kv_heads, tokens, head_dim]."""
        keys = rotate(self.k_norm(self._heads(self.k_proj(x))).transpose(1, 2), rope)
        return keys, self._heads(self.v_proj(x)).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """Attend and project back to [batch, tokens, hidden]; `mask` is boolean, True where a key may be seen."""
        grouped = mask is None
        if not grouped:  # the fused kernels take either a mask or grouped heads
            groups = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
        back: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return back


class MLP(nn.Module):
    """Gated feed-forward."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One pre-norm layer; the keys and values it attends to are the caller's affair."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        context: KeysValues | None = None,
        mask: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        """Run the layer over `x` [batch, tokens, hidden], attending to `context` before the tokens themselves."""
        h = self.input_layernorm(x)
        k, v = self.self_attn.keys_values(h, rope)
        if context is not None:
            k, v = torch.cat([context[0], k], 2), torch.cat([context[1], v], 2)
        x = x + self.self_attn.attend(self.self_attn.queries(h, rope), k, v, mask, causal)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Drafter(nn.Module):
    """The block drafter; the target lends its embedding and its output head."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rope = Rotary(config)

    def project(self, features: Tensor, positions: Tensor) -> list[KeysValues]:
        """Turn the target's hidden states into each layer's context keys and values.

        `features` is [batch, tokens, len(target_layer_ids) * hidden], `positions` [batch, tokens].
        """
        hidden = self.hidden_norm(self.fc(features))
        rope = self.rope(hidden, positions)
        return [layer.self_attn.keys_values(hidden, rope) for layer in self.layers]  # type: ignore[operator, union-attr]

    def forward(
        self, block: Tensor, positions: Tensor, context: Sequence[KeysValues], mask: Tensor | None = None
    ) -> Tensor:
        """Return final hidden states for the embedded `block` [batch, tokens, hidden], ready for the target's head."""
        rope, x = self.rope(block, positions), block
        for layer, kv in zip(self.layers, context, strict=True):
            x = layer(x, rope, kv, mask)
        out: Tensor = self.norm(x)
        return out


class Rotary:
    """The rotary table of a config; not a module, so that casting a model cannot round its frequencies."""

    def __init__(self, config: DrafterConfig) -> None:
        from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
        from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

        if config.rope["rope_type"] in ("dynamic", "longrope"):  # their frequencies change with the length
            raise ModelError(f"the drafter's rope type is not supported: `{config.rope['rope_type']}`")
        with torch.device("cpu"):
            table = Qwen3RotaryEmbedding(
                Qwen3Config(
                    hidden_size=config.hidden_size,
                    num_attention_heads=config.num_attention_heads,
                    head_dim=config.head_dim,
                    max_position_embeddings=config.max_position_embeddings,
                    rope_parameters=dict(config.rope),
                )
            )
        self._frequencies: Tensor = table.inv_freq
        self._scaling = float(table.attention_scaling)

    def __call__(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cos, sin), each [batch, tokens, head_dim], for `positions` [batch, tokens] in the type of `like`."""
        if self._frequencies.device != positions.device:
            self._frequencies = self._frequencies.to(positions.device)
        angles = positions[..., None].float() * self._frequencies
        angles = torch.cat([angles, angles], -1)
        return (angles.cos() * self._scaling).to(like.dtype), (angles.sin() * self._scaling).to(like.dtype)


class ContextCache:
    """Each drafter layer's context keys and values for one request: buffers that grow, rows that only get appended."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._buffers: list[list[Tensor]] = []
        self.length = 0

    def append(self, features: Tensor) -> None:
        """Add the hidden states of newly committed tokens, [tokens, len(target_layer_ids) * hidden]."""
        n = features.shape[0]
        positions = torch.arange(self.length, self.length + n, device=features.device)[None]
        fresh = self._drafter.project(features[None], positions)
        end = self.length + n
        if not self._buffers or end > self._buffers[0][0].shape[2]:
            self._grow(fresh, max(256, 2 * end))
        for buffers, pair in zip(self._buffers, fresh, strict=True):
            for buffer, rows in zip(buffers, pair, strict=True):
                buffer[:, :, self.length : end] = rows
        self.length = end

    def _grow(self, like: list[KeysValues], capacity: int) -> None:
        old = self._buffers
        self._buffers = [[t.new_empty(*t.shape[:2], capacity, t.shape[3]) for t in pair] for pair in like]
        for before, after in zip(old, self._buffers, strict=False):
            for source, sink in zip(before, after, strict=True):
                sink[:, :, : self.length] = source[:, :, : self.length]

    def draft(self, block: Tensor) -> Tensor:
        """Run the drafter on an embedded block [tokens, hidden] that starts right after the context."""
        positions = torch.arange(self.length, self.length + block.shape[0], device=block.device)[None]
        context = [(k[:, :, : self.length], v[:, :, : self.length]) for k, v in self._buffers]
        out: Tensor = self._drafter(block[None], positions, context)[0]
        return out


def load_drafter(path: Path, dtype: torch.dtype, device: torch.device) -> Drafter:
    """Load a drafter checkpoint directory.

    Raises ModelError when the config or the weights are not those of a DFlash drafter.
    """
    from safetensors.torch import load_file

    try:
        config = DrafterConfig.parse(json.loads((path / "config.json").read_text()))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the drafter's config: {error}") from error
    weights: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        weights.update(load_file(file))
    with torch.device("meta"):
        drafter = Drafter(config)
    want, have = set(drafter.state_dict()), {k.removeprefix("model.") for k in weights}
    if want != have:
        odd = sorted(want ^ have)
        raise ModelError(f"the drafter's weights do not fit its config: {', '.join(f'`{k}`' for k in odd[:4])}")
    weights = {k.removeprefix("model."): v.to(device, dtype) for k, v in weights.items()}
    try:
        drafter.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise ModelError(f"the drafter's weights do not fit its config: {error}") from error
    return drafter.eval().requires_grad_(False)
