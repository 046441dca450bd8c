"""Simulated against measured time per token of every cell, and beside it how far each is off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from experiments.compare_cells import Cell
from experiments.compare_judge import MOST_TPOT_MAPE, SCOPE, Comparison
from experiments.compare_table import caption_of
from experiments.figures import STYLES, Style, note_below, style_of

_MARKERS = ("o", "s", "D", "^", "v", "P")  # by how often bytes are copied, from once on
# Okabe and Ito's, for policies whose own colour another has
_COLORS = ("#E69F00", "#009E73", "#56B4E9", "#CC79A7", "#D55E00", "#0072B2", "#000000")
_MOST_CAPTIONS = 4
_MOST_NAMED = 80  # rows of the panel of errors that there is room to name
_BAND: dict[str, Any] = {"color": "0.9", "zorder": 0, "linewidth": 0}


def plot_comparison(comparison: Comparison, path: Path) -> None:
    """Draw every cell into a PNG file."""
    figure_of(comparison).savefig(path, dpi=160)


def figure_of(comparison: Comparison) -> Figure:
    """Draw every cell: colour is the policy, marker how often bytes are copied, hollow a fitted cell."""
    cells = comparison.cells
    rows = sorted(cells, key=lambda cell: [other.policy for other in cells].index(cell.policy))
    figure = Figure(figsize=(11, min(11.0, max(5.6, 2.2 + 0.17 * len(rows)))), layout="constrained")
    scatter, errors = figure.subplots(1, 2, width_ratios=(1.15, 1))
    colors, markers = _colors(cells), _markers(cells)
    _draw_scatter(scatter, cells, colors, markers)
    _draw_errors(errors, rows, colors, markers)
    figure.suptitle("Simulated and measured time per output token", x=0.01, ha="left", fontweight="bold")
    note_below(figure, _note(comparison), 170)
    return figure


def _note(comparison: Comparison) -> str:
    """What the numbers are of: what all cells have in common, and then what tells their sections apart."""
    captions = list(dict.fromkeys(tuple(caption_of(pair)) for pair in comparison.pairs))
    common = [part for part in captions[0] if all(part in caption for caption in captions)]
    own = ["; ".join(part for part in caption if part not in common) for caption in captions if len(captions) > 1]
    more = [f"and {len(own) - _MOST_CAPTIONS} more"] if len(own) > _MOST_CAPTIONS else []
    about = "bars: smallest and largest of a replay's repeats"
    return " | ".join([*own[:_MOST_CAPTIONS], *more, "; ".join([*common, about, SCOPE])])


def _draw_scatter(axes: Axes, cells: Sequence[Cell], colors: dict[str, str], markers: dict[float, str]) -> None:
    values = [value for cell in cells for value in (cell.simulated_ms, cell.measured_low_ms, cell.measured_high_ms)]
    low, high = min(values) / 1.15, max(values) * 1.15
    band = 1 + MOST_TPOT_MAPE
    label = f"within {100 * MOST_TPOT_MAPE:g} %"
    within = axes.fill_between([low, high], [low / band, high / band], [low * band, high * band], label=label, **_BAND)
    axes.plot([low, high], [low, high], color="0.55", linewidth=1, zorder=1)
    for cell in cells:
        axes.errorbar(
            cell.measured_ms,
            cell.simulated_ms,
            xerr=[[cell.measured_ms - cell.measured_low_ms], [cell.measured_high_ms - cell.measured_ms]],
            **_looks(cell, colors, markers),
        )
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal", anchor="N")
    axes.set_xlabel("measured TPOT (ms), log scale")
    axes.set_ylabel("simulated TPOT (ms), log scale")
    for axis in (axes.xaxis, axes.yaxis):
        subs = (1, 1.5, 2, 3, 5, 7) if high < 30 * low else (1, 2, 5)
        axis.set_major_locator(MaxNLocator(5) if high < 2 * low else LogLocator(subs=subs, numticks=99))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())
    axes.grid(color="0.93", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    handles: list[Artist] = [
        Line2D([], [], color=color, marker="o", linestyle="", label=name) for name, color in colors.items()
    ]
    grey: dict[str, Any] = {"color": "0.35", "linestyle": ""}
    handles += [Line2D([], [], marker=markers[x], label=f"copied x{x:g}", **grey) for x in markers]
    if any(cell.is_fitted for cell in cells):
        handles.append(Line2D([], [], marker="o", fillstyle="none", label="fitted, not judged", **grey))
    axes.legend(handles=[*handles, within], loc="upper left", frameon=False, fontsize=8.5, handletextpad=0.3)


def _draw_errors(axes: Axes, rows: Sequence[Cell], colors: dict[str, str], markers: dict[float, str]) -> None:
    limit = 100 * MOST_TPOT_MAPE
    axes.axvspan(-limit, limit, **_BAND)
    axes.axvline(0, color="0.55", linewidth=1, zorder=1)
    for row, cell in enumerate(rows):
        error = 100 * cell.tpot_error
        # the slowest repeat gives the lowest error
        low, high = (100 * (cell.simulated_ms / ms - 1) for ms in (cell.measured_high_ms, cell.measured_low_ms))
        axes.plot([0, error], [row, row], color=colors[cell.policy], linewidth=1, alpha=0.5, zorder=1)
        axes.errorbar(error, row, xerr=[[error - low], [high - error]], **_looks(cell, colors, markers))
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), _row_names(rows))
    if len(rows) > _MOST_NAMED:
        axes.set_yticks([])
    axes.tick_params(axis="y", labelsize=8 if len(rows) <= 40 else 6, length=0)
    reach = max(limit * 1.4, *(abs(bound) for bound in axes.get_xlim()))
    axes.set_xlim(-reach, reach)
    axes.set_xlabel("error of TPOT, simulated over measured less 1 (%)")
    axes.grid(axis="x", color="0.93", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    for row in range(1, len(rows)):
        if rows[row].policy != rows[row - 1].policy:
            axes.axhline(row - 0.5, color="0.85", linewidth=0.8, zorder=0)


def _row_names(rows: Sequence[Cell]) -> list[str]:
    """The cells' names, without what all of them end with."""
    shared = {cell.name.rpartition("/")[2] for cell in rows}
    names = [cell.name.rpartition("/")[0] if len(shared) == 1 else cell.name for cell in rows]
    return [name.replace("/", "  ") for name in names]


