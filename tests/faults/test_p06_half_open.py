"""P6: a line that drops every frame hangs nobody: the controller gives up, and so does the agent, which frees the host's lock."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddtree_deploy import session as conversation
from ddtree_deploy.agent.layout import locate
from ddtree_deploy.agent.locks import holder
from ddtree_deploy.errors import HostUnreachable
from ddtree_deploy.events import Event, Step
from tests.faults.harness import outcome, rest
from tests.fixtures.venvs import BASE_PYTHON, SITE, contents, make_venv, package
from tests.fixtures.world import BRIEF, QUICK, make_world
from tests.harness.lab import lab_missing, two_hosts

pytestmark = [
    pytest.mark.ssh, pytest.mark.faults, pytest.mark.skipif(bool(lab_missing()), reason=lab_missing()),
]  # fmt: skip

#: An interpreter whose agents have a lease of some seconds (a minute in the product; what happens at its end is the same).
SHORT_LEASE = """#!/bin/sh
case $4 in
*memfd_create*) ;;
*) exec @REAL@ "$@" ;;
esac
code=$(printf '%s' "$4" | sed 's/^main(fd)/import ddtree_deploy.agent.main as m; \\
m.serve.__defaults__ = (*m.serve.__defaults__[:-1], 5.0); main(fd)/')
shift 4
exec @REAL@ -I -S -c "$code" "$@"
"""


def test_a_line_that_drops_everything_ends_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "SILENCE_SECONDS", 5.0)
    monkeypatch.setattr(conversation, "PING_SECONDS", 1.0)
    world = make_world(tmp_path / "world", data=20_000)
    with two_hosts("ct200", disk_mib=400) as lab:
        target = lab["ct200"]
        here = target.path("/srv/venv")
        make_venv(here, package("alpha", "1.0"), package("keep", "1.0"))
        old = contents(here / SITE)
        python = target.path("/srv/python")
        python.write_text(SHORT_LEASE.replace("@REAL@", str(BASE_PYTHON)))
        python.chmod(0o755)
        host = lab.host("ct200", venv="/srv/venv", python="/srv/python")
        held: list[bool] = []

        def emit(event: Event) -> None:
            if isinstance(event, Step) and event.what.startswith("build"):
                held.append(holder(locate(str(here))) is not None)
                target.drop()

        with lab.inside():
            _done, error = outcome(lambda: world.push(host=host, emit=emit, options=BRIEF))
        assert isinstance(error, HostUnreachable) and error.exit_code == 10, repr(error)
        assert held == [True]
        # Nothing comes through, not even a goodbye: the agent ends by itself, and the kernel frees its lock.
        rest(here, 120)
        assert contents(here / SITE) == old
        target.restore()
        with lab.inside():
            assert world.push(host=host, options=QUICK).generation == 1
        assert contents(here / SITE) == {**world.new, **{path: digest for path, digest in old.items() if path.startswith("keep")}}
