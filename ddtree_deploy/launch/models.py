"""The nouns of a launch: what runs on a host, how a start and a stop ended. Frozen, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: The phases in which nothing of a server runs.
OVER = ("stopped", "failed", "dead")


@dataclass(frozen=True, slots=True)
class Record:
    """A launch that can be repeated on its host: the host keeps the rest (environment, secrets) and builds it anew.

    `argv` and `env` are as shown, without secrets. `name` is the server's name there: its port.
    """

    host: str
    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    algorithm: str = ""
    port: int = 0
    listen: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Server:
    """A server as its host knows it.

    `phase` is `starting`, `serving`, `unresponsive`, `restarting`, `stopping`, `stopped`, `failed` (it ended), `dead` (with its
    supervisor), or `orphaned` (it lives without one). `generation` is the one that it was started from, `stale` whether another
    is live now. `since` is a Unix time. `proved` is what its launch found (`ok`, `algorithm`, `seconds`, `why`), if it got there.
    """

    record: Record
    phase: str
    pid: int | None = None
    processes: int = 0
    since: float | None = None
    restarts: int = 0
    last: Mapping[str, Any] | None = None
    generation: int | None = None
    stale: bool = False
    unit: str = ""
    url: str = ""
    started: str = ""
    who: str = ""
    user: str = ""
    launch: str = ""
    proved: Mapping[str, Any] | None = None

    @property
    def runs(self) -> bool:
        return self.phase not in OVER


@dataclass(frozen=True, slots=True)
class Stopped:
    """How a stop ended. `killed` counts processes that did not end by themselves; `gpus` has `index`, `free`, `before`, `back`.

    `replaced_by` says whose launch took the place of the one that was stopped, and when: port and memory are that one's.
    """

    host: str
    name: str
    was: str
    seconds: float
    killed: int
    left: tuple[int, ...] = ()
    port_free: bool = True
    gpus: tuple[Mapping[str, Any], ...] = ()
    replaced_by: str = ""

    @property
    def memory_back(self) -> bool:
        return all(row["back"] for row in self.gpus)


@dataclass(frozen=True, slots=True)
class Ready:
    """A server that was proved to serve: real completions, and the algorithm that it says is active."""

    server: Server
    algorithm: str
    seconds: float
    completions: int
    slowest: float
    detail: Mapping[str, Any] = field(default_factory=dict)
