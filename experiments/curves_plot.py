"""Plot of curves over all cache sizes, with runs of policies as points."""

from __future__ import annotations

import textwrap
from pathlib import Path

import polars as pl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from experiments.curves_table import caption
from experiments.figures import style_of

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
    figure = Figure(figsize=(7.2, 8.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, sharex=True)
    for axes, column, label in zip(
        panels,
        ("hit_ratio", "utilization"),
        ("hit ratio of activated experts", "share of slots that hold activated experts"),
        strict=True,
    ):
        for rows in together.filter(~pl.col("is_point")).partition_by("curve", maintain_order=True):
            name = rows["curve"][0]
            color, line = LINES[name]
            axes.plot(rows["slots_per_layer"], rows[column], color=color, linestyle=line, linewidth=1.6, label=name)
        for nth, rows in enumerate(together.filter("is_point").partition_by("curve", maintain_order=True)):
            first = rows.row(0, named=True)
            style = style_of(first["policy"])
            drawn = pl.coalesce(column, "utilization_slot_weighted") if column == "utilization" else pl.col(column)
            points = rows.filter(pl.col("slots_per_layer") > 0).with_columns(drawn=drawn).drop_nulls("drawn")
            axes.plot(
                points["slots_per_layer"],
                points["drawn"],
                color=style.color,
                marker=style.marker or "d",
                linestyle="",
                markersize=7 + nth % 2 * 3,
                markerfacecolor=style.color if nth % 2 == 0 else "none",
                markeredgecolor="white" if nth % 2 == 0 else style.color,
                markeredgewidth=0.6 if nth % 2 == 0 else 1.2,
                label=textwrap.fill(f"run: {first['curve']}", 40),
                zorder=3,
                clip_on=False,
            )
        axes.set_ylabel(label)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_ylim(0, 1.03)
        axes.set_xlim(0, frame["num_experts"][0])
        axes.grid(color="0.9", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Expert cache by size", x=0.01, ha="left", fontweight="bold")
    panels[1].set_xlabel("cache size (expert slots for each MoE layer)")
    longest = max(max(map(len, str(line.get_label()).splitlines())) for line in panels[0].lines)
    ncols = max(1, min(4, 100 // (longest + 6)))
    panels[0].legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=ncols, frameon=False, handlelength=3, fontsize=9)
    paths = (
        together.filter("is_point")
        .group_by("misses", maintain_order=True)
        .agg(pl.col("policy").unique(maintain_order=True))
    )
    served = [f"runs with misses {path}: {', '.join(policies)}" for path, policies in paths.iter_rows()]
    note = caption(frame.row(0, named=True), 110, *served)
    figure.supxlabel(note, x=0.01, ha="left", fontsize=7.5, color="0.3")
    figure.savefig(path, dpi=160)
