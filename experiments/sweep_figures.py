"""Figures of a sweep over cache sizes and bandwidths of one trace and machine, from the table of its cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, LogNorm, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from numpy.typing import NDArray

from experiments.figures import STYLES, Style, note_below, style_of
from experiments.table import LIKE_BEST, OVER_BEST, SECTION, describe

BANDWIDTH = "hardware.h2d_bytes_per_s"
GIB = 2**30
_CELL = "slots_per_layer", BANDWIDTH
_OF_PROFILE = ("hardware_changes", "profile_hash")  # differ with the bandwidth
# Okabe and Ito's colours, as in the other figures
_COLORS = ("#E69F00", "#009E73", "#56B4E9", "#0072B2", "#D55E00", "#CC79A7")
_LINK, _CPU, _GPU = "#56B4E9", "#E69F00", "#7FC7A9"
_DPI = 85
_LEGEND: dict[str, Any] = {"loc": "upper right", "frameon": False, "fontsize": 9, "borderaxespad": 0.2}


def plot_maps(table: pl.DataFrame) -> Figure:
    """Time per output token by cache size and bandwidth, a map for each policy, all of one scale."""
    _check(table)
    policies = _policies(table)
    figure, panels = _figure(len(policies), "Time per output token (ms)", shares_axes=True)
    times = table.filter("sized")["tpot_ms"].drop_nulls().to_numpy()
    norm = LogNorm(times.min(), times.max())
    middle = np.sqrt(times.min() * times.max())
    for axes, policy in zip(panels, policies, strict=True):
        values = _grid(table.filter(policy=policy), "tpot_ms")
        axes.imshow(values, cmap="viridis_r", norm=norm, aspect="auto", origin="lower")
        _write(axes, values, lambda value: f"{value:.3g}", lambda value: "white" if value > middle else "black")
        axes.set_title(policy, loc="left", fontsize=10)
    _label_cells(panels, table)
    return _finish(figure, table)


def plot_best(table: pl.DataFrame) -> Figure:
    """Which policy is fastest at each cache size and bandwidth, and which others the requests do not tell apart from it.

    Policies that know the trace are left out.
    """
    _check(table)
    figure, (axes,) = _figure(1, "The fastest policy", width=8.2)
    cells = table.filter("sized", ~pl.col("clairvoyant"), pl.col(OVER_BEST[0]).is_not_null())
    best = cells.filter(pl.col(OVER_BEST[0]) == 0).unique(_CELL, keep="first", maintain_order=True)
    like = cells.filter((pl.col(OVER_BEST[1]) <= 0) & (pl.col(OVER_BEST[2]) >= 0) & (pl.col(OVER_BEST[0]) > 0))
    names = [name for name in _policies(table) if name in set(best["policy"])]
    codes = best.with_columns(code=pl.col("policy").replace_strict({name: i for i, name in enumerate(names)}))
    styles = _styles(table)
    colors = [styles[name].color for name in names]
    values = _grid(codes, "code", of=table)
    axes.imshow(values, cmap=ListedColormap(colors), vmin=-0.5, vmax=len(names) - 0.5, aspect="auto", origin="lower")
    sizes, bandwidths = _axes(table)
    for row in best.iter_rows(named=True):
        others = like.filter(**{key: row[key] for key in _CELL})["policy"].to_list()
        at = sizes.index(row[_CELL[0]]), bandwidths.index(row[_CELL[1]])
        text = "\n".join([row["policy"], *(f"{LIKE_BEST} {name}" for name in others)])
        axes.text(*at, text, ha="center", va="center", fontsize=8, color=_on(styles[row["policy"]].color))
    _label_cells([axes], table)
    note = f"{LIKE_BEST}: the 95 % interval of the difference (paired bootstrap over {table['num_requests'][0]} requests) holds 0"
    return _finish(figure, table, note)


def plot_knees(table: pl.DataFrame, within: float) -> Figure:
    """Time per token over that of a GPU that holds all experts, by cache size; dots mark the smallest cache near it.

    Args:
        table: has a row of `full` for each bandwidth.
        within: what counts as near, as a share above.
    """
    _check(table)
    _, bandwidths = _axes(table)
    figure, panels = _figure(len(bandwidths), "How large a cache must be", shares_axes=True)
    styles, smallest = _styles(table), knees(table, within)
    for axes, bandwidth in zip(panels, bandwidths, strict=True):
        for policy in _policies(table):
            rows = relative_to_full(table).filter(pl.col(BANDWIDTH) == bandwidth, policy=policy, sized=True)
            rows = rows.sort("slots_per_layer")
            color, marker = styles[policy].color, styles[policy].marker
            axes.plot(
                rows["slots_per_layer"], rows["over_full"], color=color, marker=marker, markersize=4, label=policy
            )
            knee = smallest.filter(pl.col(BANDWIDTH) == bandwidth, policy=policy)["slots_per_layer"].to_list()
            for slots in knee:
                height = rows.filter(slots_per_layer=slots)["over_full"]
                axes.plot(
                    [slots], height, marker="o", markersize=11, color=color, fillstyle="none", markeredgewidth=1.8
                )
        axes.axhline(1 + within, color="0.45", linestyle=":", linewidth=1.2)
        axes.set_title(_bandwidth(bandwidth), loc="left", fontsize=10)
        _log_scale(axes)
        axes.set_xlabel("slots a layer", fontsize=9)
    panels[0].set_ylabel("TPOT over that of full", fontsize=9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=len(labels), **_LEGEND)
    return _finish(figure, table, f"rings: smallest of these caches within {within:.0%} of full, dotted")


def plot_pareto(table: pl.DataFrame) -> Figure:
    """Time per token against GPU memory for experts, with the points that none beats in both; one panel a bandwidth."""
    _check(table)
    _, bandwidths = _axes(table)
    figure, panels = _figure(len(bandwidths), "GPU memory for experts against time", shares_axes=True)
    choices, styles = table.filter(~pl.col("clairvoyant")), _styles(table)
    for axes, bandwidth in zip(panels, bandwidths, strict=True):
        of_panel = choices.filter(pl.col(BANDWIDTH) == bandwidth)
        front = pareto(of_panel)
        axes.plot(
            front["gpu_expert_bytes"] / GIB,
            front["tpot_ms"],
            color="0.6",
            linewidth=5,
            zorder=0,
            drawstyle="steps-post",
        )
        for policy in of_panel["policy"].unique(maintain_order=True):
            rows, style = of_panel.filter(policy=policy), styles[policy]
            axes.scatter(
                rows["gpu_expert_bytes"] / GIB,
                rows["tpot_ms"],
                s=30,
                c=style.color,
                marker=style.marker or "*",
                label=policy,
            )
        _log_scale(axes)
        axes.set_title(_bandwidth(bandwidth), loc="left", fontsize=10)
        axes.set_xlabel("GiB of experts on the GPU", fontsize=9)
    panels[0].set_ylabel("TPOT (ms)", fontsize=9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=len(labels), **_LEGEND)
    return _finish(
        figure, table, "grey: no other of these points has less memory and less time; memory includes staging"
    )


def plot_binding(table: pl.DataFrame) -> Figure:
    """What the time goes to at each cache size and bandwidth: the share of exposed stall, coloured by what is busier."""
    _check(table)
    policies = _policies(table)
    figure, panels = _figure(len(policies), "What binds", shares_axes=True)
    cells = with_stall_share(table)
    for axes, policy in zip(panels, policies, strict=True):
        rows = cells.filter(policy=policy)
        stall = _grid(rows, "stall_share")
        is_link = _grid(rows.with_columns(is_link=pl.col("link_busy_ratio") >= pl.col("cpu_busy_ratio")), "is_link")
        colors = np.where(is_link[..., None] > 0, to_rgb(_LINK), to_rgb(_CPU))
        colors[stall < 0.5] = to_rgb(_GPU)
        axes.imshow(colors, aspect="auto", origin="lower")
        _write(axes, stall, lambda value: f"{value:.0%}", lambda _: "black")
        axes.set_title(policy, loc="left", fontsize=10)
    _label_cells(panels, table)
    kinds = ((_LINK, "link"), (_CPU, "CPU"), (_GPU, "GPU"))
    figure.legend(handles=[Patch(color=color, label=name) for color, name in kinds], ncols=3, **_LEGEND)
    note = "numbers: exposed stall as a share of decode time; below one half the GPU binds, else the busier one of link and CPU"
    return _finish(figure, table, note)


def relative_to_full(table: pl.DataFrame) -> pl.DataFrame:
    """The cells with `over_full`, their time per token over that of `full` at the same bandwidth."""
    full = table.filter(policy="full").select(BANDWIDTH, full_ms="tpot_ms")
    return table.join(full, on=BANDWIDTH, how="left", maintain_order="left").with_columns(
        over_full=pl.col("tpot_ms") / pl.col("full_ms")
    )


def knees(table: pl.DataFrame, within: float) -> pl.DataFrame:
    """The smallest cache of each policy and bandwidth that is at most a share `within` slower than `full`."""
    near = relative_to_full(table).filter("sized", pl.col("over_full") <= 1 + within)
    return near.group_by("policy", BANDWIDTH, maintain_order=True).agg(pl.col("slots_per_layer").min())


def pareto(cells: pl.DataFrame) -> pl.DataFrame:
    """The cells that none has both less memory and less time than, from the smallest on."""
    ordered = cells.sort("gpu_expert_bytes", "tpot_ms")
    return ordered.filter(pl.col("tpot_ms") < pl.col("tpot_ms").cum_min().shift(1, fill_value=float("inf")))


def with_stall_share(table: pl.DataFrame) -> pl.DataFrame:
    """The cells with `stall_share`, exposed stall over decode time."""
    return table.with_columns(stall_share=pl.col("exposed_stall_ms_per_token") / pl.col("tpot_ms"))


def _check(table: pl.DataFrame) -> None:
    keys = [key for key in SECTION if key not in _OF_PROFILE]
    if BANDWIDTH not in table.columns or table.select(keys).n_unique() != 1:
        raise ValueError(f"a figure shows one trace and machine over {BANDWIDTH}; found several of {', '.join(keys)}")


def _policies(table: pl.DataFrame) -> list[str]:
    return table.filter("sized")["policy"].unique(maintain_order=True).to_list()


def _styles(table: pl.DataFrame) -> dict[str, Style]:
    """How each policy is drawn: as in other figures, or in a colour that is left where another has its own."""
    styles: dict[str, Style] = {}
    for policy in sorted(set(table["policy"]), key=lambda name: (name not in STYLES, name)):
        style, taken = style_of(policy), {style.color for style in styles.values()}
        left = [color for color in _COLORS if color not in taken]
        styles[policy] = replace(style, color=left[0]) if style.color in taken and left else style
    return styles


def _axes(table: pl.DataFrame) -> tuple[list[int], list[float]]:
    """Cache sizes and bandwidths, ascending."""
    return sorted(table.filter("sized")[_CELL[0]].unique()), sorted(table[BANDWIDTH].unique())


def _grid(rows: pl.DataFrame, column: str, of: pl.DataFrame | None = None) -> NDArray[np.float64]:
    """A column by bandwidth and size, [bandwidths, sizes]; cells that are not there are NaN."""
    sizes, bandwidths = _axes(rows if of is None else of)
    values = np.full((len(bandwidths), len(sizes)), np.nan)
    for slots, bandwidth, value in rows.select(*_CELL, column).iter_rows():
        values[bandwidths.index(bandwidth), sizes.index(slots)] = np.nan if value is None else value
    return values


def _bandwidth(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:g} GB/s"


def _figure(
    num_panels: int, title: str, *, shares_axes: bool = False, width: float = 11.0
) -> tuple[Figure, list[Axes]]:
    columns = min(num_panels, 4)
    rows = -(-num_panels // columns)
    figure = Figure(figsize=(width, 0.9 + 2.6 * rows), dpi=_DPI, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    panels = figure.subplots(rows, columns, sharex=shares_axes, sharey=shares_axes, squeeze=False).ravel().tolist()
    for axes in panels[num_panels:]:
        axes.set_visible(False)
    return figure, panels[:num_panels]


def _write(
    axes: Axes, values: NDArray[np.float64], text: Callable[[float], str], color: Callable[[float], str]
) -> None:
    """Write the value of each cell into it."""
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            axes.text(column, row, text(value), ha="center", va="center", fontsize=8, color=color(value))


def _label_cells(panels: Sequence[Axes], table: pl.DataFrame) -> None:
    sizes, bandwidths = _axes(table)
    for axes in panels:
        axes.set_xticks(range(len(sizes)), [str(slots) for slots in sizes])
        axes.set_yticks(range(len(bandwidths)), [f"{bandwidth / 1e9:g}" for bandwidth in bandwidths])
        axes.tick_params(labelsize=9, length=0)
        axes.set_xlabel("slots a layer", fontsize=9)
        axes.spines[:].set_visible(False)
    panels[0].set_ylabel("host to GPU, GB/s", fontsize=9)


def _on(color: str) -> str:
    """Black or white, whichever is read better on a colour."""
    red, green, blue = to_rgb(color)
    return "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"


def _log_scale(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=99))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.tick_params(labelsize=9)
    axes.grid(axis="y", color="0.88", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _finish(figure: Figure, table: pl.DataFrame, *notes: str) -> Figure:
    """Say below what the numbers are of."""
    text = "; ".join([*describe(table.row(0, named=True), across=BANDWIDTH), *notes])
    note_below(figure, text, int(16 * figure.get_figwidth()))
    return figure
