"""P21: secrets never leak: a server's key, tokens of both environments and a private key, sought in all that we print, keep and run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from ddtree_deploy.demo.sshd import LoopbackSshd, free_port, loopback_sshd, sshd_binary
from tests.cli.conftest import COMMAND, Ran, run
from tests.faults.test_p02_system_calls import strace_works
from tests.fixtures.venvs import Dist, make_venv, package, site
from tests.launch.conftest import end_launches, stand_in

pytestmark = pytest.mark.faults

#: Each is of a shape that no rule but its name gives away.
SERVER_KEY, SERVER_TOKEN, OUR_TOKEN = "sesame-open-8541", "mellon-friend-2217", "swordfish-pass-6630"
SECRETS = (SERVER_KEY, SERVER_TOKEN, OUR_TOKEN)
#: What the user's own shell holds while he works.
OURS = {"HF_TOKEN": OUR_TOKEN, "AWS_SECRET_ACCESS_KEY": OUR_TOKEN, "SGLANG_API_KEY": OUR_TOKEN}
SERVER = "import sys\nprint('up', flush=True)\nsys.stdin.read()\n"


def leaks(found: Mapping[str, str | bytes], secrets: tuple[str, ...] = SECRETS) -> list[str]:
    """Return where a secret stands."""
    texts = {where: os.fsencode(text) if isinstance(text, str) else text for where, text in found.items()}
    return [f"{where}: {secret}" for where, text in texts.items() for secret in secrets if secret.encode() in text]


def files(*roots: Path) -> dict[str, bytes]:
    return {os.fspath(path): path.read_bytes() for root in roots for path in root.rglob("*") if path.is_file() and not path.is_symlink()}


def streams(runs: Mapping[str, Ran]) -> dict[str, str]:
    return {f"{name} ({stream})": getattr(ran, stream) for name, ran in runs.items() for stream in ("out", "err")}


def command_lines() -> dict[str, str]:
    """Return what `ps` shows: the command line of every process, by pid."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found[entry.name] = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
    return found


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Path]:
    """A venv whose SGLang runs, with a key in its command line and tokens in its environment."""
    sglang = Dist("sglang", "0.5.11", {"sglang/__init__.py": "", "sglang/launch_server.py": SERVER})
    venv = make_venv(tmp_path / "source", sglang, package("alpha", "2.0"))
    keys = ("--api-key", SERVER_KEY, f"--admin-api-key={SERVER_KEY}")
    argv = [venv / "bin/python", "-m", "sglang.launch_server", "--model-path", "m", *keys]
    env = {**os.environ, "HF_TOKEN": SERVER_TOKEN, "SGLANG_API_KEY": SERVER_TOKEN, "NCCL_SOCKET_IFNAME": "eth7",
           "SGLANG_ENDPOINT": f"http://user:{SERVER_TOKEN}@proxy/"}  # fmt: skip
    with subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout and server.stdout.readline() == b"up\n"
        yield venv
        server.kill()


def test_the_secrets_of_a_running_server_stay_where_they_are(source: Path, tmp_path: Path, quiet_home: Path) -> None:
    """Snapshot, show, push, status and doctor, as loud as they can be."""
    target = make_venv(tmp_path / "target", package("alpha", "1.0"))
    at, there = ("--venv", str(source)), ("--venv", str(target))
    lines = {
        "snapshot": ("snapshot", "local", *at, "-vv", "--no-probe"),
        "show --json": ("show", "--json", "--files"),
        "push": ("push", "local", *there, "-y", "-vv", "--no-verify"),
        "status": ("status", "local", *at, "--json"),
        "doctor": ("doctor", "local", *at, "--json"),
    }
    runs = {name: run(*argv, env=OURS) for name, argv in lines.items()}
    assert [name for name, ran in runs.items() if ran.code not in (0, 1)] == [], {name: ran.err for name, ran in runs.items()}
    (server,) = runs["show --json"].json["manifest"]["servers"]
    assert server["argv"][-3:] == ["--api-key", "***", "--admin-api-key=***"] and server["env"]["NCCL_SOCKET_IFNAME"] == "eth7"
    kept = files(quiet_home, target)
    assert any("/log/" in path for path in kept) and any("ledger.jsonl" in path for path in kept), "logs and ledger were looked at"
    assert leaks(streams(runs)) == [] and leaks(kept) == []


