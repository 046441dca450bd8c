"""FineMoE's online store: every decode token's map enters, and the most redundant of the others leaves."""

from __future__ import annotations

import numpy as np

from policies.expert_maps import set_map, to_levels
from policies.jit import jit
from policies.map_search import compare_sketches, highest


@jit
def learn(store, queries, step, directions, sketch_weight):
    """Store the maps of this forward's decode tokens, one by one; a full store gives up the most redundant map.

    Redundant is what resembles the new map most, by the sketch with this weight and by the trajectory with the rest;
    the lowest of equal ones.

    Source: FineMoE, section 4.4.

    Args:
        store: MapStore.
        queries: Queries, after the last layer.
        step: Step of the last layer.
        directions: [Q, 16].
        sketch_weight: d / L.
    """
    num_maps, num_layers, _ = store.shares.shape
    cosines, redundancy = np.empty(num_maps, np.float64), np.empty(num_maps, np.float64)
    written = np.zeros(num_maps, np.bool_)
    for query in range(directions.shape[0]):
        if step.block[query] < 0:
            continue
        entry = store.size[0]
        if entry < num_maps:
            store.size[0] += 1
        else:
            products = queries.products[query]
            for other in range(num_maps):
                if written[other]:  # since the query was compared with what stood there
                    products[other] = 0.0
                    _follow_one(store, queries, query, other)
            compare_sketches(store, directions[query], cosines)
            length = np.sqrt(queries.squares[query])
            for other in range(num_maps):
                trajectory = products[other] * store.reaches[num_layers - 1, other] / length
                redundancy[other] = sketch_weight * cosines[other] + (1.0 - sketch_weight) * trajectory
            entry = highest(redundancy, np.ones(num_maps))[0]
        set_map(store, entry, queries.ids[query], queries.weights[query], directions[query])
        written[entry] = True


@jit
def _follow_one(store, queries, query, entry):
    levels = np.empty(queries.ids.shape[2], np.int64)
    for layer in range(queries.ids.shape[1]):
        num_levels = to_levels(queries.weights[query, layer], levels)
        total = 0
        for place in range(levels.size):
            total += levels[place] * store.columns[layer, queries.ids[query, layer, place], entry]
        queries.products[query, entry] += (1.0 / num_levels) * store.scales[layer, entry] * total
