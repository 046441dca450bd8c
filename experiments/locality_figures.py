"""Figures of what traces say of their models' routing: a line or a group of bars for each trace, with source and caveats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from numpy.typing import ArrayLike

from experiments.figures import note_below
from tracer.locality_routes import CONFIDENCE_EDGES
from tracer.statistics import Overlap, Statistics

# Okabe and Ito's colours, as in the other figures; in grey print the markers tell
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = ("o", "D", "^", "s", "v", "P")
_PAPER = "0.45"
_DPI = 85
_LEGEND: dict[str, Any] = {"frameon": False, "fontsize": 9, "borderaxespad": 0.2}


def plot_layers(traces: Sequence[Statistics]) -> Figure:
    """Activated experts, adjacent overlap and cosine of router inputs, by layer; bands are one standard deviation."""
    figure, (activated, overlap, cosine) = _figure(1, 3, "Every layer by itself")
    for trace, style in _styled(traces):
        layers = [layer.layer_id for layer in trace.activated]
        mean = np.array([layer.mean for layer in trace.activated])
        spread = np.array([layer.spread for layer in trace.activated])
        activated.plot(layers, mean, **style)
        activated.fill_between(layers, mean - spread, mean + spread, color=style["color"], alpha=0.12, linewidth=0)
        for axes, values in ((overlap, trace.overlap_by_layer), (cosine, trace.cos_router_input)):
            if values:
                axes.plot(layers, values, **style)
    for axes, title in (
        (activated, "activated experts"),
        (overlap, "overlap of adjacent forwards"),
        (cosine, "cosine of adjacent router inputs"),
    ):
        _label(axes, title, "MoE layer")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    activated.set_ylim(0, max(98, activated.get_ylim()[1]))
    for axes in (overlap, cosine):
        axes.set_ylim(0.5 if axes.dataLim.y0 >= 0.5 else 0, 1)
    _paper_line(activated, 60, "paper, mini")
    _paper_line(activated, 90, "paper, flash")
    _paper_band(overlap, 0.85, 0.9, "paper")
    return _finish(figure, traces)


def plot_overlap(traces: Sequence[Statistics], max_gap: int = 12) -> Figure:
    """Overlap by gap within a block, and by the tokens accepted between; dots are the floor of unrelated requests."""
    figure, (by_gap, by_accepted) = _figure(1, 2, "Overlap falls with what changes in between")
    for trace, style in _styled(traces):
        _draw_overlaps(by_gap, {gap: pairs for gap, pairs in trace.by_gap.items() if gap <= max_gap}, style)
        _draw_overlaps(by_accepted, trace.by_accepted, style)
        if trace.floor.overlap is not None:
            for axes in (by_gap, by_accepted):
                axes.axhline(trace.floor.overlap, color=style["color"], linestyle=":", linewidth=1.3)
    _label(by_gap, "by gap", "gap in forwards of a block; 1 is adjacent")
    _label(by_accepted, "by tokens accepted between adjacent forwards", "tokens accepted (size of a point: pairs)")
    for axes in (by_gap, by_accepted):
        axes.set_ylim(0, 1.02)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _paper_band(by_gap, 0.85, 0.9, "paper, adjacent")
    _paper_band(by_accepted, 0.85, 0.9, "")
    return _finish(figure, traces, "dotted: floor between unrelated requests")


def plot_boundaries(traces: Sequence[Statistics]) -> Figure:
    """Activated experts by iteration, and overlap of an opening with the last and the first forward before, over its floor."""
    figure, (sizes, bars) = _figure(1, 2, "What predicts the opening of a block")
    pairs: dict[str, Callable[[Statistics], tuple[Overlap | None, Overlap]]] = {
        "adjacent,\nwithin a block": lambda trace: (trace.by_gap.get(1), trace.floor),
        "last forward\nof the block before": lambda trace: (trace.after_last, trace.after_last_floor),
        "first forward\nof the block before": lambda trace: (trace.after_first, trace.after_first_floor),
    }
    width = 0.76 / len(traces)
    for nth, (trace, style) in enumerate(_styled(traces)):
        sizes.plot(list(trace.by_iteration), list(trace.by_iteration.values()), **style)
        for group, overlaps in enumerate(pairs.values()):
            found, floor = (one.overlap if one else None for one in overlaps(trace))
            at = group + (nth - (len(traces) - 1) / 2) * width
            drawn = bars.bar(at, found or 0.0, width * 0.92, color=style["color"])
            bars.bar_label(drawn, ["none" if found is None else f"{found:.2f}"], fontsize=8, padding=2)
            if floor is not None:
                bars.hlines(floor, at - width * 0.46, at + width * 0.46, color="black", linewidth=2)
    bars.plot([0.47, 0.47], [0.85, 0.9], color=_PAPER, linewidth=6, solid_capstyle="butt")
    bars.annotate("", (1.47, 0.75), (1.47, 0.65), arrowprops={"arrowstyle": "->", "color": _PAPER, "linewidth": 2})
    for at, height in ((0.47, 0.9), (1.47, 0.75)):
        bars.text(at, height + 0.01, "paper", fontsize=8, color=_PAPER, ha="center", va="bottom")
    bars.set_xticks(range(len(pairs)), list(pairs))
    bars.set_ylim(0, 1.02)
    sizes.set_ylim(bottom=0)
    sizes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _label(sizes, "activated experts per layer", "denoise forwards since the block was opened")
    _label(bars, "overlap with the later forward", "")
    note = "black: floor, the same with a forward of an unrelated request"
    return _finish(figure, traces, note, "paper: 0.85 to 0.90, and more than 0.65 across boundaries")


def plot_working_sets(traces: Sequence[Statistics]) -> Figure:
    """Distinct experts of a layer in windows of forwards, and what LRU caches of each size would have at hand."""
    figure, (sets, hits) = _figure(1, 2, "How large a cache must be")
    for trace, style in _styled(traces):
        sets.plot(list(trace.working_sets), list(trace.working_sets.values()), **style)
        slots = np.arange(len(trace.lru_lowest))
        hits.fill_between(slots, trace.lru_lowest, trace.lru_highest, color=style["color"], alpha=0.18, linewidth=0)
        for edge in (trace.lru_lowest, trace.lru_highest):
            hits.plot(slots, edge, color=style["color"], linewidth=1)
    windows = sorted({window for trace in traces for window in trace.working_sets})
    sets.set_xscale("log", base=2)
    sets.xaxis.set_major_locator(FixedLocator(windows))
    sets.xaxis.set_minor_locator(NullLocator())
    sets.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    num_experts = max(trace.num_experts for trace in traces)
    _paper_line(sets, num_experts, "all experts")
    sets.set_ylim(0, num_experts * 1.08)
    _label(sets, "working set (experts of a layer)", "successive decode forwards of a request")
    for slots in (40, 100):
        hits.axvline(slots, color=_PAPER, linestyle=":", linewidth=1, zorder=0)
    hits.set_ylim(0, 1.02)
    hits.set_xlim(0, num_experts)
    _label(hits, "hit ratio of LRU, lowest to highest", "cache size (expert slots for each MoE layer)")
    return _finish(
        figure,
        traces,
        "the band of LRU is what the order of touching a forward's experts decides; dotted: the paper's cache sizes",
    )


def plot_stability(traces: Sequence[Statistics]) -> Figure:
    """Share of its experts that a token keeps in the next forward, by confidence, a panel for each state of a token."""
    states = {"masked": "still masked", "accepted": "just accepted", "decoded": "decoded before"}
    figure, panels = _figure(1, 3, "Confidence and the stability of routes", sharey=True)
    for trace, style in _styled(traces):
        for state, axes in zip(states, panels, strict=True):
            _draw_kept(axes, trace, state, style)
    for name, axes in zip(states.values(), panels, strict=True):
        _label(axes, name, "confidence that the earlier forward left")
        axes.set_ylim(0, 1.02)
        axes.set_xticks(
            range(len(CONFIDENCE_EDGES)), [f"{edge:g}" for edge in CONFIDENCE_EDGES], rotation=90, fontsize=8
        )
    panels[0].set_ylabel("share of its experts that a token keeps", fontsize=9)
    return _finish(figure, traces, "size of a point: share of the trace's tokens")


def plot_heat(traces: Sequence[Statistics]) -> Figure:
    """Experts of a layer by the share of forwards that activate them, hottest first, mean over layers."""
    figure, axes = _figure(1, 1, "Hot and cold experts")
    for trace, style in _styled(traces):
        axes.plot(np.arange(1, trace.num_experts + 1), trace.sorted_heat, color=style["color"], linewidth=1.8)
    axes.set_xlim(left=1)
    axes.set_ylim(0, 1.02)
    _label(axes, "share of decode forwards that activate it", "experts of a layer, hottest first")
    shares = [f"{label} {trace.hottest_share:.0%}" for trace, label in zip(traces, _labels(traces), strict=True)]
    return _finish(figure, traces, f"share of activations that the hottest tenth takes: {', '.join(shares)}")


def plot_block_lengths(traces: Sequence[Statistics]) -> Figure:
    """Tokens per forward, activated experts and overlap by block length, of traces that differ in that alone."""
    figure, panels = _figure(1, 3, "Longer blocks: more tokens, more experts")
    ordered = sorted(traces, key=lambda trace: trace.block_length or 0)
    lengths = [trace.block_length for trace in ordered]
    tokens, activated, overlap = panels
    _by_block_length(tokens, lengths, [trace.tokens_per_forward for trace in ordered], "tokens per forward", 0)
    _by_block_length(activated, lengths, [trace.mean_activated for trace in ordered], "activated experts per layer", 0)
    pairs = {
        "adjacent": [trace.by_gap.get(1) for trace in ordered],
        "last forward to next block": [trace.after_last for trace in ordered],
        "its floor": [trace.after_last_floor for trace in ordered],
    }
    for nth, (name, column) in enumerate(pairs.items()):
        _by_block_length(overlap, lengths, [one and one.overlap for one in column], name, nth)
    for axes, title in zip(panels, ("tokens per forward", "activated experts per layer", "overlap"), strict=True):
        _label(axes, title, "block length")
        axes.set_ylim(bottom=0)
    overlap.set_ylim(0, 1.02)
    _finish(figure, traces, with_legend=False)
    figure.legend(handles=overlap.lines, loc="upper right", ncols=len(pairs), **_LEGEND)
    return figure


def _by_block_length(axes: Axes, lengths: Sequence[Any], values: Sequence[float | None], name: str, nth: int) -> None:
    """A line over the block lengths that have a value."""
    points = [(length, value) for length, value in zip(lengths, values, strict=True) if value is not None]
    x, y = zip(*points, strict=True) if points else ((), ())
    axes.plot(x, y, color=_COLORS[nth], marker=_MARKERS[nth], linewidth=1.8, label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted(set(lengths))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _figure(rows: int, columns: int, title: str, *, sharey: bool = False) -> tuple[Figure, Any]:
    figure = Figure(figsize=(9.6 if columns > 1 else 7.2, 3.9), dpi=_DPI, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    return figure, figure.subplots(rows, columns, sharey=sharey)


def _styled(traces: Sequence[Statistics]) -> Iterator[tuple[Statistics, dict[str, Any]]]:
    """Each trace with how its lines are drawn."""
    for nth, (trace, label) in enumerate(zip(traces, _labels(traces), strict=True)):
        style = {"color": _COLORS[nth % len(_COLORS)], "marker": _MARKERS[nth % len(_MARKERS)], "label": label}
        yield trace, {**style, "linewidth": 1.8, "markersize": 5, "markeredgecolor": "white", "markeredgewidth": 0.5}


def _labels(traces: Sequence[Statistics]) -> list[str]:
    """Names of the traces, without the parts that they all begin with."""
    names = [trace.trace.split("-") for trace in traces]
    num_shared = 0
    while (
        len(traces) > 1
        and len({tuple(name[: num_shared + 1]) for name in names}) == 1 < min(map(len, names)) - num_shared
    ):
        num_shared += 1
    return ["-".join(name[num_shared:]) for name in names]


def _draw_overlaps(axes: Axes, overlaps: dict[int, Overlap], style: dict[str, Any]) -> None:
    """A line over the numbers, its points sized by their share of the pairs."""
    num = np.array([pairs.num_pairs for pairs in overlaps.values()])
    means = [pairs.overlap for pairs in overlaps.values()]
    _points(axes, list(overlaps), means, 14 + 110 * num / num.max(initial=1), style)


def _draw_kept(axes: Axes, trace: Statistics, state: str, style: dict[str, Any]) -> None:
    """A point in the middle of each bin; all edges of bins are drawn one apart, however far they are."""
    bins = [kept for kept in trace.kept if kept.state == state]
    at = [CONFIDENCE_EDGES.index(kept.low) + 0.5 for kept in bins]
    num_all = sum(kept.num_tokens for kept in trace.kept)
    ratios = [kept.ratio for kept in bins]
    _points(axes, at, ratios, [14 + 220 * kept.num_tokens / num_all for kept in bins], style)


def _points(axes: Axes, x: Sequence[float], y: Sequence[Any], sizes: ArrayLike, style: dict[str, Any]) -> None:
    """A line whose points have sizes of their own."""
    axes.plot(x, y, color=style["color"], linewidth=1.2)
    axes.scatter(x, y, s=sizes, c=style["color"], marker=style["marker"], edgecolor="white", zorder=2)


def _label(axes: Axes, title: str, xlabel: str) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(xlabel, fontsize=9)
    axes.tick_params(labelsize=9)
    axes.grid(axis="y", color="0.88", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _paper_line(axes: Axes, value: float, text: str) -> None:
    axes.axhline(value, color=_PAPER, linestyle="--", linewidth=1.1, zorder=1)
    axes.annotate(text, (0.02, value), (0, 2), ("axes fraction", "data"), "offset points", fontsize=8, color=_PAPER)


def _paper_band(axes: Axes, low: float, high: float, text: str) -> None:
    axes.axhspan(low, high, color=_PAPER, alpha=0.18, linewidth=0, zorder=0)
    axes.annotate(
        text, (1, high), (0, 1), ("axes fraction", "data"), "offset points", fontsize=8, color=_PAPER, ha="right"
    )


def _finish(figure: Figure, traces: Sequence[Statistics], *notes: str, with_legend: bool = True) -> Figure:
    """Add the legend, and what the numbers are of."""
    if with_legend:
        lines = [Line2D([], [], **style) for _, style in _styled(traces)]
        figure.legend(handles=lines, loc="upper right", ncols=len(lines), **_LEGEND)
    note_below(figure, "; ".join([*_sources(traces), *notes]), int(17 * figure.get_figwidth()))
    return figure


def _sources(traces: Sequence[Statistics]) -> Iterator[str]:
    """Name, hidden size, minutes of training and tokens per forward, so that a proxy is never taken for the real model."""
    labelled = list(zip(traces, _labels(traces), strict=True))
    for source, group in groupby(labelled, key=lambda one: _model(one[0])):
        tokens = [(label, trace.tokens_per_forward) for trace, label in group]
        if len(labelled) == 1:
            yield f"{source}, {tokens[0][1]:.2f} tokens per forward"
        else:
            yield f"{source}; tokens per forward: {', '.join(f'{label} {value:.2f}' for label, value in tokens)}"


def _model(trace: Statistics) -> str:
    kind, name = trace.source.split(":", 1)
    minutes = "" if trace.training_minutes is None else f", {trace.training_minutes:g} minutes of training"
    return f"{name if kind == 'proxy' else trace.source}, hidden {trace.hidden}{minutes}"
