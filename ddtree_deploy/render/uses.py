"""Who uses a venv, as the user reads it: a line for each server or other tree of processes; with `-v` a line for each process."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from ddtree_deploy.agent.procs import is_server
from ddtree_deploy.render.words import some

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddtree_deploy.models import Use

HOW = {"maps": "loaded", "exe": "executable", "fd": "open file", "cwd": "working directory", "path": "PYTHONPATH"}


def processes(count: int) -> str:
    """Say how many processes."""
    return f"{count} {'process' if count == 1 else 'processes'}"


def running(host: str, uses: Iterable[Use]) -> str:
    """Say how many processes run from a venv."""
    count = len({use.pid for use in uses})
    return f"{processes(count)} on `{host}` {'runs' if count == 1 else 'run'} from this venv"


def pids(uses: Iterable[Use]) -> str:
    """Name processes shortly: `pid 4711 and 12 children, pid 4800`."""
    trees: dict[int, set[int]] = {}
    for use in uses:
        trees.setdefault(use.root, set()).add(use.pid)
    return ", ".join(_tree(root, members) for root, members in sorted(trees.items()))


def use_lines(uses: Iterable[Use], verbose: int = 0) -> list[str]:
    """Lay out the processes that use a venv."""
    groups: dict[int, list[Use]] = {}
    for use in uses:
        groups.setdefault(use.pid if verbose else use.root, []).append(use)
    shown, more = some((_line(key, group) for key, group in sorted(groups.items())), len(groups) if verbose else 5)
    return shown + ([f"… and {more} more (-v)"] if more else [])


def _line(pid: int, uses: list[Use]) -> str:
    # What holds the server (a supervisor, a shell) is no name for the tree.
    first = next((use for use in uses if _server(use.command)), None) or next((use for use in uses if use.pid == pid), uses[0])
    members = {use.pid for use in uses}
    numbers = sorted({use.generation for use in uses if use.generation is not None})
    of = f"generation {' and '.join(map(str, numbers))}" if numbers else ""
    server = _server(first.command)
    if server and len(members) > 1:
        return f"in use by {server}: {processes(len(members))}, {_tree(first.pid, members)}" + (f", {of}" if of else "")
    how = ", ".join([*dict.fromkeys(HOW.get(use.how, use.how) for use in uses), *([of] if of else [])])
    return f"in use by {_tree(pid, members)} ({how}): {first.command}"


def _tree(root: int, members: set[int]) -> str:
    children = len(members - {root})
    return f"pid {root}" + (f" and {children} {'child' if children == 1 else 'children'}" if children else "")


def _server(command: str) -> str:
    """Name the server that a command line starts, or return an empty string."""
    argv = command.split()
    if not is_server(argv):
        return ""
    name = "DDTree server" if "ddtree.server" in argv else "SGLang server"
    port = next((after for flag, after in pairwise(argv) if flag == "--port"), "")
    return f"{name} on port {port}" if port else name
