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
    """Stop a server. Answers `{name, was, seconds, killed, left, port_free, gpus, replaced_by}`; `was` is its phase before.

    `drain` (seconds, None: as launched) is how long answers in progress may take; 0 kills at once. What is ended is the launch
    that is there now, and only if it is `launch` when that is given; one that takes its place meanwhile is told, and stays.
    """
    found = layout.locate(header["venv"])
    name = place.only(found, str(header.get("name") or ""))
    where = place.directory(found, name)
    began = time.monotonic()
    # Who launches does it in a turn of its own: as long as this one is ours, the record and the supervisor are of one launch.
    with place.turn(found):
        described = place.describe(found, name)
        assert described is not None
        launch = place.read(where, "launch.json")
        ours = header.get("launch") in (None, launch["id"])
        drain = float(launch.get("drain", 30) if header.get("drain") is None else header["drain"])
        if ours and described["supervised"]:
            durable.write_json(os.path.join(where, "stop.json"), {"drain": drain})
            _signal(place.supervisors(where), signal.SIGTERM)
    if ours and described["supervised"]:
        _wait(session, where, launch["id"], drain + GRACE)
    with place.turn(found):
        now = place.read(where, "launch.json")
        ours = ours and now["id"] == launch["id"]
        killed, left = _end(where, launch, described["phase"]) if ours else ([], [])
    answer = {"name": name, "was": described["phase"], "killed": len(killed), "left": left}
    answer.update(port_free=True, gpus=[], replaced_by="")
    if ours:
        answer["gpus"] = gpus.back(launch.get("gpus") or [], SLACK, MEMORY_SECONDS)
        answer["port_free"] = ports.is_free(launch["wish"]["listen"], int(launch["wish"]["port"]))
    else:
        answer["replaced_by"] = "%s at %s" % (now.get("who") or "somebody", now.get("started"))
    answer["seconds"] = time.monotonic() - began
    if ours and described["phase"] not in ("stopped", "failed"):
        note(found, "stopped", launch.get("generation"), name, {"who": header.get("who", "")}, seconds=round(answer["seconds"], 1))
    return {"_big": answer}


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def _wait(session: Session, where: str, launch: str, seconds: float) -> None:
    """Wait until a launch has no supervisor any more, or another one has taken its place."""
    end = time.monotonic() + seconds
    tick = 0
    while place.supervised(where) and place.read(where, "launch.json").get("id") == launch and time.monotonic() < end:
        time.sleep(0.1)
        tick += 1
        session.progress("stop", tick, int(seconds * 10) + 1, "ticks")


def _end(where: str, launch: dict[str, Any], phase: str) -> tuple[list[int], list[int]]:
    """End what is left of a launch, in our turn; return the pids that were killed, and those that do not end."""
    # Its lock is ours meanwhile, so that a supervisor whose starter was killed a moment ago does not begin behind us.
    own = place.claim(where)
    if own is None:
        # The supervisor hangs (a dead disk): its unit, or it itself, is ended from outside.
        if launch.get("unit"):
            argv = ["systemctl", "kill", "--signal=SIGKILL", launch["unit"]]
            subprocess.run(argv, check=False, timeout=30, stdout=subprocess.DEVNULL)
        _signal(place.supervisors(where), signal.SIGKILL)
        own = place.claim(where)
    try:
        killed = _kill(where)
        if own is None:
            raise Failure("internal", "the supervisor of `%s` does not end" % launch["name"], "look at the host: %s" % where)
        state = place.read(where, "state.json")
        if phase not in ("stopped", "failed") and state.get("phase") != "stopped":
            durable.write_json(os.path.join(where, "state.json"), {**state, "launch": launch["id"], "phase": "stopped", "pid": None})
        place.clear(where)
        return killed, place.processes_of(where)
    finally:
        if own is not None:
            os.close(own)


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
