"""What the fault tests share: kill a process at a chosen step, wait for a host to come to rest, look for litter, count."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ddtree_deploy.agent import layout
from ddtree_deploy.errors import DeployError
from tests.fixtures.venvs import BASE_PYTHON, SITE, contents

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="needs root for mounts and namespaces")
EVERYTHING = os.environ.get("DDTREE_SWEEP") == "all"
LANES = 2
#: `{sweep: {what: how many}}`, printed at the end of the run by conftest.py.
COUNTS: dict[str, dict[str, Any]] = {}


def report(sweep: str, **counts: Any) -> None:
    """Record what a sweep did; the end of the run prints it."""
    COUNTS[sweep] = counts


class Killer:
    """An interpreter for `Host.python` that kills the agent (`agent0`, `agent1`: in order of start), the `guardian`, or a
    server's `supervisor` at a step."""

    def __init__(self, directory: Path, role: str, kill: dict[str, Any] | None, *, trace: bool = False, reads: bool = False) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.hit_file = directory / "hit"
        self.trace_file = directory / "trace"
        for stale in (self.hit_file, self.trace_file, directory / "starts"):
            stale.unlink(missing_ok=True)
        wrapper, config = directory / "python", directory / "config.json"
        self.config = config
        config.write_text(
            json.dumps(
                {
                    "role": role, "kill": kill, "reads": reads, "hit": str(self.hit_file), "starts": str(directory / "starts"),
                    "trace": str(self.trace_file) if trace else "",
                }
            )
        )  # fmt: skip
        names = {"KILLER": Path(__file__).with_name("killer.py"), "CONFIG": config, "WRAPPER": wrapper, "REAL": BASE_PYTHON}
        text = _WRAPPER
        for name, value in names.items():
            text = text.replace(f"@{name}@", str(value))
        wrapper.write_text(text)
        wrapper.chmod(0o755)
        self.python = str(wrapper)

    @property
    def hit(self) -> list[Any] | None:
        """Return `[count, event, file:line, nth, path]` of the step where it killed, or None."""
        try:
            found: list[Any] = json.loads(self.hit_file.read_text())
        except (FileNotFoundError, ValueError):
            return None
        return found

    def steps(self) -> list[list[Any]]:
        return [json.loads(line) for line in self.trace_file.read_text().splitlines()]


_WRAPPER = """#!/bin/sh
# argv: -I -S -c CODE ARGUMENT... or -I -S supervisor.py DIRECTORY
case $3 in
*/supervisor.py)
    exec @REAL@ -I -S -c "exec(compile(open('@KILLER@').read(), 'killer', 'exec'),
    {'ROLE': 'supervisor', 'CONFIG': '@CONFIG@', 'WRAPPER': '@WRAPPER@'})
import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')" "$3" "$4" ;;
esac
case $4 in
*memfd_create*) role=agent ;;
*guardian*) role=guardian ;;
*) exec @REAL@ "$@" ;;
esac
code=$4
shift 4
exec @REAL@ -I -S -c "exec(compile(open('@KILLER@').read(), 'killer', 'exec'),
    {'ROLE': '$role', 'CONFIG': '@CONFIG@', 'WRAPPER': '@WRAPPER@'})
$code" "$@"
"""


def kill_points(steps: Sequence[Sequence[Any]], most: int = 24) -> list[dict[str, Any]]:
    """Choose where to kill: every step with DDTREE_SWEEP=all, else the first step of each line of code, thinned evenly to `most`."""
    if EVERYTHING:
        return [{"at": n} for n in range(1, len(steps) + 1)]
    firsts: dict[tuple[str, str], list[Any]] = {}
    for _n, event, where, nth, _path in steps:
        # Between mkstemp and rename nothing else shows: opening and chmod of the same file are left to the full sweep.
        if event in ("os.rename", "tempfile.mkstemp") or not where.startswith("durable.py"):
            firsts.setdefault((event, where), [event, where, nth])
    return [{"site": site} for site in thin(list(firsts.values()), most)]


