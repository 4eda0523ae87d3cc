"""A real venv, a staged tree beside its site-packages, and a session that answers into the void."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ddtree_deploy.agent import prove
from ddtree_deploy.agent.main import Session

Build = Callable[..., Path]


@dataclass(frozen=True)
class Place:
    """A venv whose live site-packages is `live`, and a tree `root` that is staged to replace it."""

    venv: Path
    python: str
    live: Path
    root: Path


def make_place(base: Path, python: str) -> Place:
    venv = base / "venv"
    subprocess.run([python, "-I", "-m", "venv", "--without-pip", str(venv)], check=True)
    return place_of(venv)


def place_of(venv: Path) -> Place:
    (live,) = venv.glob("lib/python3*/site-packages")
    root = venv / ".ddtree" / "generations" / "1" / "site-packages"
    root.mkdir(parents=True, exist_ok=True)
    return Place(venv, str(venv / "bin" / "python"), live, root)


def write_sources(root: Path, **sources: str | bytes) -> list[str]:
    for name, text in sources.items():
        (root / f"{name}.py").write_bytes(text if isinstance(text, bytes) else text.encode())
    return [f"{name}.py" for name in sources]


def prove_imports(session: Session, place: Place, *modules: str, **options: Any) -> list[dict[str, Any]]:
    options.setdefault("timeout", 30.0)
    return prove.imports(
        session, place.python, str(place.root), str(place.live), str(place.venv), list(modules), **options
    )


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("template")
    make_place(base, getattr(sys, "_base_executable", sys.executable))
    return base / "venv"


@pytest.fixture
def place(tmp_path: Path, template: Path) -> Place:
    """Give a venv of its own to the test: a copy, since making one costs half a second."""
    venv = tmp_path / "venv"
    shutil.copytree(template, venv, symlinks=True)
    return place_of(venv)


@pytest.fixture
def session() -> Iterator[Session]:
    null = os.open(os.devnull, os.O_RDWR)
    yield Session(null, null, False, -1)
    os.close(null)


@pytest.fixture
def read_only() -> Iterator[Session]:
    null = os.open(os.devnull, os.O_RDWR)
    yield Session(null, null, True, -1)
    os.close(null)


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Compile C text into a shared library."""

    def compile_to(target: Path, text: str, *flags: str) -> Path:
        source = tmp_path / (target.name + ".c")
        source.write_text(text)
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(target), str(source), *flags], check=True)
        return target

    return compile_to
