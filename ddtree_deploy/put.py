"""Put one file onto a host: verified there by its sha256, compiled there when it is Python, renamed into place."""

from __future__ import annotations

import base64
import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from ddtree_deploy import answers
from ddtree_deploy.errors import IntegrityFailure, IoProblem, UsageProblem
from ddtree_deploy.events import Emit, Note, Progress, Step, ignore
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.session import Session

BLOCK = 4 << 20
_LOOK = answers.fields(
    path=answers.text, digest=answers.text, mode=answers.count, generation=answers.maybe(answers.count), writable=answers.truth
)
_DONE = answers.fields(python=answers.text, lost_owner=answers.text)


@dataclass(frozen=True, slots=True)
class Put:
    """A file at its place: `path` there (links resolved), `mode`, whether it `replaced` one or was `already` there as it is.

    `python` is the interpreter that compiled it there, or empty.
    """

    host: str
    path: str
    sha256: str
    size: int
    mode: int
    replaced: bool
    already: bool
    python: str = ""


def put(host: Host, file: Path, path: str, *, mode: int | None = None, dry_run: bool = False, emit: Emit = ignore) -> Put:
    """Put `file` at `path` on `host`; with `dry_run` only say what that would do.

    Without `mode` a replaced file keeps its own; a new one becomes 0755 if `file` can be executed, else 0644. Raises UsageProblem
    when either is no ordinary file, ProofFailed when Python does not compile there, IntegrityFailure when other bytes arrived.
    """
    size, sha256, executable, python = _read(file)
    with Session(host, writable=not dry_run, emit=emit, parts=("single",)) as session:
        emit(Step(host.name, f"look at {path}"))
        found = session.ask("put-look", path=path).fields
        if not _LOOK(found):
            raise IntegrityFailure(f"`{host.name}` answered with something else than an answer")
        wanted = mode if mode is not None else found["mode"] if found["digest"] else 0o755 if executable else 0o644
        already = (found["digest"], found["mode"]) == (sha256, wanted)
        done = Put(host.name, found["path"], sha256, size, wanted, bool(found["digest"]), already)
        if not found["writable"] and not already:
            raise IoProblem(f"`{Path(found['path']).parent}` on `{host.name}` can not be written", mend="log in as its owner, or as root")
        if found["generation"] is not None and not already:
            text = f"{found['path']} is part of generation {found['generation']}: `status` will show it as drift"
            emit(Note(host.name, text, "warn"))
        if already or dry_run:
            return done
        emit(Step(host.name, f"send {file.name}"))
        session.ask("put-open", path=path, size=size)
        _send(session, file, size, emit)
        emit(Step(host.name, "verify"))
        interpreter = f"{host.venv}/bin/python" if host.venv else host.python
        answer = session.ask("put-commit", digest=sha256, mode=wanted, compile=python, python=interpreter).fields
        if not _DONE(answer):
            raise IntegrityFailure(f"`{host.name}` answered with something else than an answer")
        if answer["lost_owner"]:
            emit(Note(host.name, f"the owner {answer['lost_owner']} of {done.path} could not be kept", "warn"))
        return Put(host.name, done.path, sha256, size, wanted, done.replaced, False, answer["python"])


def _read(file: Path) -> tuple[int, str, bool, bool]:
    """Return a local file's size, sha256, whether it can be executed, and whether it is Python."""
    try:
        with file.open("rb") as opened:
            info = os.fstat(opened.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise UsageProblem(f"`{file}` is not an ordinary file", mend="`put` takes one file; a package travels by `push`")
            start = opened.readline(200)
            opened.seek(0)
            sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
    except IsADirectoryError:
        raise UsageProblem(f"`{file}` is a directory", mend="`put` takes one file; a package travels by `push`") from None
    except OSError as problem:
        raise UsageProblem(f"cannot read `{file}`: {problem.strerror}") from None
    python = file.suffix == ".py" or (start.startswith(b"#!") and b"python" in start)
    return info.st_size, sha256, bool(info.st_mode & 0o111), python


def _send(session: Session, file: Path, size: int, emit: Emit) -> None:
    sent = 0
    with file.open("rb") as opened:
        while block := opened.read(BLOCK):
            session.ask("put-data", base64.b64encode(block).decode())
            sent += len(block)
            emit(Progress(session.host.name, "send", sent, max(size, sent), "bytes", file.name))
