"""The user's ssh configuration: the same settings with and without an `ssh` program, and a refusal where not."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ddtree_deploy.errors import HostUnreachable, UsageProblem
from ddtree_deploy.hosts.ssh_config import SshSettings, aliases, home, settings

needs_ssh = pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh on this machine: install openssh-client")
TEXT = """
Host gpu
    HostName 10.0.0.{}
    User root
    Port 2222
    HostKeyAlias gpu-seven
    UserKnownHostsFile ~/kh1 /etc/kh2
    GlobalKnownHostsFile /etc/kh3
    IdentityFile /keys/gpu_%h
    IdentitiesOnly yes
    HashKnownHosts yes
    ProxyCommand nc %h %p
Host jumped
    ProxyJump root@one:22,two
"""


@pytest.fixture(params=[pytest.param("ssh", marks=needs_ssh), "paramiko"])
def reader(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration file, read by `ssh -G` or, with no `ssh` on the PATH, by paramiko."""
    if request.param == "paramiko":
        monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    file = tmp_path / "config"
    file.write_text(TEXT.replace("{}", "7"))
    return file


def test_a_host_s_settings(reader: Path) -> None:
    found = settings("gpu", ssh_config=str(reader))
    assert found == SshSettings(
        hostname="10.0.0.7",
        user="root",
        port=2222,
        host_key_alias="gpu-seven",
        user_known_hosts=(f"{home()}/kh1", "/etc/kh2"),
        global_known_hosts=("/etc/kh3",),
        identity_files=("/keys/gpu_10.0.0.7",),
        use_agent=False,
        hash_known_hosts=True,
        proxy_jump=(),
        proxy_command="nc 10.0.0.7 2222",
    )
    assert found.known_names == ("gpu-seven",)
    assert replace(found, host_key_alias="").known_names == ("[10.0.0.7]:2222", "10.0.0.7")


def test_options_win_and_jumps_are_a_list(reader: Path) -> None:
    assert settings("gpu", ssh_config=str(reader), options=("Port=9",)).port == 9
    assert settings("jumped", ssh_config=str(reader)).proxy_jump == ("root@one:22", "two")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("me@gpu", ("me", "10.0.0.7", 2222)),
        ("me@other:99", ("me", "other", 99)),
        ("ssh://me@other:99", ("me", "other", 99)),
        ("other", (None, "other", 22)),
    ],
)
def test_addresses(reader: Path, address: str, expected: tuple[str | None, str, int]) -> None:
    found = settings(address, ssh_config=str(reader))
    assert (found.hostname, found.port) == expected[1:]
    assert expected[0] in (None, found.user)


def test_include_without_ssh_is_refused_with_a_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config"
    file.write_text("Include other\nHost a\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageProblem, match="uses Include") as caught:
        settings("a", ssh_config=str(file))
    assert "OpenSSH client" in caught.value.mend


def test_a_broken_file_without_ssh_is_a_clean_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config"
    file.write_text("Host a\n  nonsense\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostUnreachable, match="nonsense"):
        settings("a", ssh_config=str(file))


@needs_ssh
def test_a_broken_file_is_ssh_s_own_complaint(tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_text("Host a\n  NoSuchKeyword yes\n")
    with pytest.raises(HostUnreachable) as caught:
        settings("a", ssh_config=str(file))
    assert "nosuchkeyword" in caught.value.causes[0].lower()


def test_includes_are_followed_and_loops_end(tmp_path: Path) -> None:
    (tmp_path / "config").write_text(f"Include {tmp_path}/config {tmp_path}/none*\nHost a b?\nHost c # d\n")
    assert aliases(str(tmp_path / "config")) == ["a", "c"]
