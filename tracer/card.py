"""Tables of a model card: every statistic recomputed from traces, beside the numbers that the OLED-MoE paper prints."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tracer.schema import TraceError
from tracer.statistics import Overlap, Statistics, statistics_of

PAPER = "OLED-MoE, LLaDA2.0"  # sections 3.1, 3.3 and 5.2, at block length 16; mini and flash
_NONE = "—"
_SLOTS = (40, 100)  # the paper's cache sizes
_ACCEPTED = ((0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 8), (9, 16), (17, 32), (33, 64))
_CONFIDENCE = ((0.0, 0.5), (0.5, 0.9), (0.9, 0.99), (0.99, 1.0))
_STATES = {
    "all tokens": ("masked", "accepted", "decoded"),
    "still masked": ("masked",),
    "just accepted": ("accepted",),
    "decoded before": ("decoded",),
}
_BLOCK = re.compile(
    r"(?P<command><!-- python -m tracer\.card (?P<arguments>[^\n]*) -->\n).*?(?P<end><!-- end -->)", re.DOTALL
)

Row = tuple[str, list[str], str]  # heading, a cell for each trace, the paper's


def _summary(traces: Sequence[Statistics]) -> list[Row]:
    def row(heading: str, cell: Callable[[Statistics], str], paper: str = "") -> Row:
        return heading, [cell(trace) for trace in traces], paper

    slots = [num for num in _SLOTS if any(num <= trace.num_experts for trace in traces)]
    return [
        row("block length", lambda t: _plain(t.block_length), "16"),
        row("requests", lambda t: f"{t.num_requests:,}"),
        row("denoise forwards", lambda t: f"{t.num_denoise_forwards:,}"),
        row("tokens per forward", lambda t: f"{t.tokens_per_forward:.2f}"),
        row("tokens per denoise forward", lambda t: f"{t.tokens_per_denoise:.2f}"),
        row("activated experts per layer", lambda t: f"{t.mean_activated:.1f}", "about 60 (mini), 90 (flash)"),
        row("of a block's first forward", lambda t: _count(t.by_iteration.get(0))),
        row("of the layer with fewest, most", _extremes, "clearly different"),
        row("activated experts / top k", lambda t: f"{t.mean_activated / t.top_k:.1f}", "around 8 (mini)"),
        row("overlap of adjacent forwards", lambda t: _overlap(t.by_gap.get(1)), "0.85 to 0.90"),
        row("its floor, between unrelated requests", lambda t: _overlap(t.floor)),
        row("its Jaccard index", lambda t: _ratio(t.by_gap[1].jaccard if 1 in t.by_gap else None)),
        *(
            row(f"overlap at gap {gap}", lambda t, gap=gap: _overlap(t.by_gap.get(gap)), "falls")
            for gap in (2, 4, 8)
            if any(gap in trace.by_gap for trace in traces)
        ),
        row("overlap, last forward to next block", lambda t: _overlap(t.after_last), "more than 0.65"),
        row("its floor, openings of unrelated requests", lambda t: _overlap(t.after_last_floor)),
        row("overlap, first forward to next block", lambda t: _overlap(t.after_first)),
        row("its floor, openings of unrelated requests", lambda t: _overlap(t.after_first_floor)),
        row("cosine of router inputs", lambda t: _ratio(_mean(t.cos_router_input)), "hidden states: reaching 0.98"),
        row("cosine of layer outputs", lambda t: _ratio(_mean(t.cos_layer_output))),
        *(
            row(f"working set of {window} forwards", lambda t, w=window: _count(t.working_sets.get(w)))
            for window in (4, 16, 64)
            if any(window in trace.working_sets for trace in traces)
        ),
        *(row(f"LRU hit ratio, {num} slots", lambda t, num=num: _lru(t, num)) for num in slots),
        row("activations of the hottest tenth", lambda t: _ratio(t.hottest_share)),
    ]


def _by_accepted(traces: Sequence[Statistics]) -> list[Row]:
    rows = []
    for low, high in _ACCEPTED:
        groups = [_pooled(o for num, o in t.by_accepted.items() if low <= num <= high) for t in traces]
        if any(group.num_pairs for group in groups):
            heading = f"{low}" if low == high else f"{low} to {high}"
            rows.append((heading, [_overlap(group, with_pairs=True) for group in groups], ""))
    return rows


def _confidence(traces: Sequence[Statistics]) -> list[Row]:
    rows = []
    for name, states in _STATES.items():
        for low, high in _CONFIDENCE:
            cells = [_kept(trace, states, low, high) for trace in traces]
            if any(cell != _NONE for cell in cells):
                rows.append((f"{name}, {low:g} to {high:g}", cells, ""))
    return rows


def _layers(traces: Sequence[Statistics]) -> list[Row]:
    rows = []
    for layer_id in sorted({layer.layer_id for trace in traces for layer in trace.activated}):
        cells = []
        for trace in traces:
            found = {layer.layer_id: layer for layer in trace.activated}.get(layer_id)
            cells.append(f"{found.mean:.1f} ± {found.spread:.1f}" if found else _NONE)
        rows.append((f"{layer_id}", cells, ""))
    return rows


class Table(NamedTuple):
    """One table of a card."""

    caption: str
    corner: str
    rows_of: Callable[[Sequence[Statistics]], list[Row]]


TABLES = {
    "summary": Table("Locality of expert sets, beside what the paper prints for the real models:", "", _summary),
    "accepted": Table(
        "Overlap of adjacent forwards by the tokens accepted between them (pairs in brackets):",
        "tokens accepted",
        _by_accepted,
    ),
    "confidence": Table(
        "Share of its experts that a token keeps in the next denoise forward, by the confidence that the forward left "
        "(tokens in brackets):",
        "tokens, confidence",
        _confidence,
    ),
    "layers": Table("Activated experts by layer, mean ± standard deviation over denoise forwards:", "layer", _layers),
}


def card(traces: Sequence[Statistics], tables: Collection[str] = tuple(TABLES)) -> str:
    """Markdown tables, a column for each trace, with their source; those that would be empty are left out."""
    parts = ["; ".join(dict.fromkeys(source(trace) for trace in traces)) + "."]
    for name, table in TABLES.items():
        if name in tables and (rows := table.rows_of(traces)):
            parts += [table.caption, _table(traces, table.corner, rows)]
    return "\n\n".join(parts) + "\n"


def source(trace: Statistics) -> str:
    """What the traced model was, so that a proxy is never taken for the real one."""
    minutes = "" if trace.training_minutes is None else f", trained {trace.training_minutes:g} minutes"
    threshold = "" if trace.threshold is None else f", threshold {trace.threshold:g}"
    shape = f"{trace.num_layers} MoE layers of {trace.num_experts} experts, top {trace.top_k}"
    return f"Source `{trace.source}`: hidden {trace.hidden}, {shape}{minutes}{threshold}"


def update(text: str) -> str:
    """A card with its tables made anew: what stands between `<!-- python -m tracer.card ... -->` and `<!-- end -->`.

    Raises:
        TraceError: a trace that is named there is missing or damaged.
    """
    once = cache(statistics_of)  # large traces stand in several tables
    return _BLOCK.sub(lambda block: f"{block['command']}\n{_answer(_parse_block(block), once)}\n{block['end']}", text)


def traces_of(text: str) -> list[str]:
    """Names of the traces that the tables of a card are made from."""
    return [name for block in _BLOCK.finditer(text) for name in _parse_block(block).trace]


def _table(traces: Sequence[Statistics], corner: str, rows: Sequence[Row]) -> str:
    with_paper = any(paper for _, _, paper in rows)
    heads = [corner, *(trace.trace for trace in traces), *([PAPER] if with_paper else [])]
    lines = [heads, ["---", *["---:"] * len(traces), *(["---"] if with_paper else [])]]
    lines += [[heading, *cells, *([paper or _NONE] if with_paper else [])] for heading, cells, paper in rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _pooled(groups: Iterable[Overlap]) -> Overlap:
    """Mean over the pairs of several groups."""
    found = list(groups)
    num = sum(group.num_pairs for group in found)
    if not num:
        return Overlap(0, None, None)
    overlap, jaccard = (
        sum(group.num_pairs * (getattr(group, name) or 0.0) for group in found) / num for name in ("overlap", "jaccard")
    )
    return Overlap(num, overlap, jaccard)


def _kept(trace: Statistics, states: Collection[str], low: float, high: float) -> str:
    bins = [kept for kept in trace.kept if kept.state in states and low <= kept.low and kept.high <= high]
    num = sum(kept.num_tokens for kept in bins)
    if not num:
        return _NONE
    return f"{sum(kept.num_tokens * kept.ratio for kept in bins) / num:.3f} ({num:,})"


def _extremes(trace: Statistics) -> str:
    means = [layer.mean for layer in trace.activated]
    return f"{min(means):.1f}, {max(means):.1f}"


def _overlap(overlap: Overlap | None, with_pairs: bool = False) -> str:
    if overlap is None or overlap.overlap is None:
        return _NONE
    return f"{overlap.overlap:.3f}" + (f" ({overlap.num_pairs:,})" if with_pairs else "")


def _lru(trace: Statistics, slots: int) -> str:
    if slots > trace.num_experts:
        return _NONE
    return f"{trace.lru_lowest[slots]:.2f} to {trace.lru_highest[slots]:.2f}"


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _ratio(value: float | None) -> str:
    return _NONE if value is None else f"{value:.3f}"


def _count(value: float | None) -> str:
    return _NONE if value is None else f"{value:.1f}"


def _plain(value: object) -> str:
    return _NONE if value is None else str(value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tracer.card", description=__doc__)
    parser.add_argument("trace", nargs="*", help="directory of a trace, or the name of a shipped one")
    parser.add_argument("--tables", nargs="+", choices=tuple(TABLES), default=list(TABLES), help="default: all")
    parser.add_argument("--json", action="store_true", help="all numbers, not rounded, instead of tables")
    parser.add_argument("--update", type=Path, metavar="README.md", help="make the tables in this card anew")
    return parser


def _parse_block(block: re.Match[str]) -> argparse.Namespace:
    return _parser().parse_args(block["arguments"].split())


def _answer(options: argparse.Namespace, measured: Callable[[str], Statistics] = statistics_of) -> str:
    traces = [measured(name) for name in options.trace]
    if options.json:
        return json.dumps([asdict(trace) for trace in traces], indent=2) + "\n"
    return card(traces, options.tables)


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m tracer.card TRACE...`: print the tables; returns 2 when a trace cannot be read, else 0."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if bool(options.trace) == bool(options.update):
        parser.error("give traces, or --update and a card")
    try:
        if options.update:
            options.update.write_text(update(options.update.read_text()))
        else:
            print(_answer(options), end="")
    except (TraceError, OSError) as error:
        print(f"tracer.card: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
