"""The command line as a user runs it: a process of its own, its exit code, its two streams."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.venvs import Dist, make_venv, site

COMMAND = [sys.executable, "-c", "from ddtree_deploy.cli import main; main()"]


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


def run(*argv: str, env: dict[str, str] | None = None, cwd: Path | None = None, stdin: str | None = None) -> Ran:
    """Run `ddtree-deploy ARGV` without a terminal."""
    done = subprocess.run(
        [*COMMAND, *argv],
        env={**os.environ, **(env or {})},
        cwd=cwd,
        input=stdin,
        stdin=None if stdin is not None else subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def settled(text: str) -> str:
    """Replace what differs from run to run: temporary paths, identities, times, rates."""
    text = re.sub(r"/\S+\.jsonl", "LOG", text)
    text = re.sub(r"/\S*/pytest-of-\w+/pytest-\d+/(popen-gw\d+/)?\w+/", "TMP/", text)
    text = re.sub(r"\b[0-9a-f]{64}\b", "SHA256", text)
    text = re.sub(r"snapshot [0-9a-f]{7}\b", "snapshot ID", text)
    return re.sub(r"\b\d+(\.\d)? s\b", "N s", text)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A venv with two packages, one of them patched by hand."""
    engine = {"engine/__init__.py": "from engine import flags\n", "engine/flags.py": "NEW = 1\n"}
    kernel = Dist("kernel", "2.0", {"kernel/__init__.py": "VERSION = '2.0'\n"}, {"kernel-info": "kernel:main"})
    venv = make_venv(tmp_path / "A", Dist("engine", "0.5.11", engine), kernel)
    (site(venv) / "engine/flags.py").write_text("NEW = 1\nPATCHED = True\n")
    return venv


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A venv with an older engine, which owns a file that the newer one lacks, and a package of its own."""
    engine = Dist("engine", "0.5.9", {"engine/__init__.py": "", "engine/stale.py": "OLD = 1\n"})
    return make_venv(tmp_path / "B", engine, Dist("own", "1.0", {"own/__init__.py": "MINE = 1\n"}))
