"""FineMoE's predictions: from maps that resemble a forward's tokens to the experts of a layer."""

from __future__ import annotations

import numpy as np

from policies.jit import jit

POOLINGS = ("max", "sum", "mean_map")
_SUM = POOLINGS.index("sum")
_SPLIT = 2.0**20 + 1


@jit
def num_selected(shares, similarity, fewest):
    """How many of a map's experts, best first, are predicted.

    As many as it takes for their shares to add up to delta = 1 - similarity, within 0 and 1, and no fewer than
    `fewest`; all, if those do not add up to delta.

    Source: FineMoE, section 4.3, equations 6 to 8.
    Differs: the released code leaves out the expert with which the sum reaches delta.
    """
    delta = min(max(1.0 - similarity, 0.0), 1.0)
    total = 0.0
    for count in range(shares.size):
        if total >= delta and count >= fewest:
            return count
        total += shares[count]
    return shares.size


@jit
def add_selected(pooling, store, entry, target, count, shares):
    """Add the best of one map's experts in a layer to a prediction.

    Args:
        pooling: of several queries: index into POOLINGS.
        store: MapStore.
        entry: which map.
        target: layer.
        count: how many of its experts, best first.
        shares: [E] of the prediction, changed in place; -1 for what is not predicted.
    """
    for place in range(count):
        expert, share = store.ids[entry, target, place], store.shares[entry, target, place]
        if pooling == _SUM and shares[expert] >= 0.0:
            shares[expert] += share
        else:
            shares[expert] = max(shares[expert], share)


@jit
def priority_to_stay(share, uses):
    """Share times uses, to 33 binary digits, which is what shares are exact to: so equal products are equal numbers."""
    product = share * uses
    high = _SPLIT * product
    return high - (high - product)


@jit
def predict(params, state, view, layer, targets, entries, similarities, wanted):
    """Predict some layers by one map for each query, and say what of that is neither resident nor in flight.

    Args:
        params: of the policy.
        state: of the policy; its shares and scores of these layers are written anew.
        view: View at the gate.
        layer: of the gate.
        targets: first of the layers to predict, and the layer behind the last.
        entries: [Q] maps.
        similarities: [Q] cosines with them.
        wanted: [N, E], the last row for the last layer; what is to be prefetched gets its share by its distance.
    """
    first, end = targets
    num_experts = state.score.shape[1]
    shares = np.empty(num_experts, np.float64)
    for target in range(first, end):
        fewest = params.fewest
        if params.of_mean:
            fewest = max(fewest, int(state.activity[target] + 0.5))
        shares[:] = -1.0
        for query in range(entries.size):
            count = num_selected(state.store.shares[entries[query], target], similarities[query], fewest)
            add_selected(params.pooling, state.store, entries[query], target, count, shares)
        row = wanted[wanted.shape[0] - (end - target)]
        for expert in range(num_experts):
            share = max(shares[expert], 0.0)
            state.shares[target, expert] = share
            state.score[target, expert] = priority_to_stay(share, state.uses[target, expert])
            if shares[expert] >= 0.0 and not view.resident[target, expert] and not view.in_flight[target, expert]:
                row[expert] = share / (target - layer)
