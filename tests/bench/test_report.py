"""The report: one file that needs nothing beside itself, with every figure, and charts that are true to them."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_deploy.bench import charts, report
from ddtree_deploy.bench.stats import Agreement, Cell

SVG = "{http://www.w3.org/2000/svg}"


def cell(name: str, level: int, rate: float, tokens: float | None = None) -> Cell:
    return Cell(name, level, (rate * 0.9, rate, rate * 1.1), rate, 0.05, 0.01, 0.03, 0.02, tokens, 16, 0, {"plain": rate / 100})


CELLS = (cell("plain", 1, 100.0), cell("plain", 4, 300.0), cell("ddtree", 1, 250.0, 4.5), cell("ddtree", 4, 600.0, 4.4))
RESULT = report.Result("ct200", CELLS, (Agreement("ddtree", "plain", 31, 32, 4, 17),), {"engine": "sglang 0.5.11"})


def test_the_page_needs_nothing_beside_itself() -> None:
    page = report.html(RESULT)
    assert not re.search(r"<(script|link|img|iframe)|url\(|@import|(src|href)=", page)
    assert [link for link in re.findall(r"https?://[^\s\"<]+", page) if link != "http://www.w3.org/2000/svg"] == []
    differs = "31 of 32 answers are those of plain; prompt 5 differs from character 18"
    for said in ("ct200", "sglang 0.5.11", "250.0", "2.50", "4.50", differs):
        assert said in page
    assert page.count("<tr>") == 1 + len(CELLS) and "prefers-color-scheme:dark" in page


def test_names_of_a_host_are_no_markup() -> None:
    evil = '<script>alert("x")</script>'
    result = report.Result(evil, (replace(CELLS[0], variant=evil),), (), {evil: evil})
    assert "<script" not in report.html(result)
    ET.fromstring(report.picture(result))


def test_the_picture_is_svg_with_labelled_axes_and_true_positions() -> None:
    root = ET.fromstring(report.picture(RESULT))
    texts = ["".join(node.itertext()) for node in root.iter(f"{SVG}text")]
    assert texts.count("requests at a time") == 4
    for said in ("tokens/s", "tokens per verify pass", "plain", "ddtree", "1", "4", "600"):
        assert said in texts, said
    first = root.findall(f"{SVG}g")[0]
    heights = [float(pair.split(",")[1]) for node in first.iter(f"{SVG}polyline") for pair in str(node.get("points")).split()]
    # Equal steps of the rate are equal steps on paper, and more is higher.
    rates = [100.0, 300.0, 250.0, 600.0]
    slope = (heights[3] - heights[0]) / (rates[3] - rates[0])
    assert slope < 0
    assert heights == [pytest.approx(heights[0] + slope * (rate - rates[0]), abs=0.2) for rate in rates]


def test_what_was_not_measured_leaves_a_gap() -> None:
    bare = replace(CELLS[0], ttft=math.nan, itl_p50=math.nan, itl_p99=math.nan, per_token=math.nan)
    result = replace(RESULT, cells=(bare, *CELLS[1:]))
    assert not re.search(r"\bnan\b", report.html(result).lower())
    found = json.loads(json.dumps(report.document(result), allow_nan=False))
    assert found["cells"][0]["ttft"] is None and found["cells"][1]["rate"] == 300.0
    assert report.rows(result.cells)[0][6] == "–" and len(report.rows(result.cells)[0]) == len(report.HEADINGS)


@given(st.floats(1e-9, 1e12))
def test_ticks_are_few_round_and_reach_the_top(greatest: float) -> None:
    marks = charts.ticks(greatest)
    assert marks[0] == 0 and marks[-1] >= greatest * (1 - 1e-6) and 2 <= len(marks) <= 7
    step = marks[1]
    assert all(one == pytest.approx(step * number) for number, one in enumerate(marks))
    assert round(step / 10 ** math.floor(math.log10(step) + 1e-9), 6) in (1, 2, 2.5, 5, 10)


def test_ticks_of_nothing() -> None:
    assert charts.ticks(0.0) == charts.ticks(math.nan) == [0.0, 1.0]
