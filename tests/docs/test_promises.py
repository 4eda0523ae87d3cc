"""docs/promises.md: 22 promises, each with tests that exist; and the check that they ran, tried on a small run of its own."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.counts import entered
from tests.faults.promises import PAGE, PROMISES, proofs, proved_by, sections

ROOT = Path(__file__).parents[2]


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.FunctionDef)}


def test_every_promise_is_told_whole_and_names_tests_that_exist() -> None:
    text = PAGE.read_text("utf-8")
    told = sections(text)
    assert tuple(told) == PROMISES
    for name, tests in proofs(text).items():
        assert all(mark in told[name] for mark in ("\n> ", "**Kept by**", "**Proved by**", "**Not promised:**")), name
        assert re.search(r"`tests/", told[name]), f"{name} names no test"
        for test in tests:
            file, _, function = test.partition("::")
            assert (ROOT / file).is_file(), f"{name} names {file}"
            found = functions(ROOT / file)
            assert function in found if function else any(one.startswith("test_") for one in found), f"{name} names {test}"


def test_a_test_proves_what_names_its_file_or_itself() -> None:
    named = {"P1": ("tests/a.py",), "P2": ("tests/b.py::test_one",)}
    assert proved_by("tests/a.py::test_x[1]", named) == ["P1"]
    assert proved_by("tests/b.py::test_one[k]", named) == ["P2"]
    assert proved_by("tests/b.py::test_one_more", named) == [] and proved_by("tests/ab.py::test_x", named) == []


@pytest.mark.slow
def test_a_run_under_ci_in_which_no_test_of_a_promise_passed_fails(tmp_path: Path) -> None:
    """A process of its own, so that its verdict is a real exit code; with a worker of xdist, too."""
    (tmp_path / "conftest.py").write_text(
        "from tests.faults.promises import Promises\n"
        "def pytest_configure(config):\n"
        "    plugin = Promises()\n"
        "    plugin.named = {'P1': ('test_it.py::test_one',), 'P2': ('test_it.py::test_two',), 'P3': ('elsewhere.py',)}\n"
        "    config.pluginmanager.register(plugin, 'promises')\n"
    )
    (tmp_path / "test_it.py").write_text(
        "import os, pytest\ndef test_one(): pass\ndef test_two():\n    if os.environ['SKIP'] == '1':\n        pytest.skip('not here')\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")

    def verdict(skip: str, ci: str, *arguments: str) -> tuple[int, str]:
        env = {**os.environ, "SKIP": skip, "CI": ci, "PYTHONPATH": os.fspath(ROOT)}
        argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, os.fspath(tmp_path)]
        done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    code, out = verdict("1", "true", "-n", "1")
    assert code == 1 and "P2: none of its tests passed here" in out and "P1 1" in out, out
    assert verdict("0", "true", "-n", "1")[0] == 0
    assert verdict("1", "true", "-k", "one")[0] == 0, "what was not selected is not judged"


def test_counts_go_to_their_place_and_nowhere_else() -> None:
    page = PAGE.read_text("utf-8")
    once = entered(page, {"P2 push": {"kill_points": 12, "lost": 0}})
    assert "| P2 push | kill points: 12, lost: 0 |" in once
    assert entered(once, {}).replace("| sweep | what it tried |\n|---|---|\n", "") == entered(page, {}).replace(
        "| sweep | what it tried |\n|---|---|\n", ""
    )
    assert once.partition("<!-- counts")[0] == page.partition("<!-- counts")[0]
