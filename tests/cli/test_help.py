"""`--help` on 80 columns: no sentence is cut, and prose flows whatever the ends of our source lines are."""

from __future__ import annotations

import re
from itertools import pairwise

from tests.cli.conftest import run
from tests.cli.test_errors import on_a_terminal


def test_the_list_of_commands_cuts_no_sentence() -> None:
    shown = run("--help", env={"COLUMNS": "80"}).out
    assert "Measure plain decoding, DFlash and DDTree side by side." in shown and "..." not in shown.split("Commands:")[1]


def test_prose_flows_on_a_terminal() -> None:
    _code, said = on_a_terminal("push", "--help")
    said = re.sub(r"\x1b\[[0-9;]*m", "", said)
    prose = said[said.index("The new tree is staged") : said.index("╭")]
    lines = [line.strip() for line in prose.splitlines() if line.strip()]
    # Each line but the last is as long as the first word of the next allows.
    width = max(map(len, lines))
    assert len(lines) > 2 and all(len(line) + len(after.split()[0]) >= width for line, after in pairwise(lines))
