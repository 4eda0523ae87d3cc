"""Line charts as SVG, written by hand: labelled axes, a colour, a dash and a marker for each series, light and dark. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

#: Okabe and Ito's colours without yellow and black: told apart by nearly everyone, on white and on near-black.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
DASHES = ("", "7 3", "2 3", "9 3 2 3", "5 5", "1 2")
STYLE = """
.bench{font:13px system-ui,sans-serif}
.bench text{fill:#333}
.bench .title{font-weight:600;font-size:14px}
.bench .grid{stroke:#ddd}
.bench .axis{stroke:#888}
.bench .paper{fill:#fff}
@media (prefers-color-scheme:dark){
.bench text{fill:#ddd}
.bench .grid{stroke:#3a3a3a}
.bench .axis{stroke:#888}
.bench .paper{fill:#161616}
}
"""
WIDTH, HEIGHT = 520, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 40, 52
LEGEND = 34


@dataclass(frozen=True, slots=True)
class Series:
    """A line: its name, and for each x a value (None: nothing there) with the least and greatest that were seen."""

    name: str
    values: tuple[float | None, ...]
    spread: tuple[tuple[float, float] | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart over categories; the y axis starts at zero."""

    title: str
    x_label: str
    y_label: str
    x: tuple[str, ...]
    series: tuple[Series, ...]


def ticks(greatest: float, about: int = 5) -> list[float]:
    """Return round numbers from 0 to at least `greatest`."""
    if not greatest > 0 or not math.isfinite(greatest):
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(greatest / about))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor * about >= greatest * (1 - 1e-9))
    return [step * number for number in range(math.ceil(greatest / step - 1e-9) + 1)]


def svg(charts: Sequence[Chart], columns: int = 2) -> str:
    """Return one SVG of all charts, in rows of `columns`, under one legend; it needs nothing beside itself."""
    columns = min(columns, len(charts))
    rows = math.ceil(len(charts) / columns)
    width, height = columns * WIDTH, rows * HEIGHT + LEGEND
    names = list(dict.fromkeys(series.name for chart in charts for series in chart.series))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="bench" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape("; ".join(chart.title for chart in charts))}">',
        f'<style>{STYLE}</style><rect class="paper" width="{width}" height="{height}"/>',
        *_legend(names),
    ]
    for number, chart in enumerate(charts):
        column, row = number % columns, number // columns
        parts += [f'<g transform="translate({column * WIDTH},{LEGEND + row * HEIGHT})">', *_chart(chart, names), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(names: Sequence[str]) -> list[str]:
    out, x = [], LEFT
    for number, name in enumerate(names):
        out += [_line([(x, 20), (x + 30, 20)], number), _marker(x + 15, 20, number)]
        out.append(f'<text x="{x + 38}" y="24">{escape(name)}</text>')
        x += 62 + 8 * len(name)
    return out


def _chart(chart: Chart, names: Sequence[str]) -> list[str]:
    values = [value for series in chart.series for value in series.values if value is not None]
    values += [pair[1] for series in chart.series for pair in series.spread if pair is not None]
    marks = ticks(max(values, default=0.0))
    wide, tall = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(index: int) -> float:
        return LEFT + wide * (index + 0.5) / len(chart.x)

    def up(value: float) -> float:
        return TOP + tall * (1 - value / marks[-1])

    out = [f'<text class="title" x="{LEFT}" y="22">{escape(chart.title)}</text>']
    for mark in marks:
        y = up(mark)
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{mark:g}</text>')
    out.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{TOP + tall}" y2="{TOP + tall}"/>')
    out += [f'<text x="{at(n):.1f}" y="{TOP + tall + 18}" text-anchor="middle">{escape(x)}</text>' for n, x in enumerate(chart.x)]
    out.append(f'<text x="{LEFT + wide / 2:.1f}" y="{HEIGHT - 12}" text-anchor="middle">{escape(chart.x_label)}</text>')
    middle = TOP + tall / 2
    turned = f'transform="rotate(-90 16 {middle:.1f})" text-anchor="middle"'
    out.append(f'<text x="16" y="{middle:.1f}" {turned}>{escape(chart.y_label)}</text>')
    for series in chart.series:
        number = names.index(series.name)
        aside = 7 * (number - (len(names) - 1) / 2)  # so that bars of equal x do not cover each other
        points = [(at(n) + aside, up(value)) for n, value in enumerate(series.values) if value is not None]
        out.append(_line(points, number))
        for n, pair in enumerate(series.spread):
            if pair is not None and pair[0] < pair[1]:
                x = at(n) + aside
                look = f'stroke="{_colour(number)}" stroke-opacity=".6" stroke-width="1.5"'
                out.append(f'<path d="M{x:.1f} {up(pair[0]):.1f}V{up(pair[1]):.1f}" {look}/>')
        for n, value in enumerate(series.values):
            if value is not None:
                told = f"<title>{escape(series.name)}, {escape(chart.x[n])}: {value:.4g} {escape(chart.y_label)}</title>"
                out.append(f"<g>{told}{_marker(at(n) + aside, up(value), number)}</g>")
    return out


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _line(points: Sequence[tuple[float, float]], number: int) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = DASHES[number % len(DASHES)]
    pattern = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{path}" fill="none" stroke="{_colour(number)}" stroke-width="2"{pattern}/>'


def _marker(x: float, y: float, number: int) -> str:
    size = 4.5
    shapes = (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}"',
        f'<rect x="{x - size:.1f}" y="{y - size:.1f}" width="{2 * size}" height="{2 * size}"',
        f'<path d="M{x:.1f} {y - 6:.1f}l6 10h-12z"',
        f'<path d="M{x:.1f} {y - 6:.1f}l6 6l-6 6l-6 -6z"',
    )
    return f'{shapes[number % len(shapes)]} fill="{_colour(number)}"/>'
