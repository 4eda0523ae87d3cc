"""Drawings: readable without colour, valid XML, and complete."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ddtree.trace import Round, main, render_svg, render_terminal, visible
from ddtree.tree import Tree
from ddtree.walk import Walk

ROUND = Round.of(
    Tree((4, 7, 8, 9, 7), (-1, 0, 0, 1, 3), (0, 1, 1, 2, 3), (0.0, -0.2231436, -1.6094379, -0.9162907, -1.6094379)),
    Walk((0, 1, 3), (7, 9, 2)),
    ("the", " cat", " <b>", " sat", "\n"),
    " on",
    "once upon the",
)


def test_the_terminal_shows_tokens_probabilities_and_the_path() -> None:
    assert render_terminal(ROUND).split("\n") == [
        "after: …once␣upon␣the",
        "4 nodes, 2 accepted, 3 tokens from one forward pass",
        "emitted: ␣cat ␣sat ␣on  (the last is the target's own)",
        "",
        "* the",
        "* ├─ ␣cat  0.80  (path 0.800)",
        "* │  └─ ␣sat  0.50  (path 0.400)",
        "  │     └─ ⏎  0.50  (path 0.200)",
        "  └─ ␣<b>  0.20  (path 0.200)",
    ]


def test_a_large_tree_is_cut_but_the_path_stays() -> None:
    drawn = render_terminal(ROUND, max_nodes=2)
    assert "␣sat" in drawn
    assert "… 1 more" in drawn
    assert "<b>" not in drawn


def test_the_svg_is_well_formed_and_has_every_node() -> None:
    root = ElementTree.fromstring(render_svg(ROUND))
    texts = ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    for token in ROUND.texts:
        assert visible(token) in texts
    assert visible(ROUND.bonus) in texts
    green = [r for r in root.iter("{http://www.w3.org/2000/svg}rect") if r.get("class") == "n p"]
    assert len(green) == len(ROUND.path)


def test_json_goes_there_and_back() -> None:
    assert Round.parse(json.loads(ROUND.to_json())) == ROUND


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": [0, 3]}, "does not go from parent to child"),
        ({"path": []}, "does not go from parent to child"),
        ({"parents": [-1, 0, 5, 1, 3]}, "every parent before its children"),
        ({"texts": ["the"]}, "needs a text, a parent and a score"),
    ],
)
def test_a_round_that_is_none_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Round.parse(json.loads(ROUND.to_json()) | change)


def test_the_command_draws_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rounds.json"
    file.write_text(f"[{ROUND.to_json()}, {ROUND.to_json()}]")
    assert main([str(file), "--round", "1"]) == 0
    assert capsys.readouterr().out == render_terminal(ROUND) + "\n"
    assert main([str(file), "--svg", str(tmp_path / "round.svg")]) == 0
    assert (tmp_path / "round.svg").read_text() == render_svg(ROUND)
    assert main([str(file), "--round", "2"]) == 2
    file.write_text("{}")
    assert main([str(file)]) == 2
    assert "error: cannot draw" in capsys.readouterr().err
