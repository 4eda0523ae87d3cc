"""The proofs that need the host: whole-set hashes, a compile of every source, and (probe.py) imports."""

from __future__ import annotations

import os
import select
import subprocess
import threading

from ddtree_deploy.agent import compile_child, walk
from ddtree_deploy.agent.children import cpus, kill_group, signal_name, source_of
from ddtree_deploy.agent.failure import Failure
from ddtree_deploy.agent.probe import imports

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping

    from ddtree_deploy.agent.layout import Row
    from ddtree_deploy.agent.main import Session
    from ddtree_deploy.agent.walk import Entry

__all__ = ["hashes", "imports", "syntax"]


def syntax(
    session: Session,
    python: str,
    root: str,
    paths: Iterable[str],
    jobs: int | None = None,
    baseline: Container[str] = frozenset(),
    write: bool = True,
) -> tuple[int, list[tuple[str, str]]]:
    """Compile the `.py` files `paths` below `root` by the interpreter `python`, in `jobs` processes.

    Returns `(compiled, errors)`: how many compiled, and `(path, message)` of those that did not, without the paths in
    `baseline`, which do not compile on the source host either. With `write` the bytecode goes into `__pycache__`
    (PEP 552, timestamps), else nothing is written, and bytecode that an import would run in the place of its source is
    an error. So is a source that kills the compiler. Raises Failure when `python` does not run.
    """
    sized = []
    for path in paths:
        try:
            size = os.stat(os.path.join(root, path)).st_size
        except OSError:
            size = 0
        sized.append((size, path))
    sized.sort(reverse=True)
    jobs = max(1, min(jobs or cpus(), (len(sized) + 63) // 64))
    mode = "write" if write else "check"
    errors: list[tuple[str, str]] = []
    faults: list[Exception] = []
    done = [0]
    lock = threading.Lock()

    def record(path: str, message: str) -> None:
        with lock:
            done[0] += 1
            if message:
                errors.append((path, message))
        session.progress("compile", done[0], len(sized), "files", path)

    def work(share: list[str]) -> None:
        try:
            while share and not session.aborted():
                share = _compile(session, python, root, mode, share, record)
        except Exception as error:
            faults.append(error)

    # Largest first, dealt in turn: the shares cost about the same.
    workers = [threading.Thread(target=work, args=([path for _size, path in sized[k::jobs]],)) for k in range(jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if faults:
        raise faults[0]
    if session.aborted():
        raise Failure("interrupted", "the compile of the sources was stopped")
    return done[0] - len(errors), sorted(pair for pair in errors if pair[0] not in baseline)


def _compile(session: Session, python: str, root: str, mode: str, paths: list[str], record: Callable[[str, str], None]) -> list[str]:
    """Run one compiler over `paths`; returns those that it did not reach, because one of them killed it."""
    try:
        child = subprocess.Popen(
            [python, "-I", "-S", "-W", "ignore", "-X", "utf8", "-c", source_of(compile_child), root, mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        raise Failure("incompatible", "the interpreter `%s` does not start: %s" % (python, error.strerror)) from None
    assert child.stdin is not None and child.stdout is not None
    reached = 0
    try:
        try:
            child.stdin.write(b"".join(os.fsencode(path) + b"\0" for path in paths))
            child.stdin.close()
        except BrokenPipeError:
            pass
        tail = b""
        while True:
            ready, _, _ = select.select([child.stdout], [], [], 0.2)
            if session.aborted():
                return []
            if not ready:
                continue
            data = os.read(child.stdout.fileno(), 1 << 16)
            if not data:
                break
            *records, tail = (tail + data).split(b"\0")
            for message in records:
                record(paths[reached], message.decode("utf-8", "replace"))
                reached += 1
        status = child.wait()
        if reached < len(paths):
            if not reached and status > 0:
                raise Failure(
                    "incompatible", "the interpreter `%s` does not compile: exit status %d" % (python, status)
                )
            cause = signal_name(-status) if status < 0 else "exit status %d" % status
            record(paths[reached], "the compiler died of %s" % cause)
            reached += 1
        return paths[reached:]
    finally:
        if child.poll() is None:
            kill_group(child)
        child.stdout.close()


def hashes(
    session: Session, root: str, rows: Mapping[str, Row], walked: list[Entry] | None = None, stamps: bool = True,
) -> tuple[int, int, list[str]]:
    """Compare the tree `root` with `rows`, which name all of it (`layout.Index`).

    With `stamps`, a file whose stamp is still that of its row is vouched for (a ctime of None is not compared); any other is
    read. `walked` is a walk of `root` made just now. Returns `(hashed, vouched, bad)`: numbers of files, and one line for
    each difference.
    """
    entries = walked if walked is not None else walk.walk(root)
    bad: list[str] = []
    suspects: list[str] = []
    vouched = 0
    for found in entries:
        path, kind, mode, size, dev, ino, mtime, ctime, target, _links = found
        wanted = rows.get(path)
        if wanted is None:
            bad.append("%s: not part of the set" % path)
        elif kind != wanted[0]:
            bad.append("%s: %s where %s is expected" % (path, _KINDS.get(kind, kind), _KINDS.get(wanted[0], wanted[0])))
        elif kind == "l":
            vouched += 1
            if target != wanted[3]:
                bad.append("%s: a link to `%s` where one to `%s` is expected" % (path, target, wanted[3]))
        elif mode != wanted[1]:
            bad.append("%s: mode %o where %o is expected" % (path, mode, wanted[1]))
        elif size != wanted[2]:
            bad.append("%s: %d bytes where %d are expected" % (path, size, wanted[2]))
        elif stamps and ino == wanted[5] and mtime == wanted[6] and dev == wanted[4] and wanted[7] in (ctime, None):
            vouched += 1
        else:
            suspects.append(path)
    if len(entries) - len(bad) < len(rows):
        bad.extend("%s: missing" % path for path in rows.keys() - {found[0] for found in entries})
    total = sum(rows[path][2] for path in suspects)
    done = [0]

    def moved(count: int, path: str) -> None:
        done[0] += count
        session.progress("hash", done[0], total, "bytes", path)

    digests = walk.hash_paths(root, suspects, session.aborted, moved)
    if session.aborted():
        raise Failure("interrupted", "the hash of the tree was stopped")
    for path in suspects:
        digest = digests.get(path)
        if digest is None:
            bad.append("%s: unreadable, or it changes while it is read" % path)
        elif digest != rows[path][3]:
            bad.append("%s: sha256 %s where %s is expected" % (path, digest[:12], rows[path][3][:12]))
    return len(suspects), vouched, sorted(bad)


_KINDS = {"f": "a file", "l": "a link", "?": "something else"}
