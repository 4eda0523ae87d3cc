"""Progress of long work: one live line a host on a terminal, a line for each 10 % elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ddtree_deploy.events import Progress
from ddtree_deploy.render.table import CONTROL
from ddtree_deploy.render.words import seconds, size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

QUIET_SECONDS = 1.0


def amount(done: int, total: int, unit: str) -> str:
    """Say how much is done: `1.2 GiB of 4.0 GiB`, `310 of 412 files`."""
    if unit == "bytes":
        return f"{size(done)} of {size(total)}"
    return f"{done} of {total} {unit}"


def rate(done: int, elapsed: float, unit: str) -> str:
    """Say how fast it goes, or nothing while that is not known."""
    if elapsed < 0.5 or not done:
        return ""
    per_second = done / elapsed
    return f"{size(per_second)}/s" if unit == "bytes" else f"{per_second:.0f} {unit}/s"


def remaining(done: int, total: int, elapsed: float) -> str:
    """Say how long the rest takes at the rate so far, or nothing while that is not known."""
    return f"{seconds(elapsed * (total - done) / done)} left" if elapsed >= 1 and 0 < done < total else ""


class Lines:
    """Write a line when another tenth is done, but none for work that is over within a second."""

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._clock = clock
        self._phases: dict[str, tuple[str, int, float]] = {}

    def update(self, event: Progress) -> None:
        now = self._clock()
        what, tenth, spoke = self._phases.get(event.host, ("", 0, now))
        if what != event.what:
            what, tenth, spoke = event.what, 0, now
        reached = 10 * event.done // event.total if event.total else 0
        if reached > tenth and now - spoke >= QUIET_SECONDS:
            self._write(f"{event.host}: {event.what} {10 * reached} % ({amount(event.done, event.total, event.unit)})")
            tenth, spoke = reached, now
        self._phases[event.host] = (what, tenth, spoke)

    def step(self, host: str, what: str) -> None:
        """Nothing: a step alone is no progress (`-v` names the steps)."""

    def stop(self) -> None:
        """Nothing to take away."""


class Bars:
    """Draw one bar a host: what, bar, amount, rate, time left, and the current file; gone when the work is over."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = 24 if console.width >= 100 else 10
        self._bars: RichProgress | None = None
        self._tasks: dict[str, tuple[TaskID, str, float]] = {}

    def _drawn(self) -> RichProgress:
        """Return the bars that are on the screen. After a stop they are new ones: the old would erase what was printed since."""
        if self._bars is None:
            from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

            self._bars = Progress(
                SpinnerColumn("line"),
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=self._bar),
                TextColumn("{task.fields[text]}", markup=False),
                TextColumn("{task.fields[item]}", markup=False, style="dim"),
                console=self._console,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._bars.start()
        return self._bars

    def _task(self, host: str, what: str) -> tuple[TaskID, float]:
        known = self._tasks.get(host)
        if known and known[1] == what:
            return known[0], known[2]
        description, now = f"{host}: {what}".translate(CONTROL), time.monotonic()
        if known:
            task = known[0]
            self._drawn().update(task, description=description, completed=0, total=None, text="", item="")
        else:
            task = self._drawn().add_task(description, total=None, text="", item="")
        self._tasks[host] = (task, what, now)
        return task, now

    def step(self, host: str, what: str) -> None:
        """Show that a step runs whose length is not known yet."""
        self._task(host, what)

    def update(self, event: Progress) -> None:
        task, began = self._task(event.host, event.what)
        elapsed = time.monotonic() - began
        parts = (
            amount(event.done, event.total, event.unit),
            rate(event.done, elapsed, event.unit),
            remaining(event.done, event.total, elapsed),
        )
        text = "  ".join(part for part in parts if part)
        # A line that is longer than the screen is folded by rich, and jumps.
        taken = 2 + len(event.host) + 2 + len(event.what) + 1 + self._bar + 1 + len(text) + 1
        room = min(40, self._console.width - taken)
        item = event.item if len(event.item) <= room else "…" + event.item[1 - room :] if room > 12 else ""
        self._drawn().update(task, completed=event.done, total=event.total or None, text=text, item=item.translate(CONTROL))

    def stop(self) -> None:
        """Take the bars away, so that what is printed next starts on a clean line."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
            self._tasks.clear()
