"""One loopback sshd for all connector tests: real sshd, real keys."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ddtree_deploy.demo.sshd import LoopbackSshd, loopback_sshd, sshd_binary

needs_sshd = pytest.mark.skipif(sshd_binary() is None, reason="no sshd on this machine: install openssh-server")


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackSshd]:
    root = tmp_path_factory.mktemp("sshd")
    kinds = ("ed25519", "ecdsa", "rsa")
    with loopback_sshd(root, aliases=("ct1", "ct2"), key_kinds=kinds, environment={"HOME": str(root)}) as server:
        yield server