@pytest.mark.skipif(not strace_works(), reason="strace can not trace here")
def test_no_process_that_a_push_starts_has_a_secret_in_its_command_line(tmp_path: Path, quiet_home: Path) -> None:
    """Every execve of controller, agent, guardian and probes, with its whole command line."""
    source, target = make_venv(tmp_path / "source", package("alpha", "2.0")), make_venv(tmp_path / "target", package("alpha", "1.0"))
    assert run("snapshot", "-q", "local", "--venv", str(source), env=OURS).code == 0
    log = tmp_path / "execve"
    argv = ["strace", "-f", "-qqq", "-s", "1000000", "-e", "trace=execve", "-o", str(log), *COMMAND]
    done = subprocess.run(
        [*argv, "push", "local", "--venv", str(target), "-y"], env={**os.environ, **OURS}, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    traced = log.read_text(errors="replace")
    assert traced.count("execve(") > 3 and "memfd_create" in traced, "the agents were seen"
    assert leaks({"execve": traced}) == []


@pytest.mark.parametrize("transport", ["openssh", "fabric"])
@pytest.mark.skipif(sshd_binary() is None, reason="no sshd on this machine: install openssh-server")
def test_a_private_key_is_used_and_never_told(tmp_path: Path, quiet_home: Path, transport: str) -> None:
    source = make_venv(tmp_path / "source", package("alpha", "2.0"))
    with loopback_sshd(tmp_path / "sshd", aliases=("ct1",)) as sshd:
        (tmp_path / "ddtree.toml").write_text(f'ssh_config = "{sshd.client_config}"\n[hosts.ct1]\nvenv = "{source}"\n')
        options = ("--transport", transport, "-vv")
        runs = {
            "snapshot": run("snapshot", "ct1", *options, cwd=tmp_path, env=OURS),
            "status": run("status", "ct1", *options, "--json", cwd=tmp_path, env=OURS),
            "no such key": run("status", "ct1", *options, cwd=_elsewhere(tmp_path, sshd), env=OURS),
        }
        body = sshd.identity.read_text().splitlines()[1:-1]
    assert [ran.code for ran in runs.values()] == [0, 0, 10], {name: ran.err for name, ran in runs.items()}
    assert len(body) >= 3
    assert leaks(streams(runs), (*SECRETS, *body)) == [] and leaks(files(quiet_home), (*SECRETS, *body)) == []


def _elsewhere(tmp_path: Path, sshd: LoopbackSshd) -> Path:
    """Return a directory whose configuration names a key that the server does not take: the error must not quote it."""
    other = tmp_path / "elsewhere"
    other.mkdir()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", other / "key"], check=True)
    (other / "config").write_text(sshd.client_config.read_text().replace(str(sshd.identity), str(other / "key")))
    (other / "ddtree.toml").write_text(f'ssh_config = "{other / "config"}"\n[hosts.ct1]\nvenv = "{tmp_path / "source"}"\n')
    return other


def test_a_bug_of_ours_prints_no_secret(tmp_path: Path, quiet_home: Path) -> None:
    """An internal error, with a traceback (-vv) and its log: no local variable, no environment."""
    venv = make_venv(tmp_path / "venv", package("alpha", "1.0"))
    assert run("snapshot", "-q", "local", "--venv", str(venv), "--no-probe").code == 0
    (record,) = (quiet_home / "ddtree/store/refs").glob("*.json")
    record.write_text(json.dumps({"label": 7}))  # what no version of ours writes
    broken = {flag: run("push", "local", "--venv", str(venv), "-y", flag, env=OURS) for flag in ("-vv", "--json")}
    for ran in broken.values():
        assert ran.code == 1 and "internal error" in ran.err
    assert "Traceback" in broken["-vv"].err
    assert leaks(streams(broken)) == [] and leaks(files(quiet_home)) == []


@pytest.mark.parametrize("argv", [("push", "local", f"--api-key={SERVER_KEY}"), ("status", "--hf-token", SERVER_KEY)], ids=["=", "apart"])
def test_a_flag_in_the_wrong_place_is_named_without_its_value(argv: tuple[str, ...]) -> None:
    ran = run(*argv)
    assert ran.code == 2 and leaks({"out": ran.out, "err": ran.err}) == []


def test_the_key_of_a_launched_server_is_in_its_own_command_line_and_nowhere_else(tmp_path: Path, quiet_home: Path) -> None:
    """`--api-key` on a server's command line is that server's way; what we add to it must not show it once more."""
    venv, port = make_venv(tmp_path / "venv", *stand_in()), str(free_port())
    where = ("local", "--venv", str(venv))
    env = {**OURS, "STAND_IN_KEY": SERVER_KEY}
    argv = ("launch", *where, "--engine", "standalone", "--model", "tiny", "--gpus", "0", "--port", port, "--completions", "1")
    token = ("--env", f"HF_TOKEN={SERVER_TOKEN}", "--env", f"STAND_IN_KEY={SERVER_KEY}")
    try:
        runs = {
            "launch -n": run(*argv, *token, "-n", "--", "--api-key", SERVER_KEY, env=env),
            "launch": run(*argv, *token, "-vv", "--", "--api-key", SERVER_KEY, env=env),
            "status": run("status", *where, "--json", "-vv", env=env),
            "logs": run("logs", *where, "-vv", env=env),
            "snapshot": run("snapshot", *where, "-vv", "--no-probe", env=env),
        }
        showing = {pid: line for pid, line in command_lines().items() if leaks({pid: line})}
        state = json.loads((venv / f".ddtree/servers/{port}/state.json").read_text())
    finally:
        end_launches(venv)
    assert [name for name, ran in runs.items() if ran.code != 0] == [], {name: ran.err for name, ran in runs.items()}
    assert "--api-key '***'" in runs["launch -n"].out or "--api-key ***" in runs["launch -n"].out
    assert leaks(streams(runs)) == []
    assert set(showing) == {str(state["pid"])}, showing
    kept = {path: data for path, data in files(quiet_home, venv).items() if not path.startswith(str(site(venv)))}
    (only,) = {where.rpartition(": ")[0] for where in leaks(kept)}
    assert only == f"{venv}/.ddtree/servers/{port}/launch.json" and Path(only).stat().st_mode & 0o077 == 0


def test_the_seeker_finds_what_it_seeks(tmp_path: Path) -> None:
    """The tests above would pass with a blind seeker."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/log").write_text(f"--api-key {SERVER_KEY}")
    assert leaks(files(tmp_path)) == [f"{tmp_path}/deep/log: {SERVER_KEY}"]
    code = "import sys; print(flush=True); sys.stdin.read()"
    shown = subprocess.Popen([sys.executable, "-c", code, SERVER_KEY], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert shown.stdout
    try:
        shown.stdout.readline()  # in the middle of its exec a process has no command line
        assert SERVER_KEY in command_lines()[str(shown.pid)]
    finally:
        shown.kill()
        shown.communicate()
