"""The store: objects are what their names say, snapshots are whole, labels and prefixes mean one thing."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ddtree_deploy import upkeep
from ddtree_deploy.agent import frames, objects
from ddtree_deploy.errors import IntegrityFailure, IoProblem, Locked, UsageProblem
from ddtree_deploy.manifest import encode, identity
from ddtree_deploy.models import Manifest
from ddtree_deploy.store import Store
from tests.fixtures.trees import digest, manifest


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path)


def feed(store: Store, content: Mapping[str, bytes], expected: Mapping[str, int] | None = None) -> tuple[str, ...]:
    """Send objects into a store as a host would, over a pipe; `content` maps the promised digest to the bytes that come."""
    with store.ingest(expected or {name: len(data) for name, data in content.items()}) as batch:
        for name, data in content.items():
            reading, writing = os.pipe()
            header = frames.encode({"objects": [[name, len(data)]]}, len(data))
            writer = threading.Thread(target=lambda w=writing, d=header + data: (frames.write_all(w, d), os.close(w)))
            writer.start()
            reader = frames.Reader(frames.from_fd(reading))
            head, _size = reader.header()
            batch.landing.receive(reader, head)
            writer.join()
            os.close(reading)
        return tuple(batch.bad)


def add(store: Store, one: Manifest, label: str = "", texts: tuple[str, ...] = ()) -> str:
    feed(store, {digest(text): text.encode() for text in texts})
    return store.add(one, label).id


def snap(version: str) -> tuple[Manifest, tuple[str, ...]]:
    return manifest(("a", version, {"a/__init__.py": version})), (version, f"a {version}")


def take(store: Store, version: str, label: str = "") -> str:
    one, texts = snap(version)
    return add(store, one, label, texts)


def test_objects_are_named_by_content_read_only_and_private_to_nobody(store: Store) -> None:
    assert feed(store, {digest("x"): b"x"}) == ()
    path = store.path(digest("x"))
    assert path.read_bytes() == b"x"
    assert stat.S_IMODE(path.stat().st_mode) == 0o444
    assert store.read(digest("x")) == b"x"
    assert list(store.temporary.iterdir()) == []


def test_what_is_not_what_it_says_is_not_kept(store: Store) -> None:
    assert feed(store, {digest("x"): b"y", digest("z"): b"z"}) == (digest("x"),)
    assert store.digests() == {digest("z")}


def test_what_nobody_asked_for_ends_the_conversation(store: Store) -> None:
    with pytest.raises(frames.ProtocolError):
        feed(store, {digest("x"): b"x"}, {digest("y"): 1})
    assert store.digests() == set()


def test_what_arrived_before_a_failure_is_kept(store: Store) -> None:
    with pytest.raises(frames.ProtocolError):
        feed(store, {digest("x"): b"x", digest("y"): b"y"}, {digest("x"): 1})
    assert store.digests() == {digest("x")}
    assert list(store.temporary.iterdir()) == []


def test_an_empty_object_and_a_large_one(store: Store) -> None:
    large = os.urandom(objects.SMALL * 3 + 1)
    import hashlib

    name = hashlib.sha256(large).hexdigest()
    assert feed(store, {digest(""): b"", name: large}) == ()
    assert store.read(name) == large and store.read(digest("")) == b""


def test_a_snapshot_needs_all_its_objects(store: Store) -> None:
    one, texts = snap("1")
    with pytest.raises(IntegrityFailure, match="2 objects"):
        store.add(one, "")
    assert store.refs() == []
    assert add(store, one, texts=texts) == identity(encode(one))


def test_an_equal_snapshot_is_the_same_snapshot(store: Store) -> None:
    first = take(store, "1", "good")
    assert take(store, "1") == first
    (ref,) = store.refs()
    assert ref.label == "good"


def test_a_label_moves_to_the_newest_that_claims_it(store: Store) -> None:
    first, second = take(store, "1", "good"), take(store, "2", "good")
    assert {ref.id: ref.label for ref in store.refs()} == {first: "", second: "good"}
    assert store.resolve("good") == second


def test_none_means_the_newest_also_within_one_second(store: Store) -> None:
    for version in "123456":
        newest = take(store, version)
        assert store.resolve(None) == newest
    again = take(store, "2")
    assert store.resolve(None) == again


def test_an_id_a_prefix_and_a_label_are_resolved(store: Store) -> None:
    first, second = take(store, "1", "good"), take(store, "2")
    assert store.resolve(first) == store.resolve(first[:12]) == store.resolve("good") == first
    assert store.resolve(second[:8].upper()) == second


def test_what_is_unknown_or_means_several_says_so(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageProblem, match="no snapshots"):
        store.resolve(None)
    first, second = take(store, "1", "known-good"), take(store, "2")
    with pytest.raises(UsageProblem) as caught:
        store.resolve("known-goo")
    assert "known-good" in caught.value.mend
    with pytest.raises(UsageProblem):
        store.resolve(first[:3])  # too short to mean anything
    twin = replace(store.ref(second), id=first[:10] + "0" * 54)
    monkeypatch.setattr(store, "refs", lambda: [store.ref(first), twin])
    with pytest.raises(UsageProblem, match="means 2 snapshots"):
        store.resolve(first[:8])


def test_a_damaged_object_goes_to_quarantine_and_its_snapshot_is_incomplete(store: Store) -> None:
    name = take(store, "1")
    path = store.path(digest("1"))
    path.chmod(0o644)
    path.write_bytes(b"2")
    with pytest.raises(IntegrityFailure, match=r"damaged.*quarantine"):
        store.read(digest("1"))
    assert not path.exists()
    assert [p.name.split(".")[0] for p in store.quarantine.iterdir()] == [digest("1")]
    assert store.absent(store.manifest(name)) == [digest("1")]
    take(store, "1")  # the object comes again
    assert store.absent(store.manifest(name)) == []


def test_verify_finds_what_a_disk_did(store: Store) -> None:
    name, other = take(store, "1"), take(store, "2")
    damaged = store.path(digest("1"))
    damaged.chmod(0o644)
    damaged.write_bytes(b"?")
    store.path(digest("2")).unlink()
    (store.snapshots / f"{other}.json").chmod(0o644)
    (store.snapshots / f"{other}.json").write_text("{}")
    seen: list[object] = []
    report = upkeep.verify(store, seen.append)
    assert report.bad == (digest("1"),)
    assert set(report.missing) == {(name, digest("1")), (other, "manifest")}
    assert seen


def test_a_manifest_that_is_not_what_its_name_says_is_refused(store: Store) -> None:
    name = take(store, "1")
    path = store.snapshots / f"{name}.json"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b'"a"', b'"b"', 1))
    with pytest.raises(IntegrityFailure):
        store.manifest(name)
    path.unlink()
    with pytest.raises(IntegrityFailure, match="missing"):
        store.manifest(name)


def test_prune_keeps_what_labels_and_the_newest_need(store: Store) -> None:
    labelled, old, new = take(store, "1", "good"), take(store, "2"), take(store, "3")
    planned = upkeep.prune(store, keep=1, dry_run=True)
    assert planned.snapshots == (old,) and planned.objects == 2
    assert len(store.refs()) == 3
    assert upkeep.prune(store, keep=1) == planned
    assert {ref.id for ref in store.refs()} == {labelled, new}
    assert store.absent(store.manifest(labelled)) == store.absent(store.manifest(new)) == []
    assert upkeep.prune(store, keep=1).objects == 0


def test_prune_clears_what_runs_that_died_left(store: Store) -> None:
    name = take(store, "1")
    (store.temporary / "in-1-dead").mkdir()
    (store.temporary / "in-1-dead" / digest("q")).write_bytes(b"q")
    (store.quarantine / f"{digest('q')}.1").write_bytes(b"?")
    (store.snapshots / ".tmp-dead").write_bytes(b"half")
    (store.references / ".tmp-dead").write_bytes(b"half")
    orphan = store.snapshots / ("0" * 64 + ".json")  # a snapshot whose record was never written
    orphan.write_text("{}")
    upkeep.prune(store)
    left = sorted(p.name for d in (store.temporary, store.quarantine, store.snapshots, store.references) for p in d.iterdir())
    assert left == [f"{name}.json", f"{name}.json"]


def test_prune_waits_for_nobody_who_still_pushes(store: Store) -> None:
    with store.lock("push", shared=True):
        with store.lock("snapshot", shared=True):
            pass
        with pytest.raises(Locked, match="cache prune"), store.lock("cache prune", wait=0.2):
            pass


def test_editing_a_file_that_came_from_the_store_does_not_change_the_store(store: Store) -> None:
    take(store, "1")
    assert store.path(digest("1")).stat().st_nlink == 1
    with pytest.raises(PermissionError) if os.geteuid() else pytest.MonkeyPatch.context():
        open(store.path(digest("1")), "r+b").close()


def test_a_store_of_another_format_or_that_can_not_be_made_is_told(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    (store.root / "store.json").write_text('{"format": 2}')
    with pytest.raises(IntegrityFailure, match="format 2"):
        Store.open(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(IoProblem) as caught:
        Store.open(tmp_path / "file")
    assert "DDTREE_HOME" in caught.value.mend


def test_a_disk_error_while_objects_arrive_is_told_by_its_kind(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def failing(path: object, flags: int, *rest: object, **more: object) -> int:
        if digest("x") in str(path):
            raise OSError(errno.EIO, "Input/output error")
        return real(path, flags, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", failing)
    with pytest.raises(IoProblem):
        feed(store, {digest("x"): b"x"})
    monkeypatch.undo()
    assert store.digests() == set() and list(store.temporary.iterdir()) == []
