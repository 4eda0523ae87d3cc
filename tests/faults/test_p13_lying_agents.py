"""P13, from the other side: an agent that lies, stalls, floods or never ends gets an error in bounded time and memory, and no way in.

The honest answers were recorded from a real agent; each case changes one of them, or says something that no agent says.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from ddtree_deploy import answers, session, upkeep
from ddtree_deploy.agent import frames
from ddtree_deploy.boot import BOOT, shipped
from ddtree_deploy.errors import DeployError, HostUnreachable, IntegrityFailure, RestoreUnconfirmed
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.session import Session
from ddtree_deploy.snapshot import take
from ddtree_deploy.store import Store
from tests.faults.harness import EVERYTHING, check_objects, outcome, report
from tests.faults.tape import LIES, Conversation, Player, Recorder, Script, Theatre, places, sample, with_lie
from tests.fixtures.trees import digest
from tests.fixtures.venvs import BASE_PYTHON, make_venv, package
from tests.fixtures.world import QUICK, World, local, make_world

pytestmark = pytest.mark.faults

MOST = int(os.environ.get("DDTREE_LIES", "60"))
HOST = Host("liar", venv="/srv/liar")
#: No confirmation is waited for: what a liar says of it is looked at once.
HASTY = replace(QUICK, confirm_timeout=0.0, verify=True)


@dataclass(frozen=True)
class Stage:
    world: World
    snapshot: list[Conversation]
    push: list[Conversation]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    """Record one snapshot into an empty store, and one push with its confirmation."""
    root = tmp_path_factory.mktemp("liar")
    world = make_world(root / "world", data=300_000)
    recorder = Recorder(session.connector)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "connector", recorder)
        take(local(world.source), Store.open(root / "first"))
        snapshot = list(recorder.tapes)
        world.push(options=replace(HASTY, confirm_timeout=60.0))
    world.store.remembers = False  # each play begins from where the recording began
    return Stage(world, snapshot, recorder.tapes[len(snapshot) :])


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[[Theatre], None]:
    return lambda theatre: monkeypatch.setattr(session, "connector", theatre)


def check_store(store: Store) -> None:
    """Assert that a store can be used on: what it lists can be read, nothing half-done is left, a prune goes through."""
    check_objects(store.objects)
    for ref in store.refs():
        assert store.absent(store.manifest(ref.id)) == []
    assert list(store.temporary.iterdir()) == []
    upkeep.prune(store)


def test_every_honest_answer_has_its_shape(stage: Stage) -> None:
    seen = set()
    for tape in [*stage.snapshot, *stage.push]:
        for number, said in tape.answers.items():
            seen.add(tape.asked[number])
            assert answers.matches(tape.asked[number], said[-1].header, said[-1].value), tape.asked[number]
    assert {"scan", "hash", "fetch", "probe", "begin", "stage", "received", "build", "prove", "commit", "switch", "confirm"} <= seen


def test_the_tapes_play(stage: Stage, play: Any, tmp_path: Path) -> None:
    """Else every lie below would be refused for another reason."""
    play(Theatre(stage.snapshot))
    store = Store.open(tmp_path)
    assert len(take(HOST, store).manifest.files) == 17
    check_store(store)
    play(Theatre(stage.push))
    assert stage.world.push(host=HOST, options=HASTY).generation == 1


def test_a_snapshot_of_a_host_that_lies_leaves_the_store_right(stage: Stage, play: Any, tmp_path: Path) -> None:
    cases = [(place, lie) for place in places(stage.snapshot) for lie in LIES]
    tried = cases if EVERYTHING else sample(cases, MOST, 8)
    sentinel = tmp_path / "sentinel"
    sentinel.write_text("untouched")
    refused = 0
    for number, (place, lie) in enumerate(tried):
        play(Theatre(with_lie(stage.snapshot, place, lie)))
        store = Store.open(tmp_path / f"s{number % 4}")
        store.remembers = False
        before = {ref.id for ref in store.refs()}
        try:
            _done, error = outcome(lambda store=store: take(HOST, store))
        except Exception as bug:
            raise AssertionError(f"{place} = {lie!r}: {type(bug).__name__}: {bug}") from bug
        refused += error is not None
        check_store(store)
        assert error is None or {ref.id for ref in store.refs()} == before
        for ref in store.refs():
            store.forget(ref.id)
        upkeep.prune(store)
        assert sentinel.read_text() == "untouched"
    report("P13 lies to a snapshot", places=len(places(stage.snapshot)), lies=len(LIES), tried=len(tried), refused=refused)
    assert refused > 0


def test_a_push_to_a_host_that_lies_ends_with_an_error_or_as_the_host_says(stage: Stage, play: Any) -> None:
    cases = [(place, lie) for place in places(stage.push) for lie in LIES]
    tried = cases if EVERYTHING else sample(cases, MOST, 9)
    kinds: dict[str, int] = {}
    for place, lie in tried:
        play(Theatre(with_lie(stage.push, place, lie)))
        try:
            done, error = outcome(lambda: stage.world.push(host=HOST, options=HASTY))
        except Exception as bug:
            raise AssertionError(f"{place} = {lie!r}: {type(bug).__name__}: {bug}") from bug
        name = type(error).__name__ if error else "done"
        kinds[name] = kinds.get(name, 0) + 1
        assert done is None or done.host == "liar"
        check_store(stage.world.store)
    report("P13 lies to a push", places=len(places(stage.push)), lies=len(LIES), tried=len(tried), **kinds)
    assert kinds.get("IntegrityFailure", 0) > 0


@pytest.mark.parametrize("op", ["switch", "probe-live"])
def test_an_unreadable_word_about_a_switch_that_was_asked_for_is_18(stage: Stage, play: Any, op: str) -> None:
    """Whether it switched is not known then; to say `integrity` would read as if nothing had happened."""
    number = next(n for n, asked in stage.push[0].asked.items() if asked == op)
    play(Theatre(with_lie(stage.push, (0, number, 0, ("header", "ok")), "perhaps")))
    _done, error = outcome(lambda: stage.world.push(host=HOST, options=HASTY))
    assert isinstance(error, RestoreUnconfirmed) and error.exit_code == 18, repr(error)


# --- what no agent says


def _reply(**fields: Any) -> bytes:
    return frames.encode({"re": 1, "ok": True, **fields})


def _packed(text: bytes) -> bytes:
    payload = zlib.compress(text)
    import hashlib

    return frames.encode({"re": 1, "ok": True, "sha256": hashlib.sha256(payload).hexdigest()}, len(payload)) + payload


#: What is sent in place of the answer to the first request, and then the line is closed.
SAID: dict[str, bytes] = {
    "random": os.urandom(4096),
    "a huge header": struct.pack(">IQ", 1 << 31, 0),
    "a huge payload": frames.encode({"re": 1, "ok": True, "sha256": "0" * 64}, 1 << 62),
    "a header that is a list": struct.pack(">IQ", 2, 0) + b"[]",
    "a header that is deep": struct.pack(">IQ", 100_000, 0) + b"[" * 100_000,
    "a header of many values": struct.pack(">IQ", 1 << 20, 0) + b'{"a":[' + b"0," * ((1 << 19) - 5) + b"0]}",
    "a value that is deep": _packed(b"[" * 100_000),
    "a number of 5000 digits": _packed(b"1" * 5000),
    "infinity": _packed(b"[1e999]"),
    "not a number": _packed(b"[NaN]"),
    "a bomb": _packed(b"[" + b"0," * (1 << 20) + b"0]"),
    "no JSON": _packed(b"nope"),
    "no zlib": frames.encode({"re": 1, "ok": True, "sha256": digest("abc")}, 3) + b"abc",
    "a wrong digest": frames.encode({"re": 1, "ok": True, "sha256": "0" * 64}, 3) + b"abc",
    "another's answer": _reply(re=2),
    "an answer before it is asked for": _reply(re=7) + _reply(),
    "no number": frames.encode({"ok": True}),
    "a text for a number": _reply(re="1"),
    "an empty answer": _reply(),
    "an error that is a text": frames.encode({"re": 1, "ok": False, "error": "no"}),
    "an error without words": frames.encode({"re": 1, "ok": False}),
    "an error of no kind": frames.encode({"re": 1, "ok": False, "error": {"kind": ["x"], "message": 3}}),
    "progress that is none": frames.encode({"re": 1, "progress": 3}),
    "progress with a payload": frames.encode({"re": 1, "progress": ["a", 1, 2, "b", "c"]}, 5) + b"12345",
    "a pong with a payload": frames.encode({"pong": True}, 1 << 40),
    "objects": frames.encode({"re": 1, "objects": [[digest("x"), 1]]}, 1) + b"x",
    "hello again": frames.encode({"hello": {"protocol": 1}}) * 500,
    "a cut in a header": frames.encode({"re": 1, "ok": True})[:-3],
}  # fmt: skip


@pytest.mark.parametrize("case", SAID)
def test_what_no_agent_says_is_an_error(stage: Stage, play: Any, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_VALUES", 1 << 16)

    def script(player: Player, _number: int) -> None:
        player.say(SAID[case])
        raise OSError("the end")

    play(Theatre(stage.snapshot, script))
    with Session(HOST, writable=False) as talk:
        _done, error = outcome(lambda: talk.ask("scan", patience=20.0, venv="x"))
    assert isinstance(error, (IntegrityFailure, HostUnreachable)), repr(error)


def _forever(first: bytes, then: bytes, pause: float) -> Script:
    def script(player: Player, _number: int) -> None:
        player.say(first)
        while not player.closed.wait(pause):
            player.say(then)

    return script


#: Each is said without end. The bounds are a minute and ten minutes; here they are a second.
ENDLESS: dict[str, Script] = {
    "a header, a byte at a time": _forever(struct.pack(">IQ", 1 << 20, 0), b" ", 0.02),
    "a payload, a byte at a time": _forever(frames.encode({"re": 1, "ok": True, "sha256": "0" * 64}, 1 << 20), b"x", 0.02),
    "pongs": _forever(b"", frames.encode({"pong": True}), 0.02),
    "progress that stands still": _forever(b"", frames.encode({"re": 1, "progress": ["hash", 1, 2, "bytes", ""]}), 0.02),
    "answers that nobody asked for": _forever(b"", _reply(re=9), 0.0),
    "silence": _forever(b"", b"", 0.05),
}


@pytest.mark.parametrize("case", ENDLESS)
def test_a_host_that_never_comes_to_an_end_is_given_up(stage: Stage, play: Any, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "SILENCE_SECONDS", 1.0)
    play(Theatre(stage.snapshot, ENDLESS[case]))
    with Session(HOST, writable=False) as talk:
        _done, error = outcome(lambda: talk.ask("scan", patience=1.5, venv="x"))
    assert isinstance(error, (HostUnreachable, IntegrityFailure)), repr(error)


def test_a_host_that_takes_nothing_is_given_up(stage: Stage, play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that it lives, and does not read: the pipe is full, and the write would wait for ever."""
    monkeypatch.setattr(session, "STALL_SECONDS", 1.0)
    staged = next(n for n, asked in stage.push[0].asked.items() if asked == "stage")

    def script(player: Player, number: int) -> None:
        player.answer(number)
        while number == staged and not player.closed.wait(0.02):
            player.say(frames.encode({"pong": True}))

    play(Theatre(stage.push, script))
    _done, error = outcome(lambda: stage.world.push(host=HOST, options=HASTY))
    assert isinstance(error, HostUnreachable), repr(error)


