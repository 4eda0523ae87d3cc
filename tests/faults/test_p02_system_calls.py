"""P2 and P3 below Python: SIGKILL or EIO at the k-th fsync, syncfs, rename, link, symlink of the agent (strace's injection)."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from ddtree_deploy.errors import HostUnreachable, Incompatible, IoProblem, RestoreUnconfirmed, RevertedAfterFailure
from tests.faults.harness import EVERYTHING, check_generations, in_lanes, litter, live_generation, outcome, report, rest
from tests.fixtures.venvs import BASE_PYTHON, make_venv, package
from tests.fixtures.world import BRIEF, QUICK, World, make_world


def strace_works() -> bool:
    if shutil.which("strace") is None:
        return False
    argv = ["strace", "-f", "-qqq", "-o", os.devnull, "-e", "inject=fsync:error=EIO", "true"]
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0


pytestmark = [pytest.mark.faults, pytest.mark.skipif(not strace_works(), reason="strace can not trace here")]

CALLS = ("fsync", "syncfs", "rename", "renameat2", "link", "linkat", "symlink", "symlinkat")
#: Which of the calls of a kind, in the thread that makes them: the first ones differ most.
NTH = tuple(range(1, 40)) if EVERYTHING else (1,)


@dataclass(frozen=True)
class Fault:
    call: str
    action: str
    when: int

    def __str__(self) -> str:
        return f"{self.call}:{self.action}:when={self.when}"


def traced(directory: Path, *injections: str) -> tuple[str, Path]:
    """Return an interpreter whose agents run under strace with these injections, and strace's log.

    Without --seccomp-bpf: when the tracer ends before the guardian, its filter would fail every call of the orphan.
    """
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / f"strace-{uuid.uuid4().hex[:8]}"
    wrapper = directory / "python"
    calls = ",".join(sorted({injection.partition(":")[0] for injection in injections}))
    inject = " ".join(f"-e inject={injection}" for injection in injections)
    wrapper.write_text(
        "#!/bin/sh\n"
        f'case $4 in *memfd_create*) exec strace -f -qqq -A -o {log} -e trace={calls} {inject} {BASE_PYTHON} "$@" ;; esac\n'
        f'exec {BASE_PYTHON} "$@"\n'
    )
    wrapper.chmod(0o755)
    return str(wrapper), log


def again(world: World) -> None:
    """Put an ordinary venv in the target's place."""
    shutil.rmtree(world.target)
    make_venv(world.target, package("alpha", "1.0", data=20_000), package("beta", "1.0"), package("keep", "1.0", modules=1))


def healed(world: World) -> None:
    rest(world.target)
    assert world.live() in (world.old, world.new)
    world.push()
    rest(world.target)
    assert world.live() == world.new
    assert [name for name in litter(world.target) if "decision-" not in name] == []
    assert live_generation(world.target) in check_generations(world.target)


@pytest.mark.parametrize("action", ["signal=SIGKILL", "error=EIO"])
def test_a_first_push_survives_a_fault_at_any_system_call(tmp_path: Path, action: str) -> None:
    results: dict[str, int] = {}

    def one(world: World, fault: Fault) -> bool:
        again(world)
        python, log = traced(world.root / "strace", str(fault))
        done, error = outcome(lambda: world.push(host=world.host(python=python), options=BRIEF))
        hit = "INJECTED" in log.read_text() or "SIGKILL" in log.read_text()
        results[type(error).__name__ if error else "done"] = results.get(type(error).__name__ if error else "done", 0) + 1
        assert error is None or isinstance(error, (HostUnreachable, IoProblem, RevertedAfterFailure, RestoreUnconfirmed)), repr(error)
        live = world.live()
        assert live in (world.old, world.new), "a mixture"
        if done is not None:
            assert live == world.new
        if isinstance(error, IoProblem):
            assert error.exit_code == 22 and live == world.old, "an I/O error, and yet it switched"
        healed(world)
        return hit

    faults = [Fault(call, action, when) for call in CALLS for when in NTH]
    # A call that a run does not make (link or linkat, as the C library chooses) is not made by the next one either.
    hits = sum(in_lanes(lambda: make_world(tmp_path / uuid.uuid4().hex[:6], data=20_000), faults, one, tries=1))
    report(f"P2 system calls, {action}", tried=len(faults), hit=hits, **results)
    assert hits
    if action == "error=EIO":
        assert results.get("IoProblem", 0) > 0


