"""A small pair with weights set by hand: the target's text is half predictable, and the drafter knows the half.

A token is a family (id // 4) and a member (id % 4). The target continues with the family that stood `PERIOD` tokens
before, and the member of the last token, and two layers of random weights, which see the whole context, disturb both
now and then. The drafter copies the family out of the context and takes the member from slot 0 of its block. So

* a chain is right for a few tokens, a tree for more, and no drafter can be right throughout;
* the text depends on every cached row and on every ancestor of a node: a wrong mask, position or row changes it;
* a drafter whose slot 0 is not the last token guesses the member, and is nearly always wrong.

Nothing is trained: the same files come out in a second on any machine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

PERIOD = 24
BLOCK = 16
MASK = 3
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|MASK|>"]
TEXT = "the quick brown fox jumps over the lazy dog while päivää 日本語 and 🙂 stay where they are, line by line.\n"
# Hidden dimensions: one constant, one that marks real tokens, the token's family and member, what the head reads.
CONSTANT, REAL, FAMILY, MEMBER, OUT = 0, 1, slice(2, 50), slice(50, 66), slice(66, 130)
HIDDEN, HEAD, THETA = 132, 64, 100.0
SHARPNESS = 24.0
WANDER = 0.36
LIKENESS = 0.75
GAIN = 5.0


def write_pair(directory: Path) -> tuple[Path, Path]:
    """Write `target` and `drafter` below `directory` and return their paths."""
    target, drafter = directory / "target", directory / "drafter"
    vocab = _write_tokenizer(target)
    random = torch.Generator().manual_seed(5)
    common = {
        "model_type": "qwen3",
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": THETA,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "torch_dtype": "float32",
        "eos_token_id": [2, 0],
    }
    _save(
        target,
        {"architectures": ["Qwen3ForCausalLM"], **common, "num_hidden_layers": 3},
        _target_weights(vocab, random),
    )
    dflash = {"mask_token_id": MASK, "target_layer_ids": [0, 1]}
    shape = {"num_hidden_layers": 1, "num_target_layers": 3, "block_size": BLOCK, "dflash_config": dflash}
    _save(drafter, {"architectures": ["DFlashDraftModel"], **common, **shape}, _drafter_weights())
    return target, drafter


def _write_tokenizer(directory: Path) -> int:
    directory.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[0],
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return int(tokenizer.get_vocab_size())


def _target_weights(vocab: int, random: torch.Generator) -> dict[str, Tensor]:
    def noise(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=random)

    def code(size: int, id_of: Tensor) -> Tensor:
        return torch.nn.functional.normalize(noise(int(id_of.max()) + 1, size), dim=1)[id_of]

    ids = torch.arange(vocab)
    # Families come in groups of four that resemble each other, so that a disturbance mostly turns one into its like.
    families = LIKENESS**0.5 * code(48, ids // 16) + (1 - LIKENESS) ** 0.5 * code(48, ids // 4)
    members = code(16, ids % 4)
    embedding = torch.zeros(vocab, HIDDEN)
    embedding[:, CONSTANT] = embedding[:, REAL] = 1.0
    embedding[:, FAMILY], embedding[:, MEMBER] = families, members
    embedding[MASK, REAL] = 0.0
    head = torch.zeros(vocab, HIDDEN)
    head[:, OUT] = GAIN * torch.cat([families, members], dim=1)
    weights = {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": torch.ones(HIDDEN)}
    for i in range(2):
        layer = _layer()
        for name in ("q_proj", "k_proj", "v_proj"):
            layer[f"self_attn.{name}.weight"] = noise(2 * HEAD, HIDDEN) / HIDDEN**0.5
        for name in ("gate_proj", "up_proj"):
            layer[f"mlp.{name}.weight"] = noise(64, HIDDEN) / HIDDEN**0.5
        layer["self_attn.o_proj.weight"][OUT] = WANDER * noise(64, 2 * HEAD) / (2 * HEAD) ** 0.5
        layer["mlp.down_proj.weight"][OUT] = WANDER * noise(64, 64) / 8
        weights |= {f"model.layers.{i}.{name}": value for name, value in layer.items()}
    # Family: what followed one period ago. Member: the last token's.
    copier = _layer()
    _look_back(copier, 0, PERIOD - 1)
    _look_back(copier, 1, 0)
    return weights | {f"model.layers.2.{name}": value for name, value in copier.items()}


def _drafter_weights() -> dict[str, Tensor]:
    layer = _layer()
    _look_back(layer, 0, PERIOD)
    # The second head finds the one token of the block that is real: its key, and the query, lie in the slowest
    # frequencies, which hardly turn within a block; all other keys lie elsewhere.
    slow, fast = slice(HEAD + 28, HEAD + 32), slice(HEAD, HEAD + 4)
    layer["self_attn.q_proj.weight"][slow, CONSTANT] = 1.0
    layer["self_attn.k_proj.weight"][fast, CONSTANT] = 1.0
    layer["self_attn.k_proj.weight"][slow, REAL] = 50.0
    fc = torch.zeros(HIDDEN, 2 * HIDDEN)
    for i in (CONSTANT, *range(FAMILY.start, MEMBER.stop)):
        fc[i, i] = 1.0
    fc[REAL, CONSTANT] = -1.0  # context is even less like the real token than masks are
    ones = torch.ones(HIDDEN)
    return {
        **{f"layers.0.{name}": value for name, value in layer.items()},
        "fc.weight": fc,
        "norm.weight": ones,
        "hidden_norm.weight": ones.clone(),
    }


def _layer() -> dict[str, Tensor]:
    """Return a layer that carries family (head 0) and member (head 1) to the output, and looks nowhere yet."""
    values, out = torch.zeros(2 * HEAD, HIDDEN), torch.zeros(HIDDEN, 2 * HEAD)
    values[:48, FAMILY] = torch.eye(48)
    values[HEAD : HEAD + 16, MEMBER] = torch.eye(16)
    out[OUT.start : OUT.start + 48, :48] = torch.eye(48)
    out[OUT.start + 48 : OUT.stop, HEAD : HEAD + 16] = torch.eye(16)
    return {
        "self_attn.q_proj.weight": torch.zeros(2 * HEAD, HIDDEN),
        "self_attn.k_proj.weight": torch.zeros(2 * HEAD, HIDDEN),
        "self_attn.v_proj.weight": values,
        "self_attn.o_proj.weight": out,
        "self_attn.q_norm.weight": torch.full((HEAD,), SHARPNESS),
        "self_attn.k_norm.weight": torch.ones(HEAD),
        "mlp.gate_proj.weight": torch.zeros(64, HIDDEN),
        "mlp.up_proj.weight": torch.zeros(64, HIDDEN),
        "mlp.down_proj.weight": torch.zeros(HIDDEN, 64),
        "input_layernorm.weight": torch.ones(HIDDEN),
        "post_attention_layernorm.weight": torch.ones(HIDDEN),
    }


def _look_back(layer: dict[str, Tensor], head: int, distance: int) -> None:
    """Let a head look at the token `distance` positions before: keys are turned ahead by that much."""
    half = HEAD // 2
    angles = distance * THETA ** (-torch.arange(half) / half)
    first = head * HEAD
    layer["self_attn.q_proj.weight"][first : first + half, CONSTANT] = 1.0
    layer["self_attn.k_proj.weight"][first : first + HEAD, CONSTANT] = torch.cat([angles.cos(), angles.sin()])


def _save(directory: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in weights.items()}, str(directory / "model.safetensors"))
    (directory / "config.json").write_text(json.dumps(config))
