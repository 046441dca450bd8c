"""Prefetches that have not started, for the compiled clock: those of plans not issued yet, and then by priority."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.jit import jit
from tracer.schema import ModelShape

NEVER_NS = int(np.iinfo(np.int64).max)
_SIZE, _LIVE, _ISSUED = range(3)  # of PrefetchQueue.counts: entries, those that are not dropped, prefetches issued
_PLANS, _END = range(2)  # of Pending.counts: plans, entries


class PrefetchQueue(NamedTuple):
    """A heap with the smallest (first, second, number) on top. What a layer's begin drops stays in it for a while."""

    first: NDArray[np.float64]  # [N] priority pairs
    second: NDArray[np.float64]  # [N]
    number: NDArray[np.int64]  # [N] in order of issue
    target: NDArray[np.int64]  # [N] layer * E + expert
    queued: NDArray[np.int64]  # [L, E] how often an expert is queued
    next_number: NDArray[np.int64]  # [L] that was issued next when the layer began: lower ones were dropped then
    counts: NDArray[np.int64]  # [3] by the names above


class Pending(NamedTuple):
    """Prefetches of plans that have acted, until they are issued, in the order of the plans."""

    due_ns: NDArray[np.int64]  # [P] of each plan
    start: NDArray[np.int64]  # [P] its first entry
    stop: NDArray[np.int64]  # [P] the entry after its last
    pairs: NDArray[np.float64]  # [N, 2] priorities of the entries
    target: NDArray[np.int64]  # [N]
    counts: NDArray[np.int64]  # [2] by the names above


def empty_queue(shape: ModelShape) -> PrefetchQueue:
    """Nothing queued, and room for nothing."""
    return PrefetchQueue(
        first=np.empty(0),
        second=np.empty(0),
        number=np.empty(0, np.int64),
        target=np.empty(0, np.int64),
        queued=np.zeros((shape.num_layers, shape.num_experts), np.int64),
        next_number=np.zeros(shape.num_layers, np.int64),
        counts=np.zeros(3, np.int64),
    )


def nothing_pending() -> Pending:
    """No plans, and room for none."""
    return Pending(
        due_ns=np.empty(0, np.int64),
        start=np.empty(0, np.int64),
        stop=np.empty(0, np.int64),
        pairs=np.empty((0, 2)),
        target=np.empty(0, np.int64),
        counts=np.zeros(2, np.int64),
    )


def with_room(queue: PrefetchQueue, pending: Pending) -> tuple[PrefetchQueue, Pending]:
    """Both, with room for all that the plans of one more forward may name: every expert at every gate."""
    num_layers, more = len(queue.queued), len(queue.queued) * queue.queued.size
    num_plans, end = pending.counts.tolist()
    if pending.due_ns.size < num_plans + num_layers:
        plans = {name: _longer(getattr(pending, name), num_plans + num_layers) for name in ("due_ns", "start", "stop")}
        pending = pending._replace(**plans)
    if pending.target.size < end + more:
        first = int(pending.start[:num_plans].min(initial=end))  # what was issued before is done with
        pending.start[:num_plans] -= first
        pending.stop[:num_plans] -= first
        entries = {name: _longer(getattr(pending, name)[first:], end - first + more) for name in ("pairs", "target")}
        pending = pending._replace(**entries)
        pending.counts[_END] = end = end - first
    size = int(queue.counts[_SIZE]) + end + more
    if queue.number.size < size:
        names = ("first", "second", "number", "target")
        queue = queue._replace(**{name: _longer(getattr(queue, name), size) for name in names})
    return queue, pending


