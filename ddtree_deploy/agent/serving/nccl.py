"""Do the GPUs reach each other? One small all-reduce over all of them, with a deadline, in processes of their own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time

from ddtree_deploy.agent import children, layout
from ddtree_deploy.agent.serving import nccl_child

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ddtree_deploy.agent.main import Session


def check(session: Session, header: dict[str, Any], _value: object) -> dict[str, Any]:
    """Run the all-reduce; answer `{ok, seconds, ranks, without_p2p, lines}`.

    When it hangs, it is tried once more with NCCL_P2P_DISABLE=1, and that is told, not set: the user decides. `backend` is
    `nccl`, or `gloo` where the same path is tried without GPUs; `env` is the server's.
    """
    found = layout.locate(header["venv"])
    live = found.live()
    tree = os.path.realpath(found.site if live is None else found.tree(live))
    ranks, seconds = int(header["ranks"]), float(header.get("seconds", 60))
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env.update(header.get("env") or {}, PYTHONPATH=tree)
    python = os.path.join(found.venv, "bin", "python")
    backend = str(header.get("backend", "nccl"))
    first = _run(session, python, env, ranks, seconds, backend)
    if first["ok"] or backend != "nccl" or "NCCL_P2P_DISABLE" in env:
        return {"_big": {**first, "without_p2p": None}}
    second = _run(session, python, {**env, "NCCL_P2P_DISABLE": "1"}, ranks, seconds, backend)
    return {"_big": {**first, "without_p2p": second["ok"]}}


def _run(session: Session, python: str, env: dict[str, str], ranks: int, seconds: float, backend: str) -> dict[str, Any]:
    scratch = tempfile.mkdtemp(prefix="ddtree-nccl-")
    began = time.monotonic()
    processes = []
    try:
        source = children.source_of(nccl_child)
        for rank in range(ranks):
            log = open(os.path.join(scratch, "log.%d" % rank), "wb")  # noqa: SIM115
            argv = [python, "-c", source, str(rank), str(ranks), backend, os.path.join(scratch, "store")]
            processes.append(
                subprocess.Popen(argv, env=env, cwd=scratch, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
            )
            log.close()
        while time.monotonic() - began < seconds and not session.aborted():
            session.progress("all-reduce", int((time.monotonic() - began) * 10), int(seconds * 10), "ticks")
            if all(process.poll() is not None for process in processes):
                break
            if any(process.poll() for process in processes):
                time.sleep(1.0)  # the others may still say why
                break
            time.sleep(0.1)
        codes = [process.poll() for process in processes]
        lines = [line for rank in range(ranks) for line in _said(scratch, rank)]
        ok = all(code == 0 for code in codes)
        return {"ok": ok, "seconds": time.monotonic() - began, "ranks": json.loads(json.dumps(codes)), "lines": [] if ok else lines[-12:]}
    finally:
        for process in processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except OSError:
                pass
            process.wait()
        shutil.rmtree(scratch, ignore_errors=True)


def _said(scratch: str, rank: int) -> list[str]:
    try:
        with open(os.path.join(scratch, "log.%d" % rank), encoding="utf-8", errors="replace") as file:
            return ["rank %d: %s" % (rank, line.rstrip()) for line in file.read().splitlines()[-4:] if line.strip()]
    except OSError:
        return []
