"""Who uses a venv: one line for each server or tree of processes, and all of them with `-v`."""

from __future__ import annotations

from ddtree_deploy.models import Use
from ddtree_deploy.render.uses import pids, running, use_lines

MAIN = "/opt/venv/bin/python -m sglang.launch_server --model-path /models/m --tp-size 2 --port 30000"
SERVER = [Use(4711, MAIN, "maps", 7, 4711)] + [
    Use(pid, "sglang::scheduler_TP0", how, 7, 4711) for pid in range(4712, 4724) for how in ("maps", "path")
]


def test_a_server_is_one_line() -> None:
    assert use_lines(SERVER) == ["in use by SGLang server on port 30000: 13 processes, pid 4711 and 12 children, generation 7"]
    assert pids(SERVER) == "pid 4711 and 12 children"


def test_what_holds_a_server_does_not_name_it() -> None:
    held = [Use(9, "python supervisor.py", "path", 7, 9), *(Use(use.pid, use.command, use.how, 7, 9) for use in SERVER)]
    assert use_lines(held) == ["in use by SGLang server on port 30000: 14 processes, pid 4711 and 13 children, generation 7"]


def test_each_process_has_a_line_with_v() -> None:
    lines = use_lines(SERVER, verbose=1)
    assert len(lines) == 13
    assert lines[0] == f"in use by pid 4711 (loaded, generation 7): {MAIN}"
    assert lines[1] == "in use by pid 4712 (loaded, PYTHONPATH, generation 7): sglang::scheduler_TP0"


def test_other_processes_keep_their_command_line() -> None:
    assert use_lines([Use(5, "vi x.py", "cwd", None, 5)]) == ["in use by pid 5 (working directory): vi x.py"]
    many = [Use(pid, "sleep 9", "exe", None, pid) for pid in range(7)]
    assert use_lines(many)[5:] == ["… and 2 more (-v)"] and len(use_lines(many, verbose=1)) == 7


def test_one_process_runs_and_two_run() -> None:
    assert running("ct200", SERVER[:1]) == "1 process on `ct200` runs from this venv"
    assert running("ct200", SERVER) == "13 processes on `ct200` run from this venv"
