"""Tables: as wide as they are for a pipe, within the terminal for a person, and nothing is lost on the way."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import sys
import termios

import pytest

from ddtree_deploy.bench.report import HEADINGS
from ddtree_deploy.render.table import columns, plain_table
from ddtree_deploy.render.ui import Ui

SONAMES = "… libcublas.so.13 libcublasLt.so.13 libcudart.so.13 libcupti.so.13 and 1 more"
TABLES = {
    "tags": (
        columns("ABI tag", "snapshot", "here now", "becomes"),
        [
            ("ddtree :: needs_system", SONAMES, SONAMES.replace("13", "12"), SONAMES),
            ("nvidia :: cuda_version_lower_bound", "13.0", "12.8", "13.0"),
        ],
    ),
    "bench": (columns(*HEADINGS), [("ddtree:63", "16", "1237.5", "1.59", "1.08", "12.50", "1045.3", "153.3", "1140.5", "125.4", "0")]),
    "snapshots": (
        columns("snapshot", "label", "host", "venv", "taken", "#files", "#size", "#patched", ""),
        [("f7bf8e6", "known-good", "ct129", "/opt/serving/sglang-0.5.11/venv", "2026-11-30 00:41", "6660", "157 MiB", "1", "")],
    ),
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("width", [80, 120])
def test_a_table_fits_the_terminal_and_keeps_every_character(name: str, width: int) -> None:
    heads, rows = TABLES[name]
    lines = plain_table(heads, rows, width)
    assert max(map(len, lines)) <= width
    kept = sorted("".join("".join(line.split()) for line in lines))
    assert kept == sorted("".join("".join(text.split()) for text in [*(column.heading for column in heads), *(c for r in rows for c in r)]))


def test_a_pipe_gets_one_line_a_row() -> None:
    for heads, rows in TABLES.values():
        assert len(plain_table(heads, rows)) == 1 + len(rows)


def test_numbers_dates_and_words_stay_in_one_piece() -> None:
    text = "\n".join("\n".join(plain_table(*table, 80)) for table in TABLES.values())
    for whole in ("1237.5", "1045.3", "dflash", "157 MiB", "2026-11-30", "known-good", "libcudart.so.13"):
        assert whole in text


def test_what_cannot_fit_is_not_cut() -> None:
    (line,) = plain_table(columns("#a"), [("123456789",)], 4)[1:]
    assert line == "123456789"


def test_the_terminal_s_own_width_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 72, 0, 0))
    with os.fdopen(slave, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.delenv("COLUMNS", raising=False)
        Ui(progress=False).table(*TABLES["tags"])
        terminal.flush()
        shown = os.read(master, 1 << 16).decode()
    os.close(master)
    assert 40 < max(map(len, shown.splitlines())) <= 72
