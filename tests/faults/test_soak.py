"""A short soak on every run; `scripts/soak` goes on for minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.harness import report
from tests.faults.soak import soak


@pytest.mark.faults
def test_a_short_soak_loses_nothing(tmp_path: Path) -> None:
    counts = soak(tmp_path, 20.0)
    report("soak", seconds=20, hosts=2, controllers=2, **counts.as_dict())
    assert not counts.wrong, "\n".join(counts.wrong)
    assert counts.looks and counts.operations
