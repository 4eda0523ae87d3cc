"""What is particular to the system's ssh: the user's configuration is respected, and does not get in the way."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from ddtree_deploy.demo.sshd import LoopbackSshd
from ddtree_deploy.errors import HostUnreachable
from ddtree_deploy.hosts.base import Channel, Host
from ddtree_deploy.hosts.connect import connector
from ddtree_deploy.hosts.ssh_argv import ssh_argv
from tests.hosts.conftest import needs_sshd


@contextlib.contextmanager
def started(host: Host, *argv: str) -> Iterator[Channel]:
    channel = connector(host).start(argv)
    try:
        yield channel
    finally:
        channel.close()


def configured(sshd: LoopbackSshd, folder: Path, *lines: str) -> Host:
    first, _, rest = sshd.client_config.read_text().partition("\n")
    (folder / "config").write_text("\n".join([first, *lines, rest]))
    return Host("ct1", address="ct1", ssh_config=str(folder / "config"))


def test_our_options_come_before_the_host_s_and_the_address_is_no_option() -> None:
    host = Host("x", address="-oProxyCommand=touch /tmp/x", ssh_options=("ServerAliveInterval=5", "Port=9"))
    argv = ssh_argv(host, ["printf", "a b"], "/log")
    options = [word for flag, word in pairwise(argv) if flag == "-o"]
    assert options.index("BatchMode=yes") < options.index("Port=9") < options.index("ServerAliveInterval=15")
    assert "StrictHostKeyChecking=yes" in options
    assert argv[-3:] == ["--", "-oProxyCommand=touch /tmp/x", "printf 'a b'"]
    assert ssh_argv(Host("x", address="me@10.0.0.1:99"), ["true"], "/log")[-2] == "ssh://me@10.0.0.1:99"


@pytest.mark.ssh
@needs_sshd
def test_a_configuration_for_people_does_not_disturb(sshd: LoopbackSshd, tmp_path: Path) -> None:
    lines = ("RequestTTY force", "RemoteCommand bash -l", "LocalForward 1 127.0.0.1:1", "ExitOnForwardFailure yes")
    with started(configured(sshd, tmp_path, *lines, "LogLevel QUIET", "VisualHostKey yes"), "cat") as channel:
        channel.stdin.write(b"\x00\r\n~.")
        assert channel.stdout.read(5) == b"\x00\r\n~."
        channel.stdin.close()
        assert channel.wait(20) == 0
        assert channel.stderr_tail() == ""


@pytest.mark.ssh
@needs_sshd
def test_the_user_s_shared_connection_is_used(sshd: LoopbackSshd, tmp_path: Path) -> None:
    shared = ("ControlMaster auto", f"ControlPath {tmp_path}/mux", "ControlPersist 60")
    host = configured(sshd, tmp_path, *shared)
    logins = sshd.log.read_text().count("Accepted publickey")
    try:
        for status in (0, 7):
            with started(host, "sh", "-c", f"cat; exit {status}") as channel:
                channel.stdin.write(b"x")
                assert channel.stdout.read(1) == b"x"
                channel.stdin.close()
                assert channel.wait(20) == status
        assert sshd.log.read_text().count("Accepted publickey") == logins + 1
        with started(host, "sh", "-c", "echo why >&2; exit 255") as channel:
            assert channel.wait(20) == 255
            problem = channel.failure()
            assert isinstance(problem, HostUnreachable)
            assert "why" in problem.causes
    finally:
        subprocess.run(["ssh", "-F", host.ssh_config, "-O", "exit", "ct1"], check=True, capture_output=True)
