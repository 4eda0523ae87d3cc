"""One push at a time, and a refusal that says who it is."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddtree_deploy.agent import locks
from ddtree_deploy.agent.failure import Failure
from ddtree_deploy.agent.layout import Layout

WHO = {"who": "ann@desk", "what": "push", "snapshot": "s"}


def never() -> bool:
    return False


@pytest.fixture
def found(tmp_path: Path) -> Layout:
    (tmp_path / ".ddtree").mkdir()
    return Layout(str(tmp_path), "lib/python3.12/site-packages")


def _hold(venv: str, ready: multiprocessing.synchronize.Event) -> None:  # type: ignore[name-defined]
    locks.acquire(Layout(venv, "lib/python3.12/site-packages"), WHO, 0, never)
    ready.set()
    signal.pause()


@pytest.fixture
def other(found: Layout) -> Iterator[multiprocessing.Process]:
    """Another process that holds the lock."""
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_hold, args=(found.venv, ready))
    process.start()
    assert ready.wait(60)
    yield process  # type: ignore[misc]
    process.kill()
    process.join()


def test_the_lock_is_free_until_somebody_takes_it(found: Layout) -> None:
    assert locks.holder(found) is None
    fd = locks.acquire(found, WHO, 0, never)
    os.close(fd)
    assert locks.holder(found) is None


def test_a_refusal_names_the_holder(found: Layout, other: multiprocessing.Process) -> None:
    held = locks.holder(found)
    assert held is not None and held["who"] == "ann@desk" and held["pid"] == other.pid and held["since"].endswith("Z")
    with pytest.raises(Failure, match=r"locked by ann@desk \(push, since \d{4}-") as caught:
        locks.acquire(found, WHO, 0.2, never)
    assert caught.value.kind == "locked"


def test_the_kernel_frees_it_with_its_holder(found: Layout, other: multiprocessing.Process) -> None:
    assert other.pid is not None
    os.kill(other.pid, signal.SIGKILL)
    os.close(locks.acquire(found, WHO, 10, never))


def test_waiting_ends_when_the_run_is_cancelled(found: Layout, other: multiprocessing.Process) -> None:
    with pytest.raises(Failure):
        locks.acquire(found, WHO, 3600, lambda: True)


def test_a_lock_file_that_was_removed_with_its_directory_is_not_the_lock(found: Layout) -> None:
    """`release` removes the state directory while it holds the lock; who waited on the old file must not believe it."""
    first = locks.acquire(found, WHO, 0, never)
    os.unlink(found.lock)
    second = locks.acquire(found, WHO, 0, never)
    assert not os.path.samestat(os.fstat(first), os.fstat(second))
    os.close(first)
    os.close(second)
