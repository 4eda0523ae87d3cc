"""What each environment is, and which of the named modules it can import: every import in a process of its own, with a time limit."""

from __future__ import annotations

import glob
import json
import os
import subprocess
import threading
import time

from ddtree_deploy.agent import facts
from ddtree_deploy.agent.children import cpus, kill_group, signal_name
from ddtree_deploy.agent.failure import Failure
from ddtree_deploy.agent.search import find

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ddtree_deploy.agent.main import Session

# No `-I`: what a login's environment adds counts for a service too; what is in the working directory does not.
_IMPORT = """
import importlib, json, os, sys
sys.path[:] = [path for path in sys.path if path]
answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
name = sys.argv[1]
try:
    module = importlib.import_module(name)
except ModuleNotFoundError as error:
    missing = error.name == name or name.startswith(str(error.name) + ".")
    say = {"state": "missing" if missing else "error", "error": "" if missing else "%s: %s" % (type(error).__name__, error)}
except BaseException as error:
    say = {"state": "error", "error": ("%s: %s" % (type(error).__name__, error)).splitlines()[0]}
else:
    version = getattr(module, "__version__", "")
    say = {"state": "ok", "version": version if isinstance(version, str) else ""}
answer.write(json.dumps(say))
answer.close()
os._exit(0)
"""


def _try(session: Session, python: str, module: str, seconds: float) -> dict[str, str]:
    """Import one module; `state` is `ok`, `missing`, `error`, `signal` or `time-out`."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    try:
        child = subprocess.Popen(
            [python, "-c", _IMPORT, module], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            cwd="/", env=env, start_new_session=True,
        )
    except OSError as error:
        return {"state": "error", "error": str(error)}
    deadline = time.monotonic() + seconds
    try:
        while True:
            try:
                said, _ = child.communicate(timeout=0.5)
                break
            except subprocess.TimeoutExpired:
                if session.aborted() or time.monotonic() > deadline:
                    return {"state": "time-out", "error": "no end after %.0f s" % seconds}
    finally:
        kill_group(child)
    if child.returncode < 0:
        return {"state": "signal", "error": "died of %s" % signal_name(-child.returncode)}
    try:
        answer = json.loads(said)
        return {key: str(answer[key])[:400] for key in ("state", "version", "error") if key in answer}
    except (ValueError, TypeError):
        return {"state": "error", "error": "exit status %d" % child.returncode}


def _look(path: str, kind: str, configured: bool) -> dict[str, Any]:
    python = path if kind == "interpreter" else os.path.join(path, "bin", "python")
    row: dict[str, Any] = {"path": path, "kind": kind, "python": python, "version": "", "executable": "", "error": ""}
    row.update(configured=configured, distributions=0, imports={})
    try:
        known = facts.python_facts(python)
        row.update(version=known["version"], executable=known["executable"])
    except Failure as error:
        row["error"] = error.message
    if kind != "interpreter":
        site = os.path.join(glob.escape(path), "lib", "python3*", "site-packages", "*.dist-info")
        row["distributions"] = len(glob.glob(site))
    return row


def venvs(session: Session, header: dict[str, Any], _value: object) -> dict[str, Any]:
    """Return the environments and interpreters of this host, and what importing each of `needs` comes to in each."""
    needs: list[str] = header["needs"]
    own = [os.path.expanduser(path) for path in header["own"] if path]
    pythons = [os.path.expanduser(path) for path in header["pythons"] if path]
    found = find.search(own, [*header["roots"], *find.ROOTS], find.remote_mounts())
    places = [*found.environments, *((path, "interpreter") for path in find.interpreters(pythons))]
    rows: list[dict[str, Any]] = [{} for _place in places]
    left = list(enumerate(places))
    lock = threading.Lock()
    done = [0]
    executables: set[str] = set()

    def taken(executable: str) -> bool:
        with lock:
            before = len(executables)
            executables.add(executable)
            return len(executables) == before

    def work() -> None:
        while not session.aborted():
            with lock:
                if not left:
                    return
                number, (path, kind) = left.pop(0)
            row = _look(path, kind, path in own)
            if kind == "interpreter" and (not row["version"] or taken(row["executable"])):
                continue  # a shim, or one that was seen under another name
            if row["version"]:
                row["imports"] = {module: _try(session, row["python"], module, header["seconds"]) for module in needs}
            rows[number] = row
            with lock:
                done[0] += 1
                session.progress("look", done[0], len(places), "environments", path)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(max(1, min(4, cpus())))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return {"_big": {"environments": [row for row in rows if row], "skipped": found.skipped, "cut": found.cut}}
