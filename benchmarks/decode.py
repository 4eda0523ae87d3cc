"""Measure plain decoding, DFlash's chain and DDTree on one pair: acceptance length and tokens per second, side by side.

    decode.py --tiny --json benchmarks/results/decode-cpu.json
    decode.py --model T --drafter D --budgets 16 32 64 128

Every prompt is decoded by every variant before the next one, in an order that rotates, so that a slow moment of
the machine hits all alike. The time of a generation excludes its prompt. Outputs are compared with plain decoding token
for token; where bf16 makes one differ, the target's own gap between the two tokens says whether it was a tie.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch
import transformers

from ddtree.sampling import Sampling
from ddtree.server import tiny
from ddtree.server.engine import Engine, Generation, Mode, Request
from ddtree.server.errors import ModelError
from ddtree.server.load import load_engine
from ddtree.server.options import refusal


@dataclass(frozen=True)
class Sample:
    """One prompt decoded by one variant."""

    kind: str
    prompt: int
    temperature: float
    variant: str
    tokens: int
    rounds: int
    acceptance_length: float
    seconds: float
    same: bool
    gap: float | None  # logit gap at the first difference from plain decoding


def variants(base: Engine, budgets: list[int]) -> dict[str, Engine]:
    """Return engines that share one loaded pair."""

    def engine(mode: Mode, budget: int) -> Engine:
        return Engine(base.target, base.drafter, base.tokenizer, mode, budget, base.mask_token)

    out = {"plain": engine(Mode.PLAIN, 1), "dflash": engine(Mode.DFLASH, 1)}
    return out | {f"ddtree {budget}": engine(Mode.DDTREE, budget) for budget in budgets}


def prompts(engine: Engine, count: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return held-out prompts: code to continue, questions about code, exercises."""
    out = []
    for kind, texts in tiny.held_out_prompts().items():
        for text in texts[:count]:
            if kind != "code":
                chat = [{"role": "user", "content": text}]
                text = engine.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            out.append((kind, tuple(engine.tokenizer.encode(text, add_special_tokens=False))))
    return out


def timed(engine: Engine, request: Request) -> tuple[Generation, float]:
    """Run a request; return the seconds from the first token to the last."""
    generation = engine.start(request)
    if engine.target.device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    while generation.finish_reason is None:
        engine.step(generation)
    if engine.target.device.type == "cuda":
        torch.cuda.synchronize()
    return generation, time.perf_counter() - begin


def tie(engine: Engine, prompt: tuple[int, ...], ours: list[int], plain: list[int]) -> float:
    """Return the target's logit gap between the two tokens at the first difference, read in one prefill."""
    at = next((i for i, (a, b) in enumerate(zip(ours, plain, strict=False)) if a != b), None)
    if at is None:
        return math.inf
    with torch.inference_mode():
        logits = engine.target.prefill([*prompt, *plain[:at]], engine.target.new_cache(), 0).logits[-1].float()
    return abs(float(logits[ours[at]] - logits[plain[at]]))


def measure(engines: dict[str, Engine], args: argparse.Namespace) -> Iterator[Sample]:
    """Decode every prompt with every variant; yield as it goes, so that a run that is cut short keeps what it has."""
    names = list(engines)
    work = prompts(engines["plain"], args.prompts)
    for name in names:  # warm-up: kernels, allocator
        timed(engines[name], Request(work[0][1], 32, ignore_eos=True))
    for temperature in args.temperatures:
        sampling = Sampling(temperature)
        for number, (kind, prompt) in enumerate(work):
            request = Request(prompt, args.tokens, sampling, seed=number, ignore_eos=args.ignore_eos)
            turn = number % len(names)
            done = {}
            for name in names[turn:] + names[:turn]:
                runs = [timed(engines[name], request) for _ in range(args.repeats)]
                done[name] = (runs[0][0], min(seconds for _, seconds in runs))
            plain = done["plain"][0].tokens
            for name in names:
                generation, seconds = done[name]
                same = generation.tokens == plain
                yield Sample(
                    kind,
                    number,
                    temperature,
                    name,
                    len(generation.tokens),
                    generation.stats.rounds,
                    generation.stats.acceptance_length,
                    seconds,
                    same,
                    None if same else tie(engines["plain"], prompt, generation.tokens, plain),
                )
            print(f"\r{number + 1}/{len(work)} prompts at temperature {temperature:g}", end="", file=sys.stderr)
        print(file=sys.stderr)


def table(samples: list[Sample]) -> list[str]:
    """Return the result as markdown: one row for each kind of prompt, temperature and variant."""
    groups: dict[tuple[float, str, str], list[Sample]] = defaultdict(list)
    for s in samples:
        for kind in (s.kind, "all"):
            groups[s.temperature, kind, s.variant].append(s)
    lines = [
        "| temperature | prompts | variant | acceptance length | tokens/s | over plain | over DFlash | as plain |",
        "|---|---|---|---|---|---|---|---|",
    ]

    def rates(key: tuple[float, str, str]) -> list[float]:
        return [(s.tokens - 1) / s.seconds for s in groups[key] if s.tokens > 1]

    for key in sorted(groups, key=lambda k: (k[0], k[1] != "all", k[1])):
        temperature, kind, variant = key
        group = groups[key]
        length = sum(s.tokens - 1 for s in group) / max(1, sum(s.rounds for s in group))
        speed = sum(s.tokens - 1 for s in group) / sum(s.seconds for s in group)
        over = []
        for base in ("plain", "dflash"):
            pairs = list(zip(rates(key), rates((temperature, kind, base)), strict=False))
            wins = sum(a > b for a, b in pairs)
            ratio = statistics.median(a / b for a, b in pairs)
            over.append("" if variant == base else f"{ratio:.2f} ({wins}/{len(pairs)})")
        same = sum(s.same for s in group)
        gaps = [s.gap for s in group if s.gap is not None]
        note = f"{same}/{len(group)}" + (f", largest gap {max(gaps):.3f}" if gaps else "")
        lines.append(
            f"| {temperature:g} | {kind} | {variant} | {length:.2f} | {speed:.0f} | {over[0]} | {over[1]} | {note} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--model")
    parser.add_argument("--drafter")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--budgets", type=int, nargs="*", default=[8, 16, 32, 64])
    parser.add_argument("--prompts", type=int, default=10, help="of each kind")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.0, 1.0])
    parser.add_argument("--repeats", type=int, default=1, help="the fastest run of each counts")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.tiny == bool(args.model):
        parser.error("name a pair: either `--tiny`, or `--model` and `--drafter`")
    transformers.logging.disable_progress_bar()
    try:
        model, drafter = map(str, tiny.paths()) if args.tiny else (args.model, args.drafter)
        base = load_engine(model, drafter, device=args.device, dtype=args.dtype)
    except ModelError as error:
        sys.exit(refusal(error.message, error.mend))
    where = (
        torch.cuda.get_device_name() if base.target.device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    )
    head = f"{base.target.layers} layers, {where}, {base.target.dtype}, torch {torch.__version__}, {args.tokens} tokens"
    samples: list[Sample] = []
    for sample in measure(variants(base, args.budgets), args):
        samples.append(sample)
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps({"setting": head, "samples": [asdict(s) for s in samples]}) + "\n")
    print(head)
    print("\n".join(table(samples)))


if __name__ == "__main__":
    main()
