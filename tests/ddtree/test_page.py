"""The examples of docs/ddtree.md run, and print what their comments say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "ddtree.md"


def test_the_examples_of_the_page_hold(capsys: pytest.CaptureFixture[str]) -> None:
    budget, by_hand = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(by_hand, names)
    promised = re.findall(r"print\(.*\)  # (.*)", by_hand)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(promised) == 2
    for said, shown in zip(promised, printed, strict=True):
        assert said.split(": ")[0] == shown
    assert names["positions"].tolist() == [10, 11, 11, 12, 12]  # type: ignore[attr-defined]
    exec(budget, names)
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[0]) for line in lines] == [1, 2, 4, 8, 16]


def test_the_drawing_of_the_page_exists() -> None:
    for target in re.findall(r"!\[.*?\]\((.*?)\)", PAGE.read_text()):
        assert (PAGE.parent / target).is_file()
