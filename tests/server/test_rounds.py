"""A real round can be written down and drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddtree import trace
from ddtree.server.engine import Mode, Request, run
from ddtree.server.rounds import main, rounds
from tests.server.conftest import Variant

REQUEST = Request(tuple(range(40, 72)), 32, ignore_eos=True)


def test_rounds_say_what_was_drafted_and_emitted(variant: Variant) -> None:
    engine = variant(Mode.DDTREE, 24)
    done = list(rounds(engine, REQUEST))
    whole = run(engine, REQUEST)
    assert len(done) == whole.stats.rounds and sum(len(r.path) for r in done) == whole.stats.emitted
    emitted = [text for r in done for text in (*(r.texts[node] for node in r.path[1:]), r.bonus)]
    assert emitted == [engine.tokenizer.decode([token]) for token in whole.tokens[1:]]
    assert all(r.texts[0] == before for r, before in zip(done[1:], [r.bonus for r in done], strict=False))


def test_the_command_writes_what_trace_draws(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = ["--model", str(pair[0]), "--drafter", str(pair[1]), "--budget", "12", "--threads", "1"]
    out = tmp_path / "rounds.json"
    assert main(["the lazy dog, the quick", *models, "--max-tokens", "12", "--out", str(out)]) == 0
    assert main(["the lazy dog", *models, "--chat", "--max-tokens", "4", "--temperature", "1.5"]) == 0
    assert json.loads(capsys.readouterr().out)
    assert trace.main([str(out), "--svg", str(tmp_path / "round.svg")]) == 0
    assert (tmp_path / "round.svg").read_text("utf-8").startswith("<svg")
    assert trace.main([str(out)]) == 0
    assert "12 nodes, " in capsys.readouterr().out


def test_the_command_refuses_with_a_mend(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["x", "--model", str(pair[0])]) == 2
    assert "error: mode `ddtree` needs a drafter\n\nhint: " in capsys.readouterr().err
    assert main(["x"]) == 2
    assert "either `--tiny` or `--model`" in capsys.readouterr().err
