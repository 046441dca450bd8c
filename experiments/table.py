"""The table of a terminal: what is the same for all rows stands above it, numbers are aligned, units are in the head."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import floor, log10
from typing import Any

import polars as pl

from experiments.profiles import names

WIDTH = 80
HASH_DIGITS = 8
NEVER_VALIDATED = "from data sheets, never validated on this GPU"
_KNOWN = {"datasheet": NEVER_VALIDATED, "roofline": "not measured at these sizes"}  # by provenance
_DIGEST = re.compile("[0-9a-f]{64}")
_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
# Rows that differ in one of these stand in tables of their own, as nothing but the caption tells them apart.
SECTION = (
    "trace",
    "trace_hash",
    "source",
    "hardware",
    "hardware_changes",
    "profile_hash",
    "provenance",
    "provisional",
    "charged_hidden",
    "charged_expert_intermediate",
    "expert_bytes",
    "warmup",
    "calibration",
    "calibration_chosen",
)


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


def format_table(table: pl.DataFrame, swept: Sequence[str] = (), width: int = WIDTH) -> str:
    """Lay out rows of results for a terminal.

    Args:
        table: rows with the columns of a run's summary.
        swept: further columns that tell rows apart; they go to the captions.
        width: characters of a line; columns that do not fit are left out, from 110 on none are.
    """
    keys = [key for key in (*SECTION, *swept) if key in table.columns]
    sections = table.partition_by(keys, maintain_order=True, include_key=True) if keys else [table]
    first = [section.row(0, named=True) for section in sections]
    captions = [[*describe(row, swept), *_contents(row, first)] for row in first]
    return "\n\n".join(_section(*parts, width) for parts in zip(sections, captions, strict=True))


def _contents(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What tells a trace and a profile apart from others that bear the same name: of these rows, or of an own file."""
    parts = []
    for what, digest, keys, may_change in (
        ("trace", "trace_hash", ("trace",), False),
        ("profile", "profile_hash", ("hardware", "hardware_changes"), row["hardware"] not in names("hardware")),
    ):
        if may_change or len({other[digest] for other in rows if all(other[key] == row[key] for key in keys)}) > 1:
            parts.append(f"{what} content {row[digest][:HASH_DIGITS]}")
    return parts


def _section(rows: pl.DataFrame, caption: Sequence[str], width: int) -> str:
    variants = [variant for variant in rows["variant"].unique(maintain_order=True) if variant]
    marks = {variant: f" [{i}]" for i, variant in enumerate(variants, 1)}
    labels = [name + marks.get(variant, "") for name, variant in rows.select("policy", "variant").iter_rows()]
    columns = [Column(("policy", ""), labels, is_text=True)]
    constant = []
    for key, rank in (("pool", 2), ("misses", 1)):
        if rows[key].n_unique() == 1:
            constant.append(f"{key} {rows[key][0]}")
        else:
            columns.append(Column((key, ""), rows[key].to_list(), rank, is_text=True))
    unit = _byte_unit(rows["h2d_bytes"])
    columns += [
        Column(("slots", "/layer"), [str(value) for value in rows["slots_per_layer"]]),
        Column(("TPOT", "ms"), _numbers(rows["tpot_ms"])),
        Column(("TTFT", "ms"), _numbers(rows["ttft_ms"]), 4),
        Column(("util.", "%"), _percents(rows["utilization"])),
        Column(("util. %", "by slot"), _percents(rows["utilization_slot_weighted"]), 7),
        Column(("hit", "%"), _percents(rows["hit_ratio"])),
        Column(("token", "hit %"), _percents(rows["token_hit_ratio"]), 6),
        Column(("eff.", "copy %"), _percents(rows["effective_transfer_ratio"]), 5),
        Column(("H2D", unit), _numbers(rows["h2d_bytes"] / _UNITS[unit])),
        Column(("stall", "ms"), _numbers(rows["exposed_stall_ms"]), 3),
        Column(("decision", "hash"), [digest[:HASH_DIGITS] for digest in rows["decision_hash"]]),
    ]
    columns = _fitting(columns, width)
    head = _wrap("; ".join([*caption, *constant]), width, "")
    lines = ["  ".join(parts).rstrip() for parts in zip(*(column.lines() for column in columns), strict=True)]
    rule = "  ".join("-" * column.width for column in columns)
    notes = [_wrap(f"[{i}] {variant}", width, "    ") for i, variant in enumerate(variants, 1)]
    return "\n".join([head, "", *lines[:2], rule, *lines[2:], *notes, *_warnings(rows, labels, width)])


