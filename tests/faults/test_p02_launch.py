"""P2 for servers: agent, supervisor and controller killed, and calls that fail, at steps of launch, restart and stop.

Afterwards the host answers, the same command finishes, and a stop leaves neither a process of any launch nor half a record.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from ddtree_deploy.agent.serving.place import supervisors
from ddtree_deploy.agent.serving.supervisor import members
from ddtree_deploy.demo.sshd import free_port
from ddtree_deploy.errors import DeployError, UsageProblem
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.launch import Options, lifecycle, restart, running, stop
from ddtree_deploy.launch.argv import Request
from tests.faults.harness import EVERYTHING, Killer, kill_points, ledger, outcome, report, thin
from tests.faults.test_p02_every_command import points
from tests.faults.test_p02_system_calls import strace_works
from tests.fixtures.until import until
from tests.fixtures.venvs import BASE_PYTHON, make_venv
from tests.fixtures.world import local
from tests.launch.conftest import end_launches, stand_in, told

pytestmark = [pytest.mark.faults, pytest.mark.timeout(3600 if EVERYTHING else 900)]

QUICK = Options(wait=120, completions=1, drain=20)
CALLS = ("fsync", "write", "rename", "renameat2", "link", "linkat", "unlink", "unlinkat")


@dataclass
class Place:
    """A venv that serves with the stand-in, and a launch that was looked at."""

    venv: Path
    prepared: lifecycle.Prepared

    @property
    def host(self) -> Host:
        return self.prepared.host

    @property
    def server(self) -> Path:
        return self.venv / f".ddtree/servers/{self.prepared.request.port}"

    def launch(self, python: str = str(BASE_PYTHON)) -> object:
        # Looked at once: the port and the venv are the same each time.
        return lifecycle.launch(replace(self.prepared, host=replace(self.host, python=python)), QUICK)

    def restart(self, python: str = str(BASE_PYTHON)) -> object:
        return restart(replace(self.host, python=python), options=QUICK)

    def stop(self, python: str = str(BASE_PYTHON)) -> object:
        return stop(replace(self.host, python=python))

    def cycle(self, python: str = str(BASE_PYTHON)) -> object:
        self.launch(python)
        return self.stop(python)

    def launches(self) -> set[str]:
        """Return the id of the launch that the record names, if there is one."""
        file = self.server / "launch.json"
        return {json.loads(file.read_text())["id"]} if file.exists() else set()

    def agents(self) -> list[int]:
        """Return the agents that still work for this venv: a killed controller's may be in the middle of something."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    argv = (entry / "cmdline").read_bytes()
                except OSError:
                    continue
                if b"memfd_create" in argv and os.fsencode(self.venv) in argv:
                    found.append(int(entry.name))
        return found

    def settled(self, killed: set[str]) -> None:
        """Assert that the host answers as it is, that launch and stop finish, and that nothing is left then."""
        until(lambda: not self.agents(), "the agents of the killed run end")
        killed = killed | self.launches()
        lifecycle.servers(self.host)
        _none, error = outcome(lambda: lifecycle.follow_log(self.host, "", lambda _text: None))
        assert error is None or (isinstance(error, UsageProblem) and self.launches() == set()), repr(error)
        if running(self.host):
            self.stop()
        self.launch()
        (server,) = running(self.host)
        assert server.phase == "serving" and server.processes == 3  # it, its daemon, and a child that shows no environment
        killed |= self.launches()
        ended = stop(self.host)
        assert ended.was == "serving" and ended.left == () and ended.port_free
        # Not by what the records say, but by what runs.
        assert [pid for launch in killed for pid in members(launch)] == [] and supervisors(os.fspath(self.server)) == []
        for record in self.server.parent.rglob("*.json"):
            assert isinstance(json.loads(record.read_text()), dict), record
        assert [str(path) for path in self.server.parent.rglob(".*")] == []
        assert [entry["event"] for entry in ledger(self.venv)][-3:] == ["launched", "serving", "stopped"]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    venv = make_venv(tmp_path / "venv", *stand_in())
    request = told(Request(engine="standalone", model="tiny", gpus=0, port=free_port()), child=1, bare=1)
    try:
        yield Place(venv, lifecycle.prepare(local(venv), request))
    finally:
        end_launches(venv)


#: What is done, the process that is killed at it, whether a server runs before, and how many points by default.
ACTS: dict[str, tuple[Callable[[Place, str], object], str, bool, int]] = {
    "launch, agent": (Place.launch, "agent0", False, 2),
    "restart, agent that starts": (Place.restart, "agent2", True, 1),
    "stop, agent": (Place.stop, "agent0", True, 1),
    "launch and stop, supervisor": (Place.cycle, "supervisor", False, 2),
}


@pytest.mark.parametrize("act", ACTS)
def test_a_server_survives_a_kill_at_any_step(place: Place, tmp_path: Path, act: str) -> None:
    run, role, runs_before, most = ACTS[act]

    def before() -> set[str]:
        if runs_before and not running(place.host):
            place.launch()
        return place.launches()

    before()
    trace = Killer(tmp_path / "trace", role, None, trace=True)
    run(place, trace.python)
    if running(place.host) and not runs_before:
        place.stop()
    steps = trace.steps()
    # A supervisor is no module of ours where it runs: its steps are told apart by their number alone.
    chosen = kill_points(steps, most) if role != "supervisor" else [{"at": step[0]} for step in thin(steps, most)]
    hits = 0
    for kill in chosen:
        known = before()
        killer = Killer(tmp_path / "killer", role, kill)
        _done, error = outcome(partial(run, place, killer.python))
        hits += killer.hit is not None
        assert killer.hit is None or error is None or type(error) is not DeployError or role == "supervisor", f"{killer.hit}: {error!r}"
        place.settled(known)
    report(f"P2 {act} killed", steps=len(steps), tried=len(chosen), hit=hits)
    assert hits


