"""Boot SGLang servers side by side on one GPU, then check and measure them one after another.

    python benchmarks/sglang_rounds.py CASES PROMPTS OUT

CASES is a JSON list of servers: `name`, `model`, `args`, and optionally `pythonpath` (put first), `env`, `wait_for` (a
file to appear before the start) and `fails_with` (text that the log must hold, for a server that must not start).
PROMPTS is a JSON list of lists of token ids. What to do with the servers that are up is in OUT/plan.json, a list of:

    {"do": "greedy", "names": [...], "reference": NAME}       same prompts; are differences near ties
    {"do": "seeded", "names": [...]}                           sampled with seeds, against the noise applied by hand
    {"do": "leak", "names": [...], "requests": 1000}           slots in use afterwards
    {"do": "bench", "names": [...], "concurrency": [...]}      interleaved: every server at each repeat
    {"do": "wait", "names": [], "file": PATH}                  until another run is done

Writes OUT/result.json and one log a server. Servers are ended on the way out, whatever happened. FIRST_PORT (31000) lets two
runs share a machine, BOOT_LIMIT (150) is how many seconds the servers may take to come up.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from sglang_server import START, Server, acceptance, log, many


def mixed_jobs(
    prompts: list[list[int]], stops: list[int], count: int, lengths: tuple[int, ...] = (1, 3, 17, 40, 64, 96, 128)
) -> list[tuple[list[int], dict[str, Any]]]:
    """Mix prompt lengths, shared prefixes (radix hits), token limits inside a tree, and stop tokens."""
    rng = random.Random(7)
    jobs = []
    for index in range(count):
        ids = prompts[index % len(prompts)]
        if index % 3 == 1:
            ids = ids[: max(4, len(ids) // 2)]
        params: dict[str, Any] = {"max_new_tokens": rng.choice(lengths), "ignore_eos": index % 4 != 0}
        if index % 5 == 0 and stops:
            params["stop_token_ids"] = stops[:2]
        jobs.append((ids, params))
    return jobs


def greedy(servers: list[Server], step: dict[str, Any], prompts: list[list[int]]) -> dict[str, Any]:
    """Ask all servers the same and compare with the reference; where texts part, say whether it was a near tie."""
    stops: list[int] = step.get("stops", [])
    outcome: dict[str, Any] = {}
    outputs: dict[str, dict[str, list[list[int]]]] = {}
    levels = step.get("concurrency", [1, 8, 32])
    for server in servers:
        outputs[server.name] = {}
        accepted = []
        for level in levels:
            jobs = mixed_jobs(prompts, stops, step.get("requests", 24) if level > 1 else 8)
            answers = many(server, jobs, level)
            outputs[server.name][str(level)] = [a["output_ids"] for a in answers]
            accepted.append(acceptance(answers))
        outcome[server.name] = {"acceptance": accepted, "in_use": server.in_use()}
        log("greedy", server.name, outcome[server.name])
    reference = outputs[step["reference"]]
    for name, mine in outputs.items():
        found = []
        total = 0
        for level in mine:
            jobs = mixed_jobs(prompts, stops, step.get("requests", 24) if int(level) > 1 else 8)
            for (ids, _), a, b in zip(jobs, reference[level], mine[level], strict=True):
                total += 1
                if a != b:
                    found.append((level, ids, a, b))
        outcome[name] |= {"outputs": total, "different": len(found), "near_ties": gaps(step["model"], found)}
        log("greedy", name, {k: outcome[name][k] for k in ("outputs", "different")}, outcome[name]["near_ties"][:8])
    return outcome


def gaps(model: str, found: list[tuple[str, list[int], list[int], list[int]]]) -> list[dict[str, Any]]:
    """For each pair of outputs that differ: the target's own logits, fp32 and bf16, at the first different token."""
    rows = []
    for level, ids, a, b in found:
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        if at >= min(len(a), len(b)):
            rows.append({"level": level, "at": at, "lengths": [len(a), len(b)]})
            continue
        logits = target_logits(model, ids + a[:at])
        full, half = (x[-1] for x in logits)
        top = full.topk(2).indices.tolist()
        rows.append(
            {
                "level": level,
                "at": at,
                "fp32_gap": round(float(full[a[at]] - full[b[at]]), 4),
                "bf16_gap": round(float(half[a[at]] - half[b[at]]), 4),
                "top_two": sorted(top) == sorted([a[at], b[at]]),
                "below_top": round(float(full.max() - min(full[a[at]], full[b[at]])), 4),
            }
        )
    return rows


