"""How the command line ends when something is wrong: the exit code, what it says, what it does not say."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND, run, settled
from tests.faults.harness import rest
from tests.fixtures.venvs import Dist, contents, install, make_venv


def on_a_terminal(*argv: str, typed: str = "", cwd: Path | None = None) -> tuple[int, str]:
    """Run a command on a pseudo-terminal; return its exit code and all it wrote there."""
    ours, theirs = pty.openpty()
    with subprocess.Popen([*COMMAND, *argv], stdin=theirs, stdout=theirs, stderr=theirs, cwd=cwd) as process:
        os.close(theirs)
        os.write(ours, typed.encode())
        said, deadline = b"", time.monotonic() + 120
        while time.monotonic() < deadline:
            if select.select([ours], [], [], 0.2)[0]:
                try:
                    said += os.read(ours, 65536)
                except OSError:  # the other side is closed
                    break
        code = process.wait(timeout=10)
    os.close(ours)
    return code, said.decode("utf-8", "replace").replace("\r\n", "\n")


@pytest.mark.parametrize(
    ("argv", "message", "hint"),
    [
        (("pusk",), "no such command `pusk`. Did you mean `push`?", "see `ddtree-deploy --help`"),
        (("snapshot",), "missing argument `HOST`", "see `ddtree-deploy snapshot --help`"),
        (("push", "local", "--jobs", "x"), "invalid value for `--jobs`: ", "see `ddtree-deploy push --help`"),
        (("status",), "no host given", "name one (see `ddtree-deploy hosts`), or set `default_target`"),
        (("status", "local"), "`local` has no venv configured", "give `--venv PATH`"),
        (("status", "loca", "--venv", "/x"), "no host `loca`, did you mean `local`?", "define `[hosts.loca]`"),
        (("show",), "the store has no snapshots", "take one: `ddtree-deploy snapshot HOST`"),
        (("verify", "local", "--venv", "/x", "--level", "all"), "unknown level: `all`", "use files, syntax"),
    ],
)
def test_a_wrong_command_line_exits_with_2_and_says_what_to_do(argv: tuple[str, ...], message: str, hint: str) -> None:
    ran = run(*argv)
    lines = ran.err.splitlines()
    assert (ran.code, ran.out) == (2, "")
    assert lines[0].startswith(f"error: {message}")
    assert lines[-2] == "" and lines[-1].startswith(f"hint: {hint}")
    as_json = run(*argv, "--json")
    assert json.loads(as_json.out)["type"] == "error" and json.loads(as_json.out)["code"] == 2


def test_an_unknown_key_in_the_configuration_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "ddtree.toml").write_text('[hosts.a]\nvenvv = "/v"\n')
    ran = run("hosts", cwd=tmp_path)
    assert ran.code == 2 and "venvv" in ran.err and "hint: see `ddtree-deploy config --example`" in ran.err


def test_the_example_configuration_is_one_that_loads(tmp_path: Path) -> None:
    (tmp_path / "ddtree.toml").write_text(run("config", "--example").out)
    assert run("hosts", cwd=tmp_path).code == 0


def test_a_missing_venv_is_named(tmp_path: Path) -> None:
    ran = run("snapshot", "local", "--venv", str(tmp_path / "nowhere"))
    assert ran.code != 0 and str(tmp_path / "nowhere") in ran.err and "\nhint: " in ran.err
    assert "Traceback" not in ran.err


def test_an_unknown_snapshot_names_the_near_ones(source: Path) -> None:
    run("snapshot", "local", "--venv", str(source), "--label", "known-good")
    ran = run("show", "known-god")
    assert ran.code == 2 and "there is no snapshot `known-god`" in ran.err and "`known-good`" in ran.err


def test_an_unreachable_host_exits_with_10() -> None:
    ran = run("status", "nobody@127.0.0.1:9", "--venv", "/v")
    assert ran.code == 10 and ran.err.startswith("error: ") and "\nhint: " in ran.err


def test_a_needed_confirmation_without_a_terminal_is_refused_before_any_prompt(source: Path, target: Path) -> None:
    run("snapshot", "local", "--venv", str(source))
    where = ("local", "--venv", str(target))
    run("push", *where)
    rest(target)
    before = contents(target)
    ran = run("generations", "release", *where, stdin="y\n")
    assert (ran.code, ran.out) == (2, "")
    assert "[y/N]" not in ran.err
    assert settled(ran.err).splitlines() == [
        "error: confirmation needed and there is no terminal: delete all generations of `local` but 1?",
        "",
        "hint: add `-y`, or set `DDTREE_YES=1`",
        "log: LOG",
    ]
    assert contents(target) == before
    assert run("generations", "release", *where, env={"DDTREE_YES": "1"}).code == 0


def test_a_terminal_is_asked_and_no_means_no(source: Path) -> None:
    run("snapshot", "local", "--venv", str(source))
    code, said = on_a_terminal("cache", "prune", "--keep", "1")
    assert (code, said.strip()) == (0, "nothing to delete")
    install(source, Dist("more", "1.0", {"more.py": ""}))
    run("snapshot", "local", "--venv", str(source))
    code, said = on_a_terminal("cache", "prune", "--keep", "1", typed="n\n")
    assert code == 2 and "[y/N]" in said and "nothing was deleted: not confirmed" in said
    assert len(run("ls", "--json").json["snapshots"]) == 2
    code, said = on_a_terminal("cache", "prune", "--keep", "1", typed="y\n")
    assert code == 0 and len(run("ls", "--json").json["snapshots"]) == 1


def test_a_terminal_gets_a_table_and_a_pipe_gets_plain_columns(source: Path) -> None:
    run("snapshot", "local", "--venv", str(source))
    _code, said = on_a_terminal("ls")
    assert "──" in said and "\x1b[3" not in said  # NO_COLOR is set
    plain = run("ls").out
    assert not set(plain) & set("─│━╭") and plain.splitlines()[0].split()[:2] == ["snapshot", "label"]


def test_colours_come_when_they_are_asked_for() -> None:
    assert "\x1b[" not in run("status").err
    assert "\x1b[1;31merror" in run("status", "local", "--color", "always").err


def test_an_escape_sequence_of_a_host_does_not_reach_the_terminal(tmp_path: Path) -> None:
    venv = make_venv(tmp_path / "A", Dist("odd", "1", {"odd/__init__.py": "raise RuntimeError('\\x1b[31mred')\n"}))
    ran = run("verify", "local", "--venv", str(venv), "--level", "import")
    assert ran.code == 17 and "\x1b" not in ran.out + ran.err
    assert "\\x1b[31mred" in ran.out


def test_a_reader_that_goes_away_is_no_traceback(source: Path) -> None:
    run("snapshot", "local", "--venv", str(source))
    shell = f"exec 3>&1; {{ {sys.executable} -m ddtree_deploy show --json --files; echo $? >&3; }} | true"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=False)
    assert done.stderr == "" and done.stdout.strip() in ("141", "0")


def test_a_bug_is_one_line_a_log_and_exit_code_1() -> None:
    code = (
        "import sys, ddtree_deploy.config as c\n"
        "def broken(*a, **k): raise ZeroDivisionError('by design')\n"
        "c.load = broken\n"
        "from ddtree_deploy.cli import main\nsys.argv = ['ddtree-deploy', 'hosts']\nmain()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    lines = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (1, "")
    assert lines[0] == "error: internal error: ZeroDivisionError: by design"
    log = Path(lines[-1].removeprefix("log: "))
    assert any("Traceback" in json.loads(line).get("text", "") for line in log.read_text().splitlines())


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_names_the_step_and_leaves_the_target_as_it_was(source: Path, target: Path, number: int, code: int) -> None:
    """The probe of a package that takes its time is where the signal arrives."""
    install(source, Dist("slow", "1.0", {"slow/__init__.py": "import time\ntime.sleep(30)\n"}))
    run("snapshot", "local", "--venv", str(source), "--no-probe")
    where = ("local", "--venv", str(target))
    argv = [*COMMAND, "push", *where, "-v"]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as push:
        assert push.stderr is not None and push.stdout is not None
        for line in push.stderr:
            if "import" in line and "staged" in line:
                break
        push.send_signal(number)
        said = push.stderr.read()
        assert push.stdout.read() == ""
    assert push.returncode == code
    assert "error: " in said and "hint: " in said and "Traceback" not in said
    status = run("status", *where, "--json").json
    assert status["generation"] is None and status["lock"] is None


def test_the_log_has_the_steps_and_old_logs_go(source: Path) -> None:
    logs = Path(os.environ["DDTREE_HOME"]) / "state" / "log"
    logs.mkdir(parents=True)
    for number in range(60):
        (logs / f"20200101T000000Z-{number:02}.jsonl").write_text("")
    run("snapshot", "local", "--venv", str(source))
    names = sorted(path.name for path in logs.iterdir())
    assert len(names) == 50 and names[-1] > "2021"
    kinds = {json.loads(line)["kind"] for line in (logs / names[-1]).read_text().splitlines()}
    assert "step" in kinds


def test_a_hint_names_this_command_and_this_host(tmp_path: Path) -> None:
    (tmp_path / "ssh_config").write_text("Host gone\n    HostName 127.0.0.1\n    Port 1\n")
    (tmp_path / "ddtree.toml").write_text('ssh_config = "ssh_config"\n[hosts.gone]\nvenv = "/x"\n')
    unreachable = run("status", "gone", cwd=tmp_path)
    assert unreachable.code == 10 and "try `ssh gone true`" in unreachable.err
    assert "gone: connect" in on_a_terminal("status", "gone", cwd=tmp_path)[1]  # while it does not answer
    relative = run("generations", "prune", "gone", "--venv", "x", cwd=tmp_path)
    assert relative.code == 2 and "hint: see `ddtree-deploy generations prune --help`" in relative.err
