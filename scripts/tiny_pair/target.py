"""The tiny target: a Qwen3 language model of the drafter's own layers, to train and to write with."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ddtree.server.drafter import Layer, RMSNorm, Rotary
from ddtree.server.drafter_config import DrafterConfig
from tiny_pair.training import WORKING


class Body(nn.Module):
    """The part that transformers calls `model`: embedding, layers, norm."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_target_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Target(nn.Module):
    """A Qwen3 language model whose layers are the drafter's, under the names transformers gives them."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rope_table = Rotary(config)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                into_residual = "o_proj" in name or "down_proj" in name
                nn.init.normal_(p, std=0.02 / (math.sqrt(2 * config.num_target_layers) if into_residual else 1))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return final hidden states and the features the drafter reads, for `ids` [batch, tokens]."""
        x = self.model.embed_tokens(ids)
        rope = self.rope_table(x, torch.arange(ids.shape[1], device=ids.device)[None])
        features = []
        for i, layer in enumerate(self.model.layers):
            x = layer(x, rope, causal=True)
            if i in self.config.target_layer_ids:
                features.append(x)
        return self.model.norm(x), torch.cat(features, -1)

    @torch.no_grad()
    def write(self, prompts: Tensor, length: int, temperature: Tensor) -> Tensor:
        """Continue `prompts` [batch, tokens] to `length` tokens, each row at its own temperature [batch]."""
        batch, given = prompts.shape
        c = self.config
        shape = (batch, c.num_key_value_heads, length, c.head_dim)
        cache = [
            (prompts.new_zeros(shape, dtype=WORKING), prompts.new_zeros(shape, dtype=WORKING))
            for _ in self.model.layers
        ]
        out = torch.zeros(batch, length, dtype=torch.long, device=prompts.device)
        out[:, :given] = prompts
        heat = temperature[:, None].clamp(min=1e-6)
        table = self.rope_table(prompts.new_zeros(1, dtype=WORKING), torch.arange(length, device=prompts.device)[None])
        begin, end = 0, given
        while end < length:
            x = self.model.embed_tokens(out[:, begin:end])
            rope = (table[0][:, begin:end], table[1][:, begin:end])
            for layer, (keys, values) in zip(self.model.layers, cache, strict=True):
                h = layer.input_layernorm(x)
                keys[:, :, begin:end], values[:, :, begin:end] = layer.self_attn.keys_values(h, rope)
                q = layer.self_attn.queries(h, rope)
                x = x + layer.self_attn.attend(q, keys[:, :, :end], values[:, :, :end], causal=begin == 0)
                x = x + layer.mlp(layer.post_attention_layernorm(x))
            logits = self.lm_head(self.model.norm(x[:, -1])).float()
            gumbel = -torch.empty_like(logits).exponential_().log()
            out[:, end] = (logits + torch.where(heat > 1e-3, heat, 0) * gumbel).argmax(-1)
            begin, end = end, end + 1
        return out
