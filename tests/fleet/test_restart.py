"""`push --restart`: the server stops for the switch only, serves from the new generation, or from the old one if that does not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ddtree_deploy.errors import ProofFailed, RevertedAfterFailure
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.launch import Options, Server, lifecycle, running
from ddtree_deploy.launch.argv import Request
from ddtree_deploy.models import Pushed
from ddtree_deploy.push.restart import push_and_restart
from ddtree_deploy.snapshot import take
from ddtree_deploy.store import Store
from ddtree_deploy.transfer import push
from tests.faults.harness import live_generation, outcome, rest
from tests.fixtures.venvs import make_venv, site
from tests.fixtures.world import QUICK, local, replace, yes
from tests.launch.conftest import host, request_, stand_in, venv  # noqa: F401 - fixtures

pytestmark = pytest.mark.slow  # servers that live and die

OPTIONS = Options(wait=120, completions=2, drain=5)


def up(host: Host, request: Request) -> Server:  # noqa: F811
    return lifecycle.launch(lifecycle.prepare(host, request), OPTIONS).server


def prepared(tmp_path: Path, **files: str) -> tuple[Store, str]:
    """Return a store with a snapshot of version 2 of the stand-in, some of its files replaced (`__` in a name is a slash)."""
    source = make_venv(tmp_path / "source", *stand_in("2.0"))
    for name, text in files.items():
        (site(source) / (name.replace("__", "/", 1) + ".py")).write_text(text)
    store = Store.open(tmp_path / "home")
    return store, take(local(source), store, probe=False).ref.id


def pushing(host: Host, store: Store, snapshot: str, verify: bool = False) -> Callable[[Callable[[], None]], Pushed]:  # noqa: F811
    options = replace(QUICK, verify=verify, only=("ddtree",))
    return lambda hook: push(host, store, snapshot, options, approve=yes, about_to_switch=hook)


def only(host: Host) -> Server:  # noqa: F811
    (server,) = running(host)
    return server


def test_by_the_command_the_server_serves_from_the_new_generation(host: Host, venv: Path, request_: Request, tmp_path: Path) -> None:  # noqa: F811
    old = up(host, request_)
    assert old.generation is None
    _store, _snapshot = prepared(tmp_path)
    (tmp_path / "ddtree.toml").write_text(f'[hosts.here]\ntransport = "local"\nvenv = "{venv}"\n')
    argv = [sys.executable, "-c", "from ddtree_deploy.cli import main; main()", "push", "here", "--only", "ddtree", "--restart", "-y"]
    env = {**os.environ, "DDTREE_HOME": str(tmp_path / "home")}
    done = subprocess.run(argv, env=env, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stderr
    assert f"here: server {request_.port} serves from generation 1, ready in " in done.stderr
    assert done.stdout.startswith("here: generation 1 active (was 0)") and "until restarted" not in done.stderr
    new = only(host)
    assert (new.phase, new.generation, new.stale) == ("serving", 1, False) and new.pid != old.pid


def test_a_server_that_does_not_get_ready_takes_the_host_back(host: Host, venv: Path, request_: Request, tmp_path: Path) -> None:  # noqa: F811
    old = up(host, request_)
    store, snapshot = prepared(tmp_path, **{"ddtree__server/__main__": "raise SystemExit('no such model')\n"})
    _done, error = outcome(lambda: push_and_restart(host, pushing(host, store, snapshot), options=OPTIONS))
    assert isinstance(error, RevertedAfterFailure) and error.exit_code == 17, repr(error)
    assert "is back at generation 0 and serves" in error.message and any("no such model" in cause for cause in error.causes)
    rest(venv)
    server = only(host)
    assert live_generation(venv) == 0 and (server.phase, server.generation) == ("serving", 0) and server.pid != old.pid


def test_what_is_not_proved_does_not_stop_a_server(host: Host, venv: Path, request_: Request, tmp_path: Path) -> None:  # noqa: F811
    old = up(host, request_)
    store, snapshot = prepared(tmp_path, ddtree____init__="raise RuntimeError('no driver here')\n")
    _done, error = outcome(lambda: push_and_restart(host, pushing(host, store, snapshot, verify=True), options=OPTIONS))
    assert isinstance(error, ProofFailed), repr(error)
    assert (only(host).pid, only(host).phase) == (old.pid, "serving")
