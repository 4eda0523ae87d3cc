"""What the tiny drafter learns: what the target writes, from the features it leaves, by a loss over whole blocks."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ddtree.server.drafter import Drafter
from tiny_pair.corpus import MASK
from tiny_pair.target import Target
from tiny_pair.tokens import Stream
from tiny_pair.training import DEVICE, WORKING, log


def written(target: Target, data: Stream, marker: Tensor, rows: int, length: int) -> Tensor:
    """Let the target continue document starts and chat questions; add some of the original text."""
    parts = [data.windows(rows, length, 0.5)]
    heat = torch.tensor([0.0] * 6 + [0.7] * 2 + [1.0] * 2, device=DEVICE).repeat(math.ceil(rows / 10))[:rows]
    for given in (16, 32, 64, 128):
        parts.append(target.write(data.windows(rows, given, 0.8), length, heat))
        log("wrote", rows, "continuations of", given, "tokens")
    for given in (48, 96):
        parts.append(target.write(data.before_answers(rows, given, marker), length, heat))
        log("wrote", rows, "answers after", given, "tokens")
    return torch.cat(parts)


@torch.no_grad()
def features_of(target: Target, ids: Tensor) -> Tensor:
    """Return what the drafter reads for `ids` [rows, tokens]: [rows, tokens, width]."""
    width = len(target.config.target_layer_ids) * target.config.hidden_size
    features = torch.empty(*ids.shape, width, dtype=WORKING, device=DEVICE)
    for i in range(0, len(ids), 64):
        features[i : i + 64] = target(ids[i : i + 64])[1]
    return features


@torch.no_grad()
def start_from_target(drafter: Drafter, target: Target) -> None:
    """Start the drafter as the target's last layers, reading the features that those layers read."""
    first = target.config.num_target_layers - len(drafter.layers)
    for i, layer in enumerate(drafter.layers):
        layer.load_state_dict(target.model.layers[first + i].state_dict())
    drafter.norm.load_state_dict(target.model.norm.state_dict())
    middle = target.model.layers[first + len(drafter.layers) // 2]
    drafter.hidden_norm.load_state_dict(middle.input_layernorm.state_dict())
    size = target.config.hidden_size
    read = target.config.target_layer_ids.index(max(target.config.target_layer_ids))
    drafter.fc.weight.mul_(0.1)
    drafter.fc.weight[:, read * size : (read + 1) * size] += torch.eye(size, device=drafter.fc.weight.device)


def block_loss(
    drafter: Drafter, target: Target, ids: Tensor, features: Tensor, anchors: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (weighted loss, tokens right before the first wrong one) for blocks at `anchors` [batch, blocks].

    Many blocks of one sequence are drafted in one pass: each sees the features before its anchor, and itself.
    """
    size = drafter.config.block_size
    batch, length = ids.shape
    positions = (anchors[:, :, None] + torch.arange(size, device=ids.device)).flatten(1)
    truth = ids.gather(1, positions).unflatten(1, (-1, size))
    block = torch.full_like(truth, MASK)
    block[:, :, 0] = truth[:, :, 0]
    owner = torch.arange(positions.shape[1], device=ids.device) // size
    before = torch.arange(length, device=ids.device) < anchors.repeat_interleave(size, 1)[:, :, None]
    own = (owner[:, None] == owner).expand(batch, -1, -1)
    mask = torch.cat([before, own], -1)[:, None]
    context = drafter.project(features, torch.arange(length, device=ids.device)[None])
    hidden = drafter(target.model.embed_tokens(block.flatten(1)), positions, context, mask)
    logits = target.lm_head(hidden.unflatten(1, (-1, size))[:, :, 1:]).float()
    truth = truth[:, :, 1:]
    loss = F.cross_entropy(logits.flatten(0, 2), truth.flatten(), reduction="none").view(truth.shape)
    # A late token counts only if all before it are right.
    weight = torch.exp(-torch.arange(size - 1, device=ids.device) / 7.0)
    right = (logits.argmax(-1) == truth).int().cumprod(-1).sum(-1).float()
    return (loss * weight).mean() / weight.mean(), right
