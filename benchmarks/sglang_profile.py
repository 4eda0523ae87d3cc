"""Profile decode rounds of a running SGLang server and say where a round's time goes.

    python benchmarks/sglang_profile.py run http://127.0.0.1:30000 OUT [--steps 40]     # one request, traced by SGLang's own profiler
    python benchmarks/sglang_profile.py show OUT/*.trace.json.gz --steps 40              # per round: GPU busy, idle, host, kernels

The trace slows the host, so compare shares and two servers with each other, not with an untraced rate.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GPU = ("kernel", "gpu_memcpy", "gpu_memset")
OURS = ("_tree_kernel", "_walk_kernel", "_flat_mask_kernel", "_group_max_kernel", "_merge_kernel")
OURS += ("_tree_slots_kernel", "_path_attention_kernel")


@dataclass(frozen=True)
class Part:
    """A kernel, copy or host call by its name: how often, and microseconds in all."""

    kind: str
    name: str
    count: int
    micros: float


@dataclass(frozen=True)
class Profile:
    """What a trace holds between its first and last GPU activity, in microseconds; the longest parts first."""

    span: float
    busy: float
    parts: tuple[Part, ...]


def summarise(events: Iterable[Mapping[str, Any]]) -> Profile:
    """Add up the complete events of a chrome trace. Overlapping GPU work counts once in `busy`."""
    total: dict[tuple[str, str], list[float]] = defaultdict(list)
    spans = []
    for event in events:
        kind = str(event.get("cat", ""))
        if event.get("ph") != "X" or kind not in (*GPU, "cuda_runtime", "cuda_driver"):
            continue
        total[kind, str(event["name"])].append(float(event["dur"]))
        if kind in GPU:
            spans.append((float(event["ts"]), float(event["ts"]) + float(event["dur"])))
    busy, end = 0.0, float("-inf")
    for begin, until in sorted(spans):
        busy += max(0.0, until - max(begin, end))
        end = max(end, until)
    span = end - min(begin for begin, _until in spans) if spans else 0.0
    parts = [Part(kind, name, len(times), sum(times)) for (kind, name), times in total.items()]
    return Profile(span, busy, tuple(sorted(parts, key=lambda part: -part.micros)))


def show(profile: Profile, steps: int, most: int) -> None:
    """Print what a round costs, and the longest parts."""
    ours = sum(part.micros for part in profile.parts if part.kind == "kernel" and part.name in OURS)
    print(f"a round: {profile.span / steps:.0f} us, GPU busy {profile.busy / steps:.0f}, idle {(profile.span - profile.busy) / steps:.0f}")
    print(f"our kernels: {ours / steps:.1f} us a round\n")
    print("| us a round | times a round | what | name |\n|---|---|---|---|")
    for part in profile.parts[:most]:
        print(f"| {part.micros / steps:.1f} | {part.count / steps:.1f} | {part.kind} | {part.name[:90]} |")


def post(url: str, body: Mapping[str, Any]) -> bytes:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        data: bytes = answer.read()
        return data


def trace(url: str, out: Path, steps: int) -> Path:
    """Let the server trace `steps` rounds of one long answer; return the trace of its first rank. Raises TimeoutError."""
    out.mkdir(parents=True, exist_ok=True)
    ask = {"text": "def main(", "sampling_params": {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}}
    post(f"{url}/generate", ask)  # warm
    before = set(out.glob("*.trace.json.gz"))
    post(f"{url}/start_profile", {"output_dir": str(out.resolve()), "num_steps": steps, "activities": ["CPU", "GPU"]})
    ask["sampling_params"] = {"temperature": 0, "max_new_tokens": 32 * steps, "ignore_eos": True}
    post(f"{url}/generate", ask)
    end = time.monotonic() + 120
    while time.monotonic() < end:
        new = sorted(set(out.glob("*.trace.json.gz")) - before)
        if new:
            time.sleep(2)  # it is written in pieces
            return new[0]
        time.sleep(0.5)
    raise TimeoutError(f"no trace came to {out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("url")
    running.add_argument("out", type=Path)
    shown = commands.add_parser("show")
    shown.add_argument("trace", type=Path)
    for one in (running, shown):
        one.add_argument("--steps", type=int, default=40, help="rounds that the trace holds")
        one.add_argument("--most", type=int, default=25, help="rows of the table")
    args = parser.parse_args()
    path = trace(args.url, args.out, args.steps) if args.command == "run" else args.trace
    with gzip.open(path) as file:
        show(summarise(json.load(file)["traceEvents"]), args.steps, args.most)


if __name__ == "__main__":
    main()
