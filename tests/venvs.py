"""Small virtual environments with honest metadata: what tests install is what a wheel would leave (PEP 427)."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def make_venv(path: Path) -> Path:
    """Make a venv of this interpreter without pip (0.1 s) and return it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", os.fspath(path)], check=True)
    return path


def site_packages(venv: Path) -> Path:
    """Return the one site-packages of a venv."""
    (found,) = venv.glob("lib/python3*/site-packages")
    return found


def install(venv: Path, name: str, version: str, files: Mapping[str, str | bytes], scripts: str = "") -> None:
    """Install a distribution: `files` by path relative to site-packages, METADATA, entry points, RECORD."""
    site, info = site_packages(venv), f"{name.replace('-', '_')}-{version}.dist-info"
    everything: dict[str, str | bytes] = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/INSTALLER": "tests\n",
    }
    if scripts:
        everything[f"{info}/entry_points.txt"] = f"[console_scripts]\n{scripts}\n"
    record = ""
    for path, text in everything.items():
        data = text.encode() if isinstance(text, str) else text
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(data)}\n"
    (site / info / "RECORD").write_text(record + f"{info}/RECORD,,\n")


def tree(root: Path) -> dict[str, str]:
    """Return what lies below a directory: each path with its sha256, link target, or `dir`."""
    found: dict[str, str] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        elif path.is_dir():
            found[name] = "dir"
        else:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found
