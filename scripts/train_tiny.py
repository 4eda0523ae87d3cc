"""Train the tiny Qwen3 target and its DFlash drafter from scratch, in four steps that each leave files behind.

    train_tiny.py prepare DATA [--text DIR ...]        text -> tokenizer and token stream
    train_tiny.py target DATA OUT [--size tiny|bench]  the target
    train_tiny.py write DATA OUT                       what the target writes: the drafter's lessons
    train_tiny.py drafter DATA OUT                     the drafter

The drafter learns from what the target itself writes, as it will be asked to predict exactly that. Time, not steps,
ends the training, so that a run fits a lease. Both models are written in bf16 under the names of published checkpoints.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
import tiny_corpus as text  # noqa: E402

from ddtree.server.drafter import Drafter, DrafterConfig, Layer, RMSNorm, Rotary  # noqa: E402

START = time.time()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WORKING = torch.bfloat16 if DEVICE == "cuda" else torch.float32


@dataclass(frozen=True)
class Size:
    """The shape of a pair; heads of 64, as SGLang's kernels want."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    draft_layers: int
    target_layers: tuple[int, ...]
    block: int = 16


SIZES = {
    "tiny": Size(256, 8, 4, 2, 512, 3, (1, 3, 5, 6)),
    "bench": Size(384, 10, 6, 2, 1024, 3, (1, 4, 6, 8)),
    "smoke": Size(64, 3, 1, 1, 64, 1, (0, 1)),
}


def log(*words: object) -> None:
    print(f"[{time.time() - START:6.1f}]", *words, flush=True)


# ---- data


def prepare(out: Path, roots: list[Path], vocab: int, limit_mb: float) -> None:
    """Write the tokenizer, the token stream with its document starts, and the held-out prompts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    corpus = text.collect(roots, limit_mb)
    log(len(corpus.train), "documents,", round(sum(map(len, corpus.train)) / 1e6, 1), "MB")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        corpus.train[::3],
        trainers.BpeTrainer(
            vocab_size=vocab,
            special_tokens=list(text.SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    (out / "tokenizer").mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer/tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": text.SPECIAL[text.IM_END],
        "pad_token": text.SPECIAL[text.END_OF_TEXT],
        "model_max_length": 8192,
        "clean_up_tokenization_spaces": False,
        "chat_template": text.CHAT_TEMPLATE,
    }
    (out / "tokenizer/tokenizer_config.json").write_text(json.dumps(settings, indent=1))

    def stream(documents: list[str]) -> tuple[Tensor, Tensor]:
        ids: list[int] = []
        starts = []
        for i in range(0, len(documents), 256):
            for encoded in tokenizer.encode_batch(documents[i : i + 256]):
                starts.append(len(ids))
                ids += [*encoded.ids, text.END_OF_TEXT]
        return torch.tensor(ids, dtype=torch.int16), torch.tensor(starts)

    train, starts = stream(list(corpus.train))
    held, held_starts = stream([*corpus.held_out_code, *(text.chat(q, a) for q, a in corpus.held_out_chats)])
    torch.save({"train": train, "starts": starts, "held": held, "held_starts": held_starts}, out / "tokens.pt")
    openings = []
    for source in corpus.held_out_code:
        lines = source.splitlines()
        for at in (len(lines) // 3, 2 * len(lines) // 3):
            openings.append("\n".join(lines[at : at + 8]) + "\n")
    prompts = {
        "code": openings[:40],
        "chat": [q for q, _ in corpus.held_out_chats[:40]],
        "exercise": [q for q, _ in corpus.held_out_exercises[:40]],
    }
    (out / "prompts.json").write_text(json.dumps(prompts, indent=1))
    log(f"{len(train) / 1e6:.1f} M tokens, vocabulary {tokenizer.get_vocab_size()}, held out {len(held) / 1e6:.2f} M")


@dataclass(frozen=True)
class Stream:
    """A token stream and where its documents start."""

    ids: Tensor
    starts: Tensor

    def windows(self, count: int, length: int, at_starts: float) -> Tensor:
        """Draw windows [count, length], a share of them at document starts."""
        last = len(self.ids) - length
        anywhere = torch.randint(0, last, (count,), device=self.ids.device)
        first = self.starts[torch.randint(0, len(self.starts), (count,), device=self.ids.device)].clamp(max=last)
        begin = torch.where(torch.rand(count, device=self.ids.device) < at_starts, first, anywhere)
        return self.ids[begin[:, None] + torch.arange(length, device=self.ids.device)].long()

    def before_answers(self, count: int, length: int, marker: Tensor) -> Tensor:
        """Draw windows that end where an assistant's answer is about to start."""
        hits = (self.ids.unfold(0, len(marker), 1) == marker.to(self.ids)).all(1).nonzero()[:, 0] + len(marker)
        hits = hits[hits > length]
        end = hits[torch.randint(0, len(hits), (count,), device=self.ids.device)]
        return self.ids[end[:, None] - length + torch.arange(length, device=self.ids.device)].long()


