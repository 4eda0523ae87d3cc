"""The two machines are what the tests built on them believe: separate, reachable, and gone afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.until import until
from tests.harness.lab import Lab, lab_missing, two_hosts

pytestmark = [pytest.mark.ssh, pytest.mark.skipif(bool(lab_missing()), reason=lab_missing())]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with two_hosts("left", "right", disk_mib=150) as made:
        yield made


def test_machines_have_their_own_files_processes_and_names(lab: Lab) -> None:
    left, right = lab.hosts
    left.run(["sh", "-c", "echo mine > /etc/lab-mark; echo mine > /srv/mark"])
    assert left.path("/srv/mark").read_text() == "mine\n"
    assert not right.path("/etc/lab-mark").exists()
    assert not right.path("/srv/mark").exists()
    assert not Path("/etc/lab-mark").exists()
    assert left.run(["hostname"]).stdout == "left\n"
    sleeper = subprocess.Popen(left.argv(["sleep", "4321"]))
    try:
        until(lambda: "sleep 4321" in [argv for _, argv in left.processes()], "it runs there")
        assert "sleep 4321" not in [argv for _, argv in right.processes()]
    finally:
        for pid, argv in left.processes():
            if argv == "sleep 4321":
                os.kill(pid, signal.SIGKILL)
        sleeper.wait()
    assert left.processes() == []


def test_the_controller_enters_by_alias_and_the_wire_is_counted(lab: Lab) -> None:
    before = lab["right"].received_bytes()
    command = ["ssh", "-F", str(lab.ssh_config), "right", "cat > /srv/upload; hostname; echo $HOME"]
    done = lab.run(command, input="x" * 100_000)
    assert (done.returncode, done.stdout) == (0, "right\n/srv/home\n"), done.stderr
    assert lab["right"].path("/srv/upload").stat().st_size == 100_000
    assert lab["right"].received_bytes() - before > 100_000


def test_the_disk_has_the_size_asked_for(lab: Lab) -> None:
    full = lab["left"].run(["dd", "if=/dev/zero", "of=/srv/fill", "bs=1M", "count=200"], check=False)
    assert full.returncode == 1
    assert "No space left" in full.stderr
    lab["left"].run(["rm", "/srv/fill"])


def test_nothing_is_left_when_the_test_process_is_killed() -> None:
    code = (
        "import sys, time\n"
        "from tests.harness.lab import two_hosts\n"
        "with two_hosts(disk_mib=100) as lab:\n"
        "    print(lab.controller, *(m.first for m in lab.hosts), lab.root, flush=True)\n"
        "    time.sleep(600)\n"
    )
    root = Path(__file__).parents[2]
    child = subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    *pids, folder = child.stdout.readline().split()
    try:
        child.kill()
        child.wait()
        until(lambda: not any(Path(f"/proc/{pid}/root").exists() for pid in pids), "its processes end")
        # The kernel takes the mounts and the loop devices down a moment after the last process.
        losetup = ["losetup", "--list", "--output", "BACK-FILE"]
        until(lambda: folder not in subprocess.run(losetup, capture_output=True, text=True, check=True).stdout, "its disk goes")
    finally:
        child.stdout.close()
        subprocess.run(["rm", "-rf", folder], check=True)
