"""Turn numbers, identities and results into the words of the command line. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddtree_deploy.errors import DeployError
    from ddtree_deploy.models import Pushed, RolledBack

SHORT = 7


def size(count: float) -> str:
    """Say a number of bytes in binary units, with two significant figures at most one decimal."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def seconds(count: float) -> str:
    """Say a duration: `0.4 s`, `38 s`, `3 min 20 s`."""
    if count < 10:
        return f"{count:.1f} s"
    if count < 100:
        return f"{count:.0f} s"
    minutes, rest = divmod(round(count), 60)
    return f"{minutes} min {rest} s"


def plural(count: int, noun: str) -> str:
    """Say how many: `1 file`, `412 files`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def short(identity: str) -> str:
    """Shorten a snapshot's identity for people (commands accept any unique prefix)."""
    return identity[:SHORT]


def generation(number: int | None) -> str:
    """Name a generation; a venv that had none yet has `none`."""
    return "none" if number is None else str(number)


def push_line(pushed: Pushed) -> str:
    """Say how a push ended, in the one form that scripts and people may rely on."""
    if pushed.already:
        return f"{pushed.host}: already up to date — generation {pushed.generation}, snapshot {short(pushed.snapshot)}"
    return (
        f"{pushed.host}: generation {pushed.generation} active (was {generation(pushed.previous)}) — "
        f"snapshot {short(pushed.snapshot)}, {plural(pushed.changed_files, 'file')} changed, "
        f"{size(pushed.sent_bytes)} sent{_fed(pushed)} in {seconds(pushed.seconds)}, "
        f"{'verified' if pushed.verified else 'not verified'}"
    )


def _fed(pushed: Pushed) -> str:
    names = " and ".join(f"`{name}`" for name in pushed.fed_by)
    return f" and {size(pushed.fed_bytes)} fed by {names}" if names else ""


def rollback_line(back: RolledBack) -> str:
    """Say how a rollback ended."""
    proved = ", verified" if back.proofs and all(proof.ok for proof in back.proofs) else ""
    return f"{back.host}: generation {generation(back.generation)} active (was {generation(back.previous)}){proved}"


def error_lines(problem: DeployError, log: str = "") -> list[str]:
    """Lay an error out: message, causes indented, blank line, hint, path of the log last."""
    lines = [f"error: {problem.message}"]
    lines += [f"  {line}" for cause in problem.causes for line in cause.splitlines()]
    lines += ["", f"hint: {problem.mend}"]
    if log:
        lines += [f"log: {log}"]
    return lines


def some(items: Iterable[str], most: int) -> tuple[list[str], int]:
    """Return the first `most` items and how many there are besides."""
    everything = list(items)
    return everything[:most], max(0, len(everything) - most)
