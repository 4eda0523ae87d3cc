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
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))
from tiny_pair import corpus as text
from tiny_pair.drafter import block_loss, features_of, start_from_target, written
from tiny_pair.target import Target
from tiny_pair.tokens import Stream, prepare
from tiny_pair.training import DEVICE, WORKING, autocast, log, run_for

from ddtree.server.drafter import Drafter
from ddtree.server.drafter_config import DrafterConfig


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


def save(out: Path, weights: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write a checkpoint directory, weights in bf16."""
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
        """Return the drafter's config, which tells the target's shape as well."""
        return DrafterConfig.parse(self.configs[1])


def setting(args: argparse.Namespace) -> Setting:
    """Seed, and load what `prepare` wrote."""
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


def trained_target(at: Setting) -> Target:
    """Load the target that will be served: its weights rounded to bf16."""
    target = Target(at.config)
    target.load_state_dict({k: v.float() for k, v in load_file(at.out / "target/model.safetensors").items()})
    return target.to(DEVICE, WORKING).requires_grad_(False).eval()


def train_target(at: Setting, args: argparse.Namespace) -> None:
    """Train on the token stream and write OUT/target with its tokenizer."""
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
    """Let the target write the lessons, and greedy ones to held-out prompts, into OUT/written.pt."""
    target = trained_target(at)
    few = max(args.rows // 8, 8)
    greedy = torch.zeros(few, device=DEVICE)
    lessons = {
        "train": written(target, at.stream, at.marker, args.rows, args.length),
        "code": target.write(at.held.windows(few, 64, 0.5), args.length, greedy),
        "chat": target.write(at.held.before_answers(few, 48, at.marker), args.length, greedy),
    }
    torch.save({name: ids.to("cpu", torch.int16) for name, ids in lessons.items()}, at.out / "written.pt")
    log("written:", {name: tuple(ids.shape) for name, ids in lessons.items()})


def train_drafter(at: Setting, args: argparse.Namespace) -> None:
    """Train on the lessons and write OUT/drafter at each report."""
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