def _looks(cell: Cell, colors: dict[str, str], markers: dict[float, str]) -> dict[str, Any]:
    color = colors[cell.policy]
    return {
        "color": color,
        "marker": markers[cell.h2d_bytes_factor],
        "markersize": 6.5,
        "markerfacecolor": "white" if cell.is_fitted else color,
        "markeredgecolor": color if cell.is_fitted else "white",
        "markeredgewidth": 1.2 if cell.is_fitted else 0.6,
        "elinewidth": 1.2,
        "capsize": 2.5,
        "zorder": 3,
    }


def _markers(cells: Sequence[Cell]) -> dict[float, str]:
    factors = sorted({cell.h2d_bytes_factor for cell in cells})
    return {factor: _MARKERS[nth % len(_MARKERS)] for nth, factor in enumerate(factors)}


def _colors(cells: Sequence[Cell]) -> dict[str, str]:
    """A colour for each policy: that of other figures, or one that is left where another has its own."""
    names = list(dict.fromkeys(cell.policy for cell in cells))
    styles: dict[str, Style] = {}
    for name in sorted(names, key=lambda name: name not in STYLES):
        style, taken = style_of(name), {style.color for style in styles.values()}
        left = [color for color in _COLORS if color not in taken]
        styles[name] = replace(style, color=left[0]) if style.color in taken and left else style
    return {name: styles[name].color for name in names}
