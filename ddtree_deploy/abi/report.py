"""A verdict as JSON (both ways) and as plain lines; the CLI draws its own tables from the same fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from ddtree_deploy.abi.case import BLOCK, NOTE, Evidence
from ddtree_deploy.abi.judge import Verdict
from ddtree_deploy.abi.solver import Solution, Step
from ddtree_deploy.abi.tags import TagRow
from ddtree_deploy.models import Check

SCHEMA = 1


def verdict_to_json(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as plain data; `verdict_from_json` reads it back to an equal value."""
    return {
        "schema": SCHEMA,
        "target": verdict.target,
        "ok": verdict.ok,
        "moved": list(verdict.moved),
        "removed": [list(row) for row in verdict.removed],
        "broken": list(verdict.broken),
        "checks": [{"id": c.id, "level": c.level, "text": c.text, "evidence": list(c.evidence), "mend": c.mend} for c in verdict.checks],
        "evidence": [asdict(item) for item in verdict.evidence],
        "tags": [asdict(row) for row in verdict.tags],
        "allowed": [list(row) for row in verdict.allowed],
        "solution": None if verdict.solution is None else _solution_to_json(verdict.solution, verdict.target),
    }


def _solution_to_json(solution: Solution, target: str) -> dict[str, Any]:
    return {
        "asked": list(solution.asked),
        "steps": [asdict(step) for step in solution.steps],
        "unsolved": list(solution.unsolved),
        "names": list(solution.names),
        "spelled": list(solution.spelled),
        "command": solution.command(target),
    }


def verdict_from_json(data: Mapping[str, Any]) -> Verdict:
    """Read what `verdict_to_json` wrote; raise ValueError for another schema."""
    if data.get("schema") != SCHEMA:
        raise ValueError(f"a verdict of schema {data.get('schema')}, expected {SCHEMA}")
    solution = data["solution"]
    return Verdict(
        data["target"],
        tuple(data["moved"]),
        tuple((row[0], row[1], row[2]) for row in data["removed"]),
        tuple(Evidence(**item) for item in data["evidence"]),
        tuple(TagRow(**row) for row in data["tags"]),
        tuple((row[0], row[1], row[2]) for row in data["allowed"]),
        None
        if solution is None
        else Solution(
            tuple(solution["asked"]), tuple(Step(**step) for step in solution["steps"]), tuple(solution["unsolved"]),
            tuple(solution["spelled"]),
        ),
        tuple(data["broken"]),
    )


def gpu_checks(answer: Mapping[str, Any]) -> tuple[Check, ...]:
    """Turn what `agent.gpu_probe.probe` answered into one row per operation; a failure on any GPU blocks."""
    if answer.get("skipped"):
        return (Check("gpu", "ok", f"skipped: {answer['skipped']}"),)
    names = {gpu["index"]: gpu["name"] for gpu in answer["gpus"]}
    out = []
    for op in dict.fromkeys(row["op"] for row in answer["rows"]):
        rows = [row for row in answer["rows"] if row["op"] == op]
        bad = tuple(f"GPU {row['gpu']} ({names.get(row['gpu'], '?')}): {row['error']}" for row in rows if not row["ok"])
        skipped = next((row["skipped"] for row in rows if row["skipped"]), "")
        good = sum(row["ok"] and not row["skipped"] for row in rows)
        text = f"{op}: skipped: {skipped}" if skipped else f"{op}: {good} of {len(rows)} GPUs"
        out.append(Check("gpu", "block" if bad else "ok", text, bad))
    return tuple(out)


def lines(verdict: Verdict, notes: bool = False) -> Iterator[str]:
    """Yield the verdict as aligned plain text: tags that differ, checks with evidence, the set and its command."""
    rows = [row for row in verdict.tags if row.differs]
    for row in rows:
        yield f"{row.name}: {' | '.join(row.brief)}"
    if rows:
        yield ""
    for check in verdict.checks:
        yield f"{check.id:<4} {check.level:<6} {check.text}"
        for item in verdict.evidence:
            if item.check == check.id and (notes or item.level != NOTE):
                yield f"       {'!' if item.level == BLOCK else '-'} {item.text}"
    solution = verdict.solution
    if verdict.broken:
        yield ""
        yield f"would no longer work, and is not moved: {', '.join(verdict.broken)}"
    if solution is not None:
        yield ""
        for step in solution.steps:
            yield f"also {step.text}"
        for text in solution.unsolved:
            yield f"no set mends this: {text}"
        if solution.consistent and solution.steps:
            yield f"hint: {solution.command(verdict.target)}"
