"""Stop a server: drain, then end every process of its launch, then see that its port and its GPU memory are back."""

from __future__ import annotations

import os
import signal
import subprocess
import time

from ddtree_deploy.agent import durable, layout
from ddtree_deploy.agent.failure import Failure
from ddtree_deploy.agent.serving import gpus, place, ports
from ddtree_deploy.agent.serving.start import note

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ddtree_deploy.agent.main import Session

GRACE = 30.0
MEMORY_SECONDS = 20.0
#: What a driver may keep for itself beyond what was free before the launch.
SLACK = 512 << 20


def stop(session: Session, header: dict[str, Any], _value: object) -> dict[str, Any]:
    """Stop a server. Answers `{name, was, seconds, killed, left, port_free, gpus}`; `was` is its phase before.

    `drain` (seconds, None: as launched) is how long answers in progress may take; 0 kills at once.
    """
    found = layout.locate(header["venv"])
    name = place.only(found, str(header.get("name") or ""))
    where = place.directory(found, name)
    described = place.describe(found, name)
    assert described is not None
    launch = place.read(where, "launch.json")
    drain = float(launch.get("drain", 30) if header.get("drain") is None else header["drain"])
    began = time.monotonic()
    # Without a supervisor its lock is ours, so that one whose starter was killed a moment ago does not begin behind us.
    own = None if described["supervised"] else place.claim(where)
    if own is None:
        with place.turn(found):
            durable.write_json(os.path.join(where, "stop.json"), {"drain": drain})
        _ask(where)
        _wait(session, where, drain + GRACE)
        own = place.claim(where)
    try:
        killed = _kill(where)
        if own is None:
            raise Failure("internal", "the supervisor of `%s` does not end" % name, "look at the host: %s" % where)
        with place.turn(found):
            state = place.read(where, "state.json")
            if described["phase"] not in ("stopped", "failed") and state.get("phase") != "stopped":
                durable.write_json(os.path.join(where, "state.json"), {**state, "launch": launch["id"], "phase": "stopped", "pid": None})
            place.clear(where)
    finally:
        if own is not None:
            os.close(own)
    wish = launch["wish"]
    back = gpus.back(launch.get("gpus") or [], SLACK, MEMORY_SECONDS)
    answer = {
        "name": name,
        "was": described["phase"],
        "seconds": time.monotonic() - began,
        "killed": len(killed),
        "left": place.processes_of(where),
        "port_free": ports.is_free(wish["listen"], int(wish["port"])),
        "gpus": back,
    }
    if described["phase"] not in ("stopped", "failed"):
        note(found, "stopped", launch.get("generation"), name, {"who": header.get("who", "")}, seconds=round(answer["seconds"], 1))
    return {"_big": answer}


def _ask(where: str) -> None:
    """Send SIGTERM to the supervisor."""
    _signal(place.supervisors(where), signal.SIGTERM)


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def _wait(session: Session, where: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    tick = 0
    while place.supervised(where) and time.monotonic() < end:
        time.sleep(0.1)
        tick += 1
        session.progress("stop", tick, int(seconds * 10) + 1, "ticks")
    if place.supervised(where):
        # The supervisor hangs (a dead disk): its unit, or it itself, is ended from outside.
        unit = place.read(where, "launch.json").get("unit")
        if unit:
            subprocess.run(["systemctl", "kill", "--signal=SIGKILL", unit], check=False, timeout=30, stdout=subprocess.DEVNULL)
        _signal(place.supervisors(where), signal.SIGKILL)
        time.sleep(0.5)


def _kill(where: str) -> list[int]:
    """Kill what is left of a launch whose supervisor is gone; return the pids.

    None must be seen twice: a process in the middle of an exec shows no environment.
    """
    killed: set[int] = set()
    end, seen = time.monotonic() + GRACE, True
    while time.monotonic() < end:
        left = place.processes_of(where)
        if not left and not seen:
            break
        seen = bool(left)
        killed.update(left)
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        time.sleep(0.1)
    return sorted(killed)
