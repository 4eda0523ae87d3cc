"""The sweep over budgets: what it boots, and what it makes of the rates."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SWEEP = [sys.executable, str(ROOT / "benchmarks/sglang_sweep.py")]


def cell(rate: float, accepted: float | None = None) -> dict[str, object]:
    return {"tokens_per_second": [rate - 1, rate, rate + 9], "acceptance": [accepted], "itl_ms": [[1.0, 2.0]]}


def test_a_server_for_each_budget_and_table(tmp_path: Path) -> None:
    asked = ["--budgets", "7", "255", "--tables", "2:31,32:7", "--concurrency", "1", "32", "--backend", "triton"]
    subprocess.run([*SWEEP, "plan", "T", "D", str(tmp_path), *asked], check=True)
    cases = {case["name"]: case["args"] for case in json.loads((tmp_path / "cases.json").read_text())}
    (step,) = json.loads((tmp_path / "plan.json").read_text())
    assert list(cases) == step["names"] == ["plain", "dflash", "ddtree 7", "ddtree 255", "ddtree 2:31,32:7"]
    assert cases["ddtree 255"][-2:] == ["--speculative-ddtree-budget", "255"]
    assert cases["ddtree 2:31,32:7"][-2:] == ["--speculative-ddtree-budget-table", "2:31,32:7"]
    assert "--speculative-algorithm" not in cases["plain"]
    assert all("triton" in args for args in cases.values())


def test_the_table_names_ratios_and_the_fastest_budget_of_each_batch(tmp_path: Path) -> None:
    outcome = {
        "plain": {"1": cell(100), "4": cell(400), "32": cell(3000)},
        "dflash": {"1": cell(200, 2.0), "4": cell(500, 2.0), "32": cell(1500, 2.0)},
        "ddtree 7": {"1": cell(210, 2.1), "4": cell(510, 2.1), "32": cell(1600, 2.1)},
        "ddtree 31": {"1": cell(250, 3.0), "4": cell(650, 3.0), "32": cell(900, 3.0)},
        "ddtree 1:31,32:7": {"32": cell(9999, 2.5)},
    }
    (tmp_path / "result.json").write_text(json.dumps({"steps": [{"do": "greedy"}, {"do": "bench", "outcome": outcome}]}))
    shown = subprocess.run([*SWEEP, "table", str(tmp_path / "result.json")], check=True, capture_output=True, text=True).stdout
    assert "| 4 | ddtree 31 | 650 | 1.62 | 1.30 | 3.00 | 1.00 | 2.00 |" in shown.splitlines()
    assert shown.rstrip().endswith("budget table: 4:31,32:7")
