"""A signal that the kernel handed to another thread is noticed by a main thread that waits."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from ddtree_deploy import waiting
from ddtree_deploy.agent.ahead import ahead


class Came(Exception):
    """The signal's handler ran."""


@pytest.fixture
def elsewhere() -> Iterator[threading.Thread]:
    """A thread that gets the signal itself, once the main one sleeps, and then works on."""

    def handler(_number: int, _frame: object) -> None:
        raise Came

    ended: list[bool] = []
    over, before = threading.Event(), signal.signal(signal.SIGUSR1, handler)

    def work() -> None:
        time.sleep(0.2)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        over.wait(20)
        ended.append(True)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield thread
    assert not ended, "the main thread noticed only after the work"
    over.set()
    thread.join()
    signal.signal(signal.SIGUSR1, before)


WAITS: dict[str, Callable[[threading.Thread], object]] = {
    "a thread's end": waiting.join,
    "an item": lambda _thread: waiting.take(queue.SimpleQueue(), 20.0),
    "a value made ahead": lambda thread: ahead(thread.join)(),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
def test_a_signal_that_another_thread_got_is_noticed(elsewhere: threading.Thread, wait: Callable[[threading.Thread], object]) -> None:
    with pytest.raises(Came):
        wait(elsewhere)


def test_an_item_is_taken_at_once_or_missed_after_the_time_given() -> None:
    items: queue.SimpleQueue[int] = queue.SimpleQueue()
    items.put(1)
    assert waiting.take(items, 0.0) == 1
    with pytest.raises(queue.Empty):
        waiting.take(items, 0.7)
    later = threading.Timer(0.6, items.put, [2])
    later.start()
    assert waiting.take(items, 20.0) == 2
