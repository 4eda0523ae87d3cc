"""One file to a host: the old one or the new one, what its mode becomes, and what is refused. Over the local connector and a hop."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddtree_deploy.agent.failure import Failure
from ddtree_deploy.agent.main import Session as Agent
from ddtree_deploy.agent.single import place
from ddtree_deploy.errors import IntegrityFailure, ProofFailed, UsageProblem
from ddtree_deploy.events import Event, Note
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.put import put
from ddtree_deploy.session import Session
from tests.hops.node import stand_ins

HERE = Host("local", transport="local", python=sys.executable)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def agent() -> Iterator[Agent]:
    null = os.open(os.devnull, os.O_RDWR)
    yield Agent(null, null, False, -1)
    os.close(null)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "serve.py"
    path.write_text("print('hello')\n")
    return path


@pytest.fixture
def there(tmp_path: Path) -> Path:
    folder = tmp_path / "there"
    folder.mkdir()
    return folder


def test_a_new_file_arrives_whole_compiled_and_is_not_sent_twice(source: Path, there: Path) -> None:
    planned = put(HERE, source, f"{there}/serve.py", dry_run=True)
    assert (planned.replaced, planned.already, planned.mode) == (False, False, 0o644)
    assert list(there.iterdir()) == []
    done = put(HERE, source, f"{there}/serve.py")
    assert done.python == sys.executable
    assert (there / "serve.py").read_bytes() == source.read_bytes()
    assert os.listdir(there) == ["serve.py"], "nothing beside it, no bytecode either"
    assert put(HERE, source, f"{there}/serve.py").already


def test_a_replaced_file_keeps_mode_and_owner_unless_another_mode_is_asked_for(source: Path, there: Path) -> None:
    old = there / "serve.py"
    old.write_text("old\n")
    old.chmod(0o640)
    root = os.geteuid() == 0
    if root:
        os.chown(old, 1234, 5678)
    inode = old.stat().st_ino
    assert put(HERE, source, str(old)).replaced
    assert (mode(old), old.stat().st_ino == inode) == (0o640, False), "who had the old file open still reads the old one"
    assert not root or (old.stat().st_uid, old.stat().st_gid) == (1234, 5678)
    assert put(HERE, source, str(old), mode=0o755).mode == mode(old) == 0o755


def test_a_link_stays_a_link_and_its_file_is_replaced(source: Path, there: Path) -> None:
    (there / "real.py").write_text("old\n")
    (there / "link.py").symlink_to("real.py")
    assert put(HERE, source, f"{there}/link.py").path == str(there / "real.py")
    assert (there / "link.py").is_symlink()
    assert (there / "real.py").read_bytes() == source.read_bytes()


def test_python_that_does_not_compile_there_changes_nothing(source: Path, there: Path) -> None:
    before = b"print('old')\n"
    (there / "serve.py").write_bytes(before)
    source.write_text("def broken(:\n")
    with pytest.raises(ProofFailed, match="does not compile by") as problem:
        put(HERE, source, f"{there}/serve.py")
    assert any("SyntaxError" in line for line in problem.value.causes)
    assert ((there / "serve.py").read_bytes(), os.listdir(there)) == (before, ["serve.py"])


def test_a_directory_is_never_replaced(there: Path, agent: Agent) -> None:
    os.mkfifo(there / "pipe")
    directory = "is a directory"
    for path, words in (
        ("", directory), ("/", directory), ("/new/", directory), ("/new/serve.py", "no directory"), ("/pipe", "not an ordinary"),
    ):  # fmt: skip
        for ask in (place.look, place.open_file):
            with pytest.raises(Failure, match=words) as problem:
                ask(agent, {"path": f"{there}{path}", "size": 1}, None)
            assert problem.value.kind == "usage"
    assert os.listdir(there) == ["pipe"]
    with pytest.raises(UsageProblem, match=directory):
        put(HERE, there, f"{there}/x")


def test_a_file_in_a_live_generation_is_put_and_told_as_drift(source: Path, there: Path) -> None:
    tree = there / "venv/.ddtree/generations/3/site-packages"
    tree.mkdir(parents=True)
    (there / "site-packages").symlink_to(tree)
    said: list[Event] = []
    put(HERE, source, f"{there}/site-packages/patch.py", emit=said.append)
    assert [event.text for event in said if isinstance(event, Note) and event.level == "warn"] == [
        f"{tree}/patch.py is part of generation 3: `status` will show it as drift"
    ]


def test_a_cut_or_damaged_file_is_not_renamed_and_leaves_nothing(there: Path) -> None:
    with Session(HERE, writable=True, parts=("single",)) as session:
        session.ask("put-open", path=f"{there}/x", size=10)
        session.ask("put-data", "YWJj")
        with pytest.raises(IntegrityFailure, match="3 of 10 bytes"):
            session.ask("put-commit", digest="0" * 64, mode=0o644, compile=False, python="")
        assert os.listdir(there) == []
        session.ask("put-open", path=f"{there}/x", size=10)
        assert len(os.listdir(there)) == 1
    # The session's end waits for its agent, whose own end takes the partial file away.
    assert os.listdir(there) == []


def test_a_read_only_session_refuses_to_write(there: Path) -> None:
    with Session(HERE, writable=False, parts=("single",)) as session, pytest.raises(UsageProblem, match="read-only"):
        session.ask("put-open", path=f"{there}/x", size=1)


def test_large_and_binary_through_a_hop(tmp_path: Path, there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{stand_ins(tmp_path / 'bin')}:{os.environ['PATH']}")
    data = os.urandom(5_000_000)
    (tmp_path / "weights").write_bytes(data)
    put(Host("c", transport="local", via="pct:200", python=sys.executable), tmp_path / "weights", f"{there}/weights", mode=0o600)
    assert ((there / "weights").read_bytes(), mode(there / "weights")) == (data, 0o600)
