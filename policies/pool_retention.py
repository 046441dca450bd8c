"""Who leaves a pool when the misses of a layer enter it: the lowest score, and what is activated now last."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from policies.jit import jit
from policies.knobs import require_choice
from policies.pool import number_in_pool
from policies.retention import equal_capacity, lowest_first
from tracer.schema import ModelShape

POOLS = ("layer", "global")


def require_pool(pool: str) -> None:
    """Refuse a value of the knob `pool` that is none.

    Raises:
        PolicyError: with the allowed values.
    """
    require_choice("pool", pool, POOLS)


def capacity_of(pool: str, shape: ModelShape, slots: int) -> NDArray[np.int64]:
    """Slots of each layer, [L], split equally; or of the one pool of all layers, [1].

    Raises:
        PolicyError: fewer slots than layers, or more than experts.
    """
    capacity = equal_capacity(shape, slots)
    return capacity if pool == "layer" else capacity.sum(keepdims=True)


@jit
def retain(step, view, transfers, score, tie, max_admit):
    """What stays in the pool of a layer, [E] or [L * E] bool, when its transfers enter.

    The lowest of residents and transfers leave, those that the layer activates after all others: lower score, then
    lower tie, then higher number. A transfer whose prefetch is in progress has its slot and stays.

    Args:
        step: the layer's Step.
        view: View at its gate.
        transfers: experts of the layer that are copied.
        score: [L, E], must not hold NaN.
        tie: [L, E] int64.
        max_admit: only so many of the transfers enter, the highest of them.
    """
    num_experts, layer, capacity = step.load.size, step.layer, view.capacity
    here = number_in_pool(capacity, num_experts, layer, 0)  # number of the layer's expert 0 within its pool
    start, size = layer * num_experts - here, view.resident.size // capacity.size
    scores, ties = score.ravel()[start : start + size], tie.ravel()[start : start + size]
    retained = view.resident.ravel()[start : start + size].copy()

    load, in_flight = step.load, view.in_flight[layer]
    entering = np.empty(transfers.size, np.int64)
    count = 0
    for expert in transfers:
        if in_flight[expert]:
            retained[here + expert] = True
        else:
            entering[count] = here + expert
            count += 1
    entering = entering[:count]
    if count > max_admit:
        lowest_first(entering, count - max_admit, scores, ties)
        entering = entering[count - max_admit :]
    for number in entering:
        retained[number] = True

    num_leaving = entering.size - view.free_slots
    if num_leaving <= 0:
        return retained
    numbers = np.empty(retained.size, np.int64)
    num_others = 0
    for number in range(retained.size):
        numbers[num_others] = number
        num_others += retained[number]
    others = numbers[:num_others]
    num_others = 0
    for number in others:
        others[num_others] = number
        num_others += not (here <= number < here + num_experts and load[number - here] > 0)
    _leave(others[:num_others], num_leaving, retained, scores, ties)
    num_leaving -= num_others
    if num_leaving > 0:
        count = 0
        for expert in range(num_experts):
            if load[expert] > 0 and retained[here + expert] and not in_flight[expert]:
                numbers[count] = here + expert
                count += 1
        _leave(numbers[:count], num_leaving, retained, scores, ties)
    return retained


@jit
def _leave(numbers, count, retained, scores, ties):
    lowest_first(numbers, count, scores, ties)
    for number in numbers[:count]:
        retained[number] = False
