"""Name the cause of a death by what the server wrote: patterns are data (`signatures.toml`), the first that is found counts."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("signatures.toml")


@dataclass(frozen=True, slots=True)
class Signature:
    """A known way to die: what is written, why that is, what to do. `example` is such a line."""

    id: str
    pattern: re.Pattern[str]
    cause: str
    mend: str
    example: str


@dataclass(frozen=True, slots=True)
class Cause:
    """What a log says about why its server died, and the line that says it."""

    id: str
    text: str
    mend: str
    line: str


@functools.cache
def signatures() -> tuple[Signature, ...]:
    """Return all of them, in the order in which they are tried."""
    rows = tomllib.loads(FILE.read_text("utf-8"))["signature"]
    return tuple(Signature(row["id"], re.compile(row["pattern"]), row["cause"], row["mend"], row["example"]) for row in rows)


def find(lines: Sequence[str], host: str = "HOST") -> Cause | None:
    """Return the cause of a death: the first signature that any line has, of its lines the last; None when none is known."""
    for signature in signatures():
        for line in reversed(lines):
            if match := signature.pattern.search(line):
                words = [word or "" for word in match.groups()]
                words = [word for word in words if word] or [match.group(0)]
                fill = [*words, *[""] * 2]
                return Cause(signature.id, signature.cause.format(*fill), signature.mend.replace("HOST", host).format(*fill), line.strip())
    return None
