"""Facts in, verdict out: every `cases/*.json` is a test. See `cases/README.md` for how to add one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ddtree_deploy import abi

CASES = sorted((Path(__file__).parent / "cases").glob("*.json"))


def check_case(case: dict[str, Any]) -> None:
    """Raise AssertionError when the verdict is not what the case expects."""
    source, target = abi.load(case.get("source", {}), "ct129"), abi.load(case["target"], "ct200")
    expect = case["expect"]
    if case.get("inspect"):
        verdict = abi.inspect(target)
    else:
        allow = [abi.Allowance.parse(text, "tried by hand") for text in case.get("allow", ())]
        verdict = abi.judge(source, target, case["move"], allow)
    said = {check.id: check.level for check in verdict.checks if check.level != "ok"}
    texts = [f"{item.check} {item.text}" for item in verdict.evidence]
    assert said == expect["checks"], texts
    for pattern in expect.get("evidence", ()):
        assert any(re.search(pattern, text) for text in texts), (pattern, texts)
    if "set" in expect:
        assert verdict.solution is not None
        assert list(verdict.solution.names) == expect["set"]
        assert verdict.solution.consistent is expect.get("consistent", True)
    assert abi.verdict_from_json(json.loads(json.dumps(abi.verdict_to_json(verdict)))) == verdict


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case(path: Path) -> None:
    check_case(json.loads(path.read_text(encoding="utf-8")))


def test_a_wrong_expectation_fails() -> None:
    """The harness can fail: each case with a level turned round does not pass."""
    assert len(CASES) >= 20
    for path in CASES:
        case = json.loads(path.read_text(encoding="utf-8"))
        case["expect"]["checks"] = {"K11": "block", **case["expect"]["checks"]}
        with pytest.raises(AssertionError):
            check_case(case)
