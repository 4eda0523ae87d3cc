"""Enter the counts of a full run into docs/promises.md: `python -m tests.faults.counts FILE` (written by a run with DDTREE_COUNTS=FILE)."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.faults.promises import PAGE

BEGIN, END = "<!-- counts: begin -->\n", "<!-- counts: end -->"


def table(counts: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the counts as a table: a row a sweep."""
    told = {name: ", ".join(f"{what}: {value}".replace("_", " ") for what, value in counts[name].items()) for name in sorted(counts)}
    rows = [f"| {name} | {what} |" for name, what in told.items()]
    return "\n".join(["| sweep | what it tried |", "|---|---|", *rows]) + "\n"


def entered(page: str, counts: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page with the counts in their place."""
    head, _, rest = page.partition(BEGIN)
    assert rest, "the page has no place for counts"
    return head + BEGIN + table(counts) + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(entered(PAGE.read_text("utf-8"), json.loads(Path(sys.argv[1]).read_text("utf-8"))), "utf-8")
