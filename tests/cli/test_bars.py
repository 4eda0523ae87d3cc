"""The bars on a terminal: they erase what they drew and nothing else, and a line of theirs is one line of the screen."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from ddtree_deploy.events import Progress
from ddtree_deploy.render.progress import Bars


def screen(raw: str) -> list[str]:
    """Return the lines that a terminal shows: of the control sequences those that rich's live display writes."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[\s\S]", raw):
        if token == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif token == "\r":
            column = 0
        elif token.endswith("A") and len(token) > 1:
            row -= int(token[2:-1])
            assert row >= 0
        elif token == "\x1b[2K":
            lines[row] = ""
        elif not token.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + token + lines[row][column + 1 :]
            column += 1
    return lines


def test_what_is_printed_between_the_bars_of_several_hosts_stays() -> None:
    out = io.StringIO()
    bars = Bars(Console(file=out, force_terminal=True, width=80, soft_wrap=True))
    for number in range(3):
        for host in ("h1", "h2", "h3"):
            bars.step(host, "look at the venv")
        bars.stop()
        out.write(f"first {number}\nsecond {number}\n")
    bars.step("h1", "hash")
    bars.stop()
    assert [line for line in screen(out.getvalue()) if line] == [f"{word} {n}" for n in range(3) for word in ("first", "second")]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_bar_says_everything_on_one_line(width: int) -> None:
    out = io.StringIO()
    bars = Bars(Console(file=out, force_terminal=True, width=width, soft_wrap=True, no_color=True))
    bars.update(Progress("ct200", "hash 6442 files", 30 << 20, 157 << 20, "bytes", "sglang/srt/layers/attention/flashinfer_backend.py"))
    bars.stop()
    # The last frame, without the new line that takes it away.
    last = screen(out.getvalue().rsplit("\n", 1)[0])[-1]
    assert "ct200: hash 6442 files" in last and "30.0 MiB of 157 MiB" in last and len(last) <= width
    assert ("backend.py" in last) is (width > 60)
