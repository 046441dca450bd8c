"""Caches of single accesses, as other cache simulators count them: to compare with those, and to show what they hide.

A layer of a mixture of experts activates its experts together; these caches see them one by one, so that one expert can
evict another of the same layer execution before that is used. No policy of this project does so.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from policies.contract import PolicyError
from policies.jit import jit
from policies.steps import count_load
from simulator.bits import lowest, mask_from
from simulator.positions import add, empty_positions, remove_last
from tracer.schema import ModelShape, Pass, TraceError


def accesses(passes: Iterable[Pass], shape: ModelShape) -> NDArray[np.int32]:
    """A run as a stream of single accesses: expert l * E + e for each that a layer execution activates.

    Layer executions are in the order of the run, the experts of one by ascending id. All forwards count.
    """
    parts = [np.flatnonzero(count_load(pass_.expert_ids, shape.num_experts)) for pass_ in passes]
    return np.concatenate([np.empty(0, np.int32), *parts], dtype=np.int32, casting="same_kind")


def by_layer(stream: NDArray[np.int32], shape: ModelShape) -> list[NDArray[np.int32]]:
    """The parts of a stream that belong to each layer, as experts of that layer: what a cache for each layer sees."""
    parts, ends = _split(stream, shape.num_layers, shape.num_experts)
    return np.split(parts, ends[:-1])


@jit
def _split(stream, num_layers, num_experts):
    """Experts of each layer, one layer behind the other, and where each ends."""
    _check(stream, num_layers * num_experts, 1)
    layer_of = np.arange(num_layers * num_experts) // num_experts  # a division for each access would take longer
    counts = np.zeros(num_layers, np.int64)
    for expert in stream:
        counts[layer_of[expert]] += 1
    ends = np.cumsum(counts)
    parts, place = np.empty_like(stream), ends - counts
    for expert in stream:
        layer = layer_of[expert]
        parts[place[layer]] = expert - layer * num_experts
        place[layer] += 1
    return parts, ends


@jit
def _check(stream, num_ids, capacity):
    if capacity < 1:
        raise PolicyError("capacity must be at least 1")
    outside = False
    for expert in stream:
        outside |= np.uint32(expert) >= num_ids  # negative ones too
    if outside:
        raise TraceError("the stream holds an id that is not from 0 to num_ids - 1")


@jit
def lru_hits(stream, num_ids, capacity):
    """Hits of an LRU cache over a stream of ids below `num_ids`.

    The residents are all that was accessed since some moment, so the cache is that moment. When one has to leave, it
    moves past the first access since then that was not followed by another of the same id.

    Args:
        stream: [N] int32.
        num_ids: more than the highest id.
        capacity: slots, at least 1.

    Raises:
        TraceError, PolicyError: an argument is not so.
    """
    _check(stream, num_ids, capacity)
    last = np.zeros(num_ids, np.uint32)  # access of each id, counted from 1
    is_last = np.full(stream.size // 64 + 1, ~np.uint64(0))  # bit of each access, of those before `since` outdated
    since, num_resident, num_hits = np.uint64(1), 0, 0
    for index in range(stream.size):
        expert = np.uint32(stream[index])
        before, last[expert] = np.uint64(last[expert]), index + 1
        if before >= since:
            num_hits += 1
            is_last[before >> np.uint64(6)] &= ~(np.uint64(1) << (before & np.uint64(63)))
        elif num_resident < capacity:
            num_resident += 1
        else:
            word = since >> np.uint64(6)
            found = is_last[word] & mask_from(since & np.uint64(63))
            while found == 0:
                word += np.uint64(1)
                found = is_last[word]
            since = (word << np.uint64(6)) + lowest(found) + np.uint64(1)
    return num_hits


@jit
def lfu_hits(stream, num_ids, capacity):
    """Hits of an LFU cache over a stream of ids below `num_ids`; arguments as of `lru_hits`.

    Who leaves has the lowest count since it entered, and of those was accessed longest ago; its count is forgotten.
    Residents of each count are in a ring, in the order of their last access.
    """
    _check(stream, num_ids, capacity)
    most = np.bincount(stream).max() if stream.size else 0
    head = num_ids + np.arange(most + 1)  # place of the ring of each count, which holds it alone while it is empty
    before, after = np.arange(num_ids + most + 1), np.arange(num_ids + most + 1)
    count = np.zeros(num_ids, np.int64)  # 0 is not resident
    lowest_count, num_resident, num_hits = 1, 0, 0
    for expert in stream:
        if count[expert] > 0:
            num_hits += 1
            before[after[expert]], after[before[expert]] = before[expert], after[expert]
            own = head[count[expert]]
            if lowest_count == count[expert] and after[own] == own:
                lowest_count += 1
        else:
            if num_resident < capacity:
                num_resident += 1
            else:
                own = head[lowest_count]
                leaving = after[own]
                after[own], before[after[leaving]] = after[leaving], own
                count[leaving] = 0
            lowest_count = 1
        count[expert] += 1
        own = head[count[expert]]
        before[expert], after[expert] = before[own], own
        after[before[own]], before[own] = expert, expert
    return num_hits


@jit
def belady_hits(stream, num_ids, capacity):
    """Hits of Belady's cache over a stream of ids below `num_ids`; arguments as of `lru_hits`.

    Who leaves is needed again last; ids that are not needed again leave before all others. What is accessed always
    enters, as in a cache without bypass. Next uses are all different, so the residents are a set of them: an access
    hits if it is in the set.
    """
    _check(stream, num_ids, capacity)
    next_use = np.empty(stream.size, np.uint32)
    following = np.zeros(num_ids, np.uint32)  # accesses count from 1; 0 is never
    for index in range(stream.size - 1, -1, -1):
        expert = np.uint32(stream[index])
        next_use[index], following[expert] = following[expert], index + 1
    needed = empty_positions(stream.size + 1)
    num_resident, num_done, num_hits = 0, 0, 0  # num_done: residents that are not needed again
    for index in range(stream.size):
        position = np.uint64(index + 1)
        if needed.words[position >> np.uint64(6)] >> (position & np.uint64(63)) & np.uint64(1):
            num_hits += 1  # what is behind us is never the last of all, so it may stay in the set
        elif num_resident < capacity:
            num_resident += 1
        elif num_done > 0:
            num_done -= 1
        else:
            remove_last(needed)
        if next_use[index] > 0:
            add(needed, np.uint64(next_use[index]))
        else:
            num_done += 1
    return num_hits
