"""MoE-Infinity's memory of requests: how often each activated every expert, and which of them a forward resembles."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.contract import MOST_REQUESTS, PolicyError
from policies.exact import more_similar
from policies.jit import jit


class RequestMatrices(NamedTuple):
    """Stored matrices of finished requests, and those of the running ones. N entries."""

    entries: NDArray[np.int32]  # [N, L, E] tokens routed in decode forwards (EAMC)
    columns: NDArray[np.int32]  # [L, E, N] the same, as the search reads it
    norms: NDArray[np.int64]  # [L, N] sums of squares over the layers up to this one
    size: NDArray[np.int64]  # [1] entries in use
    dots: NDArray[np.int64]  # [N] products with the layers of this forward that have run (iEAM)
    names: NDArray[np.int64]  # [256] requests that run, -1 for none
    running: NDArray[np.int64]  # [256, L, E] their matrices so far


def request_matrices(stored: NDArray[np.int64], num_entries: int) -> RequestMatrices:
    """Up to `num_entries` matrices, of which those stored come first, [n, L, E]."""
    stored = stored[:num_entries]
    num_stored, num_layers, num_experts = stored.shape
    entries = np.zeros((num_entries, num_layers, num_experts), np.int32)
    columns = np.zeros((num_layers, num_experts, num_entries), np.int32)
    norms = np.zeros((num_layers, num_entries), np.int64)
    entries[:num_stored] = stored  # alone: memory for the others is taken when it is used
    columns[:, :, :num_stored] = stored.transpose(1, 2, 0)
    norms[:, :num_stored] = (stored.astype(np.int64) ** 2).sum(axis=2).cumsum(axis=1).T
    return RequestMatrices(
        entries=entries,
        columns=columns,
        norms=norms,
        size=np.array([num_stored]),
        dots=np.zeros(num_entries, np.int64),
        names=np.full(MOST_REQUESTS, -1),
        running=np.zeros((MOST_REQUESTS, num_layers, num_experts), np.int64),
    )


@jit
def see(matrices, step):
    """Take the layer into the matrix of this forward, which begins anew with each forward's first layer."""
    dots, loads, columns, size = matrices.dots, step.load, matrices.columns[step.layer], matrices.size[0]
    if step.layer == 0:
        dots[:] = 0
    for expert in range(loads.size):
        load = loads[expert]
        if load > 0:
            column = columns[expert]
            for entry in range(size):
                dots[entry] += load * column[entry]


@jit
def nearest(matrices, layer):
    """Entry that this forward resembles most by cosine, the lowest of equal ones; -1 where there is none.

    Args:
        matrices: RequestMatrices.
        layer: entries count up to this one.
    """
    return _nearest(matrices.dots, matrices.norms[layer], matrices.size[0])


@jit
def _nearest(dots, norms, size):
    best = -1
    for entry in range(size):
        if best < 0 or more_similar(dots[entry], norms[entry], dots[best], norms[best]):
            best = entry
    return best


@jit
def count_requests(matrices, step):
    """Count the decode tokens of the layer for their requests, and take up requests that are new.

    Returns:
        Whether one is, at the first layer of its first forward.

    Raises:
        PolicyError: more requests in a pass than there is room for.
    """
    names, place, is_new = matrices.names, -1, False
    requests, blocks, expert_ids, running = step.request, step.block, step.expert_ids, matrices.running
    for token in range(requests.size):
        if place < 0 or names[place] != requests[token]:
            place, free = _places(names, requests[token])
            if place < 0:
                if free < 0:
                    raise PolicyError("moe_infinity follows up to 256 requests in a pass, and there are more")
                place, is_new = free, True
                names[place] = requests[token]
        if blocks[token] >= 0:
            for k in range(expert_ids.shape[1]):
                running[place, step.layer, expert_ids[token, k]] += 1
    return is_new


@jit
def _places(names, request):
    free = -1
    for place in range(names.size):
        if names[place] == request:
            return place, free
        if names[place] < 0 and free < 0:
            free = place
    return -1, free


@jit
def end_requests(matrices, step, learns, current):
    """Forget the requests that are not in this forward, after storing their matrices if the policy learns.

    The lowest request comes first. When all entries are in use, the one that resembles the new matrix most makes room.

    Returns:
        The entry `current`, or -1 if another stands there now.
    """
    while True:
        place = _ended(matrices.names, step.request)
        if place < 0:
            return current
        matrix = matrices.running[place]
        if learns and matrix.any() and _store(matrices, matrix) == current:
            current = -1
        matrices.names[place] = -1
        matrix[:] = 0


@jit
def _ended(names, request):
    lowest = -1
    for place in range(names.size):
        if names[place] >= 0 and (lowest < 0 or names[place] < names[lowest]):
            goes_on = False
            for other in request:
                goes_on |= other == names[place]
            if not goes_on:
                lowest = place
    return lowest


@jit
def _store(matrices, matrix):
    entry = matrices.size[0]
    if entry < matrices.entries.shape[0]:
        matrices.size[0] += 1
    else:
        entry = _closest(matrices, matrix)
    norm, entries, columns, norms = 0, matrices.entries, matrices.columns, matrices.norms
    for layer in range(matrix.shape[0]):
        for expert in range(matrix.shape[1]):
            count = matrix[layer, expert]
            norm += count * count
            entries[entry, layer, expert] = columns[layer, expert, entry] = count
        norms[layer, entry] = norm
    return entry


@jit
def _closest(matrices, matrix):
    entries = matrices.entries
    dots = np.zeros(entries.shape[0], np.int64)
    for entry in range(dots.size):
        dot = 0
        for layer in range(matrix.shape[0]):
            for expert in range(matrix.shape[1]):
                dot += matrix[layer, expert] * entries[entry, layer, expert]
        dots[entry] = dot
    return _nearest(dots, matrices.norms[-1], dots.size)
