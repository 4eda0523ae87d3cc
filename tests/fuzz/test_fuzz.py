"""Every target on its seeds, on what was found before, and on a bounded number of guided tries (`scripts/fuzz` goes on and on)."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.faults.harness import report
from tests.fuzz import targets

ROOT = Path(__file__).parents[2]
#: Tries of each target in CI: some seconds in all.
RUNS = {"frames": 1000, "manifest": 2000, "rows": 2000, "zstd": 500, "fatbin": 1000}
FEW = 200
GUIDED = importlib.util.find_spec("atheris") is not None


@pytest.mark.parametrize("name", targets.TARGETS)
def test_seeds_and_what_was_found_before(name: str) -> None:
    for data in [*targets.seeds(name), *targets.KNOWN.get(name, ())]:
        targets.TARGETS[name](data)


@pytest.mark.faults
@pytest.mark.parametrize("name", targets.TARGETS)
def test_a_bounded_number_of_tries(name: str, tmp_path: Path) -> None:
    """By atheris; where that has no wheel, hypothesis mutates the seeds of the same targets, and the report says so."""
    runs = RUNS.get(name, FEW)
    if not GUIDED:
        _mutate(name)
        report(f"fuzz {name}", engine="hypothesis", runs=FEW)
        return
    options = [f"-runs={runs}", "-seed=8", "-timeout=60", "-rss_limit_mb=2048"]
    argv = [sys.executable, "-m", "tests.fuzz.run", name, str(tmp_path / name), *options]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    found = [path.read_bytes() for path in tmp_path.glob(f"{name}.crash-*")]
    assert done.returncode == 0 and not found, f"{found}\n{done.stderr[-3000:]}"
    report(f"fuzz {name}", engine="atheris", runs=runs)


@st.composite
def mutated(draw: st.DrawFn, name: str) -> bytes:
    """Draw a seed with a few pieces cut, doubled, flipped, or replaced by an enemy's words."""
    data = bytearray(draw(st.sampled_from([*targets.seeds(name), *(word for word in targets.WORDS)])))
    random_ = random.Random(draw(st.integers(0, 1 << 32)))
    for _ in range(draw(st.integers(1, 4))):
        at = random_.randrange(len(data) + 1)
        end = min(len(data), at + random_.choice((0, 1, 4, 16)))
        data[at:end] = random_.choice((b"", data[at:end] * 2, bytes(byte ^ 1 << random_.randrange(8) for byte in data[at:end]),
                                       random_.choice(targets.WORDS)))  # fmt: skip
    return bytes(data)


def _mutate(name: str) -> None:
    @settings(max_examples=FEW, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(mutated(name))
    def one(data: bytes) -> None:
        targets.TARGETS[name](data)

    one()
