"""P13: a hostile manifest can't escape: in the store, in the agent's frames, by a race, in any path string; nor can noise."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import threading
import unicodedata
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddtree_deploy.agent import frames, layout, stage
from ddtree_deploy.agent.failure import Failure
from ddtree_deploy.agent.paths import HostilePath
from ddtree_deploy.agent.sources import gather
from ddtree_deploy.boot import BOOT, shipped
from ddtree_deploy.errors import DeployError, IntegrityFailure, NoSpace
from ddtree_deploy.manifest import encode, identity
from ddtree_deploy.models import FileEntry
from ddtree_deploy.session import Session
from ddtree_deploy.store import Store
from tests.faults.harness import EVERYTHING, outcome, report
from tests.fixtures.trees import digest
from tests.fixtures.venvs import BASE_PYTHON, make_venv, package, tree_hash
from tests.fixtures.world import World, local, make_world

A = digest("x")


def row(path: Any, kind: Any = "f", mode: Any = 0o644, size: Any = 1, content: Any = A) -> list[Any]:
    return [path, kind, mode, size, content]


#: Each is a list of rows that no honest snapshot has. What comes before the hostile row is honest.
HOSTILE: dict[str, list[list[Any]]] = {
    "parent": [row("../sentinel")],
    "parent inside": [row("a/../../sentinel")],
    "absolute": [row("/tmp/sentinel")],
    "dot": [row("./a")],
    "empty": [row("")],
    "empty component": [row("a//b")],
    "NUL": [row("a\0b")],
    "newline": [row("a\nb")],
    "escape": [row("a\x1b[2Jb")],
    "backslash": [row("C:\\windows\\x")],
    "a name too long": [row("x" * 256)],
    "a path too long": [row("/".join(["d" * 250] * 17))],
    "no string": [row(7)],
    "link out": [row("l", "l", 0o777, 0, "../../../../sentinel")],
    "absolute link": [row("l", "l", 0o777, 0, "/etc")],
    "link to the parent of the tree": [row("l", "l", 0o777, 0, "..")],
    "link through a name and back": [row("a/l", "l", 0o777, 0, "x/../../..")],
    "file through a link": [row("l", "l", 0o777, 0, "a"), row("l/x")],
    "file through a link, deep": [row("a/l", "l", 0o777, 0, "b"), row("a/l/c/d")],
    "link through a link": [row("l", "l", 0o777, 0, "a"), row("l/m", "l", 0o777, 0, "x")],
    "file below a file": [row("a"), row("a/b")],
    "hard link": [row("h", "h")],
    "character device": [row("c", "c")],
    "block device": [row("b", "b")],
    "fifo": [row("p", "p")],
    "directory": [row("d", "d")],
    "setuid": [row("s", mode=0o4755)],
    "setgid": [row("s", mode=0o2755)],
    "sticky": [row("s", mode=0o1755)],
    "world-writable": [row("s", mode=0o777)],
    "mode as text": [row("s", mode="0644")],
    "twice": [row("a"), row("a")],
    "twice, as file and link": [row("a"), row("a", "l", 0o777, 0, "b")],
    "negative size": [row("a", size=-1)],
    "size as text": [row("a", size="1")],
    "a size of 2^60": [row("a", size=1 << 60)],
    "digest with a path": [row("a", content="../../sentinel")],
    "digest in capitals": [row("a", content=A.upper())],
    "digest too short": [row("a", content=A[:63])],
    "a surrogate": [row("a\udcff/b\0")],
}  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    made = make_world(tmp_path_factory.mktemp("hostile"), data=1000)
    (made.root / "sentinel").write_text("untouched")
    return made


@pytest.fixture
def unchanged(world: World) -> Iterator[None]:
    """Assert that nothing outside the venv's state directory changed, sentinel included."""
    before = tree_hash(world.root / "sentinel", world.target / "lib", world.target / "bin", world.root / "source")
    yield
    assert tree_hash(world.root / "sentinel", world.target / "lib", world.target / "bin", world.root / "source") == before
    assert sorted(p.name for p in world.root.iterdir()) == ["home", "sentinel", "source", "target"]


