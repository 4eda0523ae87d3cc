"""Tables: rich on a terminal, aligned plain columns everywhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: A file name of a host may hold an escape sequence (also one of the eight-bit ones, ECMA-48); the terminal must not obey it.
CONTROL = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}

#: The same for JSON, which escapes the others by itself: there `\\x9b` would be no JSON.
JSON_CONTROL = {code: f"\\u{code:04x}" for code in range(127, 160)}


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its heading, and whether its cells are numbers (which align right)."""

    heading: str
    number: bool = False


def columns(*headings: str) -> tuple[Column, ...]:
    """Make columns of headings; a heading that starts with `#` is a column of numbers."""
    return tuple(Column(heading.removeprefix("#"), heading.startswith("#")) for heading in headings)


def plain_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[str]:
    """Align cells in columns that are two spaces apart. No rules, no boxes, no trailing blanks."""
    table = [[column.heading for column in columns], *rows]
    widths = [max(len(row[index]) for row in table) for index in range(len(columns))]
    return [
        "  ".join(
            cell.rjust(width) if column.number else cell.ljust(width) for cell, width, column in zip(row, widths, columns, strict=True)
        ).rstrip()
        for row in table
    ]


def rich_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], styles: Sequence[str]) -> object:
    """Make the same table for a terminal. `styles` has one rich style a row (meaning is never in colour alone)."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.heading, justify="right" if column.number else "left", overflow="fold")
    for row, style in zip(rows, styles, strict=True):
        table.add_row(*(Text(cell.translate(CONTROL)) for cell in row), style=style)
    return table
