"""A host whose venv holds a stand-in server, and the certainty that nothing of it outlives a test."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ddtree_deploy.agent.serving.start import STANDALONE_IMPORTS
from ddtree_deploy.agent.serving.supervisor import members
from ddtree_deploy.demo.sshd import free_port
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.launch.argv import Request
from tests.fixtures.venvs import Dist, make_venv

STAND_IN = Path(__file__).with_name("stand_in.py").read_text("utf-8")
#: An SGLang that only has what preflight reads, and the stand-in to run.
SERVER_ARGS = "\n".join(
    f'parser.add_argument("{flag}")'
    for flag in (
        "--model-path", "--host", "--port", "--tp-size", "--dp-size", "--nnodes", "--node-rank", "--dist-init-addr", "--mode", "--api-key",
        "--speculative-algorithm", "--speculative-draft-model-path", "--mem-fraction-static",
    )
)  # fmt: skip


def stand_in(version: str = "1.0") -> tuple[Dist, ...]:
    """Return the distributions of a venv that serves with the stand-in, by either engine's name."""
    stubs = {f"{name}/__init__.py": "" for name in STANDALONE_IMPORTS}
    ddtree = {"ddtree/__init__.py": f"VERSION = '{version}'\n", "ddtree/server/__init__.py": "", "ddtree/server/__main__.py": STAND_IN}
    sglang = {
        "sglang/__init__.py": "", "sglang/launch_server.py": STAND_IN, "sglang/srt/server_args.py": SERVER_ARGS,
        "sglang/srt/speculative/ddtree_utils.py": 'parser.add_argument("--speculative-ddtree-budget")\n',
    }  # fmt: skip
    return Dist("ddtree", version, ddtree), Dist("sglang", "0.5.11", sglang), Dist("stubs", "1.0", stubs)


def end_launches(venv: Path) -> None:
    """Kill whatever was launched from a venv: supervisors first, so that nothing comes back."""
    for file in venv.glob(".ddtree/servers/*/state.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            state = json.loads(file.read_text())
            pid = state["supervisor"]
            if str(venv).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
    for file in venv.glob(".ddtree/servers/*/launch.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            launch = json.loads(file.read_text())
            for pid in members(launch["id"], None, os.path.realpath(launch["argv"][0])):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def venv(tmp_path: Path) -> Iterator[Path]:
    made = make_venv(tmp_path / "venv", *stand_in())
    try:
        yield made
    finally:
        end_launches(made)


@pytest.fixture
def host(venv: Path) -> Host:
    return Host("here", transport="local", venv=str(venv))


@pytest.fixture
def request_() -> Request:
    """A request for the stand-in, as the standalone engine, on a free port."""
    return Request(engine="standalone", model="tiny", gpus=0, port=free_port())


def told(request: Request, **env: object) -> Request:
    """Return the request with instructions for the stand-in."""
    return replace(request, env={**request.env, **{f"STAND_IN_{name.upper()}": str(value) for name, value in env.items()}})
