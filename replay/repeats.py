"""Times that are measured several times, and what is kept of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Size = TypeVar("Size")


class Repeated(NamedTuple):
    """A time that was measured several times."""

    median_ns: float
    spread: float  # between the quartiles, as a share of the median
    mean_ns: float  # of all but the largest and the smallest sixteenth: what a sum of many such times is made of

    @classmethod
    def of(cls, times_ns: Sequence[float] | NDArray[np.float64]) -> Repeated:
        """What is kept of some repeats."""
        low, median, high = np.percentile(times_ns, [25, 50, 75])
        left_out = len(times_ns) // 16
        middle = np.sort(times_ns)[left_out : len(times_ns) - left_out]
        return cls(float(median), float((high - low) / abs(median)) if median else 0.0, float(middle.mean()))


def repeated(time_ns: Callable[[], float], repeats: int) -> Repeated:
    """Measure one time again and again; a first measurement, which compiles and warms up, is left out."""
    return Repeated.of([time_ns() for _ in range(repeats + 1)][1:])


def repeated_by_size(time_ns: Callable[[Size], float], sizes: Sequence[Size], repeats: int) -> dict[Size, Repeated]:
    """Measure every size once a repeat, in an order that turns, so that a drift of the machine bends no curve."""
    samples: dict[Size, list[float]] = {size: [] for size in sizes}
    for repeat in range(repeats + 1):
        for size in sizes if repeat % 2 else reversed(sizes):
            found = time_ns(size)
            if repeat:  # the first one compiles and warms up
                samples[size].append(found)
    return {size: Repeated.of(times) for size, times in samples.items()}
