"""Compiled loops over list columns of the decision log, row by row."""

from __future__ import annotations

import numpy as np

from policies.jit import jit

_TRANSFERRED, _KEPT = 1, 2  # what became of an expert in its layer's last execution; 0 is neither


@jit
def decision_words(row_ids, heads, sets, pairs):
    """The int32 words that the decision hash reads of some rows, one row after the other.

    Args:
        row_ids: [N] rows, in order.
        heads: lowest request, forward, layer, each [rows], and offsets of the hits, [rows + 1].
        sets: offsets and values of transfers, CPU experts and retained experts.
        pairs: offsets, layers and experts of the prefetches.
    """
    requests, forwards, layers, hits = heads
    offsets, prefetch_layers, prefetch_experts = pairs
    size = 8 * row_ids.size
    for row in row_ids:
        size += 2 * (offsets[row + 1] - offsets[row])
        for starts, _ in sets:
            size += starts[row + 1] - starts[row]
    words, place = np.empty(size, np.int32), 0
    for row in row_ids:
        words[place] = requests[row]
        words[place + 1] = forwards[row]
        words[place + 2] = layers[row]
        words[place + 3] = hits[row + 1] - hits[row]
        place += 4
        for starts, values in sets:
            ids = values[starts[row] : starts[row + 1]]
            words[place] = ids.size
            _put_ascending(ids, words[place + 1 : place + 1 + ids.size])
            place += 1 + ids.size
        words[place] = offsets[row + 1] - offsets[row]
        place += 1
        for index in range(offsets[row], offsets[row + 1]):
            words[place] = prefetch_layers[index]
            words[place + 1] = prefetch_experts[index]
            place += 2
    return words


@jit
def _put_ascending(ids, target):
    """Write ids in ascending order: most are already, and the others are few."""
    for count in range(ids.size):
        place = count
        while place > 0 and target[place - 1] > ids[count]:
            target[place] = target[place - 1]
            place -= 1
        target[place] = ids[count]


@jit
def follow_transfers(layers, transfers, retained, activated, is_global, fate, num_transfers):
    """What became of transfers: kept by the plan that made them, and activated in the layer's next execution.

    Args:
        layers: [rows] of each execution.
        transfers: offsets and values.
        retained: likewise; layer * E + expert where the pool is global.
        activated: likewise of hits, transfers and CPU experts.
        is_global: one pool for all layers.
        fate: [L, E] int8, of each expert in its layer's last execution; carried from chunk to chunk.
        num_transfers: [L] of each layer's last execution; carried likewise.

    Returns:
        [3, rows]: transfers of the layer's execution before, how many of them were kept and are activated now, and
        how many of the row's own are kept.
    """
    num_experts = fate.shape[1]
    found = np.zeros((3, layers.size), np.int64)
    for row in range(layers.size):
        layer = layers[row]
        of_layer = fate[layer]
        found[0, row] = num_transfers[layer]
        for offsets, values in activated:
            for expert in values[offsets[row] : offsets[row + 1]]:
                found[1, row] += of_layer[expert] == _KEPT
        of_layer[:] = 0
        offsets, values = transfers
        num_transfers[layer] = offsets[row + 1] - offsets[row]
        for expert in values[offsets[row] : offsets[row + 1]]:
            of_layer[expert] = _TRANSFERRED
        first = layer * num_experts if is_global else 0
        offsets, values = retained
        for number in values[offsets[row] : offsets[row + 1]]:
            expert = number - first
            if 0 <= expert < num_experts and of_layer[expert] == _TRANSFERRED:
                of_layer[expert] = _KEPT
                found[2, row] += 1
    return found
