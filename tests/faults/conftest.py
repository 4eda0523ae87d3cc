"""Print what the sweeps did: the counts belong to the result."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.faults.harness import COUNTS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if COUNTS:
        terminalreporter.section("fault sweeps")
        for sweep, counts in sorted(COUNTS.items()):
            terminalreporter.write_line(json.dumps({"sweep": sweep, **counts}))
        if os.environ.get("DDTREE_COUNTS"):
            Path(os.environ["DDTREE_COUNTS"]).write_text(json.dumps(COUNTS, indent=1) + "\n")
