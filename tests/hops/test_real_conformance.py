"""What every connector does alike, of that what a hop can spoil, through ssh and a real container: LXC by `pct exec`, podman."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from ddtree_deploy.hosts.base import Connector
from ddtree_deploy.hosts.connect import connector
from tests.harness.lab import Lab, two_hosts
from tests.hops.containers import lxc_missing, podman_missing, podman_node, proxmox_node
from tests.hosts.test_connector_conformance import (  # noqa: F401  (collected here)
    test_a_missing_program_is_named,
    test_a_small_write_arrives_without_waiting_for_more,
    test_an_early_death_is_explained_with_the_process_own_words,
    test_arguments_arrive_as_they_are,
    test_both_outputs_flow_while_the_input_is_read,
    test_bytes_are_not_changed_either_way,
    test_exit_status_arrives,
    test_stderr_is_kept_apart_and_only_its_tail,
    test_the_process_sees_the_end_of_its_input,
    test_there_is_no_terminal,
)

MISSING = lxc_missing() or podman_missing()
pytestmark = [pytest.mark.slow, pytest.mark.ssh, pytest.mark.skipif(bool(MISSING), reason=MISSING)]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(two_hosts("node", disk_mib=2000))
        stack.enter_context(proxmox_node(lab["node"], 200))
        stack.enter_context(podman_node(lab["node"], "box"))
        yield lab


@pytest.fixture(params=["pct:200", "podman:box"])
def link(request: pytest.FixtureRequest, lab: Lab) -> Iterator[Connector]:
    with lab.inside():
        yield connector(lab.host("node", via=request.param))
