"""Costs as sums of a few rates, fitted to what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from policies.profile import ProfileError
from replay.repeats import Repeated


@dataclass(frozen=True, eq=False)
class Fit:
    """A cost as a sum of coefficients times columns, and how far that is from what it was fitted to."""

    coefficients: NDArray[np.float64]  # none below 0
    errors: NDArray[np.float64]  # of each measurement, (fitted - measured) / measured

    @property
    def mean_error(self) -> float:
        """Mean of the relative errors, whatever their sign."""
        return float(np.abs(self.errors).mean())

    @property
    def max_error(self) -> float:
        """Largest relative error."""
        return float(np.abs(self.errors).max())


def fit(columns: Sequence[ArrayLike], times_ns: ArrayLike) -> Fit:
    """The coefficients, none negative, with the least sum of squared relative errors.

    A cost never shrinks with more work, so a rate that would come out below 0 is 0 and the others are fitted anew.

    Args:
        columns: what each coefficient is multiplied with; the constant's is 1. Numbers or one of each measurement.
        times_ns: measured, above 0.

    Raises:
        ProfileError: fewer measurements than coefficients, or a time that is not above 0.
    """
    measured = np.asarray(times_ns, np.float64)
    matrix = np.stack([np.broadcast_to(np.asarray(column, np.float64), measured.shape) for column in columns], axis=1)
    if len(measured) < len(columns):
        raise ProfileError(f"{len(measured)} measurements for {len(columns)} coefficients")
    if not (measured > 0).all():
        raise ProfileError(f"times must be above 0 ns, found {measured.min():g}")
    scaled = matrix / measured[:, None]
    kept = list(range(len(columns)))
    found: NDArray[Any] = np.zeros(len(columns))
    while kept:
        found = np.zeros(len(columns))
        # columns of like size fit exactly
        sizes = np.maximum(np.abs(scaled[:, kept]).max(axis=0), np.finfo(float).tiny)
        found[kept] = np.linalg.lstsq(scaled[:, kept] / sizes, np.ones(len(measured)))[0] / sizes
        if (found >= 0).all():
            break
        kept.remove(int(found.argmin()))
    return Fit(found, matrix @ found / measured - 1)


class Rate(NamedTuple):
    """A cost as a constant, a rate and another one, and how far that is from what it was fitted to."""

    coefficients_ns: tuple[float, float, float]
    mean_error: float
    max_error: float
    times: Mapping[tuple[int, int], Repeated]  # by the two numbers that the rates are for

    def ns(self, first: float, second: float) -> float:
        """Cost at these numbers."""
        constant, rate, other = self.coefficients_ns
        return constant + rate * first + other * second


def rate_of(times: Mapping[tuple[int, int], Repeated]) -> Rate:
    """The constant and the two rates that come closest to the means of some times."""
    first, second = (np.array(column) for column in zip(*times, strict=True))
    found = fit([1, first, second], [time.mean_ns for time in times.values()])
    constant, rate, other = (float(value) for value in found.coefficients)
    return Rate((constant, rate, other), found.mean_error, found.max_error, times)
