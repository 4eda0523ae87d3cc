"""Feed another host from the live generation here, through the user's own ssh: by digest, from files that still are what was pushed."""

from __future__ import annotations

import os
import select
import shlex
import subprocess

from ddtree_deploy.agent import frames, layout, objects
from ddtree_deploy.agent.failure import Failure
from ddtree_deploy.agent.paths import HostilePath, Tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ddtree_deploy.agent.main import Session

    #: Digest, size, path.
    Item = tuple[str, int, str]

LOGIN_SECONDS = 30.0
#: ssh keeps the first value it obtains: the user's configuration here can not make it ask, nor accept a key that is not on record.
OPTIONS = (
    "BatchMode=yes", "StrictHostKeyChecking=yes", "UpdateHostKeys=no", "ClearAllForwardings=yes", "RemoteCommand=none",
    "PermitLocalCommand=no", "LogLevel=ERROR", "ConnectTimeout=15", "ServerAliveInterval=15", "ServerAliveCountMax=2",
)  # fmt: skip


def ssh_argv(to: dict[str, Any], command: list[str]) -> list[str]:
    options = [word for option in OPTIONS for word in ("-o", option)]
    return ["ssh", "-T", "-x", "-a", *options, "-p", str(int(to["port"])), "-l", to["user"], "--", to["host"],
            " ".join(map(shlex.quote, command))]


def feed(session: Session, header: dict[str, Any], value: dict[str, Any]) -> dict[str, Any]:
    """Send the objects `value.objects` that are here to `value.command` on `value.to`; `why` is empty when all of them were taken."""
    found = layout.locate(header["venv"])
    items = _held(found, value["objects"])
    if not items:
        return {"why": "it has none of it"}
    log = os.memfd_create("ssh-log")
    try:
        try:
            child = subprocess.Popen(
                ssh_argv(value["to"], value["command"]), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, bufsize=0
            )
        except OSError as error:
            return {"why": "`ssh` does not start there: %s" % error}
        with child:
            try:
                _through(session, child, found, items)
            finally:
                child.kill()
        return {"why": _words(log, child.returncode) if child.returncode else ""}
    finally:
        os.close(log)


def _held(found: layout.Layout, wanted: list[list[Any]]) -> list[Item]:
    """Return `(digest, size, path)` of the wanted objects whose file in the live generation was not touched since the push."""
    live = found.live()
    index = None if live is None else layout.Index.load(os.path.join(found.directory(live), "index"))
    if live is None or index is None:
        return []
    paths: dict[str, list[str]] = {}
    for path, row in index.rows.items():
        if row[0] == "f":
            paths.setdefault(row[3], []).append(path)
    held: list[Item] = []
    for digest, size in wanted:
        for path in paths.get(digest, ()):
            row = index.rows[path]
            try:
                info = os.lstat(os.path.join(found.tree(live), path))
            except OSError:
                continue
            if row[2] == size and (info.st_size, info.st_dev, info.st_ino, info.st_mtime_ns, info.st_ctime_ns) == (row[2], *row[4:]):
                held.append((digest, size, path))
                break
    return held


def _through(session: Session, child: subprocess.Popen[bytes], found: layout.Layout, items: list[Item]) -> None:
    """Send through `child` and wait for its end, which is 0 only when all arrived."""
    assert child.stdin is not None and child.stdout is not None
    line = child.stdin.fileno()
    frames.widen(line)
    sent, total = 0, sum(item[1] for item in items)
    ready, _, _ = select.select([child.stdout], [], [], LOGIN_SECONDS)
    if not ready or child.stdout.read(1) != b"+":
        if not ready:
            child.terminate()
        child.wait()
        return
    with Tree(found.tree(found.live() or 0)) as tree:

        def open_item(item: Item) -> int:
            try:
                return tree.open(item[2])
            except HostilePath as error:
                raise OSError(str(error)) from None

        try:
            for batch in objects.batches(items):
                if session.aborted():
                    raise Failure("interrupted", "the transfer was cancelled")
                objects.send_batch(batch, {}, open_item, lambda data: frames.write_all(line, data), line)
                sent += sum(item[1] for item in batch)
                session.progress("relay", sent, total)
        except OSError:
            pass  # ssh has ended, and says why
    child.stdin.close()
    while child.poll() is None:
        if session.wait_aborted(0.02):
            raise Failure("interrupted", "the transfer was cancelled")


def _words(log: int, status: int) -> str:
    """Return the last words of `ssh`, else how it ended."""
    said = os.pread(log, 1 << 16, 0).decode("utf-8", "replace")
    lines = [line.strip().rstrip(".") for line in said.splitlines() if line.strip()]
    return ": ".join(lines[-2:])[-300:] if lines else "`ssh` ended with status %d" % status
