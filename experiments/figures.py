"""Plots of a table of results: time per token and cache utilization by cache size, one line for each policy."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator, PercentFormatter

from experiments.table import OVER_BEST, SECTION, describe
from policies.registry import POLICIES


@dataclass(frozen=True)
class Style:
    """How one policy is drawn in every figure."""

    color: str
    marker: str
    line: str = "-"


# Colours of Okabe and Ito, told apart by colour-blind people; in grey print the markers tell.
_BLACK, _ORANGE, _SKY, _GREEN, _BLUE, _RED, _PURPLE, _GREY = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
    "#7F7F7F",
)
STYLES = {
    "full": Style(_BLACK, "", "--"),
    "ondemand": Style(_GREY, "", ":"),
    "lru": Style(_BLUE, "o"),
    "lfu": Style(_ORANGE, "s"),
    "prev_set": Style(_GREEN, "^", "--"),
    "oled": Style(_RED, "D"),
    "ideal_free": Style(_SKY, "v", "-."),
    "ideal_min": Style(_PURPLE, "P", "-."),
}
_OTHER_COLORS, _OTHER_MARKERS = (_BLUE, _ORANGE, _GREEN, _RED, _PURPLE, _SKY), ("X", "<", ">", "h", "*", "p")
_VARIANT_LINES = ((0, (5, 2)), (0, (1, 1)), (0, (3, 1, 1, 1)))


def plot_tpot(table: pl.DataFrame, path: Path) -> None:
    """Draw time per output token by cache size, from rows of one trace and machine, into a PNG file."""
    _plot(table, "tpot_ms", "time per output token, TPOT (ms)", "Time per output token by cache size", path)


def plot_utilization(table: pl.DataFrame, path: Path) -> None:
    """Draw cache utilization by cache size, from rows of one trace and machine, into a PNG file."""
    label = "share of slots that hold activated experts"
    _plot(table, "utilization", label, "Expert cache utilization by cache size", path, is_ratio=True)


def _plot(table: pl.DataFrame, column: str, label: str, title: str, path: Path, *, is_ratio: bool = False) -> None:
    keys = [key for key in SECTION if key in table.columns]
    if table.select(keys).n_unique() != 1:
        raise ValueError(f"a figure shows one trace, machine and model; found several of {', '.join(keys)}")
    figure = Figure(figsize=(7.2, 5.2), layout="constrained")
    axes = figure.add_subplot()
    sized = table.filter("sized")
    sizes = sorted(sized["slots_per_layer"].unique())
    drawn: dict[str, int] = {}
    for rows in table.partition_by("policy", "variant", "misses", maintain_order=True):
        first = rows.row(0, named=True)
        points = rows.sort("slots_per_layer").drop_nulls(column)
        if points.is_empty():
            continue
        nth = drawn[first["policy"]] = drawn.get(first["policy"], -1) + 1
        _draw(axes, points, column, style_of(first["policy"]), nth)
    if column == "tpot_ms" and sized["lower_bound_tpot_ms"].drop_nulls().len():
        least = sized.group_by("slots_per_layer").agg(pl.col("lower_bound_tpot_ms").min()).drop_nulls().sort(pl.all())
        axes.plot(*least, color="0.6", linestyle=":", linewidth=1.2, label="lower bound", zorder=1)
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    axes.set_xlabel("cache size (expert slots for each MoE layer)")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", color="0.88", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    values = table[column].drop_nulls()
    if is_ratio:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_ylim(0, 1.03)
    elif values.len() and 0 < values.min() < values.max() / 8:  # type: ignore[operator]
        axes.set_yscale("log")
        axes.set_ylabel(f"{label}, log scale")
        is_narrow = values.max() < 30 * values.min()  # type: ignore[operator]
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7) if is_narrow else (1, 2, 5), numticks=99))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(bottom=0)
    add_legend(axes, 3)
    served = by_misses(sized)
    if column == "tpot_ms" and _bounded(table).height:
        served.append(
            f"bars: 95 % interval (paired bootstrap over {table['num_requests'][0]} requests) of the difference to the "
            "lowest TPOT at that size, bounds aside; a policy whose bar reaches that is not told apart from it"
        )
    note = "; ".join([*describe(table.row(0, named=True)), *served])
    note_below(figure, note, 110)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def _draw(axes: Axes, points: pl.DataFrame, column: str, style: Style, nth: int) -> None:
    """Draw one policy: a line over the sizes, or one across where the policy ignores the size."""
    first: dict[str, Any] = points.row(0, named=True)
    name = first["policy"] + (f" ({first['variant']})" if first["variant"] else "")
    if not first["sized"]:
        axes.axhline(first[column], color=style.color, linestyle=style.line, linewidth=1.5, label=name)
        return
    line: Any = style.line if nth == 0 else _VARIANT_LINES[(nth - 1) % len(_VARIANT_LINES)]
    axes.plot(
        points["slots_per_layer"],
        points[column],
        color=style.color,
        marker=style.marker,
        linestyle=line,
        linewidth=1.8,
        markersize=11 if nth else 7,  # a ring, so that curves that coincide are seen as two
        markerfacecolor="none" if nth else style.color,
        markeredgecolor=style.color if nth else "white",
        markeredgewidth=1.2 if nth else 0.5,
        label=name,
    )
    bounded = _bounded(points) if column == "tpot_ms" else points.clear()
    if bounded.height:
        over, low, high = (bounded[name].to_numpy() for name in OVER_BEST)
        size, height = bounded["slots_per_layer"], bounded[column]
        axes.errorbar(size, height, [over - low, high - over], fmt="none", ecolor=style.color, elinewidth=1, capsize=4)


def _bounded(rows: pl.DataFrame) -> pl.DataFrame:
    """Rows that an interval says how far they are above the best of their size."""
    if not set(OVER_BEST) <= set(rows.columns):
        return rows.clear()
    return rows.filter(pl.col(OVER_BEST[1]).is_not_null() & (pl.col(OVER_BEST[1]) < pl.col(OVER_BEST[2])))


def add_legend(axes: Axes, most: int) -> None:
    """Name the lines of a panel above it, in as many columns as there is room for, `most` at most."""
    lines = [text for line in axes.lines for text in str(line.get_label()).splitlines()]
    ncols = max(1, min(most, 100 // (max(map(len, lines), default=0) + 6)))
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=ncols, frameon=False, handlelength=3, fontsize=9)


def note_below(figure: Figure, text: str, width: int) -> None:
    """What the numbers of a figure come from, in lines of so many characters."""
    wrapped = textwrap.fill(text, width, break_on_hyphens=False)
    figure.supxlabel(wrapped, x=0.01, ha="left", fontsize=7.5, color="0.3")


def by_misses(rows: pl.DataFrame) -> list[str]:
    """How misses are served, and the policies that serve them so, for the note below a figure."""
    paths = rows.group_by("misses", maintain_order=True).agg(pl.col("policy").unique(maintain_order=True))
    return [f"misses {path}: {', '.join(policies)}" for path, policies in paths.iter_rows()]


def style_of(policy: str) -> Style:
    """Colour, marker and line of a policy; one without its own gets the same one in every figure."""
    if policy in STYLES:
        return STYLES[policy]
    others = [name for name in POLICIES if name not in STYLES]
    number = others.index(policy) if policy in others else sum(policy.encode())
    count = len(_OTHER_COLORS)
    return Style(_OTHER_COLORS[number % count], _OTHER_MARKERS[(number + number // count) % len(_OTHER_MARKERS)])