def test_a_host_that_sends_one_object_for_ever_is_stopped(stage: Stage, play: Any, tmp_path: Path) -> None:
    fetched = next(n for n, asked in stage.snapshot[0].asked.items() if asked == "fetch")
    first = stage.snapshot[0].answers[fetched][0]

    def script(player: Player, number: int) -> None:
        if number != fetched:
            player.answer(number)
            return
        while not player.closed.is_set():
            player.say(first.encode())

    play(Theatre(stage.snapshot, script))
    store = Store.open(tmp_path)
    _done, error = outcome(lambda: take(HOST, store))
    assert isinstance(error, IntegrityFailure), repr(error)
    check_store(store)


@pytest.mark.parametrize("how", ["zeros", "too long", "another object", "nothing"])
def test_objects_that_are_not_what_was_promised_do_not_reach_the_store(stage: Stage, play: Any, tmp_path: Path, how: str) -> None:
    tape = stage.snapshot[0]
    fetched = next(n for n, asked in tape.asked.items() if asked == "fetch")

    def script(player: Player, number: int) -> None:
        for frame in tape.answers.get(number, []):
            rows = frame.header.get("objects", [])
            if number != fetched or not rows:
                player.say(frame.encode())
            elif how == "zeros":
                player.say(replace(frame, raw=bytes(len(frame.raw))).encode())
            elif how == "too long":
                player.say(replace(frame, raw=frame.raw + b"x").encode())
            elif how == "another object":
                player.say(frames.encode({"re": number, "objects": [[digest("x"), 1]]}, 1) + b"x")

    play(Theatre(stage.snapshot, script))
    store = Store.open(tmp_path)
    _done, error = outcome(lambda: take(HOST, store))
    assert isinstance(error, DeployError), repr(error)
    assert store.refs() == []
    check_store(store)


