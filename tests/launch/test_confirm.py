"""Is DDTREE what decodes? A plugin that does not register is told before a start, a server that runs something else after it."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ddtree_deploy.agent.serving import plugin
from ddtree_deploy.errors import ServerNotReady
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.launch import Ready
from ddtree_deploy.launch.argv import Request
from ddtree_deploy.launch.lifecycle import open_session, parse, prepare
from ddtree_deploy.launch.readiness import Watch, wait
from tests.fixtures.venvs import Dist, install, make_venv, site

PASSED = "[2026-11-29 12:00:00] DDTREE ready: budgets [63, 31], self-test passed"


def plugged(venv: Path, source: str) -> Path:
    """Make a venv whose `sglang_overlay.plugin` is `source`; return the tree."""
    files = {"sglang_overlay/__init__.py": "", "sglang_overlay/plugin.py": source}
    make_venv(venv, Dist("sglang-overlay", "1.0", files))
    return site(venv)


def test_a_plugin_that_registers(tmp_path: Path) -> None:
    said = {"version": "0.5.23", "route": "plugin", "registered": True, "detail": "DDTREE is known"}
    source = f"import json, os\nprint('noise of an import')\nassert os.environ['ASKED'] == '1'\nprint(json.dumps({said!r}))\n"
    tree = plugged(tmp_path / "venv", source)
    assert plugin.registration(str(tmp_path / "venv"), str(tree), {"ASKED": "1"}) == {**said, "lines": []}
    assert not list(tree.rglob("__pycache__"))


@pytest.mark.parametrize(
    ("source", "detail"),
    [
        (
            "import json, sys\nprint('ContractBroken: no `verify`', file=sys.stderr)\n"
            "print(json.dumps({'version': '1', 'route': 'none', 'registered': False, 'detail': 'sglang 0.5.23 is not it'}))\nsys.exit(13)",
            "sglang 0.5.23 is not it",
        ),
        ("raise ImportError('ContractBroken: no `verify`')", "`python -m sglang_overlay.plugin` ended with status 1"),
        ("import sys, time\nprint('ContractBroken: no `verify`', file=sys.stderr, flush=True)\ntime.sleep(600)", "no answer within 2 s"),
    ],
)  # fmt: skip
def test_a_plugin_that_does_not(tmp_path: Path, source: str, detail: str) -> None:
    tree = plugged(tmp_path / "venv", source)
    found = plugin.registration(str(tmp_path / "venv"), str(tree), {}, seconds=2.0 if "sleep" in source else 60.0)
    assert not found["registered"] and found["detail"] == detail
    assert "sleep" in source or any("ContractBroken: no `verify`" in line for line in found["lines"])


@pytest.mark.slow
def test_launch_asks_the_plugin_before_it_starts(host: Host, venv: Path, request_: Request) -> None:
    (site(venv) / "sglang/srt/speculative/ddtree_utils.py").unlink()
    answer = {"version": "0.5.11", "route": "none", "registered": False, "detail": "an edited file is gone"}
    source = f"import json, sys\nprint(json.dumps({answer!r}))\nsys.exit(13)\n"
    install(venv, Dist("sglang-overlay", "1.0", {"sglang_overlay/__init__.py": "", "sglang_overlay/plugin.py": source}))
    wanted = replace(request_, engine="sglang", gpus=1, model="/m", drafter="/d")
    (check,) = [check for check in prepare(host, wanted).checks if check.id == "overlay"]
    assert check.level == "block" and check.text.endswith("does not register: an edited file is gone")
    # Nobody asks it where DDTREE is not wanted.
    assert not [check for check in prepare(host, replace(wanted, algorithm="dflash")).checks if check.id == "overlay"]


def proved(host: Host, request: Request, *words: str, **told: str) -> Ready:
    """Start the stand-in as SGLang and wait for it, without what preflight wants of a host with GPUs."""
    tail = ["-m", "sglang.launch_server", "--port", str(request.port), "--speculative-algorithm", "DDTREE", *words]
    env = {f"STAND_IN_{name.upper()}": value for name, value in told.items()}
    wish = {"tail": tail, "listen": "127.0.0.1", "port": request.port, "env": env, "algorithm": "ddtree"}
    with open_session(host, writable=True) as session:
        value = session.ask("serve-start", wish, venv=host.venv, name=str(request.port), who="test").value
        try:
            return wait(Watch(session, parse(host.name, value), parse, time.monotonic() + 120, lambda _event: None), "ddtree", 1)
        finally:
            session.ask("serve-stop", venv=host.venv, name=str(request.port), drain=0, who="test")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_algorithm_that_decodes_is_read_back_from_a_server(host: Host, request_: Request) -> None:
    ready = proved(host, request_, say=PASSED)
    assert ready.algorithm == "ddtree" and ready.detail["budget"] == "63, 31"
    for said, why, mend in (
        ({"say": PASSED, "algorithm": "DFLASH"}, "the server's algorithm is DFLASH", "--speculative-algorithm DDTREE"),
        ({"say": "nothing of it"}, "no line of the start-up self-test", "ddtree-deploy logs here"),
        ({"say": "DDTREE start-up self-test failed: a sibling sees its sibling"}, "self-test failed: a sibling", ""),
    ):
        with pytest.raises(ServerNotReady, match="it does not decode with DDTREE: ") as caught:
            proved(host, request_, **said)
        assert why in caught.value.message and mend in caught.value.mend, json.dumps([caught.value.message, caught.value.mend])
    # Where the log is told to be silent there is nothing to read: what the server resolved counts alone.
    assert proved(host, request_, "--log-level", "error", say="nothing of it").algorithm == "ddtree"
