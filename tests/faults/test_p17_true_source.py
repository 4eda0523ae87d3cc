"""P17: a snapshot tells the truth about its source, or refuses it by name."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ddtree_deploy import upkeep
from ddtree_deploy.errors import SourceDrift
from ddtree_deploy.events import Event, Note, Progress, Step
from ddtree_deploy.models import PATCHED, STOCK, UNOWNED
from ddtree_deploy.snapshot import take
from ddtree_deploy.store import Store
from ddtree_deploy.transfer import push
from tests.faults.harness import outcome
from tests.fixtures.venvs import Dist, contents, install, make_venv, package, site
from tests.fixtures.world import QUICK, local, yes


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    return make_venv(tmp_path / "venv", package("alpha", "1.0", data=300_000), package("beta", "1.0"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "home")


def test_every_file_is_there_with_its_origin(venv: Path, store: Store) -> None:
    with open(site(venv) / "alpha" / "m0.py", "a") as file:
        file.write("HAND = True\n")
    (site(venv) / "alpha" / "extra.py").write_text("x = 1\n")
    (site(venv) / "notes.txt").write_text("mine")
    os.symlink("m1.py", site(venv) / "alpha" / "alias.py")
    manifest = take(local(venv), store, probe=False).manifest
    origins = {entry.path: entry.origin for entry in manifest.files}
    assert origins["alpha/m0.py"] == PATCHED
    assert origins["alpha/extra.py"] == origins["notes.txt"] == origins["alpha/alias.py"] == UNOWNED
    assert origins["alpha/m1.py"] == origins["beta/__init__.py"] == STOCK
    assert {entry.path: entry.digest if entry.kind == "f" else f"-> {entry.digest}" for entry in manifest.files} == contents(site(venv))


def test_a_file_changed_while_it_is_sent_is_read_again(venv: Path, store: Store) -> None:
    """After the hash, before its bytes are fetched: the bytes no longer are what was promised."""
    victim = site(venv) / "alpha" / "payload.bin"
    notes: list[str] = []

    def emit(event: Event) -> None:
        if isinstance(event, Step) and event.what.startswith("read") and not notes:
            victim.write_bytes(victim.read_bytes()[::-1])
        if isinstance(event, Note) and event.level == "warn":
            notes.append(event.text)

    taken = take(local(venv), store, probe=False, allow_drift=True, emit=emit)
    assert any("changed while they were read" in note for note in notes)
    assert {e.path: e.digest for e in taken.manifest.files}["alpha/payload.bin"] == contents(site(venv))["alpha/payload.bin"]
    assert upkeep.verify(store).bad == () and store.absent(taken.manifest) == []


@pytest.mark.faults
@pytest.mark.parametrize("change", ["grows", "shrinks", "vanishes"])
def test_a_file_that_changes_its_size_while_it_is_sent_is_noticed(venv: Path, store: Store, change: str) -> None:
    victim = site(venv) / "alpha" / "payload.bin"
    before = contents(site(venv))["alpha/payload.bin"]
    done = []

    def emit(event: Event) -> None:
        if isinstance(event, Step) and event.what.startswith("read") and not done:
            done.append(True)
            if change == "grows":
                victim.write_bytes(victim.read_bytes() + b"more")
            elif change == "shrinks":
                victim.write_bytes(victim.read_bytes()[:-5])
            else:
                victim.unlink()

    taken, error = outcome(lambda: take(local(venv), store, probe=False, emit=emit))
    if error is None:
        held = {e.path: e.digest for e in taken.manifest.files}
        # As it was when it was looked at, or as it is now; nothing in between.
        assert held.get("alpha/payload.bin") in (before, contents(site(venv)).get("alpha/payload.bin"))
    else:
        assert isinstance(error, SourceDrift) and any("alpha/payload.bin" in cause for cause in error.causes)
    assert upkeep.verify(store).bad == ()


@pytest.mark.faults
def test_a_file_that_never_stops_changing_ends_the_snapshot_by_name(venv: Path, store: Store) -> None:
    victim = site(venv) / "alpha" / "payload.bin"
    stop = threading.Event()

    def scribble() -> None:
        number = 0
        with open(victim, "r+b", buffering=0) as file:
            while not stop.is_set():
                number += 1
                os.pwrite(file.fileno(), number.to_bytes(8, "big"), 1000)

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        _done, error = outcome(lambda: take(local(venv), store, probe=False))
    finally:
        stop.set()
        thread.join()
    assert isinstance(error, SourceDrift) and error.exit_code == 20
    assert any("alpha/payload.bin" in text for text in (error.message, *error.causes))
    assert store.refs() == []


def missing(venv: Path) -> None:
    (site(venv) / "alpha" / "m1.py").unlink()


def editable(venv: Path) -> None:
    install(venv, Dist("devel", "0.1", {"__editable__.devel.pth": "/src/devel\n"}, editable="file:///src/devel"))


def outside_path(venv: Path) -> None:
    (site(venv) / "more.pth").write_text("/opt/more\n")


def outside_link(venv: Path) -> None:
    (site(venv) / "tensorrt").symlink_to("/usr/lib/python3/dist-packages")


def fifo(venv: Path) -> None:
    os.mkfifo(site(venv) / "alpha" / "pipe")


def odd_name(venv: Path) -> None:
    (site(venv) / "alpha" / "new\nline.py").write_text("")


@pytest.mark.faults
@pytest.mark.parametrize(
    ("change", "kind", "where"),
    [(missing, "missing", "alpha/m1.py"), (editable, "editable", "devel"), (outside_path, "pth-path", "more.pth"),
     (outside_link, "outside-link", "tensorrt"), (fifo, "special", "alpha/pipe"), (odd_name, "hostile-name", "new")],
)  # fmt: skip
def test_what_is_not_what_it_seems_is_refused_by_name_or_accepted_aloud(
    venv: Path, store: Store, change: Callable[[Path], None], kind: str, where: str
) -> None:
    change(venv)
    _done, error = outcome(lambda: take(local(venv), store, probe=False))
    assert isinstance(error, SourceDrift) and error.exit_code == 20 and "--allow-drift" in error.mend
    assert any(cause.startswith(f"{kind}: ") and where in cause for cause in error.causes), error.causes
    assert store.refs() == []
    taken = take(local(venv), store, probe=False, allow_drift=True)
    assert kind in {finding.kind for finding in taken.manifest.findings}


def test_a_namespace_package_and_a_shared_path_are_told_truly(venv: Path, store: Store) -> None:
    install(venv, Dist("ns-a", "1.0", {"google/a.py": "a = 1\n", "google/shared.py": "s = 1\n"}))
    install(venv, Dist("ns-b", "1.0", {"google/b.py": "b = 1\n", "google/shared.py": "s = 1\n"}))
    manifest = take(local(venv), store, probe=False).manifest
    owners = {e.path: manifest.distributions[e.owner].name for e in manifest.files if e.owner >= 0}
    assert owners["google/a.py"] == "ns-a" and owners["google/b.py"] == "ns-b" and owners["google/shared.py"] in ("ns-a", "ns-b")
    assert [f.kind for f in manifest.findings] == ["two-owners"]
    assert [d.shares for d in manifest.distributions if d.name == "ns-b"] == [("google/shared.py",)]


def test_a_shared_file_travels_with_either_owner_and_stays_for_the_other(venv: Path, store: Store, tmp_path: Path) -> None:
    install(venv, Dist("ns-a", "1.0", {"google/a.py": "a = 1\n", "google/shared.py": "s = 1\n"}))
    install(venv, Dist("ns-b", "1.0", {"google/b.py": "b = 1\n", "google/shared.py": "s = 1\n"}))
    both = take(local(venv), store, probe=False).ref.id
    target = make_venv(tmp_path / "target", package("keep", "1.0", modules=1))
    push(local(target), store, both, replace(QUICK, only=("ns-b",)), approve=yes)
    assert "google/shared.py" in contents(site(target)) and "google/a.py" not in contents(site(target))
    push(local(target), store, both, replace(QUICK, only=("ns-a",)), approve=yes)
    newer = make_venv(tmp_path / "newer", Dist("ns-a", "2.0", {"google/a2.py": ""}))
    push(local(target), store, take(local(newer), store, probe=False).ref.id, replace(QUICK, only=("ns-a",)), approve=yes)
    left = {path for path in contents(site(target)) if path.startswith("google/")}
    assert left == {"google/a2.py", "google/b.py", "google/shared.py"}


def test_a_second_snapshot_of_an_unchanged_source_reads_and_stores_nothing(venv: Path, store: Store) -> None:
    for at, _dirs, files in os.walk(venv):
        for name in files:
            os.utime(os.path.join(at, name), (1_700_000_000, 1_700_000_000), follow_symlinks=False)
    time.sleep(1.2)  # the racily-clean rule: what was touched within the last second is read again
    first = take(local(venv), store, probe=False)
    sent: list[Event] = []
    second = take(local(venv), store, probe=False, emit=sent.append)
    assert second.ref.id == first.ref.id
    assert (second.hashed_files, second.new_objects, second.new_bytes) == (0, 0, 0)
    assert not [event for event in sent if isinstance(event, Progress)]
