"""The table of a terminal: what is the same for all rows stands above it, numbers are aligned, units are in the head."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from experiments.columns import UNITS, WIDTH, Column, byte_unit, laid_out, numbers, percents, total_width, wrap
from experiments.intervals import FEWEST
from experiments.profiles import names

HASH_DIGITS = 8
NEVER_VALIDATED = "from data sheets, never validated on this GPU"
_KNOWN = {"datasheet": NEVER_VALIDATED, "roofline": "not measured at these sizes"}  # by provenance
_DIGEST = re.compile("[0-9a-f]{64}")
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
_PATHS = ("pool", "misses")
_ROW = ("slots_per_layer", "policy", "variant", *_PATHS)  # what a line is where times stand side by side
# What a table of several runs says of each beside the best of its group; null where nothing was compared.
OVER_BEST = ("over_best_ms", "over_best_low_ms", "over_best_high_ms")
BEST, LIKE_BEST = "*", "≈"


def format_table(table: pl.DataFrame, swept: Sequence[str] = (), width: int = WIDTH) -> str:
    """Lay out rows of results for a terminal.

    Where one key of numbers was swept, each of its values has a column of times in one table, if a line has room for
    all; else what was swept tells tables apart.

    Args:
        table: rows with the columns of a run's summary.
        swept: further columns that tell rows apart; they go to the captions.
        width: characters of a line; columns that do not fit are left out, from 120 on none are.
    """
    if len(swept) == 1 and table[swept[0]].dtype.is_numeric():
        across = _side_by_side(table, swept[0], width)
        if across is not None:
            return across
    return "\n\n".join(
        "\n".join([wrap("; ".join(caption), width), "", *_section(section, width)])
        for section, caption in _sections(table, (*SECTION, *swept), swept)
    )


def _sections(
    table: pl.DataFrame, keys: Sequence[str], swept: Sequence[str] = (), across: str | None = None
) -> list[tuple[pl.DataFrame, list[str]]]:
    """Rows that are alike in these columns, and what they have in common."""
    present = [key for key in keys if key in table.columns]
    sections = table.partition_by(present, maintain_order=True, include_key=True) if present else [table]
    first = [section.row(0, named=True) for section in sections]
    captions = [[*describe(row, swept, across), *_contents(row, first, across)] for row in first]
    for section, caption in zip(sections, captions, strict=True):
        caption += [f"{key} {section[key][0]}" for key in _PATHS if section[key].n_unique() == 1]
    return list(zip(sections, captions, strict=True))


def _contents(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], across: str | None) -> list[str]:
    """What tells a trace and a profile apart from others that bear the same name: of these rows, or of an own file."""

    def is_shared(digest: str, *name: str) -> bool:
        """Whether rows that bear this name have several contents."""
        return len({other[digest] for other in rows if all(other[key] == row[key] for key in name)}) > 1

    parts = []
    if is_shared("trace_hash", "trace"):
        parts.append(f"trace content {row['trace_hash'][:HASH_DIGITS]}")
    is_own = row["hardware"] not in names("hardware")
    # a table across values of the profile shows several
    if across is None and (is_own or is_shared("profile_hash", "hardware", "hardware_changes")):
        parts.append(f"profile content {row['profile_hash'][:HASH_DIGITS]}")
    return parts


def _section(rows: pl.DataFrame, width: int) -> list[str]:
    """Lines of one table."""
    variants, unit = _variants(rows), byte_unit(rows["h2d_bytes"])
    columns = [
        *_leading(rows, variants),
        Column(("TPOT", "ms"), _times(rows)),
        Column(("above", "bound %"), percents(rows["gap_to_lower_bound_ratio"]), 5),
        Column(("TTFT", "ms"), numbers(rows["ttft_ms"]), 4),
        Column(("util.", "%"), percents(rows["utilization"])),
        Column(("util. %", "by slot"), percents(rows["utilization_slot_weighted"]), 8),
        Column(("hit", "%"), percents(rows["hit_ratio"])),
        Column(("token", "hit %"), percents(rows["token_hit_ratio"]), 7),
        Column(("eff.", "copy %"), percents(rows["effective_transfer_ratio"]), 6),
        Column(("H2D", unit), numbers(rows["h2d_bytes"] / UNITS[unit])),
        Column(("stall", "ms"), numbers(rows["exposed_stall_ms"]), 3),
        Column(("decision", "hash"), [digest[:HASH_DIGITS] for digest in rows["decision_hash"]]),
    ]
    return [*laid_out(columns, width), *_below(rows, variants, width)]


def _side_by_side(table: pl.DataFrame, key: str, width: int) -> str | None:
    """Times in one column for each value of the key; None where a row would have two, or a line has not the room."""
    follows = ("hardware_changes", "profile_hash") if key.startswith("hardware.") else ()
    parts = []
    for rows, caption in _sections(table, [name for name in SECTION if name not in follows], across=key):
        if rows[key].null_count() or rows.select(*_ROW, key).is_duplicated().any():
            return None
        lines = rows.select(_ROW).unique(maintain_order=True).sort(_ROW[0], maintain_order=True)
        variants = _variants(rows)
        columns = _leading(lines, variants)
        for value in rows[key].unique().sort():
            of_value = rows.filter(pl.col(key) == value)
            times = dict(zip(of_value.select(_ROW).iter_rows(), _times(of_value), strict=True))
            columns.append(Column((_quantity(key, value), "ms"), [times.get(line, "") for line in lines.iter_rows()]))
        if total_width(columns) > width:
            return None
        head = wrap("; ".join([*caption, f"TPOT by {key}"]), width)
        parts.append("\n".join([head, "", *laid_out(columns, width), *_below(rows, variants, width)]))
    return "\n\n".join(parts)


def _leading(rows: pl.DataFrame, variants: Sequence[str]) -> list[Column]:
    """The columns that say what a row is."""
    ranks = {"pool": 2, "misses": 1}
    paths = [
        Column((key, ""), rows[key].to_list(), ranks[key], is_text=True) for key in _PATHS if rows[key].n_unique() > 1
    ]
    slots = Column(("slots", "/layer"), [str(value) for value in rows["slots_per_layer"]])
    return [Column(("policy", ""), _names(rows, variants), is_text=True), *paths, slots]


def _variants(rows: pl.DataFrame) -> list[str]:
    return [variant for variant in rows["variant"].unique(maintain_order=True) if variant]


def _names(rows: pl.DataFrame, variants: Sequence[str]) -> list[str]:
    """What each row is called: its policy, and the number of its variant."""
    marks = {variant: f" [{i}]" for i, variant in enumerate(variants, 1)}
    return [name + marks.get(variant, "") for name, variant in rows.select("policy", "variant").iter_rows()]


def _times(rows: pl.DataFrame) -> list[str]:
    """Times per token, with a mark before those of the best of their group and of those not told apart from it."""
    times = numbers(rows["tpot_ms"])
    if not set(OVER_BEST) <= set(rows.columns):
        return times
    return [_mark(*over) + time for over, time in zip(rows.select(OVER_BEST).iter_rows(), times, strict=True)]


def _mark(over: float | None, low: float | None, high: float | None) -> str:
    if over == low == high == 0:
        return BEST
    return LIKE_BEST if low is not None and high is not None and low <= 0 <= high else ""


def _below(rows: pl.DataFrame, variants: Sequence[str], width: int) -> list[str]:
    """What stands below a table: its marks, variants and warnings."""
    notes = [f"[{i}] {variant}" for i, variant in enumerate(variants, 1)]
    if OVER_BEST[0] in rows.columns and rows[OVER_BEST[0]].drop_nulls().len():
        others = rows.filter(pl.col(OVER_BEST[0]) != 0)
        like = f"{LIKE_BEST} not told apart from it by {rows['num_requests'][0]} requests (95 % interval, paired bootstrap)"
        if others.height and others[OVER_BEST[1]].null_count() == others.height:
            like = f"no intervals, which take {FEWEST} requests and result.parquet by forward"
        notes.append(f"{BEST} lowest TPOT at its size, bounds aside; {like}")
    return [*(wrap(note, width, "    ") for note in notes), *_warnings(rows, _names(rows, variants), width)]


def _quantity(key: str, value: float) -> str:
    return f"{value / 1e9:g} GB/s" if key.endswith("_bytes_per_s") else _plain(value)


def describe(row: Mapping[str, Any], swept: Sequence[str] = (), across: str | None = None) -> list[str]:
    """What a row's numbers come from: trace and its source, machine and how it is known, sizes, warm-up.

    Args:
        row: of a table.
        swept: further columns that it names with their values.
        across: key of the profile whose value is shown elsewhere.
    """
    hardware = f"hardware {row['hardware']}"
    known = [text for text in (_KNOWN.get(row["provenance"]), "provisional" if row["provisional"] else None) if text]
    if known:
        hardware += f" ({', '.join(known)})"
    shown = [key.removeprefix("hardware.") for key in (*swept, across) if key]
    changes = [change for change in row["hardware_changes"].split(", ") if change.partition("=")[0] not in shown]
    if any(changes):
        hardware += f" with {', '.join(changes)}"
    parts = [f"trace {row['trace']}", f"source {row['source']} ({_traced(row)})", hardware]
    unit = byte_unit([row["expert_bytes"]])
    sizes = f"{row['charged_hidden']} x {row['charged_expert_intermediate']}"
    parts.append(f"experts charged at {sizes}, {row['expert_bytes'] / UNITS[unit]:.3g} {unit}")
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
        parts.append(f"{row['tokens_per_forward']:.2f} tokens a counted forward")
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
        sizes = "" if len(slots) == labels.count(label) else f" at {', '.join(map(str, dict.fromkeys(slots)))} slots"
        lines.append(wrap(f"{label}{sizes}: {text}", width, "    "))
    return lines
