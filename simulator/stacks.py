"""What caches of every size hold at once: in one order of experts where the smaller hold part of the larger."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.jit import jit
from policies.priority import priority
from policies.retention import by_priority, ids_of
from tracer.schema import ModelShape

UNSEEN = -1


class Stack(NamedTuple):
    """The experts of each layer in such an order that a cache of C slots holds the first C of them.

    There is one wherever a cache keeps the C best of what it held and what was activated, by an order of experts that
    no cache size changes: of two caches that differ by a slot the larger then keeps what the smaller does.

    Source: Mattson et al., "Evaluation techniques for storage hierarchies", 1970, for accesses one by one.
    Differs: a layer activates its experts together, so that all of them enter before anything leaves.
    """

    order: NDArray[np.int64]  # [L, E] experts
    depth: NDArray[np.int64]  # [L] of these that were activated before
    place: NDArray[np.int64]  # [L, E] of each expert in the order, UNSEEN if it was never activated
    rank: NDArray[np.int64]  # [L, E] of each expert, distinct; lower is kept before higher
    found: NDArray[np.int64]  # [L, E + 1] counted accesses by place, those of unseen experts last


def empty_stack(shape: ModelShape) -> Stack:
    """Nothing activated yet."""
    size = (shape.num_layers, shape.num_experts)
    order, rank = np.zeros(size, np.int64), np.zeros(size, np.int64)
    found = np.zeros((shape.num_layers, shape.num_experts + 1), np.int64)
    return Stack(order, np.zeros(shape.num_layers, np.int64), np.full(size, UNSEEN), rank, found)


@jit
def by_recency(stack, forward, counted):
    """Run a forward under LRU that touches what a layer activates by ascending id: `lru` with `lru_order=id`."""
    num_layers, num_experts = forward.load.shape
    for layer in range(num_layers):
        ids = ids_of(forward.load[layer])
        _look_up(stack, layer, ids, counted)
        for expert in ids:
            stack.rank[layer, expert] = -forward.number * num_experts - expert
        _restack(stack, layer, ids)


@jit
def by_signal(stack, signal, forward, counted):
    """Run a forward under retention by a priority: `oled` with equal layers that copies every miss.

    What is not activated has priority 0; it is behind what is, then ranked by last activation, then by id.

    Args:
        stack: Stack, changed in place.
        signal: one of `policies.priority`: LOAD, GATE or CONFIDENCE.
        forward: Forward.
        counted: whether its hits count.

    Raises:
        PolicyError: a confidence, or a gate, that is needed is not known.
    """
    num_layers, num_experts = forward.load.shape
    now = -(forward.number + 1) * num_experts
    for layer in range(num_layers):
        load, rank = forward.load[layer], stack.rank[layer]
        ids = ids_of(load)
        _look_up(stack, layer, ids, counted)
        ranked = priority(forward.expert_ids[layer], forward.gates[layer], forward.confidence, signal, load.size)
        best = by_priority(load, ranked)
        for turn in range(best.size):
            rank[best[turn]] = now + turn
        _restack(stack, layer, ids)
        for expert in ids:
            rank[expert] = now + expert


@jit
def by_next_use(stack, future, forward, counted):
    """Run a forward under Belady's rule with bypass: `ideal_min` with `misses=h2d`.

    Args:
        stack: Stack, changed in place.
        future: Future of this run.
        forward: Forward.
        counted: whether its hits count.
    """
    num_layers, num_experts = forward.load.shape
    for layer in range(num_layers):
        ids = ids_of(forward.load[layer])
        _look_up(stack, layer, ids, counted)
        access = future.offsets[forward.number * num_layers + layer]
        for expert in ids:
            stack.rank[layer, expert] = np.int64(future.next_use[access]) * num_experts + expert
            access += 1
        _restack(stack, layer, ids)


@jit
def one_by_one(stack, forward, counted):
    """Run a forward under LRU over single accesses: each expert of a layer in turn, by id, may evict the next one."""
    for layer in range(forward.load.shape[0]):
        order, place = stack.order[layer], stack.place[layer]
        for expert in ids_of(forward.load[layer]):
            at = place[expert]
            stack.found[layer, at] += counted  # UNSEEN is the last column
            if at == UNSEEN:
                at = stack.depth[layer]
                stack.depth[layer] += 1
            for index in range(at, 0, -1):
                order[index] = order[index - 1]
                place[order[index]] = index
            order[0], place[expert] = expert, 0


@jit
def _look_up(stack, layer, ids, counted):
    for expert in ids:
        stack.found[layer, stack.place[layer, expert]] += counted  # UNSEEN is the last column


@jit
def _restack(stack, layer, ids):
    """Put the activated experts into the order of a layer: place C gets the best that the cache of C slots adds.

    That is the best of what was activated and what had the places up to C, less what smaller caches keep. The heap
    holds these, the best of them first.
    """
    order, place, rank = stack.order[layer], stack.place[layer], stack.rank[layer]
    heap, size = np.empty(ids.size, np.int64), 0
    for expert in ids:
        at = size
        size += 1
        while at > 0 and rank[expert] < rank[heap[(at - 1) // 2]]:
            heap[at] = heap[(at - 1) // 2]
            at = (at - 1) // 2
        heap[at] = expert
    num_old, new = stack.depth[layer], 0
    is_activated = np.zeros(order.size, np.bool_)
    is_activated[ids] = True
    while size > 0:
        here = order[new] if new < num_old else heap[0]
        if new >= num_old or is_activated[here]:  # nothing joins the heap
            size -= 1
            here, entering = heap[0], heap[size]
        elif rank[here] < rank[heap[0]]:
            place[here] = new
            new += 1
            continue
        else:
            here, entering = heap[0], here
        at, child = 0, 1
        while child < size:
            if child + 1 < size and rank[heap[child + 1]] < rank[heap[child]]:
                child += 1
            if rank[entering] < rank[heap[child]]:
                break
            heap[at] = heap[child]
            at, child = child, 2 * child + 1
        heap[at] = entering
        order[new], place[here] = here, new
        new += 1
    stack.depth[layer] = max(num_old, new)
