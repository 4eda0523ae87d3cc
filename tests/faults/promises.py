"""Which tests prove which promise (docs/promises.md says), and whether they ran: a promise whose tests did not run is not kept."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs/promises.md"
PROMISES = tuple(f"P{number}" for number in range(1, 23))


def sections(text: str) -> dict[str, str]:
    """Return the text of each promise by its name (`P1`)."""
    parts = re.split(r"^## (P\d+)\. .*$", text.partition("\n## Counts\n")[0], flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def proofs(text: str) -> dict[str, tuple[str, ...]]:
    """Return the tests of each promise: files or `file::function` that the page names under `Proved by`, and files named for it."""
    proved = {name: body.partition("**Proved by**")[2].partition("**Not promised")[0] for name, body in sections(text).items()}
    files = {name: Path(__file__).parent.glob(f"test_p{int(name[1:]):02}_*.py") for name in proved}
    own = {name: [f"tests/faults/{path.name}" for path in sorted(found)] for name, found in files.items()}
    return {name: (*re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?)`", body), *own[name]) for name, body in proved.items()}


def proved_by(nodeid: str, named: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the promises that a test proves: it is in a file that the page names, or is the function that it names."""
    plain = nodeid.partition("[")[0]
    return [name for name, tests in named.items() if any(plain == test or plain.startswith(test + "::") for test in tests)]


class Promises:
    """Count the tests of each promise that passed. Under CI a promise whose tests were selected, and none passed, fails the run."""

    def __init__(self) -> None:
        self.named = proofs(PAGE.read_text("utf-8"))
        self.selected: set[str] = set()
        self.passed: Counter[str] = Counter()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.selected |= {name for item in session.items for name in proved_by(item.nodeid, self.named)}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed and not hasattr(report, "wasxfail"):
            self.passed.update(proved_by(report.nodeid, self.named))

    def unproved(self) -> list[str]:
        """Return the promises whose tests were there to be run and did not pass, not one of them."""
        return sorted(self.selected - set(self.passed), key=lambda name: int(name[1:]))

    # With xdist the workers know what was selected, and the controller what passed.

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        self.selected |= set(getattr(node, "workeroutput", {}).get("promises", ()))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["promises"] = sorted(self.selected)
        elif os.environ.get("CI") == "true" and self.unproved() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.passed:
            counted = ", ".join(f"{name} {self.passed[name]}" for name in PROMISES if self.passed[name])
            terminalreporter.write_line(f"tests that passed, by promise: {counted}")
        for name in self.unproved():
            terminalreporter.write_line(f"{name}: none of its tests passed here", red=True)
