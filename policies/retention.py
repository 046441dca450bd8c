"""Which experts keep their slots: the one order and selection of every policy, and the empty cache they start from."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from policies.contract import PolicyError
from policies.jit import jit
from tracer.schema import ModelShape

_RUN = 64  # members that are put in order at once, before runs are merged


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
        priority: [E] float64, must not hold NaN.
    """
    ids = ids_of(members)
    order, keys = np.empty(ids.size, np.int64), np.empty(ids.size, np.float64)
    for place in range(ids.size):
        keys[place] = priority[ids[place]]
    for start in range(0, ids.size, _RUN):
        _order_run(ids[start : start + _RUN], keys[start : start + _RUN], order[start : start + _RUN])
    width = _RUN
    while width < ids.size:
        ids, order = order, ids
        for start in range(0, ids.size, 2 * width):
            left, right = start, min(start + width, ids.size)
            middle, end = right, min(right + width, ids.size)
            for place in range(start, end):
                is_left = right == end or (left < middle and priority[ids[left]] >= priority[ids[right]])
                order[place] = ids[left] if is_left else ids[right]
                left += is_left
                right += not is_left
        width *= 2
    return order


@jit
def _order_run(ids, keys, order):
    # branches would be guessed wrongly every other time, so who comes before whom is counted
    for place in range(ids.size):
        key, target = keys[place], 0
        for other in range(ids.size):
            target += keys[other] > key
        for other in range(place):
            target += keys[other] == key
        order[target] = ids[place]


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
def lowest_first(numbers, count, first, second):
    """Move the `count` lowest of the numbers to the front, in no order: lower `first`, lower `second`, higher number.

    Args:
        numbers: distinct, changed in place.
        count: how many, at least 0.
        first: key of each number that decides; must not hold NaN.
        second: key that breaks its ties.
    """
    last, low, high = count - 1, 0, numbers.size - 1  # quickselect
    while 0 <= last < high and low < high:
        middle = (low + high) // 2
        pivot = numbers[middle]
        numbers[middle] = numbers[high]
        pivot_first, pivot_second = first[pivot], second[pivot]
        place = low
        for index in range(low, high):  # branches would be guessed wrongly every other time
            number = numbers[index]
            key, tie = first[number], second[number]
            is_lower_tie = (tie < pivot_second) | ((tie == pivot_second) & (number > pivot))
            numbers[index] = numbers[place]
            numbers[place] = number
            place += (key < pivot_first) | ((key == pivot_first) & is_lower_tie)
        numbers[high] = numbers[place]
        numbers[place] = pivot
        if last < place:
            high = place - 1
        elif last > place:
            low = place + 1
        else:
            break


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
    num_others = max(ids.size - count, 0)
    lowest_first(ids, num_others, first, second)
    selected = np.zeros(candidates.size, np.bool_)
    for expert in ids[num_others:]:
        selected[expert] = True
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
