"""Figures of committed fidelity runs: every cell, single forwards, and the parts of a layer, simulated beside measured."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.compare_judge import SCOPE
from experiments.compare_pairs import Pair
from experiments.compare_table import describe_pair
from experiments.errors import ConfigError
from experiments.fidelity_terms import PARTS
from experiments.figures import note_below, style_of

_DPI = 72  # notebooks stay small
_BAR = "#0072B2"


def plot_forwards(pairs: Sequence[Pair]) -> Figure:
    """Time of every forward of some cells, one panel each: simulated as a line, the repeats of the replay as dots."""
    if not pairs:
        raise ConfigError("plot_forwards: no cell was named")
    ncols = min(2, len(pairs))
    figure, panels = _panels(len(pairs), ncols, 2.3)
    for axes, pair in zip(panels, pairs, strict=False):
        forwards = pair.simulated.forwards
        index = np.arange(forwards.height)
        color = style_of(pair.facts["policy"]).color
        for nth, repeat in enumerate(pair.repeats):
            label = "measured, each repeat" if nth == 0 else None
            axes.plot(index, _ms(repeat.forwards), ".", color=color, markersize=3.5, alpha=0.6, label=label)
        axes.plot(index, _ms(forwards), color="0.2", linewidth=1, label="simulated", zorder=3)
        starts = [
            row for row in index[1:] if forwards["requests"][int(row)][0] != forwards["requests"][int(row) - 1][0]
        ]
        for start in starts:
            axes.axvline(start, color="0.8", linewidth=0.8, zorder=0)
        axes.set_title(pair.name.rpartition("/")[0], loc="left", fontsize=9)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("ms")
        axes.legend(frameon=False, fontsize=8, loc="upper right")
    panels[-1].set_xlabel("forward")
    return _finished(figure, "Time of single forwards", f"{describe_pair(pairs[0])}; lines between requests; {SCOPE}")


def plot_parts(terms: pl.DataFrame, parts: Sequence[str] = ("gate", "copy", "cpu", "layer")) -> Figure:
    """Parts of a layer by cell: simulated over measured less 1, where the measured part takes 1 us or more."""
    names = terms["cell"].to_list()
    figure, panels = _panels(len(parts), min(2, len(parts)), 0.16 * len(names) + 0.6, sharey=True)
    for axes, part in zip(panels, parts, strict=False):
        if part not in PARTS:
            raise ConfigError(f"plot_parts: no part {part}; allowed are {', '.join(PARTS)}")
        rows = zip(terms[f"{part}_simulated_us"], terms[f"{part}_measured_us"], strict=True)
        for place, (ours, theirs) in enumerate(rows):
            if ours is not None and theirs is not None and theirs >= 1:
                axes.barh(place, 100 * (ours / theirs - 1), color=_BAR, height=0.7)
                axes.annotate(
                    f"{theirs:.0f} us",
                    (1, place),
                    xycoords=("axes fraction", "data"),
                    fontsize=6.5,
                    color="0.4",
                    va="center",
                )
        axes.axvline(0, color="0.5", linewidth=0.8)
        axes.set_title(f"{part}: {textwrap.shorten(PARTS[part], 64, placeholder='...')}", loc="left", fontsize=8)
        axes.set_yticks(range(len(names)), names, fontsize=7)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlabel("simulated over measured less 1 (%)", fontsize=8)
        axes.grid(axis="x", color="0.92", linewidth=0.8)
        axes.set_axisbelow(True)
    return _finished(figure, "Parts of a layer", f"beside each bar: what was measured; {SCOPE}")


def _panels(count: int, ncols: int, height: float, **options: Any) -> tuple[Figure, list[Axes]]:
    nrows = math.ceil(count / ncols)
    figure = Figure(figsize=(10, height * nrows + 0.8), dpi=_DPI, layout="constrained")
    panels = list(figure.subplots(nrows, ncols, squeeze=False, **options).flat)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[count:]:
        axes.set_axis_off()
    return figure, panels[:count]


def _ms(forwards: pl.DataFrame) -> np.ndarray:
    return forwards["time_ns"].to_numpy() / 1e6


def _finished(figure: Figure, title: str, note: str) -> Figure:
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    note_below(figure, note, 160)
    return figure
