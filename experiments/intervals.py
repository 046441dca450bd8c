"""How far two policies differ on the same requests, and within which bounds: a paired bootstrap over requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from experiments import metrics
from experiments.errors import ConfigError

CONFIDENCE = 0.95
FEWEST = 5  # groups of requests; fewer say too little of others for any interval
_MOST = 200  # groups
_NUM_RESAMPLES, _SEED = 10_000, 0
_SHARED = ("pass_id", "kind", "warmup", "requests", "num_accepted")  # by runs that can be paired


@dataclass(frozen=True)
class Interval:
    """A metric of one run less that of another, and their ratio, with the bounds of both.

    Bounds are None where the requests are too few, all where the metric counts nothing.
    """

    difference: float | None
    low: float | None
    high: float | None
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    num_requests: int
    num_groups: int


@dataclass(frozen=True, eq=False)
class Sample:
    """What comparing needs of a run."""

    passes: pl.DataFrame  # what runs that are paired have in common
    sums: metrics.Sums  # over counted decode forwards
    of_groups: Mapping[str, NDArray[Any]]  # of them by group of requests, [groups], in order of arrival
    num_requests: int

    @property
    def num_groups(self) -> int:
        """What is drawn from."""
        return len(next(iter(self.of_groups.values())))


def sample_of(forwards: pl.DataFrame) -> Sample:
    """Read a table of forwards for comparing.

    What is one request's is a group. Where several share forwards, each forward is split evenly among its requests,
    and as what they share makes them alike, as many as share one at most, next to each other in order of arrival,
    make a group. There are no more than 200, of more requests each if need be.
    """
    rows = metrics.decode(forwards)
    sharing = rows["requests"].list.len().to_numpy()
    forward = np.repeat(np.arange(rows.height), sharing)
    requests, first, place = np.unique(rows["requests"].explode().to_numpy(), return_index=True, return_inverse=True)
    arrival = np.argsort(np.argsort(first))
    size = max(int(sharing.max(initial=1)), -(-requests.size // _MOST))
    group = arrival[place] // size
    columns = {name: rows[name].to_numpy() for name, kind in rows.schema.items() if kind.is_numeric()}
    columns["num_decode_forwards"] = np.ones(rows.height, np.int64)
    of_groups = {name: np.bincount(group, (values / sharing)[forward]) for name, values in columns.items()}
    sums = {name: values.sum().item() for name, values in columns.items()}
    return Sample(forwards.select(_SHARED), sums, of_groups, requests.size)


def compare(
    a: pl.DataFrame | Sample,
    b: pl.DataFrame | Sample,
    metric: Callable[[metrics.Counted], Any] = metrics.tpot_ms,
    *,
    seed: int = _SEED,
) -> Interval:
    """Compare two runs over the same requests of a trace.

    Groups of requests are drawn with replacement, the same for both runs, 10,000 times; each time the metric is
    recomputed, sum over sum. The interval is that of the percentiles, with percentiles a little further out, which
    makes up for that few requests spread less than their population: by Student's t, and by n / (n - 1).

    Args:
        a: table of forwards of a run, as `Result.forwards` and result.parquet hold it, or what `sample_of` made of it.
        b: of another, over the same passes with the same warm-up.
        metric: one of `metrics.METRICS`.
        seed: of the draws.

    Raises:
        ConfigError: the runs are not over the same requests.
    """
    a, b = (run if isinstance(run, Sample) else sample_of(run) for run in (a, b))
    if not a.passes.equals(b.passes):
        raise ConfigError("compare: the runs differ in passes or warm-up, must be over the same requests of a trace")
    counts = a.num_requests, a.num_groups
    value_a, value_b = metric(a.sums), metric(b.sums)
    if value_a is None or value_b is None:
        return Interval(None, None, None, None, None, None, *counts)
    difference, ratio = value_a - value_b, value_a / value_b if value_b else None
    if a.num_groups < FEWEST:
        return Interval(difference, None, None, ratio, None, None, *counts)
    draws = _draws(a.num_groups, seed)
    drawn_a, drawn_b = (metric({name: draws @ sums for name, sums in run.of_groups.items()}) for run in (a, b))
    low, high = _bounds(drawn_a - drawn_b, a.num_groups)
    if ratio is None:
        return Interval(difference, low, high, None, None, None, *counts)
    with np.errstate(divide="ignore", invalid="ignore"):
        return Interval(difference, low, high, ratio, *_bounds(drawn_a / drawn_b, a.num_groups), *counts)


@lru_cache(maxsize=8)
def _draws(num_groups: int, seed: int) -> NDArray[np.float64]:
    """How often each group is in each resample, [resamples, groups]."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(num_groups, np.full(num_groups, 1 / num_groups), _NUM_RESAMPLES).astype(np.float64)


def _bounds(drawn: NDArray[np.float64], num_groups: int) -> tuple[float | None, float | None]:
    """Expanded percentile interval; resamples in which nothing is counted say nothing.

    Source: Hesterberg, What Teachers Should Know About the Bootstrap, 2015, section 5.3.
    """
    drawn = drawn[np.isfinite(drawn)]
    if not drawn.size:
        return None, None
    tail = NormalDist().cdf(-sqrt(num_groups / (num_groups - 1)) * student_t(num_groups - 1))
    low, high = np.quantile(drawn, (tail, 1 - tail))
    return float(low), float(high)


def student_t(freedom: int) -> float:
    """Quantile of Student's t that leaves (1 - CONFIDENCE) / 2 above it.

    Source: Abramowitz and Stegun, 26.7.5, to 0.01 from 4 degrees of freedom on.
    """
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))