def thin(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most `most` items, evenly spread, the ends included (all with DDTREE_SWEEP=all)."""
    if EVERYTHING or len(items) <= most:
        return list(items)
    if most == 1:
        return [items[len(items) // 2]]
    return [items[round(k * (len(items) - 1) / (most - 1))] for k in range(most)]


def in_lanes(make_lane: Callable[[], Any], points: Sequence[Any], one: Callable[[Any, Any], Any], *, tries: int = 2) -> list[Any]:
    """Run `one(lane, point)` for every point, in lanes that each have a world of their own; tell all that failed.

    Returns what `one` returned for each point. A falsy result is a point that was missed, because the run that was to be
    killed there took another way or was over: it is tried again, `tries` times in all. A point that failed gets its lane
    replaced, so that the others start from a world that is right.
    """
    failures: list[str] = []
    results: list[Any] = []

    def work(number: int) -> None:
        lane = make_lane()
        for point in points[number::LANES]:
            result: Any = None
            try:
                for _ in range(tries):
                    result = result or one(lane, point)
            except Exception as error:
                failures.append(f"{point}: {type(error).__name__}: {error}"[:1500])
                lane = make_lane()
            results.append(result)

    with ThreadPoolExecutor(LANES) as pool:
        for done in [pool.submit(work, number) for number in range(LANES)]:
            done.result()
    assert not failures, f"{len(failures)} of {len(points)} points failed:\n" + "\n".join(failures)
    return results


def outcome(act: Callable[[], Any]) -> tuple[Any, DeployError | None]:
    """Return what an act returned, or the DeployError that it ended with; anything else is a bug and passes through."""
    try:
        return act(), None
    except DeployError as error:
        return None, error


@contextlib.contextmanager
def _free(path: Path, seconds: float) -> Iterator[None]:
    fd = os.open(path, os.O_RDONLY)
    deadline = time.monotonic() + seconds
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                assert time.monotonic() < deadline, f"{path} is still locked after {seconds} s: {path.with_suffix('.json')}"
                time.sleep(0.02)
        yield
    finally:
        os.close(fd)


def rest(venv: Path, seconds: float = 30.0) -> None:
    """Wait until no agent, guardian or tidying holds the venv."""
    for name in ("lock", "lock.tidy"):
        for _ in range(2):  # a guardian takes the second lock after it let go of the first
            if (venv / ".ddtree" / name).exists():
                with _free(venv / ".ddtree" / name, seconds):
                    pass
            time.sleep(0.05)


#: At the top of a venv, in its bin and beside its site-packages; anything in `incoming`.
_LITTER = re.compile(r"(^|/)(\.tmp-|\.ddtree-probe-|decision-|journal$)|\.ddtree-\d+$|\.partial$|/incoming/.")


def litter(venv: Path) -> list[str]:
    """Return what a finished run must not leave in a venv."""
    found = layout.Layout(os.fspath(venv), SITE)
    names = [os.path.relpath(os.path.join(at, name), venv) for at, dirs, files in os.walk(venv) for name in dirs + files]
    return sorted(name for name in names if _LITTER.search(name)) + found.partials()


def check_generations(venv: Path) -> list[int]:
    """Assert that every complete generation holds exactly what its index says; return their numbers."""
    found = layout.Layout(os.fspath(venv), SITE)
    for number in found.numbers():
        index = layout.Index.load(os.path.join(found.directory(number), "index"))
        assert index is not None, f"generation {number} has no index"
        wanted = {path: row[3] if row[0] == "f" else f"-> {row[3]}" for path, row in index.rows.items()}
        held = contents(Path(found.tree(number)))
        assert held == wanted, f"generation {number} is not what its index says: {sorted(set(held.items()) ^ set(wanted.items()))[:6]}"
    return found.numbers()


def ledger(venv: Path) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = layout.Layout(os.fspath(venv), SITE).ledger_entries()
    return entries


def live_generation(venv: Path) -> int | None:
    number: int | None = layout.Layout(os.fspath(venv), SITE).live()
    return number


def check_objects(root: Path) -> int:
    """Assert that every file below `root` whose name is a digest has that digest; return how many there are."""
    count = 0
    for at, _dirs, files in os.walk(root):
        for name in files:
            if re.fullmatch(r"[0-9a-f]{64}", name):
                count += 1
                assert hashlib.sha256(Path(at, name).read_bytes()).hexdigest() == name, f"a short or damaged object: {at}/{name}"
    return count