_models: dict[str, Any] = {}


def target_logits(model: str, ids: list[int]) -> list[Any]:
    """Return the logits `[len(ids), V]` of plain transformers, once in fp32 and once in bf16 (as fp32)."""
    import torch
    from transformers import AutoModelForCausalLM

    if model not in _models:
        _models[model] = [
            AutoModelForCausalLM.from_pretrained(model, dtype=dtype).cuda().eval()
            for dtype in (torch.float32, torch.bfloat16)
        ]
    with torch.no_grad():
        return [one(torch.tensor([ids]).cuda()).logits[0].float() for one in _models[model]]


def seeded(servers: list[Server], step: dict[str, Any], prompts: list[list[int]]) -> dict[str, Any]:
    """Sample with seeds and check each token against argmax(logits / T + noise), from transformers' fp32 logits."""
    import torch

    from sglang_overlay.runtime.draw import seeded_gumbel

    outcome = {}
    temperature = 0.8
    for server in servers:
        jobs = [
            (ids, {"temperature": temperature, "sampling_seed": 100 + i, "max_new_tokens": 48, "ignore_eos": True})
            for i, ids in enumerate(prompts[: step.get("requests", 16)])
        ]
        answers = many(server, jobs, 8)
        right = total = 0
        worst = 0.0
        for (ids, params), answer in zip(jobs, answers, strict=True):
            out = answer["output_ids"]
            logits = target_logits(step["model"], ids + out)[0][len(ids) - 1 : -1]
            positions = torch.arange(len(ids) - 1, len(ids) + len(out) - 1, device=logits.device)
            seeds = torch.full_like(positions, params["sampling_seed"])
            noise = seeded_gumbel(seeds, positions, logits.shape[1])
            score = torch.log_softmax(logits / temperature, dim=1).double() + noise
            token = torch.tensor(out, device=logits.device)
            miss = score.amax(dim=1) - score.gather(1, token[:, None])[:, 0]
            # The first token comes from the prefill, which SGLang samples itself.
            right += int((miss[1:] <= 0).sum())
            total += len(out) - 1
            worst = max(worst, float(miss[1:].max()))
        equal = {"tokens": total, "equal": right, "worst_gap": round(worst, 5)}
        outcome[server.name] = {**equal, "acceptance": acceptance(answers)}
        log("seeded", server.name, outcome[server.name])
    return outcome


def leak(servers: list[Server], step: dict[str, Any], prompts: list[list[int]]) -> dict[str, Any]:
    """Ask many requests of all kinds and count the slots that are in use afterwards."""
    outcome = {}
    for server in servers:
        jobs = mixed_jobs(prompts, step.get("stops", []), step["requests"], (1, 3, 9, 17, 33))
        began = time.monotonic()
        answers = many(server, jobs, 32)
        time.sleep(1.0)
        outcome[server.name] = {
            "requests": len(answers),
            "tokens": sum(len(a["output_ids"]) for a in answers),
            "acceptance": acceptance(answers),
            "slots_in_use_afterwards": server.in_use(),
            "alive": server.process is not None and server.process.poll() is None,
            "seconds": round(time.monotonic() - began, 1),
        }
        log("leak", server.name, outcome[server.name])
    return outcome