def plant(store: Store, rows: list[list[Any]], base: Any) -> str:
    """Put a manifest with these rows into a store as a thief of the store would: name and record are right."""
    entries = tuple(FileEntry(*r, "stock", -1) for r in rows)
    data = encode(replace(base, files=entries))
    name = identity(data)
    (store.snapshots / f"{name}.json").write_bytes(data)
    record = {"id": name, "label": "", "host": "h", "venv": "v", "created": "2026", "files": len(rows), "bytes": 1, "patched": 0}
    (store.references / f"{name}.json").write_text(json.dumps(record))
    path = store.path(A)
    path.parent.mkdir(exist_ok=True)
    if not path.exists():
        path.write_bytes(b"x")
    return name


# A file below a file is no way out: the planner drops it, and the agent refuses it (below).
@pytest.mark.parametrize("case", [case for case in HOSTILE if case != "file below a file"])
def test_a_hostile_manifest_in_the_store_is_refused(world: World, unchanged: None, case: str) -> None:
    name = plant(world.store, [row("honest.py"), *HOSTILE[case]], world.store.manifest(world.snapshot))
    try:
        _done, error = outcome(lambda: world.push(name))
        assert isinstance(error, IntegrityFailure) and error.exit_code == 14, repr(error)
        assert error.causes
        assert not world.state.exists()
    finally:
        world.store.forget(name)


def test_hostile_frames_to_the_agent_are_refused(world: World, unchanged: None) -> None:
    refused = 0
    with Session(world.host(), writable=True) as session:
        base = session.ask("scan", venv=str(world.target)).fields["fingerprint"]
        session.ask("begin", venv=str(world.target), who="mallory", what="push")
        for case, rows in HOSTILE.items():
            value = {"files": [row("honest.py"), *rows], "vouch": []}
            _done, error = outcome(lambda value=value: session.ask("stage", value, base=base))
            assert isinstance(error, IntegrityFailure), f"{case}: {error!r}"
            refused += 1
            assert world.live() == world.old, case
    assert not world.state.exists() or not list(world.state.glob("generations/*/site-packages/*"))
    report("P13 hostile rows", cases=len(HOSTILE), ways=2, refused_by_the_agent=refused)


def test_a_claim_of_a_terabyte_is_refused_before_anything_is_written(world: World, unchanged: None) -> None:
    name = plant(world.store, [row("huge", size=1 << 40, content=digest("x"))], world.store.manifest(world.snapshot))
    _done, error = outcome(lambda: world.push(name))
    assert isinstance(error, (NoSpace, IntegrityFailure)), repr(error)
    assert not world.state.exists()
    world.store.forget(name)


def test_a_size_that_is_not_the_object_s_is_refused(world: World, unchanged: None) -> None:
    name = plant(world.store, [row("padded", size=1000)], world.store.manifest(world.snapshot))
    _done, error = outcome(lambda: world.push(name))
    assert isinstance(error, IntegrityFailure), repr(error)
    assert world.live() == world.old
    world.store.forget(name)


def test_a_million_entries_are_checked_in_bounded_memory() -> None:
    rows = [row(f"d{n % 1000}/f{n}") for n in range(1_000_000 if EVERYTHING else 100_000)]
    assert len(stage.parse_result(rows)) == len(rows)
    with pytest.raises(Failure, match="at most"):
        stage.parse_result([None] * (stage.MAX_FILES + 1))


@pytest.mark.faults
def test_twins_that_differ_in_case_or_in_unicode_form_are_two_files_or_refused(tmp_path: Path) -> None:
    """They are honest on this file system; what may not happen is that one silently takes the other's place."""
    made = make_world(tmp_path / "world", data=1000)
    names = ["Twin.py", "twin.py", unicodedata.normalize("NFC", "é.py"), unicodedata.normalize("NFD", "é.py")]
    for number, name in enumerate(names):
        (made.source / "lib").joinpath(*made.site.relative_to(made.target / "lib").parts, name).write_text(f"NUMBER = {number}\n")
    made.push(made.take(allow_drift=True).ref.id)
    assert [(made.site / name).read_text() for name in names] == [f"NUMBER = {n}\n" for n in range(4)]


PATHS = st.lists(st.sampled_from([*"/\\\0\n~ab", ".", "..", "/", "é", "\udcff"]), max_size=8).map("".join) | st.text(max_size=12)


