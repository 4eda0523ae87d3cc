"""A conversation with the agent on a host: send the code, ask, stream objects either way, notice when the other side is gone."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from ddtree_deploy import answers, waiting
from ddtree_deploy.agent import PROTOCOL, frames, objects
from ddtree_deploy.boot import command, shipped
from ddtree_deploy.errors import BY_KIND, DeployError, HostUnreachable, IntegrityFailure, Interrupted
from ddtree_deploy.events import Emit, Note, Progress, ignore
from ddtree_deploy.hosts.base import Channel, Host
from ddtree_deploy.hosts.connect import connector
from ddtree_deploy.logs import without_secrets

PING_SECONDS = 15.0
SILENCE_SECONDS = 50.0
HELLO_SECONDS = 45.0
#: A host that takes nothing off the line for so long, while it has something to take, is given up.
STALL_SECONDS = 600.0
#: Answers that wait to be looked at. Progress beyond it is dropped; an honest agent has one answer at a time.
MAX_WAITING = 64

_MEND = "the host, or something between, is not what it was: look at it before you trust it"
_PROGRESS = answers.row(answers.text, answers.number, answers.number, answers.text, answers.text)
_ERROR = answers.fields(
    {"mend": answers.maybe(answers.text), "causes": answers.maybe(answers.each(answers.text))}, kind=answers.text, message=answers.text
)


class Reply(NamedTuple):
    """An answer: its header fields, and the structured value that came with it (None: nothing)."""

    fields: dict[str, Any]
    value: Any


class Sink(Protocol):
    """Where objects from the host go (`ingest.Ingest.landing`)."""

    def receive(self, reader: frames.Reader, header: dict[str, Any]) -> None: ...


class Session:
    """Hold one agent. Use as a context manager; `writable` decides whether the agent accepts requests that change the host."""

    def __init__(self, host: Host, *, writable: bool, emit: Emit = ignore, parts: tuple[str, ...] = ()) -> None:
        self.host = host
        self.parts = parts
        self.emit = emit
        self.writable = writable
        self.sink: Sink | None = None
        self.hello: dict[str, Any] = {}
        self._replies: queue.SimpleQueue[tuple[dict[str, Any], bytes] | Exception] = queue.SimpleQueue()
        self._number = 0
        self._write_lock = threading.Lock()
        self._pulse = frames.Pulse()
        self._open = [0]  # the request that may be answered; one for all copies of a session
        self._sending = False
        self._moved = time.monotonic()  # when a write got further
        self._closed = threading.Event()
        self._greeted = False
        self._channel = self._start()
        threading.Thread(target=self._read_loop, daemon=True, name=f"read {host.name}").start()
        threading.Thread(target=self._ping_loop, daemon=True, name=f"ping {host.name}").start()

    def _start(self) -> Channel:
        argv = command(self.host, ",".join(["rw" if self.writable else "ro", *self.parts]))
        channel = connector(self.host).start(argv)
        self._channel = channel
        try:
            self._write(shipped(self.parts))  # made while the connection is
        except OSError:
            pass  # the connection failed; greet() says why
        return channel

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None) -> None:
        if kind is not None and issubclass(kind, (KeyboardInterrupt, Interrupted)):
            self.cancel()
        self.close()

    def close(self) -> None:
        """End the conversation; the agent sees the end of its input and leaves."""
        if not self._closed.is_set():
            self._closed.set()
            self._channel.close()

    def cancel(self) -> None:
        """Ask the agent to stop what it does; it answers the request in hand and leaves."""
        try:
            with self._write_lock:
                self._write(frames.encode({"op": "cancel"}))
        except (OSError, ValueError):
            pass

    # the wire

    def _write(self, data: bytes) -> None:
        fd = self._channel.stdin_fd
        view = memoryview(data)
        self._moved = time.monotonic()
        while view:
            view = view[(os.write(fd, view) if fd is not None else self._channel.stdin.write(view)) or 0 :]
            self._moved = time.monotonic()

    def _read_loop(self) -> None:
        fd = self._channel.stdout_fd
        raw: Callable[[memoryview], int] = (
            frames.from_fd(fd) if fd is not None else lambda view: self._channel.stdout.readinto(view) or 0  # type: ignore[attr-defined]
        )

        def readinto(view: memoryview) -> int:
            count = raw(view)
            self._pulse.moved(count)
            return count

        reader = frames.Reader(readinto)
        try:
            while True:
                header, _size = reader.header()
                self._pulse.beat()
                if "objects" in header and self.sink is not None:
                    self.sink.receive(reader, header)
                elif "pong" in header:
                    reader.take(0)
                elif "progress" in header:
                    reader.take(0)
                    if self._replies.qsize() < MAX_WAITING:
                        self._replies.put((header, b""))
                elif header.get("re") is None:  # `hello`, or what made the agent leave
                    reader.take(0)
                    self._deliver(header, b"")
                else:
                    # One answer to each request: whatever else comes would only fill the memory.
                    if header["re"] != self._open[0]:
                        raise frames.ProtocolError("an answer that nobody asked for")
                    payload = reader.take()
                    self._open[0] = 0
                    self._deliver(header, payload)
                self._pulse.beat()
        except Exception as error:  # whoever waits for an answer must hear of it
            self._replies.put(error)

    def _deliver(self, header: dict[str, Any], payload: bytes) -> None:
        if self._replies.qsize() > 2 * MAX_WAITING:
            raise frames.ProtocolError("more messages than anybody asked for")
        self._replies.put((header, payload))

    def _ping_loop(self) -> None:
        data = frames.encode({"op": "ping"})
        last = time.monotonic()
        while not self._closed.wait(1.0):
            silent = self._greeted and time.monotonic() - self._pulse.at > SILENCE_SECONDS
            if silent or (self._sending and time.monotonic() - self._moved > STALL_SECONDS):
                # Whatever waits on this channel wakes up with an error.
                self._channel.close()
                return
            if time.monotonic() - last > PING_SECONDS and self._greeted and self._write_lock.acquire(timeout=0.1):
                last = time.monotonic()
                try:
                    self._write(data)
                except (OSError, ValueError):
                    return
                finally:
                    self._write_lock.release()

    def _next(self, timeout: float) -> tuple[dict[str, Any], bytes]:
        try:
            item = waiting.take(self._replies, timeout)
        except queue.Empty:
            raise HostUnreachable(f"`{self.host.name}` does not answer: nothing came for {timeout:.0f} s") from None
        if isinstance(item, frames.ProtocolError):
            raise IntegrityFailure(f"`{self.host.name}` sent something that is not ours: {item}", mend=_MEND) from item
        if isinstance(item, (frames.Closed, OSError, ValueError)):
            raise self._lost() from item
        if isinstance(item, Exception):
            raise item
        return item

    def _lost(self) -> Exception:
        if not self._greeted:
            return self._channel.failure()
        mend = "run the same command again: it resumes"
        if time.monotonic() - self._pulse.at > SILENCE_SECONDS:
            return HostUnreachable(f"`{self.host.name}` went silent for {SILENCE_SECONDS:.0f} s", mend=mend)
        tail = self._channel.stderr_tail()
        causes = tuple(tail.splitlines()[-5:])
        return HostUnreachable(f"the connection to `{self.host.name}` broke", mend=mend, causes=causes)

    # requests

    def greet(self) -> dict[str, Any]:
        """Wait for the agent's first words; raise the connector's own explanation when none come."""
        if not self._greeted:
            header, _payload = self._next(HELLO_SECONDS)
            for text in self._channel.notices():
                self.emit(Note(self.host.name, text, "warn"))
            hello = header.get("hello")
            if not isinstance(hello, dict) or hello.get("protocol") != PROTOCOL:
                raise IntegrityFailure(f"`{self.host.name}` speaks another protocol: {str(header)[:80]!r}", mend=_MEND)
            self.hello = hello
            self._greeted = True
            python, user = self.hello.get("python"), self.hello.get("user")
            self.emit(Note(self.host.name, f"agent runs under python {python} as {user}", "debug"))
        return self.hello

    def ask(
        self, op: str, value: Any = None, meanwhile: Callable[[], None] = lambda: None, /, *, patience: float = 600.0, **fields: Any
    ) -> Reply:
        """Send a request and return its answer; progress goes to `emit`. `meanwhile` is done here while the host works.

        Raises the DeployError that the agent names, HostUnreachable when the line breaks or nothing new is heard for
        `patience` seconds (pings and progress that stands still do not count), IntegrityFailure when a payload is not what its
        digest says, or an answer has not the shape that it must have (`answers`).
        """
        self._number += 1
        number = self._number
        extra, payload = frames.pack(value) if value is not None else ({}, b"")
        self.emit(Note(self.host.name, f"ask {op} {without_secrets(fields)}", "debug"))
        self._open[0] = number
        self._send(frames.encode({"op": op, "id": number, **fields, **extra}, len(payload)) + payload)
        self.greet()  # only now, so that the first request is there when the agent is
        meanwhile()
        last, deadline = None, time.monotonic() + patience
        while True:
            header, body = self._next(max(0.0, deadline - time.monotonic()))
            if "progress" in header:
                if not _PROGRESS(header["progress"]):
                    raise self._misshapen(op)
                what, done, total, unit, item = header["progress"]
                if (what, done) != last:
                    last, deadline = (what, done), time.monotonic() + patience
                self.emit(Progress(self.host.name, what, done, total, unit, item))
                continue
            if header.get("ok") is not True:
                raise self._failure(header.get("error"))
            if header.get("re") == number:
                try:
                    value = frames.unpack(header, body) if "sha256" in header else None
                except frames.ProtocolError as error:
                    raise IntegrityFailure(f"an answer of `{self.host.name}` was damaged: {error}") from error
                if not answers.matches(op, header, value):
                    raise self._misshapen(op)
                return Reply(header, value)

    def _misshapen(self, op: str) -> DeployError:
        return IntegrityFailure(f"`{self.host.name}` answered `{op}` with something else than an answer", mend=_MEND)

    def _send(self, data: bytes) -> None:
        try:
            with self._write_lock:
                self._sending, self._moved = True, time.monotonic()
                self._write(data)
        except (OSError, ValueError) as error:
            raise self._broken() from error
        finally:
            self._sending = False

    def _broken(self) -> Exception:
        # The agent may have said why before it went.
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            try:
                item = self._replies.get(timeout=0.2)
            except queue.Empty:
                continue
            if isinstance(item, Exception):
                break
            if not item[0].get("ok", True):
                return self._failure(item[0].get("error"))
        return self._lost()

    def _failure(self, error: Any) -> DeployError:
        if not _ERROR(error):
            return self._misshapen("a request")
        kind = BY_KIND.get(error["kind"], DeployError)
        return kind(f"{self.host.name}: {error['message']}", mend=error.get("mend") or None, causes=tuple(error.get("causes") or ()))

    def send_objects(
        self,
        items: Sequence[tuple[str, int]],
        open_item: Callable[[Any], int],
        moved: Callable[[int], None],
        packed: Mapping[str, int] | None = None,
    ) -> list[str]:
        """Stream objects to the agent; return the digests whose local file was too short (damaged store).

        `open_item((digest, size))` returns a descriptor, of compressed bytes for a digest in `packed` (its size on the wire).
        `moved(bytes)` is called after each frame with the bytes that it took on the wire.
        """
        short: list[str] = []
        sizes = packed or {}
        for batch in objects.batches(items, sizes):
            if not self._replies.empty():
                self._raise_pending()
            try:
                with self._write_lock:
                    self._sending, self._moved = True, time.monotonic()
                    short += objects.send_batch(batch, {"op": "objects"}, open_item, self._write, self._channel.stdin_fd, sizes)
            except (OSError, ValueError) as error:
                raise self._broken() from error
            finally:
                self._sending = False
            moved(sum(sizes.get(item[0], item[1]) for item in batch))
        return short

    def _raise_pending(self) -> None:
        item = self._replies.get()
        if isinstance(item, Exception):
            raise self._lost() from item
        if not item[0].get("ok", True):
            raise self._failure(item[0].get("error"))