def _fitting(columns: Sequence[Column], width: int) -> list[Column]:
    """The columns without those of highest rank that a line has no room for."""
    kept = list(columns)
    while sum(column.width + 2 for column in kept) - 2 > width and any(column.rank for column in kept):
        kept.remove(max(kept, key=lambda column: column.rank))
    return kept


def describe(row: Mapping[str, Any], swept: Sequence[str] = ()) -> list[str]:
    """What a row's numbers come from: trace and its source, machine and how it is known, sizes, warm-up."""
    hardware = f"hardware {row['hardware']}"
    known = [text for text in (_KNOWN.get(row["provenance"]), "provisional" if row["provisional"] else None) if text]
    if known:
        hardware += f" ({', '.join(known)})"
    if row["hardware_changes"] and not any(key.startswith("hardware.") for key in swept):
        hardware += f" with {row['hardware_changes']}"
    parts = [f"trace {row['trace']}", f"source {row['source']} ({_traced(row)})", hardware]
    unit = _byte_unit(pl.Series([row["expert_bytes"]]))
    sizes = f"{row['charged_hidden']} x {row['charged_expert_intermediate']}"
    parts.append(f"experts charged at {sizes}, {row['expert_bytes'] / _UNITS[unit]:.3g} {unit}")
    plural = "" if row["warmup"] == 1 else "s"
    parts.append(f"{row['warmup']} warm-up request{plural}")
    if row["calibration_chosen"]:
        parts.append(f"calibration {_DIGEST.sub(lambda found: found[0][:HASH_DIGITS], row['calibration'])}")
    return [*parts, *(f"{key} {_plain(row[key])}" for key in swept)]


def _traced(row: Mapping[str, Any]) -> str:
    """What the traced model was, so that a toy is never taken for the real one."""
    parts = [f"hidden {row['traced_hidden']}"]
    if row["training_minutes"] is not None:
        parts.append(f"trained {row['training_minutes']:g} minutes")
    if row["tokens_per_forward"] is not None:
        parts.append(f"{row['tokens_per_forward']:.2f} tokens a forward")
    return ", ".join(parts)


def _plain(value: Any) -> str:
    if value is None:
        return "null"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _warnings(rows: pl.DataFrame, labels: Sequence[str], width: int) -> list[str]:
    """Each warning once, with the cache sizes that it is about where the policy has rows of others."""
    if "warnings" not in rows.columns:
        return []
    found: dict[tuple[str, str], list[int]] = {}
    for label, slots, texts in zip(labels, rows["slots_per_layer"], rows["warnings"], strict=True):
        for text in texts if texts is not None else ():
            found.setdefault((label, text), []).append(slots)
    lines = []
    for (label, text), slots in found.items():
        sizes = "" if len(slots) == labels.count(label) else f" at {', '.join(map(str, slots))} slots"
        lines.append(_wrap(f"{label}{sizes}: {text}", width, "    "))
    return lines


def _wrap(text: str, width: int, indent: str) -> str:
    return textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _numbers(values: pl.Series) -> list[str]:
    """Values with equal decimals, so many that the largest has four digits; a null is a dash."""
    largest = max((abs(value) for value in values if value is not None), default=0)
    decimals = max(0, 3 - floor(log10(largest))) if largest else 0
    return ["-" if value is None else f"{value:.{decimals}f}" for value in values]


def _percents(ratios: pl.Series) -> list[str]:
    return ["-" if ratio is None else f"{100 * ratio:.1f}" for ratio in ratios]


def _byte_unit(values: pl.Series) -> str:
    """The largest decimal unit that the largest value fills."""
    largest = max((value for value in values if value is not None), default=0)
    return [unit for unit, size in _UNITS.items() if size <= max(largest, 1)][-1]
