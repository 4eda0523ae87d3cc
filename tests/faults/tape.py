"""A peer that lies: record what an honest agent answers, then play it back from a thread, changed at one place.

`Recorder` stands in a real connector's place and notes every frame by the id of its request; `Player` is a channel that answers
from such a tape. What is said out of turn, slowly or without end is a `Script` of raw writes.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast

from ddtree_deploy.agent import frames
from ddtree_deploy.boot import BOOT, shipped
from ddtree_deploy.errors import DeployError, HostUnreachable
from ddtree_deploy.hosts.base import Channel, Host


@dataclass
class Frame:
    """One frame of an agent: `value` is the structured payload, `raw` any other."""

    header: dict[str, Any]
    value: Any = None
    raw: bytes = b""

    def encode(self) -> bytes:
        header = {key: field for key, field in self.header.items() if key != "sha256"}
        extra, payload = frames.pack(self.value) if "sha256" in self.header else ({}, self.raw)
        return frames.encode({**header, **extra}, len(payload)) + payload


@dataclass
class Conversation:
    """What one agent said: `hello`, then per request id the operation and the frames that answered it."""

    hello: Frame = field(default_factory=lambda: Frame({}))
    asked: dict[int, str] = field(default_factory=dict)
    answers: dict[int, list[Frame]] = field(default_factory=dict)


def _code_size(argv: Sequence[str]) -> int:
    """Return how many bytes of code come before the first frame: the agent and the parts that its mode names."""
    _mode, *parts = argv[argv.index(BOOT) + 1].split(",")
    return len(shipped(tuple(parts)))


class Recorder:
    """A connector factory: passes everything on and keeps it in `tapes`, one conversation for each session."""

    def __init__(self, real: Callable[[Host], Any]) -> None:
        self.real = real
        self.tapes: list[Conversation] = []

    def __call__(self, host: Host) -> Recorder:
        self.host = host
        return self

    def start(self, argv: Sequence[str]) -> Channel:
        tape = Conversation()
        self.tapes.append(tape)
        return _Tap(self.real(self.host).start(argv), tape, _code_size(argv))


class _Pipes:
    """Two pipes with the controller's ends as a Channel."""

    def __init__(self) -> None:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        self.stdin: BinaryIO = cast(BinaryIO, os.fdopen(ours_out, "wb", buffering=0))
        self.stdout: BinaryIO = cast(BinaryIO, os.fdopen(ours_in, "rb", buffering=0))
        self.stdin_fd: int | None = ours_out
        self.stdout_fd: int | None = ours_in
        self.requests, self.replies = theirs_in, theirs_out
        self.closed = threading.Event()

    def wait(self, timeout: float | None = None) -> int | None:
        return 0 if self.closed.wait(timeout) else None

    def stderr_tail(self) -> str:
        return ""

    def failure(self) -> DeployError:
        return HostUnreachable("the player ended before it said anything")

    def notices(self) -> tuple[str, ...]:
        return ()

    def close(self) -> None:
        """Show the other thread the end, and wait until it has let go of its ends: their numbers must not be reused under it."""
        with contextlib.suppress(OSError):
            self.stdin.close()
        self.closed.set()
        self.thread.join(10)
        with contextlib.suppress(OSError):
            self.stdout.close()

    thread: threading.Thread


def _frames(fd: int) -> Iterator[tuple[dict[str, Any], bytes]]:
    reader = frames.Reader(frames.from_fd(fd))
    with contextlib.suppress(frames.Closed, OSError):
        while True:
            header, size = reader.header()
            yield header, bytes(reader.take(size))


