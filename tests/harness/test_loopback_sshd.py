"""The sshd that the demo starts: also by an ordinary user, and gone afterwards."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddtree_deploy.demo.sshd import loopback_sshd, sshd_binary
from ddtree_deploy.errors import HostUnreachable
from tests.harness.lab import Lab, lab_missing, two_hosts

TRIAL = """
import os, sys, tempfile
from pathlib import Path
sys.path[:0] = {path!r}
from ddtree_deploy.demo.sshd import loopback_sshd
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.hosts.connect import connector
with tempfile.TemporaryDirectory() as folder, loopback_sshd(Path(folder) / "sshd") as sshd:
    for transport in ("openssh", "fabric"):
        channel = connector(Host("demo", transport, "demo", ssh_config=str(sshd.client_config))).start(["id", "-un"])
        print(transport, channel.stdout.read(100).decode().strip(), channel.wait(20), flush=True)
        channel.close()
print(os.path.exists(f"/proc/{{sshd.pid}}"), os.path.exists(folder))
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with two_hosts("solo", disk_mib=100) as made:
        yield made


@pytest.mark.ssh
@pytest.mark.skipif(bool(lab_missing()), reason=lab_missing())
def test_an_ordinary_user_can_run_it(lab: Lab) -> None:
    # On a machine of its own, because a user must be made for it.
    solo = lab["solo"]
    solo.run(["useradd", "--create-home", "--shell", "/bin/sh", "dev"])
    root = Path(__file__).parents[2]
    ways = {str(p) for place in (sys.base_prefix, sys.prefix, root) for p in Path(place).resolve().parents} - {"/"}
    solo.run(["chmod", "go+x", *ways])
    code = TRIAL.format(path=[str(root), *(p for p in sys.path if p.endswith("site-packages"))])
    argv = ["runuser", "--user", "dev", "--", str(Path(sys.executable).resolve()), "-c", code]
    done = solo.run(argv, env={"HOME": "/home/dev", "PATH": "/usr/sbin:/usr/bin:/bin", "USER": "stale"}, check=False)
    assert done.stdout == "openssh dev 0\nfabric dev 0\nFalse False\n", done.stderr
    assert solo.processes() == []


def test_without_sshd_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddtree_deploy.demo.sshd.sshd_binary", lambda: None)
    with pytest.raises(HostUnreachable, match="no `sshd`") as caught, loopback_sshd(tmp_path):
        pass
    assert "openssh-server" in caught.value.mend


@pytest.mark.ssh
@pytest.mark.skipif(sshd_binary() is None, reason="no sshd on this machine: install openssh-server")
def test_a_start_that_fails_ends_with_sshd_s_own_words(tmp_path: Path) -> None:
    (tmp_path / "host_ed25519").write_text("not a key")
    (tmp_path / "host_ed25519.pub").write_text("ssh-ed25519 AAAA")
    with pytest.raises(HostUnreachable, match="did not start") as caught, loopback_sshd(tmp_path):
        pass
    assert any("host_ed25519" in cause for cause in caught.value.causes)
    found = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False)
    assert found.stdout == ""
