"""The sweep over budgets and the profile of a round: what they boot, and what they make of what they get."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SWEEP = [sys.executable, str(ROOT / "benchmarks/sglang_sweep.py")]


def cell(rate: float, accepted: float | None = None) -> dict[str, object]:
    return {"tokens_per_second": [rate - 1, rate, rate + 9], "acceptance": [accepted], "itl_ms": [[1.0, 2.0]], "round_ms": [4.0]}


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
    assert "| 4 | ddtree 31 | 650 | 1.62 | 1.30 | 3.00 | 1.00 | 2.00 | 4.00 |" in shown.splitlines()
    assert shown.rstrip().endswith("budget table: 4:31,32:7")


def test_a_profile_counts_overlapping_work_once(tmp_path: Path) -> None:
    def event(kind: str, name: str, begin: float, micros: float) -> dict[str, object]:
        return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": micros}

    events = [event("kernel", "gemm", 100, 50), event("kernel", "_tree_kernel", 120, 20), event("gpu_memcpy", "DtoH", 180, 10)]
    events += [event("cuda_runtime", "cudaGraphLaunch", 0, 90), event("python_function", "f", 0, 999), {"ph": "i", "cat": "kernel"}]
    with gzip.open(tmp_path / "a.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    command = [sys.executable, str(ROOT / "benchmarks/sglang_profile.py"), "show", str(tmp_path / "a.trace.json.gz"), "--steps", "2"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert lines[0] == "a round: 45 us, GPU busy 30, idle 15" and lines[1] == "our kernels: 10.0 us a round"
    assert [line.split(" | ")[3] for line in lines[5:]] == ["cudaGraphLaunch |", "gemm |", "_tree_kernel |", "DtoH |"]
