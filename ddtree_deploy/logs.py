"""The debug log: every run that does something leaves one file of JSON lines under the state directory."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

KEEP = 50


def state_dir() -> Path:
    """Return where logs lie: `DDTREE_HOME/state`, else the platform's state directory (XDG_STATE_HOME on Linux)."""
    home = os.environ.get("DDTREE_HOME")
    if home:
        return Path(home).expanduser() / "state"
    from platformdirs import user_state_path

    return user_state_path("ddtree-deploy")


def without_secrets(value: Any) -> Any:
    """Return a value as a log may have it: what by its name or its shape is a secret becomes `***` (see `agent.procs`)."""
    from ddtree_deploy.agent import procs

    if isinstance(value, Mapping):
        hide = {name for name, item in value.items() if isinstance(item, str) and procs.is_secret(str(name), item)}
        return {name: procs.HIDDEN if name in hide else without_secrets(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        words = all(isinstance(item, str) for item in value)
        return procs.redact(list(value)) if words else [without_secrets(item) for item in value]
    return procs.scrub(value) if isinstance(value, str) else value


class DebugLog:
    """A log file that comes into being with its first line. A disk that refuses it never stops the command."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._file: TextIO | None = None
        self._broken = False
        self._path: Path | None = None

    @property
    def path(self) -> str:
        """The file's path, or empty while nothing was written."""
        return str(self._path) if self._file else ""

    def write(self, kind: str, **fields: Any) -> None:
        """Append one line: the time (UTC, milliseconds), the kind, and the fields."""
        if self._broken:
            return
        try:
            file = self._file or self._open()
            now = time.time()
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z"
            file.write(json.dumps({"time": stamp, "kind": kind, **fields}, default=str) + "\n")
            file.flush()
        except OSError:
            self._broken = True

    def _open(self) -> TextIO:
        directory = (self._directory or state_dir()) / "log"
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        older = sorted(directory.glob("*.jsonl"))
        for path in older[: max(0, len(older) - KEEP + 1)]:
            path.unlink(missing_ok=True)
        self._path = directory / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}.jsonl"
        self._file = self._path.open("a", encoding="utf-8")
        return self._file

    def close(self) -> None:
        if self._file:
            self._file.close()