@settings(deadline=None, max_examples=400 if EVERYTHING else 150, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(PATHS, st.sampled_from("fl"), PATHS), max_size=6))
def test_whatever_paths_pass_stay_in_the_tree(drawn: list[tuple[str, str, str]]) -> None:
    rows = [row(path, kind, 0o644, 0, A if kind == "f" else target) for path, kind, target in drawn]
    try:
        accepted = stage.parse_result(rows)
    except (Failure, UnicodeEncodeError):
        return
    links = {path: target for path, kind, _m, _s, target in accepted if kind == "l"}
    for path, *_rest in accepted:
        assert os.path.normpath(os.path.join("/t", path)) == f"/t/{path}"
        assert not any(path.startswith(f"{link}/") for link in links)
    for link, target in links.items():
        where = os.path.normpath(os.path.join("/t", os.path.dirname(link), target))
        assert where == "/t" or where.startswith("/t/")


@pytest.mark.faults
def test_a_directory_swapped_for_a_link_during_staging_leads_nowhere(tmp_path: Path) -> None:
    """An attacker with write access in the tree races the builder; what is built lies in the tree, or the build fails."""
    venv = make_venv(tmp_path / "venv", package("alpha", "1.0"))
    found = layout.locate(os.fspath(venv))
    outside = tmp_path / "outside"
    stop = threading.Event()
    escaped = built = failed = swaps = 0

    class Quiet:
        def aborted(self) -> bool:
            return False

        def progress(self, *_args: object) -> None:
            pass

    os.makedirs(found.incoming)
    Path(found.incoming, A).write_bytes(b"x")
    wanted = sorted((f"d{n % 5}/s/f{n}", "f", 0o644, 1, A) for n in range(300))

    def attack(root: Path) -> None:
        nonlocal swaps
        while not stop.is_set():
            for n in range(5):
                try:
                    os.rename(root / f"d{n}" / "s", root / f"d{n}" / "was")
                    os.symlink(outside, root / f"d{n}" / "s")
                    swaps += 1
                    os.unlink(root / f"d{n}" / "s")
                    os.rename(root / f"d{n}" / "was", root / f"d{n}" / "s")
                except OSError:
                    pass

    for number in range(60 if EVERYTHING else 20):
        outside.mkdir(exist_ok=True)
        root = Path(found.directory(number + 1)) / "site-packages"
        root.parent.mkdir(parents=True)
        stop.clear()
        attacker = threading.Thread(target=attack, args=(root,))
        attacker.start()
        try:
            stage.build(Quiet(), found, str(root), wanted, gather(found, [], []))
            built += 1
        except (OSError, HostilePath, Failure):
            failed += 1
        finally:
            stop.set()
            attacker.join()
        escaped += len(list(outside.iterdir()))
        # Whatever was built, nothing of it is behind a link.
        layout.remove(os.fspath(root.parent))
    report("P13 race for a directory", builds=built + failed, refused=failed, swaps=swaps, escaped=escaped)
    assert escaped == 0 and swaps > 0


# --- noise on the agent's stdin


def _agent(mode: str, data: bytes) -> subprocess.CompletedProcess[bytes]:
    """Start an agent as a controller does and send it raw bytes after its code, then the end."""
    argv = [str(BASE_PYTHON), "-I", "-S", "-c", BOOT, mode]
    return subprocess.run(argv, input=shipped() + data, capture_output=True, timeout=60, check=False)


def _ask(op: str, number: int = 1, value: Any = None, **fields: Any) -> bytes:
    extra, payload = frames.pack(value) if value is not None else ({}, b"")
    return frames.encode({"op": op, "id": number, **fields, **extra}, len(payload)) + payload


