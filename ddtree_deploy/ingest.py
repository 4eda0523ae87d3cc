"""Objects on their way into the store: received beside it, flushed, then named."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path

from ddtree_deploy.agent import durable
from ddtree_deploy.agent.landing import Landing


class Ingest:
    """One batch: a directory below `temporary`, whose objects go to `objects/ab/abcdef...`."""

    def __init__(self, temporary: Path, objects: Path, expected: Mapping[str, int]) -> None:
        self.objects = objects
        self.directory = temporary / f"in-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.directory.mkdir()
        self.landing = Landing(os.fspath(self.directory), dict(expected), 0o444)

    @property
    def bad(self) -> Iterable[str]:
        return tuple(self.landing.bad)

    def commit(self) -> None:
        """Flush everything that arrived, then give it its name."""
        if self.landing.error is not None:
            raise self.landing.error
        names = [path.name for path in self.directory.iterdir() if len(path.name) == 64]
        if not names:
            return
        durable.sync_file_system(os.fspath(self.directory))
        for shard in {name[:2] for name in names}:
            (self.objects / shard).mkdir(exist_ok=True)
        for name in names:
            (self.directory / name).rename(self.objects / name[:2] / name)
        durable.sync_file_system(os.fspath(self.objects))

    def discard(self) -> None:
        for path in list(self.directory.iterdir()):
            path.unlink()
        self.directory.rmdir()
