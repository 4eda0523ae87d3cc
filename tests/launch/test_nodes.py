"""One server over two machines, each with a kernel namespace of its own and a real sshd, with a stand-in for SGLang."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ddtree_deploy.errors import ServerNotReady, UsageProblem
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.launch import Options, running, stop
from ddtree_deploy.launch.argv import Request
from ddtree_deploy.launch.nodes import launch_all, prepare_all
from tests.fixtures.venvs import make_venv
from tests.harness.lab import Lab, lab_missing, two_hosts
from tests.launch.conftest import stand_in, told

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.ssh, pytest.mark.skipif(bool(lab_missing()), reason=lab_missing())]

SMI = '#!/bin/sh\nfor i in 0 1; do echo "$i, NVIDIA H200, 9.0, 80000, 79000"; done\n'
REQUEST = Request(model="/srv/m", algorithm="none", gpus=2, rendezvous="10.77.0.1:30500", extra=("--mode", "none"))
OPTIONS = Options(wait=120, completions=2, drain=5)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with two_hosts("one", "two", disk_mib=200, ram=True) as lab:
        for name in ("one", "two"):
            machine = lab[name]
            make_venv(machine.path("/srv/venv"), *stand_in())
            machine.path("/srv/m").mkdir()
            (machine.path("/srv/m") / "config.json").write_text(json.dumps({"hidden_size": 64}))
            smi = machine.path("/usr/local/bin/nvidia-smi")
            smi.write_text(SMI)
            smi.chmod(0o755)
        yield lab


@pytest.fixture
def hosts(lab: Lab) -> Iterator[tuple[Host, Host]]:
    with lab.inside():
        yield lab.host("one", venv="/srv/venv"), lab.host("two", venv="/srv/venv")


def test_every_rank_is_started_and_the_first_is_proved(hosts: tuple[Host, Host]) -> None:
    ranks = prepare_all(hosts, REQUEST)
    assert [rank.blocks for rank in ranks] == [(), ()]
    for number, rank in enumerate(ranks):
        words = " ".join(rank.argv)
        assert f"--tp-size 4 --nnodes 2 --node-rank {number} --dist-init-addr 10.77.0.1:30500" in words
    ready = launch_all(ranks, OPTIONS)
    assert ready is not None and ready.completions == 2 and ready.algorithm == "none"
    assert [len(running(host)) for host in hosts] == [1, 1]
    for host in hosts:
        assert stop(host).port_free


def test_a_rank_that_dies_is_named_and_all_are_stopped(hosts: tuple[Host, Host]) -> None:
    first, second = prepare_all(hosts, REQUEST)
    waits = replace(first, command=replace(first.command, env=told(REQUEST, deaf=1).env))
    dies = replace(second, command=replace(second.command, env=told(REQUEST, say="CUDA error: uncorrectable ECC error", exit=1).env))
    with pytest.raises(ServerNotReady, match="two: rank 1 ended: exit status 1") as caught:
        launch_all((waits, dies), OPTIONS)
    assert caught.value.causes[0] == "a GPU is broken or gone"
    assert [running(host) for host in hosts] == [(), ()]


def test_nodes_that_can_not_be_meant(hosts: tuple[Host, Host]) -> None:
    with pytest.raises(UsageProblem, match="named twice"):
        prepare_all((hosts[0], hosts[0]), REQUEST)
    here = Host("local", transport="local", venv="/v")
    with pytest.raises(UsageProblem, match="`local` is no address"):
        prepare_all((here, hosts[1]), replace(REQUEST, rendezvous=""))