def test_without_exchange_a_first_push_is_refused_or_takes_the_gap_that_was_accepted(tmp_path: Path) -> None:
    world = make_world(tmp_path / "world", data=20_000)
    python, log = traced(tmp_path / "strace", "renameat2:error=EINVAL")
    _done, error = outcome(lambda: world.push(host=world.host(python=python)))
    assert isinstance(error, Incompatible) and "--accept-gap" in error.mend, repr(error)
    rest(world.target)
    assert world.live() == world.old and not world.site.is_symlink()
    assert "INJECTED" in log.read_text()
    world.push(host=world.host(python=python), options=replace(QUICK, accept_gap=True))
    rest(world.target)
    assert world.live() == world.new and check_generations(world.target) == [0, 2]  # 1 is in the ledger as reverted


def test_a_death_in_the_gap_is_mended_by_the_host_itself_or_by_the_next_push(tmp_path: Path) -> None:
    """Between the two renames there is no site-packages; the agent dies there. (The guardian lives, or dies with it.)"""
    killed = mended = 0
    world = make_world(tmp_path / "world", data=20_000)
    for when in range(1, 5):
        again(world)
        injections = ["renameat2:error=EINVAL", f"symlink:signal=SIGKILL:when={when}", f"symlinkat:signal=SIGKILL:when={when}"]
        python, _log = traced(tmp_path / "strace", *injections)
        gap: Any = replace(BRIEF, accept_gap=True)
        _done, error = outcome(lambda python=python, gap=gap: world.push(host=world.host(python=python), options=gap))
        killed += error is not None
        rest(world.target)
        if world.site.exists():
            mended += error is not None
            assert world.live() in (world.old, world.new)
        world.push(options=replace(QUICK, accept_gap=True))
        rest(world.target)
        assert world.live() == world.new
        world.rollback(0)
        rest(world.target)
        assert world.live() == world.old
    report("P2 death in the gap of an adoption", tried=4, killed=killed, mended_by_the_host=mended)
    assert killed


def test_a_gap_whose_guardian_died_too_is_mended_by_the_next_push(tmp_path: Path) -> None:
    """As after a power cut between the two renames: no process of ours is left."""
    world = make_world(tmp_path / "world", data=20_000)
    tree = world.state / "generations" / "0" / "site-packages"
    tree.parent.mkdir(parents=True)
    (tree.parent / "generation.json").write_text('{"number": 0, "as_found": true}')
    world.site.rename(tree)
    world.push()
    rest(world.target)
    assert world.live() == world.new
    world.rollback(0)
    rest(world.target)
    assert world.live() == world.old


def test_every_rename_of_an_object_or_a_record_follows_a_flush(tmp_path: Path) -> None:
    """(P3) What gets its final name is on the disk before: the agent's fsyncs and renames, in the order of the kernel."""
    world = make_world(tmp_path / "world", data=20_000)
    directory = tmp_path / "strace"
    directory.mkdir()
    log, wrapper = directory / "log", directory / "python"
    calls = "fsync,syncfs,rename,renameat,renameat2"
    wrapper.write_text(
        "#!/bin/sh\n"
        f'case $4 in *memfd_create*) exec strace -f -y -qqq -A -o {log} -e trace={calls} {BASE_PYTHON} "$@" ;; esac\n'
        f'exec {BASE_PYTHON} "$@"\n'
    )
    wrapper.chmod(0o755)
    world.push(host=world.host(python=str(wrapper)))
    rest(world.target)
    lines = log.read_text().splitlines()
    synced: set[str] = set()
    checked = 0
    last_syncfs = False
    for line in lines:
        if "syncfs(" in line:
            last_syncfs = True
        elif "fsync(" in line:
            synced.add(line.partition("<")[2].partition(">")[0])
        elif "rename(" in line and "/.tmp-" in line and "/incoming/" not in line and "/.tmp-link-" not in line:
            source = line.partition('"')[2].partition('"')[0]
            assert source in synced or last_syncfs, line
            checked += 1
    report("P3 renames after a flush", renames=checked, flushes=len(synced), whole_file_system=last_syncfs)
    assert checked >= 6 and last_syncfs
