"""P13 on the screen: whatever a host names its files and says of itself, the terminal obeys none of it, and JSON stays JSON."""

from __future__ import annotations

import io
import json
import os
import pty
import sys

import pytest

from ddtree_deploy.errors import IntegrityFailure
from ddtree_deploy.events import Note, Progress, Step
from ddtree_deploy.render.table import columns
from ddtree_deploy.render.ui import Ui

#: Set the title, clear the screen (seven bits and eight), delete, carriage return, bell.
EVIL = "\x1b]0;owned\x07\x1b[2J\x9b2J\x9d0;x\x9c\x7f\r\x08"


def _say_everything(ui: Ui) -> None:
    ui.emit(Step("h", EVIL))
    ui.emit(Progress("h", EVIL, 1, 2, "bytes", EVIL))
    ui.emit(Note("h", EVIL, "warn"))
    ui.data(EVIL)
    ui.table(columns("NAME", "#N"), [[EVIL, "1"]], [""])
    ui.error(IntegrityFailure(EVIL, mend=EVIL, causes=(EVIL,)))


def test_a_terminal_gets_no_control_character_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    with os.fdopen(slave, "w", encoding="utf-8") as terminal:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "stderr", terminal)
        _say_everything(Ui())
        terminal.flush()
        os.set_blocking(master, False)
        shown = os.read(master, 1 << 20).decode()
    os.close(master)
    assert "owned" in shown
    for piece in ("\x1b]", "\x1b[2J", "\x9b", "\x9d", "\x9c", "\x7f", "\x07", "\x08"):
        assert piece not in shown, repr(piece)


def test_plain_output_and_json_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    for ui in (Ui(), Ui(json=True)):
        out, error = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", error)
        ui.acts = ui.json
        _say_everything(ui)
        shown = out.getvalue() + error.getvalue()
        assert not [c for c in shown if c != "\n" and (ord(c) < 32 or 127 <= ord(c) < 160)], repr(shown)
        if ui.json:
            assert EVIL in [json.loads(line).get("text") or json.loads(line).get("message") for line in out.getvalue().splitlines()]
