"""OpenSSH's known_hosts: who a host is, judged alike for both transports (sshd(8), SSH_KNOWN_HOSTS FILE FORMAT).

Standard library only and importable alone: `ssh` runs this file as its KnownHostsCommand when a host's key is pinned.
"""

from __future__ import annotations

import base64
import contextlib
import enum
import fnmatch
import hashlib
import hmac
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


class Verdict(enum.Enum):
    """What the recorded keys say of the key that a server shows."""

    KNOWN = "known"
    UNKNOWN = "unknown"
    CHANGED = "changed"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True)
class Entry:
    """One line: `marker` is empty, `@revoked` or `@cert-authority`; `key` is base64; `place` is `file:line`."""

    marker: str
    patterns: str
    kind: str
    key: str
    place: str


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, and the entry that it rests on."""

    verdict: Verdict
    entry: Entry | None = None


def parse(text: str, file: str = "") -> list[Entry]:
    """Read the lines that have the right shape, as ssh does; comments and broken lines are skipped."""
    entries = []
    for number, line in enumerate(text.splitlines(), start=1):
        fields = line.split()
        marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
        if len(fields) >= 3 and not fields[0].startswith("#"):
            entries.append(Entry(marker, fields[0], fields[1], fields[2], f"{file}:{number}"))
    return entries


def load(files: Iterable[str]) -> list[Entry]:
    """Read each file that is there. Raises PermissionError rather than forget what an unreadable file says."""
    entries: list[Entry] = []
    for file in files:
        try:
            entries += parse(Path(file).read_text("utf-8", "replace"), file)
        except (FileNotFoundError, NotADirectoryError):
            continue
    return entries


def matches(patterns: Sequence[str], name: str) -> bool:
    """Tell whether a pattern list (`*`, `?`, leading `!` forbids) names the host (ssh_config(5), PATTERNS)."""
    hit = False
    for pattern in patterns:
        bare = pattern.removeprefix("!")
        # fnmatch would read [host]:port as a set of characters.
        if fnmatch.fnmatchcase(name.lower(), bare.lower().replace("[", "[[]")):
            if pattern.startswith("!"):
                return False
            hit = True
    return hit


def _names(entry: Entry, name: str) -> bool:
    if not entry.patterns.startswith("|1|"):
        return matches(entry.patterns.split(","), name)
    try:
        _, _, salt, digest = entry.patterns.split("|")
        expected = hmac.new(base64.b64decode(salt), name.encode(), hashlib.sha1).digest()
        return hmac.compare_digest(expected, base64.b64decode(digest))
    except ValueError:
        return False


def lookup_names(hostname: str, port: int, alias: str = "") -> tuple[str, ...]:
    """Return the names to look up, best first: HostKeyAlias as it is, `[host]:port` before the bare host."""
    if alias:
        return (alias,)
    host = hostname.lower()
    return (host,) if port == 22 else (f"[{host}]:{port}", host)


def recorded(entries: Iterable[Entry], names: Sequence[str]) -> list[Entry]:
    """Return the plain keys on record for the host's first name (a bare host does not stand for its other ports)."""
    return [entry for entry in entries if not entry.marker and _names(entry, names[0])]


def judge(entries: Sequence[Entry], names: Sequence[str], kind: str, key: str) -> Judgement:
    """Judge the key that a server shows. Stricter than ssh: a key of another kind than those on record is CHANGED."""
    for entry in entries:
        if entry.marker == "@revoked" and entry.key == key and any(_names(entry, name) for name in names):
            return Judgement(Verdict.REVOKED, entry)
    own = recorded(entries, names)
    for entry in own or [e for e in entries if not e.marker and any(_names(e, name) for name in names[1:])]:
        if (entry.kind, entry.key) == (kind, key):
            return Judgement(Verdict.KNOWN, entry)
    if not own:
        return Judgement(Verdict.UNKNOWN)
    return Judgement(Verdict.CHANGED, next((entry for entry in own if entry.kind == kind), own[0]))


def fingerprint(key: str) -> str:
    """Return `SHA256:...` of a base64 key, as `ssh-keygen -l` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(base64.b64decode(key)).digest()).decode().rstrip("=")


def record(file: Path, name: str, kind: str, key: str, *, hashed: bool) -> None:
    """Append one line, leaving every other byte as it is. Raises OSError when the file can not be written."""
    if hashed:
        salt = os.urandom(20)
        digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
        name = f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"
    end_last_line(file)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, f"{name} {kind} {key}\n".encode())
    finally:
        os.close(descriptor)


def end_last_line(file: Path) -> None:
    """Append a newline to a file that lacks its last one: ssh would write the next entry onto that line."""
    with contextlib.suppress(FileNotFoundError), file.open("r+b") as known:
        if known.seek(0, os.SEEK_END) and known.seek(-1, os.SEEK_END) and known.read(1) != b"\n":
            known.write(b"\n")


def answer(pin: str, name: str, kind: str, key: str, entries: Sequence[Entry]) -> str:
    """Return the line that makes ssh accept the pinned key, or refuse any other and whatever the files refuse."""
    # ssh asks first without a key, to order its algorithms.
    if key in ("", "NONE"):
        return ""
    if fingerprint(key) != pin:
        return f"@revoked {name} {kind} {key}\n"
    found = judge(entries, (name,), kind, key)
    return f"{name} {kind} {key}\n" if pin_admits(found, kind) else ""


def pin_admits(found: Judgement, kind: str) -> bool:
    """Tell whether a key that fits the pin may pass: unless it, or a recorded key of its kind, says otherwise."""
    if found.verdict is Verdict.CHANGED:
        return found.entry is not None and found.entry.kind != kind
    return found.verdict is not Verdict.REVOKED


if __name__ == "__main__":
    pin_, name_, kind_, key_, *files_ = sys.argv[1:]
    sys.stdout.write(answer(pin_, name_, kind_, key_, load(files_)))
