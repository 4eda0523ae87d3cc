"""Where systemd runs, a server lives in a transient unit of its own: tried under a real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_deploy.demo.sshd import free_port
from tests.fixtures.until import until
from tests.launch import systemd

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.skipif(bool(systemd.missing()), reason=systemd.missing())]


def test_a_server_lives_in_a_unit_that_survives_its_supervisor(venv: Path, tmp_path: Path) -> None:
    port = str(free_port())
    with systemd.running(tmp_path) as prefix:

        def run(*argv: str) -> str:
            done = subprocess.run([*prefix, *argv], capture_output=True, text=True, check=False, timeout=200, env=dict(os.environ))
            assert done.returncode == 0, done.stderr + done.stdout
            return done.stdout

        def ddtree(*argv: str) -> str:
            return run(sys.executable, "-m", "ddtree_deploy", *argv, "--venv", str(venv))

        def server() -> dict[str, object]:
            (found,) = json.loads(ddtree("status", "local", "--json"))["servers"]
            assert isinstance(found, dict)
            return found

        words = ["--engine", "standalone", "--model", "tiny", "--gpus", "0", "--port", port, "--completions", "2"]
        assert "2 completions in order" in ddtree("launch", "local", *words)
        first = server()
        unit = str(first["unit"])
        assert unit.startswith("ddtree-") and unit.endswith(f"-{port}.service")
        shown = run("systemctl", "show", unit, "-p", "ActiveState", "-p", "KillMode", "-p", "ControlGroup")
        assert "ActiveState=active" in shown and "KillMode=mixed" in shown and f"system.slice/{unit}" in shown
        # kill -9 of the supervisor: systemd ends the server with it and starts both anew.
        state = venv / f".ddtree/servers/{port}/state.json"
        before = json.loads(state.read_text())
        run("kill", "-9", str(before["supervisor"]))

        def anew() -> bool:
            now = json.loads(state.read_text())
            return bool(now["supervisor"] != before["supervisor"] and now["phase"] == "serving")

        until(anew, "it serves again")
        assert server()["pid"] != first["pid"]
        assert "stopped in" in ddtree("stop", "local")
        gone = subprocess.run([*prefix, "systemctl", "is-active", unit], capture_output=True, text=True, check=False, timeout=60)
        assert gone.returncode != 0, gone.stdout
