"""Times that are measured several times, and what is kept of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

Size = TypeVar("Size")


class Repeated(NamedTuple):
    """A time that was measured several times."""

    median_ns: float
    spread: float  # between the quartiles, as a share of the median

    @classmethod
    def of(cls, times_ns: Sequence[float]) -> Repeated:
        """Median and spread of some repeats."""
        low, median, high = np.percentile(times_ns, [25, 50, 75])
        return cls(float(median), float((high - low) / median))


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
