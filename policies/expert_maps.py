"""FineMoE's memory: what the gates of all layers made of single tokens, and which of them a token resembles."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.jit import jit
from policies.retention import by_priority
from tracer.schema import SKETCH_SIZE, Calibration

DISTRIBUTIONS = ("sigmoid_norm", "softmax", "topk_norm")
SOFTMAX, TOPK = DISTRIBUTIONS.index("softmax"), DISTRIBUTIONS.index("topk_norm")
LEVELS = 255
_CERTAIN = 1 - 0.5 / LEVELS  # what a score of 1 counts as where odds are needed: half a level less


class MapStore(NamedTuple):
    """Expert maps, one of a token each. M entries, S experts of a layer; what is not among these has share 0."""

    ids: NDArray[np.uint16]  # [M, L, S] by share descending, then id
    shares: NDArray[np.float64]  # [M, L, S] each row sums to 1
    columns: NDArray[np.uint8]  # [L, E, M] weights in levels, as the search reads them
    scales: NDArray[np.float64]  # [L, M] one by the sum of the levels; 0 where there is no map
    reaches: NDArray[np.float64]  # [L, M] one by the length of the trajectory up to the layer; 0 where there is none
    sketches: NDArray[np.float64]  # [16, M] of the token's input embedding, of length 1
    size: NDArray[np.int64]  # [1] entries in use


def empty_store(num_layers: int, num_experts: int, num_known: int, num_entries: int) -> MapStore:
    """Room for so many maps of `num_known` experts a layer."""
    return MapStore(
        ids=np.zeros((num_entries, num_layers, num_known), np.uint16),
        shares=np.zeros((num_entries, num_layers, num_known)),
        columns=np.zeros((num_layers, num_experts, num_entries), np.uint8),
        scales=np.zeros((num_layers, num_entries)),
        reaches=np.zeros((num_layers, num_entries)),
        sketches=np.zeros((SKETCH_SIZE, num_entries)),
        size=np.zeros(1, np.int64),
    )


@jit
def weigh(distribution, scores, weights):
    """What the scores of one token weigh, relative to 1 as the highest possible; equally much where all are 0.

    Args:
        distribution: index into DISTRIBUTIONS.
        scores: [S] unbiased sigmoid, or gates.
        weights: [S], written.

    Returns:
        Sum of the weights.
    """
    top = 1.0
    for place in range(scores.size):
        weights[place] = scores[place]
    if distribution == SOFTMAX:  # of the logits, which a sigmoid s has as log(s / (1 - s))
        top = 0.0
        for place in range(scores.size):
            score = min(scores[place], _CERTAIN)
            weights[place] = score / (1.0 - score)
            top = max(top, weights[place])
    total = 0.0
    for place in range(scores.size):
        weights[place] = weights[place] / top if top > 0.0 else 0.0
        total += weights[place]
    if total == 0.0:
        weights[:] = 1.0
        total = float(weights.size)
    return total


@jit
def to_levels(weights, levels):
    """Round weights to whole levels, one at least in all. Returns the sum of the levels."""
    total = 0
    for place in range(weights.size):
        levels[place] = int(LEVELS * weights[place] + 0.5)
        total += levels[place]
    if total == 0:
        levels[:] = 1
        total = levels.size
    return total


@jit
def set_map(store, entry, ids, weights, sketch):
    """Write a map over what the entry held.

    Args:
        store: MapStore.
        entry: which map.
        ids: [L, S] distinct experts of each layer.
        weights: [L, S] of them.
        sketch: [16] of length 1.
    """
    for place in range(sketch.size):
        store.sketches[place, entry] = sketch[place]
    levels = np.empty(ids.shape[1], np.int64)
    square = 0.0
    for layer in range(ids.shape[0]):
        columns = store.columns[layer]
        if store.scales[layer, entry] > 0.0:
            for expert in store.ids[entry, layer]:
                columns[expert, entry] = 0
        num_levels = to_levels(weights[layer], levels)
        for place in range(levels.size):
            columns[ids[layer, place], entry] = levels[place]
        square += squared_length(levels, num_levels)
        store.scales[layer, entry] = 1.0 / num_levels
        store.reaches[layer, entry] = 1.0 / np.sqrt(square)
        total, dense = 0.0, np.full(columns.shape[0], -1.0)
        for place in range(levels.size):
            total += weights[layer, place]
            dense[ids[layer, place]] = weights[layer, place]
        for place, expert in enumerate(by_priority(dense >= 0.0, dense)):
            store.ids[entry, layer, place] = expert
            store.shares[entry, layer, place] = dense[expert] / total


@jit
def squared_length(levels, num_levels):
    """Square of the length of one layer's shares, as the search counts them."""
    square = 0
    for level in levels:
        square += level * level
    return square / (num_levels * num_levels)


def stored(calibration: Calibration, distribution: int, top_k: int, num_entries: int, num_experts: int) -> MapStore:
    """A store of the maps of calibration; where gates are wanted, the k highest scores stand for those chosen."""
    map_ids, map_scores = calibration.map_ids[:num_entries], calibration.map_scores[:num_entries]
    if distribution == TOPK and map_ids.shape[2] > top_k:
        order = np.argsort(-map_scores, axis=2, kind="stable")[:, :, :top_k]
        map_ids, map_scores = (np.take_along_axis(array, order, axis=2) for array in (map_ids, map_scores))
    num_maps, num_layers, num_known = map_ids.shape
    store = empty_store(num_layers, num_experts, num_known, num_maps)
    _fill(store, distribution, map_ids, map_scores, calibration.map_sketches[:num_maps])
    return store


@jit
def _fill(store, distribution, ids, scores, sketches):
    weights = np.empty(scores.shape[1:], np.float64)
    for entry in range(ids.shape[0]):
        for layer in range(ids.shape[1]):
            weigh(distribution, scores[entry, layer], weights[layer])
        set_map(store, entry, ids[entry], weights, direction(sketches[entry]))
    store.size[0] = ids.shape[0]


@jit
def direction(sketch):
    """The sketch at length 1; one of zeros, or of unknown numbers, as it is."""
    length = np.sqrt((sketch * sketch).sum())
    return sketch / length if length > 0.0 else sketch.copy()
