"""Divide the slots of all layers by their weights, within bounds."""

from __future__ import annotations

from math import floor, frexp, ldexp

import numpy as np

from policies.jit import jit

WEIGHT_BITS = 30


@jit
def apportion(weights, total, lowest, highest):
    """Slots of each layer in proportion to its weight, at least `lowest` and at most `highest`, `total` in all.

    The quotas are clip(s * weight, lowest, highest) with the one s for which they sum to `total`; slots are their
    floors, and the largest remainders get what is left, the lower layer first where they are equal. Where all layers
    with a weight have `highest`, the others share the rest equally.

    Source: OLED-MoE, section 4.3, without bounds and rounding.

    Differs: weights count to 2**-30 of the largest, so that quotas and remainders are exact fractions and equal ones
    compare equal.

    Args:
        weights: [L] float64, at least 0 and not all 0.
        total: at least L * lowest, at most L * highest.
        lowest: at least 0.
        highest: at least `lowest`.

    Returns:
        [L] int64.
    """
    shares = _whole(weights)
    slots = np.empty(weights.size, np.int64)
    undecided = np.ones(weights.size, np.bool_)
    rest, weight = _bound(shares, slots, undecided, total, lowest, highest)
    if weight == 0:  # every layer with a weight has all it can use
        shares[:] = 1
        weight = undecided.sum()
    remainder = np.full(weights.size, -1, np.int64)
    left = rest
    for layer in range(weights.size):
        if undecided[layer]:
            slots[layer], remainder[layer] = divmod(shares[layer] * rest, weight)
            left -= slots[layer]
    for _ in range(left):
        layer = remainder.argmax()
        slots[layer] += 1
        remainder[layer] = -1
    return slots


@jit
def _whole(weights):
    _, exponent = frexp(weights.max())
    shares = np.empty(weights.size, np.int64)
    for layer in range(weights.size):
        shares[layer] = floor(ldexp(weights[layer], WEIGHT_BITS - exponent) + 0.5)
    return shares


@jit
def _bound(shares, slots, undecided, total, lowest, highest):
    # If clipping at the present s adds up to too much, the true s is lower, and what is below `lowest` stays there;
    # if to too little, the same holds above. Each round decides a layer, and the sums are exact in int64.
    while True:
        rest, weight = total, 0
        for layer in range(shares.size):
            if undecided[layer]:
                weight += shares[layer]
            else:
                rest -= slots[layer]
        if weight == 0:
            return rest, weight
        excess = -rest * weight
        for layer in range(shares.size):
            if undecided[layer]:
                excess += min(max(shares[layer] * rest, lowest * weight), highest * weight)
        settled = True
        for layer in range(shares.size):
            if undecided[layer]:
                low = shares[layer] * rest < lowest * weight
                high = shares[layer] * rest > highest * weight
                if (low and excess >= 0) or (high and excess <= 0):
                    slots[layer] = lowest if low else highest
                    undecided[layer] = settled = False
        if settled:
            return rest, weight
