"""The life of the real standalone server with the tiny pair, over a real sshd, through the command line and the openai client."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from ddtree_deploy.demo.sshd import free_port, loopback_sshd, sshd_binary
from tests.cli.conftest import Ran, run
from tests.fixtures.until import until
from tests.fixtures.venvs import make_venv, package, site
from tests.launch.conftest import end_launches

pytestmark = [pytest.mark.slow, pytest.mark.ssh, pytest.mark.skipif(sshd_binary() is None, reason="no sshd: install openssh-server")]


@pytest.fixture
def far(tmp_path: Path, quiet_home: Path) -> Iterator[tuple[Path, Path]]:
    """A host `far` behind an sshd: a venv that finds torch and its like, but holds no ddtree; and the project's directory."""
    venv = make_venv(tmp_path / "venv", package("own", "1.0"))
    here = next(path for path in sys.path if path.endswith("site-packages"))
    (site(venv) / "deps.pth").write_text(here + "\n")
    with loopback_sshd(tmp_path / "sshd", aliases=("far",), environment={"OMP_NUM_THREADS": "1"}) as sshd:
        lines = [f'ssh_config = "{sshd.client_config}"', 'default_target = "far"', f'[hosts.far]\nvenv = "{venv}"']
        lines += ['[profiles.tiny]\nengine = "standalone"\nmodel = "tiny"\ngpus = 0', f"port = {free_port()}", 'flags = ["--threads", "1"]']
        (tmp_path / "ddtree.toml").write_text("\n".join(lines) + "\n")
        try:
            yield venv, tmp_path
        finally:
            end_launches(venv)


def ask(url: str) -> str:
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    answer = client.chat.completions.create(
        model="ddtree-tiny", messages=[{"role": "user", "content": "Count from 3 to 12."}], temperature=0
    )
    return answer.choices[0].message.content or ""


@pytest.mark.timeout(900)  # three starts of a server that imports torch
def test_the_whole_life(far: tuple[Path, Path]) -> None:
    venv, project = far
    shown = run("launch", "--profile", "tiny", "-n", cwd=project)
    assert shown.code == 0 and shown.out.startswith(f"{venv}/bin/python -m ddtree.server --tiny --mode ddtree --device cpu"), shown.err
    assert shown.out.count("\n") == 1 and not (venv / ".ddtree").exists()

    # A push first: the server then runs from a generation.
    assert push(project, "2.0").code == 0

    launched = run("launch", "--profile", "tiny", "--completions", "3", "--wait", "280", cwd=project)
    assert launched.code == 0, launched.err
    assert "from generation 1" in launched.out and "ddtree, budget 24, 3 completions in order" in launched.out
    url = launched.out.split("serving ")[1].split()[0]
    assert ask(url) == "3, 4, 5, 6, 7, 8, 9, 10, 11, 12"

    status = run("status", "--json", cwd=project).json
    (server,) = status["servers"]
    assert (server["phase"], server["generation"], server["stale"], server["proved"]["algorithm"]) == ("serving", 1, False, "ddtree")
    environ = Path(f"/proc/{server['pid']}/environ").read_bytes().split(b"\0")
    generation = f"{venv}/.ddtree/generations/1"
    assert f"TRITON_CACHE_DIR={generation}/jit/triton".encode() in environ
    assert any(item.startswith(f"PYTHONPATH={generation}/site-packages:".encode()) for item in environ)
    assert "serving `ddtree-tiny`" in run("logs", cwd=project).out

    # A second launch is told who is there.
    second = run("launch", "--profile", "tiny", cwd=project)
    assert second.code == 16 and second.err.count("a server of this venv is there already: serving") == 2  # the check, the error

    # kill -9 is noticed, and the server comes back.
    os.kill(server["pid"], signal.SIGKILL)
    until(lambda: serving_again(venv), "it serves again", 240)
    assert ask(url).startswith("3, 4, 5")
    assert "restarted 1 time, last after SIGKILL" in run("status", cwd=project).out

    # Another push: the running server is of an older generation; status says so, and restart mends it.
    pushed = push(project, "3.0")
    assert pushed.code == 0 and "`ddtree-deploy restart far` takes it to the new generation" in pushed.err, pushed.err
    assert "it runs from an older generation than the live one: `ddtree-deploy restart far" in run("status", cwd=project).out
    restarted = run("restart", "--completions", "2", cwd=project)
    assert restarted.code == 0 and "from generation 2" in restarted.out, restarted.err

    stopped = run("stop", cwd=project)
    assert stopped.code == 0 and "stopped in" in stopped.out, stopped.err
    with pytest.raises(Exception, match="Connection"):
        ask(url)
    events = [line["event"] for line in run("audit", "--json", "far", cwd=project).json["lines"]]
    assert [event for event in events if event in ("launched", "serving", "stopped")] == [
        "launched", "serving", "stopped", "launched", "serving", "stopped",
    ]  # fmt: skip


def push(project: Path, version: str) -> Ran:
    """Push a version of the package `own` from another venv; the rest of the target is kept."""
    source = make_venv(project / f"source-{version}", package("own", version))
    snapshot = run("snapshot", "-q", "local", "--venv", str(source), "--no-probe").out.strip()
    return run("push", "far", "--snapshot", snapshot, "--only", "own", "-y", "--no-verify", cwd=project)


def serving_again(venv: Path) -> bool:
    (file,) = venv.glob(".ddtree/servers/*/state.json")
    state: dict[str, Any] = json.loads(file.read_text())
    return state["restarts"] == 1 and state["phase"] == "serving"
