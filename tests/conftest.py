"""What every test shares: a quiet terminal, a home of its own, and, in CI, no silent skips."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# What a skip may say where CI runs. Anything else there is a test that silently did not run.
ALLOWED_SKIPS = (
    "needs a GPU",
    "needs sglang",
    "needs Python 3.9",
    "needs zsh",
    "needs fish",
    "needs systemd",
    "needs DDTREE_SWEEP=all",
    "this file system has no reflinks",
)


@pytest.fixture(autouse=True)
def quiet_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give each test its own HOME and store, and a terminal that neither colours nor wraps by chance."""
    home = tmp_path_factory.mktemp("home")
    for name in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "CLICOLOR_FORCE", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in os.environ if name.startswith(("DDTREE_", "XDG_"))]:
        monkeypatch.delenv(name)
    for name, value in {
        "NO_COLOR": "1",
        "COLUMNS": "100",
        "TERMINAL_WIDTH": "100",
        "HOME": str(home),
        "DDTREE_HOME": str(home / "ddtree"),
    }.items():
        monkeypatch.setenv(name, value)
    yield home


class CiHonesty:
    """Fail a CI run (`CI=true`) that skipped a test for another reason, or ran fewer than `DDTREE_LEAST_TESTS`."""

    def __init__(self) -> None:
        self.ran = 0
        self.unexplained: list[str] = []

    def note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        self.ran += getattr(report, "when", "") == "call" and not report.skipped
        if report.skipped and not hasattr(report, "wasxfail"):
            text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            reason = str(text).removeprefix("Skipped: ")
            if not reason.startswith(ALLOWED_SKIPS):
                self.unexplained.append(f"{report.nodeid}: {reason}")

    pytest_runtest_logreport = note
    pytest_collectreport = note

    def problems(self) -> list[str]:
        least = int(os.environ.get("DDTREE_LEAST_TESTS", "1"))
        few = [f"only {self.ran} tests ran, expected at least {least}"] if self.ran < least else []
        return [f"skipped in CI: {line}" for line in self.unexplained] + few

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.problems() and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for problem in self.problems():
            terminalreporter.write_line(problem, red=True)


def pytest_configure(config: pytest.Config) -> None:
    from tests.faults.promises import Promises

    config.pluginmanager.register(Promises(), "promises")
    if os.environ.get("CI") == "true" and not hasattr(config, "workerinput") and not config.option.collectonly:
        config.pluginmanager.register(CiHonesty(), "ci-honesty")
