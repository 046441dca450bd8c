"""Which policy is best at a size, and which others the requests do not tell apart from it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from experiments.files import forwards_in
from experiments.intervals import Sample, compare, sample_of
from experiments.table import OVER_BEST, SECTION

_READ = ("pass_id", "kind", "warmup", "requests", "time_ns", "num_accepted")


def with_differences(
    rows: Sequence[Mapping[str, Any]], forwards: Callable[[int], pl.DataFrame | None], swept: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Summaries of runs with how far the time per token of each is above the best one's, and the interval of that.

    Compared are runs of one trace, machine and cache size. The best is the one of lowest TPOT, bounds aside; policies
    that ignore the cache size are in no group, and where a group has but one run nothing is compared.

    Args:
        rows: summaries.
        forwards: table of forwards of the run in a row; None where it is not there, which leaves the interval out.
        swept: further columns that tell groups apart.
    """
    groups: dict[tuple[Hashable, ...], list[int]] = {}
    for index, row in enumerate(rows):
        if row["sized"] and row["tpot_ms"] is not None:
            groups.setdefault(tuple(row[key] for key in (*SECTION, *swept, "slots_per_layer")), []).append(index)
    found: list[dict[str, Any]] = [{**row, **dict.fromkeys(OVER_BEST)} for row in rows]
    for group in groups.values():
        candidates = [index for index in group if not is_bound(rows[index])]
        if len(group) > 1 and candidates:
            best = min(candidates, key=lambda index: rows[index]["tpot_ms"])
            samples = {index: _sample(forwards(index)) for index in group}
            for index in group:
                over = _over(rows[index], rows[best], samples[index], samples[best])
                found[index].update(zip(OVER_BEST, over if index != best else (0.0, 0.0, 0.0), strict=True))
    return found


def read_forwards(directory: Path) -> pl.DataFrame | None:
    """What comparing needs of a run's table of forwards; None where an older run has it not, but a row for each layer."""
    path = forwards_in(directory)
    return pl.read_parquet(path, columns=list(_READ)) if set(_READ) <= set(pl.read_parquet_schema(path)) else None


def _sample(forwards: pl.DataFrame | None) -> Sample | None:
    return None if forwards is None else sample_of(forwards.select(_READ))


def _over(
    row: Mapping[str, Any], best: Mapping[str, Any], sample: Sample | None, of_best: Sample | None
) -> tuple[float, float | None, float | None]:
    difference = row["tpot_ms"] - best["tpot_ms"]
    if sample is None or of_best is None:
        return difference, None, None
    interval = compare(sample, of_best)
    return difference, interval.low, interval.high


def is_bound(row: Mapping[str, Any]) -> bool:
    """Whether a policy knows what no real one can, so that it is no choice."""
    return row["clairvoyant"] or row["policy"].startswith("ideal_")