@pytest.mark.faults
def test_garbled_and_truncated_frames_write_nothing_and_end_the_agent(tmp_path: Path) -> None:
    venv = make_venv(tmp_path / "venv", package("alpha", "1.0"))
    before = tree_hash(venv)
    honest = _ask("look", venv=str(venv))
    damaged = bytearray(_ask("stage", 2, {"files": []}, base=""))
    damaged[-3] ^= 1
    noise = {
        "random": os.urandom(4096),
        "zeros": bytes(64),
        "text": b"GET / HTTP/1.1\r\n\r\n",
        "huge header": struct.pack(">IQ", 1 << 31, 0),
        "huge payload": frames.encode({"op": "stage", "id": 1}, 1 << 50) + b"x",
        "header is a list": struct.pack(">IQ", 2, 0) + b"[]",
        "deep header": struct.pack(">IQ", 100_000, 0) + b"[" * 100_000,
        "objects without a push": frames.encode({"op": "objects", "objects": [[A, 1]]}, 1) + b"x",
        "objects that do not add up": frames.encode({"op": "objects", "objects": [[A, 5]]}, 1) + b"x",
        "objects with a path": frames.encode({"op": "objects", "objects": [["../x", 1]]}, 1) + b"x",
        "unknown request": _ask("format-disk"),
        "no request": frames.encode({}),
        "a damaged value": bytes(damaged),
        "a value that is no JSON": frames.encode({"op": "stage", "id": 1, "sha256": "0" * 64}, 3) + b"abc",
        "wrong types": _ask("stage", 1, {"files": 3}, base=7) + _ask("begin", 2, venv=[1]) + _ask("hash", 3, {"a": 1}, venv=str(venv)),
        "paths out of the tree": _ask("hash", 1, ["../../pyvenv.cfg", "/etc/shadow"], venv=str(venv)),
        "fetch out of the tree": _ask("fetch", 1, [["../../pyvenv.cfg", A, 10]], venv=str(venv)),
        "cut in the prefix": honest[:5],
        "cut in the header": honest[:20],
        "cut in the payload": _ask("hash", 1, ["alpha/__init__.py"], venv=str(venv))[:-2],
    }  # fmt: skip
    for name, data in noise.items():
        for mode in ("ro", "rw"):
            done = _agent(mode, data)
            assert done.returncode >= 0, f"{name}: killed by {-done.returncode}"
            assert b"Traceback" not in done.stderr, f"{name}: {done.stderr.decode()}"
            assert b"root:x:" not in done.stdout and b"include-system" not in done.stdout, f"{name}: read outside the tree"
            assert tree_hash(venv) == before, f"{name}: wrote something"
    protocol = [name for name in noise if name in ("random", "text", "huge header", "header is a list", "deep header")]
    for name in protocol:
        assert _agent("rw", noise[name]).returncode != 0, name
    report("P13 noise to the agent", cases=len(noise), modes=2)


@pytest.mark.faults
def test_any_truncation_or_flip_of_a_conversation_leaves_the_tree_alone(tmp_path: Path) -> None:
    venv = make_venv(tmp_path / "venv", package("alpha", "1.0"))
    files = tree_hash(venv / "lib", venv / "bin")
    talk = _ask("begin", 1, venv=str(venv), who="t", what="push") + _ask("stage", 2, {"files": [], "vouch": []}, base="")
    talk += _ask("received", 3) + _ask("build", 4) + _ask("commit", 5, {}) + _ask("switch", 6, deadline=1)
    import random

    random.seed(13)
    tries = 200 if EVERYTHING else 16
    for number in range(tries):
        data = bytearray(talk)
        if number % 2:
            data = data[: random.randrange(len(data))]
        else:
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        done = _agent("rw", bytes(data))
        assert done.returncode >= 0 and b"Traceback" not in done.stderr, done.stderr.decode()
        assert tree_hash(venv / "lib", venv / "bin") == files
    report("P13 damaged conversations", tried=tries)


def test_a_read_only_agent_refuses_every_request_that_writes(tmp_path: Path) -> None:
    """(P19) The flag is enforced on the host, whatever the controller asks."""
    from ddtree_deploy.agent import writes

    venv = make_venv(tmp_path / "venv", package("alpha", "1.0"))
    before = tree_hash(venv)
    with Session(local(venv), writable=False) as session:
        for op in writes.HANDLERS:
            fields = {"venv": str(venv), "generation": 0, "tx": "t", "keep": 1, "deadline": 1, "minor": "3.11"}
            _done, error = outcome(lambda op=op, session=session, fields=fields: session.ask(op, **fields))
            assert isinstance(error, DeployError) and "read-only" in error.message, op
    assert tree_hash(venv) == before
