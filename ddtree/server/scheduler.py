"""The queue and the thread behind the server: bounded waiting, a few requests in turn, cancellation, draining.

One thread owns the engine. It gives each running request one round in turn, so a long answer does not keep a short one
waiting. Results go to a callback, which must not block.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ddtree.server.engine import Engine, Generation, Request, Stats
from ddtree.server.errors import EngineFailed, QueueFull, ServerError, ShuttingDown

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Piece:
    """New text of a request; `finish_reason` is set on its last piece: `stop`, `length`, `cancelled` or `error`."""

    text: str
    tokens: int  # emitted so far
    stats: Stats
    finish_reason: str | None = None
    error: ServerError | None = None


class Job:
    """A request on its way through the scheduler."""

    def __init__(self, request: Request, on_piece: Callable[[Piece], None]) -> None:
        self.request = request
        self.submitted = time.monotonic()
        self.first_token: float | None = None
        self.generation: Generation | None = None
        self._on_piece = on_piece
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Ask for the job to be dropped; takes effect before its next round. May be called from any thread."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def deliver(self, piece: Piece) -> None:
        """Hand a piece to the listener; a job whose listener is gone is cancelled."""
        try:
            self._on_piece(piece)
        except RuntimeError:  # the listener's event loop is gone
            self.cancel()


class Observer:
    """What the scheduler tells about its work; the default listens to nothing."""

    def queued(self, waiting: int, running: int) -> None:
        """The queue changed."""

    def round(self, seconds: float, tokens: int) -> None:
        """A round took so long and emitted so many tokens."""

    def finished(self, job: Job, piece: Piece) -> None:
        """A job gave its last piece."""


class Scheduler:
    """Feed an engine from a bounded queue. Start with `start`, stop with `close`."""

    def __init__(
        self, engine: Engine, *, max_running: int = 4, max_waiting: int = 64, observer: Observer | None = None
    ) -> None:
        self.engine = engine
        self.max_running, self.max_waiting = max_running, max_waiting
        self._observer = observer or Observer()
        self._waiting: deque[Job] = deque()
        self._running: deque[Job] = deque()
        self._wake = threading.Condition()
        self._draining = False
        self._thread = threading.Thread(target=self._loop, name="ddtree-engine", daemon=True)

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread.start()

    @property
    def load(self) -> tuple[int, int]:
        """Return how many jobs wait and how many run."""
        with self._wake:
            return len(self._waiting), len(self._running)

    @property
    def accepting(self) -> bool:
        """Tell whether new work is taken."""
        return not self._draining and self._thread.is_alive()

    def submit(self, request: Request, on_piece: Callable[[Piece], None]) -> Job:
        """Queue a request. Raises QueueFull when too many wait, ShuttingDown once draining began."""
        job = Job(request, on_piece)
        with self._wake:
            if not self.accepting:
                raise ShuttingDown("the server is shutting down")
            # A job that will start at once does not count as waiting.
            if len(self._waiting) >= self.max_waiting + max(0, self.max_running - len(self._running)):
                raise QueueFull(f"{len(self._waiting)} requests are waiting already, try again later")
            self._waiting.append(job)
            self._observer.queued(len(self._waiting), len(self._running))
            self._wake.notify()
        return job

    def drain(self) -> None:
        """Take no new work; what was taken goes on."""
        with self._wake:
            self._draining = True
            self._wake.notify()

    def cancel_all(self) -> bool:
        """Cancel every job; return whether there was any."""
        with self._wake:
            jobs = (*self._waiting, *self._running)
            for job in jobs:
                job.cancel()
            self._wake.notify()
        return bool(jobs)

    def close(self, timeout: float) -> None:
        """Drain, cancel what is not done after `timeout` seconds, and end the thread."""
        self.drain()
        self._thread.join(timeout)
        self.cancel_all()
        self._thread.join(10)

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not (self._waiting or self._running or self._draining):
                    self._wake.wait()
                if self._draining and not (self._waiting or self._running):
                    return
                while self._waiting and len(self._running) < self.max_running:
                    self._running.append(self._waiting.popleft())
                # Those that gave up while waiting need not wait for a place to be told so.
                gone = [job for job in self._waiting if job.cancelled]
                for job in gone:
                    self._waiting.remove(job)
                job = self._running[0]
            for lost in gone:
                self._end(lost, Piece("", 0, Stats(), "cancelled"))
            done = self._advance(job)
            with self._wake:
                self._running.rotate(-1)
                if done:
                    self._running.remove(job)
                self._observer.queued(len(self._waiting), len(self._running))

    def _advance(self, job: Job) -> bool:
        """Give one job one round; return whether it is over."""
        generation = job.generation
        if job.cancelled:
            tokens, stats = (len(generation.tokens), generation.stats) if generation else (0, Stats())
            return self._end(job, Piece("", tokens, stats, "cancelled"))
        begin = time.monotonic()
        try:
            if generation is None:
                generation = job.generation = self.engine.start(job.request)
                job.first_token = time.monotonic()
            else:
                before = len(generation.tokens)
                self.engine.step(generation)
                self._observer.round(time.monotonic() - begin, len(generation.tokens) - before)
        except ServerError as error:
            return self._end(job, Piece("", 0, Stats(), "error", error))
        except Exception as error:  # one request must not end the others
            log.exception("the engine failed on a request of %d tokens", len(job.request.prompt))
            return self._end(job, Piece("", 0, Stats(), "error", EngineFailed(f"the engine failed: {error}")))
        piece = Piece(generation.take_text(), len(generation.tokens), generation.stats, generation.finish_reason)
        if generation.finish_reason is not None:
            return self._end(job, piece)
        if piece.text:
            job.deliver(piece)
        return False

    def _end(self, job: Job, piece: Piece) -> bool:
        job.generation = None  # its cache is the largest thing here
        self._observer.finished(job, piece)
        job.deliver(piece)
        return True
