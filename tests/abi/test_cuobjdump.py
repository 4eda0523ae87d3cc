"""NVIDIA's own cuobjdump (from PyPI) reads the same architectures as ours, from real wheels."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ddtree_deploy.agent import elf

pytestmark = pytest.mark.slow
WHEELS = ("xformers==0.0.35", "torchao==0.17.0", "sgl-deep-gemm==0.1.0", "torchvision==0.26.0")


def download(requirement: str, root: Path) -> Path:
    """Download one wheel without dependencies and unpack it; skip when there is no index to ask."""
    argv = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", str(root)]
    argv += ["--python-version", "3.12", "--abi", "cp312", "--abi", "abi3", "--abi", "none", "--implementation", "cp"]
    argv += [arg for name in ("2_17", "2_28", "2_24") for arg in ("--platform", f"manylinux_{name}_x86_64")]
    argv += ["--platform", "manylinux2014_x86_64", "--platform", "linux_x86_64"]
    done = subprocess.run([*argv, requirement], capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        pytest.skip(f"no wheel of {requirement} to be had: {done.stderr.strip().splitlines()[-1][:200]}")
    stem = re.split("[=<>]", requirement)[0].replace("-", "_")
    wheel = next(root.glob(f"{stem}-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(root / stem)
    return root / stem


def listed(cuobjdump: Path, path: Path) -> set[str]:
    """Return the architectures that cuobjdump names: `sm_90a` for code, `compute_80` for PTX."""
    out, kind = set(), ""
    text = subprocess.run([str(cuobjdump), str(path)], capture_output=True, text=True, check=False).stdout
    for line in text.splitlines():
        if line.startswith("Fatbin"):
            kind = "sm_" if line.startswith("Fatbin elf") else "compute_" if line.startswith("Fatbin ptx") else ""
        match = re.match(r"arch = sm_(\d+[af]?)", line)
        if match and kind:
            out.add(kind + match.group(1))
    return out


def test_cuobjdump_reads_the_same(tmp_path: Path) -> None:
    tool = next(download("nvidia-cuda-cuobjdump", tmp_path).rglob("cuobjdump"))
    tool.chmod(0o755)
    compared = 0
    for requirement in WHEELS:
        for path in sorted(download(requirement, tmp_path).rglob("*.so*")):
            ours = elf.read(str(path))["archs"]
            assert ours is not None and set(ours) == listed(tool, path), path
            compared += bool(ours)
    assert compared >= 4
