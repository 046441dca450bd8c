"""FineMoE's searches: the tokens of a forward, layer by layer, against the maps of the store."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.contract import PolicyError
from policies.expert_maps import TOPK, MapStore, direction, squared_length, to_levels, weigh
from policies.jit import jit

_LANES = 64
MOST_TOKENS = 65536  # in one forward; memory is taken when it is used


class Queries(NamedTuple):
    """What each query of this forward has met so far. A query is a token, or the mean of all. Q queries."""

    products: NDArray[np.float64]  # [Q, M] with the maps, over the layers so far
    squares: NDArray[np.float64]  # [Q] squared length of its own trajectory
    ids: NDArray[np.uint16]  # [Q, L, S] its own map, which an online store takes up; Q is 0 where there is none
    weights: NDArray[np.float64]  # [Q, L, S]


def no_queries(store: MapStore, learns: bool) -> Queries:
    """Room for the queries of any forward."""
    num_maps, num_layers, num_known = store.shares.shape
    own = (MOST_TOKENS if learns else 0, num_layers, num_known)
    return Queries(
        products=np.zeros((MOST_TOKENS, num_maps)),
        squares=np.zeros(MOST_TOKENS),
        ids=np.zeros(own, np.uint16),
        weights=np.zeros(own),
    )


@jit
def follow(store, layer, ids, levels, factor, products):
    """Add the products of one token's layer with that layer of every map.

    Products of levels are whole numbers below 2**24, so that 32 bits add them without rounding.

    Args:
        store: MapStore.
        layer: of all.
        ids: [S] experts of the token.
        levels: [S] of them.
        factor: of this token's products: one by the sum of its levels.
        products: [M] so far, changed in place.
    """
    columns, scales = store.columns[layer], store.scales[layer]
    sums = np.zeros(products.size, np.float32)
    last = ids.size - 1
    for place in range(0, ids.size, 4):  # four at a time, so that each sum is fetched and stored a quarter as often
        first, second = columns[ids[place]], columns[ids[min(place + 1, last)]]
        third, fourth = columns[ids[min(place + 2, last)]], columns[ids[min(place + 3, last)]]
        a = np.float32(levels[place])
        b = np.float32(levels[place + 1] if place + 1 <= last else 0)
        c = np.float32(levels[place + 2] if place + 2 <= last else 0)
        d = np.float32(levels[place + 3] if place + 3 <= last else 0)
        for entry in range(sums.size):
            sums[entry] += (a * first[entry] + b * second[entry]) + (c * third[entry] + d * fourth[entry])
    for entry in range(sums.size):
        products[entry] += factor * scales[entry] * sums[entry]


@jit
def compare_sketches(store, sketch, cosines):
    """Cosines, [M], of a sketch of length 1, [16], with those of all maps."""
    cosines[:] = 0.0
    for place in range(0, sketch.size, 4):
        first, second = store.sketches[place], store.sketches[place + 1]
        third, fourth = store.sketches[place + 2], store.sketches[place + 3]
        a, b, c, d = sketch[place], sketch[place + 1], sketch[place + 2], sketch[place + 3]
        for entry in range(cosines.size):
            cosines[entry] += (a * first[entry] + b * second[entry]) + (c * third[entry] + d * fourth[entry])


@jit
def highest(values, factors):
    """Index of the highest product of value and factor, the lowest of equal ones, and that product."""
    best, start_of_best = np.full(_LANES, -np.inf), np.zeros(_LANES, np.int64)
    whole = values.size - values.size % _LANES
    for start in range(0, whole, _LANES):  # lane by lane, which compilers can do many at a time
        for lane in range(_LANES):
            value = values[start + lane] * factors[start + lane]
            is_higher = value > best[lane]
            best[lane] = value if is_higher else best[lane]
            start_of_best[lane] = start if is_higher else start_of_best[lane]
    index, found = -1, -np.inf
    for lane in range(_LANES):
        entry = start_of_best[lane] + lane
        if best[lane] > found or (best[lane] == found and 0 <= entry < index):
            index, found = entry, best[lane]
    for entry in range(whole, values.size):
        value = values[entry] * factors[entry]
        if value > found:
            index, found = entry, value
    return index, found


@jit
def search_trajectories(distribution, store, queries, step, of_mean, entries, similarities):
    """Take the layer's scores into the queries, and find the maps whose layers up to this one are closest to theirs.

    Queries begin anew with the first layer of each forward.

    Source: FineMoE, section 4.3 (trajectory search).
    Differs: shares are compared in 255 levels of the layer's highest possible weight, as compact traces store scores,
    so that products add up exactly. Smaller weights count 0, which of a softmax is a part of the tail.

    Args:
        distribution: of expert_maps.
        store: MapStore, not empty; else nothing is found.
        queries: Queries, changed in place.
        step: the layer's Step.
        of_mean: all tokens make one query, of their mean shares.
        entries: [Q], written.
        similarities: [Q] cosines with them, written.

    Raises:
        PolicyError: more tokens than there is room for.
    """
    num_tokens, layer = step.expert_ids.shape[0], step.layer
    if num_tokens > queries.products.shape[0]:
        raise PolicyError("finemoe compares up to 65536 tokens of a forward, and there are more")
    ids, scores = step.signals.score_ids, step.signals.scores
    if distribution == TOPK:
        ids, scores = step.expert_ids, step.gates
    if layer == 0:
        queries.products[: entries.size] = 0.0
        queries.squares[: entries.size] = 0.0
    weights, levels = np.empty(ids.shape[1], np.float64), np.empty(ids.shape[1], np.int64)
    mean = np.zeros(step.load.size, np.float64)
    for token in range(num_tokens):
        weigh(distribution, scores[token], weights)
        num_levels = to_levels(weights, levels)
        if of_mean:
            factor = 1.0 / (num_levels * num_tokens)
            follow(store, layer, ids[token], levels, factor, queries.products[0])
            for place in range(levels.size):
                mean[ids[token, place]] += factor * levels[place]
            continue
        follow(store, layer, ids[token], levels, 1.0 / num_levels, queries.products[token])
        queries.squares[token] += squared_length(levels, num_levels)
        entries[token], similarities[token] = _closest(store, queries, token, layer)  # while the products are near
        if queries.ids.shape[0] > 0:
            queries.ids[token, layer] = ids[token]
            queries.weights[token, layer] = weights
    if of_mean:
        queries.squares[0] += (mean * mean).sum()
        entries[0], similarities[0] = _closest(store, queries, 0, layer)


@jit
def _closest(store, queries, query, layer):
    size = store.size[0]
    entry, product = highest(queries.products[query, :size], store.reaches[layer, :size])
    return entry, product / np.sqrt(queries.squares[query])


@jit
def directions(step, of_block, of_mean):
    """Sketches of the queries, each of length 1, [Q, 16]; one of zeros stays.

    Args:
        step: a Step of the forward.
        of_block: every token is given the mean of its request's tokens.
        of_mean: all tokens make one query, of their mean.
    """
    sketch, request = step.signals.sketch, step.request
    num_tokens = sketch.shape[0]
    found = np.zeros((1 if of_mean else num_tokens, sketch.shape[1]), np.float64)
    start = 0
    while start < num_tokens:
        end = start + 1
        while end < num_tokens and (of_mean or (of_block and request[end] == request[start])):
            end += 1
        row = found[start]
        for token in range(start, end):
            for place in range(row.size):
                row[place] += sketch[token, place]
        row[:] = direction(row)
        if not of_mean:
            for token in range(start + 1, end):
                found[token] = row
        start = end
    return found


@jit
def similar_sketch(store, directions, query, cosines, last):
    """Map whose input embedding is closest to that of a query, and their cosine.

    Source: FineMoE, section 4.2 (semantic search).

    Args:
        store: MapStore.
        directions: [Q, 16].
        query: which of them.
        cosines: [M], written.
        last: what this function answered for the query before.
    """
    if query > 0 and (directions[query] == directions[query - 1]).all():
        return last  # masks share one embedding
    compare_sketches(store, directions[query], cosines)
    size = store.size[0]
    return highest(cosines[:size], np.ones(size))
