"""Wait on the main thread so that Ctrl-C is noticed.

Python acts on a signal only on the main thread, but the kernel may hand it to another one, such as one that just starts or runs a
program and so looks for pending signals: then nothing wakes a main thread that sleeps on a lock (signal(7), "Signal mask and
pending signals"). It sleeps in short turns here.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import TypeVar

T = TypeVar("T")

TURN_SECONDS = 0.5


def join(thread: threading.Thread) -> None:
    """Wait for the end of a thread."""
    while thread.is_alive():
        thread.join(TURN_SECONDS)


def take(items: queue.SimpleQueue[T], timeout: float) -> T:
    """Take the next item; raises queue.Empty when none came for `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        try:
            return items.get(timeout=max(0.0, min(left, TURN_SECONDS)))
        except queue.Empty:
            if left <= TURN_SECONDS:
                raise
