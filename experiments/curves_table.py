"""Curves and points as one tidy table, and as a short one for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl

from experiments.columns import WIDTH, Column, laid_out, percents, wrap
from simulator.curves import Curve
from tracer.files import metadata_hash
from tracer.statistics import training_minutes
from tracer.store import TraceReader

SCHEMA = {
    "curve": pl.String,  # name of the curve, or of a point's policy with its variant
    "is_point": pl.Boolean,  # a run in simulated time
    "policy": pl.String,
    "misses": pl.String,
    "pool": pl.String,
    "slots_per_layer": pl.Int64,
    "layer": pl.Int64,  # 0-based MoE layer; null for all together
    "hits": pl.Int64,
    "activated": pl.Int64,
    "hit_ratio": pl.Float64,
    "utilization": pl.Float64,
    "utilization_slot_weighted": pl.Float64,
    "num_forwards": pl.Int64,  # decode forwards that count
    "num_layers": pl.Int64,
    "num_experts": pl.Int64,
    "warmup": pl.Int64,
    "trace": pl.String,
    "trace_hash": pl.String,
    "source": pl.String,
    "traced_hidden": pl.Int64,
    "training_minutes": pl.Float64,
}
# What the short table shows: shares of the experts, and the slots that OLED-MoE, section 5, has.
SHARES, SLOTS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1), (40, 100)


def facts_of(reader: TraceReader, warmup_requests: int, found: Mapping[str, Curve]) -> dict[str, Any]:
    """What all rows have in common."""
    metadata = reader.metadata
    return {
        "num_forwards": next(iter(found.values())).num_forwards,
        "num_layers": metadata.shape.num_layers,
        "num_experts": metadata.shape.num_experts,
        "warmup": warmup_requests,
        "trace": reader.path.stem,
        "trace_hash": metadata_hash(metadata),
        "source": metadata.source,
        "traced_hidden": metadata.shape.hidden,
        "training_minutes": training_minutes(metadata),
    }


def as_frame(found: Mapping[str, Curve], facts: Mapping[str, Any]) -> pl.DataFrame:
    """One row for each curve, layer and size, and for all layers together; the columns of SCHEMA.

    Where all layers have as many slots, the mean of utilization over executions is that weighted by slots.
    """
    frames = []
    for name, curve in found.items():
        num_layers, num_experts = curve.hits.shape
        slots = np.arange(1, num_experts + 1)
        for layer in (None, *range(num_layers)):
            of = slice(None) if layer is None else slice(layer, layer + 1)
            hits, activated = curve.hits[of].sum(axis=0), int(curve.activated[of].sum())
            executions = curve.num_forwards * (num_layers if layer is None else 1)
            utilization = hits / (slots * executions) if executions else np.full(num_experts, np.nan)
            columns = {
                "curve": name,
                "is_point": False,
                "policy": "",
                "misses": "h2d",
                "pool": "layer",
                "slots_per_layer": slots,
                "layer": layer,
                "hits": hits,
                "activated": activated,
                "hit_ratio": hits / activated if activated else np.full(num_experts, np.nan),
                "utilization": utilization,
                "utilization_slot_weighted": utilization,
                **facts,
            }
            frames.append(pl.DataFrame(columns, schema=SCHEMA))
    return pl.concat(frames).with_columns(pl.selectors.float().fill_nan(None))


def as_text(frame: pl.DataFrame, width: int = WIDTH) -> str:
    """Both ratios of all layers together at some sizes, and the points, for a terminal."""
    together = frame.filter(pl.col("layer").is_null())
    drawn, points = together.filter(~pl.col("is_point")), together.filter("is_point")
    num_experts = frame["num_experts"][0]
    sizes = {max(1, round(share * num_experts)) for share in SHARES}.union(SLOTS, points["slots_per_layer"])
    shown = drawn.filter(pl.col("slots_per_layer").is_in(sorted(sizes)))
    parts = [wrap(caption(frame.row(0, named=True)), width)]
    for column, title in (("hit_ratio", "hit ratio, %"), ("utilization", "cache utilization, %")):
        of = shown.partition_by("curve", maintain_order=True)
        columns = [Column(("slots", "/layer"), [str(size) for size in of[0]["slots_per_layer"]])]
        columns += [Column(_in_two(rows["curve"][0]), percents(rows[column])) for rows in of]
        parts.append("\n".join([title, "", *laid_out(columns, width)]))
    if points.height:
        columns = [
            Column(("points", ""), points["curve"].to_list(), is_text=True),
            Column(("misses", ""), points["misses"].to_list(), is_text=True),
            Column(("slots", "/layer"), [str(size) for size in points["slots_per_layer"]]),
            Column(("hit", "%"), percents(points["hit_ratio"])),
            Column(("util.", "%"), percents(points["utilization"])),
            Column(("util. %", "by slot"), percents(points["utilization_slot_weighted"])),
        ]
        parts.append("\n".join(laid_out(columns, width)))
    return "\n\n".join(parts)


def caption(row: Mapping[str, Any], *more: str) -> str:
    """What the numbers come from."""
    traced = [f"hidden {row['traced_hidden']}"]
    if row["training_minutes"] is not None:
        traced.append(f"trained {row['training_minutes']:g} minutes")
    parts = [
        f"trace {row['trace']}",
        f"source {row['source']} ({', '.join(traced)})",
        f"{row['num_layers']} layers of {row['num_experts']} experts",
        f"{row['num_forwards']} decode forwards counted",
        f"{row['warmup']} warm-up request{'' if row['warmup'] == 1 else 's'}",
        "curves: equal layers, misses h2d",
        *more,
    ]
    return "; ".join(parts)


def _in_two(name: str) -> tuple[str, str]:
    """A name as the two lines of a heading."""
    first, _, rest = name.partition("_")
    return first, rest
