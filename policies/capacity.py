"""Divide the slots of all layers by how much of what each layer holds and needs is used."""

from __future__ import annotations

from math import floor, frexp, ldexp

import numpy as np

from policies.jit import jit

WEIGHT_BITS = 30


@jit
def smooth(newest, history, smoothed, num_seen, ema):
    """Add the newest forward's statistics of all layers to their smoothed values, which start with the first.

    Source: OLED-MoE, section 4.3 ("smoothed runtime statistics").

    Args:
        newest: [S, L].
        history: [W, S, L] the last W, changed in place.
        smoothed: [S, L] changed in place.
        num_seen: forwards before this one.
        ema: weight of the newest, or 0 for the mean of the last W.
    """
    length = history.shape[0]
    held = min(num_seen + 1, length)
    for which in range(newest.shape[0]):
        for layer in range(newest.shape[1]):
            value = newest[which, layer]
            history[num_seen % length, which, layer] = value
            if ema > 0.0:
                before = value if num_seen == 0 else smoothed[which, layer]
                smoothed[which, layer] = ema * value + (1.0 - ema) * before
            else:
                total = 0.0
                for index in range(held):
                    total += history[index, which, layer]
                smoothed[which, layer] = total / held


@jit
def apportion(weights, total, lowest, highest):
    """Slots of each layer in proportion to its weight, at least `lowest` and at most `highest`, `total` in all.

    The quotas are clip(s * weight, lowest, highest) with the one s for which they sum to `total`; slots are their
    floors, and the largest remainders get what is left, the lower layer first where they are equal. Where all layers
    with a weight have `highest`, the others share the rest equally.

    Source: OLED-MoE, section 4.3, which has neither bounds nor rounding.

    Differs: weights count to 2**-30 of the largest, so that quotas are exact fractions and equal remainders compare
    equal.

    Args:
        weights: [L] float64, at least 0 and not all 0.
        total: at least L * lowest, at most L * highest.
        lowest: at least 0.
        highest: at least `lowest`.

    Returns:
        [L] int64.
    """
    num_layers = weights.size
    shares = _whole(weights)
    slots = np.full(num_layers, -1, np.int64)  # of layers at a bound; -1 between
    rest, weight, num_between = _bound(shares, slots, total, lowest, highest)
    remainder = np.full(num_layers, -1, np.int64)
    left = rest
    for layer in range(num_layers):
        if slots[layer] < 0:
            # without weight every layer that has one already has all it can use
            parts, whole = (shares[layer] * rest, weight) if weight > 0 else (rest, num_between)
            slots[layer] = parts // whole
            remainder[layer] = parts % whole
            left -= slots[layer]
    for _ in range(left):
        first = 0
        for layer in range(num_layers):
            if remainder[layer] > remainder[first]:
                first = layer
        slots[first] += 1
        remainder[first] = -1
    return slots


@jit
def _whole(weights):
    largest = 0.0
    for weight in weights:
        largest = max(largest, weight)
    exponent = frexp(largest)[1]
    shares = np.empty(weights.size, np.int64)
    for layer in range(weights.size):
        shares[layer] = floor(ldexp(weights[layer], WEIGHT_BITS - exponent) + 0.5)
    return shares


@jit
def _bound(shares, slots, total, lowest, highest):
    # If clipping at the present s adds up to too much, the true s is lower, and what is below `lowest` stays there;
    # if to too little, the same holds above. Every round settles a layer, and all sums are exact in int64.
    while True:
        rest, weight, num_between = total, 0, 0
        for layer in range(shares.size):
            if slots[layer] < 0:
                weight += shares[layer]
                num_between += 1
            else:
                rest -= slots[layer]
        excess = -rest * weight
        for layer in range(shares.size):
            if slots[layer] < 0:
                excess += min(max(shares[layer] * rest, lowest * weight), highest * weight)
        settled = True
        for layer in range(shares.size):
            if slots[layer] < 0 and weight > 0:
                low = shares[layer] * rest < lowest * weight
                high = shares[layer] * rest > highest * weight
                if (low and excess >= 0) or (high and excess <= 0):
                    slots[layer] = lowest if low else highest
                    settled = False
        if settled:
            return rest, weight, num_between
