"""What every connector does alike: bytes both ways, ends, statuses, arguments, and explanations."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddtree_deploy.demo.sshd import LoopbackSshd
from ddtree_deploy.errors import DeployError, HostUnreachable, Incompatible, UsageProblem
from ddtree_deploy.hosts.base import Channel, Connector, Host
from ddtree_deploy.hosts.connect import connector
from tests.fixtures.until import until
from tests.hops.node import stand_ins
from tests.hosts.conftest import needs_sshd

ssh = (pytest.mark.ssh, needs_sshd)
# Without root or a container engine: `pct` and `docker` are stand-ins, the real ones are in tests/hops.
HOPS = {"pct": "pct:200", "pct-terminal": "pct:200", "docker": "docker:box"}
PARAMS = [
    "local",
    *(pytest.param(name, marks=pytest.mark.slow) for name in HOPS),
    *(pytest.param(name, marks=ssh) for name in ("openssh", "fabric")),
]
MIB = 1 << 20


@pytest.fixture(params=PARAMS)
def link(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Connector:
    if request.param in HOPS:
        folder = stand_ins(tmp_path_factory.mktemp("node") / "bin", terminal=request.param == "pct-terminal")
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return connector(Host("ct200", transport="local", via=HOPS[request.param], python=sys.executable))
    if request.param == "local":
        return connector(Host("local", transport="local"))
    sshd: LoopbackSshd = request.getfixturevalue("sshd")
    return connector(Host("ct1", transport=request.param, address="ct1", ssh_config=str(sshd.client_config)))


@contextlib.contextmanager
def started(link: Connector, *argv: str) -> Iterator[Channel]:
    channel = link.start(argv)
    try:
        yield channel
    finally:
        channel.close()


def write_all(channel: Channel, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[channel.stdin.write(view) :]


def read_all(channel: Channel) -> bytes:
    return b"".join(iter(lambda: channel.stdout.read(65536), b""))


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-I", "-S", "-c", code)


@pytest.mark.parametrize("status", [0, 42, 255])
def test_exit_status_arrives(link: Connector, status: int) -> None:
    with started(link, "sh", "-c", f"exit {status}") as channel:
        assert channel.wait(20) == status


def test_wait_says_none_while_the_process_runs(link: Connector) -> None:
    with started(link, "cat") as channel:
        assert channel.wait(0.1) is None
        channel.stdin.close()
        assert channel.wait(20) == 0


def test_bytes_are_not_changed_either_way(link: Connector) -> None:
    data = os.urandom(8 * MIB - 300) + bytes(range(256)) + b"\r\n~.\x04\x1a\x00\xff\n~."
    with started(link, "cat") as channel:
        writer = threading.Thread(target=lambda: (write_all(channel, data), channel.stdin.close()))
        writer.start()
        back = read_all(channel)
        writer.join(20)
        assert hashlib.sha256(back).digest() == hashlib.sha256(data).digest()
        assert channel.wait(20) == 0


def test_a_small_write_arrives_without_waiting_for_more(link: Connector) -> None:
    with started(link, "cat") as channel:
        for word in (b"a", b"bc", b"\x00"):
            channel.stdin.write(word)
            assert channel.stdout.read(16) == word


def test_real_descriptors_carry_the_same_stream(link: Connector) -> None:
    with started(link, "cat") as channel:
        if channel.stdin_fd is None or channel.stdout_fd is None:
            assert link.host.transport == "fabric"
            return
        os.write(channel.stdin_fd, b"through the descriptor")
        assert os.read(channel.stdout_fd, 64) == b"through the descriptor"


def test_the_process_sees_the_end_of_its_input(link: Connector) -> None:
    with started(link, *python("import sys; print(len(sys.stdin.buffer.read()))")) as channel:
        write_all(channel, b"x" * 100_000)
        channel.stdin.close()
        assert read_all(channel) == b"100000\n"


def test_arguments_arrive_as_they_are(link: Connector) -> None:
    hard = ["two words", "it's", '"', "a\nb\n", "$HOME `id` $(id)", "*", "~", "", "-n", "\\", "!", "; exit 3", "grün ✓"]
    code = "import os, sys; sys.stdout.write(repr([os.fsencode(a) for a in sys.argv[1:]]))"
    with started(link, *python(code), *hard) as channel:
        assert read_all(channel) == repr([word.encode() for word in hard]).encode()


def test_stderr_is_kept_apart_and_only_its_tail(link: Connector) -> None:
    with started(link, "sh", "-c", "head -c 300000 /dev/zero | tr '\\0' x >&2; echo the end >&2; echo out") as channel:
        assert read_all(channel) == b"out\n"
        assert channel.wait(20) == 0
        tail = channel.stderr_tail()
        assert tail.endswith("xthe end")
        assert len(tail) <= 16 * 1024


def test_both_outputs_flow_while_the_input_is_read(link: Connector) -> None:
    # A naive reader deadlocks here: each of the three pipes is filled far beyond any buffer.
    code = (
        "import sys\n"
        "while data := sys.stdin.buffer.read(65536):\n"
        "    sys.stderr.buffer.write(data)\n"
        "    sys.stdout.buffer.write(data)\n"
    )
    with started(link, *python(code)) as channel:
        writer = threading.Thread(target=lambda: (write_all(channel, b"y" * 3 * MIB), channel.stdin.close()))
        writer.start()
        assert len(read_all(channel)) == 3 * MIB
        writer.join(20)
        assert channel.wait(20) == 0


def test_there_is_no_terminal(link: Connector) -> None:
    with started(link, *python("import os; print([os.isatty(n) for n in range(3)])")) as channel:
        assert read_all(channel) == b"[False, False, False]\n"


def test_close_ends_a_process_that_reads(link: Connector, tmp_path: Path) -> None:
    left = tmp_path / "left"
    with started(link, "sh", "-c", f"cat >/dev/null; echo bye > '{left}'"):
        pass
    until(left.exists, "the process ran on")


def test_close_does_not_hang_on_a_process_that_ignores_its_input(link: Connector) -> None:
    channel = link.start(["sh", "-c", "trap '' TERM HUP; echo $$; exec sleep 600"])
    pid = int(channel.stdout.readline())
    try:
        channel.close()
        if link.host.name == "local":
            until(lambda: not Path(f"/proc/{pid}").exists(), f"{pid} ends")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_close_twice_is_quiet(link: Connector) -> None:
    channel = link.start(["true"])
    channel.close()
    channel.close()


def test_writing_to_a_dead_process_is_an_oserror(link: Connector) -> None:
    with started(link, "true") as channel:
        assert channel.wait(20) == 0
        with pytest.raises((OSError, ValueError)):
            for _ in range(100):
                write_all(channel, b"x" * MIB)


def test_an_early_death_is_explained_with_the_process_own_words(link: Connector) -> None:
    with started(link, "sh", "-c", "echo 'no such module: zlib' >&2; exit 3") as channel:
        assert read_all(channel) == b""
        problem = channel.failure()
    assert isinstance(problem, HostUnreachable)
    assert "exit status 3" in problem.message
    assert link.host.name in problem.message
    assert problem.causes == ("no such module: zlib",)
    assert problem.mend


def test_a_missing_program_is_named(link: Connector) -> None:
    with pytest.raises(Incompatible, match="no-such-python"), started(link, "no-such-python") as channel:
        raise channel.failure()


def test_nothing_is_left_behind_here(link: Connector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for argv in (["true"], ["sh", "-c", "exit 3"], ["cat"]):
        link.start(argv).close()
    assert list(tmp_path.iterdir()) == []
    until(lambda: (len(os.listdir("/proc/self/fd")), threading.active_count()) <= before, "what it opened is closed")


@pytest.mark.ssh
@needs_sshd
@pytest.mark.parametrize("transport", ["openssh", "fabric"])
class TestUnreachable:
    def fail(self, host: Host) -> DeployError:
        try:
            with started(connector(host), "true") as channel:
                assert channel.wait(30) != 0
                return channel.failure()
        except DeployError as problem:
            return problem

    def test_nobody_listens(self, transport: str, sshd: LoopbackSshd) -> None:
        config = str(sshd.client_config)
        problem = self.fail(Host("ct1", transport=transport, address="ct1", ssh_config=config, ssh_options=("Port=1",)))
        assert isinstance(problem, HostUnreachable)
        assert problem.message == "cannot reach `ct1`"
        assert "port 1" in problem.causes[0]

    def test_login_is_refused(self, transport: str, sshd: LoopbackSshd, tmp_path: Path) -> None:
        text = sshd.client_config.read_text().replace(str(sshd.identity), str(tmp_path / "none"))
        (tmp_path / "config").write_text(text)
        problem = self.fail(Host("ct1", transport=transport, address="ct1", ssh_config=str(tmp_path / "config")))
        assert isinstance(problem, HostUnreachable)
        assert problem.message == "`ct1` refuses the login"
        assert any("permission denied" in c.lower() or "authentication" in c.lower() for c in problem.causes)

    def test_the_name_does_not_resolve(self, transport: str, sshd: LoopbackSshd) -> None:
        problem = self.fail(
            Host("x", transport=transport, address="no.such.invalid", ssh_config=str(sshd.client_config))
        )
        assert isinstance(problem, HostUnreachable)
        assert "not known" in problem.causes[0] or "resolve" in problem.causes[0]

    def test_a_proxy_command_that_dies_is_quoted(self, transport: str, sshd: LoopbackSshd, tmp_path: Path) -> None:
        text = sshd.client_config.read_text() + "    ProxyCommand sh -c 'echo no way to %h:%p >&2; exit 1'\n"
        (tmp_path / "config").write_text(text)
        problem = self.fail(Host("ct1", transport=transport, address="ct1", ssh_config=str(tmp_path / "config")))
        assert isinstance(problem, HostUnreachable)
        assert problem.message == "cannot reach `ct1`"
        assert f"no way to 127.0.0.1:{sshd.port}" in problem.causes

    def test_the_connection_dies_while_the_process_runs(self, transport: str, sshd: LoopbackSshd) -> None:
        host = Host("ct1", transport=transport, address="ct1", ssh_config=str(sshd.client_config))
        with started(connector(host), "sh", "-c", "echo $PPID; cat") as channel:
            os.kill(int(channel.stdout.readline()), signal.SIGKILL)
            assert read_all(channel) == b""
            assert channel.wait(20) == 255
            problem = channel.failure()
        assert isinstance(problem, HostUnreachable)
        assert problem.message == "lost the connection to `ct1`"


@pytest.mark.ssh
@needs_sshd
def test_fabric_is_used_where_there_is_no_ssh(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sshd: LoopbackSshd
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    link = connector(Host("ct1", address="ct1", ssh_config=str(sshd.client_config)))
    assert type(link).__name__ == "FabricConnector"
    with started(link, "echo", "hello") as channel:
        assert read_all(channel) == b"hello\n"


def test_unknown_hops_and_transports_are_refused() -> None:
    for host in (Host("a", transport="telnet"), Host("a", via="lxc:7")):
        with pytest.raises(UsageProblem):
            connector(host)
