"""The story's week as three commands, between two machines with real sshd's, on real wheels, one of them patched by hand."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.venvs import SITE
from tests.harness.lab import Lab, Machine, lab_missing, two_hosts

pytestmark = [pytest.mark.slow, pytest.mark.ssh, pytest.mark.skipif(bool(lab_missing()), reason=lab_missing())]

ROOT = Path(__file__).parent.parent.parent
LIVE = f"/srv/venv/{SITE}"
PATCHED = "sglang/srt/speculative/spec_info.py"
EVERYTHING = [word for name in ("sglang", "transformers", "numpy", "tokenizers", "safetensors") for word in ("--only", name)]
ADDED = "sglang/srt/speculative/ddtree_utils.py"


@pytest.fixture(scope="module")
def wheels() -> Path:
    done = subprocess.run([str(ROOT / "scripts/wheels")], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


@pytest.fixture(scope="module")
def lab(wheels: Path) -> Iterator[Lab]:
    with two_hosts("ct129", "ct200", disk_mib=6000) as lab:
        for wheel in wheels.glob("*.whl"):
            os.link(wheel, lab.share / wheel.name) if wheel.stat().st_dev == lab.share.stat().st_dev else (
                lab.share / wheel.name
            ).write_bytes(wheel.read_bytes())
        everything = [f"/mnt/lab/{wheel.name}" for wheel in sorted(wheels.glob("*.whl"))]
        install(lab["ct129"], everything)
        # The other machine has the same package by its stock wheel, and one that the source does not have.
        install(lab["ct200"], [path for path in everything if "/sglang-" in path or "/numpy-" in path])
        kept = lab["ct200"].path(LIVE) / "only_here.py"
        kept.write_text("ANSWER = 42\n")
        yield lab


def install(machine: Machine, wheels: list[str]) -> None:
    machine.run([sys.executable, "-m", "venv", "--without-pip", "/srv/venv"])
    pip = ["env", "-C", "/", sys.executable, "-m", "pip", "--python", "/srv/venv/bin/python", "--disable-pip-version-check"]
    machine.run([*pip, "install", "-q", "--no-deps", "--no-index", *wheels])


def ddtree(lab: Lab, *argv: str, expect: int = 0) -> str:
    done = lab.run([sys.executable, "-m", "ddtree_deploy", *argv], cwd=lab.root)
    assert done.returncode == expect, done.stderr + done.stdout
    return done.stdout


def digest(machine: Machine, path: str) -> str:
    site = Path(str(machine.path("/srv/venv")))
    live = os.readlink(machine.path(LIVE)) if machine.path(LIVE).is_symlink() else ""
    tree = site / live.replace("../../", "") if live else machine.path(LIVE)
    return hashlib.sha256((tree / path).read_bytes()).hexdigest()


def ours(machine: Machine) -> list[str]:
    return [argv for _pid, argv in machine.processes() if "ddtree" in argv]


@pytest.mark.timeout(1200)
def test_the_main_job(lab: Lab, tmp_path: Path) -> None:
    lab.env["DDTREE_HOME"] = str(tmp_path / "home")
    source, target = lab["ct129"], lab["ct200"]
    (lab.root / "ddtree.toml").write_text('[hosts.ct129]\nvenv = "/srv/venv"\n[hosts.ct200]\nvenv = "/srv/venv"\n')
    stock = digest(target, PATCHED)
    patched = source.path(LIVE) / PATCHED
    patched.write_bytes(patched.read_bytes() + b"\nPATCHED_BY_HAND = True\n")
    (source.path(LIVE) / ADDED).write_text('"""Added by hand."""\n')

    # snapshot: the patch and the added file are found, not remembered
    identity = ddtree(lab, "snapshot", "-q", "ct129", "--label", "known-good").strip()
    shown = ddtree(lab, "show", "known-good")
    assert f"patched {PATCHED}" in shown and f"added   {ADDED}" in shown and identity in shown
    assert ddtree(lab, "snapshot", "-q", "ct129").strip() == identity

    # diff, push with proofs
    assert "spec_info" in ddtree(lab, "diff", "ct200", "--files")
    ddtree(lab, "diff", "ct200", "--exit-code", expect=3)
    last = json.loads(ddtree(lab, "push", "ct200", *EVERYTHING, "--verify", "-y", "--json").splitlines()[-1])
    pushed = last["pushed"][0]
    assert (last["code"], pushed["generation"], pushed["verified"]) == (0, 1, True)
    assert digest(target, PATCHED) == digest(source, PATCHED) != stock
    assert digest(target, ADDED) == digest(source, ADDED)
    probe = "import numpy, tokenizers, safetensors, only_here; print(numpy.__file__)"
    where = "import os, numpy; print(os.path.realpath(numpy.__file__))"
    assert "/generations/1/" in target.run(["/srv/venv/bin/python", "-c", where]).stdout
    assert target.run(["/srv/venv/bin/python", "-c", probe]).returncode == 0

    # again: nothing to do; what the host says is verified
    again = json.loads(ddtree(lab, "push", "ct200", *EVERYTHING, "--verify", "-y", "--json").splitlines()[-1])["pushed"][0]
    assert (again["already"], again["sent_objects"]) == (True, 0)
    ddtree(lab, "verify", "ct200", "--level", "files", "--deep")
    ddtree(lab, "verify", "ct200", "--level", "import")

    # rollback restores the stock file; nothing of ours still runs there
    ddtree(lab, "rollback", "ct200", "-y")
    assert digest(target, PATCHED) == stock
    assert not (target.path("/srv/venv") / ".ddtree/generations/0/site-packages" / ADDED).exists()
    deadline = time.monotonic() + 120
    while ours(target) and time.monotonic() < deadline:
        time.sleep(0.5)  # the guardian gives kept generations their own files, then ends by itself
    assert ours(target) == []
