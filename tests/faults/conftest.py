"""Print what the sweeps did: the counts belong to the result."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.harness import COUNTS


@pytest.fixture(autouse=True)
def no_orphans(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """End what a failed test left running: agents and guardians whose venv lies below this run's directory, by their pid."""
    yield
    base = os.fsencode(tmp_path_factory.getbasetemp())
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                argv = (entry / "cmdline").read_bytes()
                if b"ddtree_deploy.agent" in argv and base in argv:
                    os.kill(int(entry.name), signal.SIGKILL)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if COUNTS:
        terminalreporter.section("fault sweeps")
        for sweep, counts in sorted(COUNTS.items()):
            terminalreporter.write_line(json.dumps({"sweep": sweep, **counts}))
        if os.environ.get("DDTREE_COUNTS"):
            # Several runs, one a tier, may add to one file.
            file = Path(os.environ["DDTREE_COUNTS"])
            before = json.loads(file.read_text()) if file.exists() else {}
            file.write_text(json.dumps({**before, **COUNTS}, indent=1) + "\n")
