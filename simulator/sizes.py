"""LRU in the orders that depend on what was resident: caches of all sizes side by side, as none says what another holds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.jit import jit
from policies.retention import ids_of
from tracer.schema import ModelShape


class Sizes(NamedTuple):
    """A cache of each size for each layer: row C - 1 is of C slots."""

    order: NDArray[np.uint16]  # [E, L, E] its residents, the last touched first
    num_resident: NDArray[np.int64]  # [E, L]
    hits: NDArray[np.int64]  # [E, L] counted
    activated: NDArray[np.int64]  # [L] counted


def empty_sizes(shape: ModelShape) -> Sizes:
    """Caches without residents."""
    num_layers, num_experts = shape.num_layers, shape.num_experts
    order = np.zeros((num_experts, num_layers, num_experts), np.uint16)
    num_resident, hits = (np.zeros((num_experts, num_layers), np.int64) for _ in range(2))
    return Sizes(order, num_resident, hits, np.zeros(num_layers, np.int64))


@jit
def by_touch(sizes, hits_first, forward, counted):
    """Run a forward under `lru` with `lru_order=hits_first`, or `misses_first`.

    Args:
        sizes: Sizes, changed in place.
        hits_first: what is resident is touched before what is not; else after it.
        forward: Forward.
        counted: whether its hits count.
    """
    num_layers, num_experts = forward.load.shape
    kept = np.empty(num_experts, np.uint16)
    for layer in range(num_layers):
        ids = ids_of(forward.load[layer])
        sizes.activated[layer] += counted * ids.size
        is_activated, is_resident = forward.load[layer] > 0, np.zeros(num_experts, np.bool_)
        for capacity in range(1, num_experts + 1):
            order, num_old = sizes.order[capacity - 1, layer], sizes.num_resident[capacity - 1, layer]
            for expert in order[:num_old]:
                is_resident[expert] = True
            num_hits, count = 0, 0
            for turn in range(2):  # from the last touched to the first
                wanted = (turn == 1) == hits_first
                for index in range(ids.size - 1, -1, -1):
                    if is_resident[ids[index]] == wanted:
                        num_hits += wanted
                        if count < capacity:
                            kept[count] = ids[index]
                            count += 1
            for expert in order[:num_old]:
                is_resident[expert] = False
                if count < capacity and not is_activated[expert]:
                    kept[count] = expert
                    count += 1
            order[:count] = kept[:count]
            sizes.num_resident[capacity - 1, layer] = count
            sizes.hits[capacity - 1, layer] += counted * num_hits
