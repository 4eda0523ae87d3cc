"""`bench` as a user runs it: servers launched, measured and stopped, or one measured that runs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddtree_deploy.agent.serving.ports import is_free
from ddtree_deploy.demo.sshd import free_port
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.launch import Options, lifecycle
from ddtree_deploy.launch.argv import Request
from ddtree_deploy.launch.models import OVER
from tests.cli.conftest import COMMAND, Ran
from tests.fixtures.until import until
from tests.fixtures.venvs import make_venv, package, site
from tests.launch.conftest import end_launches, stand_in

# Processes that live and die: seconds on an idle machine, minutes on a busy one.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def venv(tmp_path: Path) -> Iterator[Path]:
    """A venv with the stand-in for both engines."""
    made = make_venv(tmp_path / "venv", *stand_in())
    try:
        yield made
    finally:
        end_launches(made)


def run(*argv: str) -> Ran:
    """Run a command that may take minutes."""
    done = subprocess.run([*COMMAND, *argv], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=800, check=False)
    return Ran(done.returncode, done.stdout, done.stderr)


def two_ports() -> int:
    """Return a port that is free and has a free one behind it."""
    while True:
        port = free_port()
        if port < 65535 and is_free("127.0.0.1", port + 1):
            return port


def phases(venv: Path) -> dict[str, str]:
    found = lifecycle.servers(Host("here", transport="local", venv=str(venv)))
    return {server.record.name: server.phase for server in found}


def test_servers_of_its_own_in_turn_and_a_plan_that_starts_nothing(venv: Path) -> None:
    port = free_port()
    words = ["bench", "local", "--venv", str(venv), "--engine", "standalone", "--model", "tiny", "--variants", "plain,ddtree:7"]
    words += ["--concurrency", "1,3", "--rounds", "2", "--requests", "2", "--max-tokens", "5", "--port", str(port), "--in-turn"]
    shown = run(*words, "-n")
    assert shown.code == 0, shown.err
    assert f"ddtree:7: {venv}/bin/python -m ddtree.server --tiny --mode ddtree --budget 7 --device cpu" in shown.out
    assert "  stop plain\n  start ddtree:7\n" in shown.out and "8 measurements, 20 answers" in shown.out
    assert not (venv / ".ddtree").exists()

    ran = run(*words, "--json")
    assert ran.code == 0, ran.err
    found = ran.lines[-1]["bench"]
    assert [(cell["variant"], cell["concurrency"]) for cell in found["cells"]] == [
        ("plain", 1), ("plain", 3), ("ddtree:7", 1), ("ddtree:7", 3),
    ]  # fmt: skip
    last = found["cells"][-1]
    # Three answers a measurement at three at a time, two rounds; four tokens of two passes besides the first.
    assert (last["answers"], last["failed"], last["acceptance"], len(last["rates"])) == (6, 0, 2.0, 2)
    assert last["ratios"]["plain"] > 0 and [one["same"] for one in found["agreements"]] == [10, 10]
    assert phases(venv) == {}  # nor is there a record that `restart` would find


def test_a_server_that_dies_is_told_and_nothing_stays(venv: Path) -> None:
    port = two_ports()
    words = ["bench", "local", "--venv", str(venv), "--engine", "standalone", "--model", "tiny", "--variants", "plain,dflash"]
    # Each is proved by three completions; the second answer of the warm-up is the end of it.
    ran = run(*words, "--concurrency", "1", "--requests", "2", "--port", str(port), "--env", "STAND_IN_DIE=4")
    assert ran.code == 19 and "plain gave no answer at 1 at a time: " in ran.err and f"logs local --port {port}" in ran.err, ran.err
    assert len(phases(venv)) == 2 and set(phases(venv).values()) <= set(OVER)


def test_ctrl_c_ends_the_servers_too(venv: Path) -> None:
    port = free_port()
    words = ["bench", "local", "--venv", str(venv), "--engine", "standalone", "--model", "tiny", "--variants", "plain"]
    # The first answer after the three that prove it never comes.
    process = subprocess.Popen([*COMMAND, *words, "--port", str(port), "--env", "STAND_IN_HANG=4"], stdin=subprocess.DEVNULL)
    try:
        until((venv / f".ddtree/servers/{port}/proved.json").exists, "the server was proved", 400)
        process.send_signal(signal.SIGINT)
        assert process.wait(400) == 130
    finally:
        process.kill()
        process.wait()
    assert phases(venv) == {str(port): "stopped"}


def test_what_is_tuned_is_launched(venv: Path, tmp_path: Path) -> None:
    port = two_ports()
    what = ["local", "--venv", str(venv), "--engine", "standalone", "--model", "tiny", "--port", str(port)]
    before = run("launch", *what, "-n")
    assert before.code == 0 and "--budget" not in before.out, before.err
    ran = run("tune", *what, "--budgets", "7", "--rounds", "1", "--requests", "3", "--out", str(tmp_path / "table.txt"))
    assert ran.code == 0, ran.err
    assert "tokens per pass by budget: 7: 2.00" in ran.out and "budget table: 1:7" in ran.out
    assert (tmp_path / "table.txt").read_text() == "1:7\n" and phases(venv) == {}
    after = run("launch", *what, "-n", "-v")
    assert "--mode ddtree --budget 7 " in after.out and "budget 7, tuned here at " in after.err
    assert "--budget 9 " in run("launch", *what, "--budget", "9", "-n").out


def test_a_server_that_runs_is_measured_and_left_alone(venv: Path) -> None:
    host = Host("here", transport="local", venv=str(venv))
    nothing = run("bench", "local", "--venv", str(venv))
    assert nothing.code == 2 and "no server runs on `local`" in nothing.err and "--model" in nothing.err
    request = Request(engine="standalone", model="tiny", gpus=0, port=free_port(), algorithm="dflash")
    lifecycle.launch(lifecycle.prepare(host, request), Options(wait=120, completions=2))
    ran = run("bench", "local", "--venv", str(venv), "--concurrency", "2", "--rounds", "1")
    assert ran.code == 0, ran.err
    assert ran.out.splitlines()[1].split()[:2] == ["dflash", "2"]
    assert "dflash: 16 of 16 answers repeat the first to their prompt" in ran.out
    assert phases(venv) == {str(request.port): "serving"}


def test_the_tiny_pair_plain_and_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two real servers at once: the table, the texts that must be equal, and the report."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    venv = make_venv(tmp_path / "venv", package("own", "1.0"))
    here = next(path for path in sys.path if path.endswith("site-packages"))
    (site(venv) / "deps.pth").write_text(here + "\n")
    out = tmp_path / "out"
    words = ["--engine", "standalone", "--model", "tiny", "--variants", "plain,ddtree", "--port", str(two_ports())]
    words += ["--concurrency", "1,2", "--rounds", "1", "--requests", "2", "--max-tokens", "8", "--report", str(out)]
    try:
        ran = run("bench", "local", "--venv", str(venv), *words, "--", "--threads", "1")
    finally:
        end_launches(venv)
    assert ran.code == 0, ran.err
    table = [line.split() for line in ran.out.splitlines()[1:5]]
    assert [row[:2] for row in table] == [["plain", "1"], ["plain", "2"], ["ddtree", "1"], ["ddtree", "2"]]
    assert all(float(row[2]) > 0 for row in table) and table[0][5] == "1.00" and float(table[2][5]) >= 1.0
    assert "ddtree: 4 of 4 answers are those of plain" in ran.out
    found = json.loads((out / "bench.json").read_text())
    assert [cell["answers"] for cell in found["cells"]] == [2, 2, 2, 2] and found["about"]["engine"] == "standalone"
    page = (out / "bench.html").read_text()
    assert "<svg" in page and all(row[2] in page for row in table) and (out / "bench.svg").read_text() in page
