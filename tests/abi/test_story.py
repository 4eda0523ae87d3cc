"""The accident of the field through the command line, on venvs whose tiny shared objects break and load like the real ones.

With real wheels: `scripts/oracle_story.py`.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.abi.lab import GCC, Env
from tests.cli.conftest import run
from tests.fixtures.venvs import make_venv, site

pytestmark = [pytest.mark.slow, pytest.mark.skipif(GCC is None, reason="no gcc: the shared objects of these tests are compiled here")]


def make(root: Path, cuda: int) -> tuple[Path, Env]:
    """Make a venv with one of the two environments in it."""
    venv = make_venv(root / f"cu{cuda}")
    env = Env(site(venv))
    env.cuda13_host() if cuda == 13 else env.cuda12_host()
    return venv, env


def imports(venv: Path, module: str) -> bool:
    return subprocess.run([venv / "bin/python", "-c", f"import {module}"], capture_output=True, check=False).returncode == 0


def test_sglang_alone_is_refused_and_the_command_on_the_screen_works(tmp_path: Path) -> None:
    """Asked for sglang alone: refused, the set is named, and the very command that is printed pushes it."""
    (source, _), (target, _) = make(tmp_path, 13), make(tmp_path, 12)
    assert run("snapshot", "-q", "local", "--venv", str(source)).code == 0

    shown = run("diff", "local", "--venv", str(target), "--only", "sglang").out
    assert "block K9: metadata\n" in shown and "sglang 0.5.11 requires torch==2.11.0; the result has 2.9.1\n" in shown
    assert "also needed: torch 2.11.0 <- sglang requires torch==2.11.0" in shown
    assert "also needed: nvidia-cuda-nvrtc 13.0.1 <- " in shown
    assert shown.index("block K9") < shown.index("also needed") < shown.index("hint: 7 distributions that go together: ")
    refused = run("push", "local", "--venv", str(target), "--only", "sglang", "-y")
    assert refused.code == 13 and not (target / ".ddtree/generations").exists()

    partly = run("diff", "local", "--venv", str(target), "--only", "torch", "--only", "nvidia*").out
    assert "would no longer work, and is not moved: deep-gemm 1.0, sgl-kernel 0.3.21, sglang 0.5.9\n" in partly
    assert "`deep_gemm/ops.so` (deep-gemm 1.0, not moved) needs `libnvrtc.so.12`" in partly

    command = re.search(r"go together: ddtree-deploy (push .*)", shown)
    assert command is not None
    pushed = run(*shlex.split(command.group(1)), "-y", "--verify")
    assert (pushed.code, pushed.out.rstrip().endswith("verified")) == (0, True), pushed.err
    assert [imports(target, module) for module in ("torch", "sgl_kernel", "deep_gemm", "sglang")] == [True] * 4


def test_doctor_knows_a_merged_tree_for_what_it_is(tmp_path: Path) -> None:
    """cu13 laid over cu12 by `cp -r`: torch imports, the kernel does not, and doctor says why; a clean tree is of one piece."""
    (source, new), (target, old) = make(tmp_path, 13), make(tmp_path, 12)
    assert "of one piece" in run("doctor", "local", "--venv", str(source)).out
    old.lay_over(new)
    assert (imports(target, "torch"), imports(target, "sgl_kernel")) == (True, False)
    ran = run("doctor", "local", "--venv", str(target))
    assert ran.code == 1
    first = ran.out.index("fail  K8 ")
    assert re.search(r"a merged tree, CUDA 13 over CUDA 12: torch 2.11.0\+cu130 was laid over [^;]*torch 2.9.1", ran.out[first:])
    assert "torch's preloader finds it before its own" in ran.out
    assert "needs `libnvrtc.so.13`; `nvidia/cu13/lib/libnvrtc.so.13` is in the tree, but the loader does not come by there" in ran.out
    assert "the metadata says torch 2.9.1, the code in `torch` says 2.11.0+cu130" in ran.out
