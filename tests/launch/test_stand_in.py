"""The life of a server on a host, with a stand-in for the engine: it starts, hangs, dies, is stopped, and what is said of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddtree_deploy.agent.serving.supervisor import members
from ddtree_deploy.bench import measure, plan
from ddtree_deploy.errors import DeployError, Incompatible, ServerNotReady, TargetBusy
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.launch import Options, Ready, Server, lifecycle, restart, running, signatures, start, stop
from ddtree_deploy.launch.argv import Request
from ddtree_deploy.launch.lifecycle import begin, open_session, parse, prepare, prove, servers
from ddtree_deploy.launch.readiness import Watch, wait
from tests.cli.conftest import run
from tests.fixtures.until import until
from tests.fixtures.venvs import make_venv
from tests.launch.conftest import stand_in, told

# Processes that live and die: a minute in all on an idle machine, several on a busy one.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

QUICK = Options(wait=120, completions=3, drain=20)


def up(host: Host, request: Request, options: Options = QUICK) -> Ready:
    return lifecycle.launch(prepare(host, request), options)


def state(venv: Path, request: Request) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((venv / f".ddtree/servers/{request.port}/state.json").read_text())
    return found


def info(ready: Ready) -> dict[str, Any]:
    with urllib.request.urlopen(ready.server.url + "/server_info", timeout=30) as answer:
        value: dict[str, Any] = json.load(answer)
    return value


def one(host: Host) -> Server:
    (server,) = servers(host)
    return server


def log_of(host: Host, **wanted: Any) -> str:
    text: list[str] = []
    lifecycle.follow_log(host, "", text.append, **wanted)
    return "".join(text)


def test_start_restart_stop(host: Host, venv: Path, request_: Request) -> None:
    ready = up(host, request_)
    assert (ready.algorithm, ready.completions, ready.server.phase) == ("ddtree", 3, "serving")
    (server,) = running(host)
    assert server.proved and server.proved["ok"] and server.processes == 1 and not server.stale
    seen = info(ready)
    live = venv.resolve() / "lib"
    assert seen["path"][1].startswith(str(live)) and seen["file"].startswith(str(live))
    caches = {name: value for name, value in seen["env"].items() if "CACHE" in name or name == "FLASHINFER_WORKSPACE_BASE"}
    assert len(caches) == 5 and all(value.startswith(f"{venv}/.ddtree/jit/") for value in caches.values())
    assert "serving `stand-in`" in log_of(host)
    with pytest.raises(TargetBusy, match="is there already: serving"):
        start(host, server.record)
    again = restart(host, options=QUICK)
    assert again.server.pid != server.pid and one(host).phase == "serving"
    # A restart needs nothing from this machine but the record's name; its log begins anew, the old one is kept.
    assert log_of(host).count("started pid") == 1
    assert "started pid" in (venv / f".ddtree/servers/{request_.port}/server.log.1").read_text()
    ended = stop(host)
    assert (ended.was, ended.killed, ended.left, ended.port_free) == ("serving", 0, (), True)
    assert running(host) == () and one(host).phase == "stopped"
    assert stop(host).was == "stopped"
    ledger = [json.loads(line)["event"] for line in (venv / ".ddtree/ledger.jsonl").read_text().splitlines()]
    assert ledger == ["launched", "serving", "stopped", "launched", "serving", "stopped"]


def test_healthy_but_hangs_on_the_nth_request(host: Host, request_: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddtree_deploy.launch.readiness.COMPLETION_SECONDS", 3.0)
    with pytest.raises(ServerNotReady, match="healthy, but completion 5 hangs: "):
        up(host, told(request_, hang=5), replace(QUICK, completions=8))
    # What did not become ready does not stay.
    assert running(host) == () and one(host).proved == {**(one(host).proved or {}), "ok": False}


def test_healthy_but_does_not_generate(host: Host, request_: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddtree_deploy.launch.readiness.FIRST_SECONDS", 3.0)
    with pytest.raises(ServerNotReady, match="healthy but does not generate"):
        up(host, told(request_, sick=1))


def test_another_algorithm_than_the_one_that_was_asked_for(host: Host, request_: Request) -> None:
    with pytest.raises(ServerNotReady, match="the server runs `dflash`, not `ddtree`"):
        up(host, told(request_, mode="dflash"))


def test_not_ready_in_time_and_kept(host: Host, request_: Request) -> None:
    with pytest.raises(ServerNotReady, match="not ready in time") as caught:
        up(host, told(request_, deaf=1), replace(QUICK, wait=8, keep=True))
    assert "--wait" in caught.value.mend
    assert one(host).phase == "starting"
    assert stop(host, drain=0).was == "starting"


def test_a_death_in_the_middle_of_the_proof(host: Host, request_: Request) -> None:
    with pytest.raises(ServerNotReady, match=r"ended (at a request|before)") as caught:
        up(host, told(request_, die=2), replace(QUICK, restart="no"))
    assert any("the stand-in dies at completion 2" in line for line in caught.value.causes)


def test_every_signature_is_named_when_a_server_dies_with_it(host: Host, request_: Request) -> None:
    """A stand-in writes the line among others, and ends: the error names the cause and what to do."""
    with open_session(host, writable=True) as session:
        for signature in signatures.signatures():
            env = {"STAND_IN_SAY": f"Traceback (most recent call last):\n{signature.example}\nbye", "STAND_IN_EXIT": "1"}
            wish = {"tail": ["-m", "ddtree.server"], "listen": "127.0.0.1", "port": request_.port, "env": env}
            value = session.ask("serve-start", wish, venv=host.venv, name="sign", who="test").value
            watch = Watch(session, parse(host.name, value), parse, time.monotonic() + 120, lambda _event: None)
            with pytest.raises(ServerNotReady, match="ended before it was ready: exit status 1") as caught:
                wait(watch, "", 1)
            expected = signatures.find([signature.example], host.name)
            assert expected is not None and expected.id == signature.id
            assert caught.value.causes[0] == expected.text and caught.value.mend == expected.mend
            assert signature.example in caught.value.causes and "bye" in caught.value.causes


def test_kill_9_of_the_server_is_noticed_and_it_comes_back(host: Host, venv: Path, request_: Request) -> None:
    pid = up(host, request_).server.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(lambda: state(venv, request_).get("restarts") == 1 and state(venv, request_)["phase"] == "serving", "it serves again")
    server = one(host)
    assert server.restarts == 1 and server.last and server.last["how"] == "SIGKILL" and server.pid != pid
    assert "the server ended: SIGKILL" in log_of(host)


def test_without_a_restart_policy_it_stays_down(host: Host, venv: Path, request_: Request) -> None:
    ready = up(host, request_, replace(QUICK, restart="no"))
    os.kill(ready.server.pid or 0, signal.SIGKILL)
    until(lambda: one(host).phase == "failed", "its death is noticed")
    assert one(host).last and not running(host)


def test_a_supervisor_that_dies_leaves_a_server_that_is_seen_and_stopped(host: Host, venv: Path, request_: Request) -> None:
    ready = up(host, told(request_, bare=1))
    os.kill(state(venv, request_)["supervisor"], signal.SIGKILL)
    until(lambda: one(host).phase == "orphaned", "the supervisor is gone")
    assert info(ready)["mode"] == "ddtree"  # it goes on serving
    with pytest.raises(TargetBusy):
        begin(prepare(host, request_), QUICK)
    ended = stop(host)
    assert (ended.was, ended.killed, ended.left, ended.port_free) == ("orphaned", 2, (), True)
    assert one(host).phase == "stopped"


def test_a_stop_takes_daemons_along_and_does_not_wait_for_ever(host: Host, request_: Request) -> None:
    up(host, told(request_, child=1, bare=1, stubborn=1))
    server = one(host)
    assert server.processes == 3 and len(members(server.launch)) == 2
    ended = stop(host, drain=1)
    assert ended.left == () and ended.port_free and members(server.launch, server.pid, sys.executable) == []
    assert "not drained in time: killed" in log_of(host)


def test_a_launch_that_fails_after_a_push_goes_back(host: Host, venv: Path, request_: Request, tmp_path: Path) -> None:
    """Exit 17: the old generation is live and serves; the cause of the failure is told all the same."""
    where = ["local", "--venv", str(venv)]
    bad = make_venv(tmp_path / "bad", *stand_in("bad"))
    snapshot = run("snapshot", "-q", "local", "--venv", str(bad), "--no-probe").out.strip()
    pushed = run("push", *where, "--snapshot", snapshot, "--only", "ddtree", "-y", "--no-verify")
    assert pushed.code == 0, pushed.err
    words = ["--engine", "standalone", "--model", "tiny", "--gpus", "0", "--port", str(request_.port), "--completions", "2"]
    # Without a host it is the only one that has a generation.
    hosts = {"fresh": bad, "pushed": venv}
    (tmp_path / "ddtree.toml").write_text("".join(f'[hosts.{n}]\ntransport = "local"\nvenv = "{v}"\n' for n, v in hosts.items()))
    alone = run("launch", *words, "-n", "--", "--threads", "1", cwd=tmp_path)
    assert alone.code == 0 and alone.out.startswith(f"{venv}/bin/python -m ddtree.server --tiny"), alone.err
    assert alone.out.endswith("--threads 1\n")
    failed = run("launch", *where, *words)
    assert failed.code == 19 and "a CUDA library is missing: libcudart.so.13" in failed.err and "names the set" in failed.err
    went_back = run("launch", *where, *words, "--rollback-on-failure")
    assert went_back.code == 17, went_back.err
    assert "generation 0 is live again and serves http://127.0.0.1" in went_back.err and "libcudart" in went_back.err
    (server,) = running(host)
    assert server.phase == "serving" and server.generation == 0 and not server.stale


def test_as_the_server_that_ran_when_a_snapshot_was_taken(host: Host, venv: Path, request_: Request, tmp_path: Path) -> None:
    up(host, replace(told(request_), env={"NCCL_DEBUG": "WARN"}, extra=("--api-key", "s3cret-key")))
    snapshot = run("snapshot", "-q", "local", "--venv", str(venv), "--no-probe").out.strip()
    stop(host)
    other = make_venv(tmp_path / "other", *stand_in())
    shown = run("launch", "local", "--venv", str(other), "--like", snapshot, "-n")
    assert shown.code == 0, shown.err
    expected = f"{other}/bin/python -m ddtree.server --tiny --mode ddtree --device cpu --host 127.0.0.1 --port {request_.port}"
    assert "NCCL_DEBUG=WARN" in shown.out and shown.out.strip().endswith(expected)
    assert "secrets are never recorded: give --api-key after `--`" in shown.err and "s3cret" not in shown.out + shown.err


def test_two_launches_at_once(host: Host, request_: Request) -> None:
    """One wins, the other is told that the server is there."""
    outcomes: list[object] = []

    def go() -> None:
        try:
            outcomes.append(up(host, request_))
        except DeployError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=go) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Ready", "TargetBusy"], outcomes
    assert len(running(host)) == 1


def test_a_port_that_is_taken_is_said_with_its_holder(host: Host, request_: Request) -> None:
    with socket.create_server(("127.0.0.1", request_.port)):
        prepared = prepare(host, request_)
        with pytest.raises(TargetBusy, match=f"port {request_.port} is taken") as caught:
            begin(prepared, QUICK)
        assert any(f"pid {os.getpid()}" in line for line in caught.value.causes)
        # Also when it was taken after the look: the host looks again.
        with pytest.raises(TargetBusy, match=f"port {request_.port} is taken by pid {os.getpid()}"):
            begin(replace(prepared, checks=()), QUICK)
    assert servers(host) == ()


def test_the_controller_is_killed_in_the_middle(host: Host, venv: Path, request_: Request) -> None:
    """The server does not notice; another controller finds it, and its launch is proved by whoever asks."""
    code = (
        "import sys; from ddtree_deploy.cli import main; sys.argv = ['ddtree-deploy', 'launch', 'local', '--venv', sys.argv[1],"
        " '--engine', 'standalone', '--model', 'tiny', '--gpus', '0', '--port', sys.argv[2], '--env', 'STAND_IN_DEAF=1']; main()"
    )
    controller = subprocess.Popen([sys.executable, "-c", code, str(venv), str(request_.port)], stderr=subprocess.DEVNULL)
    file = venv / f".ddtree/servers/{request_.port}/state.json"
    until(lambda: file.exists() and state(venv, request_).get("pid"), "the server was started")
    controller.kill()
    controller.wait(30)
    server = one(host)
    assert server.phase == "starting" and server.runs and server.proved is None
    with pytest.raises(TargetBusy):
        begin(prepare(host, request_), QUICK)
    assert stop(host).was == "starting"


def test_the_log_is_rotated_and_read_from_a_time_on(host: Host, venv: Path, request_: Request) -> None:
    wish_bytes = 200_000
    prepared = prepare(host, told(request_, noise=400_000))
    with open_session(host, writable=True) as session:
        wish = {"engine": "standalone", "tail": list(prepared.command.tail), "env": dict(prepared.command.env), "listen": "127.0.0.1",
                "port": request_.port, "log_bytes": wish_bytes}  # fmt: skip
        session.ask("serve-start", wish, venv=host.venv, name=str(request_.port), who="test")
    directory = venv / f".ddtree/servers/{request_.port}"
    until(lambda: (directory / "server.log.1").exists(), "the log is rotated")
    until(lambda: state(venv, request_)["phase"] == "serving", "it serves")
    assert (directory / "server.log").stat().st_size < wish_bytes
    assert "started pid" in log_of(host, since=0.0) and "started pid" not in log_of(host, lines=2)
    assert log_of(host, lines=1).count("\n") <= 1


def test_secrets_stay_on_the_host(host: Host, venv: Path, request_: Request) -> None:
    key = "abcdefghijklmnop-secret"
    said = f"server_args=ServerArgs(model_path='/m', api_key='{key}', port=1)"
    ready = up(host, replace(told(request_, key=key, say=said), extra=("--api-key", key)))
    assert ready.algorithm == "ddtree"  # its key went along with the completions
    assert key not in repr(servers(host))
    assert "api_key='***'" in log_of(host) and key not in log_of(host)
    file = venv / f".ddtree/servers/{request_.port}/launch.json"
    assert key in file.read_text() and file.stat().st_mode & 0o077 == 0


def test_what_the_host_can_not_do_is_said_before_anything_starts(host: Host, venv: Path, request_: Request) -> None:
    prepared = prepare(host, replace(request_, engine="sglang", gpus=2, model="/nowhere", drafter="/nowhere"))
    said = {check.id: check for check in prepared.checks if check.level == "block"}
    assert set(said) >= {"gpus", "model", "drafter"} and all(check.mend for check in said.values())
    with pytest.raises(Incompatible, match="cannot launch on `here`"):
        begin(prepared, QUICK)
    assert not (venv / ".ddtree/servers").exists()


def test_sglang_by_its_module_with_gpus_that_nvidia_smi_shows(
    host: Host, venv: Path, request_: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's own path: flags read from the tree, GPUs from a stand-in nvidia-smi, memory looked at after the stop."""
    free = tmp_path / "free"
    free.write_text("79000")
    smi = tmp_path / "bin/nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(f'#!/bin/sh\nfor i in 0 1; do echo "$i, NVIDIA H200, 9.0, 80000, $(cat {free})"; done\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    for name in ("target", "drafter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"hidden_size": 64, "vocab_size": 100, "num_hidden_layers": 8}))
    wanted = replace(request_, engine="sglang", gpus=2, model=str(tmp_path / "target"), drafter=str(tmp_path / "drafter"), budget="31")
    prepared = prepare(host, wanted)
    assert prepared.blocks == () and "--tp-size" in prepared.argv and prepared.argv[-2:] == ("--speculative-ddtree-budget", "31")
    ready = prove(host, begin(prepared, QUICK), QUICK)
    assert ready.server.record.argv[1:3] == ("-m", "sglang.launch_server")
    assert (ready.algorithm, ready.detail["budget"]) == ("ddtree", "31")
    # What runs is measured by SGLang's own route, which counts verify passes.
    (sample,) = measure.run(host, [measure.running(host)], [plan.Step("measure", 0, 2)], plan.Load(("p",), 2), QUICK)
    assert [(answer.text, answer.tokens, answer.rounds) for answer in sample.good] == [("x y z", 5, 2)] * 2 and sample.variant == "ddtree"
    unknown = prepare(host, replace(wanted, port=request_.port + 1, extra=("--no-such-flag",)))
    assert any(check.id == "flags" and "--no-such-flag" in check.evidence[0] for check in unknown.blocks)
    free.write_text("10000")
    monkeypatch.setattr("ddtree_deploy.agent.serving.stop.MEMORY_SECONDS", 1.0)
    taken = prepare(host, replace(wanted, port=request_.port + 1))
    assert any(check.id == "memory" and check.level == "warn" for check in taken.checks)
    free.write_text("79000")
    ended = stop(host)
    assert ended.memory_back and [row["index"] for row in ended.gpus] == [0, 1]
