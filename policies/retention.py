"""Which experts keep their slots: the one order and selection of every policy, and the empty cache they start from."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from policies.contract import PolicyError
from policies.jit import jit
from tracer.schema import ModelShape


def equal_capacity(shape: ModelShape, slots: int) -> NDArray[np.int64]:
    """Split all slots equally over the layers, [L]; a remainder goes to the lower layers.

    Raises:
        PolicyError: a layer would have no slot, or more slots than experts.
    """
    num_layers, num_experts = shape.num_layers, shape.num_experts
    if not num_layers <= slots <= num_layers * num_experts:
        raise PolicyError(
            f"{slots} slots for {num_layers} layers of {num_experts} experts: allowed are 1 to {num_experts} a layer, "
            f"{num_layers} to {num_layers * num_experts} in all"
        )
    capacity = np.full(num_layers, slots // num_layers, np.int64)
    capacity[: slots % num_layers] += 1
    return capacity


def nobody_resident(shape: ModelShape) -> NDArray[np.bool_]:
    """Residents of an empty cache, [L, E]."""
    return np.zeros((shape.num_layers, shape.num_experts), np.bool_)


@jit
def ids_of(mask):
    """Indices of what is true, or not zero, ascending: int64."""
    count = 0
    for index in range(mask.size):
        if mask[index]:
            count += 1
    ids = np.empty(count, np.int64)
    count = 0
    for index in range(mask.size):
        if mask[index]:
            ids[count] = index
            count += 1
    return ids


@jit
def by_priority(members, priority):
    """Ids of the members, highest priority first, then lowest id.

    Args:
        members: [E] bool, or counts that are not zero.
        priority: [E] float64.
    """
    ids = ids_of(members)
    gap = 1
    while gap < ids.size // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for end in range(gap, ids.size):
            expert, place = ids[end], end
            while place >= gap:
                other = ids[place - gap]
                if priority[other] > priority[expert] or (priority[other] == priority[expert] and other < expert):
                    break
                ids[place] = other
                place -= gap
            ids[place] = expert
        gap //= 3
    return ids


@jit
def missed_of(load, resident):
    """Activated experts that are not resident, [E] bool."""
    missed = np.empty(load.size, np.bool_)
    for expert in range(load.size):
        missed[expert] = load[expert] > 0 and not resident[expert]
    return missed


@jit
def with_transfers(resident, transfers):
    """Residents and transferred experts together, [E] bool: what may be retained."""
    held = resident.copy()
    for expert in transfers:
        held[expert] = True
    return held


@jit
def _before(a, b, first, second):
    if first[a] != first[b]:
        return first[a] > first[b]
    if second[a] != second[b]:
        return second[a] > second[b]
    return a < b


@jit
def best(candidates, count, first, second):
    """The `count` best candidates: highest `first`, then highest `second`, then lowest index; all if there are no more.

    Args:
        candidates: [N] bool; N is E, or L * E for a pool of all layers.
        count: how many to select, at least 0.
        first: [N] key that decides; must not hold NaN.
        second: [N] key that breaks its ties.

    Returns:
        [N] bool.
    """
    ids = ids_of(candidates)
    last = count - 1  # quickselect: afterwards ids[:count] are the best, in no order
    low, high = 0, ids.size - 1
    while 0 <= last < high and low < high:
        pivot = ids[(low + high) // 2]
        left, right = low, high
        while left <= right:
            while _before(ids[left], pivot, first, second):
                left += 1
            while _before(pivot, ids[right], first, second):
                right -= 1
            if left <= right:
                ids[left], ids[right] = ids[right], ids[left]
                left += 1
                right -= 1
        if last <= right:
            high = right
        elif last >= left:
            low = left
        else:
            break
    selected = np.zeros(candidates.size, np.bool_)
    for index in range(min(count, ids.size)):
        selected[ids[index]] = True
    return selected


@jit
def with_admitted(resident, transfers, limit, first, second):
    """Residents, and of the transferred experts the `limit` best by the keys of `best`, [E] bool."""
    if transfers.size <= limit:
        return with_transfers(resident, transfers)
    arrived = np.zeros(resident.size, np.bool_)
    for expert in transfers:
        arrived[expert] = True
    return resident | best(arrived, limit, first, second)
