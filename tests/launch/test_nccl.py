"""The all-reduce before a launch: over gloo with the real torch, and with one whose ranks hang as broken P2P makes them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ddtree_deploy.hosts.base import Host
from ddtree_deploy.launch.lifecycle import reach
from tests.fixtures.venvs import Dist, make_venv, site

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TORCH = """
def ones(size, device): return Values(size)
class Values(list):
    def __init__(self, size): super().__init__([1]); self.all = lambda: True
    def __eq__(self, other): return self
    def tolist(self): return [1]
class cuda:
    set_device = staticmethod(lambda rank: None)
"""
DISTRIBUTED = """
import os, sys, time
RANK = 0
def init_process_group(backend, init_method, rank, world_size, timeout):
    global RANK
    RANK = rank
def all_reduce(values):
    if RANK == 1 and os.environ.get("NCCL_P2P_DISABLE") != "1" and "STUB_HANG" in os.environ:
        print("NET/IB : waiting", flush=True)
        time.sleep(3600)
    if "STUB_FAIL" in os.environ:
        sys.exit("ncclSystemError: a stub fails")
def destroy_process_group(): pass
"""


@pytest.fixture
def host(tmp_path: Path) -> Host:
    torch = Dist("torch", "9.9", {"torch/__init__.py": TORCH, "torch/distributed.py": DISTRIBUTED})
    return Host("here", transport="local", venv=str(make_venv(tmp_path / "venv", torch)))


def test_ranks_that_reach_each_other(host: Host) -> None:
    check = reach(host, 2, {}, seconds=100)
    assert check.level == "ok" and "over 2 ranks took" in check.text


def test_a_hang_is_found_by_its_deadline_and_what_helps_is_told(host: Host) -> None:
    check = reach(host, 2, {"STUB_HANG": "1"}, seconds=8)
    assert check.level == "block" and check.text == "an all-reduce over 2 ranks hangs, but not with NCCL_P2P_DISABLE=1"
    assert "--env NCCL_P2P_DISABLE=1" in check.mend and any("rank 1: NET/IB" in line for line in check.evidence)


def test_a_failure_is_not_a_hang(host: Host) -> None:
    check = reach(host, 2, {"STUB_FAIL": "1"}, seconds=100)
    assert check.level == "block" and check.text == "an all-reduce over 2 ranks fails"
    assert any("ncclSystemError" in line for line in check.evidence)


def test_the_real_torch_over_gloo(tmp_path: Path) -> None:
    venv = make_venv(tmp_path / "venv")
    here = next(path for path in sys.path if path.endswith("site-packages"))
    (site(venv) / "deps.pth").write_text(here + "\n")
    check = reach(Host("here", transport="local", venv=str(venv)), 2, {"OMP_NUM_THREADS": "1"}, backend="gloo", seconds=200)
    assert check.level == "ok", check
