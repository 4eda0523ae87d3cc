"""Compare DDTREE's budgets with DFLASH and plain decoding on one pair, by `sglang_rounds.py`.

    python benchmarks/sglang_sweep.py plan TARGET DRAFTER OUT --budgets 7 15 31 63 127 255 --concurrency 1 2 4 8 16 32
    python benchmarks/sglang_rounds.py OUT/cases.json PROMPTS OUT
    python benchmarks/sglang_sweep.py table OUT/result.json

`plan` writes the servers (all up at once, measured in turns) and the steps; `table` shows a row a server and concurrency, and the
budget table that these rates would choose. `--tables TABLE` adds a server with a table of budgets, which is how such a choice is checked.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

BATCHES = [1, 2, 4, 8, 16, 32]
SERVER = ["--sampling-backend", "pytorch", "--max-running-requests", "32", "--disable-piecewise-cuda-graph"]
SERVER += ["--max-total-tokens", "65536", "--cuda-graph-bs", *map(str, BATCHES)]


def cases(target: str, drafter: str, budgets: Sequence[int], tables: Sequence[str], backend: str) -> list[dict[str, Any]]:
    """Return the servers to boot: plain, DFLASH, one for each budget, one for each table of budgets."""
    draft = ["--speculative-draft-model-path", drafter]
    tree = ["--speculative-algorithm", "DDTREE", *draft]
    own: dict[str, list[str]] = {"plain": [], "dflash": ["--speculative-algorithm", "DFLASH", *draft]}
    own |= {f"ddtree {budget}": [*tree, "--speculative-ddtree-budget", str(budget)] for budget in budgets}
    own |= {f"ddtree {table}": [*tree, "--speculative-ddtree-budget-table", table] for table in tables}
    base = [*SERVER, "--attention-backend", backend]
    return [{"name": name, "model": target, "args": [*base, *more]} for name, more in own.items()]


def steps(names: Sequence[str], concurrency: Sequence[int], repeats: int, new_tokens: int) -> list[dict[str, Any]]:
    """Return the one step: every server at every concurrency, interleaved."""
    how = {"concurrency": list(concurrency), "repeats": repeats, "new_tokens": new_tokens}
    return [{"do": "bench", "names": list(names), **how}]


def rows(outcome: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield concurrency, server, tokens/s, x plain, x dflash, acceptance, ITL p50 and p99, round (ms) of a `bench` step's outcome."""
    levels = sorted({int(level) for cells in outcome.values() for level in cells})
    for level in levels:
        rate = {name: statistics.median(cells[str(level)]["tokens_per_second"]) for name, cells in outcome.items() if str(level) in cells}
        for name, value in rate.items():
            cell = outcome[name][str(level)]
            ratios = [f"{value / rate[other]:.2f}" if other in rate else "" for other in ("plain", "dflash")]
            accepted = [one for one in cell["acceptance"] if one is not None]
            waits = [f"{statistics.median(pair[place] for pair in cell['itl_ms']):.2f}" for place in (0, 1)]
            waits.append(f"{statistics.median(cell['round_ms']):.2f}")
            yield str(level), name, f"{value:.0f}", *ratios, f"{statistics.mean(accepted):.2f}" if accepted else "", *waits


def choice(outcome: Mapping[str, Any]) -> str:
    """Return the fastest single budget for each concurrency as a budget table, `1:63,4:31`."""
    best: list[tuple[int, str]] = []
    for level in sorted({int(level) for cells in outcome.values() for level in cells}):
        trees = {
            name.partition(" ")[2]: statistics.median(cells[str(level)]["tokens_per_second"])
            for name, cells in outcome.items()
            if name.startswith("ddtree ") and name.partition(" ")[2].isdigit() and str(level) in cells
        }
        if trees:
            budget = max(trees, key=lambda one: trees[one])
            best = [*(best[:-1] if best and best[-1][1] == budget else best), (level, budget)]
    return ",".join(f"{level}:{budget}" for level, budget in best)


def show(result: Mapping[str, Any]) -> None:
    """Print the table and the choice of every `bench` step."""
    for step in result["steps"]:
        if step["do"] == "bench":
            print("| at a time | server | tokens/s | x plain | x dflash | acceptance | ITL p50 ms | p99 | round ms |")
            print("|---|---|---|---|---|---|---|---|---|")
            for row in rows(step["outcome"]):
                print(f"| {' | '.join(row)} |")
            print(f"\nbudget table: {choice(step['outcome'])}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    planned = commands.add_parser("plan")
    planned.add_argument("target")
    planned.add_argument("drafter")
    planned.add_argument("out", type=Path)
    planned.add_argument("--budgets", type=int, nargs="*", default=[7, 15, 31, 63, 127, 255])
    planned.add_argument("--tables", nargs="*", default=[], help="budget tables, each a server of its own")
    planned.add_argument("--concurrency", type=int, nargs="*", default=BATCHES)
    planned.add_argument("--backend", default="fa3")
    planned.add_argument("--repeats", type=int, default=2)
    planned.add_argument("--new-tokens", type=int, default=96)
    commands.add_parser("table").add_argument("result", type=Path)
    args = parser.parse_args()
    if args.command == "table":
        show(json.loads(args.result.read_text()))
        return
    servers = cases(args.target, args.drafter, args.budgets, args.tables, args.backend)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "cases.json").write_text(json.dumps(servers, indent=1))
    plan = steps([server["name"] for server in servers], args.concurrency, args.repeats, args.new_tokens)
    (args.out / "plan.json").write_text(json.dumps(plan, indent=1))


if __name__ == "__main__":
    main()
