"""P7: bit flips are caught: in the store, on the wire in both directions, in the staged tree, in the live tree."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from ddtree_deploy import upkeep
from ddtree_deploy.agent import layout
from ddtree_deploy.errors import DeployError, IntegrityFailure
from ddtree_deploy.events import Event, Note, Step
from ddtree_deploy.render.proof_views import check as raise_on_bad_proofs
from ddtree_deploy.snapshot import take
from ddtree_deploy.store import Store
from ddtree_deploy.verify import verify
from tests.faults.harness import EVERYTHING, litter, outcome, report, rest
from tests.fixtures.venvs import BASE_PYTHON, contents, site
from tests.fixtures.world import QUICK, World, local, make_world

pytestmark = pytest.mark.faults


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path / "world", data=300_000)


def flip(path: Path, *, hide: bool = False) -> None:
    """Flip one bit in the middle of a file; with `hide`, put its times back (as a disk that errs would)."""
    info = path.stat()
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    with open(path, "r+b") as file:
        file.write(data)
    path.chmod(info.st_mode & 0o777)
    if hide:
        os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


def wire(tmp_path: Path, where: str, *, once: bool = False, back: bool = False) -> tuple[str, Path]:
    """Return an interpreter whose stdin (or, `back`, stdout) passes through the flipper, and the file that tells of a flip."""
    told = tmp_path / f"flipped-{random.getrandbits(40)}"
    flipper = f"{BASE_PYTHON} -I -S {Path(__file__).with_name('flipper.py')} {where} {told if once else repr('')}"
    run = f'{BASE_PYTHON} "$@"'
    wrapper = tmp_path / f"python-{random.getrandbits(40)}"
    wrapper.write_text(
        "#!/bin/bash\n# only the agent's stream is damaged, not the question for the version\n"
        f'case $4 in *memfd_create*) ;; *) exec {run} ;; esac\n' + (f"{run} | {flipper}\n" if back else f"{flipper} | {run}\n")
    )
    wrapper.chmod(0o755)
    return str(wrapper), told


def payload_pattern(world: World) -> str:
    """Return the first bytes of a large object of the snapshot, as the flipper wants them."""
    return "hex:" + (site(world.source) / "alpha" / "payload.bin").read_bytes()[:16].hex()


def test_a_stored_object_that_rotted_stops_the_push_by_name_and_heals_by_a_new_snapshot(world: World) -> None:
    victim = site(world.source) / "alpha" / "payload.bin"
    digest = contents(site(world.source))["alpha/payload.bin"]
    flip(world.store.path(digest), hide=True)
    _done, error = outcome(world.push)
    assert isinstance(error, IntegrityFailure) and error.exit_code == 14
    assert digest[:12] in error.message and any("alpha/payload.bin" in cause for cause in error.causes), (error.message, error.causes)
    assert world.live() == world.old and litter(world.target) == [name for name in litter(world.target) if "incoming/" in name]
    assert not world.store.path(digest).exists() and len(list(world.store.quarantine.iterdir())) == 1
    assert world.take().new_objects == 1 and victim.exists()
    world.push()
    assert world.live() == world.new


def test_a_snapshot_that_lacks_an_object_is_refused_before_the_host_is_changed(world: World) -> None:
    digest = contents(site(world.source))["beta/m0.py"]
    world.store.path(digest).unlink()
    _done, error = outcome(world.push)
    assert isinstance(error, IntegrityFailure) and "incomplete" in error.message
    assert not world.state.exists()


def test_a_manifest_that_rotted_is_refused(world: World) -> None:
    flip(world.store.snapshots / f"{world.snapshot}.json", hide=True)
    _done, error = outcome(world.push)
    assert isinstance(error, IntegrityFailure) and not world.state.exists()


def test_an_object_damaged_once_on_the_wire_is_sent_again(world: World, tmp_path: Path) -> None:
    python, told = wire(tmp_path, payload_pattern(world), once=True)
    notes: list[str] = []

    def emit(event: Event) -> None:
        if isinstance(event, Note) and event.level == "warn":
            notes.append(event.text)

    world.push(host=world.host(python=python), emit=emit)
    assert told.exists() and any("damaged on the way" in note for note in notes)
    assert world.live() == world.new


def test_an_object_damaged_every_time_ends_the_push(world: World, tmp_path: Path) -> None:
    python, _told = wire(tmp_path, payload_pattern(world))
    _done, error = outcome(lambda: world.push(host=world.host(python=python)))
    assert isinstance(error, IntegrityFailure) and "damaged on the way" in error.message, repr(error)
    assert any("alpha/payload.bin" in cause for cause in error.causes), error.causes
    assert world.live() == world.old
    world.push()
    assert world.live() == world.new


def test_a_snapshot_whose_object_is_damaged_once_on_the_wire_is_whole(world: World, tmp_path: Path) -> None:
    python, told = wire(tmp_path, payload_pattern(world), once=True, back=True)
    store = Store.open(tmp_path / "other")
    taken = take(local(world.source, python=python), store, probe=False)
    assert told.exists() and taken.ref.id == world.snapshot
    assert upkeep.verify(store).bad == () and upkeep.verify(store).missing == ()


def test_no_flipped_bit_anywhere_on_the_wire_makes_a_wrong_tree(world: World, tmp_path: Path) -> None:
    """At any offset, in either direction: the push succeeds with the right tree, or fails and the old one is live."""
    random.seed(7)
    tried = failed = flipped = 0
    for back in (False, True):
        for _ in range(60 if EVERYTHING else 6):
            # The code of the agent goes first on this stream; behind it come our frames.
            offset = random.randrange(90_000 if not back else 0, 430_000 if not back else 9_000)
            python, told = wire(tmp_path, str(offset), once=True, back=back)
            _done, error = outcome(lambda python=python: world.push(host=world.host(python=python)))
            tried, failed, flipped = tried + 1, failed + (error is not None), flipped + told.exists()
            assert error is None or (isinstance(error, DeployError) and error.exit_code != 1), f"{offset} {back}: {error!r} {error.causes}"
            rest(world.target)
            assert world.live() == (world.new if error is None else world.old), f"{offset} {back}: {error!r}"
            if error is None:
                world.rollback(0)
                rest(world.target)
    report("P7 one bit on the wire", tried=tried, flipped=flipped, ended_in_an_error=failed)
    assert flipped


def test_a_staged_file_that_rotted_is_named_before_the_switch(world: World) -> None:
    def emit(event: Event) -> None:
        if isinstance(event, Step) and event.what.startswith("prove"):
            flip(world.state / "generations" / "1" / "site-packages" / "alpha" / "m1.py")

    _done, error = outcome(lambda: world.push(emit=emit))
    assert isinstance(error, IntegrityFailure) and error.exit_code == 14, repr(error)
    assert any("alpha/m1.py" in cause for cause in error.causes)
    assert world.live() == world.old and litter(world.target) == []
    world.push()
    assert world.live() == world.new


def test_a_live_file_that_rotted_is_named_by_verify(world: World) -> None:
    world.push()
    rest(world.target)
    assert verify(world.host(), world.store, levels=("files",)).ok
    flip(world.site / "beta" / "m2.py")
    for deep in (False, True):
        proofs = verify(world.host(), world.store, levels=("files",), deep=deep)
        assert [name.partition(":")[0] for name in proofs.bad_files] == ["beta/m2.py"]
        with pytest.raises(IntegrityFailure) as caught:
            raise_on_bad_proofs("local", proofs)
        assert caught.value.exit_code == 14
        assert any("beta/m2.py" in line for line in (caught.value.message, *caught.value.causes))


def test_a_live_file_that_rotted_without_a_trace_in_its_stat_is_found_by_deep(world: World) -> None:
    """What a disk does by itself moves no time stamp: only reading it again finds it. (Here the index is made to agree.)"""
    world.push()
    rest(world.target)
    path = world.site / "beta" / "m2.py"
    flip(path, hide=True)
    found = layout.locate(os.fspath(world.target))
    index = layout.Index.load(os.path.join(found.directory(1), "index"))
    info = path.stat()
    index.rows["beta/m2.py"] = (*index.rows["beta/m2.py"][:4], info.st_dev, info.st_ino, info.st_mtime_ns, info.st_ctime_ns)
    index.save(os.path.join(found.directory(1), "index"))
    assert verify(world.host(), world.store, levels=("files",)).ok
    assert [name.partition(":")[0] for name in verify(world.host(), world.store, levels=("files",), deep=True).bad_files] == ["beta/m2.py"]


def test_a_kept_generation_that_was_edited_is_not_a_source_of_content(world: World) -> None:
    """Content is reused by hash: a file of an old generation that somebody changed may not come back as the old one."""
    world.push()
    world.rollback(0)
    rest(world.target)
    kept = world.state / "generations" / "1" / "site-packages" / "alpha" / "m1.py"
    flip(kept)
    world.push(options=replace(QUICK, lock_wait=20))
    assert world.live() == world.new