def _longer(array: NDArray[Any], size: int) -> NDArray[Any]:
    """A copy with room for more than `size`, so that it is not made each time."""
    longer = np.empty((2 * size, *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer


def most_started(queue: PrefetchQueue, pending: Pending) -> int:
    """Prefetches that may start during the next forward."""
    return int(queue.counts[_LIVE] + pending.counts[_END]) + len(queue.queued) * queue.queued.size


@jit
def postpone(pending, num_experts, due_ns, prefetches, priority):
    """Keep the prefetches of a plan, [N, 2], and their priorities, [N, 2], until they are due."""
    plan, start = pending.counts[_PLANS], pending.counts[_END]
    end = start + prefetches.shape[0]
    pairs, targets = pending.pairs[start:end], pending.target[start:end]
    for row in range(targets.size):
        targets[row] = prefetches[row, 0] * num_experts + prefetches[row, 1]
        pairs[row, 0], pairs[row, 1] = priority[row, 0], priority[row, 1]
    pending.due_ns[plan], pending.start[plan], pending.stop[plan] = due_ns, start, end
    pending.counts[_PLANS], pending.counts[_END] = plan + 1, end


@jit
def next_due(pending):
    """The plan whose prefetches are issued next, the oldest of those due together, and when; (-1, NEVER_NS) if none."""
    found, least_ns, due_ns = -1, NEVER_NS, pending.due_ns
    for plan in range(pending.counts[_PLANS]):
        if due_ns[plan] < least_ns:
            found, least_ns = plan, due_ns[plan]
    return found, least_ns


@jit
def issue(queue, pending, plan):
    """Queue the prefetches of a pending plan; returns how many they are."""
    start, stop = pending.start[plan], pending.stop[plan]
    _push(queue, pending.pairs[start:stop], pending.target[start:stop])
    last, due_ns, starts, stops = pending.counts[_PLANS] - 1, pending.due_ns, pending.start, pending.stop
    for later in range(plan, last):
        due_ns[later], starts[later], stops[later] = due_ns[later + 1], starts[later + 1], stops[later + 1]
    pending.counts[_PLANS] = last
    if last == 0:
        pending.counts[_END] = 0
    return stop - start


@jit
def num_queued(queue):
    """Prefetches that wait for the link."""
    return queue.counts[_LIVE]


@jit
def clear(queue):
    """Drop all; returns how many they were."""
    count = queue.counts[_LIVE]
    if count > 0:
        queue.queued[:] = 0
    queue.counts[_SIZE] = queue.counts[_LIVE] = 0
    return count


@jit
def drop(queue, layer, dropped):
    """Drop those for a layer that begins, and set `dropped`, [E] bool, to their experts; returns how many they were."""
    count, queued = 0, queue.queued[layer]
    for expert in range(dropped.size):
        dropped[expert] = queued[expert] > 0
        count += queued[expert]
        queued[expert] = 0
    queue.next_number[layer] = queue.counts[_ISSUED]
    queue.counts[_LIVE] -= count
    if queue.counts[_SIZE] > 2 * queue.counts[_LIVE]:
        _sweep(queue)
    return count


@jit
def next_target(queue):
    """The next prefetch, as layer * E + expert; there must be one."""
    while _is_dropped(queue, 0):
        _remove_top(queue)
    return queue.target[0]


@jit
def take(queue):
    """Remove the prefetch that `next_target` has found."""
    queue.queued.ravel()[queue.target[0]] -= 1
    queue.counts[_LIVE] -= 1
    _remove_top(queue)


@jit
def _is_dropped(queue, place):
    layer = queue.target[place] // queue.queued.shape[1]
    return queue.number[place] < queue.next_number[layer]


@jit
def _sweep(queue):
    """Remove what was dropped."""
    firsts, seconds, numbers, targets = queue.first, queue.second, queue.number, queue.target
    size = 0
    for place in range(queue.counts[_SIZE]):
        if not _is_dropped(queue, place):
            firsts[size], seconds[size] = firsts[place], seconds[place]
            numbers[size], targets[size] = numbers[place], targets[place]
            size += 1
    queue.counts[_SIZE] = size
    for place in range(size // 2 - 1, -1, -1):
        _sink(queue, place, firsts[place], seconds[place], numbers[place], targets[place])


@jit
def _push(queue, pairs, targets):
    """Put entries into the heap: thousands, at every gate."""
    firsts, seconds, numbers, places = queue.first, queue.second, queue.number, queue.target
    queued, counts = queue.queued.ravel(), queue.counts
    size, issued = counts[_SIZE], counts[_ISSUED]
    for entry in range(targets.size):
        first, second, target, place = pairs[entry, 0], pairs[entry, 1], targets[entry], size + entry
        while place > 0:
            above = (place - 1) >> 1
            # of equal ones the one above was issued before
            if firsts[above] < first or (firsts[above] == first and seconds[above] <= second):
                break
            firsts[place], seconds[place] = firsts[above], seconds[above]
            numbers[place], places[place] = numbers[above], places[above]
            place = above
        firsts[place], seconds[place], numbers[place], places[place] = first, second, issued + entry, target
        queued[target] += 1
    for count in (_SIZE, _LIVE, _ISSUED):
        counts[count] += targets.size


@jit
def _remove_top(queue):
    last = queue.counts[_SIZE] - 1
    queue.counts[_SIZE] = last
    if last > 0:
        _sink(queue, 0, queue.first[last], queue.second[last], queue.number[last], queue.target[last])


@jit
def _sink(queue, place, first, second, number, target):
    """Put an entry at a place, or below it, where it is before all under it."""
    firsts, seconds, numbers, targets = queue.first, queue.second, queue.number, queue.target
    size = queue.counts[_SIZE]
    while 2 * place + 1 < size:
        below = 2 * place + 1
        other = below + 1
        if other < size:
            first_below, second_below, number_below = firsts[below], seconds[below], numbers[below]
            if _is_before(firsts[other], seconds[other], numbers[other], first_below, second_below, number_below):
                below = other
        if _is_before(first, second, number, firsts[below], seconds[below], numbers[below]):
            break
        firsts[place], seconds[place] = firsts[below], seconds[below]
        numbers[place], targets[place] = numbers[below], targets[below]
        place = below
    firsts[place], seconds[place], numbers[place], targets[place] = first, second, number, target


@jit
def _is_before(first, second, number, other_first, other_second, other_number):
    if first != other_first:
        return first < other_first
    if second != other_second:
        return second < other_second
    return number < other_number
