"""Tables: aligned columns; on a terminal not wider than that, with cells in several lines where they must be."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

#: A file name of a host may hold an escape sequence (also one of the eight-bit ones, ECMA-48); the terminal must not obey it.
CONTROL = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}

#: The same for JSON, which escapes the others by itself: there `\\x9b` would be no JSON.
JSON_CONTROL = {code: f"\\u{code:04x}" for code in range(127, 160)}

#: No column of words gets narrower than a date is, so that dates and short labels stay in one piece.
LEAST = 10

#: Where a cell may be broken, best first: between words, then within paths and lists, then within names.
BREAKS = (re.compile(r"\s+"), re.compile(r"(?<=[/,])"), re.compile(r"(?<=[-_:=])"))


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its heading, and whether its cells are numbers (which align right)."""

    heading: str
    number: bool = False


def columns(*headings: str) -> tuple[Column, ...]:
    """Make columns of headings; a heading that starts with `#` is a column of numbers."""
    return tuple(Column(heading.removeprefix("#"), heading.startswith("#")) for heading in headings)


def broken(text: str, width: int) -> list[str]:
    """Break a cell into lines of at most `width`, where that reads best."""
    lines = []
    while len(text) > width:
        for pattern in BREAKS:
            spots = [spot for spot in pattern.finditer(text) if width // 4 <= spot.start() <= width]
            if spots:
                lines.append(text[: spots[-1].start()])
                text = text[spots[-1].end() :]
                break
        else:
            lines.append(text[:width])
            text = text[width:]
    return [*lines, text]


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[str]], room: int) -> list[int]:
    """Return how wide each column is: as its cells are, or, where that is more than `room`, what fits best."""
    cells = [max((len(row[index]) for row in rows), default=0) for index in range(len(columns))]
    widths = [max(cell, len(column.heading)) for cell, column in zip(cells, columns, strict=True)]
    if sum(widths) <= room:
        return widths
    # Headings break first, then the widest column gives way, and again: between words while it can. Numbers never do.
    heads = [max(map(len, column.heading.split()), default=0) for column in columns]
    words = [max((len(word) for row in rows for word in row[index].split()), default=0) for index in range(len(columns))]
    widths = [max(pair) for pair in zip(cells, heads, strict=True)]
    for keep in (words, [0] * len(columns)):
        while sum(widths) > room:
            givers = [i for i, column in enumerate(columns) if not column.number and widths[i] > max(LEAST, heads[i], keep[i])]
            if not givers:
                break
            widths[max(givers, key=widths.__getitem__)] -= 1
    return widths


def laid_out(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None = None) -> list[list[str]]:
    """Return the lines of the heading and of each row: columns two spaces apart, no rules, no trailing blanks.

    With `width` nothing is wider where that can be: headings and cells are broken, and at last one space must do.
    """
    rows = [[cell.translate(CONTROL) for cell in row] for row in rows]
    room = 1 << 30 if width is None else width - 2 * (len(columns) - 1)
    widths = _widths(columns, rows, room)
    gap = "  " if sum(widths) <= room else " "
    out: list[list[str]] = []
    for row in [[column.heading for column in columns], *rows]:
        cells = [broken(cell, wide) for cell, wide in zip(row, widths, strict=True)]
        # A heading stands on its column, a cell hangs from its row.
        tall = max(map(len, cells))
        cells = [[""] * (tall - len(cell)) + cell if not out else cell + [""] * (tall - len(cell)) for cell in cells]
        out.append([
            gap.join(
                part.rjust(wide) if column.number else part.ljust(wide) for part, wide, column in zip(parts, widths, columns, strict=True)
            ).rstrip()
            for parts in zip(*cells, strict=True)
        ])  # fmt: skip
    return out


def plain_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Return the lines of a table (`laid_out`)."""
    return [line for lines in laid_out(columns, rows, width) for line in lines]
