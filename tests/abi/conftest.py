from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.abi.lab import GCC, Env


@pytest.fixture
def env(tmp_path: Path) -> Callable[[str], Env]:
    """Make a site-packages of a name; the files are real ELF objects, so a C compiler is needed."""
    if GCC is None:
        pytest.skip("no gcc: the shared objects of these tests are compiled here")
    return lambda name: Env(tmp_path / name)
