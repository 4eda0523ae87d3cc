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
    "needs triton",
    "needs Python 3.9",
    "needs zsh",
    "needs fish",
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


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    return str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)


_unexplained: list[str] = []


def _note(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = _reason(report).removeprefix("Skipped: ")
        if not reason.startswith(ALLOWED_SKIPS):
            _unexplained.append(f"{report.nodeid}: {reason}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note(report)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Where `CI=true`, fail when a test was skipped for a reason that CI does not allow, or when too few ran."""
    if os.environ.get("CI") != "true" or hasattr(session.config, "workerinput"):
        return
    least = int(os.environ.get("DDTREE_LEAST_TESTS", "1"))
    problems = [f"skipped in CI: {line}" for line in _unexplained]
    if session.testscollected - len(_unexplained) < least and exitstatus == 0:
        problems.append(f"only {session.testscollected} tests ran, expected at least {least}")
    if problems:
        print("\n" + "\n".join(problems))
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