class _Tap(_Pipes):
    """Stand between a session and a real channel."""

    def __init__(self, real: Channel, tape: Conversation, left: int) -> None:
        super().__init__()
        self.real = real
        self.left = left
        self.tape = tape
        self.thread = threading.Thread(target=self._down, daemon=True)
        threading.Thread(target=self._up, daemon=True).start()
        self.thread.start()

    def _up(self) -> None:
        while self.left and (data := os.read(self.requests, min(self.left, 65536))):
            self.left -= len(data)
            self._pass(data)
        for header, payload in _frames(self.requests):
            if "id" in header:
                self.tape.asked[header["id"]] = header["op"]
            self._pass(frames.encode(header, len(payload)) + payload)
        with contextlib.suppress(OSError):
            self.real.stdin.close()
        os.close(self.requests)

    def _pass(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            frames.write_all(cast(int, self.real.stdin_fd), data)

    def _down(self) -> None:
        with contextlib.suppress(OSError):
            for header, payload in _frames(cast(int, self.real.stdout_fd)):
                frame = Frame(header, frames.unpack(header, payload) if "sha256" in header else None, payload)
                if "hello" in header:
                    self.tape.hello = frame
                elif "re" in header and "progress" not in header:
                    self.tape.answers.setdefault(header["re"], []).append(frame)
                frames.write_all(self.replies, frame.encode())
        os.close(self.replies)
        self.real.close()


Script = Callable[["Player", int], None]


class Player(_Pipes):
    """Answer from a tape. `script(player, id)` is called for each request in place of the tape when it is given."""

    def __init__(self, tape: Conversation, script: Script | None, left: int) -> None:
        super().__init__()
        self.left = left
        self.tape = tape
        self.script = script
        self.thread = threading.Thread(target=self._play, daemon=True)
        self.thread.start()

    def say(self, data: bytes) -> None:
        """Write all of it, unless the controller closes: then there may be nobody left who reads. Raises OSError."""
        view = memoryview(data)
        while view:
            if self.closed.is_set():
                raise OSError("the controller has closed")
            if select.select([], [self.replies], [], 0.05)[1]:
                view = view[os.write(self.replies, view[: select.PIPE_BUF]) :]

    def answer(self, number: int) -> None:
        for frame in self.tape.answers.get(number, []):
            self.say(frame.encode())

    def _play(self) -> None:
        try:
            with contextlib.suppress(OSError):
                self._skip_code()
                self.say(self.tape.hello.encode())
                for header, _payload in _frames(self.requests):
                    if "id" not in header:
                        continue
                    (self.script or Player.answer)(self, header["id"])
                    if header["id"] not in self.tape.answers and self.script is None:
                        break
        finally:
            os.close(self.replies)
            os.close(self.requests)

    def _skip_code(self) -> None:
        while self.left and (data := os.read(self.requests, min(self.left, 65536))):
            self.left -= len(data)


class Theatre:
    """A connector factory that plays tapes, one for each session in turn; `script` speaks for the session number `at`."""

    def __init__(self, tapes: Sequence[Conversation], script: Script | None = None, at: int = 0) -> None:
        self.tapes, self.script, self.at = list(tapes), script, at
        self.started = 0

    def __call__(self, _host: Host) -> Theatre:
        return self

    def start(self, argv: Sequence[str]) -> Channel:
        number = self.started
        self.started += 1
        tape = self.tapes[number] if number < len(self.tapes) else Conversation()
        return Player(tape, self.script if number == self.at else None, _code_size(argv))


#: What a lie puts in a value's place.
LIES: tuple[Any, ...] = (
    None, -1, 1 << 70, float("inf"), float("nan"), "", "../../sentinel", "/dev/zero", "\0\x1b[2J", "\udcff", [], {}, [[]], {"": None}, True,
    json.loads("[" * 40 + "]" * 40), "GONE",
)  # fmt: skip


def places(tapes: Sequence[Conversation]) -> list[tuple[int, int, int, tuple[Any, ...]]]:
    """Return every place where a lie fits: (session, request, frame, path). Of a list, its first and its last item."""
    found = []
    for session, tape in enumerate(tapes):
        rows = [(0, 0, tape.hello), *((n, k, frame) for n, said in tape.answers.items() for k, frame in enumerate(said))]
        for number, index, frame in rows:
            found += [(session, number, index, ("header", *path)) for path in _paths(frame.header)]
            if frame.value is not None:
                found += [(session, number, index, ("value", *path)) for path in _paths(frame.value)]
    return found


def _paths(value: Any) -> Iterator[tuple[Any, ...]]:
    yield ()
    if isinstance(value, dict):
        names = list(value)
        for name in names if len(names) < 40 else (names[0], names[-1]):
            yield from ((name, *rest) for rest in _paths(value[name]))
    elif isinstance(value, list):
        for index in sorted({0, len(value) - 1}) if value else ():
            yield from ((index, *rest) for rest in _paths(value[index]))


def with_lie(tapes: Sequence[Conversation], place: tuple[int, int, int, tuple[Any, ...]], lie: Any) -> list[Conversation]:
    """Return the tapes with one value replaced (`GONE`: removed)."""
    session, number, index, path = place
    told = list(tapes)
    told[session] = copy.deepcopy(tapes[session])
    frame = told[session].answers[number][index] if number else told[session].hello
    at: Any = frame.__dict__
    for step in path[:-1]:
        at = at[step]
    if lie == "GONE" and len(path) > 1:
        del at[path[-1]]
    else:
        at[path[-1]] = {} if path == ("header",) and not isinstance(lie, dict) else lie
    return told


def sample(items: Sequence[Any], most: int, seed: int) -> list[Any]:
    return list(items) if len(items) <= most else random.Random(seed).sample(list(items), most)
