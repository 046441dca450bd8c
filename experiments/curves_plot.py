"""Plot of curves over all cache sizes, with runs of policies as points."""

from __future__ import annotations

import textwrap
from pathlib import Path

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from experiments.curves_table import caption
from experiments.figures import add_legend, by_misses, note_below, style_of

# Colour and line of each curve; those of policies that other figures draw are theirs.
LINES = {
    "lru": (style_of("lru").color, "-"),
    "lru_misses_first": (style_of("lru").color, "--"),
    "lru_id": (style_of("lru").color, ":"),
    "seq": ("#7F7F7F", ":"),
    "load": ("#E69F00", "-"),
    "gate": ("#009E73", "-"),
    "confidence": (style_of("oled").color, "-"),
    "ideal_min": (style_of("ideal_min").color, "-."),
}


def plot_curves(frame: pl.DataFrame, path: Path) -> None:
    """Draw hit ratio and utilization of all layers together by cache size, from rows of one trace, into a PNG file."""
    together = frame.filter(pl.col("layer").is_null())
    points = together.filter("is_point")
    # a global pool has no slots of a layer, which utilization is of
    utilization = pl.coalesce("utilization", "utilization_slot_weighted")
    figure = Figure(figsize=(7.2, 8.4), layout="constrained")
    panels = figure.subplots(2, sharex=True)
    for axes, drawn, label in zip(
        panels,
        (pl.col("hit_ratio"), utilization),
        ("hit ratio of activated experts", "share of slots that hold activated experts"),
        strict=True,
    ):
        _draw_curves(axes, together.filter(~pl.col("is_point")), drawn)
        _draw_points(axes, points, drawn)
        axes.set_ylabel(label)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_ylim(0, 1.03)
        axes.set_xlim(0, frame["num_experts"][0])
        axes.grid(color="0.9", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Expert cache by size", x=0.01, ha="left", fontweight="bold")
    panels[1].set_xlabel("cache size (expert slots for each MoE layer)")
    add_legend(panels[0], 4)
    note = caption(frame.row(0, named=True), *(f"runs with {path}" for path in by_misses(points)))
    note_below(figure, note, 110)
    figure.savefig(path, dpi=160)


def _draw_curves(axes: Axes, curves: pl.DataFrame, drawn: pl.Expr) -> None:
    for rows in curves.partition_by("curve", maintain_order=True):
        name = rows["curve"][0]
        color, line = LINES[name]
        heights = rows.select(drawn).to_series()
        axes.plot(rows["slots_per_layer"], heights, color=color, linestyle=line, linewidth=1.6, label=name)


def _draw_points(axes: Axes, points: pl.DataFrame, drawn: pl.Expr) -> None:
    for nth, rows in enumerate(points.partition_by("curve", maintain_order=True)):
        first = rows.row(0, named=True)
        style = style_of(first["policy"])
        is_ring = nth % 2 == 1  # larger and hollow, so that points that coincide are seen as two
        found = rows.filter(pl.col("slots_per_layer") > 0).with_columns(drawn=drawn).drop_nulls("drawn")
        axes.plot(
            found["slots_per_layer"],
            found["drawn"],
            color=style.color,
            marker=style.marker or "d",
            linestyle="",
            markersize=10 if is_ring else 7,
            markerfacecolor="none" if is_ring else style.color,
            markeredgecolor=style.color if is_ring else "white",
            markeredgewidth=1.2 if is_ring else 0.6,
            label=textwrap.fill(f"run: {first['curve']}", 40),
            zorder=3,
            clip_on=False,
        )
