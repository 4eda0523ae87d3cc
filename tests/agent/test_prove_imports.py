"""How an import ends, in a staged tree that stands in for the live one, as the user whose imports count."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddtree_deploy.agent import prove
from ddtree_deploy.agent.failure import Failure
from ddtree_deploy.agent.main import Session
from tests.fixtures.until import until

from .conftest import Build, Place, make_place, prove_imports, write_sources

AS_ROOT = os.geteuid() == 0 and os.path.exists("/usr/bin/python3")


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_the_ways_an_import_ends(session: Session, place: Place, build: Build) -> None:
    build(place.root / "segfault.so", "void *PyInit_segfault(void) { *(volatile int *)0 = 1; return 0; }")
    (place.root / "namespace" / "part").mkdir(parents=True)
    (place.root / "namespace" / "part" / "__init__.py").write_text("")
    write_sources(
        place.root,
        good="value = 1\n",
        garbage="import os, sys\nprint('{\"ok\": false}' * 1000)\nos.write(1, b'\\0\\xff')\nsys.stderr.write('no')\n",
        leaves="import os\nos._exit(0)\n",
        quits="import sys\nsys.exit(3)\n",
        raises="def inner():\n    raise RuntimeError('first line\\nsecond line')\n\ninner()\n",
        stops="raise KeyboardInterrupt\n",
        forks="import os\nos.fork()\n",
        closes="import os\nos.closerange(0, 3)\n",
        aborts="import os\nos.abort()\n",
    )
    modules = [
        "segfault",
        "namespace.part",
        "namespace",
        "good",
        "garbage",
        "leaves",
        "quits",
        "raises",
        "stops",
        "forks",
        "closes",
        "aborts",
        "nowhere",
    ]
    proofs = {proof["module"]: proof for proof in prove_imports(session, place, *modules)}

    assert list(proofs) == modules
    assert {name for name, proof in proofs.items() if proof["ok"]} == {
        "namespace.part",
        "namespace",
        "good",
        "garbage",
        "forks",
        "closes",
    }
    assert proofs["segfault"]["signal"] == "SIGSEGV"
    assert "segfault" in proofs["segfault"]["error"].lower() or "SIGSEGV" in proofs["segfault"]["error"]
    assert "Segmentation fault" in proofs["segfault"]["traceback"]
    assert proofs["aborts"]["signal"] == "SIGABRT"
    assert proofs["leaves"]["error"] == "the process ended with status 0 before the import was done"
    assert proofs["quits"]["error"] == "the import called sys.exit(3)"
    assert proofs["raises"]["error"] == "RuntimeError: first line"
    assert "in inner" in proofs["raises"]["traceback"]
    assert proofs["raises"]["traceback"].splitlines()[1].strip().startswith(f'File "{place.root}/raises.py"')
    assert proofs["stops"]["error"].startswith("KeyboardInterrupt")
    assert proofs["nowhere"]["error"] == "ModuleNotFoundError: No module named 'nowhere'"
    assert all(proof["foreign_libraries"] == [] for proof in proofs.values())
    assert set(proofs["good"]) == {"module", "ok", "seconds", "error", "traceback", "signal", "foreign_libraries"}


def test_an_import_that_hangs_is_stopped_with_its_children_and_its_stack_shown(session: Session, place: Place) -> None:
    write_sources(
        place.root,
        hang="import subprocess, time\n"
        f"child = subprocess.Popen(['sleep', '300'])\nopen({str(place.venv / 'pid')!r}, 'w').write(str(child.pid))\n"
        "def waiting_for_ever():\n    time.sleep(300)\n\nwaiting_for_ever()\n",
    )
    (proof,) = prove_imports(session, place, "hang", timeout=1.5)
    assert not proof["ok"]
    assert proof["error"] == "no answer within 1.5 s"
    assert proof["signal"] == ""
    assert "waiting_for_ever" in proof["traceback"]
    until(lambda: not alive(int((place.venv / "pid").read_text())), "the child ends")


def test_what_an_import_leaves_running_does_not_hold_up_the_proof(session: Session, place: Place) -> None:
    write_sources(
        place.root,
        daemon="import subprocess\nchild = subprocess.Popen(['sleep', '300'], close_fds=False)\n"
        f"open({str(place.venv / 'pid')!r}, 'w').write(str(child.pid))\n",
    )
    (proof,) = prove_imports(session, place, "daemon", timeout=60.0)
    assert proof["ok"]
    assert proof["seconds"] < 30
    until(lambda: not alive(int((place.venv / "pid").read_text())), "the child ends")


def test_a_core_file_is_not_left_behind(session: Session, place: Place) -> None:
    write_sources(place.root, core="import os, resource\nassert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)\n")
    assert prove_imports(session, place, "core")[0]["ok"]


def test_the_staged_tree_stands_in_for_the_live_one(session: Session, place: Place) -> None:
    (place.live / "only_live.py").write_text("")
    (place.live / "both.py").write_text("which = 'live'\n")
    (place.root / "both.py").write_text("which = 'staged'\n")
    (place.root / "by_pth").mkdir()
    (place.root / "by_pth" / "reached.py").write_text("")
    (place.root / "paths.pth").write_text("by_pth\nimport os; os.environ['PTH_CODE'] = 'ran'\n")
    write_sources(
        place.root,
        looks="import os, sys, site, sysconfig, both, reached\n"
        "assert both.which == 'staged', both.which\n"
        f"assert sys.prefix == sys.exec_prefix == {str(place.venv)!r}, sys.prefix\n"
        "assert os.environ['PTH_CODE'] == 'ran'\n"
        f"assert {str(place.root)!r} in sys.path and {str(place.live)!r} not in sys.path, sys.path\n"
        "assert '' not in sys.path and os.getcwd() == '/'\n"
        "assert os.environ['EXTRA'] == 'given' and 'DDTREE_HOME' not in os.environ\n"
        "exit, quit, help\n"
        "import io\nassert os.read(0, 1) == b''\n",
    )
    looks, only = prove_imports(session, place, "looks", "only_live", env={"EXTRA": "given"})
    assert looks["ok"], looks["traceback"]
    assert only["error"] == "ModuleNotFoundError: No module named 'only_live'"


def test_the_live_tree_is_proved_the_same_way(session: Session, place: Place) -> None:
    (place.live / "here.py").write_text("")
    proofs = prove.imports(session, place.python, str(place.live), str(place.live), str(place.venv), ["here"])
    assert proofs[0]["ok"]
    assert proofs[0]["foreign_libraries"] == []


def test_staged_proofs_leave_bytecode_and_read_only_ones_leave_nothing(
    session: Session, read_only: Session, place: Place
) -> None:
    write_sources(place.root, mod="x = 1\n")
    assert prove_imports(read_only, place, "mod")[0]["ok"]
    assert [path.name for path in place.root.iterdir()] == ["mod.py"]
    assert prove_imports(session, place, "mod")[0]["ok"]
    assert list((place.root / "__pycache__").glob("mod.*.pyc"))


def test_bytecode_that_can_not_be_written_does_not_fail_the_import(session: Session, place: Place) -> None:
    write_sources(place.root, mod="x = 1\n")
    (place.root / "__pycache__").write_text("a file in the way")
    assert prove_imports(session, place, "mod")[0]["ok"]


def test_system_packages_are_there_only_for_a_venv_that_wants_them(session: Session, tmp_path: Path) -> None:
    base = getattr(sys, "_base_executable", sys.executable)
    place = make_place(tmp_path, base)
    probe_text = "import sys\nassert any(p.startswith(sys.base_prefix) and p.endswith('-packages') for p in sys.path)\n"
    write_sources(place.root, wants=probe_text)
    assert not prove_imports(session, place, "wants")[0]["ok"]
    config = place.venv / "pyvenv.cfg"
    config.write_text(config.read_text().replace("= false", "= true"))
    proof = prove_imports(session, place, "wants")[0]
    assert proof["ok"], proof["traceback"]


def test_an_abort_ends_the_imports(session: Session, place: Place) -> None:
    write_sources(
        place.root,
        hang=f"import os, time\nopen({str(place.venv / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(300)\n",
    )
    threading.Thread(target=lambda: (until((place.venv / "pid").exists, "the import runs"), session.abort()), daemon=True).start()
    with pytest.raises(Failure, match="stopped"):
        prove_imports(session, place, "hang", timeout=120.0)
    assert not alive(int((place.venv / "pid").read_text() or "0"))


def test_an_import_does_not_outlive_an_agent_that_is_killed(place: Place) -> None:
    pid_file = place.venv / "pid"
    write_sources(
        place.root, hang=f"import os, time\nopen({str(pid_file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(300)\n"
    )
    arguments = (place.python, str(place.root), str(place.live), str(place.venv))
    code = (
        "import os\nfrom ddtree_deploy.agent import prove\nfrom ddtree_deploy.agent.main import Session\n"
        "null = os.open(os.devnull, os.O_RDWR)\n"
        f"prove.imports(Session(null, null, False, -1), *{arguments!r}, ['hang'])\n"
    )
    agent = subprocess.Popen([sys.executable, "-c", code])
    try:
        until(lambda: pid_file.exists() and pid_file.read_text() != "", "the import runs")
        child = int(pid_file.read_text())
        agent.send_signal(signal.SIGKILL)
        until(lambda: not alive(child), "the import ends")
    finally:
        agent.kill()
        agent.wait()


@pytest.fixture
def open_place() -> Iterator[Place]:
    """A venv that every user of this machine can reach, of the system's interpreter."""
    base = Path(tempfile.mkdtemp(prefix="ddtree-test-"))
    base.chmod(0o755)
    try:
        yield make_place(base, "/usr/bin/python3")
    finally:
        shutil.rmtree(base)


