"""How far off each cell is: errors of its times, the spread of its repeats, and whether the same was decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import polars as pl
from numpy.typing import NDArray

from experiments import metrics
from experiments.compare_log import decision_hash, first_difference
from experiments.compare_pairs import Pair
from experiments.compare_runs import Ran
from experiments.errors import ConfigError

FEWEST_FOR_P99 = 200  # forwards; below, P90 is judged


@dataclass(frozen=True)
class Cell:
    """One cell of a comparison: ratios, points (hundredths), and ms. Errors are simulated over measured less 1.

    Measured is the mean over repeats: of times per token, of quantiles, and of each forward's time. What one repeat
    alone cannot say is None, as are quantiles that the forwards are too few for.
    """

    name: str
    policy: str
    variant: str
    slots_per_layer: int | None  # None where the policy ignores them
    h2d_bytes_factor: float
    h2d_bytes_per_s: float
    trace: str
    source: str
    is_fitted: bool  # the profile was fitted to it, so that it is not judged
    num_repeats: int
    num_forwards: int  # decode forwards counted
    simulated_ms: float  # TPOT
    measured_ms: float
    measured_low_ms: float  # of the repeats
    measured_high_ms: float
    spread_ratio: float | None  # of repeats: largest less smallest, over their mean
    tpot_error: float
    forward_error: float  # mean over forwards
    forward_mape: float
    forward_noise: float | None  # the same, of each repeat against their mean
    p50_error: float
    p90_error: float
    p99_error: float | None
    has_prefetches: bool
    same_decisions: bool | None  # None: policies that prefetch, or no log to tell
    first_difference: str | None  # of decisions, in words
    hit_points: float  # simulated less measured, of the experts activated: hits
    late_points: float  # missed while their prefetch was under way
    unserved_points: float  # missed after their prefetch was dropped
    late_of_started_points: float | None  # late ones, of the prefetches started

    @property
    def label(self) -> str:
        """Its policy, with knobs."""
        return self.policy + (f" ({self.variant})" if self.variant else "")

    @property
    def tail_error(self) -> float:
        """Of P99, or of P90 where the forwards are too few for it."""
        return self.p90_error if self.p99_error is None else self.p99_error

    @property
    def worst_points(self) -> float:
        """Largest difference of the three shares."""
        return max(abs(self.hit_points), abs(self.late_points), abs(self.unserved_points))

    @property
    def spread_ms(self) -> float | None:
        """Largest time per token of the repeats less the smallest; None with one repeat."""
        return None if self.num_repeats < 2 else self.measured_high_ms - self.measured_low_ms


def cells_of_pairs(pairs: Sequence[Pair], fitted: Sequence[str] = ()) -> list[Cell]:
    """Measure every pair.

    Args:
        pairs: from `pairs_of`.
        fitted: patterns of names of the cells that the profile was fitted to.

    Raises:
        ConfigError: a pattern fits no cell, or all are fitted, or a run has nothing to compare.
    """
    for pattern in fitted:
        if not any(fnmatchcase(pair.name, pattern) for pair in pairs):
            raise ConfigError(
                f"fitted {pattern!r}: no cell has such a name; one is {pairs[0].name}, with * for any part"
            )
    cells = [cell_of(pair, any(fnmatchcase(pair.name, pattern) for pattern in fitted)) for pair in pairs]
    if all(cell.is_fitted for cell in cells):
        raise ConfigError("fitted: names all cells; one at least must be left to be judged")
    return cells


def cell_of(pair: Pair, is_fitted: bool = False) -> Cell:
    """Measure one pair."""
    simulated, repeats, facts = pair.simulated, pair.repeats, pair.facts
    tpots = [run.tpot_ms for run in repeats]
    measured_ms = sum(tpots) / len(tpots)
    times = np.stack([_times(run) for run in repeats])  # [repeats, forwards]
    means = times.mean(axis=0)
    errors = _times(simulated) / means - 1
    has_repeats = len(repeats) > 1
    hashes = [decision_hash(run) for run in (simulated, *repeats)]
    has_prefetches = any(_num(run, "prefetch_issued") for run in (simulated, *repeats))
    all_started = all(_num(run, "prefetch_started") for run in (simulated, *repeats))
    is_same = None if has_prefetches or None in hashes else len(set(hashes)) == 1
    other = next((run for run, digest in zip(repeats, hashes[1:], strict=True) if digest != hashes[0]), repeats[0])
    return Cell(
        name=pair.name,
        policy=facts["policy"],
        variant=facts["variant"],
        slots_per_layer=pair.slots,
        h2d_bytes_factor=repeats[0].factor,
        h2d_bytes_per_s=repeats[0].bytes_per_s,
        trace=facts["trace"],
        source=facts["source"],
        is_fitted=is_fitted,
        num_repeats=len(repeats),
        num_forwards=times.shape[1],
        simulated_ms=simulated.tpot_ms,
        measured_ms=measured_ms,
        measured_low_ms=min(tpots),
        measured_high_ms=max(tpots),
        spread_ratio=(max(tpots) - min(tpots)) / measured_ms if has_repeats else None,
        tpot_error=simulated.tpot_ms / measured_ms - 1,
        forward_error=float(errors.mean()),
        forward_mape=float(np.abs(errors).mean()),
        forward_noise=float(np.abs(times / means - 1).mean()) if has_repeats else None,
        p50_error=_quantile_error(pair, 0.5),
        p90_error=_quantile_error(pair, 0.9),
        p99_error=_quantile_error(pair, 0.99) if times.shape[1] >= FEWEST_FOR_P99 else None,
        has_prefetches=has_prefetches,
        same_decisions=is_same,
        first_difference=first_difference(simulated, other) if is_same is False else None,
        hit_points=_points(pair, "num_hits", "num_activated"),
        late_points=_points(pair, "prefetch_late", "num_activated"),
        unserved_points=_points(pair, "prefetch_unserved", "num_activated"),
        late_of_started_points=_points(pair, "prefetch_late", "prefetch_started") if all_started else None,
    )


def as_table(cells: Sequence[Cell]) -> pl.DataFrame:
    """One row for each cell."""
    return pl.DataFrame([vars(cell) for cell in cells], infer_schema_length=None)


def _times(run: Ran) -> NDArray[np.float64]:
    times = run.counted["time_ns"].to_numpy().astype(np.float64)
    if not (times > 0).all():
        raise ConfigError(f"{run.name}: a counted forward took no time; its times were not measured")
    return times


def _quantile_error(pair: Pair, quantile: float) -> float:
    measured = [metrics.forward_ms(run.forwards, quantile) or 0.0 for run in pair.repeats]
    return (metrics.forward_ms(pair.simulated.forwards, quantile) or 0.0) / (sum(measured) / len(measured)) - 1


def _num(run: Ran, column: str) -> int:
    return int(run.counted[column].sum())


def _points(pair: Pair, column: str, of: str) -> float:
    """A share of the simulated run less its mean over repeats, in hundredths."""
    simulated, *measured = [_num(run, column) / _num(run, of) for run in (pair.simulated, *pair.repeats)]
    return 100 * (simulated - sum(measured) / len(measured))