# ---- target


class Body(nn.Module):
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


def run_for(
    seconds: float,
    module: nn.Module,
    peak: float,
    loss_of: Callable[[int], Tensor],
    what: str,
    report: Callable[[], str],
    every: int,
) -> None:
    """Optimise until the time is up: AdamW, short warm-up, then the rate falls linearly to nothing."""
    matrices = [p for p in module.parameters() if p.dim() == 2]
    others = [p for p in module.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=DEVICE == "cuda")
    begin, step = time.time(), 0
    while (done := (time.time() - begin) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = peak * min(1, (step + 1) / 200) * (1 - done) + 1e-6
        loss = loss_of(step)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step <= 3:  # compiling is not training
            begin = time.time()
        if step % min(every, 500) == 0 or step == 1:
            log(what, "step", step, "loss", round(loss.item(), 3), report() if step % every == 0 else "")
    log(what, "done after", step, "steps:", report())


# ---- drafter


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
    read = target.config.target_layer_ids.index(max(i for i in target.config.target_layer_ids))
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
    block = torch.full_like(truth, text.MASK)
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
    weight = torch.exp(
        -torch.arange(size - 1, device=ids.device) / 7.0
    )  # a late token counts only if all before it are right
    right = (logits.argmax(-1) == truth).int().cumprod(-1).sum(-1).float()
    return (loss * weight).mean() / weight.mean(), right


def save(out: Path, weights: dict[str, Tensor], config: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    bf16 = {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in weights.items()}
    save_file(bf16, str(out / "model.safetensors"), metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def configs(size: Size, vocab: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the `config.json` of target and drafter."""
    common = {
        "model_type": "qwen3",
        "vocab_size": vocab,
        "hidden_size": size.hidden,
        "intermediate_size": size.feed_forward,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": [text.IM_END, text.END_OF_TEXT],
        "pad_token_id": text.END_OF_TEXT,
    }
    target = {"architectures": ["Qwen3ForCausalLM"], **common, "num_hidden_layers": size.layers}
    drafter = {
        "architectures": ["DFlashDraftModel"],
        **common,
        "num_hidden_layers": size.draft_layers,
        "num_target_layers": size.layers,
        "block_size": size.block,
        "layer_types": ["full_attention"] * size.draft_layers,
        "dflash_config": {"mask_token_id": text.MASK, "target_layer_ids": list(size.target_layers)},
    }
    return target, drafter


@dataclass(frozen=True)
class Setting:
    """What the steps share: where things are, and the data on the device."""

    data: Path
    out: Path
    size: Size
    stream: Stream
    held: Stream
    marker: Tensor
    configs: tuple[dict[str, Any], dict[str, Any]]

    @property
    def config(self) -> DrafterConfig:
        return DrafterConfig.parse(self.configs[1])


def setting(args: argparse.Namespace) -> Setting:
    from tokenizers import Tokenizer

    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    tensors = torch.load(args.data / "tokens.pt")
    tokenizer = Tokenizer.from_file(str(args.data / "tokenizer/tokenizer.json"))
    size = SIZES[args.size]
    return Setting(
        args.data,
        args.out,
        size,
        Stream(tensors["train"].to(DEVICE), tensors["starts"].to(DEVICE)),
        Stream(tensors["held"].to(DEVICE), tensors["held_starts"].to(DEVICE)),
        torch.tensor(tokenizer.encode("<|im_start|>assistant\n").ids),
        configs(size, tokenizer.get_vocab_size()),
    )


def autocast() -> torch.autocast:
    return torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda")


def trained_target(at: Setting) -> Target:
    """Load the target that will be served: its weights rounded to bf16."""
    from safetensors.torch import load_file

    target = Target(at.config)
    target.load_state_dict({k: v.float() for k, v in load_file(at.out / "target/model.safetensors").items()})
    return target.to(DEVICE, WORKING).requires_grad_(False).eval()


def train_target(at: Setting, args: argparse.Namespace) -> None:
    import shutil

    target = Target(at.config).to(DEVICE)

    def next_token_loss(x: Tensor) -> Tensor:
        hidden, _ = target(x[:, :-1])
        return F.cross_entropy(target.lm_head(hidden).flatten(0, 1).float(), x[:, 1:].flatten())

    fast: Callable[[Tensor], Tensor] = torch.compile(next_token_loss) if args.compile else next_token_loss

    def loss(_: int) -> Tensor:
        with autocast():
            return fast(at.stream.windows(args.batch, args.length + 1, 0.5))

    @torch.no_grad()
    def report() -> str:
        with autocast():
            return f"held-out loss {next_token_loss(at.held.windows(args.batch, args.length + 1, 0.5)).item():.3f}"

    log(f"target: {sum(p.numel() for p in target.parameters()) / 1e6:.2f} M parameters", asdict(at.size))
    run_for(args.seconds, target, args.rate, loss, "target", report, args.report)
    save(at.out / "target", target.state_dict(), at.configs[0])
    eos = {"eos_token_id": at.configs[0]["eos_token_id"], "pad_token_id": text.END_OF_TEXT}
    (at.out / "target/generation_config.json").write_text(json.dumps(eos) + "\n")
    for file in (at.data / "tokenizer").iterdir():
        shutil.copy(file, at.out / "target" / file.name)
    shutil.copy(at.data / "prompts.json", at.out / "prompts.json")


def write(at: Setting, args: argparse.Namespace) -> None:
    target = trained_target(at)
    few, greedy = max(args.rows // 8, 8), torch.zeros(max(args.rows // 8, 8), device=DEVICE)
    lessons = {
        "train": written(target, at.stream, at.marker, args.rows, args.length),
        "code": target.write(at.held.windows(few, 64, 0.5), args.length, greedy),
        "chat": target.write(at.held.before_answers(few, 48, at.marker), args.length, greedy),
    }
    torch.save({name: ids.to("cpu", torch.int16) for name, ids in lessons.items()}, at.out / "written.pt")
    log("written:", {name: tuple(ids.shape) for name, ids in lessons.items()})


def train_drafter(at: Setting, args: argparse.Namespace) -> None:
    target = trained_target(at)
    lessons = {k: v.to(DEVICE).long() for k, v in torch.load(at.out / "written.pt").items()}
    features = {name: features_of(target, ids) for name, ids in lessons.items()}
    log("features of", {name: tuple(t.shape) for name, t in features.items()})
    drafter = Drafter(at.config).to(DEVICE)
    start_from_target(drafter, target)

    def anchors(ids: Tensor, first: int) -> Tensor:
        return torch.randint(first, ids.shape[1] - at.size.block, (len(ids), args.blocks), device=DEVICE)

    def loss_at(ids: Tensor, seen: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
        return block_loss(drafter, target, ids, seen, where)

    fast = torch.compile(loss_at) if args.compile else loss_at

    def loss(_: int) -> Tensor:
        rows = torch.randint(0, len(lessons["train"]), (args.batch,), device=DEVICE)
        ids = lessons["train"][rows]
        with autocast():
            out: Tensor = fast(ids, features["train"][rows], anchors(ids, 4))[0]
        return out

    @torch.no_grad()
    def report() -> str:
        lengths = {}
        for name, first in (("code", 64), ("chat", 48)):
            ids = lessons[name][:64]
            with autocast():
                _, right = loss_at(ids, features[name][:64], anchors(ids, first))
            lengths[name] = round(right.mean().item() + 1, 2)
        save(at.out / "drafter", drafter.state_dict(), at.configs[1])  # a lease can end at any time
        return f"acceptance length on held-out prompts {lengths}"

    log(f"drafter: {sum(p.numel() for p in drafter.parameters()) / 1e6:.2f} M parameters")
    run_for(args.seconds, drafter, args.rate, loss, "drafter", report, args.report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    steps: dict[str, dict[str, float]] = {
        "target": {"seconds": 60, "rate": 3e-3, "batch": 48},
        "write": {"rows": 1280},
        "drafter": {"seconds": 60, "rate": 2e-3, "batch": 32, "blocks": 24},
    }
    prepare_options = commands.add_parser("prepare")
    prepare_options.add_argument("data", type=Path)
    prepare_options.add_argument(
        "--text", type=Path, nargs="*", default=[text.standard_library()], help="Python sources"
    )
    prepare_options.add_argument("--vocab", type=int, default=2048)
    prepare_options.add_argument("--mb", type=float, default=60)
    for name, options in steps.items():
        p = commands.add_parser(name)
        p.add_argument("data", type=Path)
        p.add_argument("out", type=Path)
        p.add_argument("--size", choices=SIZES, default="tiny")
        p.add_argument("--length", type=int, default=768, help="tokens of a training sequence")
        p.add_argument("--seed", type=int, default=0)
        p.add_argument("--compile", action="store_true", help="about 30 s, then twice as fast on a GPU")
        p.add_argument("--report", type=int, default=1000, help="steps between reports")
        for option, default in options.items():
            p.add_argument(f"--{option}", type=type(default), default=default)
    args = parser.parse_args()
    match args.command:
        case "prepare":
            prepare(args.data, args.text, args.vocab, args.mb)
        case "target":
            train_target(setting(args), args)
        case "write":
            write(setting(args), args)
        case "drafter":
            train_drafter(setting(args), args)


if __name__ == "__main__":
    main()