def bench(servers: list[Server], step: dict[str, Any], prompts: list[list[int]]) -> dict[str, Any]:
    """Time the servers in turns at each concurrency: tokens per second, acceptance, and the waits between tokens and rounds."""
    new = step.get("new_tokens", 128)
    outcome: dict[str, Any] = {server.name: {} for server in servers}
    for level in step["concurrency"]:
        count = max(step.get("least", 4), level * step.get("waves", 2))
        for repeat in range(step.get("repeats", 3)):
            order = servers if repeat % 2 == 0 else servers[::-1]
            for server in order:
                jobs = [
                    (prompts[(repeat * count + i) % len(prompts)], {"max_new_tokens": new, "ignore_eos": True})
                    for i in range(count)
                ]
                if repeat == 0:
                    many(server, [(ids, {"max_new_tokens": 16, "ignore_eos": True}) for ids, _ in jobs[:level]], level)
                began = time.monotonic()
                answers = many(server, jobs, level)
                seconds = time.monotonic() - began
                pieces = [
                    (b[0] - a[0], max(1, b[1] - a[1])) for answer in answers for a, b in itertools.pairwise(answer["stamps"])
                ]
                waits = [gap / tokens for gap, tokens in pieces for _ in range(tokens)]
                empty: dict[str, list[Any]] = {"tokens_per_second": [], "acceptance": [], "itl_ms": [], "round_ms": []}
                cell = outcome[server.name].setdefault(str(level), empty)
                cell["tokens_per_second"].append(round(sum(len(a["output_ids"]) for a in answers) / seconds, 1))
                cell["acceptance"].append(acceptance(answers))
                cuts = statistics.quantiles(waits, n=100)
                cell["itl_ms"].append([round(1000 * cuts[49], 3), round(1000 * cuts[98], 3)])
                # A streamed piece is what one round brought.
                cell["round_ms"].append(round(1000 * statistics.median(gap for gap, _ in pieces), 3))
        for server in servers:
            cell = outcome[server.name][str(level)]
            rate = statistics.median(cell["tokens_per_second"])
            log("bench", f"c{level}", server.name, rate, cell["acceptance"][0], cell["itl_ms"][0], cell["round_ms"])
    return outcome


def wait(_: list[Server], step: dict[str, Any], __: list[list[int]]) -> dict[str, Any]:
    """Wait for a file, so that nothing else runs on the machine while the next steps measure."""
    while not Path(step["file"]).exists():
        time.sleep(0.2)
    return {}


STEPS = {"wait": wait, "greedy": greedy, "seeded": seeded, "leak": leak, "bench": bench}


def main() -> None:
    cases, prompts = (json.loads(Path(name).read_text()) for name in sys.argv[1:3])
    out = Path(sys.argv[3])
    plan = json.loads((out / "plan.json").read_text())
    first = int(os.environ.get("FIRST_PORT", "31000"))
    servers = [Server(case, first + 7 * i, out / f"{case['name']}.log") for i, case in enumerate(cases)]
    result: dict[str, Any] = {"steps": []}
    try:
        limit = float(os.environ.get("BOOT_LIMIT", "150"))
        while [server for server in servers if not server.poll()] and time.monotonic() - START < limit:
            time.sleep(0.3)
        up = {server.name: server for server in servers if server.up_after is not None}
        result["servers"] = {
            s.name: {"up_after": s.up_after, "memory_mib": s.memory_mib(), "args": s.case["args"], **s.facts} for s in servers
        }
        for server in servers:
            if server.name not in up and server.failure is None:
                log("not up", server.name, server.log.read_text(errors="replace")[-1500:])
        for step in plan:
            chosen = [up[name] for name in step["names"] if name in up]
            missing = [name for name in step["names"] if name not in up]
            try:
                outcome = STEPS[step["do"]](chosen, step, prompts)
            except Exception as error:
                log("step failed", step["do"], repr(error)[:500])
                outcome = {"error": repr(error)[:500]}
            result["steps"].append({**step, "missing": missing, "outcome": outcome})
            (out / "result.json").write_text(json.dumps(result, indent=1))
    finally:
        for server in servers:
            server.stop()


if __name__ == "__main__":
    main()
