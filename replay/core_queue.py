"""Prefetches enter the queue by priority and then issue number, smaller first."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from replay.core_state import COUNTED, ISSUED, NUM_ISSUED, NUM_QUEUED, Arrays


def issue(arrays: Arrays, prefetches: NDArray[np.int64], priority: NDArray[np.float64]) -> Arrays:
    """Queue prefetches of (layer, expert), [N, 2], with a pair of priorities each, [N, 2].

    Returns:
        The same arrays, with a larger queue where it was full.
    """
    at, num_new = arrays.at, len(prefetches)
    count = int(at[NUM_QUEUED])
    total = count + num_new
    if total > len(arrays.queue):
        arrays = arrays._replace(
            queue=np.resize(arrays.queue, (2 * total, 2)), queue_keys=np.resize(arrays.queue_keys, (2 * total, 3))
        )
    queue, keys = arrays.queue, arrays.queue_keys
    queue[count:total] = prefetches
    keys[count:total, :2] = priority
    keys[count:total, 2] = np.arange(at[NUM_ISSUED], at[NUM_ISSUED] + num_new)
    order = np.lexsort(keys[:total].T[::-1])[::-1]  # the next one last
    queue[:total], keys[:total] = queue[order], keys[order]
    at[NUM_QUEUED] = total
    at[NUM_ISSUED] += num_new
    arrays.counts[at[COUNTED], ISSUED] += num_new
    return arrays
