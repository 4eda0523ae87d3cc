"""The main job through the command line, over the local host: what it prints, how it exits, what is on the disk."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from ddtree_deploy.survey import RACY_NS
from tests.cli.conftest import run, settled
from tests.faults import harness
from tests.fixtures.venvs import contents, site


def python(venv: Path, code: str) -> str:
    done = subprocess.run([venv / "bin/python", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def rest(tree: Path) -> None:
    """Wait until no file of `tree` is so young that a stamp of it could not be trusted (git's racily-clean rule)."""
    newest = max(path.lstat().st_ctime_ns for path in tree.rglob("*"))
    time.sleep(max(0, newest + RACY_NS + 10_000_000 - time.time_ns()) / 1e9)


@pytest.fixture
def snapshot(source: Path) -> str:
    ran = run("snapshot", "-q", "local", "--venv", str(source), "--label", "good")
    assert (ran.code, ran.err) == (0, "")
    return ran.out.strip()


def test_snapshot_q_prints_the_identity_and_nothing_else(snapshot: str) -> None:
    assert len(snapshot) == 64 and set(snapshot) <= set("0123456789abcdef")


def test_snapshot_names_the_file_that_was_patched_by_hand(source: Path) -> None:
    ran = run("snapshot", "local", "--venv", str(source))
    assert "patched engine/flags.py" in ran.err
    shown = run("show")
    assert "engine   0.5.11" in shown.out and "patched engine/flags.py" in shown.out


def test_of_a_thousand_missing_files_a_few_are_named(source: Path) -> None:
    (record,) = site(source).glob("engine-*.dist-info/RECORD")
    record.write_text(record.read_text() + "".join(f"engine/gone{number}.h,sha256=AAAA,1\n" for number in range(1000)))
    refused = run("snapshot", "local", "--venv", str(source))
    assert refused.code == 20 and "1000 findings" in refused.err
    ran = run("snapshot", "local", "--venv", str(source), "--allow-drift")
    assert ran.err.count("engine/gone") == 5 and "  missing … and 995 more (-v lists them)" in ran.err.splitlines()
    assert run("show").out.count("engine/gone") == 5
    assert run("show", "-v").out.count("engine/gone") == 1000


def test_a_second_snapshot_stores_and_reads_nothing(source: Path) -> None:
    rest(site(source))
    snapshot = run("snapshot", "-q", "local", "--venv", str(source)).out.strip()
    again = run("snapshot", "local", "--venv", str(source), "--json")
    result = again.lines[-1]
    assert result["type"] == "result" and result["snapshot"]["id"] == snapshot
    assert (result["new_objects"], result["hashed_files"]) == (0, 0)


def test_the_four_commands_of_the_readme(source: Path, target: Path, snapshot: str) -> None:
    before = contents(site(target))
    pushed = run("push", "local", "--snapshot", snapshot, "--venv", str(target), "-y", "--verify")
    assert pushed.code == 0, pushed.err
    assert settled(pushed.out).startswith("local: generation 1 active (was 0) — snapshot ID, ")
    assert pushed.out.rstrip().endswith("verified") and pushed.out.count("\n") == 1
    live = site(target)
    assert python(target, "import engine.flags as f; print(f.PATCHED)") == "True"
    assert (live / "engine/flags.py").read_bytes() == (site(source) / "engine/flags.py").read_bytes()
    assert not (live / "engine/stale.py").exists() and (live / "own/__init__.py").exists()
    proved = run("verify", "local", "--venv", str(target), "--json")
    assert proved.code == 0 and [line["type"] for line in proved.lines if line["type"] != "step"][-1] == "result"
    back = run("rollback", "local", "--venv", str(target), "-y")
    assert (back.code, back.out) == (0, "local: generation 0 active (was 1)\n")
    assert contents(site(target)) == before


def test_diff_prints_packages_first_and_files_when_asked(target: Path, snapshot: str) -> None:
    ran = run("diff", "local", "--venv", str(target), "--files")
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert lines[0].startswith("local: ") and lines[0].endswith("onto an ordinary venv")
    assert lines[1].split() == ["package", "now", "becomes", "files", "size", "why"]
    assert lines[2].split()[:4] == ["~", "engine", "0.5.9", "0.5.11"]
    assert lines[3].split()[:4] == ["+", "kernel", "—", "2.0"]
    assert "- engine/stale.py" in lines and "+ engine/flags.py  (patched)" in lines
    assert not any(char in ran.out for char in "│─╭┃━")


@pytest.mark.slow
def test_dry_runs_write_nothing(target: Path, snapshot: str) -> None:
    store = Path(run("cache", "dir").out.strip())

    def state() -> dict[str, str]:
        # Beside these the store has its lock and what it remembers of a host's inodes; neither is content.
        content = (store / name for name in ("objects", "snapshots", "refs", "quarantine"))
        return {f"{root}/{path}": what for root in (target, *content) for path, what in contents(root).items()}

    def changed(before: dict[str, str]) -> set[tuple[str, str]]:
        return set(before.items()) ^ set(state().items())

    before = state()
    where = ("local", "--venv", str(target))
    assert run("push", *where, "-n").code == 0
    assert run("diff", *where).code == 0
    assert run("cache", "prune", "--keep", "1", "-n").code == 0
    assert changed(before) == set()
    run("push", *where)
    harness.rest(target)  # what is tidied after a push is no part of a dry run
    before = state()
    assert run("rollback", *where, "-n").code == 0
    assert run("generations", "prune", *where, "--keep", "1", "-n").code == 0
    assert run("generations", "release", *where, "-n").code == 0
    assert changed(before) == set()


def test_a_broken_snapshot_is_refused_and_the_old_generation_stays_live(source: Path, target: Path, snapshot: str) -> None:
    where = ("local", "--venv", str(target))
    run("push", *where)
    (site(source) / "kernel/__init__.py").write_text("def broken(:\n")
    broken = run("snapshot", "-q", "local", "--venv", str(source), "--no-probe").out.strip()
    ran = run("push", *where, "--snapshot", broken)
    assert ran.code == 17
    assert "SyntaxError" in ran.err and "hint:" in ran.err and ran.out == ""
    assert run("status", *where, "--json").json["generation"] == 1
    assert python(target, "import kernel; print(kernel.VERSION)") == "2.0"


def test_the_store_can_be_looked_after(source: Path, snapshot: str) -> None:
    root = Path(run("cache", "dir").out.strip())
    assert run("cache", "verify").code == 0
    victim = next(path for path in (root / "objects").rglob("*") if path.is_file())
    victim.chmod(0o644)
    victim.write_bytes(victim.read_bytes() + b"!")
    bad = run("cache", "verify")
    assert bad.code == 14 and victim.name in bad.err and bad.out == ""
    assert run("cache", "forget", "good", "-n").out == f"would delete snapshot {snapshot[:7]} (good)\n"
    assert run("cache", "forget", "good", "-y").out == f"deleted snapshot {snapshot[:7]} (good)\n"
    assert run("cache", "prune", "-y").code == 0
    assert run("cache", "size", "--json").json["objects"] == 0


def test_a_push_in_json_and_what_the_host_tells_afterwards(target: Path, snapshot: str) -> None:
    where = ("local", "--venv", str(target))
    assert run("diff", *where, "--exit-code", "-q").code == 3
    pushed = run("push", *where, "--json")
    kinds = [line["type"] for line in pushed.lines]
    assert kinds[-1] == "result" and {"step", "plan", "proofs", "pushed"} <= set(kinds) and pushed.err == ""
    assert (pushed.lines[-1]["code"], pushed.lines[-1]["schema"]) == (0, 1)
    assert pushed.lines[-1]["pushed"][0]["generation"] == 1

    again = run("push", *where)
    assert again.code == 0
    assert settled(again.out) == "local: already up to date — generation 1, snapshot ID\n"
    assert run("diff", *where, "--exit-code", "-q").code == 0

    reading: list[tuple[str, ...]] = [(name, *where) for name in ("diff", "status", "generations", "lock", "audit")]
    reading += [("doctor", *where), ("ls",), ("show",), ("hosts",), ("config",), ("cache", "size")]
    documents = {argv[0]: run(*argv, "--json") for argv in reading}
    for name, ran in documents.items():
        assert (ran.code, ran.json["schema"], bool(ran.json["kind"])) == (0, 1, True), name
    assert [row["number"] for row in documents["generations"].json["generations"]] == [1, 0]
    assert documents["status"].json["drift"] == 0
    assert documents["lock"].json["held"] is False
    last = documents["audit"].json["lines"][-1]
    assert (last["event"], last["generation"]) == ("confirmed", 1)


def test_drift_is_shown_and_proved_and_release_keeps_what_is_live(target: Path, snapshot: str) -> None:
    where = ("local", "--venv", str(target))
    run("push", *where)
    live = site(target)
    (live / "engine/__init__.py").write_text("print('by hand')\n")
    (live / "engine/flags.py").unlink()
    (live / "extra.py").write_text("")
    ran = run("status", *where)
    assert "drift     3 files by hand since" in ran.out
    for line in ("  ~ engine/__init__.py", "  + extra.py", "  - engine/flags.py"):
        assert line in ran.out.splitlines()
    proved = run("verify", *where, "--level", "files")
    assert proved.code == 14 and "engine/" in proved.err
    looked = run("verify", *where, "--level", "gpu", "-v").out.splitlines()
    assert [line for line in looked if "gpu" in line] == ["  gpu     skipped: there is no torch in this tree"]

    assert run("generations", "release", *where, "-y").code == 0
    assert live.is_dir() and not live.is_symlink() and not (target / ".ddtree").exists()
    assert python(target, "import kernel; print(kernel.VERSION)") == "2.0"
