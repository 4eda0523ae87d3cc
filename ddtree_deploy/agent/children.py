"""Processes that a proof starts: where their source comes from, and how they end."""

from __future__ import annotations

import os
import signal

from ddtree_deploy.agent.failure import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from types import ModuleType
    from typing import Any


def source_of(module: ModuleType) -> str:
    """Return a module's source, to be run by `-c`, also when the agent itself was imported from memory."""
    loader: Any = module.__loader__  # one of files or of zips: both are an InspectLoader
    text: str | None = loader.get_source(module.__name__)
    if text is None:
        raise Failure("internal", "the agent has no source of %s" % module.__name__)
    return text


def cpus() -> int:
    return len(os.sched_getaffinity(0))


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Tell whether a child ended, without reaping it: a zombie's process group can not become someone else's."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a child that was started with `start_new_session`, with all that it left in its group, and reap it."""
    if process.returncode is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        process.kill()
        process.wait()


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "signal %d" % number