def test_a_tree_that_the_host_says_we_know_is_not_read_from_anywhere(stage: Stage, play: Any, tmp_path: Path) -> None:
    """`info.result` names a file of ours; a path in it would have us read what the host likes (`/dev/zero`, say)."""
    scan = next(n for n, asked in stage.push[0].asked.items() if asked == "scan")
    for result in ("/dev/zero", "../../../../etc/passwd", "0" * 64):
        tapes = with_lie(stage.push, (0, scan, 0, ("header", "info", "result")), result)
        del tapes[0].answers[scan][0].value["files"]
        play(Theatre(tapes))
        _done, error = outcome(lambda: stage.world.push(host=HOST, options=HASTY))
        assert isinstance(error, IntegrityFailure), repr(error)


# --- the same from the controller's side: an agent is not held by a byte a minute


@pytest.mark.parametrize("part", ["header", "payload"])
def test_a_controller_that_dribbles_loses_its_lease(tmp_path: Path, part: str) -> None:
    venv = make_venv(tmp_path / "venv", package("alpha", "1.0"))
    boot = BOOT.replace("main(fd)", "main.__globals__['serve'].__defaults__ = (False, -1, 1.0); main(fd)")
    agent = subprocess.Popen(
        [str(BASE_PYTHON), "-I", "-S", "-c", boot, "rw"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert agent.stdin is not None and agent.stdout is not None
    drain = threading.Thread(target=agent.stdout.read, daemon=True)
    drain.start()
    stop = time.monotonic() + 60
    try:
        begin = frames.encode({"op": "begin", "id": 1, "venv": str(venv), "who": "t"})
        slow = struct.pack(">IQ", 1 << 20, 0) if part == "header" else frames.encode({"op": "stage", "id": 2}, 1 << 20)
        agent.stdin.write(shipped() + begin + slow)
        agent.stdin.flush()
        while agent.poll() is None and time.monotonic() < stop:
            try:
                agent.stdin.write(b" ")
                agent.stdin.flush()
            except BrokenPipeError:
                break
            time.sleep(0.05)
        assert agent.wait(30) is not None
        assert not (venv / ".ddtree" / "journal").exists(), "the push that it had begun was not closed"
    finally:
        agent.kill()
        agent.wait()
    assert json.dumps(sorted(p.name for p in venv.iterdir())) == '["bin", "lib", "pyvenv.cfg"]'


@pytest.mark.parametrize("name", [".ddtree", "generations", "incoming"])
def test_a_state_directory_that_is_a_link_is_refused(tmp_path: Path, name: str) -> None:
    """What is below it is cleared at each push; through a link that would be somebody else's."""
    world = make_world(tmp_path / "world", data=1000)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("untouched")
    at = world.state if name == ".ddtree" else world.state / name
    at.parent.mkdir(exist_ok=True)
    at.symlink_to(elsewhere)
    _done, error = outcome(world.push)
    assert isinstance(error, IntegrityFailure) and "is a link" in error.message, repr(error)
    assert [path.name for path in elsewhere.iterdir()] == ["precious"]
    assert world.live() == world.old
