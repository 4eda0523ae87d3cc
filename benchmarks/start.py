"""Time the shortest commands beside what they can not be shorter than: Python that does nothing, and an ssh that does nothing.

Run as root on a quiet machine: `python benchmarks/start.py [--rounds 9]`. Prints medians and ratios as Markdown.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.costs import DDTREE, Account, timed
from tests.harness.lab import Lab, lab_missing, two_hosts


def ways(lab: Lab) -> dict[str, tuple[list[str], str]]:
    """Return name -> (command, the way that it is compared with)."""
    return {
        "python -c pass": ([sys.executable, "-c", "pass"], ""),
        "ddtree-deploy --help": ([*DDTREE, "--help"], "python -c pass"),
        "ssh host true": (["ssh", "-F", str(lab.ssh_config), "-o", "ControlMaster=no", "ct200", "true"], ""),
        "ddtree-deploy status host": ([*DDTREE, "status", "ct200", "--venv", "/srv/venv"], "ssh host true"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    if lab_missing():
        raise SystemExit(lab_missing())
    with Account() as account, two_hosts("ct200") as lab:
        lab["ct200"].run([sys.executable, "-m", "venv", "--without-pip", "/srv/venv"])
        wall: dict[str, list[float]] = {name: [] for name in ways(lab)}
        for _ in range(rounds):
            for name, (command, _base) in ways(lab).items():
                wall[name].append(timed(account, lab, command, {"DDTREE_HOME": str(lab.share / "home")}).wall)
        print("| command | wall s | to |", "|---|---|---|", sep="\n")
        for name, (_command, base) in ways(lab).items():
            ratio = statistics.median(a / b for a, b in zip(wall[name], wall[base], strict=True)) if base else 0
            print(f"| `{name}` | {statistics.median(wall[name]):.2f} | {f'{ratio:.1f}x {base}' if base else ''} |")


if __name__ == "__main__":
    main()
