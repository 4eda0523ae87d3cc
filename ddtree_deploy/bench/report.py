"""A bench as one document: for JSON, and as an HTML page that needs nothing beside itself. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from ddtree_deploy.bench.charts import Chart, Series, svg
from ddtree_deploy.bench.stats import Agreement, Cell


@dataclass(frozen=True, slots=True)
class Result:
    """All that a bench found: `about` says what was measured, where and how, in (name, value) pairs."""

    host: str
    cells: tuple[Cell, ...]
    agreements: tuple[Agreement, ...]
    about: Mapping[str, str]


def document(result: Result) -> dict[str, Any]:
    """Return the result as JSON can hold it; what was not measured is null."""
    return {
        "host": result.host, "about": dict(result.about), "cells": [_finite(asdict(cell)) for cell in result.cells],
        "agreements": [asdict(one) for one in result.agreements],
    }  # fmt: skip


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def figure(count: float | None, digits: int = 1, unit: str = "") -> str:
    """Say a number, or `–` for one that is not there."""
    return "–" if count is None or not math.isfinite(count) else f"{count:.{digits}f}{unit}"


HEADINGS = ("variant", "#at a time", "#tok/s", "#x plain", "#x dflash", "#tok/pass", "#TTFT ms", "#ITL p50", "#p99", "#ms/tok", "#failed")


def rows(cells: Sequence[Cell]) -> list[list[str]]:
    """Return the table's cells as text; latencies in milliseconds."""
    return [
        [
            cell.variant, str(cell.concurrency), figure(cell.rate), figure(cell.ratios.get("plain"), 2),
            figure(cell.ratios.get("dflash"), 2), figure(cell.acceptance, 2), figure(1e3 * cell.ttft), figure(1e3 * cell.itl_p50),
            figure(1e3 * cell.itl_p99), figure(1e3 * cell.per_token), str(cell.failed),
        ]
        for cell in cells
    ]  # fmt: skip


def words(one: Agreement) -> str:
    """Say how the texts of a variant compare."""
    if one.variant == one.reference:
        return f"{one.variant}: {one.same} of {one.compared} answers repeat the first to their prompt"
    where = "" if one.prompt is None else f"; prompt {one.prompt + 1} differs from character {(one.at or 0) + 1}"
    return f"{one.variant}: {one.same} of {one.compared} answers are those of {one.reference}{where}"


def charts(cells: Sequence[Cell]) -> tuple[Chart, ...]:
    """Return the charts: rate, acceptance, time to the first token, and the slow end of the gaps."""
    levels = sorted({cell.concurrency for cell in cells})
    x = tuple(map(str, levels))

    def chart(title: str, unit: str, value: str, factor: float = 1.0, spread: bool = False) -> Chart:
        series = []
        for name in dict.fromkeys(cell.variant for cell in cells):
            at = {cell.concurrency: cell for cell in cells if cell.variant == name}
            found = [getattr(at[level], value) if level in at else None for level in levels]
            values = tuple(None if one is None or not math.isfinite(one) else factor * one for one in found)
            ranges = tuple((min(at[level].rates), max(at[level].rates)) if level in at else None for level in levels) if spread else ()
            series.append(Series(name, values, ranges))
        return Chart(title, "requests at a time", unit, x, tuple(series))

    return (
        chart("Throughput (median of rounds; bars: least to greatest)", "tokens/s", "rate", spread=True),
        chart("Acceptance length", "tokens per verify pass", "acceptance"),
        chart("Time to first token, median", "ms", "ttft", 1e3),
        chart("Gap between pieces, 99th percentile", "ms", "itl_p99", 1e3),
    )


PAGE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:1080px;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .7rem;border-bottom:1px solid #ddd;text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left}
.wide{overflow-x:auto}
.bench{max-width:100%;height:auto}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1rem}
dt{color:#666}dd{margin:0;overflow-wrap:anywhere}
@media (prefers-color-scheme:dark){body{color:#ddd;background:#161616}th,td{border-color:#3a3a3a}dt{color:#aaa}}
"""
NOTES = (
    "tok/s: all tokens of a measurement over its time, median of its rounds. x plain, x dflash: median over rounds, each against the "
    "same round. tok/pass: tokens that one verify pass gave, the target's own included. TTFT: from sending to the first piece, "
    "median. ITL: the gap between two pieces of an answer; a piece is one token of plain decoding and one round of speculation, so "
    "compare ms/tok (median time per token after the first) between them."
)


def picture(result: Result) -> str:
    """Return the charts as an SVG file."""
    return svg(charts(result.cells))


def html(result: Result) -> str:
    """Return the page: what was measured, charts, the table, and whether the texts agree."""
    heads = "".join(f"<th>{escape(heading.removeprefix('#'))}</th>" for heading in HEADINGS)
    lines = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows(result.cells))
    about = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in result.about.items())
    same = "".join(f"<li>{escape(words(one))}</li>" for one in result.agreements) or "<li>not compared: the temperature is above 0</li>"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>bench of {escape(result.host)}</title><style>{PAGE}</style></head><body>
<h1>bench of {escape(result.host)}</h1>
<dl>{about}</dl>
{picture(result)}
<h2>Figures</h2>
<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>
{lines}
</tbody></table></div>
<p>{escape(NOTES)}</p>
<h2>Texts</h2>
<ul>{same}</ul>
</body></html>
"""
