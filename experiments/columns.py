"""Columns of a terminal's table: aligned, as many as a line has room for; text wrapped to it, numbers of like precision."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import floor, log10

WIDTH = 80
UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True)
class Column:
    """One column: two lines of heading and the cells as text.

    `rank` says which columns go first where not all fit: those of the highest; 0 stays.
    """

    head: tuple[str, str]
    cells: list[str]
    rank: int = 0
    is_text: bool = False

    @property
    def width(self) -> int:
        """Characters of the widest line."""
        return max(map(len, (*self.head, *self.cells)))

    def lines(self) -> list[str]:
        """Heading and cells, padded: text to the left, numbers to the right."""
        pad: Callable[[str, int], str] = str.ljust if self.is_text else str.rjust
        return [pad(text, self.width) for text in (*self.head, *self.cells)]


def laid_out(columns: Sequence[Column], width: int) -> list[str]:
    """Lines of a table: two of heading, a rule, and the rows; columns that do not fit are left out, highest rank first."""
    kept = list(columns)
    while total_width(kept) > width and any(column.rank for column in kept):
        kept.remove(max(kept, key=lambda column: column.rank))
    lines = ["  ".join(parts).rstrip() for parts in zip(*(column.lines() for column in kept), strict=True)]
    return [*lines[:2], "  ".join("-" * column.width for column in kept), *lines[2:]]


def markdown(*columns: Column) -> str:
    """The same as a table of Markdown, whole."""
    heads = [" ".join(filter(None, column.head)) for column in columns]
    rules = ["---" if column.is_text else "---:" for column in columns]
    rows = zip(*(column.cells for column in columns), strict=True)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rules, *rows))


def total_width(columns: Sequence[Column]) -> int:
    """Characters of a line of these columns."""
    return sum(column.width + 2 for column in columns) - 2


def wrap(text: str, width: int, indent: str = "") -> str:
    """Break text into lines of whole words, `indent` before all but the first."""
    return textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def numbers(values: Iterable[float | None]) -> list[str]:
    """Values with equal decimals, so many that the largest has four digits; a null is a dash."""
    listed = list(values)
    largest = max((abs(value) for value in listed if value is not None), default=0)
    decimals = max(0, 3 - floor(log10(largest))) if largest else 0
    return ["-" if value is None else f"{value:.{decimals}f}" for value in listed]


def percents(ratios: Iterable[float | None]) -> list[str]:
    """Ratios in percent; a null is a dash."""
    return ["-" if ratio is None else f"{100 * ratio:.1f}" for ratio in ratios]


def byte_unit(values: Iterable[float | None]) -> str:
    """The largest decimal unit that the largest value fills."""
    largest = max((value for value in values if value is not None), default=0)
    return [unit for unit, size in UNITS.items() if size <= max(largest, 1)][-1]
