"""Fill a pool once with what one request is expected to need: choose that, and follow what of it has arrived."""

from __future__ import annotations

from policies.jit import jit
from policies.retention import best


@jit
def start_fill(fill, num_gates, entry, score, tie, capacity):
    """Choose what fills each pool: of what the entry activated, as many of the highest scores as there are slots.

    Args:
        fill: [L, E], written: the entry's tokens for what is to come, and 0 for all else.
        num_gates: [1], written: gates since the start, or since the last that found something new.
        entry: [L, E] tokens routed.
        score: [L, E] float64, must not hold NaN.
        tie: [L, E] int64; equal scores: the higher of these, then the lower number.
        capacity: [L], or [1] for a pool of all layers.
    """
    chosen, tokens, scores, ties = fill.ravel(), entry.ravel(), score.ravel(), tie.ravel()
    size = fill.size // capacity.size
    for pool in range(capacity.size):
        start, end = pool * size, (pool + 1) * size
        enters = best(tokens[start:end] > 0, capacity[pool], scores[start:end], ties[start:end])
        for number in range(size):
            chosen[start + number] = tokens[start + number] if enters[number] else 0
    num_gates[0] = 0


@jit
def still_fills(fill, num_gates, view):
    """Strike out what has arrived, and say whether the rest is to be asked for.

    What has arrived once is not asked for again, even if it has left since. The fill ends when nothing lacks, or when
    the gates of a whole forward found nothing new: what still lacks then is no better than what is there.

    Args:
        fill: as `start_fill` writes it, changed in place.
        num_gates: the same; -1 where no fill is going on.
        view: View at the gate.
    """
    if num_gates[0] < 0:
        return False
    num_layers, num_experts = fill.shape
    is_new = lacks = False
    for layer in range(num_layers):
        for expert in range(num_experts):
            if fill[layer, expert] > 0:
                if view.resident[layer, expert] or view.in_flight[layer, expert]:
                    fill[layer, expert], is_new = 0, True
                else:
                    lacks = True
    num_gates[0] = 1 if is_new else num_gates[0] + 1
    if not lacks or num_gates[0] > num_layers:
        num_gates[0] = -1
    return num_gates[0] >= 0
