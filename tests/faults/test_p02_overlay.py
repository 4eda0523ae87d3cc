"""P2 for `push --overlay`: what it writes beyond a push are the built files, into the store (the wheel itself is not needed for that)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_deploy import upkeep
from ddtree_deploy.store import Store
from tests.faults.harness import EVERYTHING, Killer, check_objects, kill_points, report

pytestmark = pytest.mark.faults

FILES = ["one\n" * 1000, "two\n" * 2000]


def test_the_built_files_are_kept_whole_or_not_at_all(tmp_path: Path) -> None:
    home = tmp_path / "home"

    def keep(killer: Killer | None = None) -> subprocess.CompletedProcess[str]:
        config = tmp_path / "controller.json"
        names = {"act": "overlay", "files": FILES, "venv": "/nowhere", "home": str(home), "snapshot": "", "python": ""}
        config.write_text(json.dumps({**names, "killer": str(killer.config) if killer else ""}))
        return subprocess.run([sys.executable, "-m", "tests.faults.controller", str(config)], capture_output=True, text=True, check=False)

    trace = Killer(tmp_path / "trace", "controller", None, trace=True)
    done = keep(trace)
    assert done.returncode == 0, done.stderr
    steps = [step for step in trace.steps() if "/objects/" in step[4]]
    chosen = kill_points(steps, 2) if not EVERYTHING else [{"at": step[0]} for step in steps]
    hits = 0
    for kill in chosen:
        upkeep.prune(Store.open(home))  # no snapshot holds them
        assert check_objects(home / "store") == 0
        killer = Killer(tmp_path / "killer", "controller", kill)
        keep(killer)
        hits += killer.hit is not None
        check_objects(home / "store")
        done = keep()
        assert done.returncode == 0, done.stderr
        assert check_objects(home / "store") == len(FILES)
    upkeep.prune(Store.open(home))
    assert [path for path in (home / "store").rglob("*") if path.name.startswith(".tmp-")] == []
    report("P2 overlay kept, controller killed", steps=len(steps), tried=len(chosen), hit=hits)
    assert hits
