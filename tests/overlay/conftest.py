"""The stock SGLang of each supported version, unpacked from its wheel once and kept in a cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

CACHE = os.environ.get("OVERLAY_WHEELS")


def wheel_of(stock: Callable[[str], Path], version: str) -> Path:
    """Return the wheel that a version's stock site was unpacked from."""
    return _wheel(stock(version).parent, version)


@pytest.fixture(scope="session")
def stock(request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """Return a function from a version to its read-only site; OVERLAY_WHEELS names another cache directory."""
    cache = Path(CACHE) if CACHE else Path(request.config.cache.mkdir("sglang-wheels"))

    def unpacked(version: str) -> Path:
        site = cache / f"site-{version}"
        if not (site / "done").exists():
            shutil.rmtree(site, ignore_errors=True)
            with zipfile.ZipFile(_wheel(cache, version)) as wheel:
                wanted = [n for n in wheel.namelist() if n.endswith(".py") or ".dist-info/" in n]
                wheel.extractall(site, wanted)
            (site / "done").touch()
        return site

    return unpacked


def _wheel(cache: Path, version: str) -> Path:
    found = list(cache.glob(f"sglang-{version}-*.whl"))
    if not found:
        # The interpreter and platform of a GPU host, whatever runs the tests.
        target = ["--only-binary=:all:", "--python-version", "3.12", "--platform", "manylinux_2_34_x86_64"]
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *target, "-d", str(cache)]
        subprocess.run([*command, f"sglang=={version}"], check=True, timeout=240)
        found = list(cache.glob(f"sglang-{version}-*.whl"))
    return found[0]


@pytest.fixture
def site(stock: Callable[[str], Path], tmp_path: Path) -> Path:
    """Return a writable copy of the files of stock SGLang 0.5.11 that the overlay knows."""
    from sglang_overlay.build import EDITS
    from sglang_overlay.manifest import pinned

    source, pins = stock("0.5.11"), pinned("0.5.11")
    assert pins.version in EDITS
    for path in [*pins.base, *pins.reads]:
        target = tmp_path / "site" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / path, target)
    shutil.copytree(source / "sglang-0.5.11.dist-info", tmp_path / "site/sglang-0.5.11.dist-info")
    return tmp_path / "site"
