"""Processes that a proof starts: where their source comes from, and how they end."""

import os
import signal

from ddtree_deploy.agent.failure import Failure


def source_of(module):
    """Return a module's source, to be run by `-c`, also when the agent itself was imported from memory."""
    text = module.__loader__.get_source(module.__name__)
    if text is None:
        raise Failure("internal", "the agent has no source of %s" % module.__name__)
    return text


def cpus():
    return len(os.sched_getaffinity(0))


def has_ended(process):
    """Tell whether a child ended, without reaping it: a zombie's process group can not become someone else's."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def kill_group(process):
    """Kill a child that was started with `start_new_session`, with all that it left in its group, and reap it."""
    if process.returncode is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        process.kill()
        process.wait()


def signal_name(number):
    try:
        return signal.Signals(number).name
    except ValueError:
        return "signal %d" % number