@pytest.mark.skipif(not strace_works(), reason="strace can not trace here")
def test_a_server_survives_a_fault_at_any_system_call(place: Place, tmp_path: Path) -> None:
    """Agent and supervisor, and the server itself: whoever makes the k-th call of a kind gets the fault."""
    python, log = attached(tmp_path / "trace", *(f"{call}:retval=0:when=65535" for call in CALLS))
    place.cycle(python)
    chosen = points(log.read_text(), 2)
    results: Counter[str] = Counter()
    for injection in chosen:
        python, log = attached(tmp_path / "strace", injection)
        _done, error = outcome(partial(place.cycle, python))
        hit = "INJECTED" in log.read_text() or "SIGKILL" in log.read_text()
        results[type(error).__name__ if error else "done" if hit else "not reached"] += 1
        place.settled(place.launches())
    report("P2 launch and stop, system calls", tried=len(chosen), **results)


@pytest.mark.skipif(not (EVERYTHING and strace_works()), reason="needs DDTREE_SWEEP=all, and strace: it waits for half a minute")
def test_a_supervisor_that_can_not_write_is_found_and_stopped(place: Place, tmp_path: Path) -> None:
    """Its disk is full from the beginning: the server runs, is shown, and ends when it is told to."""
    wrapper = tmp_path / "python"
    agent = "import sys; sys.executable = " + repr(str(wrapper))
    inject = f"-f -qqq -o {tmp_path / 'log'} -e trace=rename -e inject=rename:error=ENOSPC"
    wrapper.write_text(
        "#!/bin/sh\n"
        f'case $3 in */supervisor.py) exec strace {inject} {BASE_PYTHON} "$@" ;; esac\n'
        f'case $4 in *memfd_create*) code=$4; shift 4; exec {BASE_PYTHON} -I -S -c "{agent}\n$code" "$@" ;; esac\n'
        f'exec {BASE_PYTHON} "$@"\n'
    )
    wrapper.chmod(0o755)
    lifecycle.begin(replace(place.prepared, host=replace(place.host, python=str(wrapper))), QUICK)
    assert "ENOSPC" in (tmp_path / "log").read_text() and not (place.server / "state.json").exists()
    (server,) = running(place.host)
    assert server.phase == "starting" and server.processes == 3
    place.settled(place.launches())


def attached(directory: Path, *injections: str) -> tuple[str, Path]:
    """Return an interpreter whose agents strace attaches to, and its log.

    Attached, and with no descriptor of the agent's: it follows the server, and must not keep the connection open for it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    log, wrapper = directory / f"strace-{uuid.uuid4().hex[:8]}", directory / "python"
    log.touch()
    calls = ",".join(sorted({injection.partition(":")[0] for injection in injections}))
    words = ["strace", "-f", "-qqq", "-A", "-o", str(log), "-e", f"trace={calls}"]
    words += [word for injection in injections for word in ("-e", f"inject={injection}")]
    wrapper.write_text(
        "#!/bin/sh\n"
        f"case $4 in *memfd_create*) {shlex.join(words)} -p $$ </dev/null >/dev/null 2>&1 &\n"
        '    while grep -q "TracerPid:.0$" "/proc/$$/status"; do sleep 0.01; done ;;\n'
        "esac\n"
        f'exec {BASE_PYTHON} "$@"\n'
    )
    wrapper.chmod(0o755)
    return str(wrapper), log


@pytest.mark.parametrize("act", ["launch", "restart", "stop"] if EVERYTHING else ["restart"])
def test_a_server_survives_the_death_of_its_controller(place: Place, tmp_path: Path, act: str) -> None:
    """Killed at an event that it tells: whatever was asked for by then goes on or ends, and is found."""
    config = tmp_path / "controller.json"

    def controller(killer: Killer) -> subprocess.CompletedProcess[str]:
        request = place.prepared.request
        wish = {"port": request.port, "env": dict(request.env)}
        config.write_text(
            json.dumps({"act": act, "serve": wish, "venv": str(place.venv), "home": str(tmp_path / "home"), "snapshot": "",
                        "python": str(BASE_PYTHON), "killer": str(killer.config)})
        )  # fmt: skip
        return subprocess.run([sys.executable, "-m", "tests.faults.controller", str(config)], capture_output=True, text=True, check=False)

    def before() -> None:
        if act != "launch" and not running(place.host):
            place.launch()

    before()
    trace = Killer(tmp_path / "trace", "controller", None, trace=True)
    done = controller(trace)
    assert done.returncode == 0, done.stderr
    if running(place.host) and act == "launch":
        place.stop()
    steps = [step for step in trace.steps() if step[1] == "tests.emit"]
    chosen = [{"at": step[0]} for step in thin(steps, 1)]
    hits = 0
    for kill in chosen:
        before()
        killer = Killer(tmp_path / "killer", "controller", kill)
        controller(killer)
        hits += killer.hit is not None
        place.settled(place.launches())
    report(f"P2 {act}, controller killed", steps=len(steps), tried=len(chosen), hit=hits)