@pytest.mark.skipif(not AS_ROOT, reason="needs root and /usr/bin/python3")
def test_root_imports_as_the_service_user(session: Session, open_place: Place) -> None:
    nobody = pwd.getpwnam("nobody")
    write_sources(
        open_place.root,
        who="import os\n"
        f"assert (os.getuid(), os.geteuid(), os.getgid()) == ({nobody.pw_uid}, {nobody.pw_uid}, {nobody.pw_gid})\n"
        f"assert 0 not in os.getgroups() and os.environ['HOME'] == {nobody.pw_dir!r}\n",
        private="x = 1\n",
    )
    (open_place.root / "private.py").chmod(0o600)
    who, private = prove_imports(session, open_place, "who", "private", user="nobody")
    assert who["ok"], who["traceback"]
    # The row of the umask: root can import it, and the service can not.
    assert private["error"].startswith("PermissionError")
    assert prove_imports(session, open_place, "private")[0]["ok"]


@pytest.mark.skipif(not AS_ROOT, reason="needs root and /usr/bin/python3")
def test_an_interpreter_that_the_service_user_can_not_reach_is_a_failure(session: Session, open_place: Place) -> None:
    open_place.venv.chmod(0o700)
    with pytest.raises(Failure, match=r"`nobody` can not start the interpreter `.*`: Permission denied"):
        prove_imports(session, open_place, "x", user="nobody")


def test_an_unknown_user_is_a_usage_failure(session: Session, place: Place) -> None:
    with pytest.raises(Failure, match="no user `nosuchuser`"):
        prove_imports(session, place, "x", user="nosuchuser")
