"""What effects tell while they work; `render/` turns events into progress bars, lines, or JSON lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the work begins (`what` is a short verb phrase, `host` the name that the user gave)."""

    host: str
    what: str


@dataclass(frozen=True, slots=True)
class Progress:
    """Work moved on: `done` of `total` in `unit` (`bytes`, `files`, `modules`), now at `item`."""

    host: str
    what: str
    done: int
    total: int
    unit: str = "bytes"
    item: str = ""


@dataclass(frozen=True, slots=True)
class Note:
    """Something the user should know; `level` is `info`, `warn`, or `debug` (debug reaches the log and `-vv` only)."""

    host: str
    text: str
    level: str = "info"


Event = Step | Progress | Note
Emit = Callable[[Event], None]


def ignore(_event: Event) -> None:
    """Drop an event (the default listener)."""
